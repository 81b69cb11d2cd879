//! Timing a changed network from the timeline before the change.
//!
//! Tasks are handled in order of (ready time, rank). A change leaves most of that order as it was, so the old order,
//! from the first position that the change can reach, serves as a guess: the walk takes tasks from it one by one, sets
//! aside those that turn out to come later (a small heap) or whose turn cannot come yet, and goes back where one should
//! have come earlier. Whatever the guess, a walk that ends with all tasks in order has found the one timeline
//! that the rules allow. Where going back gets out of hand, everything is simulated anew.

use crate::delta::{NONE, network::Network};
use crate::{Tasks, Timeline};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Streams that the walk keeps track of: computing, and ports to this many levels less one.
pub const STREAMS: usize = 5;
/// So many tasks may wait for their turn before the guess is given up.
const MOST_STUCK: usize = 128;
/// So many are passed over while others, which they may wait for, are known to come later.
const PASSED_OVER: usize = 8;

/// A task whose turn can come: when it is ready, its rank, its place.
type Turn = (u64, u64, u32);

/// When each stream is free again, and the last end so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct State {
    free: [u64; STREAMS],
    last: u64,
}

/// When a task is over, and its position in the order; [`NONE`] while it has not had its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Done {
    end: u64,
    place: u32,
}

const NOT_YET: Done = Done { end: 0, place: NONE };

/// A timeline by position in the order, and by task.
#[derive(Clone, Debug, Default)]
struct Line {
    order: Vec<u32>,
    ready: Vec<u64>,
    /// Before the task at a position; one more at the end.
    states: Vec<State>,
    done: Vec<Done>,
}

/// The timeline of a network, and of the change that is being weighed.
#[derive(Clone, Debug, Default)]
pub struct Walk {
    now: Line,
    next: Line,
    /// Up to here `next` is the same as `now`.
    same: usize,
    /// Whether a change is being weighed.
    pending: bool,
    guess: Vec<u32>,
    new: Vec<Turn>,
    left: Vec<bool>,
    aside: BinaryHeap<Reverse<Turn>>,
    stuck: Vec<u32>,
    /// How often everything had to be simulated anew.
    pub restarts: u64,
    /// Tasks that were timed.
    pub steps: u64,
}

impl Walk {
    /// The timeline of a network, from nothing.
    pub fn new(network: &Network<'_>) -> Self {
        let mut walk = Self::default();
        walk.simulate(network);
        walk.keep(network);
        walk
    }

    fn line(&self) -> &Line {
        if self.pending { &self.next } else { &self.now }
    }

    /// When the last task ends.
    pub fn makespan(&self) -> u64 {
        self.line().states.last().map_or(0, |state| state.last)
    }

    /// When a task ends.
    pub fn end(&self, task: u32) -> u64 {
        self.line().done[task as usize].end
    }

    /// All tasks, in order.
    pub fn order(&self) -> &[u32] {
        &self.line().order
    }

    /// The tasks that make the step as long as it is, last to first: each started when the next one here ended.
    pub fn critical_path<'n>(&'n self, network: &'n Network<'_>) -> impl Iterator<Item = u32> + 'n {
        let line = self.line();
        let last = (0..line.order.len()).max_by_key(|&at| line.done[line.order[at] as usize].end);
        std::iter::successors(last, move |&at| {
            let task = line.order[at];
            let start = line.done[task as usize].end - network.durations[task as usize];
            if start == 0 {
                return None;
            }
            if start == line.ready[at] {
                let made = network.before(task).iter().filter(|&&other| other != NONE);
                let mut made = made.map(|&other| line.done[other as usize]).filter(|done| done.end == start);
                return made.next().map(|done| done.place as usize);
            }
            // It waited for a stream: for the last that had it.
            (0..at).rev().find(|&before| {
                let other = line.order[before] as usize;
                network.streams[other] & network.streams[task as usize] != 0 && line.done[other].end == start
            })
        })
        .map(|at| line.order[at])
    }

    /// Times the network after a change; its makespan.
    pub fn weigh(&mut self, network: &Network<'_>) -> u64 {
        self.next.done.resize(network.ranks.len(), NOT_YET);
        self.now.done.resize(network.ranks.len(), NOT_YET);
        self.left.resize(network.ranks.len(), false);
        let from = self.guess_order(network);
        self.restore(from);
        if !self.follow(network, from) {
            self.restarts += 1;
            self.simulate(network);
        }
        self.pending = true;
        self.makespan()
    }

    /// The change stays.
    pub fn keep(&mut self, network: &Network<'_>) {
        let from = self.same;
        self.now.done.resize(network.ranks.len(), NOT_YET);
        network.gone.iter().for_each(|&task| self.now.done[task as usize] = NOT_YET);
        self.now.order.truncate(from);
        self.now.ready.truncate(from);
        self.now.states.truncate(from);
        self.now.order.extend_from_slice(&self.next.order[from..]);
        self.now.ready.extend_from_slice(&self.next.ready[from..]);
        self.now.states.extend_from_slice(&self.next.states[from..]);
        for &task in &self.next.order[from..] {
            self.now.done[task as usize] = self.next.done[task as usize];
        }
        self.same = self.now.order.len();
        self.pending = false;
    }

    /// The change is undone.
    pub fn go_back(&mut self) {
        self.pending = false;
    }

    /// Brings `next` back to `now` up to a position.
    fn restore(&mut self, upto: usize) {
        let from = self.same.min(upto);
        let (now, next) = (&self.now, &mut self.next);
        next.order.truncate(from);
        next.ready.truncate(from);
        next.states.truncate(from);
        next.order.extend_from_slice(&now.order[from..upto]);
        next.ready.extend_from_slice(&now.ready[from..upto]);
        next.states.extend_from_slice(&now.states[from..upto]);
        next.states.extend(now.states.get(upto));
        if next.states.is_empty() {
            next.states.push(State::default());
        }
        for &task in &now.order[from..upto] {
            next.done[task as usize] = now.done[task as usize];
        }
        self.same = upto;
    }

    /// Fills `guess` with the tasks that have to be timed, in the old order where they had one; returns the position
    /// from which on.
    fn guess_order(&mut self, network: &Network<'_>) -> usize {
        let now = &self.now;
        let mut from = now.order.len();
        for &task in &network.gone {
            let place = now.done[task as usize].place;
            if place != NONE {
                from = from.min(place as usize);
                self.left[task as usize] = true;
            }
        }
        self.new.clear();
        for &task in &network.touched {
            let place = now.done[task as usize].place;
            if network.ranks[task as usize] == 0 {
                continue;
            }
            if place == NONE || self.left[task as usize] {
                self.new.push((0, network.ranks[task as usize], task));
            } else {
                from = from.min(place as usize);
            }
        }
        // By rank, so that each comes after those that it waits for.
        self.new.sort_unstable_by_key(|&(_, rank, _)| rank);
        for at in 0..self.new.len() {
            let (_, rank, task) = self.new[at];
            let mut ready = 0;
            for &other in network.before(task).iter().filter(|&&other| other != NONE) {
                let end = match self.new[..at].iter().find(|(.., new)| *new == other) {
                    Some((ready, ..)) => ready + network.durations[other as usize],
                    None => now.done[other as usize].end,
                };
                ready = ready.max(end);
            }
            self.new[at].0 = ready;
            let place = now.ready.partition_point(|&other| other < ready);
            from = from.min(place);
            debug_assert!(rank > 0);
        }
        self.new.sort_unstable();
        self.guess.clear();
        let mut new = self.new.iter().peekable();
        for place in from..now.order.len() {
            let task = now.order[place];
            let key = (now.ready[place], network.ranks[task as usize]);
            while let Some(&(.., task)) = new.next_if(|new| (new.0, new.1) < key) {
                self.guess.push(task);
            }
            if !self.left[task as usize] {
                self.guess.push(task);
            }
        }
        self.guess.extend(new.map(|&(.., task)| task));
        for &task in &self.guess {
            self.next.done[task as usize].place = NONE;
        }
        network.gone.iter().for_each(|&task| self.left[task as usize] = false);
        from
    }

    /// When a task is ready; none if something that it waits for has not had its turn.
    #[inline]
    fn ready(&self, network: &Network<'_>, task: u32) -> Option<u64> {
        let mut ready = 0;
        for &other in network.before(task) {
            if other != NONE {
                let done = self.next.done[other as usize];
                if done.place == NONE {
                    return None;
                }
                ready = ready.max(done.end);
            }
        }
        Some(ready)
    }

    /// Gives a task its turn.
    #[inline]
    fn take(&mut self, network: &Network<'_>, state: &mut State, ready: u64, task: u32) {
        let at = task as usize;
        let streams = network.streams[at];
        let mut start = ready;
        for stream in 0..STREAMS {
            if streams >> stream & 1 == 1 {
                start = start.max(state.free[stream]);
            }
        }
        let end = start.saturating_add(network.durations[at]);
        for stream in 0..STREAMS {
            if streams >> stream & 1 == 1 {
                state.free[stream] = end;
            }
        }
        state.last = state.last.max(end);
        self.next.done[at] = Done { end, place: self.next.order.len() as u32 };
        self.next.order.push(task);
        self.next.ready.push(ready);
        self.next.states.push(*state);
        self.steps += 1;
    }

    /// Times the tasks of the guess; false where it gives up.
    fn follow(&mut self, network: &Network<'_>, from: usize) -> bool {
        let guess = std::mem::take(&mut self.guess);
        let done = self.follow_guess(network, &guess, from);
        self.guess = guess;
        self.aside.clear();
        self.stuck.clear();
        done
    }

    fn follow_guess(&mut self, network: &Network<'_>, guess: &[u32], from: usize) -> bool {
        let mut state = self.next.states[from];
        let mut last = (0, 0);
        if from > 0 {
            last = (self.next.ready[from - 1], network.ranks[self.next.order[from - 1] as usize]);
        }
        let mut budget = guess.len();
        let mut cursor = 0;
        // The next task of the guess, and the one after it.
        let (mut head, mut peeked): (Option<Turn>, Option<Turn>) = (None, None);
        loop {
            if head.is_none() {
                head = peeked.take();
            }
            while let (None, Some(&task)) = (head, guess.get(cursor)) {
                cursor += 1;
                match self.ready(network, task) {
                    Some(ready) => head = Some((ready, network.ranks[task as usize], task)),
                    // It may wait for what was set aside.
                    None if self.stuck.len() >= PASSED_OVER && !self.aside.is_empty() => {
                        cursor -= 1;
                        break;
                    }
                    None => self.stuck.push(task),
                }
            }
            while let Some(now) = head {
                if let (None, Some(&task)) = (peeked, guess.get(cursor))
                    && let Some(ready) = self.ready(network, task)
                {
                    peeked = Some((ready, network.ranks[task as usize], task));
                    cursor += 1;
                }
                // The one after it may come first.
                let Some(earlier) = peeked.filter(|peeked| *peeked < now) else { break };
                self.aside.push(Reverse(now));
                (head, peeked) = (Some(earlier), None);
            }
            let aside = self.aside.peek().map(|&Reverse(task)| task);
            let (ready, rank, task) = match (head, aside) {
                (None, None) => return self.stuck.is_empty(),
                (Some(head_task), Some(other)) if other < head_task => {
                    self.aside.pop();
                    other
                }
                (Some(task), _) => {
                    head = None;
                    task
                }
                (None, Some(other)) => {
                    self.aside.pop();
                    other
                }
            };
            if (ready, rank) < last {
                // It should have had its turn before others that have: go back.
                let earlier = |at: &usize| {
                    let rank_there = network.ranks[self.next.order[*at] as usize];
                    (self.next.ready[*at], rank_there) < (ready, rank)
                };
                let place = (0..self.next.order.len()).rev().find(earlier).map_or(0, |at| at + 1);
                let back = self.next.order.len() - place;
                if back > budget {
                    return false;
                }
                budget -= back;
                self.same = self.same.min(place);
                for at in place..self.next.order.len() {
                    let other = self.next.order[at];
                    self.next.done[other as usize].place = NONE;
                    self.stuck.push(other);
                }
                self.next.order.truncate(place);
                self.next.ready.truncate(place);
                self.next.states.truncate(place + 1);
                state = self.next.states[place];
                // What was ready may have waited for what is undone.
                self.stuck.extend(self.aside.drain().map(|Reverse((.., task))| task));
                self.stuck.extend(head.take().iter().chain(&peeked.take()).map(|(.., task)| task));
            }
            last = (ready, rank);
            self.take(network, &mut state, ready, task);
            if !self.stuck.is_empty() {
                if self.stuck.len() > MOST_STUCK {
                    return false;
                }
                let mut at = 0;
                while at < self.stuck.len() {
                    let task = self.stuck[at];
                    match self.ready(network, task) {
                        Some(ready) => {
                            self.aside.push(Reverse((ready, network.ranks[task as usize], task)));
                            self.stuck.swap_remove(at);
                        }
                        None => at += 1,
                    }
                }
            }
        }
    }

    /// Times everything anew.
    fn simulate(&mut self, network: &Network<'_>) {
        let all = network.tasks();
        let (tasks, _) = to_tasks(network, &all);
        let line = Timeline::of(&tasks);
        self.next = Line { done: vec![NOT_YET; network.ranks.len()], ..Line::default() };
        self.same = 0;
        let mut state = State::default();
        self.next.states.push(state);
        for &at in &line.order {
            self.take(network, &mut state, line.ready[at as usize], all[at as usize]);
        }
    }
}

/// Tasks as the full simulation takes them, in order of rank; and the number of each.
pub fn to_tasks(network: &Network<'_>, all: &[u32]) -> (Tasks, Vec<u32>) {
    let mut numbers = vec![NONE; network.ranks.len()];
    let mut tasks = Tasks::default();
    let (mut streams, mut before) = (Vec::new(), Vec::new());
    for &task in all {
        streams.clear();
        streams.extend((0..STREAMS as u32).filter(|s| network.streams[task as usize] >> s & 1 == 1));
        before.clear();
        let others = network.before(task).iter().filter(|&&other| other != NONE);
        before.extend(others.map(|&other| numbers[other as usize]));
        before.sort_unstable();
        before.dedup();
        numbers[task as usize] = tasks.push(network.durations[task as usize], &streams, &before);
    }
    (tasks, numbers)
}
