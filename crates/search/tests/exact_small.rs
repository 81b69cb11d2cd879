//! `exact` against plain enumeration on small random networks with memory.

use proptest::prelude::*;
use shardwright_search::exact::Exact;
use shardwright_search::{
    Control, FORBIDDEN, Interval, Network, NetworkBuilder, Outcome, Solver, StopReason, VarId,
};

/// A random network, as plain data.
#[derive(Clone, Debug)]
struct Sketch {
    variables: Vec<(Vec<i64>, Vec<i64>, u64, u64)>,
    edges: Vec<(usize, usize, Vec<i64>)>,
    limit: Option<i64>,
}

impl Sketch {
    fn build(&self) -> Network {
        let mut b = NetworkBuilder::new();
        for (costs, usages, lo, hi) in &self.variables {
            b.variable(costs, usages, Interval { lo: *lo, hi: *hi }).unwrap();
        }
        for (u, v, costs) in &self.edges {
            b.edge(VarId(*u as u32), VarId(*v as u32), costs).unwrap();
        }
        if let Some(limit) = self.limit {
            b.usage_limit(limit).unwrap();
        }
        b.build().unwrap()
    }
}

fn cost() -> impl Strategy<Value = i64> {
    prop_oneof![2 => Just(0), 6 => 0..30i64, 1 => Just(FORBIDDEN)]
}

fn sketch() -> impl Strategy<Value = Sketch> {
    (2usize..8, prop::option::weighted(0.8, 3i64..25)).prop_flat_map(|(n, limit)| {
        let variable = (1usize..5).prop_flat_map(|k| {
            (prop::collection::vec(cost(), k), prop::collection::vec(0..10i64, k), 0..6u64, 0..8u64)
        });
        prop::collection::vec(variable, n).prop_flat_map(move |variables| {
            let sizes: Vec<usize> = variables.iter().map(|v| v.0.len()).collect();
            let edge = (0..n, 0..n).prop_flat_map(move |(u, v)| {
                let cells = sizes[u] * sizes[v];
                let identity: Vec<i64> =
                    (0..cells).map(|i| if i / sizes[v] == i % sizes[v] { 0 } else { FORBIDDEN }).collect();
                let table = prop_oneof![
                    5 => prop::collection::vec(cost(), cells),
                    1 => Just(identity),
                ];
                (Just(u), Just(v), table)
            });
            let variables = variables.clone();
            prop::collection::vec(edge, 0..n * 2).prop_map(move |edges| Sketch {
                variables: variables.clone(),
                edges,
                limit,
            })
        })
    })
}

/// The least cost of a feasible assignment, by enumeration.
fn enumerate(network: &Network) -> Option<i64> {
    let n = network.variables();
    let mut x = vec![0u32; n];
    let mut best = None;
    loop {
        let e = network.evaluate(&x).unwrap();
        if e.feasible() && best.is_none_or(|b| e.cost < b) {
            best = Some(e.cost);
        }
        let mut v = 0;
        loop {
            if v == n {
                return best.map(|b| i64::try_from(b).unwrap());
            }
            x[v] += 1;
            if (x[v] as usize) < network.choices(VarId(v as u32)) {
                break;
            }
            x[v] = 0;
            v += 1;
        }
    }
}

fn consistent(network: &Network, out: &Outcome, best: Option<i64>) {
    match best {
        None => assert_eq!(out.cost, None),
        Some(best) => {
            assert!(out.bound <= best, "bound {} above the optimum {best}", out.bound);
            assert_ne!(out.stop_reason, StopReason::Infeasible);
            if let (Some(cost), Some(choice)) = (out.cost, &out.choice) {
                let e = network.evaluate(choice).unwrap();
                assert!(e.feasible());
                assert_eq!(e.cost, i128::from(cost));
                assert!(cost >= best);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn the_optimum_is_found_and_proved(sketch in sketch()) {
        let network = sketch.build();
        let mut control = Control::new();
        control.threads = 1;
        let out = Exact.solve(&network, &control);
        let best = enumerate(&network);
        consistent(&network, &out, best);
        match best {
            None => prop_assert_eq!(out.stop_reason, StopReason::Infeasible),
            Some(best) => {
                prop_assert_eq!(out.cost, Some(best));
                prop_assert_eq!(out.stop_reason, StopReason::Optimal);
            }
        }
    }

    #[test]
    fn costs_and_bounds_bracket_the_optimum_whenever_it_stops(sketch in sketch(), rounds in 0..3u64) {
        let network = sketch.build();
        let mut control = Control::new().iteration_limit(rounds);
        control.threads = 1;
        let out = Exact.solve(&network, &control);
        consistent(&network, &out, enumerate(&network));
    }
}

/// A ring of variables with pairwise costs and a tight limit, too large for the reductions alone.
fn ring(limit: i64) -> Network {
    let mut b = NetworkBuilder::new();
    let n = 40u64;
    for i in 0..n {
        let costs: Vec<i64> = (0..4).map(|c| ((i * 37 + c * 101) % 53) as i64).collect();
        let usages: Vec<i64> = (0..4).map(|c| ((i * 13 + c * 29) % 17) as i64).collect();
        b.variable(&costs, &usages, Interval { lo: i, hi: i + 9 }).unwrap();
    }
    for i in 0..n {
        for step in [1, 3, 7] {
            let table: Vec<i64> = (0..16).map(|k| ((i * 7 + k * 19 + step * 5) % 31) as i64).collect();
            b.edge(VarId(i as u32), VarId(((i + step) % n) as u32), &table).unwrap();
        }
    }
    b.usage_limit(limit).unwrap();
    b.build().unwrap()
}

#[test]
fn a_run_with_an_iteration_limit_is_the_same_on_any_number_of_threads() {
    let network = ring(40);
    let run = |threads| {
        let mut control = Control::new().iteration_limit(3);
        control.threads = threads;
        control.seed = 7;
        let out = Exact.solve(&network, &control);
        let log: Vec<_> = out.log.iter().map(|l| (l.iteration, l.best, l.bound)).collect();
        (out.choice, out.bound, log)
    };
    let one = run(1);
    assert!(one.0.is_some());
    assert_eq!(one, run(4));
    assert_eq!(one, run(2));
}

#[test]
fn a_limit_that_cannot_be_kept_is_proved_so_and_the_least_overflow_reported() {
    let network = ring(10);
    let out = Exact.solve(&network, &Control::new());
    assert_eq!((out.stop_reason, out.choice), (StopReason::Infeasible, None));
    let (overflow, choice) = out.least_overflow.unwrap();
    let e = network.evaluate(&choice).unwrap();
    assert_eq!((e.forbidden, e.overflow), (0, overflow));
    assert!(overflow > 0);
}

#[test]
fn the_least_overflow_of_a_small_network_is_exact() {
    let mut b = NetworkBuilder::new();
    let both = Interval { lo: 0, hi: 1 };
    let u = b.variable(&[0, 9, 0], &[9, 5, 7], both).unwrap();
    let v = b.variable(&[0, 9], &[9, 6], both).unwrap();
    // The least usages exclude each other: the next best is 7 + 6.
    b.edge(u, v, &[0, 0, 0, FORBIDDEN, 0, 0]).unwrap();
    b.usage_limit(8).unwrap();
    let out = Exact.solve(&b.build().unwrap(), &Control::new());
    assert_eq!(out.stop_reason, StopReason::Infeasible);
    assert_eq!(out.least_overflow, Some((5, vec![2, 1])));
}

#[test]
fn contradictory_prohibitions_are_proved_infeasible() {
    let mut b = NetworkBuilder::new();
    let v: Vec<_> = (0..3).map(|_| b.variable(&[0, 0], &[], Interval::default()).unwrap()).collect();
    // Three variables, two values, all different.
    for (x, y) in [(0, 1), (1, 2), (0, 2)] {
        b.edge(v[x], v[y], &[FORBIDDEN, 0, 0, FORBIDDEN]).unwrap();
    }
    let out = Exact.solve(&b.build().unwrap(), &Control::new());
    assert_eq!((out.stop_reason, out.choice), (StopReason::Infeasible, None));
}
