//! One device at work: it does whatever can be done, in the order of the program where there is a choice.
//!
//! A task is ready when all that it reads is there. A ready exchange is announced to its partners at once; what they send
//! is fetched when it has come, between two kernels. So a device computes while others are late, and waits only
//! when nothing else is left. What is fetched ahead of the program's order is bounded, and with it the memory.

use crate::buffer::{Buffer, Pool};
use crate::fabric::Fabric;
use crate::prepare::{DeviceProgram, Job, Task};
use crate::role::Progress;
use shardwright_graph::Op;
use shardwright_lower::InstructionId;
use shardwright_runtime::{Context, KernelError, View, ViewMut, kernels};
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
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
    /// It failed at a task of its program.
    Failed {
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
}

impl<'a> Worker<'a> {
    /// A device before its first step; `sources` are its blocks of weights and data, in the program's order.
    pub fn new(
        device: u32,
        program: &'a DeviceProgram,
        fabric: &'a Fabric,
        sources: impl IntoIterator<Item = Arc<Buffer>>,
        start: Instant,
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
            start,
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
        self.begin();
        while self.frontier < self.program.tasks.len() {
            if self.fabric.alarm.is_raised() {
                return Err(Stop::Told);
            }
            let seen = self.fabric.bell(self.device).rings();
            let progressed = self.exchange();
            match self.ready.peek() {
                Some(&Reverse(task)) if (task as usize) < self.frontier + AHEAD => {
                    self.ready.pop();
                    self.compute(task)?;
                }
                _ if progressed => {}
                _ => {
                    let before = Instant::now();
                    self.fabric.wait(self.device, seen);
                    self.spent.waiting += before.elapsed();
                }
            }
        }
        self.carry();
        Ok(())
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
            self.ready.push(Reverse(task));
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
        let task = &self.program.tasks[at as usize];
        let before = Instant::now();
        let made: SmallVec<[Arc<Buffer>; 2]> = match &task.job {
            Job::Compute(op) => self.run(op, task).map_err(|reason| Stop::Failed { task: at, reason })?,
            Job::Regroup => self.regroup(task),
            Job::View | Job::Exchange(_) => {
                task.reads.first().and_then(|&v| self.values[v as usize].clone()).into_iter().collect()
            }
        };
        let took = before.elapsed();
        self.spent.computing += took;
        if let Some(events) = &mut self.events {
            let start = before.duration_since(self.start).as_secs_f64();
            events.push(Event { instruction: task.instruction, start, seconds: took.as_secs_f64() });
        }
        for (&v, buffer) in task.writes.iter().zip(made) {
            self.values[v as usize] = Some(buffer);
        }
        self.finish(at);
        Ok(())
    }

    /// Runs a kernel on what a task reads, into fresh memory.
    fn run(&mut self, op: &Op, task: &Task) -> Result<SmallVec<[Arc<Buffer>; 2]>, KernelError> {
        let ty = |v: u32| &self.program.values[v as usize].ty;
        let mut made: SmallVec<[Arc<Buffer>; 2]> =
            task.writes.iter().map(|&v| self.pool.take(ty(v).bytes() as usize)).collect();
        // Fresh from the pool, a buffer has no other holder.
        let mut outputs: SmallVec<[ViewMut<'_>; 2]> = (made.iter_mut().zip(&task.writes))
            .filter_map(|(buffer, &v)| {
                Some(ViewMut { shape: &ty(v).shape, data: Arc::get_mut(buffer)?.elements_mut(ty(v)) })
            })
            .collect();
        let values = &self.values;
        let inputs: SmallVec<[View<'_>; 4]> = (task.reads.iter())
            .filter_map(|&v| {
                Some(View { shape: &ty(v).shape, data: values[v as usize].as_ref()?.elements(ty(v)) })
            })
            .collect();
        kernels::run(op, &inputs, &mut outputs, &mut self.context)?;
        drop(outputs);
        Ok(made)
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
            self.values[v as usize].take().into_iter().for_each(|buffer| self.pool.give(buffer));
        }
    }

    /// What the step made takes the place of what it started from.
    fn carry(&mut self) {
        for &(old, new) in &self.program.carries {
            let new = self.values[new as usize].clone();
            let old = std::mem::replace(&mut self.values[old as usize], new);
            // The first weights were made for all devices that hold the same block; later ones are this device's.
            if self.context.step > 0 {
                old.into_iter().for_each(|buffer| self.pool.give(buffer));
            }
        }
        self.context.step += 1;
    }

    /// Forgets the results of the last step.
    fn clear(&mut self) {
        let program = self.program;
        for v in program.tasks.iter().flat_map(|task| &task.writes) {
            self.values[*v as usize].take().into_iter().for_each(|buffer| self.pool.give(buffer));
        }
    }
}
