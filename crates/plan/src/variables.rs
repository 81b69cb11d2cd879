//! Variables: the ops that share a choice. Tied, these are the ops of a layer; untied, single ops.

use shardwright_graph::{Graph, OpId};
use shardwright_space::{LayerSplit, OpShapes};

/// A partition of a graph's ops into variables. The config of a variable's leading op decides the configs of the
/// others.
#[derive(Clone)]
pub struct Variables {
    /// Per variable: its ops.
    pub members: Vec<LayerSplit>,
    /// Per op: its variable, and its position among the variable's ops.
    pub index: Vec<(u32, u32)>,
}

impl Variables {
    /// One variable per layer of the graph, in its order; forward ops lead.
    pub fn layers(graph: &Graph, shapes: &[OpShapes]) -> Self {
        let mut ops: Vec<Vec<OpId>> = vec![Vec::new(); graph.layers.len()];
        let mut index = Vec::with_capacity(graph.ops.len());
        for id in graph.op_ids() {
            let layer = graph.node(id).layer;
            index.push((layer.0, ops[layer.index()].len() as u32));
            ops[layer.index()].push(id);
        }
        let splits = graph
            .layers
            .iter()
            .zip(ops)
            .map(|(layer, ops)| LayerSplit::new(graph, shapes, ops, layer.forward))
            .collect();
        Self { members: splits, index }
    }

    /// One variable per op.
    pub fn ops(graph: &Graph, shapes: &[OpShapes]) -> Self {
        let split = |op: OpId| LayerSplit::new(graph, shapes, vec![op], op);
        Self {
            members: graph.op_ids().map(split).collect(),
            index: (0..graph.ops.len() as u32).map(|variable| (variable, 0)).collect(),
        }
    }

    /// The variable of an op.
    pub fn variable_of(&self, op: OpId) -> usize {
        self.index[op.index()].0 as usize
    }
}
