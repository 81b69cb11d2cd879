//! Facts that depend on the graph, the machine and the costs, but on no mesh: contexts on all meshes share them, and each is
//! computed once, when it is first needed.

use crate::fusion::FusedOp;
use crate::{
    compute_lower_bound::LowerBounds, memory::NetworkCharge, variable_classes::VariableClasses,
    variables::Variables,
};
use rustc_hash::FxHashMap;
use shardwright_graph::{FactorKind, Graph, Op, OpId, TensorId, factor_kinds};
use shardwright_space::OpShapes;
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// The kind of each factor of an op's rule, in the rule's order.
pub type FactorKinds = SmallVec<[FactorKind; 6]>;

/// The shared facts.
#[derive(Default)]
pub(crate) struct GraphFacts {
    op_classes: OnceLock<Arc<[u32]>>,
    layer_classes: OnceLock<Vec<u32>>,
    factor_kinds: OnceLock<Vec<FactorKinds>>,
    /// The memory that the network counts.
    pub charges: OnceLock<Vec<(NetworkCharge, Range<u32>)>>,
    /// Bounds that hold on all axes.
    pub bounds: LowerBounds,
}

impl GraphFacts {
    /// Per op: the index of its class among the graph's distinct ops.
    pub fn op_classes(&self, graph: &Graph, shapes: &[OpShapes], fused: &[Option<FusedOp>]) -> &Arc<[u32]> {
        self.op_classes.get_or_init(|| {
            let mut classes: FxHashMap<(&Op, &OpShapes, Option<&FusedOp>), u32> = FxHashMap::default();
            let class = |op: OpId| {
                let next = classes.len() as u32;
                let part = fused.get(op.index()).and_then(Option::as_ref);
                *classes.entry((&graph.node(op).op, &shapes[op.index()], part)).or_insert(next)
            };
            graph.op_ids().map(class).collect()
        })
    }

    /// Per layer: its class. The layers of a class have the same configs under the same config of the forward op.
    pub fn layer_classes(
        &self,
        graph: &Graph,
        shapes: &[OpShapes],
        fused: &[Option<FusedOp>],
        layers: &Variables,
    ) -> &[u32] {
        self.layer_classes.get_or_init(|| {
            let none = vec![Vec::new(); layers.members.len()];
            // In micro-batches a weight may be read through a view, whose layout is the weight's.
            let weights = |layer: usize| {
                let mut seen: Vec<TensorId> = Vec::new();
                let number = |t: TensorId| {
                    seen.iter().position(|other| *other == t).unwrap_or_else(|| {
                        seen.push(t);
                        seen.len() - 1
                    })
                };
                let ops = layers.members[layer].ops.iter().filter(|_| graph.micro_batches.get() > 1);
                let read = ops.flat_map(|&op| graph.node(op).inputs.iter().map(|&t| graph.held_weight(t)));
                read.map(number).collect::<Vec<usize>>()
            };
            VariableClasses::new(graph, layers, self.op_classes(graph, shapes, fused), &none, weights).of
        })
    }

    /// Per op: the kinds of its factors.
    pub fn factor_kinds(&self, graph: &Graph) -> &[FactorKinds] {
        self.factor_kinds.get_or_init(|| factor_kinds(graph))
    }
}
