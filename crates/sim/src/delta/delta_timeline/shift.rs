//! The end of a window: whether the following tasks are only shifted, by how much, and how far.

use super::{DeltaTimeline, InFlightTask, MAX_AFFECTED, Segment};
use crate::delta::{NONE, ordered_timeline::shifted, task_graph::TaskGraph};

impl DeltaTimeline {
    /// The first position from `from` on that affected, untimed tasks can reach, if all tasks up to there are shifted.
    pub(super) fn first_affected(&mut self, task_graph: &TaskGraph<'_>, from: usize, by: i64) -> usize {
        let removed =
            self.removed.iter().map(|&position| position as usize).filter(|&position| position >= from);
        let mut cut = removed.min().unwrap_or(self.ordered.len());
        let (mut at, known) = (0, self.affected.len());
        while at < self.affected.len() {
            let task = self.affected[at];
            at += 1;
            let position = self.old_position(task);
            // A changed or removed task leaves a gap at its old position.
            cut = cut.min(position.filter(|&position| position >= from).unwrap_or(cut));
            if self.marks[task as usize].timed == self.change {
                continue;
            }
            if position.is_some_and(|position| position < from) {
                cut = cut.min(self.affect_readers(task_graph, task));
            }
            // The ready time in the old order. Other tasks become ready later only if some task ends later.
            let mut ready = 0;
            for &other in task_graph.before(task).iter().filter(|&&other| other != NONE) {
                let mark = &self.marks[other as usize];
                let end = match self.new_end(other, from) {
                    Some(end) => shifted(end, -by),
                    None if mark.affected == self.change => {
                        mark.earliest.saturating_add(task_graph.task(other).duration)
                    }
                    None => self.ordered.tasks.ends[self.ordered.position[other as usize] as usize],
                };
                ready = ready.max(end);
            }
            self.marks[task as usize].earliest = ready;
            let position = from + self.ordered.tasks.ready[from..].partition_point(|&other| other < ready);
            cut = cut.min(position);
        }
        if self.affected.len() > known {
            self.affected.sort_unstable_by_key(|&task| task_graph.task(task).rank);
        }
        cut.max(from)
    }

    /// Marks the readers of a late task as affected. Returns the first position of one of them.
    fn affect_readers(&mut self, task_graph: &TaskGraph<'_>, task: u32) -> usize {
        let mut first = self.ordered.len();
        for reader in task_graph.readers(task) {
            let mark = &mut self.marks[reader as usize];
            if mark.timed == self.change || mark.affected == self.change {
                continue;
            }
            first = first.min(self.ordered.position[reader as usize] as usize);
            if self.affected.len() < MAX_AFFECTED {
                (mark.affected, mark.earliest) = (self.change, 0);
                self.affected.push(reader);
            }
        }
        first
    }

    /// Records the tasks between two positions, only shifted, that may be in flight when a window begins at the second.
    pub(super) fn record_in_flight(&mut self, from: usize, cut: usize) {
        if cut == 0 {
            return;
        }
        let ordered = &self.ordered;
        let time = ordered.tasks.ready[cut - 1];
        for position in ordered.first_busy(time).max(from)..cut {
            let (task, old_end) = (ordered.tasks.order[position], ordered.tasks.ends[position]);
            let mark = &self.marks[task as usize];
            if old_end >= time && mark.timed != self.change && mark.removed != self.change {
                let new_end =
                    if position < self.unchanged { old_end } else { shifted(old_end, self.shift(position)) };
                self.in_flight.push(InFlightTask { task, old_end, new_end });
            }
        }
    }

    /// The shift of all tasks from position `first` on, up to the next affected task; none if they are not only
    /// shifted. `first` has no new time yet. No untimed task is ready before `now`.
    pub(super) fn common_shift(
        &mut self,
        task_graph: &TaskGraph<'_>,
        cut: usize,
        first: usize,
        now: u64,
    ) -> Option<i64> {
        let ordered = &self.ordered;
        let (old, new) =
            (ordered.tasks.ready[first], self.ready(task_graph, ordered.tasks.order[first], cut)?);
        let by = new.wrapping_sub(old) as i64;
        ordered.free(first, &mut self.free_around[0]);
        for (stream, (&old_free, &new_free)) in self.free_around[0].iter().zip(&self.free).enumerate() {
            // A stream may become free at another time if its next user starts later anyway.
            if shifted(old_free, by) != new_free
                && self.is_needed(first, stream, old_free.max(shifted(new_free, -by)))
            {
                return None;
            }
        }
        self.in_flight.retain(|task| task.old_end >= old || task.new_end >= now);
        // Tasks in flight must be shifted like the rest, unless their readers wait longer for other tasks.
        let (ordered, change) = (&self.ordered, self.change);
        let odd = |&InFlightTask { task, old_end, new_end }: &InFlightTask| {
            (old_end >= old || new_end >= new)
                && shifted(old_end, by) != new_end
                && task_graph.readers(task).any(|reader| {
                    let mark = &self.marks[reader as usize];
                    let position = ordered.position[reader as usize] as usize;
                    mark.affected != change && mark.timed != change && position >= cut && {
                        let ready = ordered.tasks.ready[position];
                        old_end >= ready || new_end > shifted(ready, by)
                    }
                })
        };
        (!self.in_flight.iter().any(odd)).then_some(by)
    }

    /// Whether a task from a position on, up to the first affected one, needs a stream before a time.
    fn is_needed(&self, first: usize, stream: usize, before: u64) -> bool {
        let ordered = &self.ordered;
        let waiting = (first..ordered.len()).take_while(|&at| ordered.tasks.ready[at] < before);
        for at in waiting {
            let mark = &self.marks[ordered.tasks.order[at] as usize];
            if mark.affected == self.change || mark.removed == self.change {
                return false;
            }
            if ordered.tasks.streams[at] >> stream & 1 == 1 {
                return true;
            }
        }
        false
    }

    /// Ends a window. The following tasks are shifted up to a position, where the next window starts if tasks remain.
    pub(super) fn skip_shifted(
        &mut self,
        begin: usize,
        range: std::ops::Range<usize>,
        by: i64,
    ) -> Option<(usize, i64)> {
        let ordered = &self.ordered;
        let last = if ordered.last(range.end) > ordered.last(range.start) {
            ordered.last(range.end)
        } else {
            ordered.tasks.ends[range.clone()].iter().copied().max().unwrap_or(0)
        };
        self.makespan = self.makespan.max(shifted(last, by));
        // Streams without a task in between are free at their earlier times.
        let [before, after] = &mut self.free_around;
        ordered.free(range.start, before);
        ordered.free(range.end, after);
        for (free, (&old_free, &new_free)) in self.free.iter_mut().zip(before.iter().zip(after.iter())) {
            if new_free != old_free {
                *free = shifted(new_free, by);
            }
        }
        let (from, next) = (range.start, range.end);
        self.segments.push(Segment { timed: begin..self.timed.len(), shifted: range, by });
        self.record_in_flight(from, next);
        let done = |task: &u32| self.marks[*task as usize].timed == self.change;
        let finished = next == self.ordered.len() && self.affected.iter().all(done);
        (!finished).then_some((next, by))
    }
}
