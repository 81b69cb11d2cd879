//! Which ops run once per micro-batch, and which once per step.

use super::cuts::Cuts;
use crate::{
    graph::{Consumers, Graph, Node, Phase},
    ids::{OpId, TensorId},
    rule::Reduction,
};

/// When an op runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Section {
    /// Once, before the body.
    First,
    /// Once per micro-batch.
    Body,
    /// Once, after the body.
    Last,
}

/// Whether a sum over samples passes through an op as a sum.
pub(super) fn is_linear(node: &Node) -> bool {
    let operator = node.op.operator();
    operator.is_sum() || operator.is_view()
}

/// The section of every op.
pub(super) fn sections(graph: &Graph, cuts: &Cuts) -> Vec<Section> {
    let differentiated = !graph.gradients.is_empty();
    let consumers = graph.consumers();
    // Whether an op that runs over samples depends on the op.
    let mut reaches = vec![false; graph.ops.len()];
    for op in graph.op_ids().rev() {
        let readers = graph.node(op).outputs.iter().flat_map(|&t| consumers.of(t));
        reaches[op.index()] =
            readers.into_iter().any(|r| cuts.factors[r.index()].is_some() || reaches[r.index()]);
    }
    let mut data: Vec<bool> = graph.tensor_ids().map(|t| cuts.dims[t.index()].is_some()).collect();
    let mut sections = Vec::with_capacity(graph.ops.len());
    for op in graph.op_ids() {
        let node = graph.node(op);
        let from_data = node.inputs.iter().any(|t| data[t.index()]);
        let after = |t: &TensorId| {
            graph.tensor(*t).producer.is_some_and(|p: OpId| sections[p.index()] == Section::Last)
        };
        let own_layer = graph.layers[node.layer.index()].forward == op;
        let section = if cuts.factors[op.index()].is_some() {
            Section::Body
        } else if node.phase == Phase::Update
            || node.inputs.iter().any(after)
            || (!reaches[op.index()] && adds_two_gradients(graph, &consumers, cuts, op))
        {
            Section::Last
        } else if !from_data {
            if node.phase == Phase::Forward && own_layer { Section::First } else { Section::Body }
        } else if reaches[op.index()] || (differentiated && node.phase == Phase::Forward) || is_linear(node) {
            Section::Body
        } else {
            Section::Last
        };
        for t in &node.outputs {
            data[t.index()] |= from_data;
        }
        sections.push(section);
    }
    sections
}

/// Whether an op adds the two gradients of a weight that two ops read, such as a tied embedding's. Each is accumulated before
/// they are added, so that both may stay partial sums until the end of the step. A weight that more ops read, such as a
/// recurrent cell's, would need as many sums: its gradients are added in every micro-batch.
fn adds_two_gradients(graph: &Graph, consumers: &Consumers, cuts: &Cuts, op: OpId) -> bool {
    let node = graph.node(op);
    let added = |reader: &OpId| graph.node(*reader).op.operator().is_sum();
    let sums_samples = |&t: &TensorId| {
        let Some(producer) = graph.tensor(t).producer else { return false };
        let output = graph.node(producer).outputs.iter().position(|&made| made == t);
        let (Some(factor), Some(output)) = (cuts.factors[producer.index()], output) else { return false };
        let map = &cuts.rules[producer.index()].outputs[output];
        !map.has(factor) && map.reduction == Reduction::Sum
    };
    node.phase == Phase::Backward
        && node.op.operator().is_sum()
        && node.inputs.len() == 2
        && node.inputs[0] != node.inputs[1]
        && node.inputs.iter().all(|t| sums_samples(t) && consumers.of(*t).iter().all(|&reader| reader == op))
        && !node.outputs.iter().any(|&t| consumers.of(t).iter().any(added))
}
