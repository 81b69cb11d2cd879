//! One step with assistants: devices with queues, counters and links that what is moved takes up.

use super::{Assisted, Reality, Rule};
use crate::{
    schedule::{Schedule, Stream},
    timeline::readers,
};
use shardwright_cost::{Collective, Comm, Placement};
use shardwright_lower::{ParallelGraph, ValueId, Work};
use shardwright_machine::{AxisSet, Bytes};
use shardwright_place::{Forecast, Planned, Standing};
use shardwright_plan::picoseconds;
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

/// The plan, as far as the rule needs it.
pub(super) struct Plan {
    /// Per device: its work, in the order of its starts.
    pieces: Vec<Vec<Planned>>,
    /// Per task that computes: its place in that order.
    place: Vec<u32>,
    /// Per task: who waits for it, as one flat list.
    followers: (Vec<u32>, Vec<u32>),
}

impl Plan {
    pub fn new(schedule: &Schedule) -> Self {
        let (tasks, line) = (&schedule.tasks, schedule.simulate());
        let mut order: Vec<u32> = tasks.ids().map(|task| task as u32).collect();
        order.sort_unstable_by_key(|&task| (line.start[task as usize], task));
        let mut pieces = vec![Vec::new(); schedule.classes.len()];
        let mut place = vec![0; tasks.len()];
        for &task in &order {
            if let Some(owner) = schedule.owner(task as usize) {
                let pieces: &mut Vec<Planned> = &mut pieces[owner as usize];
                place[task as usize] = pieces.len() as u32;
                let duration = tasks.duration(task as usize);
                pieces.push(Planned { start: line.start[task as usize], duration });
            }
        }
        Self { pieces, place, followers: readers(tasks) }
    }

    fn followers(&self, task: u32) -> &[u32] {
        let (first, list) = &self.followers;
        &list[first[task as usize] as usize..first[task as usize + 1] as usize]
    }
}

/// What may happen. Of what happens at one time, work becomes ready first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// All that a task waits for is over.
    Ready(u32),
    /// A helper has all that a task needs which it took over.
    Brought { task: u32, helper: u32 },
    /// A device has become free.
    Free,
    /// A helper is done with a task that it took over.
    Helped { task: u32, helper: u32 },
}

/// The simulation under way.
struct Assistants<'s> {
    schedule: &'s Schedule,
    plan: &'s Plan,
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
    /// Per device: when it will be through.
    forecasts: Vec<Forecast>,
    /// Per device: picoseconds of work that is on its way to it.
    coming: Vec<u64>,
    /// Per task: what it waits for still, and when the last of it was over.
    missing: Vec<u32>,
    ready: Vec<u64>,
    /// Values that devices were brought, or made, for work that they took over, and still have.
    fetched: BTreeSet<(ValueId, u32)>,
    /// Per task: when it is over, as far as that is known.
    ends: Vec<u64>,
    /// Per task: whether a helper went on with it before it was ready where it belongs.
    taken: Vec<bool>,
    events: BinaryHeap<Reverse<(u64, Event)>>,
    outcome: Assisted,
}

/// The second of two steps under a rule.
pub(super) fn second_step(
    schedule: &Schedule,
    plan: &Plan,
    program: &ParallelGraph,
    comm: &Comm,
    rule: Rule,
    reality: Reality<'_>,
) -> Assisted {
    let tasks = &schedule.tasks;
    let devices = schedule.classes.len();
    let mut forecasts: Vec<Forecast> = plan.pieces.iter().map(|pieces| Forecast::new(pieces)).collect();
    let mut outcome = Assisted::default();
    for _ in 0..2 {
        for (forecast, pieces) in forecasts.iter_mut().zip(&plan.pieces) {
            forecast.restart(pieces);
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
            outcome: Assisted::default(),
        };
        step.run();
        (forecasts, outcome) = (step.forecasts, step.outcome);
    }
    outcome
}

impl Assistants<'_> {
    fn run(&mut self) {
        let mut helped = Vec::new();
        while let Some(&Reverse((time, _))) = self.events.peek() {
            self.now = time;
            while let Some(&Reverse((at, event))) = self.events.peek() {
                if at > time {
                    break;
                }
                self.events.pop();
                match event {
                    Event::Ready(task) => self.arrive(task),
                    Event::Brought { task, helper } => {
                        self.coming[helper as usize] -= self.planned(task);
                        self.queues[helper as usize].insert((time, task));
                    }
                    Event::Free => {}
                    Event::Helped { task, helper } => helped.push((task, helper)),
                }
            }
            for (task, helper) in helped.drain(..) {
                self.go_on(task, helper);
            }
            // Help first: what a slow device is about to begin may be better off elsewhere.
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
        for &next in self.plan.followers(task) {
            let next = next as usize;
            self.ready[next] = self.ready[next].max(end);
            self.missing[next] -= 1;
            if self.missing[next] == 0 && !self.taken[next] {
                self.events.push(Reverse((self.ready[next], Event::Ready(next as u32))));
            }
        }
    }

    /// A device that is free takes the work that became ready first.
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
            forecast.begin(self.plan.place[task as usize] as usize, planned);
            self.events.push(Reverse((end, Event::Free)));
            self.finish(task, end);
        } else {
            forecast.redeem(planned);
            self.events.push(Reverse((end, Event::Helped { task, helper: device })));
        }
    }

    /// When a device is predicted to be done with its present task.
    fn present(&self, device: u32) -> u64 {
        if self.idle(device) { self.now } else { self.expected[device as usize].max(self.now) }
    }

    /// How a device stands.
    fn standing(&self, device: u32) -> Standing {
        self.forecasts[device as usize].standing(self.present(device))
    }

    /// When a device is predicted to be done with all that waits for it now.
    fn available(&self, device: u32) -> u64 {
        let waiting = self.queues[device as usize].iter().map(|&(_, task)| self.planned(task)).sum::<u64>();
        let waiting = waiting + self.coming[device as usize];
        self.present(device).saturating_add(self.forecasts[device as usize].scaled(waiting))
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

    /// How much earlier a task is done by a helper than where it belongs, where it would begin at some time; none if it is to stay.
    fn gain(&self, task: u32, owner: u32, helper: u32, begin: u64) -> Option<u64> {
        let planned = self.planned(task);
        let [here, there] = [owner, helper].map(|device| self.forecasts[device as usize].scaled(planned));
        if !self.standing(helper).should_help(&self.standing(owner), there) {
            return None;
        }
        let (bring, back) = self.moving(task, owner, helper)?;
        let arrives = self.arrival(bring, owner, helper, self.now + self.rule.latency);
        let done = arrives.max(self.available(helper)).saturating_add(there);
        let returns = self.arrival(back, helper, owner, done);
        begin.saturating_add(here).checked_sub(returns).filter(|gain| *gain > 0)
    }

    /// A device that is late hands over one of the tasks that wait for it, the one that gains most; whether there was one.
    fn hand_over(&mut self, owner: u32) -> bool {
        if self.queues[owner as usize].is_empty() || self.standing(owner).lateness <= 0 {
            return false;
        }
        let mut begin = self.present(owner);
        let mut best: Option<(u64, (u64, u32), u32)> = None;
        for &(ready, task) in self.queues[owner as usize].iter().take(self.rule.window) {
            if self.schedule.owner(task as usize) != Some(owner) {
                continue;
            }
            for helper in (0..self.queues.len() as u32).filter(|&helper| helper != owner) {
                if let Some(gain) = self.gain(task, owner, helper, begin)
                    && best.is_none_or(|(known, ..)| gain > known)
                {
                    best = Some((gain, (ready, task), helper));
                }
            }
            begin = begin.saturating_add(self.forecasts[owner as usize].scaled(self.planned(task)));
        }
        let Some((_, entry, helper)) = best else { return false };
        self.queues[owner as usize].remove(&entry);
        self.take_over(entry.1, owner, helper);
        true
    }

    /// A helper takes over a task.
    fn take_over(&mut self, task: u32, owner: u32, helper: u32) {
        let Some((bring, _)) = self.moving(task, owner, helper) else { return };
        let planned = self.planned(task);
        self.forecasts[owner as usize].begin(self.plan.place[task as usize] as usize, planned);
        self.forecasts[helper as usize].promise(planned);
        self.coming[helper as usize] += planned;
        let instruction = self.program.instruction(self.schedule.instructions[task as usize]);
        self.fetched.extend(instruction.reads.iter().map(|&value| (value, helper)));
        self.outcome.moved += 1;
        self.outcome.moved_bytes += bring;
        let arrived = self.carry(bring, owner, helper, self.now + self.rule.latency);
        self.events.push(Reverse((arrived, Event::Brought { task, helper })));
    }

    /// A helper is done with a task. Its results go back, and it goes on with what follows from them if that is better than
    /// waiting until they are back.
    fn go_on(&mut self, task: u32, helper: u32) {
        let Some(owner) = self.schedule.owner(task as usize) else { return };
        let instruction = self.program.instruction(self.schedule.instructions[task as usize]);
        self.fetched.extend(instruction.writes.iter().map(|&value| (value, helper)));
        let back: u64 = instruction.writes.iter().map(|&value| self.bytes(value, owner)).sum();
        let kept = instruction.writes.iter().any(|&value| self.program.value(value).kept);
        let begin = self.present(owner).max(self.arrival(back, helper, owner, self.now));
        let followers = self.plan.followers(task);
        let may = |next: &&u32| {
            self.missing[**next as usize] == 1 && self.schedule.owner(**next as usize) == Some(owner)
        };
        let gains = followers
            .iter()
            .filter(may)
            .filter_map(|&next| Some((self.gain(next, owner, helper, begin)?, Reverse(next))));
        let next = if self.queues[helper as usize].is_empty() { gains.max() } else { None };
        let only = followers.len() == 1 && !kept;
        if let Some((_, Reverse(next))) = next {
            self.taken[next as usize] = true;
            self.take_over(next, owner, helper);
            if only {
                self.finish(task, self.now);
                return;
            }
        }
        self.outcome.moved_bytes += back;
        let returned = self.carry(back, helper, owner, self.now);
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
