//! Merges neighbouring axes with equal placements, so that reshards on large meshes need few axes.
//!
//! Two neighbouring axes of a level are merged if they have the same placement before a reshard and the same placement
//! after. Canonical order keeps them together, so they act as one axis of their joint size. A pair of layouts on a mesh
//! of many axes usually needs only a few merged axes. Merged axes move together at every step, which suits
//! collectives over several axes of a level.

use crate::layout::{Arrangement, AxisList, Layout, MAX_DIMS, Placement};
use shardwright_machine::{AxisId, AxisSet, Mesh};

/// The merged axes of a mesh for a pair of layouts.
pub(crate) struct MergedAxes<'a> {
    fine: &'a Mesh,
    /// The axes of each merged axis.
    groups: Vec<AxisSet>,
}

impl MergedAxes<'_> {
    pub(crate) fn new<'a>(fine: &'a Mesh, from: &Layout, to: &Layout) -> MergedAxes<'a> {
        // Absent axes are merged whatever their digits, if all of them change or none does. Joint digits must fit 16 bits.
        let stays = |axis: AxisId| from.get(axis) == to.get(axis);
        let same_kind = |a: Placement, b: Placement| match (a, b) {
            (Placement::Absent(_), Placement::Absent(_)) => true,
            (a, b) => a == b,
        };
        let mut groups: Vec<AxisSet> = Vec::new();
        for axis in fine.all().iter() {
            let joins = groups.last().is_some_and(|group| {
                let before = AxisId(axis.0 - 1);
                fine.axis(before).level == fine.axis(axis).level
                    && same_kind(from.get(before), from.get(axis))
                    && same_kind(to.get(before), to.get(axis))
                    && stays(before) == stays(axis)
                    && fine.group_size(group.with(axis)) <= 1 << 15
            });
            match groups.last_mut() {
                Some(group) if joins => *group = group.with(axis),
                _ => groups.push(AxisSet::of(axis)),
            }
        }
        MergedAxes { fine, groups }
    }

    /// Whether any axes are merged and the mesh is large enough to need it.
    pub(crate) fn is_worthwhile(&self) -> bool {
        self.groups.len() < self.fine.len() && self.fine.len() > crate::directed_search::UNGUIDED_AXES
    }

    /// Bit i is set if axes i and i + 1 are merged.
    pub(crate) fn merged_bits(&self) -> u32 {
        // All axes of a group but its last.
        self.groups.iter().fold(0, |bits, group| bits | (group.0 & group.0 >> 1))
    }

    pub(crate) fn mesh(&self) -> Mesh {
        let merged = self.fine.merge_axes(&self.groups);
        debug_assert!(
            merged.is_ok(),
            "groups are neighbours of one level, in order, and cover all axes: {merged:?}"
        );
        // Merged layouts do not fit the fine mesh, so the reshard would fail with `WrongMesh`.
        merged.unwrap_or_else(|_| self.fine.clone())
    }

    /// The fine axes of a set of merged axes.
    pub(crate) fn axes(&self, coarse: AxisSet) -> AxisSet {
        coarse.iter().fold(AxisSet::EMPTY, |set, axis| set.union(self.groups[axis.index()]))
    }

    /// The layout on the merged mesh. All axes of a group must have one kind of placement.
    pub(crate) fn layout(&self, fine: &Layout) -> Layout {
        let placement = |group: &AxisSet| {
            let mut digits = 0u32;
            let mut last = Placement::Replicated;
            for axis in group.iter() {
                last = fine.get(axis);
                if let Placement::Absent(digit) = last {
                    digits = digits * self.fine.axis(axis).size + u32::from(digit);
                }
            }
            if let Placement::Absent(_) = last { Placement::Absent(digits as u16) } else { last }
        };
        Layout::new(&self.groups.iter().map(placement).collect::<Vec<_>>())
    }

    /// The arrangement on the fine mesh of an arrangement on the merged mesh.
    pub(crate) fn refine(&self, coarse: &Arrangement) -> Arrangement {
        let mut layout = Layout::replicated(self.fine.len());
        for (at, group) in self.groups.iter().enumerate() {
            let placement = coarse.layout().get(AxisId(at as u32));
            let mut rest = if let Placement::Absent(digit) = placement { u32::from(digit) } else { 0 };
            for axis in group.iter().rev() {
                let own = match placement {
                    Placement::Absent(_) => {
                        let size = self.fine.axis(axis).size;
                        let digit = rest % size;
                        rest /= size;
                        Placement::Absent(digit as u16)
                    }
                    other => other,
                };
                layout = layout.with(axis, own);
            }
        }
        let mut fine = Arrangement::canonical(&layout);
        for dim in 0..MAX_DIMS as u8 {
            let order = coarse.list(dim);
            let order: AxisList = order.iter().flat_map(|axis| self.groups[axis.index()].iter()).collect();
            fine.reorder(&order);
        }
        fine
    }
}
