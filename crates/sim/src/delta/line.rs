//! A timeline by position: tasks in the order of their turns, when they were ready and over, and when streams were free.

use crate::delta::lanes::lanes;
use std::ops::Range;

/// The streams of a task, from its bits.
pub fn streams(bits: u64) -> impl Iterator<Item = usize> {
    lanes(bits)
}

/// A time after a shift.
#[inline]
pub fn shifted(time: u64, by: i64) -> u64 {
    time.saturating_add_signed(by)
}

/// Positions between two at which it is kept when streams are free.
const EVERY: usize = 32;

/// Tasks that have had their turns, one after the other.
#[derive(Clone, Debug, Default)]
pub struct Turns {
    pub order: Vec<u32>,
    pub ready: Vec<u64>,
    pub ends: Vec<u64>,
    /// The streams that each took up, as bits: those of its network may be others by now.
    pub taken: Vec<u64>,
}

impl Turns {
    pub fn len(&self) -> usize {
        self.order.len()
    }

    pub fn clear(&mut self) {
        self.order.clear();
        self.ready.clear();
        self.ends.clear();
        self.taken.clear();
    }

    pub fn push(&mut self, task: u32, taken: u64, ready: u64, end: u64) {
        self.order.push(task);
        self.ready.push(ready);
        self.ends.push(end);
        self.taken.push(taken);
    }

    /// Adds those of another in a range, shifted.
    pub fn extend(&mut self, other: &Turns, range: Range<usize>, by: i64) {
        self.order.extend_from_slice(&other.order[range.clone()]);
        self.taken.extend_from_slice(&other.taken[range.clone()]);
        self.ready.extend(other.ready[range.clone()].iter().map(|&time| shifted(time, by)));
        self.ends.extend(other.ends[range].iter().map(|&time| shifted(time, by)));
    }

    /// Puts all of another from a position on: in the place of as many, or of all that were there.
    fn replace(&mut self, from: usize, to: usize, other: &Turns) {
        fn one<T: Copy>(own: &mut Vec<T>, range: Range<usize>, other: &[T]) {
            if range.len() == other.len() {
                own[range].copy_from_slice(other);
            } else {
                own.truncate(range.start);
                own.extend_from_slice(other);
            }
        }
        one(&mut self.order, from..to, &other.order);
        one(&mut self.ready, from..to, &other.ready);
        one(&mut self.ends, from..to, &other.ends);
        one(&mut self.taken, from..to, &other.taken);
    }
}

/// A timeline by position in the order, and by task.
#[derive(Clone, Debug, Default)]
pub struct Line {
    pub turns: Turns,
    /// Per task: its position, or [`super::NONE`].
    pub place: Vec<u32>,
    /// Before every so many positions: when each stream is free again, and the last end.
    free: Vec<u64>,
    last: Vec<u64>,
    /// How many streams there are.
    streams: usize,
    now: Vec<u64>,
}

impl Line {
    /// An empty one, with so many streams.
    pub fn new(streams: usize) -> Self {
        Self { streams, free: vec![0; streams], last: vec![0], ..Self::default() }
    }

    pub fn len(&self) -> usize {
        self.turns.len()
    }

    /// When each stream is free again before the task at a position.
    #[inline]
    pub fn free(&self, at: usize, free: &mut Vec<u64>) {
        let kept = at / EVERY;
        free.clear();
        free.extend_from_slice(&self.free[kept * self.streams..(kept + 1) * self.streams]);
        for earlier in kept * EVERY..at {
            let end = self.turns.ends[earlier];
            streams(self.turns.taken[earlier]).for_each(|stream| free[stream] = end);
        }
    }

    /// The last end before a position.
    pub fn last(&self, at: usize) -> u64 {
        let kept = at / EVERY;
        self.turns.ends[kept * EVERY..at].iter().fold(self.last[kept], |last, &end| last.max(end))
    }

    /// The first position whose task is not over at a time.
    pub fn first_busy(&self, time: u64) -> usize {
        let kept = self.last.partition_point(|&last| last < time).saturating_sub(1);
        let later = self.turns.ends[kept * EVERY..].iter();
        later.take_while(|&&end| end < time).count() + kept * EVERY
    }

    /// Puts tasks from a position on, in the place of those up to another; where these are not as many, of all.
    pub fn replace(&mut self, from: usize, to: usize, turns: &Turns) {
        self.turns.replace(from, to, turns);
        let changed = from + turns.len();
        let kept = from / EVERY;
        self.free.resize((self.len() / EVERY + 1) * self.streams, 0);
        self.last.resize(self.len() / EVERY + 1, 0);
        self.now.clear();
        self.now.extend_from_slice(&self.free[kept * self.streams..(kept + 1) * self.streams]);
        let mut last = self.last[kept];
        for row in kept + 1..self.last.len() {
            for at in (row - 1) * EVERY..row * EVERY {
                let end = self.turns.ends[at];
                streams(self.turns.taken[at]).for_each(|stream| self.now[stream] = end);
                last = last.max(end);
            }
            let free = &mut self.free[row * self.streams..(row + 1) * self.streams];
            // Nothing after it has changed.
            if row * EVERY >= changed && self.last[row] == last && *free == self.now[..] {
                return;
            }
            free.copy_from_slice(&self.now);
            self.last[row] = last;
        }
    }
}
