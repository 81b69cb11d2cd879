//! Which ops run once per micro-batch, and which once per step.

use super::cuts::Cuts;
use crate::{
    graph::{Graph, Node, Phase},
    ids::{OpId, TensorId},
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
        } else if node.phase == Phase::Update || node.inputs.iter().any(after) {
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
