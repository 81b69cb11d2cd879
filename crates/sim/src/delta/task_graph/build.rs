//! Builds the tasks of a step: those of ops, of their halo exchanges and completions, and of the reshards of a group.
//!
//! Rebuilding after a change reuses the places of the earlier tasks, so that equal tasks are not touched.

use super::{Availability, List, Task, TaskGraph, UndoEntry};
use crate::delta::{
    NONE,
    configured_ops::ConfiguredOp,
    device_classes::{CLASS_BITS, MOST_CLASSES, device_classes},
    reshard_paths::{ReshardBranch, ReshardStep},
    structure::{COMPLETION, COMPUTE, HALOS},
};
use shardwright_cost::LayoutError;
use shardwright_space::{Endpoint, reduce_partials};

/// The next place and rank for tasks of a list.
struct TaskCursor {
    list: List,
    used: usize,
    nth: u64,
    rank: u64,
}

impl TaskGraph<'_> {
    /// Sets the tasks of an op: device classes, duration and halo exchanges.
    pub(super) fn set_op(&mut self, op: usize, configured: ConfiguredOp) {
        let count = self.device_classes().count();
        for class in 0..count {
            let task = (op * count + class) as u32;
            if configured.device_classes >> class & 1 == 1 {
                let streams = u64::from(configured.duration > 0) << (class * self.device_classes().streams);
                let rank = ((((op as u64) << 32) | COMPUTE) << CLASS_BITS) | class as u64;
                self.set_task(task, configured.duration, streams, rank);
            } else {
                self.set_task(task, 0, 0, 0);
            }
        }
        for i in 0..self.structure.operands(op).len() {
            self.set_halos(op, i);
        }
        self.set_completion(op, configured);
    }

    /// The tasks of an op, by class.
    fn op_tasks(&self, op: usize) -> Availability {
        let mut tasks = [NONE; MOST_CLASSES];
        let count = self.device_classes().count();
        device_classes(self.configured[op].device_classes)
            .for_each(|class| tasks[class] = (op * count + class) as u32);
        tasks
    }

    /// Builds the tasks that complete an op: the reduction of a result, then the completion on every class.
    fn set_completion(&mut self, op: usize, configured: ConfiguredOp) {
        let first = ((op as u64) << 32) | COMPUTE;
        let mut cursor = TaskCursor { list: List::Completion(op as u32), used: 0, nth: 0, rank: first + 1 };
        if let Some(completion) = configured.completion {
            let mut available = self.op_tasks(op);
            for at in 0..self.configured_ops.reduction(&completion).len() {
                let step = self.configured_ops.reduction(&completion)[at];
                self.step(step, &mut cursor, &mut available);
            }
            let count = self.device_classes().count();
            for class in device_classes(configured.device_classes) {
                let task = self.task_at(cursor.list, cursor.used);
                cursor.used += 1;
                let streams = u64::from(completion.duration > 0) << (class * self.device_classes().streams);
                let rank = ((first + COMPLETION) << CLASS_BITS) | class as u64;
                self.set_task(task, completion.duration, streams, rank);
                let slot = self.slot(task);
                for other in 0..count {
                    self.wait(slot + other as u32, if other == class { available[class] } else { NONE });
                }
            }
        }
        self.shorten(cursor.list, cursor.used);
    }

    /// Per class: the task that makes a group's tensor available.
    pub(super) fn made(&self, producer: u32, source: Endpoint) -> Availability {
        match producer {
            NONE => [NONE; MOST_CLASSES],
            instance => {
                let inputs = self.structure.inputs(instance as usize) as u32;
                self.result_tasks(instance as usize, source.port - inputs)
            }
        }
    }

    /// Per class: the task that makes a result of an op available.
    pub(super) fn result_tasks(&self, op: usize, result: u32) -> Availability {
        let mut made = self.op_tasks(op);
        let Some(completion) = self.configured[op].completion else { return made };
        let (width, mask) = (self.device_classes().streams, (1 << self.device_classes().streams) - 1);
        for &place in &self.completions[op] {
            let task = self.tasks[place as usize];
            let completes = task.rank >> CLASS_BITS & u64::from(u32::MAX) == COMPUTE + COMPLETION;
            if completes && result == 0 {
                made[(task.rank & ((1 << CLASS_BITS) - 1)) as usize] = place;
            } else if !completes && result == completion.output {
                let takes_part = |class: &usize| task.streams >> (class * width) & mask != 0;
                device_classes(self.configured[op].device_classes)
                    .filter(takes_part)
                    .for_each(|class| made[class] = place);
            }
        }
        made
    }

    /// The task at a position of a list, added if it does not exist yet.
    fn task_at(&mut self, list: List, position: usize) -> u32 {
        if let Some(&task) = self.list(list).get(position) {
            return task;
        }
        let place = self.free.pop().unwrap_or_else(|| {
            let place = self.tasks.len() as u32;
            self.tasks.push(Task::default());
            self.is_touched.push(false);
            self.edges.add_task();
            let (count, slots) = (self.device_classes().count(), self.listed_slots());
            let first = self.fetched.len() + (place as usize - self.structure.unrolled.len() * count) * slots;
            self.slots.push((first as u32, slots as u32));
            (0..slots).for_each(|_| {
                self.edges.add_slot(place);
            });
            place
        });
        self.log.push(UndoEntry::Allocation { place });
        self.list(list).push(place);
        self.log.push(UndoEntry::Push(list));
        place
    }

    /// Shortens a list to `len` tasks.
    fn shorten(&mut self, list: List, len: usize) {
        while self.list(list).len() > len {
            let Some(place) = self.list(list).pop() else { return };
            self.log.push(UndoEntry::Pop(list, place));
            let slot = self.slot(place);
            (0..self.listed_slots() as u32).for_each(|at| self.wait(slot + at, NONE));
            self.set_task(place, 0, 0, 0);
            self.free.push(place);
            self.log.push(UndoEntry::Release);
        }
    }

    /// Builds the tasks of a reshard step as the list's next ones. Updates the availability of the tensor.
    fn step(&mut self, step: ReshardStep, cursor: &mut TaskCursor, available: &mut Availability) {
        let count = self.device_classes().count();
        if step.duration > 0 {
            let before = *available;
            for group in 0..self.reshard_paths.groups(step).len() {
                let all = self.reshard_paths.groups(step)[group];
                let members = all & step.members;
                if members == 0 {
                    continue;
                }
                let mut left = members;
                while left != 0 {
                    // One task for all members, or one per member where cores move data.
                    let actors =
                        if self.reshard_paths.is_per_member() { left & left.wrapping_neg() } else { left };
                    left &= !actors;
                    let task = self.task_at(cursor.list, cursor.used);
                    cursor.used += 1;
                    let first = if actors == members { all } else { actors };
                    let rank = ((cursor.rank + cursor.nth) << CLASS_BITS) | u64::from(first.trailing_zeros());
                    let width = self.device_classes().streams;
                    let streams =
                        device_classes(actors).fold(0, |bits, class| bits | step.ports << (class * width));
                    self.set_task(task, step.duration, streams, rank);
                    let slot = self.slot(task);
                    for (class, &before) in before.iter().enumerate().take(count) {
                        let member = members >> class & 1 == 1;
                        self.wait(slot + class as u32, if member { before } else { NONE });
                    }
                    device_classes(actors).for_each(|class| available[class] = task);
                }
            }
            cursor.nth += 1;
        }
        // The tensor is absent from classes that take no part.
        device_classes(self.device_classes().all() & !step.members).for_each(|class| available[class] = NONE);
    }

    /// Builds the halo exchanges of an operand, as predecessors of the op.
    fn set_halos(&mut self, op: usize, i: usize) {
        let (configured, count) = (self.configured[op], self.device_classes().count());
        let operand = self.structure.operands(op).start + i;
        let rank = ((op as u64) << 32) | ((i as u64 + 1) << 16);
        let mut cursor =
            TaskCursor { list: List::Halos(operand as u32), used: 0, nth: 0, rank: rank + HALOS };
        let mut available = [NONE; MOST_CLASSES];
        (0..count).for_each(|class| available[class] = self.fetched[self.operand_slot(op, i, class)]);
        for at in 0..self.configured_ops.halos(&configured).len() {
            let (of, step) = self.configured_ops.halos(&configured)[at];
            if of == i as u32 {
                self.step(step, &mut cursor, &mut available);
            }
        }
        self.shorten(cursor.list, cursor.used);
        for (class, &available) in available.iter().enumerate().take(count) {
            let here = configured.device_classes >> class & 1 == 1;
            self.wait(self.operand_slot(op, i, class) as u32, if here { available } else { NONE });
        }
    }

    /// The layout of a tensor at an endpoint.
    fn layout(&mut self, end: Endpoint, shape: u32) -> u32 {
        let layout = self.configured_ops.layout(&self.configured[end.op.index()], end.port);
        if !end.reduced {
            return layout;
        }
        let reduced = reduce_partials(*self.reshard_paths.layout_of(shape, layout));
        self.reshard_paths.layout(shape, reduced)
    }

    /// Rebuilds all reshards.
    pub fn rebuild_all(&mut self) -> Result<(), LayoutError> {
        (0..self.structure.groups.len()).try_for_each(|group| self.rebuild(group))
    }

    /// Rebuilds the reshards of a group.
    pub(super) fn rebuild(&mut self, at: usize) -> Result<(), LayoutError> {
        let group = &self.structure.groups[at];
        let (shape, producer, needs) = (group.shape, group.producer, group.needs.clone());
        let source = group.source;
        let stored = self.layout(source, shape);
        let mut wanted = std::mem::take(&mut self.wanted);
        wanted.clear();
        for need in needs.clone() {
            let layout = self.layout(self.structure.needs[need as usize].end, shape);
            if layout != stored && !wanted.contains(&layout) {
                wanted.push(layout);
            }
        }
        let mut branches = std::mem::take(&mut self.branches);
        let outcome = self.reshard_paths.reshard_many(shape, stored, &wanted, &mut branches);
        let mut availabilities = std::mem::take(&mut self.availabilities);
        availabilities.clear();
        availabilities.resize(branches.len(), None);
        let made = self.made(producer, source);
        let mut cursor = TaskCursor { list: List::Reshards(at as u32), used: 0, nth: 0, rank: 0 };
        for need in needs {
            let need = self.structure.needs[need as usize];
            let layout = self.layout(need.end, shape);
            if need.rank != cursor.rank {
                (cursor.rank, cursor.nth) = (need.rank, 0);
            }
            let available = match branches.iter().position(|branch| branch.to == layout) {
                None => made,
                Some(branch) => self.branch_tasks(&mut cursor, &branches, &mut availabilities, &made, branch),
            };
            if need.operand != NONE {
                self.deliver(need.end, &available);
            }
        }
        self.shorten(cursor.list, cursor.used);
        (self.wanted, self.branches, self.availabilities) = (wanted, branches, availabilities);
        outcome
    }

    /// Builds the tasks of a branch, unless they exist; returns its availability.
    fn branch_tasks(
        &mut self,
        cursor: &mut TaskCursor,
        branches: &[ReshardBranch],
        availabilities: &mut [Option<Availability>],
        made: &Availability,
        at: usize,
    ) -> Availability {
        if let Some(available) = availabilities[at] {
            return available;
        }
        let branch = &branches[at];
        let mut available = match branch.from {
            NONE => *made,
            from => self.branch_tasks(cursor, branches, availabilities, made, from as usize),
        };
        for step in self.reshard_paths.steps(branch) {
            self.step(self.reshard_paths.step(step), cursor, &mut available);
        }
        availabilities[at] = Some(available);
        available
    }

    /// Sets the tasks that fetch an operand.
    fn deliver(&mut self, Endpoint { op, port: i, .. }: Endpoint, available: &Availability) {
        let mut changed = false;
        for (class, &task) in available.iter().enumerate().take(self.device_classes().count()) {
            let slot = self.operand_slot(op.index(), i as usize, class);
            let old = std::mem::replace(&mut self.fetched[slot], task);
            if old != task {
                changed = true;
                self.log.push(UndoEntry::Fetch { slot: slot as u32, task: old });
            }
        }
        if changed {
            self.set_halos(op.index(), i as usize);
        }
    }
}
