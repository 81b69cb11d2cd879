//! Which ops of a step work on weights and state, and which on no samples at all.

use shardwright_graph::{FactorKind, Graph, Phase, Role, TensorId};
use smallvec::SmallVec;

/// Which ops work on what is stored in shards: on nothing but weights and state, as slices of stacked weights do, or for
/// nothing but what the next step starts from. What is made of constants alone, such as masks, does neither.
pub(crate) fn works_on_stored(graph: &Graph) -> Vec<bool> {
    let mut given = vec![false; graph.tensors.len()];
    let mut only_stored = vec![false; graph.tensors.len()];
    let mut works = updates(graph);
    for t in graph.tensor_ids().filter(|t| graph.tensor(*t).producer.is_none()) {
        let role = graph.tensor(t).role;
        given[t.index()] = role != Role::Constant;
        only_stored[t.index()] = matches!(role, Role::Parameter | Role::OptimizerState | Role::Constant);
    }
    for op in graph.op_ids() {
        let node = graph.node(op);
        let varies = node.inputs.iter().any(|t| given[t.index()]);
        let stored = node.inputs.iter().all(|t| only_stored[t.index()]);
        for t in &node.outputs {
            (given[t.index()], only_stored[t.index()]) = (varies, stored);
        }
        works[op.index()] = varies && (stored || works[op.index()]);
    }
    works
}

/// Which ops only serve what the next step starts from: backward passes and updates. Imported steps do not say which of
/// their ops those are, but nobody else reads what they make.
fn updates(graph: &Graph) -> Vec<bool> {
    let consumers = graph.consumers();
    let mut carried = vec![false; graph.tensors.len()];
    graph.carries.iter().for_each(|carry| carried[carry.new.index()] = true);
    let mut updates = vec![false; graph.ops.len()];
    for op in graph.op_ids().collect::<Vec<_>>().into_iter().rev() {
        let node = graph.node(op);
        let served = |t: &TensorId| {
            let readers = consumers.of(*t);
            readers.iter().all(|reader| updates[reader.index()])
                && (carried[t.index()] || !readers.is_empty())
        };
        updates[op.index()] = node.phase != Phase::Forward || node.outputs.iter().all(served);
    }
    updates
}

/// Which tensors are weights, or are computed from weights alone: casts, slices of stacked weights, transposes.
pub(crate) fn weight_tensors(graph: &Graph) -> Vec<bool> {
    let mut weights = vec![false; graph.tensors.len()];
    let mut fixed = vec![false; graph.tensors.len()];
    for t in graph.tensor_ids().filter(|t| graph.tensor(*t).producer.is_none()) {
        let role = graph.tensor(t).role;
        weights[t.index()] = role == Role::Parameter;
        fixed[t.index()] = matches!(role, Role::Parameter | Role::Constant);
    }
    for op in graph.op_ids() {
        let node = graph.node(op);
        let known = node.inputs.iter().all(|t| fixed[t.index()]);
        let weight = known && node.inputs.iter().any(|t| weights[t.index()]);
        for t in &node.outputs {
            (fixed[t.index()], weights[t.index()]) = (known, weight);
        }
    }
    weights
}

/// Which ops no sample reaches: masks, random bits, casts and slices of weights.
pub(crate) fn sampleless(graph: &Graph, kinds: &[SmallVec<[FactorKind; 6]>]) -> Vec<bool> {
    let mut reached = vec![false; graph.tensors.len()];
    let mut free = vec![false; graph.ops.len()];
    for op in graph.op_ids() {
        let node = graph.node(op);
        let sampled = kinds[op.index()].contains(&FactorKind::Sample);
        let reaches = sampled || node.inputs.iter().any(|t| reached[t.index()]);
        node.outputs.iter().for_each(|t| reached[t.index()] = reaches);
        free[op.index()] = !reaches;
    }
    free
}
