//! What an engine has to exchange for a plan, collective by collective.
//!
//! Every tensor goes from the layout that it is made in to those that it is needed in: partial results are reduced over
//! all their axes at once, axes move between dimensions, and what is needed whole is gathered, in this order. The cost
//! model and our own engine may take several smaller steps along single axes for the same thing; an engine like XLA
//! takes these.

use crate::shardings::{partial, settled};
use serde::Serialize;
use shardwright_cost::{Layout, Placement};
use shardwright_graph::{Graph, TensorType};
use shardwright_machine::{AxisId, AxisSet, Mesh};
use shardwright_space::{Config, OpShapes, halos, place};

/// One exchange between devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Collective {
    /// `all-reduce`, `reduce-scatter`, `all-to-all`, `all-gather`; `collective-permute` for what windows reach for.
    pub kind: &'static str,
    /// The axes that span a group.
    pub axes: Vec<String>,
    /// Bytes of the larger side on one device.
    pub bytes: u64,
    /// What is exchanged.
    pub tensor: String,
}

/// The collectives of a step whose ops have these configs.
pub fn collectives(graph: &Graph, mesh: &Mesh, configs: &[Config]) -> Vec<Collective> {
    let shapes: Vec<OpShapes> = graph.op_ids().map(|op| OpShapes::of(graph, op)).collect();
    let places = place(graph, &shapes, configs, mesh);
    let names = |axes: AxisSet| axes.iter().map(|axis| mesh.axis(axis).name.clone()).collect::<Vec<_>>();
    let mut found = Vec::new();
    for (tensor, placed) in graph.tensors.iter().zip(&places.tensors) {
        let mut add = |kind, axes: AxisSet, bytes| {
            if !axes.is_empty() {
                found.push(Collective { kind, axes: names(axes), bytes, tensor: tensor.name.clone() });
            }
        };
        let (Some(home), Some(settled)) = (placed.home, settled(placed)) else { continue };
        between(&home, &settled, &tensor.ty, mesh, &mut add);
        let mut wanted: Vec<&Layout> = Vec::new();
        for layout in placed.fetches.iter().flat_map(|fetch| &fetch.layouts) {
            if *layout != settled && !partial(layout) && !wanted.contains(&layout) {
                between(&settled, layout, &tensor.ty, mesh, &mut add);
                wanted.push(layout);
            }
        }
    }
    for (op, shapes) in graph.op_ids().zip(&shapes) {
        for (i, &input) in graph.node(op).inputs.iter().enumerate() {
            for halo in halos(shapes, i, &places.configs[op.index()], mesh) {
                for bytes in [halo.down.0, halo.up.0].into_iter().filter(|&bytes| bytes > 0) {
                    let (axes, tensor) = (names(halo.axes), graph.tensor(input).name.clone());
                    found.push(Collective { kind: "collective-permute", axes, bytes, tensor });
                }
            }
        }
    }
    found
}

/// What one device holds of a tensor.
fn local_bytes(layout: &Layout, ty: &TensorType, mesh: &Mesh) -> u64 {
    let sharded = layout.axes_where(|p| matches!(p, Placement::Shard(_)));
    ty.bytes() / u64::from(mesh.group_size(sharded)).max(1)
}

/// The collectives that take a tensor from one layout to another.
fn between(
    from: &Layout,
    to: &Layout,
    ty: &TensorType,
    mesh: &Mesh,
    add: &mut impl FnMut(&'static str, AxisSet, u64),
) {
    let axes = || (0..mesh.len() as u32).map(AxisId);
    let shards = |layout: &Layout, axis| matches!(layout.get(axis), Placement::Shard(_));
    let summed = from.axes_where(|p| matches!(p, Placement::Partial(_)));
    let scattered = summed.iter().any(|axis| shards(to, axis));
    add(if scattered { "reduce-scatter" } else { "all-reduce" }, summed, local_bytes(from, ty, mesh));
    // What is there of every device's own is kept from here on: that costs nothing.
    let mut now = *from;
    for axis in axes().filter(|&axis| !shards(from, axis)) {
        now = now.with(axis, to.get(axis));
    }
    let moved: AxisSet = axes()
        .filter(|&axis| shards(from, axis) && shards(to, axis) && from.get(axis) != to.get(axis))
        .collect();
    add("all-to-all", moved, local_bytes(&now, ty, mesh));
    let gathered: AxisSet = axes().filter(|&axis| shards(from, axis) && !shards(to, axis)).collect();
    add("all-gather", gathered, local_bytes(to, ty, mesh));
}
