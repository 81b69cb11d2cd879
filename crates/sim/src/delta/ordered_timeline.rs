//! A timeline by position: tasks in the order of their ready times, and the times at which streams become free.

use crate::delta::device_classes::device_classes;
use std::ops::Range;

/// The streams of a task, from its bits.
pub fn streams_in(bits: u64) -> impl Iterator<Item = usize> {
    device_classes(bits)
}

/// A time plus a shift.
#[inline]
pub fn shifted(time: u64, by: i64) -> u64 {
    time.saturating_add_signed(by)
}

/// Distance of the positions at which the streams' free times are stored.
const EVERY: usize = 32;

/// Tasks with their times, in order.
#[derive(Clone, Debug, Default)]
pub struct TimedTasks {
    pub order: Vec<u32>,
    pub ready: Vec<u64>,
    pub ends: Vec<u64>,
    /// The streams that each task occupied, as bits: its current streams may differ.
    pub streams: Vec<u64>,
}

impl TimedTasks {
    pub fn len(&self) -> usize {
        self.order.len()
    }

    pub fn clear(&mut self) {
        self.order.clear();
        self.ready.clear();
        self.ends.clear();
        self.streams.clear();
    }

    pub fn push(&mut self, task: u32, streams: u64, ready: u64, end: u64) {
        self.order.push(task);
        self.ready.push(ready);
        self.ends.push(end);
        self.streams.push(streams);
    }

    /// Appends a range of other tasks, shifted.
    pub fn extend(&mut self, other: &TimedTasks, range: Range<usize>, by: i64) {
        self.order.extend_from_slice(&other.order[range.clone()]);
        self.streams.extend_from_slice(&other.streams[range.clone()]);
        self.ready.extend(other.ready[range.clone()].iter().map(|&time| shifted(time, by)));
        self.ends.extend(other.ends[range].iter().map(|&time| shifted(time, by)));
    }

    /// Replaces the tasks `from..to` by others of the same number, or all tasks from `from` on.
    fn replace(&mut self, from: usize, to: usize, other: &TimedTasks) {
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
        one(&mut self.streams, from..to, &other.streams);
    }
}

/// A timeline by position in the order, and by task.
#[derive(Clone, Debug, Default)]
pub struct OrderedTimeline {
    pub tasks: TimedTasks,
    /// Per task: its position, or [`super::NONE`].
    pub position: Vec<u32>,
    /// At every `EVERY`-th position: when each stream becomes free, and the last end before it.
    free: Vec<u64>,
    last: Vec<u64>,
    /// Number of streams.
    streams: usize,
    now: Vec<u64>,
}

impl OrderedTimeline {
    /// An empty timeline of some streams.
    pub fn new(streams: usize) -> Self {
        Self { streams, free: vec![0; streams], last: vec![0], ..Self::default() }
    }

    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    /// When each stream becomes free, before the task at a position.
    #[inline]
    pub fn free(&self, at: usize, free: &mut Vec<u64>) {
        let row = at / EVERY;
        free.clear();
        free.extend_from_slice(&self.free[row * self.streams..(row + 1) * self.streams]);
        for earlier in row * EVERY..at {
            let end = self.tasks.ends[earlier];
            streams_in(self.tasks.streams[earlier]).for_each(|stream| free[stream] = end);
        }
    }

    /// The last end before a position.
    pub fn last(&self, at: usize) -> u64 {
        let row = at / EVERY;
        self.tasks.ends[row * EVERY..at].iter().fold(self.last[row], |last, &end| last.max(end))
    }

    /// The first position whose task has not ended at a time.
    pub fn first_busy(&self, time: u64) -> usize {
        let row = self.last.partition_point(|&last| last < time).saturating_sub(1);
        let later = self.tasks.ends[row * EVERY..].iter();
        later.take_while(|&&end| end < time).count() + row * EVERY
    }

    /// Replaces the tasks `from..to` by others of the same number, or all tasks from `from` on.
    pub fn replace(&mut self, from: usize, to: usize, tasks: &TimedTasks) {
        self.tasks.replace(from, to, tasks);
        let changed = from + tasks.len();
        let first_row = from / EVERY;
        self.free.resize((self.len() / EVERY + 1) * self.streams, 0);
        self.last.resize(self.len() / EVERY + 1, 0);
        self.now.clear();
        self.now.extend_from_slice(&self.free[first_row * self.streams..(first_row + 1) * self.streams]);
        let mut last = self.last[first_row];
        for row in first_row + 1..self.last.len() {
            for at in (row - 1) * EVERY..row * EVERY {
                let end = self.tasks.ends[at];
                streams_in(self.tasks.streams[at]).for_each(|stream| self.now[stream] = end);
                last = last.max(end);
            }
            let free = &mut self.free[row * self.streams..(row + 1) * self.streams];
            // All later rows are unchanged.
            if row * EVERY >= changed && self.last[row] == last && *free == self.now[..] {
                return;
            }
            free.copy_from_slice(&self.now);
            self.last[row] = last;
        }
    }
}
