//! What a window of tasks that are timed anew leaves behind it: whether all that follows is only shifted, by how much, and how
//! far that goes.

use super::{MOST_CONCERNED, Piece, UnderWay, Walk};
use crate::delta::{NONE, line::shifted, network::Network};

impl Walk {
    /// The first position from one on that concerned tasks without a turn can reach, if everything up to there is shifted.
    pub(super) fn reach(&mut self, network: &Network<'_>, from: usize, by: i64) -> usize {
        let gone = self.gone.iter().map(|&place| place as usize).filter(|&place| place >= from);
        let mut cut = gone.min().unwrap_or(self.line.len());
        let (mut at, known) = (0, self.concerned.len());
        while at < self.concerned.len() {
            let task = self.concerned[at];
            at += 1;
            let place = self.old_place(task);
            // Where it was, nothing is now.
            cut = cut.min(place.filter(|&place| place >= from).unwrap_or(cut));
            if self.marks[task as usize].timed == self.change {
                continue;
            }
            if place.is_some_and(|place| place < from) {
                cut = cut.min(self.concern_readers(network, task));
            }
            // As if it ran in the old order: others are ready later only if something comes later.
            let mut ready = 0;
            for &other in network.before(task).iter().filter(|&&other| other != NONE) {
                let mark = &self.marks[other as usize];
                let end = match self.over(other, from) {
                    Some(end) => shifted(end, -by),
                    None if mark.concerned == self.change => {
                        mark.soonest.saturating_add(network.task(other).duration)
                    }
                    None => self.line.turns.ends[self.line.place[other as usize] as usize],
                };
                ready = ready.max(end);
            }
            self.marks[task as usize].soonest = ready;
            let place = from + self.line.turns.ready[from..].partition_point(|&other| other < ready);
            cut = cut.min(place);
        }
        if self.concerned.len() > known {
            self.concerned.sort_unstable_by_key(|&task| network.task(task).rank);
        }
        cut.max(from)
    }

    /// A task is late: so may be those who wait for it, which the change concerns from now on. The first place of one of them.
    fn concern_readers(&mut self, network: &Network<'_>, task: u32) -> usize {
        let mut first = self.line.len();
        for reader in network.readers(task) {
            let mark = &mut self.marks[reader as usize];
            if mark.timed == self.change || mark.concerned == self.change {
                continue;
            }
            first = first.min(self.line.place[reader as usize] as usize);
            if self.concerned.len() < MOST_CONCERNED {
                (mark.concerned, mark.soonest) = (self.change, 0);
                self.concerned.push(reader);
            }
        }
        first
    }

    /// Notes the tasks between two positions, only shifted, that may be under way when a window begins at the second.
    pub(super) fn note_under_way(&mut self, from: usize, cut: usize) {
        if cut == 0 {
            return;
        }
        let line = &self.line;
        let time = line.turns.ready[cut - 1];
        for place in line.first_busy(time).max(from)..cut {
            let (task, was) = (line.turns.order[place], line.turns.ends[place]);
            let mark = &self.marks[task as usize];
            if was >= time && mark.timed != self.change && mark.gone != self.change {
                let is = if place < self.same { was } else { shifted(was, self.shift(place)) };
                self.under_way.push(UnderWay { task, was, is });
            }
        }
    }

    /// Whether all from position `first` on, which has not had its turn, is only shifted, up to the next task that the change
    /// concerns; by how much. `now`: nobody who has not had a turn is ready earlier.
    pub(super) fn settled(
        &mut self,
        network: &Network<'_>,
        cut: usize,
        first: usize,
        now: u64,
    ) -> Option<i64> {
        let line = &self.line;
        let (old, new) = (line.turns.ready[first], self.ready(network, line.turns.order[first], cut)?);
        let by = new.wrapping_sub(old) as i64;
        line.free(first, &mut self.around[0]);
        for (stream, (&was, &is)) in self.around[0].iter().zip(&self.free).enumerate() {
            // A stream may be free at another time if whoever wants it next does not notice.
            if shifted(was, by) != is && self.noticed(first, stream, was.max(shifted(is, -by))) {
                return None;
            }
        }
        self.under_way.retain(|task| task.was >= old || task.is >= now);
        // What is under way must be shifted as the rest, unless those who wait for it wait longer for others.
        let (line, change) = (&self.line, self.change);
        let odd = |&UnderWay { task, was, is }: &UnderWay| {
            (was >= old || is >= new)
                && shifted(was, by) != is
                && network.readers(task).any(|reader| {
                    let mark = &self.marks[reader as usize];
                    let place = line.place[reader as usize] as usize;
                    mark.concerned != change && mark.timed != change && place >= cut && {
                        let ready = line.turns.ready[place];
                        was >= ready || is > shifted(ready, by)
                    }
                })
        };
        (!self.under_way.iter().any(odd)).then_some(by)
    }

    /// Whether a task from a position on, up to the first that the change concerns, wants a stream before a time.
    fn noticed(&self, first: usize, stream: usize, before: u64) -> bool {
        let line = &self.line;
        let waiting = (first..line.len()).take_while(|&at| line.turns.ready[at] < before);
        for at in waiting {
            let mark = &self.marks[line.turns.order[at] as usize];
            if mark.concerned == self.change || mark.gone == self.change {
                return false;
            }
            if line.turns.taken[at] >> stream & 1 == 1 {
                return true;
            }
        }
        false
    }

    /// Ends a window: what follows is shifted up to a position, where the next one starts, if there is anything left to do.
    pub(super) fn skip(
        &mut self,
        begin: usize,
        range: std::ops::Range<usize>,
        by: i64,
    ) -> Option<(usize, i64)> {
        let line = &self.line;
        let last = if line.last(range.end) > line.last(range.start) {
            line.last(range.end)
        } else {
            line.turns.ends[range.clone()].iter().copied().max().unwrap_or(0)
        };
        self.makespan = self.makespan.max(shifted(last, by));
        // Streams that nobody has taken meanwhile are free when they were.
        let [before, after] = &mut self.around;
        line.free(range.start, before);
        line.free(range.end, after);
        for (free, (&was, &is)) in self.free.iter_mut().zip(before.iter().zip(after.iter())) {
            if is != was {
                *free = shifted(is, by);
            }
        }
        let (from, next) = (range.start, range.end);
        self.pieces.push(Piece { timed: begin..self.timed.len(), shifted: range, by });
        self.note_under_way(from, next);
        let done = |task: &u32| self.marks[*task as usize].timed == self.change;
        let over = next == self.line.len() && self.concerned.iter().all(done);
        (!over).then_some((next, by))
    }
}
