//! Tasks: durations, occupied streams and predecessors. This module is independent of programs.

use std::ops::Range;

/// A task's duration. The cost model has no negative times.
pub(crate) fn duration(picoseconds: i64) -> u64 {
    debug_assert!(picoseconds >= 0, "a duration of {picoseconds} ps");
    u64::try_from(picoseconds).unwrap_or(0)
}

/// One list per task, in one flat array.
#[derive(Clone, Debug)]
pub struct Lists {
    starts: Vec<u32>,
    items: Vec<u32>,
}

impl Default for Lists {
    fn default() -> Self {
        Self { starts: vec![0], items: Vec::new() }
    }
}

impl Lists {
    fn push(&mut self, list: &[u32]) {
        self.items.extend_from_slice(list);
        self.starts.push(self.items.len() as u32);
    }

    /// The list of a task.
    pub fn of(&self, task: usize) -> &[u32] {
        &self.items[self.starts[task] as usize..self.starts[task + 1] as usize]
    }
}

/// Tasks in topological order.
///
/// A stream (a device's compute units, or its port to a level's links) runs one task at a time. A task on several
/// streams (a collective) starts when all of them are free. A task without streams starts as soon as it is ready.
#[derive(Clone, Debug, Default)]
pub struct Tasks {
    /// Per task: picoseconds.
    durations: Vec<u64>,
    streams: Lists,
    waits_for: Lists,
    /// The highest stream plus one.
    stream_count: usize,
}

impl Tasks {
    /// Adds a task. `waits_for` are earlier tasks. A task without a duration occupies no streams.
    pub fn push(&mut self, picoseconds: u64, streams: &[u32], waits_for: &[u32]) -> u32 {
        let task = self.durations.len() as u32;
        debug_assert!(waits_for.iter().all(|&other| other < task));
        let streams = if picoseconds == 0 { &[] } else { streams };
        self.durations.push(picoseconds);
        self.streams.push(streams);
        self.waits_for.push(waits_for);
        let most = streams.iter().map(|&s| s as usize + 1).max().unwrap_or(0);
        self.stream_count = self.stream_count.max(most);
        task
    }

    /// Number of tasks.
    pub fn len(&self) -> usize {
        self.durations.len()
    }

    /// Whether there are no tasks.
    pub fn is_empty(&self) -> bool {
        self.durations.is_empty()
    }

    /// All tasks.
    pub fn ids(&self) -> Range<usize> {
        0..self.len()
    }

    /// Picoseconds that a task takes.
    pub fn duration(&self, task: usize) -> u64 {
        self.durations[task]
    }

    /// The streams that a task occupies.
    pub fn streams(&self, task: usize) -> &[u32] {
        self.streams.of(task)
    }

    /// The predecessors of a task.
    pub fn waits_for(&self, task: usize) -> &[u32] {
        self.waits_for.of(task)
    }

    /// Number of streams.
    pub fn stream_count(&self) -> usize {
        self.stream_count
    }

    /// Changes the duration of every task. Tasks without a duration keep none.
    pub fn rescale(&mut self, mut change: impl FnMut(usize, u64) -> u64) {
        for (task, duration) in self.durations.iter_mut().enumerate() {
            if *duration > 0 {
                *duration = change(task, *duration).max(1);
            }
        }
    }
}
