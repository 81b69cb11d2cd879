//! The bytes that the lowered program sends, predicted by the cost model without lowering.

use crate::{context::Context, error::PlanError};
use rustc_hash::FxHashMap;
use shardwright_cost::{Layout, TensorShape, Traffic};
use shardwright_space::{Assignment, Sharing, assign_layouts, completion, halos};

/// The bytes that a step sends over each axis under an assignment: halo exchanges, results that ops
/// complete, and every tensor's reshards. All
/// readers of a tensor share a fetch; of a weight, the readers of one pass do.
///
/// # Errors
/// Where a tensor cannot be laid out.
pub fn predicted_traffic(context: &Context<'_>, assignment: &Assignment) -> Result<Traffic, PlanError> {
    let (graph, shapes, mesh) = (context.graph, &context.shapes[..], context.mesh());
    let mut traffic = Traffic::default();
    for (op, config) in graph.op_ids().zip(&assignment.configs) {
        let (shapes, runs) = (&shapes[op.index()], graph.runs(op));
        for i in 0..shapes.inputs.len() {
            halos(shapes, i, config, mesh).iter().for_each(|halo| traffic.merge(&halo.traffic.times(runs)));
        }
        if let Some(own) = completion(shapes, config, mesh) {
            let name = || graph.tensor(graph.node(op).outputs[own.output]).name.clone();
            let path = own.path(shapes, &context.resharder);
            let path = path.map_err(|source| PlanError::Tensor { tensor: name(), source })?;
            traffic.merge(&path.traffic.times(runs));
        }
    }
    let layouts = assign_layouts(graph, shapes, &context.transfers, assignment, mesh, Sharing::AcrossLayers);
    // Deep models repeat equal fetches.
    let mut known: FxHashMap<(TensorShape, Layout, Vec<Layout>), Traffic> = FxHashMap::default();
    for (tensor, layout) in graph.tensors.iter().zip(layouts.tensors) {
        let Some(stored) = layout.stored.filter(|_| !layout.delivered) else { continue };
        let fail = |source| PlanError::Tensor { tensor: tensor.name.clone(), source };
        let shape = TensorShape::new(&tensor.ty.shape, tensor.ty.dtype.bytes() as u32).map_err(fail)?;
        // A tensor of the body moves once per micro-batch, unless only ops after the body read it.
        let producer = tensor.producer.map(|op| graph.node(op));
        let moves = producer.is_some_and(|node| node.repeated && !node.op.operator().accumulates());
        for fetch in layout.fetches {
            let repeated = fetch.pass.map_or(moves, |pass| pass.repeated);
            let runs = if repeated { graph.micro_batches.get() } else { 1 };
            let key = (shape, stored, fetch.layouts);
            if let Some(sent) = known.get(&key) {
                traffic.merge(&sent.times(runs));
                continue;
            }
            let resharder = &context.resharder;
            let tree = resharder.reshard_many(&resharder.tensor(shape), &stored, &key.2).map_err(fail)?;
            let sent = tree.traffic();
            traffic.merge(&sent.times(runs));
            known.insert(key, sent);
        }
    }
    Ok(traffic)
}
