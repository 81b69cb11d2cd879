//! What an engine has to exchange for a plan, collective by collective.

use crate::shardings::ExportError;
use crate::ways::Known;
use serde::Serialize;
use shardwright_cost::Relayouts;
use shardwright_graph::Graph;
use shardwright_machine::AxisSet;
use shardwright_space::{Config, halos};

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
}

/// The collectives of a step whose ops have these configs, on the mesh of `relayouts`. Data that is read in several
/// layouts is brought from the first to the others, as engines with one layout per value have to.
///
/// # Errors
/// Where the configs cannot be said in shardings.
pub fn collectives(
    graph: &Graph,
    relayouts: &Relayouts,
    configs: &[Config],
) -> Result<Vec<Collective>, ExportError> {
    let known = Known::of(graph, relayouts, configs)?;
    let mut found = Vec::new();
    let mut add = |kind, axes: AxisSet, bytes, tensor: &str| {
        let axes = axes.iter().map(|axis| known.mesh.axis(axis).name.clone()).collect();
        found.push(Collective { kind, axes, bytes, tensor: tensor.into() });
    };
    for (tensor, ways) in graph.tensors.iter().zip(&known.ways) {
        for &(kind, axes, bytes) in &ways.reduced {
            add(kind, axes, bytes, &tensor.name);
        }
        for leg in ways.wanted.iter().flat_map(|wanted| &wanted.legs) {
            if let Some(kind) = leg.kind {
                add(kind, leg.axes, leg.bytes, &tensor.name);
            }
        }
    }
    for op in graph.op_ids() {
        for (i, &input) in graph.node(op).inputs.iter().enumerate() {
            for halo in halos(&known.shapes[op.index()], i, &known.places.configs[op.index()], known.mesh) {
                for bytes in [halo.down.0, halo.up.0].into_iter().filter(|&bytes| bytes > 0) {
                    add("collective-permute", halo.axes, bytes, &graph.tensor(input).name);
                }
            }
        }
    }
    Ok(found)
}
