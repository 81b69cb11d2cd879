//! What the page tells of every op beside its config: where it belongs, what kinds of loops are split, and how its
//! first result lies on the devices.

use serde::Serialize;
use shardwright_cost::Placement;
use shardwright_graph::{FactorKind, OpId, Phase, factor_kinds};
use shardwright_machine::AxisId;
use shardwright_plan::{Context, OpTimes, PlanError};
use shardwright_space::{Assignment, Config, output_layout};

/// An op, beyond its config.
#[derive(Clone, Debug, Serialize)]
pub struct OpFacts {
    /// Its layer, as a position in the plan's layers.
    pub layer: u32,
    /// Forward, backward or update.
    pub phase: Phase,
    /// Floating-point operations, all devices together, nothing repeated.
    pub flops: u64,
    /// Floating-point operations of one device, work that devices repeat included.
    pub device_flops: u64,
    /// Bytes that one device reads and writes, were every kernel perfect.
    pub device_bytes: u64,
    /// What is split: `sample`, `attribute`, `parameter`, `reduction`; empty where devices repeat each other's work.
    pub split: Vec<&'static str>,
    /// The whole first result: its type and its sizes.
    pub dtype: &'static str,
    /// Its sizes.
    pub shape: Vec<u64>,
    /// Into how many parts each dimension is cut.
    pub parts: Vec<u64>,
    /// How many devices hold the same part.
    pub copies: u64,
    /// How many partial results have to be added up.
    pub partial: u64,
    /// The ops that make what it reads, ascending.
    pub after: Vec<u32>,
}

fn name(kind: FactorKind) -> &'static str {
    match kind {
        FactorKind::Sample => "sample",
        FactorKind::Attribute => "attribute",
        FactorKind::Parameter => "parameter",
        FactorKind::Reduction => "reduction",
    }
}

impl OpFacts {
    /// Those of every op under its config.
    ///
    /// # Errors
    /// Where the context's costs are of another device.
    pub fn all(context: &Context<'_>, assignment: &Assignment) -> Result<Vec<Self>, PlanError> {
        let (kinds, times) = (factor_kinds(context.graph), context.times()?);
        let ops = context.graph.op_ids().zip(&assignment.configs).zip(&kinds);
        Ok(ops.map(|((op, config), kinds)| Self::of(context, &times, op, config, kinds)).collect())
    }

    fn of(
        context: &Context<'_>,
        times: &OpTimes<'_>,
        op: OpId,
        config: &Config,
        kinds: &[FactorKind],
    ) -> Self {
        let (graph, mesh) = (context.graph, context.mesh());
        let (node, shapes) = (graph.node(op), &context.shapes[op.index()]);
        let parts = config.parts(&shapes.rule, mesh);
        let mut split: Vec<FactorKind> =
            parts.iter().zip(kinds).filter(|(parts, _)| **parts > 1).map(|(_, kind)| *kind).collect();
        split.sort_unstable();
        split.dedup();
        let ty = &graph.tensor(node.outputs[0]).ty;
        let layout = output_layout(shapes, 0, config, mesh);
        let (workload, _) = times.estimate(op, config);
        let mut facts = Self {
            layer: node.layer.0,
            phase: node.phase,
            flops: graph.flops(op),
            device_flops: workload.flops,
            device_bytes: workload.bytes,
            split: split.into_iter().map(name).collect(),
            dtype: ty.dtype.name(),
            shape: ty.shape.iter().copied().collect(),
            parts: vec![1; ty.shape.rank()],
            copies: 1,
            partial: 1,
            after: node.inputs.iter().filter_map(|&t| Some(graph.tensor(t).producer?.0)).collect(),
        };
        for (at, axis) in mesh.axes().iter().enumerate() {
            let size = u64::from(axis.size);
            match layout.get(AxisId(at as u32)) {
                Placement::Shard(dim) => facts.parts[usize::from(dim)] *= size,
                Placement::Replicated => facts.copies *= size,
                Placement::Partial(_) => facts.partial *= size,
                Placement::Absent(_) => {}
            }
        }
        facts.after.sort_unstable();
        facts.after.dedup();
        facts
    }
}
