//! Timing a changed network from the timeline before the change.
//!
//! Tasks have their turns in order of (ready time, rank). A change leaves what comes before its first task as it was.
//! From there on a *window* of tasks is timed anew, turn by turn: tasks that only waited for what came before the window are taken
//! from the old order, others from a small heap as what they wait for has its turn. As soon as all that is under
//! way, and all streams, are as they were at some place of the old order but for one difference in time, all that follows
//! is as it was but for that difference: the window ends, and what is *shifted* need not be looked at, up to the next
//! task that the change concerns, where another window begins. Nothing is written into the old timeline before the change is
//! kept.

use crate::delta::{
    NONE,
    lanes::lanes,
    network::{Network, Task},
};
use crate::{Tasks, Timeline};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Turns between the first two looks for the end of a window; then twice as many, and so on, up to the last.
const FIRST_LOOK: usize = 2;
const RARELY: usize = 64;
/// Fewer tasks than this are timed anew rather than skipped.
const WORTH_SKIPPING: usize = 4;

/// A task whose turn can come: when it is ready, its rank, its place.
type Turn = (u64, u64, u32);

/// A timeline by position in the order, and by task.
#[derive(Clone, Debug, Default)]
struct Line {
    order: Vec<u32>,
    ready: Vec<u64>,
    ends: Vec<u64>,
    /// The position after the last task that it waits for.
    known: Vec<u32>,
    /// The first position whose task may not be over when this one is ready.
    busy: Vec<u32>,
    /// Before the task at a position, and at the end: when each stream is free again.
    free: Vec<u64>,
    /// How many streams there are.
    streams: usize,
    /// The last end before a position; one more at the end.
    last: Vec<u64>,
    /// Per task: its position, or [`NONE`].
    place: Vec<u32>,
}

/// What the change that is being weighed means for a task; counters say whether it is about this change.
#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    /// It is new or changed.
    concerned: u32,
    /// The task that was in this place is gone.
    gone: u32,
    /// It waits in the heap, or has had its turn.
    queued: u32,
    /// It has had its turn in a window, and is over then.
    timed: u32,
    end: u64,
    /// Where it is concerned: it is not ready earlier than this, as far as can be told.
    soonest: u64,
}

/// Tasks of a window, and the part of the old order after it that is only shifted.
#[derive(Clone, Debug)]
struct Piece {
    timed: std::ops::Range<usize>,
    shifted: std::ops::Range<usize>,
    by: i64,
}

/// The timeline of a network, and of the change that is being weighed.
#[derive(Clone, Debug, Default)]
pub struct Walk {
    line: Line,
    /// Whether a change is being weighed.
    pending: bool,
    /// The number of the change.
    change: u32,
    marks: Vec<Mark>,
    /// Concerned tasks, by rank.
    concerned: Vec<u32>,
    /// Positions of tasks that are gone.
    gone: Vec<u32>,
    /// Up to here everything stays.
    same: usize,
    pieces: Vec<Piece>,
    /// All windows' tasks, in order.
    timed: Vec<Turn>,
    makespan: u64,
    /// When each stream is free again in the window.
    free: Vec<u64>,
    heap: BinaryHeap<Reverse<Turn>>,
    /// Tasks that were timed.
    pub steps: u64,
}

/// The streams of a task, from its bits.
fn streams(bits: u64) -> impl Iterator<Item = usize> {
    lanes(bits)
}

fn shifted(time: u64, by: i64) -> u64 {
    time.saturating_add_signed(by)
}

impl Line {
    /// Adds the next task and what follows from it.
    fn push(&mut self, network: &Network<'_>, task: u32, ready: u64, end: u64) {
        let at = self.order.len();
        let inputs = network.before(task).iter().filter(|&&other| other != NONE);
        let known = inputs.map(|&other| self.place[other as usize] + 1).max().unwrap_or(0);
        let mut busy = self.busy.last().map_or(0, |&busy| busy as usize);
        while busy < at && self.ends[busy] < ready {
            busy += 1;
        }
        let next = self.free.len();
        self.free.extend_from_within(next - self.streams..);
        streams(network.task(task).streams).for_each(|stream| self.free[next + stream] = end);
        self.last.push(self.last[at].max(end));
        self.order.push(task);
        self.ready.push(ready);
        self.ends.push(end);
        self.known.push(known);
        self.busy.push(busy as u32);
        self.place[task as usize] = at as u32;
    }

    fn truncate(&mut self, len: usize) {
        self.order.truncate(len);
        self.ready.truncate(len);
        self.ends.truncate(len);
        self.known.truncate(len);
        self.busy.truncate(len);
        self.free.truncate((len + 1) * self.streams);
        self.last.truncate(len + 1);
    }

    fn len(&self) -> usize {
        self.order.len()
    }

    /// When each stream is free again before the task at a position.
    fn free(&self, at: usize) -> &[u64] {
        &self.free[at * self.streams..(at + 1) * self.streams]
    }
}

impl Walk {
    /// The timeline of a network, from nothing.
    pub fn new(network: &Network<'_>) -> Self {
        let all = network.tasks();
        let (tasks, _) = to_tasks(network, &all);
        let found = Timeline::of(&tasks);
        let mut walk = Self::default();
        walk.line.streams = network.lanes().count() * network.lanes().streams;
        walk.line.free.resize(walk.line.streams, 0);
        walk.line.last.push(0);
        walk.grow(network);
        for &at in &found.order {
            walk.line.push(network, all[at as usize], found.ready[at as usize], found.end[at as usize]);
        }
        walk
    }

    /// Makes room for places that are new.
    fn grow(&mut self, network: &Network<'_>) {
        self.line.place.resize(network.places(), NONE);
        self.marks.resize(network.places(), Mark::default());
    }

    /// How many tasks there are, without the change that is being weighed.
    pub fn len(&self) -> usize {
        self.line.len()
    }

    /// When the last task ends.
    pub fn makespan(&self) -> u64 {
        if self.pending { self.makespan } else { self.line.last[self.line.len()] }
    }

    /// When a task ends.
    pub fn end(&self, task: u32) -> u64 {
        let place = self.line.place[task as usize] as usize;
        if !self.pending {
            return self.line.ends[place];
        }
        self.over(task, usize::MAX).unwrap_or(0)
    }

    /// The tasks that make the step as long as it is, last to first: each started when the next one here ended.
    pub fn critical_path<'n>(&'n self, network: &'n Network<'_>) -> impl Iterator<Item = u32> + 'n {
        let line = &self.line;
        let last = (0..line.len()).max_by_key(|&at| line.ends[at]);
        std::iter::successors(last, move |&at| {
            let task = line.order[at];
            let start = line.ends[at] - network.task(task).duration;
            if start == 0 {
                return None;
            }
            if start == line.ready[at] {
                let made = network.before(task).iter().filter(|&&other| other != NONE);
                let mut made = made.map(|&other| line.place[other as usize] as usize);
                return made.find(|&place| line.ends[place] == start);
            }
            // It waited for a stream: for the last that had it.
            let taken = network.task(task).streams;
            (0..at).rev().find(|&other| {
                line.ends[other] == start && network.task(line.order[other]).streams & taken != 0
            })
        })
        .map(|at| line.order[at])
    }

    /// Times the network after a change; its makespan.
    pub fn weigh(&mut self, network: &Network<'_>) -> u64 {
        self.begin(network);
        let (mut cut, mut by) = (self.reach(network, 0, 0), 0);
        self.same = cut;
        self.makespan = self.line.last[cut];
        if cut < self.line.len() || !self.concerned.is_empty() {
            while let Some(next) = self.window(network, cut, by) {
                (cut, by) = next;
            }
        }
        self.pending = true;
        self.makespan
    }

    /// The change stays.
    pub fn keep(&mut self, network: &Network<'_>) {
        self.pending = false;
        if self.pieces.is_empty() {
            return;
        }
        let tail = self.same;
        let old: Vec<(u32, u64, u64)> = (tail..self.line.len())
            .map(|at| (self.line.order[at], self.line.ready[at], self.line.ends[at]))
            .collect();
        self.line.truncate(tail);
        network.gone.iter().for_each(|&task| self.line.place[task as usize] = NONE);
        for piece in std::mem::take(&mut self.pieces) {
            for &(ready, _, task) in &self.timed[piece.timed] {
                self.line.push(network, task, ready, self.marks[task as usize].end);
            }
            for &(task, ready, end) in &old[piece.shifted.start - tail..piece.shifted.end - tail] {
                self.line.push(network, task, shifted(ready, piece.by), shifted(end, piece.by));
            }
        }
    }

    /// The change is undone.
    pub fn go_back(&mut self) {
        self.pending = false;
        self.pieces.clear();
    }

    /// Marks what the change concerns.
    fn begin(&mut self, network: &Network<'_>) {
        self.grow(network);
        self.change = self.change.wrapping_add(1);
        if self.change == 0 {
            self.marks.fill(Mark::default());
            self.change = 1;
        }
        self.pieces.clear();
        self.timed.clear();
        self.gone.clear();
        self.concerned.clear();
        for &task in &network.gone {
            let (mark, place) = (&mut self.marks[task as usize], self.line.place[task as usize]);
            if place != NONE && mark.gone != self.change {
                mark.gone = self.change;
                self.gone.push(place);
            }
        }
        for &task in network.touched.iter().filter(|&&task| network.task(task).rank != 0) {
            self.marks[task as usize].concerned = self.change;
            self.concerned.push(task);
        }
        self.concerned.sort_unstable_by_key(|&task| network.task(task).rank);
    }

    /// The position that a task has in the old order, if it was there.
    fn old_place(&self, task: u32) -> Option<usize> {
        let place = self.line.place[task as usize];
        (place != NONE && self.marks[task as usize].gone != self.change).then_some(place as usize)
    }

    /// By how much the task at a position of the old order is shifted, where no window has timed it.
    fn shift(&self, place: usize) -> i64 {
        let piece = self.pieces.iter().rev().find(|piece| piece.shifted.start <= place);
        piece.map_or(0, |piece| piece.by)
    }

    /// When a task is over, if it has had its turn before or in the window that starts at `cut`.
    #[inline]
    fn over(&self, task: u32, cut: usize) -> Option<u64> {
        let mark = &self.marks[task as usize];
        if mark.timed == self.change {
            return Some(mark.end);
        }
        let place = self.line.place[task as usize] as usize;
        if place >= cut || place == NONE as usize || mark.gone == self.change {
            return None;
        }
        let end = self.line.ends[place];
        Some(if place < self.same { end } else { shifted(end, self.shift(place)) })
    }

    /// When a task is ready; none if something that it waits for has not had its turn.
    #[inline]
    fn ready(&self, network: &Network<'_>, task: u32, cut: usize) -> Option<u64> {
        let mut ready = 0;
        for &other in network.before(task).iter().filter(|&&other| other != NONE) {
            ready = ready.max(self.over(other, cut)?);
        }
        Some(ready)
    }

    /// The first position from one on that concerned tasks without a turn can reach, if everything up to there is shifted.
    fn reach(&mut self, network: &Network<'_>, from: usize, by: i64) -> usize {
        let gone = self.gone.iter().map(|&place| place as usize).filter(|&place| place >= from);
        let mut cut = gone.min().unwrap_or(self.line.len());
        for at in 0..self.concerned.len() {
            let task = self.concerned[at];
            if self.marks[task as usize].timed == self.change {
                continue;
            }
            cut = cut.min(self.old_place(task).unwrap_or(cut));
            // As if it ran in the old order: others are ready later only if something comes later.
            let mut ready = 0;
            for &other in network.before(task).iter().filter(|&&other| other != NONE) {
                let mark = &self.marks[other as usize];
                let end = match self.over(other, from) {
                    Some(end) => shifted(end, -by),
                    None if mark.concerned == self.change => {
                        mark.soonest.saturating_add(network.task(other).duration)
                    }
                    None => self.line.ends[self.line.place[other as usize] as usize],
                };
                ready = ready.max(end);
            }
            self.marks[task as usize].soonest = ready;
            let place = from + self.line.ready[from..].partition_point(|&other| other < ready);
            cut = cut.min(place);
        }
        cut.max(from)
    }

    /// Times tasks from a position of the old order on, before which everything has had its turn; `by`: the shift
    /// just before it. Where another window has to start, if any.
    fn window(&mut self, network: &Network<'_>, cut: usize, by: i64) -> Option<(usize, i64)> {
        let (count, change) = (self.line.len(), self.change);
        self.free.clear();
        self.free.extend(self.line.free(cut).iter().map(|&time| shifted(time, by)));
        let begin = self.timed.len();
        self.heap.clear();
        for at in 0..self.concerned.len() {
            let task = self.concerned[at];
            if self.marks[task as usize].timed != change
                && let Some(ready) = self.ready(network, task, cut)
            {
                // The window before may have queued it.
                self.marks[task as usize].queued = 0;
                self.enqueue(network, ready, task);
            }
        }
        // The next that only waits for what was before the window; the first without a turn; the last with one.
        let (mut cursor, mut first, mut furthest) = (cut, cut, None);
        let (mut look, mut patience) = (begin + FIRST_LOOK, FIRST_LOOK);
        loop {
            while cursor < count {
                let mark = &self.marks[self.line.order[cursor] as usize];
                if self.line.known[cursor] as usize <= cut && mark.concerned != change && mark.gone != change
                {
                    break;
                }
                cursor += 1;
            }
            let queued = self.heap.peek().map(|&Reverse(turn)| turn);
            let turn = if cursor < count {
                let task = self.line.order[cursor];
                let turn = (shifted(self.line.ready[cursor], by), network.task(task).rank, task);
                match queued {
                    Some(queued) if queued < turn => {
                        self.heap.pop();
                        queued
                    }
                    _ => {
                        cursor += 1;
                        turn
                    }
                }
            } else if let Some(queued) = queued {
                self.heap.pop();
                queued
            } else {
                self.pieces.push(Piece { timed: begin..self.timed.len(), shifted: count..count, by });
                return None;
            };
            self.serve(network, turn);
            furthest = furthest.max(self.old_place(turn.2));
            self.tell_readers(network, turn.2, cut);
            while first < count && {
                let mark = &self.marks[self.line.order[first] as usize];
                mark.timed == change || mark.gone == change
            } {
                first += 1;
            }
            if self.timed.len() >= look && first < count && furthest.is_none_or(|furthest| furthest < first) {
                patience = (2 * patience).min(RARELY);
                look = self.timed.len() + patience;
                if let Some(by) = self.settled(network, cut, first) {
                    let next = self.reach(network, first, by);
                    if next >= first + WORTH_SKIPPING {
                        return self.skip(begin, first..next, by);
                    }
                }
            }
        }
    }

    /// Gives a task its turn.
    #[inline]
    fn serve(&mut self, network: &Network<'_>, turn: Turn) {
        let (ready, _, task) = turn;
        let Task { duration, streams: taken, .. } = *network.task(task);
        let start = streams(taken).fold(ready, |start, stream| start.max(self.free[stream]));
        let end = start.saturating_add(duration);
        streams(taken).for_each(|stream| self.free[stream] = end);
        self.makespan = self.makespan.max(end);
        let mark = &mut self.marks[task as usize];
        (mark.timed, mark.queued, mark.end) = (self.change, self.change, end);
        self.timed.push(turn);
        self.steps += 1;
    }

    fn enqueue(&mut self, network: &Network<'_>, ready: u64, task: u32) {
        let mark = &mut self.marks[task as usize];
        if mark.queued != self.change {
            mark.queued = self.change;
            self.heap.push(Reverse((ready, network.task(task).rank, task)));
        }
    }

    /// Queues those that waited for a task and now for nothing.
    #[inline]
    fn tell_readers(&mut self, network: &Network<'_>, task: u32, cut: usize) {
        for reader in network.readers(task) {
            if self.marks[reader as usize].queued != self.change
                && let Some(ready) = self.ready(network, reader, cut)
            {
                self.enqueue(network, ready, reader);
            }
        }
    }

    /// Whether all from position `first` on, which has not had its turn, is only shifted; by how much.
    fn settled(&self, network: &Network<'_>, cut: usize, first: usize) -> Option<i64> {
        let line = &self.line;
        let next = line.order[first];
        if self.marks[next as usize].concerned == self.change {
            return None;
        }
        let (old, new) = (line.ready[first], self.ready(network, next, cut)?);
        let by = new.wrapping_sub(old) as i64;
        // A stream that nobody waits for may differ.
        let same = |(&old_free, &new_free): (&u64, &u64)| {
            shifted(old_free, by) == new_free || (old_free <= old && new_free <= new)
        };
        if !line.free(first).iter().zip(&self.free).all(same) {
            return None;
        }
        // What is under way must be shifted as the rest, if anybody waits for it.
        let odd = |task: u32, was: u64, is: u64| {
            (was >= old || is >= new)
                && shifted(was, by) != is
                && network.readers(task).any(|reader| {
                    let mark = &self.marks[reader as usize];
                    let place = line.place[reader as usize] as usize;
                    mark.concerned != self.change && mark.timed != self.change && place >= cut
                })
        };
        let timed = self.timed.iter().rev().any(|&(.., task)| {
            self.old_place(task)
                .is_some_and(|place| odd(task, line.ends[place], self.marks[task as usize].end))
        });
        if timed {
            return None;
        }
        let most = self.pieces.iter().map(|piece| piece.by).max().unwrap_or(0).max(0);
        let earliest = shifted(old, -(most - by).max(0));
        let before = line.ready[..cut].partition_point(|&ready| ready < earliest);
        let busy = line.busy.get(before.saturating_sub(1)).map_or(0, |&busy| busy as usize);
        let before = (busy..cut).any(|place| {
            let (task, was) = (line.order[place], line.ends[place]);
            let mark = &self.marks[task as usize];
            let here = mark.timed != self.change && mark.gone != self.change;
            here && {
                let by = if place < self.same { 0 } else { self.shift(place) };
                odd(task, was, shifted(was, by))
            }
        });
        (!before).then_some(by)
    }

    /// Ends a window: what follows is shifted up to a position, where the next one starts, if there is anything left to do.
    fn skip(&mut self, begin: usize, range: std::ops::Range<usize>, by: i64) -> Option<(usize, i64)> {
        let line = &self.line;
        let last = if line.last[range.end] > line.last[range.start] {
            line.last[range.end]
        } else {
            line.ends[range.clone()].iter().copied().max().unwrap_or(0)
        };
        self.makespan = self.makespan.max(shifted(last, by));
        let next = range.end;
        self.pieces.push(Piece { timed: begin..self.timed.len(), shifted: range, by });
        let done = |task: &u32| self.marks[*task as usize].timed == self.change;
        let over = next == self.line.len() && self.concerned.iter().all(done);
        (!over).then_some((next, by))
    }
}

/// Tasks as the full simulation takes them, in order of rank; and the number of each.
pub fn to_tasks(network: &Network<'_>, all: &[u32]) -> (Tasks, Vec<u32>) {
    let mut numbers = vec![NONE; network.places()];
    let mut tasks = Tasks::default();
    let (mut taken, mut before) = (Vec::new(), Vec::new());
    for &task in all {
        taken.clear();
        taken.extend(streams(network.task(task).streams).map(|stream| stream as u32));
        before.clear();
        let others = network.before(task).iter().filter(|&&other| other != NONE);
        before.extend(others.map(|&other| numbers[other as usize]));
        before.sort_unstable();
        before.dedup();
        numbers[task as usize] = tasks.push(network.task(task).duration, &taken, &before);
    }
    (tasks, numbers)
}
