//! The timeline of tasks: FlexFlow's simulation (Jia et al., arXiv 1807.05358, section 5), with tasks on several
//! streams.
//!
//! Assumptions, as in the paper: durations are known. A stream runs its tasks in the order in which they become ready
//! (ties: program order). A task starts as soon as its predecessors have ended and its streams are free. Tasks are
//! handled in order of (ready time, number), which is each stream's order. So one pass with a priority queue is enough.
//! All times are whole picoseconds: results are exact.

use crate::tasks::Tasks;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// No task.
pub const NO_TASK: u32 = u32::MAX;

/// Ready time, start and end of every task, in picoseconds from the start of the step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Timeline {
    /// Per task: when its last predecessor ended.
    pub ready: Vec<u64>,
    /// Per task: when it started.
    pub start: Vec<u64>,
    /// Per task: when it was over.
    pub end: Vec<u64>,
    /// All tasks in the order of their ready times.
    pub order: Vec<u32>,
    /// Per task: the task whose end let it start: a predecessor, or the previous task on a stream.
    pub released_by: Vec<u32>,
}

impl Timeline {
    /// Simulates tasks.
    pub fn of(tasks: &Tasks) -> Self {
        let count = tasks.len();
        let mut missing: Vec<u32> = tasks.ids().map(|task| tasks.waits_for(task).len() as u32).collect();
        let (first, waiting) = readers(tasks);
        let mut line = Self::empty(count);
        let mut free = vec![(0u64, NO_TASK); tasks.stream_count()];
        let mut queue: BinaryHeap<Reverse<(u64, u32)>> =
            (0..count as u32).filter(|&t| missing[t as usize] == 0).map(|t| Reverse((0, t))).collect();
        while let Some(Reverse((ready, task))) = queue.pop() {
            line.order.push(task);
            line.serve(tasks, &mut free, task, ready);
            for &next in &waiting[first[task as usize] as usize..first[task as usize + 1] as usize] {
                if line.release(task, next, &mut missing) {
                    queue.push(Reverse((line.ready[next as usize], next)));
                }
            }
        }
        line
    }

    /// The timeline of `count` tasks, none of which has run.
    pub(crate) fn empty(count: usize) -> Self {
        Self {
            ready: vec![0; count],
            start: vec![0; count],
            end: vec![0; count],
            order: Vec::with_capacity(count),
            released_by: vec![NO_TASK; count],
        }
    }

    /// Runs a task as soon as its streams are free, and occupies them until its end.
    pub(crate) fn serve(&mut self, tasks: &Tasks, free: &mut [(u64, u32)], task: u32, ready: u64) {
        let at = task as usize;
        let mut start = ready;
        for &stream in tasks.streams(at) {
            let (until, whose) = free[stream as usize];
            if until > start {
                (start, self.released_by[at]) = (until, whose);
            }
        }
        let end = start.saturating_add(tasks.duration(at));
        (self.start[at], self.end[at]) = (start, end);
        tasks.streams(at).iter().for_each(|&stream| free[stream as usize] = (end, task));
    }

    /// Counts an ended predecessor of a task; returns whether it was the last.
    pub(crate) fn release(&mut self, by: u32, task: u32, missing: &mut [u32]) -> bool {
        let (end, at) = (self.end[by as usize], task as usize);
        if end > self.ready[at] || self.released_by[at] == NO_TASK {
            (self.ready[at], self.released_by[at]) = (end, by);
        }
        missing[at] -= 1;
        missing[at] == 0
    }

    /// When the last task is over.
    pub fn makespan(&self) -> u64 {
        self.end.iter().copied().max().unwrap_or(0)
    }

    /// The critical path, first to last: each task started when the one before ended.
    pub fn critical_path(&self) -> Vec<u32> {
        let last = (0..self.end.len()).max_by_key(|&task| (self.end[task], Reverse(task)));
        let mut path = Vec::new();
        let mut at = last.map_or(NO_TASK, |task| task as u32);
        while at != NO_TASK {
            path.push(at);
            at = self.released_by[at as usize];
        }
        path.reverse();
        path
    }
}

/// The successors of each task, as one flat list with offsets.
pub(crate) fn readers(tasks: &Tasks) -> (Vec<u32>, Vec<u32>) {
    let mut first = vec![0u32; tasks.len() + 1];
    for task in tasks.ids() {
        tasks.waits_for(task).iter().for_each(|&other| first[other as usize + 1] += 1);
    }
    for at in 0..tasks.len() {
        first[at + 1] += first[at];
    }
    let mut next = first.clone();
    let mut waiting = vec![0; first[tasks.len()] as usize];
    for task in tasks.ids() {
        for &other in tasks.waits_for(task) {
            waiting[next[other as usize] as usize] = task as u32;
            next[other as usize] += 1;
        }
    }
    (first, waiting)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_serves_first_who_was_ready_first() {
        let mut tasks = Tasks::default();
        let a = tasks.push(10, &[0], &[]);
        let b = tasks.push(4, &[1], &[]);
        // Ready at 10 and at 4: the later number runs first on stream 2.
        let late = tasks.push(5, &[2], &[a]);
        let early = tasks.push(20, &[2], &[b]);
        let line = Timeline::of(&tasks);
        assert_eq!((line.start[early as usize], line.start[late as usize]), (4, 24));
        assert_eq!(line.makespan(), 29);
        assert_eq!(line.critical_path(), [b, early, late]);
    }

    #[test]
    fn a_gang_waits_until_all_its_streams_are_free() {
        let mut tasks = Tasks::default();
        tasks.push(10, &[0], &[]);
        tasks.push(3, &[1], &[]);
        let gang = tasks.push(5, &[0, 1], &[]);
        let after = tasks.push(1, &[1], &[]);
        let line = Timeline::of(&tasks);
        assert_eq!((line.start[gang as usize], line.end[gang as usize]), (10, 15));
        assert_eq!(line.start[after as usize], 15, "streams serve in order, gangs too");
    }

    #[test]
    fn what_takes_no_time_waits_for_no_stream() {
        let mut tasks = Tasks::default();
        tasks.push(10, &[0], &[]);
        let view = tasks.push(0, &[0], &[]);
        let line = Timeline::of(&tasks);
        assert_eq!(line.end[view as usize], 0);
    }

    #[test]
    fn communication_hides_behind_computation_where_nothing_waits_for_it() {
        let mut tasks = Tasks::default();
        let backward = tasks.push(10, &[0], &[]);
        let reduce = tasks.push(8, &[1], &[backward]);
        let next = tasks.push(10, &[0], &[backward]);
        tasks.push(1, &[0], &[reduce]);
        let line = Timeline::of(&tasks);
        assert_eq!((line.start[reduce as usize], line.start[next as usize]), (10, 10));
        assert_eq!(line.makespan(), 21);
    }
}
