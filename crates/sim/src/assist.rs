//! Scheduling assistants: what happens if idle devices may take over ready work of busy ones while the step runs.
//!
//! The plan stays as it is. Every device has a queue of ready work and a counter of how much slower than predicted it has been
//! so far. When a device idles and work that waits in another's queue is predicted to be done earlier here, moving included
//! (a decision, the operands that the idle device lacks, the results back), and is later than the plan has it by more than
//! moving takes, the work moves. So nothing moves as long as everything goes as planned. Links are taken up by what is moved
//! like by any other transfer. Only the prediction decides; what work really takes, it takes.
//!
//! Without assistants this is [`crate::Timeline`]'s simulation, to the picosecond, which tests hold it to. The paper that
//! proposes such assistants (arXiv 1906.08168) describes them in one sentence of its abstract: the rule is ours.

use crate::{
    schedule::{Schedule, Stream},
    timeline::readers,
};
use shardwright_cost::{Collective, Comm, Placement};
use shardwright_lower::{ParallelGraph, ValueId, Work};
use shardwright_machine::{AxisSet, Bytes};
use shardwright_plan::picoseconds;
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

/// When work may move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Picoseconds that a decision takes.
    pub latency: u64,
    /// How many of the tasks that wait at a device are looked at; none: nothing ever moves.
    pub window: usize,
    /// Whether operands may move that the idle device lacks; if not, only work whose operands are on both.
    pub fetch: bool,
}

impl Default for Rule {
    fn default() -> Self {
        Self { latency: 2_000_000, window: 8, fetch: true }
    }
}

/// How fast things really are: noise belongs to a task, slowness to whoever computes it.
#[derive(Clone, Copy, Debug)]
pub struct Reality<'r> {
    /// The same tasks with the times that they really take where the plan has them.
    pub schedule: &'r Schedule,
    /// Devices that compute so many times as slowly as planned, as in [`Schedule::slow_down`].
    pub slower: &'r [(u32, f64)],
}

impl Reality<'_> {
    fn slowness(&self, device: u32) -> f64 {
        self.slower.iter().filter(|(slow, _)| *slow == device).map(|(_, factor)| factor).product()
    }

    /// Picoseconds that a task really takes on a device.
    fn duration(&self, task: usize, device: u32) -> u64 {
        let own = self.schedule.tasks.duration(task);
        match self.schedule.owner(task) {
            Some(owner) if owner != device => {
                (own as f64 * self.slowness(device) / self.slowness(owner)).round() as u64
            }
            _ => own,
        }
    }
}

/// What came of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Assisted {
    /// Picoseconds of the step.
    pub makespan: u64,
    /// Tasks that moved.
    pub moved: usize,
    /// Bytes that moved with them, there and back.
    pub moved_bytes: u64,
}

/// The simulation under way.
struct Assistants<'s> {
    schedule: &'s Schedule,
    program: &'s ParallelGraph,
    comm: &'s Comm,
    rule: Rule,
    reality: Reality<'s>,
    now: u64,
    /// Per stream: until when it is taken.
    free: Vec<u64>,
    /// Per device: ready work, the first that became ready first.
    queues: Vec<BTreeSet<(u64, u32)>>,
    /// Per device: until when its present task was predicted to take.
    expected: Vec<u64>,
    /// Per device: picoseconds that its tasks so far were predicted to take, and took.
    counters: Vec<(u64, u64)>,
    /// Per task: what it waits for still, and when the last of it was over.
    missing: Vec<u32>,
    ready: Vec<u64>,
    /// Values that devices were brought for work that they took over, and still have.
    fetched: BTreeSet<(ValueId, u32)>,
    /// Per task: when it would start if everything went as predicted.
    planned: Vec<u64>,
    /// Per task: when it is over, as far as that is known.
    ends: Vec<u64>,
    /// Ready tasks and, as `u32::MAX`, devices that become free, by time.
    events: BinaryHeap<Reverse<(u64, u32)>>,
    waiting: (Vec<u32>, Vec<u32>),
    outcome: Assisted,
}

/// Runs a schedule with assistants. It must have been made for every device by itself ([`crate::Classes::each`]).
pub fn assist(
    schedule: &Schedule,
    program: &ParallelGraph,
    comm: &Comm,
    rule: Rule,
    reality: Reality<'_>,
) -> Assisted {
    let tasks = &schedule.tasks;
    let devices = schedule.classes.len();
    let streams = tasks.stream_count().max(devices * schedule.streams_per_class());
    let missing: Vec<u32> = tasks.ids().map(|task| tasks.waits_for(task).len() as u32).collect();
    let events =
        tasks.ids().filter(|&task| missing[task] == 0).map(|task| Reverse((0, task as u32))).collect();
    let mut assistants = Assistants {
        schedule,
        program,
        comm,
        rule,
        reality,
        now: 0,
        free: vec![0; streams],
        queues: vec![BTreeSet::new(); devices],
        expected: vec![0; devices],
        counters: vec![(0, 0); devices],
        ready: vec![0; tasks.len()],
        fetched: BTreeSet::new(),
        planned: schedule.simulate().start,
        ends: vec![u64::MAX; tasks.len()],
        missing,
        events,
        waiting: readers(tasks),
        outcome: Assisted::default(),
    };
    assistants.run();
    assistants.outcome
}

/// Work that a device could take over.
struct Move {
    /// Its place in its owner's queue.
    entry: (u64, u32),
    owner: u32,
    /// Bytes to be brought, and to be brought back.
    there: u64,
    back: u64,
}

/// In the place of a task: a device has become free.
const FREE: u32 = u32::MAX;

impl Assistants<'_> {
    fn run(&mut self) {
        while let Some(&Reverse((time, _))) = self.events.peek() {
            self.now = time;
            while let Some(&Reverse((at, task))) = self.events.peek() {
                if at > time {
                    break;
                }
                self.events.pop();
                if task != FREE {
                    self.arrive(task);
                }
            }
            // Help first: what a slow device is about to begin may be better off elsewhere.
            if self.rule.window > 0 {
                for device in 0..self.queues.len() as u32 {
                    self.help(device);
                }
            }
            for device in 0..self.queues.len() as u32 {
                self.begin(device);
            }
        }
    }

    fn compute_stream(&self, device: u32) -> usize {
        device as usize * self.schedule.streams_per_class()
    }

    fn idle(&self, device: u32) -> bool {
        self.free[self.compute_stream(device)] <= self.now
    }

    /// A task is ready: computing waits for its device, everything else takes its streams.
    fn arrive(&mut self, task: u32) {
        let streams = self.schedule.tasks.streams(task as usize);
        match streams.first().map(|&stream| self.schedule.stream(stream)) {
            None => self.finish(task, self.now),
            Some((device, Stream::Compute)) => {
                self.queues[device as usize].insert((self.now, task));
            }
            Some((device, Stream::Port(_))) => {
                let start = streams.iter().map(|&s| self.free[s as usize]).fold(self.now, u64::max);
                let end = start.saturating_add(self.reality.duration(task as usize, device));
                for &stream in streams {
                    self.free[stream as usize] = end;
                }
                self.finish(task, end);
            }
        }
    }

    /// Tells those who wait for a task when it is over.
    fn finish(&mut self, task: u32, end: u64) {
        self.outcome.makespan = self.outcome.makespan.max(end);
        self.ends[task as usize] = end;
        let (first, list) = (&self.waiting.0, &self.waiting.1);
        for &next in &list[first[task as usize] as usize..first[task as usize + 1] as usize] {
            let next = next as usize;
            self.ready[next] = self.ready[next].max(end);
            self.missing[next] -= 1;
            if self.missing[next] == 0 {
                self.events.push(Reverse((self.ready[next], next as u32)));
            }
        }
    }

    /// A device that is free takes the work that became ready first.
    fn begin(&mut self, device: u32) {
        if !self.idle(device) {
            return;
        }
        if let Some((_, task)) = self.queues[device as usize].pop_first() {
            let end = self.compute(task, device, self.now);
            self.finish(task, end);
        }
    }

    /// Computes on a device from some time on; the end.
    fn compute(&mut self, task: u32, device: u32, start: u64) -> u64 {
        let predicted = self.schedule.tasks.duration(task as usize);
        let took = self.reality.duration(task as usize, device).max(1);
        let end = start.saturating_add(took);
        let stream = self.compute_stream(device);
        self.free[stream] = end;
        self.expected[device as usize] = start + self.scaled(device, predicted);
        let (expected, real) = &mut self.counters[device as usize];
        (*expected, *real) = (*expected + predicted, *real + took);
        self.events.push(Reverse((end, FREE)));
        end
    }

    /// What is predicted for a device, given how fast it has been so far.
    fn scaled(&self, device: u32, predicted: u64) -> u64 {
        let (expected, real) = self.counters[device as usize];
        if expected == 0 { predicted } else { (predicted as f64 * real as f64 / expected as f64) as u64 }
    }

    /// Whether a device has the part of a value that another has, by now.
    fn has(&self, id: ValueId, owner: u32, helper: u32) -> bool {
        let (value, mesh) = (self.program.value(id), &self.program.mesh);
        let [a, b] = [owner, helper].map(|class| self.schedule.classes.device(class));
        let layout = value.at.layout();
        let maker = value.made_by.and_then(|made_by| self.schedule.task(made_by, helper));
        let made = maker.is_none_or(|task| self.ends[task as usize] <= self.now);
        if self.fetched.contains(&(id, helper)) {
            return true;
        }
        made && value.is_on(mesh, b)
            && mesh.all().iter().all(|axis| {
                mesh.digit(a, axis) == mesh.digit(b, axis)
                    || matches!(layout.get(axis), Placement::Replicated)
            })
    }

    /// Bytes of a value that a device holds.
    fn bytes(&self, value: ValueId, device: u32) -> u64 {
        let own =
            self.program.value(value).local_type(&self.program.mesh, self.schedule.classes.device(device));
        own.map_or(0, |ty| ty.bytes())
    }

    /// Bytes there and back if a device takes over a task of another; none if it may not.
    fn moving(&self, task: u32, from: u32, to: u32) -> Option<(u64, u64)> {
        let instruction = self.program.instruction(self.schedule.instructions[task as usize]);
        if !matches!(instruction.work, Work::Compute { .. }) {
            return None;
        }
        let lacks = instruction.reads.iter().filter(|value| !self.has(**value, from, to));
        let there: u64 = lacks.map(|&value| self.bytes(value, from)).sum();
        let back = instruction.writes.iter().map(|&value| self.bytes(value, from)).sum();
        (self.rule.fetch || there == 0).then_some((there, back))
    }

    /// The axes along which two devices differ.
    fn apart(&self, from: u32, to: u32) -> AxisSet {
        let mesh = &self.program.mesh;
        let [a, b] = [from, to].map(|class| self.schedule.classes.device(class));
        mesh.all().iter().filter(|&axis| mesh.digit(a, axis) != mesh.digit(b, axis)).collect()
    }

    fn transfer(&self, bytes: u64, axes: AxisSet) -> u64 {
        let seconds = self.comm.seconds(Collective::Send, axes, Bytes(bytes));
        if bytes == 0 { 0 } else { u64::try_from(picoseconds(seconds)).unwrap_or(0) }
    }

    /// An idle device looks at what waits elsewhere, and takes what gains most.
    fn help(&mut self, helper: u32) {
        if !self.idle(helper) || !self.queues[helper as usize].is_empty() {
            return;
        }
        let mut best: Option<(u64, Move)> = None;
        for owner in (0..self.queues.len() as u32).filter(|&owner| owner != helper) {
            let mut begin = self.expected[owner as usize].max(self.now);
            for &(ready, task) in self.queues[owner as usize].iter().take(self.rule.window) {
                let predicted = self.schedule.tasks.duration(task as usize);
                let end = begin.saturating_add(self.scaled(owner, predicted));
                if let Some((there, back)) = self.moving(task, owner, helper) {
                    let arrives = self.arrival(there, owner, helper, self.now + self.rule.latency);
                    let done = arrives.saturating_add(self.scaled(helper, predicted));
                    let returns = self.arrival(back, helper, owner, done);
                    let gain = end.saturating_sub(returns);
                    let trouble = (returns - self.now).saturating_sub(predicted);
                    let late = begin.saturating_sub(self.planned[task as usize]);
                    if gain > 0 && late > trouble && best.as_ref().is_none_or(|(known, _)| gain > *known) {
                        best = Some((gain, Move { entry: (ready, task), owner, there, back }));
                    }
                }
                begin = end;
            }
        }
        if let Some((_, found)) = best {
            self.take_over(helper, &found);
        }
    }

    fn take_over(&mut self, helper: u32, &Move { entry, owner, there, back }: &Move) {
        self.queues[owner as usize].remove(&entry);
        let task = entry.1;
        let instruction = self.program.instruction(self.schedule.instructions[task as usize]);
        self.fetched.extend(instruction.reads.iter().map(|&value| (value, helper)));
        self.outcome.moved += 1;
        self.outcome.moved_bytes += there + back;
        let arrived = self.carry(there, owner, helper, self.now + self.rule.latency);
        let end = self.compute(task, helper, arrived);
        let returned = self.carry(back, helper, owner, end);
        self.finish(task, returned);
    }

    /// The ports between two devices.
    fn ports(&self, from: u32, to: u32) -> impl Iterator<Item = usize> + use<> {
        let levels = self.program.mesh.levels_crossed(self.apart(from, to));
        let per_class = self.schedule.streams_per_class();
        [from, to].into_iter().flat_map(move |class| {
            let first = class as usize * per_class;
            (0..per_class - 1)
                .filter(move |level| levels >> level & 1 == 1)
                .map(move |level| first + 1 + level)
        })
    }

    /// When bytes would be there that are sent from some time on.
    fn arrival(&self, bytes: u64, from: u32, to: u32, ready: u64) -> u64 {
        let time = self.transfer(bytes, self.apart(from, to));
        if time == 0 {
            return ready;
        }
        self.ports(from, to).map(|port| self.free[port]).fold(ready, u64::max).saturating_add(time)
    }

    /// Sends bytes from one device to another over their ports; when they are there.
    fn carry(&mut self, bytes: u64, from: u32, to: u32, ready: u64) -> u64 {
        let end = self.arrival(bytes, from, to, ready);
        if bytes > 0 {
            self.ports(from, to).for_each(|port| self.free[port] = end);
        }
        end
    }
}
