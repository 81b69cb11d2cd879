//! Which ops choose together: those of a layer (tied), or every op for itself (untied).

use shardwright_graph::{Graph, OpId};
use shardwright_space::{LayerSplit, OpShapes};

/// A partition of a graph's ops. In each part one op leads, and its config decides those of the others.
#[derive(Clone)]
pub struct Groups {
    /// The parts.
    pub splits: Vec<LayerSplit>,
    /// Per op: its part and its position in it.
    pub place: Vec<(u32, u32)>,
}

impl Groups {
    /// One part per layer of the graph, in its order; forward ops lead.
    pub fn layers(graph: &Graph, shapes: &[OpShapes]) -> Self {
        let mut ops: Vec<Vec<OpId>> = vec![Vec::new(); graph.layers.len()];
        let mut place = Vec::with_capacity(graph.ops.len());
        for id in graph.op_ids() {
            let layer = graph.node(id).layer;
            place.push((layer.0, ops[layer.index()].len() as u32));
            ops[layer.index()].push(id);
        }
        let splits = graph
            .layers
            .iter()
            .zip(ops)
            .map(|(layer, ops)| LayerSplit::new(graph, shapes, ops, layer.forward))
            .collect();
        Self { splits, place }
    }

    /// One part per op.
    pub fn ops(graph: &Graph, shapes: &[OpShapes]) -> Self {
        let split = |op: OpId| LayerSplit::new(graph, shapes, vec![op], op);
        Self {
            splits: graph.op_ids().map(split).collect(),
            place: (0..graph.ops.len() as u32).map(|part| (part, 0)).collect(),
        }
    }

    /// The part that an op belongs to.
    pub fn part(&self, op: OpId) -> usize {
        self.place[op.index()].0 as usize
    }
}
