//! The schedule: the tasks of a lowered program.
//!
//! A compute instruction is one task on the compute stream of every device that takes part. A collective is one task
//! per group of devices. It occupies the ports of all members to the links that it keeps busy: of the levels that it crosses, those
//! on which it takes at least half of its time. Its predicted time already includes the sharing among concurrent groups, so ports belong to devices. Local instructions (slices,
//! views) take no time, as in the cost model.
//!
//! On machines whose compute cores also move data, a collective is one task per member. Each member fetches its data
//! once all members have produced theirs, and does not wait for the other fetches.
//!
//! In a step of several micro-batches, a device computes the passes of the body in the order of the program, which is that of a
//! pipeline's schedule: each of its compute tasks there waits for the one before. Transfers start when their operands exist,
//! so sends to the next stage overlap with the next pass. A gradient is added to its sum when it has arrived: no later op of the
//! body reads the sum, so none waits for it. Then reductions of gradients overlap with the backward pass. A stored weight is
//! gathered at most [`GATHERED_AHEAD`] gathers before its reader, as trainers do: else the gathers of all micro-batches would stand
//! in a port's queue from the start, before all sends.

use crate::{
    classes::Classes,
    tasks::{Tasks, duration},
    timeline::{NO_TASK, Timeline},
};
use rand::{RngExt, SeedableRng, seq::SliceRandom};
use rand_xoshiro::Xoshiro256PlusPlus;
use shardwright_cost::{Comm, SpeedTrace};
use shardwright_graph::OpId;
use shardwright_lower::{Instruction, InstructionId, ParallelGraph, ValueId, Work};
use shardwright_machine::{AxisSet, DeviceId, Machine};
use shardwright_plan::picoseconds;
use std::collections::VecDeque;

/// The most simulated tasks; each takes about 100 bytes.
pub const MOST_TASKS: usize = 1 << 26;

/// Gathers of stored tensors that are under way or done ahead of a device's computing: about those of a block's weights.
pub(crate) const GATHERED_AHEAD: usize = 12;

/// A program with too many tasks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{instructions} instructions on {devices} devices that differ are more than {MOST_TASKS} tasks; simulate a smaller machine, or without noise"
)]
pub struct TooManyTasks {
    /// Instructions of the program.
    pub instructions: usize,
    /// Number of devices, or of device classes.
    pub devices: usize,
}

/// The kind of a device's stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// The device's compute units.
    Compute,
    /// The device's port to the links of a level; 0 is the outermost.
    Port(u32),
}

/// The behaviour of concurrent transfers on one link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Links {
    /// They wait for each other: FlexFlow's rule.
    #[default]
    Fifo,
    /// They share the bandwidth.
    Shared,
    /// They wait for each other and for computation: the compute core also moves data.
    Core,
    /// No overlap: every instruction waits for the previous one, on all devices.
    Serial,
}

impl Links {
    /// The behaviour of links on a machine.
    pub fn of(machine: &Machine) -> Self {
        if machine.slowest().overlap { Links::Fifo } else { Links::Core }
    }
}

/// The tasks of a program, with their instructions.
#[derive(Clone, Debug)]
pub struct Schedule {
    /// The tasks.
    pub tasks: Tasks,
    /// Per task: its instruction.
    pub instructions: Vec<InstructionId>,
    /// The device classes that own the streams.
    pub classes: Classes,
    /// Per instruction and class: the task of the class.
    task_of: Vec<u32>,
    /// Number of streams per class.
    per_class: u32,
    links: Links,
}

/// Whether a device takes part in an instruction.
fn takes_part(program: &ParallelGraph, instruction: &Instruction, device: DeviceId) -> bool {
    let on = |value: &ValueId| program.value(*value).is_on(&program.mesh, device);
    match instruction.work {
        Work::Compute { .. } => program.computes(instruction, device),
        _ => instruction.reads.iter().any(on) || instruction.writes.iter().any(on),
    }
}

impl Schedule {
    /// The tasks of a program for these device classes and links. `comm` says which links a collective occupies; `compute` returns
    /// the picoseconds of an op's local part, or of its completion.
    ///
    /// # Errors
    /// Where there are too many tasks.
    pub fn new(
        program: &ParallelGraph,
        classes: Classes,
        links: Links,
        comm: &Comm,
        mut compute: impl FnMut(OpId, bool) -> i64,
    ) -> Result<Self, TooManyTasks> {
        let count = program.instructions.len();
        if count.saturating_mul(classes.len()) > MOST_TASKS {
            return Err(TooManyTasks { instructions: count, devices: classes.len() });
        }
        let levels = program.mesh.axes().iter().map(|axis| axis.level.0 + 1).max().unwrap_or(0);
        let mut schedule = Self {
            tasks: Tasks::default(),
            instructions: Vec::new(),
            task_of: vec![NO_TASK; count * classes.len()],
            per_class: 1 + levels,
            classes,
            links,
        };
        let mut members: Vec<(u32, u32)> = Vec::new();
        let (mut streams, mut waits_for, mut before_gang) = (Vec::new(), Vec::new(), Vec::new());
        // Per class: its last compute task in the body.
        let mut last_computed = vec![NO_TASK; schedule.classes.len()];
        // Per class: its last compute task before each of the last gathers.
        let mut gathers: Vec<VecDeque<u32>> = vec![VecDeque::new(); schedule.classes.len()];
        // Per value: whether the body makes it, other than as a slice or view of what is there before.
        let mut made_inside = vec![false; program.values.len()];
        for (at, instruction) in program.instructions.iter().enumerate() {
            let (picoseconds, axes) = match &instruction.work {
                Work::Compute { op, completes } => (compute(*op, *completes), AxisSet::EMPTY),
                Work::Reshard(step) => (picoseconds(step.seconds), step.axes),
                Work::HaloExchange { axes, seconds, .. } => (picoseconds(*seconds), *axes),
            };
            let duration = duration(picoseconds);
            // An instruction without a duration is local: its devices do not wait for each other.
            let axes = if duration == 0 { AxisSet::EMPTY } else { axes };
            members.clear();
            for class in schedule.classes.ids() {
                if takes_part(program, instruction, schedule.classes.device(class)) {
                    let group = schedule.classes.group(class, axes);
                    members.push((if links == Links::Serial { 0 } else { group }, class));
                }
            }
            members.sort_unstable();
            let inside = instruction.reads.iter().any(|read| made_inside[read.index()]);
            let moves = matches!(instruction.work, Work::Reshard(_)) && program.body.contains(&at);
            if program.body.contains(&at) && (inside || duration > 0 || !moves) {
                instruction.writes.iter().for_each(|write| made_inside[write.index()] = true);
            }
            let is_gather = moves && duration > 0 && !inside;
            for group in members.chunk_by(|a, b| a.0 == b.0) {
                waits_for.clear();
                // Without micro-batches there is no body.
                let ordered = matches!(instruction.work, Work::Compute { .. })
                    && program.body.contains(&at)
                    && !program.accumulates(instruction);
                for &(_, class) in group {
                    for value in &instruction.reads {
                        waits_for.extend(schedule.producer(program, *value, class));
                    }
                    let before = last_computed[class as usize];
                    waits_for.extend((ordered && before != NO_TASK).then_some(before));
                }
                let together = if links == Links::Core { 1 } else { group.len() };
                for gang in group.chunks(together) {
                    streams.clear();
                    if links == Links::Serial {
                        streams.push(0);
                    } else {
                        for &(_, class) in gang {
                            schedule.streams_of(comm, axes, class, &mut streams);
                        }
                    }
                    before_gang.clear();
                    before_gang.extend_from_slice(&waits_for);
                    for &(_, class) in gang.iter().filter(|_| is_gather) {
                        let own = &mut gathers[class as usize];
                        own.push_back(last_computed[class as usize]);
                        let ahead = (own.len() > GATHERED_AHEAD).then(|| own.pop_front()).flatten();
                        before_gang.extend(ahead.filter(|&task| task != NO_TASK));
                    }
                    before_gang.sort_unstable();
                    before_gang.dedup();
                    let task = schedule.tasks.push(duration, &streams, &before_gang);
                    schedule.instructions.push(InstructionId(at as u32));
                    let row = at * schedule.classes.len();
                    for &(_, class) in gang {
                        schedule.task_of[row + class as usize] = task;
                        if ordered {
                            last_computed[class as usize] = task;
                        }
                    }
                }
            }
        }
        Ok(schedule)
    }

    /// The streams of a class that an instruction along these axes occupies.
    fn streams_of(&self, comm: &Comm, axes: AxisSet, class: u32, out: &mut Vec<u32>) {
        let first = class * self.per_class;
        let levels = comm.occupied_levels(axes);
        if levels == 0 {
            out.push(first);
        }
        out.extend((0..self.per_class - 1).filter(|level| levels >> level & 1 == 1).map(|l| first + 1 + l));
    }

    /// The task that produces a value on a class; none for sources, and where the value is absent.
    fn producer(&self, program: &ParallelGraph, value: ValueId, class: u32) -> Option<u32> {
        self.task(program.value(value).made_by?, class)
    }

    /// The task of a class in an instruction.
    pub fn task(&self, instruction: InstructionId, class: u32) -> Option<u32> {
        let task = self.task_of[instruction.index() * self.classes.len() + class as usize];
        (task != NO_TASK).then_some(task)
    }

    /// The class and the kind of a stream.
    pub fn stream(&self, stream: u32) -> (u32, Stream) {
        let (class, kind) = (stream / self.per_class, stream % self.per_class);
        (class, if kind == 0 { Stream::Compute } else { Stream::Port(kind - 1) })
    }

    /// Number of streams per class: one that computes, and a port to every level.
    pub fn streams_per_class(&self) -> usize {
        self.per_class as usize
    }

    /// Lengthens or shortens every task at random, by at most a share of its duration (0.2: a fifth).
    ///
    /// Devices of one class get the same noise. Use one class per device for noise that differs between devices.
    pub fn perturb(&mut self, share: f64, seed: u64) {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
        self.tasks.rescale(|_, duration| {
            let factor = 1.0 + share.clamp(0.0, 1.0) * (2.0 * random.random::<f64>() - 1.0);
            (duration as f64 * factor).round() as u64
        });
    }

    /// Makes devices as uneven as a speed trace. The trace starts at a random sample, and each device follows a random
    /// device of the trace. Transfers keep their durations: their measured times are already those of the slowest
    /// device.
    ///
    /// Use one class per device.
    pub fn apply_speeds(&mut self, trace: &SpeedTrace, seed: u64) {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
        let samples = trace.samples();
        let mut traced_devices: Vec<usize> = (0..trace.devices()).collect();
        traced_devices.shuffle(&mut random);
        let start = random.random_range(0..samples.len());
        // Per device: its current sample, and the picoseconds left of it.
        let length = |at: usize| samples[at].microseconds as f64 * 1e6;
        let mut now: Vec<(usize, f64)> = vec![(start, length(start)); self.classes.len()];
        let owners: Vec<Option<u32>> = self.tasks.ids().map(|task| self.owner(task)).collect();
        self.tasks.rescale(|task, duration| {
            let Some(device) = owners[task] else { return duration };
            let (at, left) = &mut now[device as usize];
            let traced = traced_devices[device as usize % traced_devices.len()];
            let (mut work, mut took) = (duration as f64, 0.0);
            // Half a picosecond is below the resolution.
            while work > 0.5 {
                let slowdown = samples[*at].thousandths[traced] as f64 / 1000.0;
                let spent = (work * slowdown).min(*left);
                (work, took, *left) = (work - spent / slowdown, took + spent, *left - spent);
                if *left <= 0.0 {
                    *at = (*at + 1) % samples.len();
                    *left = length(*at);
                }
            }
            took.round() as u64
        });
    }

    /// The class whose compute stream a task occupies; none for other tasks.
    pub fn owner(&self, task: usize) -> Option<u32> {
        let (class, stream) = self.stream(*self.tasks.streams(task).first()?);
        (stream == Stream::Compute).then_some(class)
    }

    /// Multiplies the computing time of some classes by a factor. Use one class per device.
    pub fn slow_down(&mut self, slower: &[(u32, f64)]) {
        for &(class, factor) in slower {
            let owned: Vec<bool> = self.tasks.ids().map(|task| self.owner(task) == Some(class)).collect();
            self.tasks.rescale(|task, duration| {
                if owned[task] { (duration as f64 * factor).round() as u64 } else { duration }
            });
        }
    }

    /// The tasks for cores that also move data: a transfer occupies the compute streams of its members too.
    fn on_cores(&self) -> Tasks {
        let mut tasks = Tasks::default();
        let mut streams = Vec::new();
        for task in self.tasks.ids() {
            streams.clear();
            streams.extend_from_slice(self.tasks.streams(task));
            streams.extend(
                self.tasks.streams(task).iter().map(|stream| stream / self.per_class * self.per_class),
            );
            streams.sort_unstable();
            streams.dedup();
            tasks.push(self.tasks.duration(task), &streams, self.tasks.waits_for(task));
        }
        tasks
    }

    /// Simulates the tasks.
    pub fn simulate(&self) -> Timeline {
        match self.links {
            Links::Fifo | Links::Serial => Timeline::of(&self.tasks),
            Links::Shared => {
                Timeline::sharing(&self.tasks, |stream| self.stream(stream).1 != Stream::Compute)
            }
            Links::Core => Timeline::of(&self.on_cores()),
        }
    }
}
