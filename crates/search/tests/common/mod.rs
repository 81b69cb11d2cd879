//! Helpers of the integration tests: random networks, solvers and round trips.
#![allow(dead_code, reason = "each test binary uses its own part")]

use proptest::prelude::*;
use shardwright_search::format::write_iopddl;
use shardwright_search::optcnn::OptCnn;
use shardwright_search::pase::Pase;
use shardwright_search::{FORBIDDEN, Interval, Network, NetworkBuilder, Solver, VarId};

/// A network in the form that proptest shrinks well.
#[derive(Clone, Debug)]
pub struct Recipe {
    pub nodes: Vec<Node>,
    pub edges: Vec<(usize, usize, Vec<i64>)>,
    /// In thousandths of the largest possible peak; `None`: no limit.
    pub limit: Option<u64>,
}

#[derive(Clone, Debug)]
pub struct Node {
    pub costs: Vec<i64>,
    pub usages: Vec<i64>,
    pub interval: (u64, u64),
}

impl Recipe {
    pub fn build(&self) -> Network {
        let mut builder = NetworkBuilder::new();
        for node in &self.nodes {
            let interval = Interval { lo: node.interval.0, hi: node.interval.1 };
            builder.variable(&node.costs, &node.usages, interval).unwrap();
        }
        for (a, b, table) in &self.edges {
            builder.edge(VarId(*a as u32), VarId(*b as u32), table).unwrap();
        }
        if let Some(share) = self.limit {
            let most: i64 = self.nodes.iter().map(|node| node.usages.iter().max().unwrap()).sum();
            builder.usage_limit(most * share as i64 / 1000).unwrap();
        }
        builder.build().unwrap()
    }
}

/// Costs: mostly small, with ties, sometimes forbidden, sometimes large.
fn cost() -> impl Strategy<Value = i64> {
    prop_oneof![10 => 0..12i64, 3 => 0..1_000_000i64, 1 => Just(FORBIDDEN), 1 => Just(0)]
}

/// Up to `nodes` nodes with up to `choices` choices each; edges may be parallel, reversed and loops.
pub fn recipes(nodes: usize, choices: usize, memory: bool) -> impl Strategy<Value = Recipe> {
    let node = (1..=choices).prop_flat_map(|count| {
        let costs = proptest::collection::vec(cost(), count);
        let usages = proptest::collection::vec(0..20i64, count);
        (costs, usages, (0..6u64, 0..7u64))
    });
    let node = node.prop_map(|(costs, usages, interval)| Node { costs, usages, interval });
    let limit = if memory { (0..700u64).prop_map(Some).boxed() } else { Just(None).boxed() };
    (proptest::collection::vec(node, 1..=nodes), limit).prop_flat_map(|(nodes, limit)| {
        let sizes: Vec<usize> = nodes.iter().map(|node| node.costs.len()).collect();
        let count = sizes.len();
        let edge = (0..count, 0..count).prop_flat_map(move |(a, b)| {
            (Just(a), Just(b), proptest::collection::vec(cost(), sizes[a] * sizes[b]))
        });
        let edges = proptest::collection::vec(edge, 0..=2 * count);
        edges.prop_map(move |edges| Recipe { nodes: nodes.clone(), edges, limit })
    })
}

/// The solvers of the papers. OptCNN comes three times: its kernel is enumerated, enumerated after leaf elimination, and
/// solved by tables.
pub const PAPERS: [&dyn Solver; 4] = [
    &Pase,
    &OptCnn { most_strategies: 1 << 20 },
    &OptCnn { most_strategies: 8 },
    &OptCnn { most_strategies: 0 },
];

/// The contest's JSON of a network.
pub fn written(network: &Network) -> Vec<u8> {
    let mut text = Vec::new();
    write_iopddl(network, "name", &mut text).unwrap();
    text
}

/// Checks that two networks are equal.
pub fn assert_same(a: &Network, b: &Network) {
    assert_eq!((a.variables(), a.usage_limit()), (b.variables(), b.usage_limit()));
    for v in (0..a.variables()).map(|v| VarId(v as u32)) {
        assert_eq!((a.unary(v), a.usage(v), a.interval(v)), (b.unary(v), b.usage(v), b.interval(v)));
    }
    assert_eq!(a.edges().len(), b.edges().len());
    for (x, y) in a.edges().iter().zip(b.edges()) {
        assert_eq!((x.u, x.v, a.table(x.table)), (y.u, y.v, b.table(y.table)));
    }
}
