//! Treats neighbouring axes that do the same as one: the key to large meshes.
//!
//! Two neighbouring axes of a level with the same placement before a re-layout and the same after are one axis of
//! their joint size, since canonical order keeps them together. A pair of layouts on a mesh of many axes usually
//! needs only a few such glued ones. They then move together at every step in between, which is what collectives
//! over several axes of a level want anyway.

use crate::layout::{Arrangement, AxisList, Layout, MAX_DIMS, Placement};
use shardwright_machine::{AxisId, AxisSet, Mesh};

/// Which axes of a mesh are glued for a pair of layouts.
pub(crate) struct Glue<'a> {
    fine: &'a Mesh,
    /// The axes of each glued one.
    groups: Vec<AxisSet>,
}

impl Glue<'_> {
    pub(crate) fn new<'a>(fine: &'a Mesh, from: &Layout, to: &Layout) -> Glue<'a> {
        // Digits of absent axes are joined too, so only the kind has to agree, and whether they change; joint digits must
        // stay small.
        let stays = |axis: AxisId| from.get(axis) == to.get(axis);
        let alike = |a: Placement, b: Placement| match (a, b) {
            (Placement::Absent(_), Placement::Absent(_)) => true,
            (a, b) => a == b,
        };
        let mut groups: Vec<AxisSet> = Vec::new();
        for axis in fine.all().iter() {
            let joins = groups.last().is_some_and(|group| {
                let before = AxisId(axis.0 - 1);
                fine.axis(before).level == fine.axis(axis).level
                    && alike(from.get(before), from.get(axis))
                    && alike(to.get(before), to.get(axis))
                    && stays(before) == stays(axis)
                    && fine.group_size(group.with(axis)) <= 1 << 15
            });
            match groups.last_mut() {
                Some(group) if joins => *group = group.with(axis),
                _ => groups.push(AxisSet::of(axis)),
            }
        }
        Glue { fine, groups }
    }

    /// Something is glued, and the mesh is large enough to need it.
    pub(crate) fn helps(&self) -> bool {
        self.groups.len() < self.fine.len() && self.fine.len() > crate::directed::UNGUIDED_AXES
    }

    /// Bit i: axis i is glued to axis i + 1.
    pub(crate) fn joints(&self) -> u32 {
        // All axes of a group but its last.
        self.groups.iter().fold(0, |bits, group| bits | (group.0 & group.0 >> 1))
    }

    pub(crate) fn mesh(&self) -> Mesh {
        // The groups are neighbours of one level, in order, and leave no axis out.
        self.fine.glue(&self.groups).unwrap_or_else(|_| self.fine.clone())
    }

    /// The fine axes of some glued ones.
    pub(crate) fn axes(&self, coarse: AxisSet) -> AxisSet {
        coarse.iter().fold(AxisSet::EMPTY, |set, axis| set.union(self.groups[axis.index()]))
    }

    /// A layout that does the same on all axes of each group, on the glued mesh.
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

    /// An arrangement of the glued mesh on the fine one.
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
