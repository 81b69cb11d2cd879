//! Blocks and their senders: the meaning of every instruction that moves data.
//!
//! The blocks that devices hold before and after a step fully describe it. An engine may use any algorithm that gives
//! the same blocks, for example rings or trees.

use crate::program::{Instruction, ParallelGraph, Value, Work};
use shardwright_cost::{Action, Placement, Reduction};
use shardwright_graph::{Block, block::intersection};
use shardwright_machine::{AxisSet, DeviceId, Mesh};

/// A block that a device receives from a device, possibly itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The device that holds it.
    pub from: DeviceId,
    /// In positions of the whole tensor.
    pub block: Block,
}

/// The devices that agree with a device on all axes except these, in order.
pub fn group(mesh: &Mesh, axes: AxisSet, device: DeviceId) -> Vec<DeviceId> {
    let own: u32 = axes.iter().map(|axis| mesh.digit(device, axis) * mesh.stride(axis)).sum();
    let mut members = vec![DeviceId(device.0 - own)];
    for axis in axes.iter() {
        let (size, stride) = (mesh.axis(axis).size, mesh.stride(axis));
        members =
            members.iter().flat_map(|m| (0..size).map(move |digit| DeviceId(m.0 + digit * stride))).collect();
    }
    members
}

/// The members of a device's group, nearest first: itself, then those that differ on inner axes only.
fn nearest_first(mesh: &Mesh, axes: AxisSet, device: DeviceId) -> Vec<DeviceId> {
    let mut members = group(mesh, axes, device);
    let differs =
        |m: DeviceId| axes.iter().filter(move |&axis| mesh.digit(m, axis) != mesh.digit(device, axis));
    members.sort_by_key(|&m| {
        let outermost = differs(m).next().map_or(u32::MAX, |axis| axis.0);
        (std::cmp::Reverse(outermost), differs(m).count(), m)
    });
    members
}

impl ParallelGraph {
    /// The pieces of a device's block of `writes[which]`, for an instruction that moves data; empty if the device has
    /// no such block.
    ///
    /// If the instruction reduces, the pieces are the members' partial results of the whole block, in order of the
    /// members. Otherwise they are disjoint and cover the block, each from the nearest device that holds it.
    pub fn pieces(&self, instruction: &Instruction, which: usize, device: DeviceId) -> Vec<Piece> {
        let (axes, reduces) = match &instruction.work {
            Work::Compute { .. } => return Vec::new(),
            Work::Reshard(step) => (step.axes, step.reduction.is_some()),
            Work::HaloExchange { axes, .. } => (*axes, false),
        };
        let (before, after) = (self.value(instruction.reads[which]), self.value(instruction.writes[which]));
        let Some(wanted) = after.block(&self.mesh, device) else { return Vec::new() };
        let members =
            if reduces { group(&self.mesh, axes, device) } else { nearest_first(&self.mesh, axes, device) };
        let mut pieces: Vec<Piece> = Vec::new();
        for from in members {
            let Some(held) = before.block(&self.mesh, from) else { continue };
            let Some(block) = intersection(&held, &wanted) else { continue };
            // Blocks within a group are equal or disjoint, so the first holder of a block is enough.
            if reduces || pieces.iter().all(|piece| piece.block != block) {
                pieces.push(Piece { from, block });
            }
        }
        pieces
    }
}

/// The pieces of a whole tensor, and their reduction. Each block occurs once for every device whose partial result
/// counts. Pieces of equal blocks are combined by the reduction, if there is one.
pub fn assemble(mesh: &Mesh, value: &Value) -> (Vec<Piece>, Option<Reduction>) {
    let layout = value.at.layout();
    let repeated = layout.axes_where(|p| p == Placement::Replicated);
    let cut = value.cuts.iter().fold(AxisSet::EMPTY, |axes, cut| axes.union(cut.axes));
    let first = |device: &DeviceId| repeated.minus(cut).iter().all(|axis| mesh.digit(*device, axis) == 0);
    let pieces = (0..mesh.devices()).map(DeviceId).filter(first);
    let pieces =
        pieces.filter_map(|from| value.block(mesh, from).map(|block| Piece { from, block })).collect();
    (pieces, value.partial().map(|(kind, _)| kind))
}

/// Whether an action reduces partial results.
pub(crate) fn reduces(action: Action) -> bool {
    matches!(action, Action::AllReduce | Action::ReduceScatter | Action::Reduce)
}
