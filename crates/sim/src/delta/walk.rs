//! Timing a changed network from the timeline before the change.
//!
//! Tasks have their turns in order of (ready time, rank). A change leaves what comes before its first task as it was.
//! From there on a *window* of tasks is timed anew, turn by turn: tasks that only waited for what came before the window are taken
//! from the old order, others from a small heap as what they wait for has its turn. As soon as all that is under
//! way, and all streams, are as they were at some place of the old order but for one difference in time, all that follows
//! is as it was but for that difference: the window ends, and what is *shifted* need not be looked at, up to the next
//! task that the change concerns, where another window begins. Nothing is written into the old timeline before the change is
//! kept.

mod settling;

use crate::delta::{
    NONE,
    line::{Line, Turns, shifted, streams},
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
/// Where a change concerns more tasks than this, those that are late because of them are not told apart from the rest.
const MOST_CONCERNED: usize = 256;

/// A task whose turn can come: when it is ready, its rank, its place.
type Turn = (u64, u64, u32);

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

/// A task, and when it was over in the old timeline and is in the new one.
#[derive(Clone, Copy, Debug)]
struct UnderWay {
    task: u32,
    was: u64,
    is: u64,
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
    /// Tasks of the old order that have had their turn and may be under way yet.
    under_way: Vec<UnderWay>,
    /// When each stream is free before and after what is skipped.
    around: [Vec<u64>; 2],
    /// What a change that is kept writes.
    new: Turns,
    /// Tasks that were timed.
    pub steps: u64,
}

impl Walk {
    /// The timeline of a network, from nothing.
    pub fn new(network: &Network<'_>) -> Self {
        let all = network.tasks();
        let (tasks, _) = to_tasks(network, &all);
        let found = Timeline::of(&tasks);
        let streams = network.lanes().count() * network.lanes().streams;
        let mut walk = Self { line: Line::new(streams), ..Self::default() };
        walk.grow(network);
        for (at, &number) in found.order.iter().enumerate() {
            let (task, number) = (all[number as usize], number as usize);
            walk.new.push(task, network.task(task).streams, found.ready[number], found.end[number]);
            walk.line.place[task as usize] = at as u32;
        }
        walk.line.replace(0, 0, &walk.new);
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
        if self.pending { self.makespan } else { self.line.last(self.line.len()) }
    }

    /// When a task ends.
    pub fn end(&self, task: u32) -> u64 {
        let place = self.line.place[task as usize] as usize;
        if !self.pending {
            return self.line.turns.ends[place];
        }
        self.over(task, usize::MAX).unwrap_or(0)
    }

    /// The tasks that make the step as long as it is, last to first: each started when the next one here ended.
    pub fn critical_path<'n>(&'n self, network: &'n Network<'_>) -> impl Iterator<Item = u32> + 'n {
        let line = &self.line;
        let last = (0..line.len()).max_by_key(|&at| line.turns.ends[at]);
        std::iter::successors(last, move |&at| {
            let task = line.turns.order[at];
            let start = line.turns.ends[at] - network.task(task).duration;
            if start == 0 {
                return None;
            }
            if start == line.turns.ready[at] {
                let made = network.before(task).iter().filter(|&&other| other != NONE);
                let mut made = made.map(|&other| line.place[other as usize] as usize);
                return made.find(|&place| line.turns.ends[place] == start);
            }
            // It waited for a stream: for the last that had it.
            let taken = network.task(task).streams;
            (0..at).rev().find(|&other| {
                line.turns.ends[other] == start && network.task(line.turns.order[other]).streams & taken != 0
            })
        })
        .map(|at| line.turns.order[at])
    }

    /// Times the network after a change; its makespan.
    pub fn weigh(&mut self, network: &Network<'_>) -> u64 {
        self.begin(network);
        let (mut cut, mut by) = (self.reach(network, 0, 0), 0);
        self.same = cut;
        self.makespan = self.line.last(cut);
        self.line.free(cut, &mut self.free);
        self.heap.clear();
        self.under_way.clear();
        self.note_under_way(0, cut);
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
        network.gone.iter().for_each(|&task| self.line.place[task as usize] = NONE);
        let (tail, old_len) = (self.same, self.line.len());
        let len = self.pieces.iter().fold(tail, |len, piece| len + piece.timed.len() + piece.shifted.len());
        // What ends the timeline and is neither shifted in time nor in position stays as it is.
        let stays = |piece: &&Piece| piece.by == 0 && piece.shifted.end == old_len && len == old_len;
        let rest = self.pieces.last().filter(stays).map_or(old_len, |piece| piece.shifted.start);
        self.new.clear();
        for piece in &self.pieces {
            for &(ready, _, task) in &self.timed[piece.timed.clone()] {
                self.line.place[task as usize] = (tail + self.new.len()) as u32;
                self.new.push(task, network.task(task).streams, ready, self.marks[task as usize].end);
            }
            let kept = piece.shifted.start..piece.shifted.end.min(rest).max(piece.shifted.start);
            let start = tail + self.new.len();
            if start != kept.start {
                for (place, &task) in (start as u32..).zip(&self.line.turns.order[kept.clone()]) {
                    self.line.place[task as usize] = place;
                }
            }
            self.new.extend(&self.line.turns, kept, piece.by);
        }
        self.line.replace(tail, rest, &self.new);
        self.pieces.clear();
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
        let late = mark.gone == self.change || mark.concerned == self.change;
        if place >= cut || place == NONE as usize || late {
            return None;
        }
        let end = self.line.turns.ends[place];
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

    /// Times tasks from a position of the old order on, before which everything has had its turn; `by`: the shift
    /// just before it. Where another window has to start, if any.
    fn window(&mut self, network: &Network<'_>, cut: usize, by: i64) -> Option<(usize, i64)> {
        let (count, change) = (self.line.len(), self.change);
        let begin = self.timed.len();
        // What the window before has queued and not served comes later in the old order too, or is concerned.
        for Reverse((.., task)) in self.heap.drain() {
            self.marks[task as usize].queued = 0;
        }
        for at in 0..self.concerned.len() {
            let task = self.concerned[at];
            if self.marks[task as usize].timed != change
                && let Some(ready) = self.ready(network, task, cut)
            {
                self.enqueue(network, ready, task);
            }
        }
        // The next that only waits for what was before the window; the first without a turn; the last with one.
        let (mut cursor, mut first, mut furthest) = (cut, cut, None);
        let (mut look, mut patience) = (begin + FIRST_LOOK, FIRST_LOOK);
        loop {
            let queued = self.heap.peek().map(|&Reverse(turn)| turn);
            let kept = self.next_kept(network, &mut cursor, cut, by, queued.map_or(u64::MAX, |turn| turn.0));
            let turn = match (kept, queued) {
                (Some(kept), queued) if queued.is_none_or(|queued| kept < queued) => {
                    cursor += 1;
                    kept
                }
                (_, Some(queued)) => {
                    self.heap.pop();
                    queued
                }
                _ => {
                    self.pieces.push(Piece { timed: begin..self.timed.len(), shifted: count..count, by });
                    return None;
                }
            };
            self.serve(network, turn);
            if self.marks[turn.2 as usize].concerned != change {
                furthest = furthest.max(self.old_place(turn.2));
            }
            self.tell_readers(network, turn.2, cut);
            while first < count && {
                let mark = &self.marks[self.line.turns.order[first] as usize];
                mark.timed == change || mark.gone == change || mark.concerned == change
            } {
                first += 1;
            }
            if self.timed.len() >= look && first < count && furthest.is_none_or(|furthest| furthest < first) {
                patience = (2 * patience).min(RARELY);
                look = self.timed.len() + patience;
                if let Some(by) = self.settled(network, cut, first, turn.0) {
                    let next = self.reach(network, first, by);
                    if next >= first + WORTH_SKIPPING {
                        return self.skip(begin, first..next, by);
                    }
                }
            }
        }
    }

    /// The next from a position of the old order on that only waits for what was before the window, which starts at `cut`, if it
    /// is ready by a time; the position moves on to it.
    fn next_kept(
        &self,
        network: &Network<'_>,
        cursor: &mut usize,
        cut: usize,
        by: i64,
        until: u64,
    ) -> Option<Turn> {
        let change = self.change;
        while *cursor < self.line.len() {
            let (task, ready) = (self.line.turns.order[*cursor], shifted(self.line.turns.ready[*cursor], by));
            if ready > until {
                return None;
            }
            let mark = &self.marks[task as usize];
            let other = mark.concerned == change || mark.gone == change || mark.queued == change;
            let over = |&before: &u32| before == NONE || self.over(before, cut).is_some();
            if !other && network.before(task).iter().all(over) {
                return Some((ready, network.task(task).rank, task));
            }
            *cursor += 1;
        }
        None
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
        if let Some(place) = self.old_place(task) {
            self.under_way.push(UnderWay { task, was: self.line.turns.ends[place], is: end });
        }
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
