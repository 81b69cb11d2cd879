//! One step of a reshard: its action, its axes and its cost.

use crate::collective::{Collective, Comm, Traffic};
use crate::layout::{Arrangement, AxisList, MAX_DIMS};
use shardwright_machine::{AxisId, AxisSet, Bytes, DeviceId, Mesh, Seconds};
use std::collections::BTreeMap;

/// What a step does along its axes. The arrangements before and after determine the dimensions: axes leave a
/// dimension, and join it, at its minor end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Local: replicated to sharded; every device keeps its block.
    Slice,
    /// Local: replicated to one digit; the devices of other digits free the tensor.
    Drop,
    /// Partial to replicated.
    AllReduce,
    /// Partial to sharded.
    ReduceScatter,
    /// Partial to one digit.
    Reduce,
    /// Sharded to replicated.
    AllGather,
    /// Sharded on one dimension to sharded on another.
    AllToAll,
    /// One digit to replicated.
    Broadcast,
    /// One digit to sharded.
    Scatter,
    /// Sharded to one digit.
    Gather,
    /// One digit to another.
    Send,
    /// Blocks change owners: axes of a dimension change order, or axes of equal size swap.
    Permute,
}

impl Action {
    /// The name in text output.
    pub fn name(self) -> &'static str {
        match self {
            Action::Slice => "slice",
            Action::Drop => "drop",
            Action::AllReduce => "all-reduce",
            Action::ReduceScatter => "reduce-scatter",
            Action::Reduce => "reduce",
            Action::AllGather => "all-gather",
            Action::AllToAll => "all-to-all",
            Action::Broadcast => "broadcast",
            Action::Scatter => "scatter",
            Action::Gather => "gather",
            Action::Send => "send",
            Action::Permute => "permute",
        }
    }

    /// The collective that performs the action; `None` for local actions.
    pub fn collective(self) -> Option<Collective> {
        match self {
            Action::Slice | Action::Drop => None,
            Action::AllReduce => Some(Collective::AllReduce),
            Action::ReduceScatter => Some(Collective::ReduceScatter),
            Action::Reduce => Some(Collective::Reduce),
            Action::AllGather => Some(Collective::AllGather),
            Action::AllToAll => Some(Collective::AllToAll),
            Action::Broadcast => Some(Collective::Broadcast),
            Action::Scatter => Some(Collective::Scatter),
            Action::Gather => Some(Collective::Gather),
            Action::Send => Some(Collective::Send),
            Action::Permute => Some(Collective::Permute),
        }
    }
}

/// One step of a reshard path.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReshardStep {
    /// What the step does.
    pub action: Action,
    /// The axes of the collective: all groups along them act at once.
    pub axes: AxisSet,
    /// Bytes of the larger side on one device, as [`Collective`]s count them.
    pub message: Bytes,
    /// Time of the step.
    pub seconds: Seconds,
    /// The tensor's arrangement afterwards.
    pub after: Arrangement,
}

/// Bytes of a tensor on one device.
pub(crate) fn local_bytes(mesh: &Mesh, total: u64, at: &Arrangement) -> u64 {
    let layout = at.layout();
    let parts = (0..layout.len() as u32).map(AxisId).filter(|&axis| is_shard(at, axis));
    total / parts.map(|axis| u64::from(mesh.axis(axis).size)).product::<u64>()
}

fn is_shard(at: &Arrangement, axis: AxisId) -> bool {
    matches!(at.layout().get(axis), crate::layout::Placement::Shard(_))
}

/// The axes of every dimension, major first.
pub(crate) fn lists(at: &Arrangement) -> [AxisList; MAX_DIMS] {
    std::array::from_fn(|dim| at.list(dim as u8))
}

/// The axes along which blocks must move from their old to their new owner: those between the first and the last
/// difference in the axis order of any dimension. The axes before (major) and after (minor) are equal on both sides,
/// and so are those digits of old and new owner.
pub(crate) fn permuted_between(before: &[AxisList; MAX_DIMS], after: &[AxisList; MAX_DIMS]) -> AxisSet {
    let mut axes = AxisSet::EMPTY;
    for (old, new) in before.iter().zip(after) {
        let same = old.iter().zip(new.iter()).take_while(|(a, b)| a == b).count();
        let rest = old.len().min(new.len()) - same;
        let same_end = old.iter().rev().zip(new.iter().rev()).take(rest).take_while(|(a, b)| a == b).count();
        let middle = |list: &AxisList| -> AxisSet {
            list.iter().take(list.len().saturating_sub(same_end)).skip(same).collect()
        };
        axes = axes.union(middle(old)).union(middle(new));
    }
    axes
}

/// [`permuted_between`] for two arrangements.
pub(crate) fn permuted(before: &Arrangement, after: &Arrangement) -> AxisSet {
    permuted_between(&lists(before), &lists(after))
}

impl ReshardStep {
    /// The exact bytes that this step sends over each axis, summed over all devices.
    pub fn traffic(&self, comm: &Comm, before: &Arrangement) -> Traffic {
        match self.action.collective() {
            None => Traffic::default(),
            Some(Collective::Permute) => self.permute_traffic(comm, before),
            Some(kind) => comm.traffic(kind, self.axes, before.layout().absent(), self.message),
        }
    }

    /// A permutation moves only blocks that are not already in place, each from the nearest device that holds it.
    fn permute_traffic(&self, comm: &Comm, before: &Arrangement) -> Traffic {
        let mesh = comm.mesh();
        let mut members = vec![DeviceId(0)];
        for axis in self.axes.iter() {
            let (size, stride) = (mesh.axis(axis).size, mesh.stride(axis));
            members = members
                .iter()
                .flat_map(|m| (0..size).map(move |digit| DeviceId(m.0 + digit * stride)))
                .collect();
        }
        let key = |at: &Arrangement, device: DeviceId| {
            (0..MAX_DIMS as u8).fold(0u64, |key, dim| key * at.parts(mesh, dim) + at.block(mesh, device, dim))
        };
        let mut holders: BTreeMap<u64, Vec<DeviceId>> = BTreeMap::new();
        for &device in &members {
            holders.entry(key(before, device)).or_default().push(device);
        }
        // Number of groups: one per position outside the axes. Absent digits have no group.
        let outside = mesh.all().minus(self.axes).minus(before.layout().absent());
        let groups = u128::from(mesh.group_size(outside));
        let mut traffic = Traffic::default();
        for &device in &members {
            let wanted = key(&self.after, device);
            if key(before, device) == wanted {
                continue;
            }
            let crossed = |from: &DeviceId| {
                self.axes.iter().find(|&axis| mesh.digit(*from, axis) != mesh.digit(device, axis))
            };
            let nearest = holders.get(&wanted).and_then(|from| from.iter().filter_map(crossed).max());
            if let Some(axis) = nearest {
                traffic.add(axis, groups * u128::from(self.message.0));
            }
        }
        traffic
    }
}
