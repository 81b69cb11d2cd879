//! The layers of a graph: which ops belong together, and where each op is.

use shardwright_graph::{Graph, OpId};
use shardwright_space::{LayerSplit, OpShapes};

/// All layers of a graph that have ops.
pub struct Layers {
    /// One per layer of the graph, in its order.
    pub splits: Vec<LayerSplit>,
    /// Per op: its layer and its position in it.
    pub place: Vec<(u32, u32)>,
}

impl Layers {
    /// Groups a graph's ops by layer.
    pub fn of(graph: &Graph, shapes: &[OpShapes]) -> Self {
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
}
