//! Tasks: what takes time, what it takes up, and what must be over before it. Nothing here knows of programs.

use std::ops::Range;

/// One list per task, all in one piece of memory.
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

/// Tasks in an order in which each comes after those that it waits for.
///
/// A stream (a device's compute units, a device's port to a level's links) works on one task at a time. A task that
/// takes up several streams (a collective) starts when all of them are free; one that takes up none, as soon
/// as it can.
#[derive(Clone, Debug, Default)]
pub struct Tasks {
    /// Picoseconds.
    durations: Vec<u64>,
    streams: Lists,
    waits_for: Lists,
    /// One more than the highest stream.
    stream_count: usize,
}

impl Tasks {
    /// Adds a task; `waits_for` are tasks added before. What takes no time takes up nothing.
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

    /// How many there are.
    pub fn len(&self) -> usize {
        self.durations.len()
    }

    /// Whether there are none.
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

    /// The streams that a task takes up.
    pub fn streams(&self, task: usize) -> &[u32] {
        self.streams.of(task)
    }

    /// The tasks that must be over before it.
    pub fn waits_for(&self, task: usize) -> &[u32] {
        self.waits_for.of(task)
    }

    /// How many streams there are.
    pub fn stream_count(&self) -> usize {
        self.stream_count
    }

    /// Changes what every task takes. What took no time keeps taking none.
    pub fn rescale(&mut self, mut change: impl FnMut(usize, u64) -> u64) {
        for (task, duration) in self.durations.iter_mut().enumerate() {
            if *duration > 0 {
                *duration = change(task, *duration).max(1);
            }
        }
    }
}
