//! The order of micro-batches, as in [`crate::Schedule`]: on each device class an instance of the body follows the one before it,
//! an addition to a sum over micro-batches follows that of the micro-batch before, and stored tensors are gathered a limited
//! number of gathers ahead.

use super::{TaskGraph, UndoEntry};
use crate::delta::{NONE, structure::Structure};
use crate::schedule::GATHERED_AHEAD;
use std::collections::VecDeque;

/// The instance whose addition an addition of the next micro-batch follows.
fn earlier_sum(structure: &Structure, instance: usize) -> Option<usize> {
    (structure.unrolled.copy(instance) > 0).then(|| instance - structure.unrolled.body_ops())
}

/// The addition of the next micro-batch to the same sum.
fn later_sum(structure: &Structure, instance: usize) -> Option<usize> {
    let next = instance + structure.unrolled.body_ops();
    structure.unrolled.body().contains(&next).then_some(next)
}

impl TaskGraph<'_> {
    /// Links an instance, whose classes or tasks have changed, with those before and after it.
    pub(super) fn order(&mut self, instance: usize) {
        if !self.structure.follows(instance) {
            return;
        }
        for class in 0..self.device_classes().count() {
            let (before, after) = if self.structure.is_ordered(instance) {
                let end = self.structure.unrolled.body().end;
                let after = (instance + 1..end).find(|&other| self.computes_in_order(other, class));
                (self.last_before(instance, class), after)
            } else {
                let before = earlier_sum(&self.structure, instance);
                let before = before.map_or(NONE, |before| self.last_task(before, class));
                (before, later_sum(&self.structure, instance))
            };
            let own = self.last_task(instance, class);
            let passes_on = own == NONE && self.structure.is_ordered(instance);
            self.follow(instance, class, before);
            if let Some(after) = after {
                self.follow(after, class, if passes_on { before } else { own });
            }
        }
    }

    /// Whether an instance computes on a class, in the order of the program.
    fn computes_in_order(&self, instance: usize, class: usize) -> bool {
        self.structure.is_ordered(instance) && self.configured[instance].device_classes >> class & 1 == 1
    }

    /// The last computing task of an instance on a class; [`NONE`] where it does not run.
    fn last_task(&self, instance: usize, class: usize) -> u32 {
        self.result_tasks(instance, 0)[class]
    }

    /// Lets an instance wait for a task on a class.
    fn follow(&mut self, instance: usize, class: usize, task: u32) {
        let slot = self.operand_slot(instance, self.structure.inputs(instance), class);
        let old = std::mem::replace(&mut self.fetched[slot], task);
        if old != task {
            self.log.push(UndoEntry::Fetch { slot: slot as u32, task: old });
        }
        let runs = self.configured[instance].device_classes >> class & 1 == 1;
        self.wait(slot as u32, if runs { task } else { NONE });
    }

    /// Lets every gather wait for what its classes computed last before the gather [`GATHERED_AHEAD`] gathers earlier.
    pub(super) fn order_gathers(&mut self) {
        let count = self.device_classes().count();
        let mut gathers: Vec<(u64, u32, bool)> = Vec::new();
        for &place in self.gathers.iter().flat_map(|&group| &self.reshards[group as usize]) {
            // The first step of a path reads what is made outside.
            let sources = (0..count as u32).map(|class| self.edges.source(self.slot(place) + class));
            let is_first = sources.into_iter().all(|source| source == NONE || !self.is_inside(source));
            gathers.push((self.tasks[place as usize].rank, place, is_first && self.is_inside(place)));
        }
        gathers.sort_unstable();
        let mut queues: Vec<VecDeque<u32>> = vec![VecDeque::new(); count];
        for (_, place, is_first) in gathers {
            let instance = self.instance_of(place);
            let classes = if is_first { self.classes_of(place) } else { 0 };
            let slot = self.slot(place) + count as u32;
            for (class, queue) in queues.iter_mut().enumerate() {
                let mut before = NONE;
                if classes >> class & 1 == 1 {
                    queue.push_back(self.last_before(instance, class));
                    let ahead = (queue.len() > GATHERED_AHEAD).then(|| queue.pop_front()).flatten();
                    before = ahead.unwrap_or(NONE);
                }
                self.wait(slot + class as u32, before);
            }
        }
    }

    /// Whether a task belongs to an instance of the body.
    fn is_inside(&self, place: u32) -> bool {
        self.structure.follows(self.instance_of(place))
    }

    /// The device classes whose streams a task occupies, as bits.
    fn classes_of(&self, place: u32) -> u64 {
        let (width, streams) = (self.device_classes().streams, self.tasks[place as usize].streams);
        let occupied = |class: &usize| streams >> (class * width) & ((1 << width) - 1) != 0;
        (0..self.device_classes().count()).filter(occupied).fold(0, |bits, class| bits | 1 << class)
    }

    /// What a class computes last in the body before an instance.
    fn last_before(&self, instance: usize, class: usize) -> u32 {
        let start = self.structure.unrolled.body().start;
        let before = (start..instance).rev().find(|&other| self.computes_in_order(other, class));
        before.map_or(NONE, |before| self.last_task(before, class))
    }
}
