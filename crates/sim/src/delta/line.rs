//! A timeline by position: tasks in the order of their turns, when they were ready and over, and when streams were free.

use crate::delta::{NONE, lanes::lanes};

/// The streams of a task, from its bits.
pub fn streams(bits: u64) -> impl Iterator<Item = usize> {
    lanes(bits)
}

/// A time after a shift.
#[inline]
pub fn shifted(time: u64, by: i64) -> u64 {
    time.saturating_add_signed(by)
}

/// A task that has had its turn.
#[derive(Clone, Copy, Debug)]
pub struct Turned {
    pub task: u32,
    /// The streams that it takes up, as bits.
    pub taken: u64,
    pub ready: u64,
    pub end: u64,
}

/// A timeline by position in the order, and by task.
#[derive(Clone, Debug, Default)]
pub struct Line {
    pub order: Vec<u32>,
    pub ready: Vec<u64>,
    pub ends: Vec<u64>,
    /// The streams that each took up: those of its network may be others by now.
    pub taken: Vec<u64>,
    /// Before the task at a position, and at the end: when each stream is free again.
    free: Vec<u64>,
    /// How many streams there are.
    streams: usize,
    /// The last end before a position; one more at the end.
    pub last: Vec<u64>,
    /// Per task: its position, or [`NONE`].
    pub place: Vec<u32>,
}

impl Line {
    /// An empty one, with so many streams.
    pub fn new(streams: usize) -> Self {
        Self { streams, free: vec![0; streams], last: vec![0], ..Self::default() }
    }

    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// When each stream is free again before the task at a position.
    #[inline]
    pub fn free(&self, at: usize) -> &[u64] {
        &self.free[at * self.streams..(at + 1) * self.streams]
    }

    /// The first position whose task is not over at a time.
    pub fn first_busy(&self, time: u64) -> usize {
        self.last[1..].partition_point(|&last| last < time)
    }

    /// What is at a position.
    #[inline]
    pub fn at(&self, at: usize) -> Turned {
        Turned { task: self.order[at], taken: self.taken[at], ready: self.ready[at], end: self.ends[at] }
    }

    /// Makes it so long; what is new has to be put.
    pub fn resize(&mut self, len: usize) {
        self.order.resize(len, NONE);
        self.ready.resize(len, 0);
        self.ends.resize(len, 0);
        self.taken.resize(len, 0);
        self.free.resize((len + 1) * self.streams, 0);
        self.last.resize(len + 1, 0);
    }

    /// Puts a task at a position, where all before it are in place.
    #[inline]
    pub fn put(&mut self, at: usize, turned: Turned) {
        let Turned { task, taken, ready, end } = turned;
        self.order[at] = task;
        self.ready[at] = ready;
        self.ends[at] = end;
        self.taken[at] = taken;
        self.place[task as usize] = at as u32;
        let row = at * self.streams;
        self.free.copy_within(row..row + self.streams, row + self.streams);
        streams(taken).for_each(|stream| self.free[row + self.streams + stream] = end);
        self.last[at + 1] = self.last[at].max(end);
    }

    /// Makes what is known of positions from one on agree with those before, where nothing after it has changed.
    pub fn mend(&mut self, from: usize) {
        for at in from..self.len() {
            let (row, next, end) = (at * self.streams, (at + 1) * self.streams, self.ends[at]);
            let last = self.last[at].max(end);
            let mut agrees = self.last[at + 1] == last;
            self.last[at + 1] = last;
            for stream in 0..self.streams {
                let taken = self.taken[at] >> stream & 1 == 1;
                let free = if taken { end } else { self.free[row + stream] };
                agrees &= self.free[next + stream] == free;
                self.free[next + stream] = free;
            }
            if agrees {
                return;
            }
        }
    }
}
