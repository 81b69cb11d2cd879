//! The timeline of a task graph, updated after a change.
//!
//! Tasks are served in order of (ready time, rank). The timeline before the change's first task stays. From there on a
//! *window* of tasks gets new times, task by task. Tasks whose predecessors all lie before the window come from the old
//! order. Other tasks come from a small heap, as their predecessors are served. The window ends at a position of the
//! old order where all tasks in flight and all streams differ from the old timeline by one common shift. All later
//! tasks are then only *shifted*, and not visited, up to the next task that the change affects. There another window
//! begins. The old timeline is not modified before the change is accepted.

mod shift;

use crate::delta::{
    NONE,
    ordered_timeline::{OrderedTimeline, TimedTasks, shifted, streams_in},
    task_graph::{Task, TaskGraph},
};
use crate::{Tasks, Timeline};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Served tasks between the first two checks for the end of a window. The distance doubles at every check, up to
/// `RARELY`.
const FIRST_LOOK: usize = 2;
const RARELY: usize = 64;
/// Fewer tasks than this get new times rather than being skipped.
const WORTH_SKIPPING: usize = 4;
/// Where a change affects more tasks than this, tasks that become late because of them are not tracked separately.
const MAX_AFFECTED: usize = 256;

/// A ready task: ready time, rank, task.
type ReadyTask = (u64, u64, u32);

/// The role of a task in the pending change. A counter equal to the change's number means yes.
#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    /// New or changed.
    affected: u32,
    /// Removed.
    removed: u32,
    /// In the heap, or served.
    queued: u32,
    /// Served in a window, with this end.
    timed: u32,
    end: u64,
    /// Lower bound on the ready time of an affected task.
    earliest: u64,
}

/// A task with its end in the old and the new timeline.
#[derive(Clone, Copy, Debug)]
struct InFlightTask {
    task: u32,
    old_end: u64,
    new_end: u64,
}

/// The tasks of a window, and the following part of the old order that is only shifted.
#[derive(Clone, Debug)]
struct Segment {
    timed: std::ops::Range<usize>,
    shifted: std::ops::Range<usize>,
    by: i64,
}

/// The timeline of a task graph, and of the pending change.
#[derive(Clone, Debug, Default)]
pub struct DeltaTimeline {
    ordered: OrderedTimeline,
    /// Whether a change is pending.
    pending: bool,
    /// The number of the change.
    change: u32,
    marks: Vec<Mark>,
    /// Affected tasks, by rank.
    affected: Vec<u32>,
    /// Old positions of removed tasks.
    removed: Vec<u32>,
    /// All positions before this one are unchanged.
    unchanged: usize,
    segments: Vec<Segment>,
    /// The tasks of all windows, in order.
    timed: Vec<ReadyTask>,
    makespan: u64,
    /// When each stream becomes free in the window.
    free: Vec<u64>,
    heap: BinaryHeap<Reverse<ReadyTask>>,
    /// Tasks of the old order that are served and may still be in flight.
    in_flight: Vec<InFlightTask>,
    /// When each stream becomes free before and after the skipped tasks.
    free_around: [Vec<u64>; 2],
    /// The tasks that an accepted change writes.
    new: TimedTasks,
    /// Number of tasks timed so far.
    pub steps: u64,
}

impl DeltaTimeline {
    /// The timeline of a task graph, from scratch.
    pub fn new(task_graph: &TaskGraph<'_>) -> Self {
        let all = task_graph.tasks();
        let (tasks, _) = to_tasks(task_graph, &all);
        let timeline = Timeline::of(&tasks);
        let streams = task_graph.device_classes().count() * task_graph.device_classes().streams;
        let mut delta = Self { ordered: OrderedTimeline::new(streams), ..Self::default() };
        delta.grow(task_graph);
        for (at, &number) in timeline.order.iter().enumerate() {
            let (task, number) = (all[number as usize], number as usize);
            delta.new.push(task, task_graph.task(task).streams, timeline.ready[number], timeline.end[number]);
            delta.ordered.position[task as usize] = at as u32;
        }
        delta.ordered.replace(0, 0, &delta.new);
        delta
    }

    /// Allocates entries for new places.
    fn grow(&mut self, task_graph: &TaskGraph<'_>) {
        self.ordered.position.resize(task_graph.places(), NONE);
        self.marks.resize(task_graph.places(), Mark::default());
    }

    /// Number of tasks, without the pending change.
    pub fn len(&self) -> usize {
        self.ordered.len()
    }

    /// The end of the last task.
    pub fn makespan(&self) -> u64 {
        if self.pending { self.makespan } else { self.ordered.last(self.ordered.len()) }
    }

    /// The end of a task.
    pub fn end(&self, task: u32) -> u64 {
        let position = self.ordered.position[task as usize] as usize;
        if !self.pending {
            return self.ordered.tasks.ends[position];
        }
        let end = self.new_end(task, usize::MAX);
        debug_assert!(end.is_some(), "a pending change has timed every task");
        end.unwrap_or(0)
    }

    /// The critical path, last to first: each task started when the next one here ended.
    pub fn critical_path<'n>(&'n self, task_graph: &'n TaskGraph<'_>) -> impl Iterator<Item = u32> + 'n {
        let ordered = &self.ordered;
        let last = (0..ordered.len()).max_by_key(|&at| ordered.tasks.ends[at]);
        std::iter::successors(last, move |&at| {
            let task = ordered.tasks.order[at];
            let start = ordered.tasks.ends[at] - task_graph.task(task).duration;
            if start == 0 {
                return None;
            }
            if start == ordered.tasks.ready[at] {
                let made = task_graph.before(task).iter().filter(|&&other| other != NONE);
                let mut made = made.map(|&other| ordered.position[other as usize] as usize);
                return made.find(|&position| ordered.tasks.ends[position] == start);
            }
            // It waited for a stream: for the stream's previous task.
            let streams = task_graph.task(task).streams;
            (0..at).rev().find(|&other| {
                ordered.tasks.ends[other] == start
                    && task_graph.task(ordered.tasks.order[other]).streams & streams != 0
            })
        })
        .map(|at| ordered.tasks.order[at])
    }

    /// Times the task graph after a change; returns its makespan.
    pub fn retime(&mut self, task_graph: &TaskGraph<'_>) -> u64 {
        self.begin(task_graph);
        let (mut cut, mut by) = (self.first_affected(task_graph, 0, 0), 0);
        self.unchanged = cut;
        self.makespan = self.ordered.last(cut);
        self.ordered.free(cut, &mut self.free);
        self.heap.clear();
        self.in_flight.clear();
        self.record_in_flight(0, cut);
        if cut < self.ordered.len() || !self.affected.is_empty() {
            while let Some(next) = self.window(task_graph, cut, by) {
                (cut, by) = next;
            }
        }
        self.pending = true;
        self.makespan
    }

    /// Makes the pending change permanent.
    pub fn accept(&mut self, task_graph: &TaskGraph<'_>) {
        self.pending = false;
        if self.segments.is_empty() {
            return;
        }
        task_graph.removed.iter().for_each(|&task| self.ordered.position[task as usize] = NONE);
        let (tail, old_len) = (self.unchanged, self.ordered.len());
        let len =
            self.segments.iter().fold(tail, |len, segment| len + segment.timed.len() + segment.shifted.len());
        // The end of the timeline stays if it is shifted neither in time nor in position.
        let stays = |segment: &&Segment| segment.by == 0 && segment.shifted.end == old_len && len == old_len;
        let rest = self.segments.last().filter(stays).map_or(old_len, |segment| segment.shifted.start);
        self.new.clear();
        for segment in &self.segments {
            for &(ready, _, task) in &self.timed[segment.timed.clone()] {
                self.ordered.position[task as usize] = (tail + self.new.len()) as u32;
                self.new.push(task, task_graph.task(task).streams, ready, self.marks[task as usize].end);
            }
            let kept = segment.shifted.start..segment.shifted.end.min(rest).max(segment.shifted.start);
            let start = tail + self.new.len();
            if start != kept.start {
                for (position, &task) in (start as u32..).zip(&self.ordered.tasks.order[kept.clone()]) {
                    self.ordered.position[task as usize] = position;
                }
            }
            self.new.extend(&self.ordered.tasks, kept, segment.by);
        }
        self.ordered.replace(tail, rest, &self.new);
        self.segments.clear();
    }

    /// Drops the pending change.
    pub fn reject(&mut self) {
        self.pending = false;
        self.segments.clear();
    }

    /// Marks the tasks that the change affects or removes.
    fn begin(&mut self, task_graph: &TaskGraph<'_>) {
        self.grow(task_graph);
        self.change = self.change.wrapping_add(1);
        if self.change == 0 {
            self.marks.fill(Mark::default());
            self.change = 1;
        }
        self.segments.clear();
        self.timed.clear();
        self.removed.clear();
        self.affected.clear();
        for &task in &task_graph.removed {
            let (mark, position) = (&mut self.marks[task as usize], self.ordered.position[task as usize]);
            if position != NONE && mark.removed != self.change {
                mark.removed = self.change;
                self.removed.push(position);
            }
        }
        for &task in task_graph.touched.iter().filter(|&&task| task_graph.task(task).rank != 0) {
            self.marks[task as usize].affected = self.change;
            self.affected.push(task);
        }
        self.affected.sort_unstable_by_key(|&task| task_graph.task(task).rank);
    }

    /// The position of a task in the old order, if it has one.
    fn old_position(&self, task: u32) -> Option<usize> {
        let position = self.ordered.position[task as usize];
        (position != NONE && self.marks[task as usize].removed != self.change).then_some(position as usize)
    }

    /// The shift of the task at a position of the old order that no window has timed.
    fn shift(&self, position: usize) -> i64 {
        let segment = self.segments.iter().rev().find(|segment| segment.shifted.start <= position);
        segment.map_or(0, |segment| segment.by)
    }

    /// The end of a task, if it is served before or in the window that starts at `cut`.
    #[inline]
    fn new_end(&self, task: u32, cut: usize) -> Option<u64> {
        let mark = &self.marks[task as usize];
        if mark.timed == self.change {
            return Some(mark.end);
        }
        let position = self.ordered.position[task as usize] as usize;
        let late = mark.removed == self.change || mark.affected == self.change;
        if position >= cut || position == NONE as usize || late {
            return None;
        }
        let end = self.ordered.tasks.ends[position];
        Some(if position < self.unchanged { end } else { shifted(end, self.shift(position)) })
    }

    /// The ready time of a task; none if a predecessor is not served yet.
    #[inline]
    fn ready(&self, task_graph: &TaskGraph<'_>, task: u32, cut: usize) -> Option<u64> {
        let mut ready = 0;
        for &other in task_graph.before(task).iter().filter(|&&other| other != NONE) {
            ready = ready.max(self.new_end(other, cut)?);
        }
        Some(ready)
    }

    /// Times the tasks from position `cut` of the old order on. All earlier tasks are served; `by` is the shift just
    /// before `cut`. Returns position and shift of the next window, if there is one.
    fn window(&mut self, task_graph: &TaskGraph<'_>, cut: usize, by: i64) -> Option<(usize, i64)> {
        let (count, change) = (self.ordered.len(), self.change);
        let begin = self.timed.len();
        // Tasks left in the previous window's heap come later in the old order too, or are affected.
        for Reverse((.., task)) in self.heap.drain() {
            self.marks[task as usize].queued = 0;
        }
        for at in 0..self.affected.len() {
            let task = self.affected[at];
            if self.marks[task as usize].timed != change
                && let Some(ready) = self.ready(task_graph, task, cut)
            {
                self.enqueue(task_graph, ready, task);
            }
        }
        // `cursor`: the next task with all predecessors before the window; `first`: the first unserved position;
        // `furthest`: the last served one.
        let (mut cursor, mut first, mut furthest) = (cut, cut, None);
        let (mut look, mut patience) = (begin + FIRST_LOOK, FIRST_LOOK);
        loop {
            let queued = self.heap.peek().map(|&Reverse(ready_task)| ready_task);
            let kept = self.next_in_old_order(
                task_graph,
                &mut cursor,
                cut,
                by,
                queued.map_or(u64::MAX, |ready_task| ready_task.0),
            );
            let ready_task = match (kept, queued) {
                (Some(kept), queued) if queued.is_none_or(|queued| kept < queued) => {
                    cursor += 1;
                    kept
                }
                (_, Some(queued)) => {
                    self.heap.pop();
                    queued
                }
                _ => {
                    self.segments.push(Segment { timed: begin..self.timed.len(), shifted: count..count, by });
                    return None;
                }
            };
            self.serve(task_graph, ready_task);
            if self.marks[ready_task.2 as usize].affected != change {
                furthest = furthest.max(self.old_position(ready_task.2));
            }
            self.enqueue_readers(task_graph, ready_task.2, cut);
            while first < count && {
                let mark = &self.marks[self.ordered.tasks.order[first] as usize];
                mark.timed == change || mark.removed == change || mark.affected == change
            } {
                first += 1;
            }
            if self.timed.len() >= look && first < count && furthest.is_none_or(|furthest| furthest < first) {
                patience = (2 * patience).min(RARELY);
                look = self.timed.len() + patience;
                if let Some(by) = self.common_shift(task_graph, cut, first, ready_task.0) {
                    let next = self.first_affected(task_graph, first, by);
                    if next >= first + WORTH_SKIPPING {
                        return self.skip_shifted(begin, first..next, by);
                    }
                }
            }
        }
    }

    /// The next task from a position of the old order on whose predecessors all lie before the window, which starts at
    /// `cut`. None if it is not ready by `until`. Moves the cursor to it.
    fn next_in_old_order(
        &self,
        task_graph: &TaskGraph<'_>,
        cursor: &mut usize,
        cut: usize,
        by: i64,
        until: u64,
    ) -> Option<ReadyTask> {
        let change = self.change;
        while *cursor < self.ordered.len() {
            let (task, ready) =
                (self.ordered.tasks.order[*cursor], shifted(self.ordered.tasks.ready[*cursor], by));
            if ready > until {
                return None;
            }
            let mark = &self.marks[task as usize];
            let other = mark.affected == change || mark.removed == change || mark.queued == change;
            let served = |&before: &u32| before == NONE || self.new_end(before, cut).is_some();
            if !other && task_graph.before(task).iter().all(served) {
                return Some((ready, task_graph.task(task).rank, task));
            }
            *cursor += 1;
        }
        None
    }

    /// Serves a task: gives it its start and end.
    #[inline]
    fn serve(&mut self, task_graph: &TaskGraph<'_>, ready_task: ReadyTask) {
        let (ready, _, task) = ready_task;
        let Task { duration, streams, .. } = *task_graph.task(task);
        let start = streams_in(streams).fold(ready, |start, stream| start.max(self.free[stream]));
        let end = start.saturating_add(duration);
        streams_in(streams).for_each(|stream| self.free[stream] = end);
        self.makespan = self.makespan.max(end);
        let mark = &mut self.marks[task as usize];
        (mark.timed, mark.queued, mark.end) = (self.change, self.change, end);
        self.timed.push(ready_task);
        self.steps += 1;
        if let Some(position) = self.old_position(task) {
            self.in_flight.push(InFlightTask {
                task,
                old_end: self.ordered.tasks.ends[position],
                new_end: end,
            });
        }
    }

    fn enqueue(&mut self, task_graph: &TaskGraph<'_>, ready: u64, task: u32) {
        let mark = &mut self.marks[task as usize];
        if mark.queued != self.change {
            mark.queued = self.change;
            self.heap.push(Reverse((ready, task_graph.task(task).rank, task)));
        }
    }

    /// Queues the successors of a task that have become ready.
    #[inline]
    fn enqueue_readers(&mut self, task_graph: &TaskGraph<'_>, task: u32, cut: usize) {
        for reader in task_graph.readers(task) {
            if self.marks[reader as usize].queued != self.change
                && let Some(ready) = self.ready(task_graph, reader, cut)
            {
                self.enqueue(task_graph, ready, reader);
            }
        }
    }
}

/// The tasks in the form of the full simulation, in order of rank, and the number of each.
pub fn to_tasks(task_graph: &TaskGraph<'_>, all: &[u32]) -> (Tasks, Vec<u32>) {
    let mut numbers = vec![NONE; task_graph.places()];
    let mut tasks = Tasks::default();
    let (mut streams, mut before) = (Vec::new(), Vec::new());
    for &task in all {
        streams.clear();
        streams.extend(streams_in(task_graph.task(task).streams).map(|stream| stream as u32));
        before.clear();
        let others = task_graph.before(task).iter().filter(|&&other| other != NONE);
        before.extend(others.map(|&other| numbers[other as usize]));
        before.sort_unstable();
        before.dedup();
        numbers[task as usize] = tasks.push(task_graph.task(task).duration, &streams, &before);
    }
    (tasks, numbers)
}
