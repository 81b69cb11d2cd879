//! The bytes that the lowered program will send, by the cost model: nothing is lowered for it.

use crate::error::PlanError;
use rustc_hash::FxHashMap;
use shardwright_cost::{Layout, Relayouts, TensorShape, Traffic, spread_traffic};
use shardwright_graph::Graph;
use shardwright_space::{Config, OpShapes, halos, place};

/// The bytes that a step sends over each axis when its ops have these configs: what windows reach for, and every
/// tensor on its way to the layouts that it is needed in. All readers share what is fetched; of a weight, those of
/// one pass do.
///
/// # Errors
/// Where a tensor cannot be laid out.
pub fn predicted_traffic(
    graph: &Graph,
    shapes: &[OpShapes],
    relayouts: &Relayouts,
    configs: &[Config],
) -> Result<Traffic, PlanError> {
    let mesh = relayouts.comm().mesh();
    let mut traffic = Traffic::default();
    for (shapes, config) in shapes.iter().zip(configs) {
        for i in 0..shapes.inputs.len() {
            halos(shapes, i, config, mesh).iter().for_each(|halo| traffic.merge(&halo.traffic));
        }
    }
    // Deep models are full of tensors that do the same.
    let mut known: FxHashMap<(TensorShape, Layout, Vec<Layout>), Traffic> = FxHashMap::default();
    for (tensor, placed) in graph.tensors.iter().zip(place(graph, shapes, configs, mesh).tensors) {
        let Some(home) = placed.home.filter(|_| !placed.delivered) else { continue };
        let fail = |source| PlanError::Tensor { tensor: tensor.name.clone(), source };
        let shape = TensorShape::new(&tensor.ty.shape, tensor.ty.dtype.bytes() as u32).map_err(fail)?;
        for fetch in placed.fetches {
            let key = (shape, home, fetch.layouts);
            if let Some(sent) = known.get(&key) {
                traffic.merge(sent);
                continue;
            }
            let branches = relayouts.spread(&relayouts.tensor(shape), &home, &key.2).map_err(fail)?;
            let sent = spread_traffic(&branches);
            traffic.merge(&sent);
            known.insert(key, sent);
        }
    }
    Ok(traffic)
}
