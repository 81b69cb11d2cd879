//! Classes of equal variables: the same ops on the same shapes, connected in the same way.
//!
//! Deep models repeat: a transformer of a hundred blocks has a few dozen different layers. Variables of a class have
//! the same choices at the same costs, and their tensors the same layouts. So these are computed once per class.

use crate::variables::Variables;
use rustc_hash::FxHashMap;
use shardwright_graph::{Graph, Phase, TensorId};
use shardwright_space::Transfer;

/// A partition of the variables into classes of equal ones.
pub struct VariableClasses {
    /// Per variable: its class.
    pub of: Vec<u32>,
    /// Per class: its first variable.
    pub first: Vec<u32>,
}

impl VariableClasses {
    /// The classes of the variables. `kinds[op]` is the class of an op, `inside[v]` lists the transfers within a
    /// variable, and `more` adds further parts of the key.
    pub fn new<K: std::hash::Hash + Eq>(
        graph: &Graph,
        variables: &Variables,
        kinds: &[u32],
        inside: &[Vec<&Transfer>],
        more: impl Fn(usize) -> K,
    ) -> Self {
        let mut classes: FxHashMap<(Vec<u32>, K), u32> = FxHashMap::default();
        let mut first = Vec::new();
        let of = (0..variables.members.len())
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

    /// Copies the values of classes to their variables.
    pub fn share<T: Clone>(&self, per_class: &[T]) -> Vec<T> {
        self.of.iter().map(|&class| per_class[class as usize].clone()).collect()
    }
}

/// A variable's class key: everything that its choices depend on, with tensors numbered in order of appearance.
fn signature(
    graph: &Graph,
    variables: &Variables,
    kinds: &[u32],
    variable: usize,
    inside: &[&Transfer],
) -> Vec<u32> {
    let split = &variables.members[variable];
    let member = |op: shardwright_graph::OpId| variables.index[op.index()].1;
    let mut seen: FxHashMap<TensorId, u32> = FxHashMap::default();
    let mut signature = vec![split.ops.len() as u32, member(split.forward())];
    for &op in &split.ops {
        let node = graph.node(op);
        signature.extend([kinds[op.index()], u32::from(node.phase == Phase::Update), graph.runs(op)]);
        // An op's kind fixes the numbers of its inputs and outputs.
        for &t in node.inputs.iter().chain(&node.outputs) {
            let next = seen.len() as u32;
            signature.push(*seen.entry(t).or_insert(next));
        }
    }
    for Transfer { from, to, .. } in inside {
        for end in [from, to] {
            signature.extend([member(end.op), end.port, u32::from(end.reduced)]);
        }
    }
    signature
}
