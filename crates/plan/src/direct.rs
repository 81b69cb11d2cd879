//! Bytes by OptCNN's counting: every missing element is sent directly from a device that holds it.
//!
//! OptCNN (Jia, Lin, Qi, Aiken; ICML 2018) reports its traffic this way. Between two layers, a device receives the part
//! of a tensor that it needs and does not hold, once for each partial sum that it lacks. Weights go through a parameter
//! server. Every device that holds a copy sends its gradient there and receives the new weights: `2·copies·bytes`.
//! Collectives save nothing by this count. The traffic of the running program is [`crate::predicted_traffic`]; this
//! count is for comparing with the paper.

use crate::context::Context;
use rustc_hash::FxHashMap;
use shardwright_cost::{Arrangement, Layout, Placement};
use shardwright_graph::{
    Block, Phase,
    block::{elements, intersection},
};
use shardwright_machine::{DeviceId, Mesh};
use shardwright_space::{Assignment, Endpoint, Transfer, completion, halos};

/// Bytes that all devices together receive per step, by OptCNN's counting.
pub fn optcnn_bytes(context: &Context<'_>, assignment: &Assignment) -> u64 {
    let (graph, mesh) = (context.graph, context.mesh());
    let mut sum = 0u64;
    for (op, config) in graph.op_ids().zip(&assignment.configs) {
        let (shapes, runs) = (&context.shapes[op.index()], u64::from(graph.runs(op)));
        for input in 0..shapes.inputs.len() {
            let exchanged = halos(shapes, input, config, mesh);
            let bytes = exchanged.iter().map(|halo| halo.traffic.total().0.saturating_mul(runs));
            sum = bytes.fold(sum, u64::saturating_add);
        }
        let path = completion(shapes, config, mesh).map(|own| own.path(shapes, &context.resharder));
        if let Some(Ok(path)) = path {
            sum = sum.saturating_add(path.traffic.total().0.saturating_mul(runs));
        }
    }
    // Deep models repeat the same transfers.
    let mut known: FxHashMap<(&[u64], Layout, Layout, bool), u64> = FxHashMap::default();
    for transfer in &context.transfers.pairs {
        let Transfer { tensor, from, to } = transfer;
        let layout = |end: &Endpoint| end.layout(&context.shapes, assignment.config(end.op), mesh);
        let tensor = graph.tensor(*tensor);
        let updates = graph.node(to.op).phase == Phase::Update;
        let key = (&tensor.ty.shape[..], layout(from), layout(to), updates);
        let count = *known.entry(key).or_insert_with(|| {
            let (shape, from, to, updates) = key;
            if updates && contributions(mesh, &from) > 1 {
                through_server(mesh, shape, &from)
            } else {
                sent(mesh, shape, &from, &to)
            }
        });
        let runs = u64::from(graph.runs(to.op));
        sum = sum.saturating_add(count.saturating_mul(tensor.ty.dtype.bytes()).saturating_mul(runs));
    }
    sum
}

/// Number of partial sums that make up a value.
fn contributions(mesh: &Mesh, layout: &Layout) -> u64 {
    u64::from(mesh.group_size(layout.axes_where(|placement| matches!(placement, Placement::Partial(_)))))
}

/// Elements through the parameter server: every gradient sent there, and the same number of weights sent back.
fn through_server(mesh: &Mesh, shape: &[u64], gradient: &Layout) -> u64 {
    let held = blocks(mesh, shape, gradient).map(|block| volume(&block));
    held.fold(0u64, u64::saturating_add).saturating_mul(2)
}

/// Elements that all devices need of a tensor in the layout `to` and do not hold in `from`.
fn sent(mesh: &Mesh, shape: &[u64], from: &Layout, to: &Layout) -> u64 {
    let parts = contributions(mesh, from);
    let pairs = blocks(mesh, shape, to).zip(blocks(mesh, shape, from));
    let lacking = pairs.map(|(needed, own)| {
        let common = needed.as_ref().zip(own.as_ref()).and_then(|(needed, own)| intersection(needed, own));
        volume(&needed).saturating_mul(parts).saturating_sub(volume(&common))
    });
    lacking.fold(0, u64::saturating_add)
}

/// The block of every device; none for a device that holds nothing.
fn blocks(mesh: &Mesh, shape: &[u64], layout: &Layout) -> impl Iterator<Item = Option<Block>> {
    let at = Arrangement::canonical(layout);
    (0..mesh.devices()).map(move |device| at.device_block(mesh, DeviceId(device), shape))
}

/// Number of elements, 0 for no block.
fn volume(block: &Option<Block>) -> u64 {
    block.as_ref().map_or(0, elements)
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardwright_cost::Reduction;
    use shardwright_machine::builtin;

    #[test]
    fn blocks_are_sent_to_those_who_lack_them() {
        let machine = builtin("flat:4").unwrap();
        let mesh = machine.mesh();
        let layout = |placements: [Placement; 2]| Layout::new(&placements);
        let (rows, columns) = (Placement::Shard(0), Placement::Shard(1));
        let shape = [8, 4];
        let quarters = layout([rows, rows]);
        let all = layout([Placement::Replicated; 2]);
        // Every device lacks three quarters of the tensor.
        assert_eq!(sent(mesh, &shape, &quarters, &all), 4 * 24);
        assert_eq!(sent(mesh, &shape, &all, &quarters), 0);
        // Rows by the first axis stay; of its half, half of each device's columns lie with its neighbour.
        assert_eq!(sent(mesh, &shape, &quarters, &layout([rows, columns])), 4 * 4);
        // Two partial sums of each half: every reader lacks one.
        let partial = layout([rows, Placement::Partial(Reduction::Sum)]);
        assert_eq!(sent(mesh, &shape, &partial, &layout([rows, Placement::Replicated])), 4 * 16);
        // Only the first device has it; the others lack all.
        let one = layout([Placement::Absent(0), Placement::Absent(0)]);
        assert_eq!(sent(mesh, &shape, &one, &all), 3 * 32);
        assert_eq!(sent(mesh, &shape, &all, &one), 0);
        assert_eq!(through_server(mesh, &shape, &partial), 2 * 4 * 16);
    }
}
