//! Simulation with shared links: concurrent transfers on one link share its bandwidth instead of waiting for each
//! other.
//!
//! A transfer starts as soon as it is ready. Concurrent transfers on one port get equal shares of it. A transfer on
//! several ports has the speed of its most crowded port. Computation is as in [`Timeline::of`]: one task at a time,
//! first come, first served. If no two transfers overlap, both simulations give the same timeline.

use crate::{
    tasks::Tasks,
    timeline::{NO_TASK, Timeline, readers},
};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A transfer in flight.
struct Active {
    task: u32,
    /// Picoseconds that it would still take alone on its ports.
    left: f64,
    /// Number of transfers on its most crowded port.
    shared_by: u32,
}

impl Active {
    /// Its end, if no other transfer starts or ends.
    fn over(&self, now: u64) -> u64 {
        now.saturating_add((self.left * f64::from(self.shared_by)).ceil().max(0.0) as u64)
    }
}

/// The transfers in flight, and the number of transfers per stream.
struct Transfers<'t> {
    tasks: &'t Tasks,
    active: Vec<Active>,
    crowds: Vec<u32>,
    now: u64,
}

impl Transfers<'_> {
    /// Advances all transfers to a later time.
    fn advance(&mut self, to: u64) {
        let passed = to.saturating_sub(self.now) as f64;
        self.active.iter_mut().for_each(|a| a.left = (a.left - passed / f64::from(a.shared_by)).max(0.0));
        self.now = self.now.max(to);
    }

    /// Changes the number of transfers on a transfer's ports by `change`.
    fn crowd(&mut self, task: u32, change: i32) {
        for &stream in self.tasks.streams(task as usize) {
            let crowd = &mut self.crowds[stream as usize];
            *crowd = crowd.saturating_add_signed(change);
        }
        for a in &mut self.active {
            let streams = self.tasks.streams(a.task as usize).iter();
            a.shared_by = streams.map(|&stream| self.crowds[stream as usize]).max().unwrap_or(1).max(1);
        }
    }

    fn begin(&mut self, task: u32, at: u64) {
        self.advance(at);
        let left = self.tasks.duration(task as usize) as f64;
        self.active.push(Active { task, left, shared_by: 1 });
        self.crowd(task, 1);
    }

    /// The next transfer to end, and its end; the first of equals.
    fn next(&self) -> Option<(u64, u32)> {
        self.active.iter().map(|a| (a.over(self.now), a.task)).min()
    }

    fn end(&mut self, task: u32, at: u64) {
        self.advance(at);
        self.active.retain(|a| a.task != task);
        self.crowd(task, -1);
    }
}

impl Timeline {
    /// Simulates tasks. Streams for which `is_shared` holds are shared by concurrent tasks.
    pub fn sharing(tasks: &Tasks, is_shared: impl Fn(u32) -> bool) -> Self {
        let count = tasks.len();
        let mut missing: Vec<u32> = tasks.ids().map(|task| tasks.waits_for(task).len() as u32).collect();
        let (first, waiting) = readers(tasks);
        let mut line = Self::empty(count);
        let mut free = vec![(0u64, NO_TASK); tasks.stream_count()];
        let crowds = vec![0; tasks.stream_count()];
        let mut transfers = Transfers { tasks, active: Vec::new(), crowds, now: 0 };
        let mut queue: BinaryHeap<Reverse<(u64, u32)>> =
            (0..count as u32).filter(|&t| missing[t as usize] == 0).map(|t| Reverse((0, t))).collect();
        loop {
            let (ready, over) = (queue.peek().map(|&Reverse(next)| next), transfers.next());
            let done = match (ready, over) {
                (None, None) => break,
                (ready, Some((end, task))) if ready.is_none_or(|(ready, _)| end <= ready) => {
                    transfers.end(task, end);
                    line.end[task as usize] = end;
                    Some(task)
                }
                (Some((ready, task)), _) => {
                    queue.pop();
                    line.order.push(task);
                    let at = task as usize;
                    let streams = tasks.streams(at);
                    if !streams.is_empty() && streams.iter().all(|&stream| is_shared(stream)) {
                        line.start[at] = ready;
                        transfers.begin(task, ready);
                        None
                    } else {
                        line.serve(tasks, &mut free, task, ready);
                        Some(task)
                    }
                }
                (None, Some(_)) => None,
            };
            let Some(done) = done else { continue };
            for &next in &waiting[first[done as usize] as usize..first[done as usize + 1] as usize] {
                if line.release(done, next, &mut missing) {
                    queue.push(Reverse((line.ready[next as usize], next)));
                }
            }
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Streams from 1 on are links.
    fn sharing(tasks: &Tasks) -> Timeline {
        Timeline::sharing(tasks, |stream| stream > 0)
    }

    #[test]
    fn two_transfers_on_one_link_take_twice_as_long_each() {
        let mut tasks = Tasks::default();
        tasks.push(10, &[1], &[]);
        tasks.push(10, &[1], &[]);
        assert_eq!(sharing(&tasks).end, [20, 20]);
        assert_eq!(Timeline::of(&tasks).end, [10, 20]);
    }

    #[test]
    fn who_is_left_alone_goes_on_at_full_speed() {
        let mut tasks = Tasks::default();
        tasks.push(10, &[1], &[]);
        let first = tasks.push(4, &[0], &[]);
        // Ready at 4: both have half of the link until the first ends at 16, then the second has all.
        tasks.push(20, &[1], &[first]);
        assert_eq!(sharing(&tasks).end, [16, 4, 30]);
    }

    #[test]
    fn a_transfer_goes_at_the_pace_of_its_most_crowded_port() {
        let mut tasks = Tasks::default();
        let gang = tasks.push(10, &[1, 2], &[]);
        tasks.push(10, &[2], &[]);
        tasks.push(10, &[3], &[]);
        let after = tasks.push(1, &[0], &[gang]);
        let line = sharing(&tasks);
        assert_eq!(line.end, [20, 20, 10, 21]);
        assert_eq!(line.start[after as usize], 20);
    }

    #[test]
    fn without_meetings_both_rules_agree() {
        let mut tasks = Tasks::default();
        let mut last = tasks.push(3, &[0], &[]);
        for at in 0..50u64 {
            let sent = tasks.push(1 + at % 7, &[1 + (at % 2) as u32], &[last]);
            last = tasks.push(2 + at % 5, &[0], &[sent]);
        }
        assert_eq!(sharing(&tasks), Timeline::of(&tasks));
    }
}
