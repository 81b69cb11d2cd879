//! Variables that are alike: the same ops on the same shapes, wired among themselves in the same way.
//!
//! Deep models repeat: a transformer of a hundred blocks has a few dozen different layers. Variables that are alike have
//! the same choices at the same costs, and their tensors lie in the same layouts, so all of that is worked out
//! once for each class.

use crate::{groups::Groups, transfer::Transfer};
use rustc_hash::FxHashMap;
use shardwright_graph::{Graph, Phase, TensorId};

/// A partition of the variables into classes of those alike.
pub struct Alike {
    /// Per variable: its class.
    pub of: Vec<u32>,
    /// Per class: its first variable.
    pub first: Vec<u32>,
}

impl Alike {
    /// The classes of the variables; `kinds` says of every op which of the graph's distinct ops it is, `inside` which
    /// transfers each variable has to itself, and `more` adds whatever else tells variables apart.
    pub fn new<K: std::hash::Hash + Eq>(
        graph: &Graph,
        variables: &Groups,
        kinds: &[u32],
        inside: &[Vec<&Transfer>],
        more: impl Fn(usize) -> K,
    ) -> Self {
        let mut classes: FxHashMap<(Vec<u32>, K), u32> = FxHashMap::default();
        let mut first = Vec::new();
        let of = (0..variables.splits.len())
            .map(|v| {
                let key = (signature(graph, variables, kinds, v, &inside[v]), more(v));
                *classes.entry(key).or_insert_with(|| {
                    first.push(v as u32);
                    first.len() as u32 - 1
                })
            })
            .collect();
        Self { of, first }
    }

    /// What every variable has, from what its class has.
    pub fn share<T: Clone>(&self, per_class: &[T]) -> Vec<T> {
        self.of.iter().map(|&class| per_class[class as usize].clone()).collect()
    }
}

/// Everything that a variable's choices depend on, with its tensors numbered as they appear.
fn signature(
    graph: &Graph,
    variables: &Groups,
    kinds: &[u32],
    variable: usize,
    inside: &[&Transfer],
) -> Vec<u32> {
    let split = &variables.splits[variable];
    let member = |op: shardwright_graph::OpId| variables.place[op.index()].1;
    let mut seen: FxHashMap<TensorId, u32> = FxHashMap::default();
    let mut signature = vec![split.ops.len() as u32, member(split.forward())];
    for &op in &split.ops {
        let node = graph.node(op);
        signature.extend([kinds[op.index()], u32::from(node.phase == Phase::Update)]);
        // How many inputs and outputs there are is the kind's.
        for &t in node.inputs.iter().chain(&node.outputs) {
            let next = seen.len() as u32;
            signature.push(*seen.entry(t).or_insert(next));
        }
    }
    for Transfer { from, to, .. } in inside {
        for end in [from, to] {
            signature.extend([member(end.op), end.slot, u32::from(end.made)]);
        }
    }
    signature
}
