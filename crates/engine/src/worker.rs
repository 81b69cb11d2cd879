//! One device at work: it does whatever can be done, in the order of the program where there is a choice.
//!
//! A task is ready when all that it reads is there. A ready exchange is announced to its partners at once; what they send
//! is fetched when it has come, between two kernels. So a device computes while others are late, and waits only
//! when nothing else is left. What is fetched ahead of the program's order is bounded, and with it the memory.

use crate::assist::{Floor, Offer, Returned, Taken};
use crate::buffer::{Buffer, Pool};
use crate::fabric::Fabric;
use crate::prepare::{DeviceProgram, Job, Task};
use crate::role::Progress;
use shardwright_graph::Op;
use shardwright_lower::InstructionId;
use shardwright_runtime::{Context, KernelError, View, ViewMut, kernels};
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How many tasks past the first unfinished one may run: enough to fill waits, few enough to keep memory near what the
/// program's order needs.
const AHEAD: usize = 24;

/// What a device did, for a trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Event {
    /// The instruction that it was part of.
    pub instruction: InstructionId,
    /// Seconds from the start of the run.
    pub start: f64,
    /// How long it took.
    pub seconds: f64,
}

/// Where a device's time went.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spent {
    /// In kernels.
    pub computing: Duration,
    /// Copying and combining what others sent.
    pub communicating: Duration,
    /// Waiting for others.
    pub waiting: Duration,
}

/// Why a device stopped.
pub enum Stop {
    /// It failed at a task, of its own or of another that it helped.
    Failed {
        /// Whose it is.
        device: u32,
        /// Which one.
        task: u32,
        /// Why.
        reason: KernelError,
    },
    /// Another failed.
    Told,
}

/// A device at work.
pub struct Worker<'a> {
    device: u32,
    program: &'a DeviceProgram,
    fabric: &'a Fabric,
    pool: Pool,
    context: Context,
    values: Vec<Option<Arc<Buffer>>>,
    /// Per value: tasks of this step that have yet to read it.
    unread: Vec<u32>,
    /// Per task: values that have yet to come.
    missing: Vec<u32>,
    done: Vec<bool>,
    progress: Vec<Progress>,
    /// Ready tasks that need this device only, first ones first.
    ready: BinaryHeap<Reverse<u32>>,
    /// Exchanges that have begun, in order.
    open: Vec<u32>,
    /// The first task that is not done.
    frontier: usize,
    /// Where the time of all steps went.
    pub spent: Spent,
    /// What was done when, if that is asked for.
    pub events: Option<Vec<Event>>,
    start: Instant,
    /// How many times as long as it takes to run a kernel the device takes for it.
    slowness: f64,
    /// Where devices hand over work to each other, if they do.
    floor: Option<&'a Floor<'a>>,
    /// Values that lie in another device's memory, which made them.
    lent: BTreeMap<u32, u32>,
    /// How many tasks of others it has run.
    pub helped: u64,
}

/// In which circumstances a device works.
#[derive(Clone, Copy)]
pub struct Circumstances<'a> {
    /// When the run began.
    pub start: Instant,
    /// How many times as long as usual it takes to compute; none: as usual.
    pub slowness: Option<f64>,
    /// Where devices hand over work to each other, if they do.
    pub floor: Option<&'a Floor<'a>>,
}

impl<'a> Worker<'a> {
    /// A device before its first step; `sources` are its blocks of weights and data, in the program's order.
    pub fn new(
        device: u32,
        program: &'a DeviceProgram,
        fabric: &'a Fabric,
        sources: impl IntoIterator<Item = Arc<Buffer>>,
        circumstances: Circumstances<'a>,
    ) -> Self {
        let mut values: Vec<Option<Arc<Buffer>>> = vec![None; program.values.len()];
        for (source, buffer) in program.sources.iter().zip(sources) {
            values[source.value as usize] = Some(buffer);
        }
        Self {
            device,
            program,
            fabric,
            pool: Pool::default(),
            context: Context::default(),
            values,
            unread: vec![0; program.values.len()],
            missing: vec![0; program.tasks.len()],
            done: vec![false; program.tasks.len()],
            progress: program.tasks.iter().map(|_| Progress::default()).collect(),
            ready: BinaryHeap::new(),
            open: Vec::new(),
            frontier: 0,
            spent: Spent::default(),
            events: None,
            start: circumstances.start,
            slowness: circumstances.slowness.unwrap_or(1.0),
            floor: circumstances.floor,
            lent: BTreeMap::new(),
            helped: 0,
        }
    }

    /// A value that is there: sources, and after a step what outlives it.
    pub fn value(&self, number: u32) -> Option<&Arc<Buffer>> {
        self.values[number as usize].as_ref()
    }

    /// Bytes of memory that the device has asked for, weights and data aside.
    pub fn memory(&self) -> u64 {
        self.pool.held()
    }

    /// Runs one training step.
    pub fn step(&mut self) -> Result<(), Stop> {
        self.clear();
        if let Some(floor) = self.floor {
            floor.begin_step(self.device, self.context.step);
        }
        self.begin();
        while self.frontier < self.program.tasks.len() {
            if self.fabric.alarm.is_raised() {
                return Err(Stop::Told);
            }
            let seen = self.fabric.bell(self.device).rings();
            let progressed = self.exchange();
            if self.collect() | self.help_who_asked()? || self.compute_next()? || progressed || self.help()? {
                continue;
            }
            let before = Instant::now();
            self.fabric.wait(self.device, seen);
            self.spent.waiting += before.elapsed();
        }
        self.carry();
        Ok(())
    }

    /// After the last step: helps those who count on it, until nobody does.
    pub fn part(&mut self) -> Result<(), Stop> {
        let Some(floor) = self.floor else { return Ok(()) };
        while !floor.close(self.device) {
            self.help_who_asked()?;
        }
        Ok(())
    }

    /// Runs the first of the device's tasks that are ready, or asks another to; whether there was one.
    fn compute_next(&mut self) -> Result<bool, Stop> {
        let end = (self.frontier + AHEAD) as u32;
        let own = self.ready.peek().map(|&Reverse(task)| task).filter(|&task| task < end);
        let offered = self.floor.and_then(|floor| floor.first(self.device, end));
        match (own, offered, self.floor) {
            (Some(task), offered, _) if offered.is_none_or(|other| task < other) => {
                self.ready.pop();
                self.compute(task)?;
            }
            (_, Some(task), Some(floor)) => {
                if !floor.hand_over(self.device, self.fabric) && floor.begin(self.device, task) {
                    self.compute(task)?;
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Takes what others have made for this device; whether there was something.
    fn collect(&mut self) -> bool {
        let Some(floor) = self.floor else { return false };
        let returned = floor.collect(self.device);
        for Returned { task, made, helper } in &returned {
            for (&v, buffer) in self.program.tasks[*task as usize].writes.iter().zip(made) {
                self.values[v as usize] = Some(buffer.clone());
                self.lent.insert(v, *helper);
            }
        }
        let tasks: SmallVec<[u32; 4]> = returned.iter().map(|returned| returned.task).collect();
        drop(returned);
        tasks.iter().for_each(|&task| self.finish(task));
        !tasks.is_empty()
    }

    /// Runs what others have asked for; whether there was something.
    fn help_who_asked(&mut self) -> Result<bool, Stop> {
        match self.floor.and_then(|floor| floor.asked(self.device)) {
            Some(taken) => self.run_for(taken).map(|()| true),
            None => Ok(false),
        }
    }

    /// Runs work of others; whether there was any.
    fn help(&mut self) -> Result<bool, Stop> {
        match self.floor.and_then(|floor| floor.work_for(self.device)) {
            Some(taken) => self.run_for(taken).map(|()| true),
            None => Ok(false),
        }
    }

    /// Runs a task of another device, and gives it the result.
    fn run_for(&mut self, Taken { owner, task: at, offer }: Taken) -> Result<(), Stop> {
        let Some(floor) = self.floor else { return Ok(()) };
        for buffer in floor.spares(self.device) {
            self.pool.give(buffer);
        }
        let program = &floor.prepared.devices[owner as usize];
        let task = &program.tasks[at as usize];
        let Job::Compute(op) = &task.job else { return Ok(()) };
        let before = Instant::now();
        let own_step = std::mem::replace(&mut self.context.step, offer.step);
        let made = run(op, task, program, &offer.reads, &mut self.pool, &mut self.context);
        self.context.step = own_step;
        let made = made.map_err(|reason| Stop::Failed { device: owner, task: at, reason })?;
        let took = self.ran(task, before);
        floor.done(self.device, owner, at, took.as_nanos() as u64);
        self.helped += 1;
        drop(offer);
        floor.give(owner, Returned { task: at, made, helper: self.device }, self.fabric);
        Ok(())
    }

    /// A kernel has run: writes down when, and takes as long as a slow device would.
    fn ran(&mut self, task: &Task, before: Instant) -> Duration {
        if self.slowness > 1.0 {
            let end = before + before.elapsed().mul_f64(self.slowness);
            while Instant::now() < end {
                std::hint::spin_loop();
            }
        }
        let took = before.elapsed();
        self.spent.computing += took;
        if let Some(events) = &mut self.events {
            let start = before.duration_since(self.start).as_secs_f64();
            events.push(Event { instruction: task.instruction, start, seconds: took.as_secs_f64() });
        }
        took
    }

    fn begin(&mut self) {
        self.frontier = 0;
        self.done.fill(false);
        for (unread, value) in self.unread.iter_mut().zip(&self.program.values) {
            *unread = value.readers.len() as u32;
        }
        for at in 0..self.program.tasks.len() {
            let task = &self.program.tasks[at];
            let missing = task.reads.iter().filter(|&&v| self.values[v as usize].is_none()).count();
            self.missing[at] = missing as u32;
            if let Job::Exchange(role) = &task.job {
                self.progress[at].restart(role);
            }
            if missing == 0 {
                self.enable(at as u32);
            }
        }
    }

    /// All that the task reads is there.
    fn enable(&mut self, task: u32) {
        let Job::Exchange(role) = &self.program.tasks[task as usize].job else {
            match self.floor {
                Some(floor) if floor.planned(self.device, task).is_some() => {
                    let reads = &self.program.tasks[task as usize].reads;
                    let reads = reads.iter().filter_map(|&v| self.values[v as usize].clone()).collect();
                    floor.offer(self.device, task, Offer { reads, step: self.context.step });
                }
                _ => self.ready.push(Reverse(task)),
            }
            return;
        };
        let own = self.program.tasks[task as usize].reads.first();
        let own = own.and_then(|&v| self.values[v as usize].as_ref());
        self.progress[task as usize].announce(role, self.fabric, own);
        let at = self.open.partition_point(|&other| other < task);
        self.open.insert(at, task);
    }

    /// Carries open exchanges on as far as they go; true if one was finished.
    fn exchange(&mut self) -> bool {
        let mut finished: SmallVec<[u32; 8]> = SmallVec::new();
        for &task in &self.open {
            let Job::Exchange(role) = &self.program.tasks[task as usize].job else { continue };
            let own = self.program.tasks[task as usize].reads.first();
            let own = own.and_then(|&v| self.values[v as usize].as_ref());
            let progress = &mut self.progress[task as usize];
            if task as usize >= self.frontier + AHEAD {
                progress.announce(role, self.fabric, own);
                continue;
            }
            let (assembled, before) = (progress.assembled(), Instant::now());
            if progress.advance(role, self.fabric, own, &mut self.pool) {
                finished.push(task);
            }
            if progress.assembled() > assembled {
                let took = before.elapsed();
                self.spent.communicating += took;
                if let Some(events) = &mut self.events {
                    let instruction = self.program.tasks[task as usize].instruction;
                    let start = before.duration_since(self.start).as_secs_f64();
                    events.push(Event { instruction, start, seconds: took.as_secs_f64() });
                }
            }
        }
        self.open.retain(|task| !finished.contains(task));
        for &task in &finished {
            let result = self.progress[task as usize].take_result();
            if let Some(&written) = self.program.tasks[task as usize].writes.first() {
                self.values[written as usize] = result;
            }
            self.finish(task);
        }
        !finished.is_empty()
    }

    fn compute(&mut self, at: u32) -> Result<(), Stop> {
        let program = self.program;
        let task = &program.tasks[at as usize];
        let before = Instant::now();
        let made: SmallVec<[Arc<Buffer>; 2]> = match &task.job {
            Job::Compute(op) => {
                let reads = task.reads.iter().filter_map(|&v| self.values[v as usize].clone()).collect();
                run(op, task, program, &reads, &mut self.pool, &mut self.context)
                    .map_err(|reason| Stop::Failed { device: self.device, task: at, reason })?
            }
            Job::Regroup => self.regroup(task),
            Job::View | Job::Exchange(_) => {
                task.reads.first().and_then(|&v| self.values[v as usize].clone()).into_iter().collect()
            }
        };
        let took = self.ran(task, before);
        if let Some(floor) = self.floor
            && floor.planned(self.device, at).is_some()
        {
            floor.done(self.device, self.device, at, took.as_nanos() as u64);
        }
        for (&v, buffer) in task.writes.iter().zip(made) {
            self.values[v as usize] = Some(buffer);
        }
        self.finish(at);
        Ok(())
    }

    /// The bytes of what a task reads, one after the other, as what it writes.
    fn regroup(&mut self, task: &Task) -> SmallVec<[Arc<Buffer>; 2]> {
        let program = self.program;
        let bytes = |v: u32| program.values[v as usize].ty.bytes() as usize;
        let sources = task.reads.iter().map(|&v| (self.values[v as usize].as_deref(), bytes(v)));
        let mut sources = sources.flat_map(|(buffer, length)| buffer.map(|b| &b.bytes()[..length]));
        let mut source: &[u8] = &[];
        let mut made = SmallVec::new();
        for &v in &task.writes {
            let mut buffer = self.pool.take(bytes(v));
            // Fresh from the pool, a buffer has no other holder.
            let mut target =
                Arc::get_mut(&mut buffer).map_or(&mut [][..], |b| &mut b.bytes_mut()[..bytes(v)]);
            while !target.is_empty() {
                if source.is_empty() {
                    let Some(next) = sources.next() else { break };
                    source = next;
                }
                let length = source.len().min(target.len());
                target[..length].copy_from_slice(&source[..length]);
                (source, target) = (&source[length..], &mut target[length..]);
            }
            made.push(buffer);
        }
        made
    }

    /// A task is done: what it read may be free, what it wrote may be waited for.
    fn finish(&mut self, at: u32) {
        let program = self.program;
        let task = &program.tasks[at as usize];
        self.done[at as usize] = true;
        while self.done.get(self.frontier) == Some(&true) {
            self.frontier += 1;
        }
        for &v in &task.reads {
            self.unread[v as usize] -= 1;
            self.release(v);
        }
        for &v in &task.writes {
            for &reader in &program.values[v as usize].readers {
                self.missing[reader as usize] -= 1;
                if self.missing[reader as usize] == 0 {
                    self.enable(reader);
                }
            }
            self.release(v);
        }
    }

    fn release(&mut self, v: u32) {
        if self.unread[v as usize] == 0 && !self.program.values[v as usize].kept {
            self.discard(v);
        }
    }

    /// Gives a value's memory back to whose it is.
    fn discard(&mut self, v: u32) {
        let Some(buffer) = self.values[v as usize].take() else { return };
        match (self.lent.remove(&v), self.floor) {
            (Some(helper), Some(floor)) => floor.give_spare(helper, buffer),
            _ => self.pool.give(buffer),
        }
    }

    /// What the step made takes the place of what it started from.
    fn carry(&mut self) {
        let program = self.program;
        for &(old, new) in &program.carries {
            // The first weights were made for all devices that hold the same block; later ones are this device's.
            if self.context.step > 0 {
                self.discard(old);
            }
            self.values[old as usize] = self.values[new as usize].clone();
            if let Some(&helper) = self.lent.get(&new) {
                self.lent.insert(old, helper);
            }
        }
        self.context.step += 1;
    }

    /// Forgets the results of the last step.
    fn clear(&mut self) {
        let program = self.program;
        for &v in program.tasks.iter().flat_map(|task| &task.writes) {
            self.discard(v);
        }
    }
}

/// Runs a kernel on what a task of a program reads, into fresh memory.
fn run(
    op: &Op,
    task: &Task,
    program: &DeviceProgram,
    reads: &SmallVec<[Arc<Buffer>; 4]>,
    pool: &mut Pool,
    context: &mut Context,
) -> Result<SmallVec<[Arc<Buffer>; 2]>, KernelError> {
    let ty = |v: u32| &program.values[v as usize].ty;
    let mut made: SmallVec<[Arc<Buffer>; 2]> =
        task.writes.iter().map(|&v| pool.take(ty(v).bytes() as usize)).collect();
    // Fresh from the pool, a buffer has no other holder.
    let mut outputs: SmallVec<[ViewMut<'_>; 2]> = (made.iter_mut().zip(&task.writes))
        .filter_map(|(buffer, &v)| {
            Some(ViewMut { shape: &ty(v).shape, data: Arc::get_mut(buffer)?.elements_mut(ty(v)) })
        })
        .collect();
    let inputs: SmallVec<[View<'_>; 4]> = (task.reads.iter().zip(reads))
        .map(|(&v, buffer)| View { shape: &ty(v).shape, data: buffer.elements(ty(v)) })
        .collect();
    kernels::run(op, &inputs, &mut outputs, context)?;
    drop(outputs);
    Ok(made)
}
