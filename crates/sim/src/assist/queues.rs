//! One step with assistants: the devices' queues, their forecasts, and the links that stolen work occupies.

use super::{AssistOutcome, Reality, StealRule};
use crate::{
    schedule::{Schedule, Stream},
    timeline::readers,
};
use shardwright_assist::{DeviceStatus, Forecast, PlannedTask};
use shardwright_cost::{Collective, Comm, Placement};
use shardwright_lower::{ParallelGraph, ValueId, Work};
use shardwright_machine::{AxisSet, Bytes};
use shardwright_plan::picoseconds;
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

/// The parts of the plan that the forecasts and the stealing rule read.
pub(super) struct Plan {
    /// Per device: its compute tasks, in the order of their starts.
    tasks: Vec<Vec<PlannedTask>>,
    /// Per compute task: its position among its device's tasks.
    position: Vec<u32>,
    /// Per task: its successors, as offsets into one flat list.
    successors: (Vec<u32>, Vec<u32>),
}

impl Plan {
    pub fn new(schedule: &Schedule) -> Self {
        let (tasks, line) = (&schedule.tasks, schedule.simulate());
        let mut order: Vec<u32> = tasks.ids().map(|task| task as u32).collect();
        order.sort_unstable_by_key(|&task| (line.start[task as usize], task));
        let mut planned = vec![Vec::new(); schedule.classes.len()];
        let mut position = vec![0; tasks.len()];
        for &task in &order {
            if let Some(owner) = schedule.owner(task as usize) {
                let planned: &mut Vec<PlannedTask> = &mut planned[owner as usize];
                position[task as usize] = planned.len() as u32;
                let duration = tasks.duration(task as usize);
                planned.push(PlannedTask { start: line.start[task as usize], duration });
            }
        }
        Self { tasks: planned, position, successors: readers(tasks) }
    }

    fn successors(&self, task: u32) -> &[u32] {
        let (first, list) = &self.successors;
        &list[first[task as usize] as usize..first[task as usize + 1] as usize]
    }
}

/// An event of the simulation. Among events of one time, tasks become ready first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// All predecessors of a task have ended.
    Ready(u32),
    /// All operands of a stolen task have arrived at the thief.
    Arrival { task: u32, thief: u32 },
    /// A device has become free.
    Free,
    /// The thief has finished a stolen task.
    Done { task: u32, thief: u32 },
}

/// The state of the simulation.
struct Assistants<'s> {
    schedule: &'s Schedule,
    plan: &'s Plan,
    program: &'s ParallelGraph,
    comm: &'s Comm,
    rule: StealRule,
    reality: Reality<'s>,
    now: u64,
    /// Per stream: when it becomes free.
    free: Vec<u64>,
    /// Per device: ready tasks with the times at which they became ready, earliest first.
    queues: Vec<BTreeSet<(u64, u32)>>,
    /// Per device: the predicted end of its current task.
    expected: Vec<u64>,
    /// Per device: its lateness forecast.
    forecasts: Vec<Forecast>,
    /// Per device: planned picoseconds of stolen tasks whose operands are on their way to it.
    coming: Vec<u64>,
    /// Per task: number of unfinished predecessors, and the latest end of the finished ones.
    missing: Vec<u32>,
    ready: Vec<u64>,
    /// Values that thieves hold, per thief: operands that were sent to it and results that it computed.
    fetched: BTreeSet<(ValueId, u32)>,
    /// Per task: its end; `u64::MAX` until it is known.
    ends: Vec<u64>,
    /// Per task: whether a thief took it as a successor, before it was ready on its owner.
    taken: Vec<bool>,
    events: BinaryHeap<Reverse<(u64, Event)>>,
    outcome: AssistOutcome,
}

/// Simulates two steps under a rule and returns the second.
pub(super) fn second_step(
    schedule: &Schedule,
    plan: &Plan,
    program: &ParallelGraph,
    comm: &Comm,
    rule: StealRule,
    reality: Reality<'_>,
) -> AssistOutcome {
    let tasks = &schedule.tasks;
    let devices = schedule.classes.len();
    let mut forecasts: Vec<Forecast> = plan.tasks.iter().map(|tasks| Forecast::new(tasks)).collect();
    let mut outcome = AssistOutcome::default();
    for _ in 0..2 {
        for (forecast, tasks) in forecasts.iter_mut().zip(&plan.tasks) {
            forecast.restart(tasks);
        }
        let missing: Vec<u32> = tasks.ids().map(|task| tasks.waits_for(task).len() as u32).collect();
        let first = tasks.ids().filter(|&task| missing[task] == 0);
        let mut step = Assistants {
            schedule,
            plan,
            program,
            comm,
            rule,
            reality,
            now: 0,
            free: vec![0; tasks.stream_count().max(devices * schedule.streams_per_class())],
            queues: vec![BTreeSet::new(); devices],
            expected: vec![0; devices],
            forecasts,
            coming: vec![0; devices],
            ready: vec![0; tasks.len()],
            fetched: BTreeSet::new(),
            ends: vec![u64::MAX; tasks.len()],
            taken: vec![false; tasks.len()],
            events: first.map(|task| Reverse((0, Event::Ready(task as u32)))).collect(),
            missing,
            outcome: AssistOutcome::default(),
        };
        step.run();
        (forecasts, outcome) = (step.forecasts, step.outcome);
    }
    outcome
}

impl Assistants<'_> {
    fn run(&mut self) {
        let mut stolen = Vec::new();
        while let Some(&Reverse((time, _))) = self.events.peek() {
            self.now = time;
            while let Some(&Reverse((at, event))) = self.events.peek() {
                if at > time {
                    break;
                }
                self.events.pop();
                match event {
                    Event::Ready(task) => self.arrive(task),
                    Event::Arrival { task, thief } => {
                        self.coming[thief as usize] -= self.planned(task);
                        self.queues[thief as usize].insert((time, task));
                    }
                    Event::Free => {}
                    Event::Done { task, thief } => stolen.push((task, thief)),
                }
            }
            for (task, thief) in stolen.drain(..) {
                self.finish_stolen(task, thief);
            }
            // Stealing first: a task that a slow device is about to begin may finish earlier on a thief.
            if self.rule.window > 0 {
                for owner in 0..self.queues.len() as u32 {
                    while self.hand_over(owner) {}
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

    /// Picoseconds that a task was planned to take.
    fn planned(&self, task: u32) -> u64 {
        self.schedule.tasks.duration(task as usize)
    }

    /// Handles a task that became ready: compute tasks are queued at their device, transfers occupy their streams at once.
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

    /// Records a task's end and makes its successors ready.
    fn finish(&mut self, task: u32, end: u64) {
        self.outcome.makespan = self.outcome.makespan.max(end);
        self.ends[task as usize] = end;
        for &next in self.plan.successors(task) {
            let next = next as usize;
            self.ready[next] = self.ready[next].max(end);
            self.missing[next] -= 1;
            if self.missing[next] == 0 && !self.taken[next] {
                self.events.push(Reverse((self.ready[next], Event::Ready(next as u32))));
            }
        }
    }

    /// Lets a free device begin the task that became ready first.
    fn begin(&mut self, device: u32) {
        if !self.idle(device) {
            return;
        }
        let Some((_, task)) = self.queues[device as usize].pop_first() else { return };
        let planned = self.planned(task);
        let took = self.reality.duration(task as usize, device).max(1);
        let end = self.now.saturating_add(took);
        let stream = self.compute_stream(device);
        self.free[stream] = end;
        let own = self.schedule.owner(task as usize) == Some(device);
        let forecast = &mut self.forecasts[device as usize];
        self.expected[device as usize] = self.now + forecast.scaled(planned);
        forecast.done(planned, took);
        if own {
            forecast.begin(self.plan.position[task as usize] as usize, planned);
            self.events.push(Reverse((end, Event::Free)));
            self.finish(task, end);
        } else {
            forecast.redeem(planned);
            self.events.push(Reverse((end, Event::Done { task, thief: device })));
        }
    }

    /// The predicted end of a device's current task.
    fn present(&self, device: u32) -> u64 {
        if self.idle(device) { self.now } else { self.expected[device as usize].max(self.now) }
    }

    /// A device's status.
    fn status(&self, device: u32) -> DeviceStatus {
        self.forecasts[device as usize].status(self.present(device))
    }

    /// When a device is predicted to finish everything that is queued for it now.
    fn available(&self, device: u32) -> u64 {
        let waiting = self.queues[device as usize].iter().map(|&(_, task)| self.planned(task)).sum::<u64>();
        let waiting = waiting + self.coming[device as usize];
        self.present(device).saturating_add(self.forecasts[device as usize].scaled(waiting))
    }

    /// Whether the thief holds the owner's block of a value by now.
    fn has(&self, id: ValueId, owner: u32, thief: u32) -> bool {
        let (value, mesh) = (self.program.value(id), &self.program.mesh);
        let [a, b] = [owner, thief].map(|class| self.schedule.classes.device(class));
        let layout = value.at.layout();
        let producer = value.made_by.and_then(|made_by| self.schedule.task(made_by, thief));
        let made = producer.is_none_or(|task| self.ends[task as usize] <= self.now);
        if self.fetched.contains(&(id, thief)) {
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

    /// Bytes sent to the thief and back if it steals a task; none if it may not.
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
        if bytes == 0 {
            return 0;
        }
        let time = picoseconds(self.comm.seconds(Collective::Send, axes, Bytes(bytes)));
        debug_assert!(time >= 0, "{bytes} bytes take {time} ps");
        time.max(0) as u64
    }

    /// Picoseconds by which a task ends earlier on a thief than on its owner, which would begin it at `begin`; none if it stays.
    fn gain(&self, task: u32, owner: u32, thief: u32, begin: u64) -> Option<u64> {
        let planned = self.planned(task);
        let [here, there] = [owner, thief].map(|device| self.forecasts[device as usize].scaled(planned));
        if !self.status(thief).should_steal_from(&self.status(owner), there) {
            return None;
        }
        let (bring, back) = self.moving(task, owner, thief)?;
        let arrives = self.arrival(bring, owner, thief, self.now + self.rule.latency);
        let done = arrives.max(self.available(thief)).saturating_add(there);
        let returns = self.arrival(back, thief, owner, done);
        begin.saturating_add(here).checked_sub(returns).filter(|gain| *gain > 0)
    }

    /// Moves the queued task with the largest gain from a late device to a thief; returns whether there was one.
    fn hand_over(&mut self, owner: u32) -> bool {
        if self.queues[owner as usize].is_empty() || self.status(owner).lateness <= 0 {
            return false;
        }
        let mut begin = self.present(owner);
        let mut best: Option<(u64, (u64, u32), u32)> = None;
        for &(ready, task) in self.queues[owner as usize].iter().take(self.rule.window) {
            if self.schedule.owner(task as usize) != Some(owner) {
                continue;
            }
            for thief in (0..self.queues.len() as u32).filter(|&thief| thief != owner) {
                if let Some(gain) = self.gain(task, owner, thief, begin)
                    && best.is_none_or(|(known, ..)| gain > known)
                {
                    best = Some((gain, (ready, task), thief));
                }
            }
            begin = begin.saturating_add(self.forecasts[owner as usize].scaled(self.planned(task)));
        }
        let Some((_, entry, thief)) = best else { return false };
        self.queues[owner as usize].remove(&entry);
        self.steal(entry.1, owner, thief);
        true
    }

    /// Gives a task to a thief and sends it the operands that it lacks.
    fn steal(&mut self, task: u32, owner: u32, thief: u32) {
        let Some((bring, _)) = self.moving(task, owner, thief) else { return };
        let planned = self.planned(task);
        self.forecasts[owner as usize].begin(self.plan.position[task as usize] as usize, planned);
        self.forecasts[thief as usize].promise(planned);
        self.coming[thief as usize] += planned;
        let instruction = self.program.instruction(self.schedule.instructions[task as usize]);
        self.fetched.extend(instruction.reads.iter().map(|&value| (value, thief)));
        self.outcome.moved += 1;
        self.outcome.moved_bytes += bring;
        let arrived = self.carry(bring, owner, thief, self.now + self.rule.latency);
        self.events.push(Reverse((arrived, Event::Arrival { task, thief })));
    }

    /// Handles the end of a stolen task. Its results go back to the owner. The thief also steals the successor with the
    /// largest gain, if its queue is empty.
    fn finish_stolen(&mut self, task: u32, thief: u32) {
        let Some(owner) = self.schedule.owner(task as usize) else { return };
        let instruction = self.program.instruction(self.schedule.instructions[task as usize]);
        self.fetched.extend(instruction.writes.iter().map(|&value| (value, thief)));
        let back: u64 = instruction.writes.iter().map(|&value| self.bytes(value, owner)).sum();
        let kept = instruction.writes.iter().any(|&value| self.program.value(value).kept);
        let begin = self.present(owner).max(self.arrival(back, thief, owner, self.now));
        let successors = self.plan.successors(task);
        let may = |next: &&u32| {
            self.missing[**next as usize] == 1 && self.schedule.owner(**next as usize) == Some(owner)
        };
        let gains = successors
            .iter()
            .filter(may)
            .filter_map(|&next| Some((self.gain(next, owner, thief, begin)?, Reverse(next))));
        let next = if self.queues[thief as usize].is_empty() { gains.max() } else { None };
        let only = successors.len() == 1 && !kept;
        if let Some((_, Reverse(next))) = next {
            self.taken[next as usize] = true;
            self.steal(next, owner, thief);
            if only {
                self.finish(task, self.now);
                return;
            }
        }
        self.outcome.moved_bytes += back;
        let returned = self.carry(back, thief, owner, self.now);
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

    /// When bytes arrive that are sent at `ready` or as soon as the ports are free.
    fn arrival(&self, bytes: u64, from: u32, to: u32, ready: u64) -> u64 {
        let time = self.transfer(bytes, self.apart(from, to));
        if time == 0 {
            return ready;
        }
        self.ports(from, to).map(|port| self.free[port]).fold(ready, u64::max).saturating_add(time)
    }

    /// Sends bytes from one device to another over their ports; returns when they arrive.
    fn carry(&mut self, bytes: u64, from: u32, to: u32, ready: u64) -> u64 {
        let end = self.arrival(bytes, from, to, ready);
        if bytes > 0 {
            self.ports(from, to).for_each(|port| self.free[port] = end);
        }
        end
    }
}
