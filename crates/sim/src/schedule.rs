//! From a lowered program to tasks.
//!
//! A compute instruction is one task on the compute stream of every device that takes part. A collective is one task per
//! group of devices; it takes up the ports of all its members to the links of the levels that it crosses. Its
//! predicted time already counts what all groups that run at once share, so ports belong to devices. What moves
//! nothing between devices (slices, views) takes no time, as in the cost model.
//!
//! Where the core that computes moves the data too, a collective is one task per member: each fetches what it wants once all have what they
//! give, when it comes to it, and nobody waits for others to fetch.

use crate::{
    classes::Classes,
    tasks::Tasks,
    timeline::{NOBODY, Timeline},
};
use rand::{RngExt, SeedableRng, seq::SliceRandom};
use rand_xoshiro::Xoshiro256PlusPlus;
use shardwright_cost::Paces;
use shardwright_graph::OpId;
use shardwright_lower::{Instruction, InstructionId, ParallelGraph, ValueId, Work};
use shardwright_machine::{AxisSet, DeviceId, Machine};
use shardwright_plan::picoseconds;

/// The most tasks that are simulated: some 100 bytes each.
pub const MOST_TASKS: usize = 1 << 26;

/// A program is too large to be simulated in such detail.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{instructions} instructions on {devices} devices that differ are more than {MOST_TASKS} tasks; simulate a smaller machine, or without noise"
)]
pub struct TooManyTasks {
    /// Instructions of the program.
    pub instructions: usize,
    /// Devices, or classes of them.
    pub devices: usize,
}

/// What a device's stream stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// The device's compute units.
    Compute,
    /// Its port to the links of a level, outermost = 0.
    Port(u32),
}

/// What transfers that want the same link at once do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Links {
    /// Wait for each other: FlexFlow's rule.
    #[default]
    Fifo,
    /// Share its bandwidth.
    Shared,
    /// Wait for each other, and for computing: the core that computes is the one that moves data, each for itself.
    Core,
}

impl Links {
    /// What transfers do on a machine.
    pub fn of(machine: &Machine) -> Self {
        if machine.slowest().overlap { Links::Fifo } else { Links::Core }
    }
}

/// The tasks of a program, and where they come from.
#[derive(Clone, Debug)]
pub struct Schedule {
    /// The tasks.
    pub tasks: Tasks,
    /// Per task: its instruction.
    pub instructions: Vec<InstructionId>,
    /// Whose streams these are.
    pub classes: Classes,
    /// Per instruction and class: the task that the class takes part in.
    task_of: Vec<u32>,
    /// Streams of each class.
    per_class: u32,
    links: Links,
}

/// Whether a device has anything to do with an instruction.
fn takes_part(program: &ParallelGraph, instruction: &Instruction, device: DeviceId) -> bool {
    let on = |value: &ValueId| program.value(*value).is_on(&program.mesh, device);
    match instruction.work {
        Work::Compute { .. } => program.computes(instruction, device),
        _ => instruction.reads.iter().any(on) || instruction.writes.iter().any(on),
    }
}

impl Schedule {
    /// The tasks of a program for these classes of devices and links; `compute` says how many picoseconds an op's local part
    /// takes.
    ///
    /// # Errors
    /// Where there would be too many tasks.
    pub fn new(
        program: &ParallelGraph,
        classes: Classes,
        links: Links,
        mut compute: impl FnMut(OpId) -> i64,
    ) -> Result<Self, TooManyTasks> {
        let count = program.instructions.len();
        if count.saturating_mul(classes.len()) > MOST_TASKS {
            return Err(TooManyTasks { instructions: count, devices: classes.len() });
        }
        let levels = program.mesh.axes().iter().map(|axis| axis.level.0 + 1).max().unwrap_or(0);
        let mut schedule = Self {
            tasks: Tasks::default(),
            instructions: Vec::new(),
            task_of: vec![NOBODY; count * classes.len()],
            per_class: 1 + levels,
            classes,
            links,
        };
        let mut members: Vec<(u32, u32)> = Vec::new();
        let (mut streams, mut waits_for) = (Vec::new(), Vec::new());
        for (at, instruction) in program.instructions.iter().enumerate() {
            let (duration, axes) = match &instruction.work {
                Work::Compute { op } => (compute(*op), AxisSet::EMPTY),
                Work::Relayout(step) => (picoseconds(step.seconds), step.axes),
                Work::Window { axes, seconds, .. } => (picoseconds(*seconds), *axes),
            };
            let duration = u64::try_from(duration).unwrap_or(0);
            // What costs nothing is local: nobody waits for others.
            let axes = if duration == 0 { AxisSet::EMPTY } else { axes };
            members.clear();
            for class in schedule.classes.ids() {
                if takes_part(program, instruction, schedule.classes.device(class)) {
                    members.push((schedule.classes.group(class, axes), class));
                }
            }
            members.sort_unstable();
            for group in members.chunk_by(|a, b| a.0 == b.0) {
                waits_for.clear();
                for &(_, class) in group {
                    for value in &instruction.reads {
                        waits_for.extend(schedule.maker(program, *value, class));
                    }
                }
                waits_for.sort_unstable();
                waits_for.dedup();
                let together = if links == Links::Core { 1 } else { group.len() };
                for gang in group.chunks(together) {
                    streams.clear();
                    for &(_, class) in gang {
                        schedule.streams_of(program, axes, class, &mut streams);
                    }
                    let task = schedule.tasks.push(duration, &streams, &waits_for);
                    schedule.instructions.push(InstructionId(at as u32));
                    let row = at * schedule.classes.len();
                    gang.iter().for_each(|&(_, class)| schedule.task_of[row + class as usize] = task);
                }
            }
        }
        Ok(schedule)
    }

    /// The streams that an instruction along these axes takes up on a class.
    fn streams_of(&self, program: &ParallelGraph, axes: AxisSet, class: u32, out: &mut Vec<u32>) {
        let first = class * self.per_class;
        let levels = program.mesh.levels_crossed(axes);
        if levels == 0 {
            out.push(first);
        }
        out.extend((0..self.per_class - 1).filter(|level| levels >> level & 1 == 1).map(|l| first + 1 + l));
    }

    /// The task that makes a value on a class; none for sources, and where it is absent.
    fn maker(&self, program: &ParallelGraph, value: ValueId, class: u32) -> Option<u32> {
        self.task(program.value(value).made_by?, class)
    }

    /// The task of an instruction that a class takes part in.
    pub fn task(&self, instruction: InstructionId, class: u32) -> Option<u32> {
        let task = self.task_of[instruction.index() * self.classes.len() + class as usize];
        (task != NOBODY).then_some(task)
    }

    /// A stream by its number: whose it is, and what it stands for.
    pub fn stream(&self, stream: u32) -> (u32, Stream) {
        let (class, kind) = (stream / self.per_class, stream % self.per_class);
        (class, if kind == 0 { Stream::Compute } else { Stream::Port(kind - 1) })
    }

    /// Streams of each class: one that computes, and a port to every level.
    pub fn streams_per_class(&self) -> usize {
        self.per_class as usize
    }

    /// Makes every task take up to so much longer or shorter, at random: 0.2 for a fifth.
    ///
    /// Tasks of one class stay alike; give every device its own class for noise that differs between devices.
    pub fn perturb(&mut self, share: f64, seed: u64) {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
        self.tasks.rescale(|_, duration| {
            let factor = 1.0 + share.clamp(0.0, 1.0) * (2.0 * random.random::<f64>() - 1.0);
            (duration as f64 * factor).round() as u64
        });
    }

    /// Lets devices be as uneven as those that operator costs were measured on: from a moment picked at random on, each computes as fast as one of
    /// them did then, also picked at random. Transfers take what they take: measured times of theirs are those of the slowest.
    ///
    /// Give every device its own class.
    pub fn pace(&mut self, paces: &Paces, seed: u64) {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
        let moments = paces.moments();
        let mut as_whom: Vec<usize> = (0..paces.devices()).collect();
        as_whom.shuffle(&mut random);
        let start = random.random_range(0..moments.len());
        // Per device: the moment that it is in, and picoseconds that are left of it.
        let length = |at: usize| moments[at].microseconds as f64 * 1e6;
        let mut now: Vec<(usize, f64)> = vec![(start, length(start)); self.classes.len()];
        let owners: Vec<Option<u32>> = self.tasks.ids().map(|task| self.owner(task)).collect();
        self.tasks.rescale(|task, duration| {
            let Some(device) = owners[task] else { return duration };
            let (at, left) = &mut now[device as usize];
            let who = as_whom[device as usize % as_whom.len()];
            let (mut work, mut took) = (duration as f64, 0.0);
            // Half a picosecond is nothing.
            while work > 0.5 {
                let pace = moments[*at].thousandths[who] as f64 / 1000.0;
                let spent = (work * pace).min(*left);
                (work, took, *left) = (work - spent / pace, took + spent, *left - spent);
                if *left <= 0.0 {
                    *at = (*at + 1) % moments.len();
                    *left = length(*at);
                }
            }
            took.round() as u64
        });
    }

    /// The class whose compute stream a task takes up; none for what does not compute.
    pub fn owner(&self, task: usize) -> Option<u32> {
        let (class, stream) = self.stream(*self.tasks.streams(task).first()?);
        (stream == Stream::Compute).then_some(class)
    }

    /// Makes the computing of some classes take so many times as long; give every device its own class.
    pub fn slow_down(&mut self, slower: &[(u32, f64)]) {
        for &(class, factor) in slower {
            let owned: Vec<bool> = self.tasks.ids().map(|task| self.owner(task) == Some(class)).collect();
            self.tasks.rescale(|task, duration| {
                if owned[task] { (duration as f64 * factor).round() as u64 } else { duration }
            });
        }
    }

    /// The tasks where whoever takes part in a transfer can do nothing else meanwhile.
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

    /// Runs it.
    pub fn simulate(&self) -> Timeline {
        match self.links {
            Links::Fifo => Timeline::of(&self.tasks),
            Links::Shared => {
                Timeline::sharing(&self.tasks, |stream| self.stream(stream).1 != Stream::Compute)
            }
            Links::Core => Timeline::of(&self.on_cores()),
        }
    }
}
