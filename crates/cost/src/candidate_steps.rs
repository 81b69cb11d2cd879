//! The candidate steps of the directed search: those from an arrangement that can lead towards a target.
//!
//! Collectives act on the minor-most axes of a dimension only, because only then do the devices of a group hold
//! neighbouring blocks. Removing or adding a major axis needs a permutation before or after. This is the price of the
//! canonical order (outermost axis major); the search decides where to pay it.
//!
//! Besides the direct steps, two detours often pay and are candidates too:
//! - *Helper axes*: an axis along which the tensor is replicated can slice it for free at the start, so that fewer
//!   bytes cross a slow level, and gather it at the end over its own fast level.
//! - Partial sums may be scattered early and gathered late instead of being all-reduced at once.

use crate::collective::Comm;
use crate::layout::{Arrangement, AxisList, MAX_DIMS, Placement, TensorShape};
use crate::reshard_step::{Action, local_bytes, permuted};
use shardwright_machine::{AxisId, AxisSet, Mesh};

/// The most sets of axes tried for one all-gather. Only meshes with very many axes have more.
const MAX_SETS: usize = 64;

/// The target of a reshard, with tensor and cost model.
pub(crate) struct ReshardGoal<'a> {
    pub comm: &'a Comm,
    pub shape: &'a TensorShape,
    pub target: Arrangement,
}

/// An action along axes, its message in bytes and the arrangement after it.
pub(crate) struct CandidateStep {
    pub action: Action,
    pub axes: AxisSet,
    pub message: u64,
    pub after: Arrangement,
}

impl ReshardGoal<'_> {
    fn mesh(&self) -> &Mesh {
        self.comm.mesh()
    }

    fn wanted(&self, axis: AxisId) -> Placement {
        self.target.layout().get(axis)
    }

    /// Whether a dimension can be split further along these axes.
    fn divides(&self, at: &Arrangement, dim: u8, axes: AxisSet) -> bool {
        let parts = at.parts(self.mesh(), dim) * u64::from(self.mesh().group_size(axes));
        self.shape.dim(dim).is_multiple_of(parts)
    }

    fn emit(
        &self,
        at: &Arrangement,
        action: Action,
        axes: AxisSet,
        after: Arrangement,
        to: &mut dyn FnMut(CandidateStep),
    ) {
        let before = local_bytes(self.mesh(), self.shape.bytes(), at);
        let message = match action {
            Action::AllGather | Action::Gather => local_bytes(self.mesh(), self.shape.bytes(), &after),
            _ => before,
        };
        to(CandidateStep { action, axes, message, after });
    }

    fn place(
        &self,
        at: &Arrangement,
        action: Action,
        axes: AxisSet,
        to: &mut dyn FnMut(CandidateStep),
        placement: impl Fn(AxisId) -> Placement,
    ) {
        let mut after = *at;
        for axis in axes.iter() {
            after.set(axis, placement(axis));
        }
        self.emit(at, action, axes, after, to);
    }

    fn append(
        &self,
        at: &Arrangement,
        action: Action,
        dim: u8,
        axes: AxisSet,
        to: &mut dyn FnMut(CandidateStep),
    ) {
        if self.divides(at, dim, axes) {
            // Axes that stay come first, so that the others can leave again from the minor end.
            let stays = |a: &AxisId| self.wanted(*a) == Placement::Shard(dim);
            let mut after = *at;
            after.append(dim, axes.iter().filter(stays));
            after.append(dim, axes.iter().filter(|a| !stays(a)));
            self.emit(at, action, axes, after, to);
        }
    }

    /// All candidate steps from an arrangement. `fresh` means that nothing has been sent yet, so that helper axes may
    /// still slice.
    pub(crate) fn candidates(&self, at: &Arrangement, fresh: bool, to: &mut dyn FnMut(CandidateStep)) {
        let dims = self.shape.rank();
        let layout = at.layout();
        for axis in self.mesh().all().iter() {
            match layout.get(axis) {
                Placement::Replicated => self.leave_replicated(at, axis, fresh, to),
                Placement::Partial(_) => self.leave_partial(at, axis, dims, to),
                Placement::Absent(_) => self.leave_absent(at, axis, dims, to),
                Placement::Shard(_) => {}
            }
        }
        for dim in 0..dims {
            self.leave_shards(at, dim, to);
        }
        self.gathers(at, dims, to);
        self.permutations(at, dims, to);
    }

    /// Sets of axes with the same current and target placements as `axis`: itself, those of its level, and all. A set
    /// is produced for its first axis only, so that it comes up once. Absent axes already at their target digit need no
    /// step and are left out.
    fn equal_axes(&self, at: &Arrangement, axis: AxisId, mut each: impl FnMut(AxisSet)) {
        let layout = at.layout();
        let key = |a: AxisId| (layout.get(a), self.wanted(a));
        let there = |a: AxisId| matches!(key(a), (Placement::Absent(is), Placement::Absent(to)) if is == to);
        let equal = |a: &AxisId| !there(*a) && self.same_class(key(*a), key(axis));
        let all: AxisSet = self.mesh().all().iter().filter(equal).collect();
        let level = self.mesh().axis(axis).level;
        let here: AxisSet = all.iter().filter(|&a| self.mesh().axis(a).level == level).collect();
        let first = |set: AxisSet| set.iter().next() == Some(axis);
        each(AxisSet::of(axis));
        if here.len() > 1 && first(here) {
            each(here);
        }
        if all != here && all.len() > 1 && first(all) {
            each(all);
        }
    }

    /// Whether two axes can take part in one step: digits of absent axes do not matter.
    fn same_class(&self, a: (Placement, Placement), b: (Placement, Placement)) -> bool {
        let same = |x: Placement, y: Placement| {
            x == y || matches!((x, y), (Placement::Absent(_), Placement::Absent(_)))
        };
        same(a.0, b.0) && same(a.1, b.1)
    }

    fn leave_replicated(
        &self,
        at: &Arrangement,
        axis: AxisId,
        fresh: bool,
        to: &mut dyn FnMut(CandidateStep),
    ) {
        self.equal_axes(at, axis, |axes| {
            let wanted = self.wanted(axis);
            if let Placement::Absent(_) = wanted {
                self.place(at, Action::Drop, axes, to, |a| self.wanted(a));
            }
            for dim in 0..self.shape.rank() {
                if fresh || wanted == Placement::Shard(dim) {
                    self.append(at, Action::Slice, dim, axes, to);
                }
            }
        });
    }

    fn leave_partial(&self, at: &Arrangement, axis: AxisId, dims: u8, to: &mut dyn FnMut(CandidateStep)) {
        if self.wanted(axis) == at.layout().get(axis) {
            return;
        }
        self.equal_axes(at, axis, |axes| {
            for dim in 0..dims {
                self.append(at, Action::ReduceScatter, dim, axes, to);
            }
            match self.wanted(axis) {
                Placement::Absent(_) => self.place(at, Action::Reduce, axes, to, |a| self.wanted(a)),
                _ => self.place(at, Action::AllReduce, axes, to, |_| Placement::Replicated),
            }
        });
        // All partial axes reduced at once, whatever their targets.
        let layout = at.layout();
        let kind = layout.get(axis);
        let summed = layout.axes_where(|p| p == kind).iter().filter(|&a| self.wanted(a) != kind);
        let summed: AxisSet = summed.collect();
        if summed.len() > 1 && summed.iter().next() == Some(axis) {
            for dim in 0..dims {
                self.append(at, Action::ReduceScatter, dim, summed, to);
            }
            self.place(at, Action::AllReduce, summed, to, |_| Placement::Replicated);
            // Each axis on its target dimension, the rest along one dimension.
            for dim in 0..dims {
                let target_dim = |a: AxisId| match self.wanted(a) {
                    Placement::Shard(target) => target,
                    _ => dim,
                };
                let mut after = *at;
                for d in 0..dims {
                    let stays = |a: &AxisId| self.wanted(*a) == Placement::Shard(d);
                    after.append(d, summed.iter().filter(stays));
                    after.append(d, summed.iter().filter(|a| target_dim(*a) == d && !stays(a)));
                }
                if (0..dims).all(|d| self.shape.dim(d).is_multiple_of(after.parts(self.mesh(), d))) {
                    self.emit(at, Action::ReduceScatter, summed, after, to);
                }
            }
        }
    }

    fn leave_absent(&self, at: &Arrangement, axis: AxisId, dims: u8, to: &mut dyn FnMut(CandidateStep)) {
        let wanted = self.wanted(axis);
        if wanted == at.layout().get(axis) {
            return;
        }
        self.equal_axes(at, axis, |axes| {
            // Straight from one digit to another. A route through other devices might be faster but would occupy them.
            if let Placement::Absent(_) = wanted {
                self.place(at, Action::Send, axes, to, |a| self.wanted(a));
                return;
            }
            self.place(at, Action::Broadcast, axes, to, |_| Placement::Replicated);
            for dim in 0..dims {
                self.append(at, Action::Scatter, dim, axes, to);
            }
        });
    }

    /// Gathers and all-to-alls of the minor-most axes of a dimension.
    fn leave_shards(&self, at: &Arrangement, dim: u8, to: &mut dyn FnMut(CandidateStep)) {
        let list = at.list(dim);
        if self.settled(at, dim) {
            return;
        }
        let mut suffix = AxisSet::EMPTY;
        for axis in list.iter().rev() {
            suffix = suffix.with(axis);
            let wanted = |holds: &dyn Fn(Placement) -> bool| suffix.iter().all(|a| holds(self.wanted(a)));
            if wanted(&|p| matches!(p, Placement::Absent(_))) {
                self.place(at, Action::Gather, suffix, to, |a| self.wanted(a));
            }
            for other in (0..self.shape.rank()).filter(|&other| other != dim) {
                let arrive = |a: AxisId| self.wanted(a) == Placement::Shard(other);
                if suffix.iter().any(arrive) && self.divides(at, other, suffix) {
                    let mut after = *at;
                    after.append(other, suffix.iter().filter(|&a| arrive(a)));
                    after.append(other, suffix.iter().filter(|&a| !arrive(a)));
                    self.emit(at, Action::AllToAll, suffix, after, to);
                }
            }
        }
    }

    /// All-gathers of the minor-most axes of one or several dimensions. One collective over several dimensions is never
    /// slower than one after the other.
    fn gathers(&self, at: &Arrangement, dims: u8, to: &mut dyn FnMut(CandidateStep)) {
        let mut sets = [AxisSet::EMPTY; MAX_SETS];
        let mut count = 1;
        for dim in (0..dims).filter(|&dim| !self.settled(at, dim)) {
            let so_far = count;
            let mut suffix = AxisSet::EMPTY;
            for axis in at.list(dim).iter().rev() {
                suffix = suffix.with(axis);
                for set in 0..so_far {
                    if count < MAX_SETS {
                        sets[count] = sets[set].union(suffix);
                        count += 1;
                    }
                }
            }
        }
        for &axes in &sets[1..count] {
            self.place(at, Action::AllGather, axes, to, |_| Placement::Replicated);
        }
    }

    /// Whether a dimension has its target axes in canonical order.
    fn settled(&self, at: &Arrangement, dim: u8) -> bool {
        let list = at.list(dim);
        let canonical = list.iter().zip(list.iter().skip(1)).all(|(a, b)| a < b);
        canonical && at.layout().shards(dim) == self.target.layout().shards(dim)
    }

    fn permutations(&self, at: &Arrangement, dims: u8, to: &mut dyn FnMut(CandidateStep)) {
        let permute = |after: Arrangement, to: &mut dyn FnMut(CandidateStep)| {
            let axes = permuted(at, &after);
            if !axes.is_empty() {
                self.emit(at, Action::Permute, axes, after, to);
            }
        };
        // Axes that stay, in canonical order, before those that leave.
        let mut all = *at;
        let mut changed = 0;
        for dim in 0..dims {
            let list = at.list(dim);
            let mut order = AxisList::empty();
            for stays in [true, false] {
                for axis in at.layout().shards(dim).iter() {
                    if (self.wanted(axis) == Placement::Shard(dim)) == stays {
                        order.push(axis);
                    }
                }
            }
            if !order.iter().eq(list.iter()) {
                let mut after = *at;
                after.reorder(&order);
                all.reorder(&order);
                changed += 1;
                permute(after, to);
            }
        }
        if changed > 1 {
            permute(all, to);
        }
        // Axes of equal size that swap.
        let movable = |p: Placement| matches!(p, Placement::Shard(_) | Placement::Replicated);
        let layout = at.layout();
        for a in
            self.mesh().all().iter().filter(|&a| movable(layout.get(a)) && layout.get(a) != self.wanted(a))
        {
            for b in
                self.mesh().all().iter().filter(|&b| movable(layout.get(b)) && layout.get(b) != layout.get(a))
            {
                let helps = layout.get(b) == self.wanted(a);
                let once = a < b || layout.get(a) != self.wanted(b);
                if helps && once && self.mesh().axis(a).size == self.mesh().axis(b).size {
                    let mut after = *at;
                    after.swap(a, b);
                    permute(after, to);
                }
            }
        }
        // All at once, if only owners change.
        let grid = |of: &Arrangement| {
            let mut parts = [1; MAX_DIMS];
            (0..dims).for_each(|dim| parts[usize::from(dim)] = of.parts(self.mesh(), dim));
            parts
        };
        let only_owners_change = self.mesh().all().iter().all(|axis| {
            let (is, wanted) = (layout.get(axis), self.wanted(axis));
            is == wanted || (movable(is) && movable(wanted))
        });
        if only_owners_change && *at != self.target && grid(at) == grid(&self.target) {
            permute(self.target, to);
        }
    }
}
