//! The order in which micro-batches compute, as in [`crate::Schedule`]: on each device class an instance of the body follows the
//! one before it, and an addition to a sum over micro-batches follows that of the micro-batch before.

use super::{TaskGraph, UndoEntry};
use crate::delta::{NONE, structure::Structure};

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
                let body = self.structure.unrolled.body();
                (
                    (body.start..instance).rev().find(|&other| self.computes_in_order(other, class)),
                    (instance + 1..body.end).find(|&other| self.computes_in_order(other, class)),
                )
            } else {
                (earlier_sum(&self.structure, instance), later_sum(&self.structure, instance))
            };
            let before = before.map_or(NONE, |before| self.last_task(before, class));
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
}
