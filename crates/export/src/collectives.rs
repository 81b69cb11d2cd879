//! What an engine has to exchange for a plan, collective by collective.

use crate::shardings::ExportError;
use crate::tensor_paths::PlanLayouts;
use serde::Serialize;
use shardwright_cost::Resharder;
use shardwright_graph::{Graph, Tensor};
use shardwright_machine::AxisSet;
use shardwright_space::{Assignment, completion, halos};

/// One exchange between devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Collective {
    /// `all-reduce`, `reduce-scatter`, `all-to-all`, `all-gather`, `collective-permute` (also for what windows reach for).
    pub kind: &'static str,
    /// The axes that span a group.
    pub axes: Vec<String>,
    /// Bytes of the larger side on one device.
    pub bytes: u64,
    /// What is exchanged.
    pub tensor: String,
    /// Bytes of one element.
    pub element_bytes: u64,
}

/// The collectives of a step whose ops have these configs, on the mesh of `resharder`. Data that is read in several
/// layouts is brought from the first to the others, as engines with one layout per value have to.
///
/// # Errors
/// Where the configs cannot be said in shardings.
pub fn collectives(
    graph: &Graph,
    resharder: &Resharder,
    assignment: &Assignment,
) -> Result<Vec<Collective>, ExportError> {
    let known = PlanLayouts::of(graph, resharder, assignment)?;
    let mut found = Vec::new();
    let mut add = |kind, axes: AxisSet, bytes, tensor: &Tensor| {
        let axes = axes.iter().map(|axis| known.mesh.axis(axis).name.clone()).collect();
        let element_bytes = tensor.ty.dtype.bytes();
        found.push(Collective { kind, axes, bytes, tensor: tensor.name.clone(), element_bytes });
    };
    for (tensor, paths) in graph.tensors.iter().zip(&known.paths) {
        for &(kind, axes, bytes) in &paths.reduced {
            add(kind, axes, bytes, tensor);
        }
        for step in paths.wanted.iter().flat_map(|wanted| &wanted.steps) {
            if let Some(kind) = step.kind {
                add(kind, step.axes, step.bytes, tensor);
            }
        }
    }
    for op in graph.op_ids() {
        let (shapes, config) = (&known.shapes[op.index()], &known.layouts.configs[op.index()]);
        if let Some(own) = completion(shapes, config, known.mesh) {
            let tensor = graph.tensor(graph.node(op).outputs[own.output]);
            let steps = own.path(shapes, resharder).map_or(Vec::new(), |path| path.steps);
            for step in steps.iter().filter(|step| step.action.collective().is_some()) {
                add(step.action.name(), step.axes, step.message.0, tensor);
            }
        }
        for (i, &input) in graph.node(op).inputs.iter().enumerate() {
            for halo in halos(shapes, i, config, known.mesh) {
                for bytes in [halo.down.0, halo.up.0].into_iter().filter(|&bytes| bytes > 0) {
                    add("collective-permute", halo.axes, bytes, graph.tensor(input));
                }
            }
        }
    }
    Ok(found)
}
