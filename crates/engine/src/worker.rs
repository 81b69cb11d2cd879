//! The worker of one device: runs its ready tasks, in the order of the program where several are ready.
//!
//! A task is ready when all its operands exist and, in a pipeline, the kernel before it in the schedule is done. A ready exchange sends to the other members at once and receives between two
//! kernels. So a device computes while messages are on their way, and waits only
//! without any ready task. Tasks run at most [`AHEAD`] positions ahead of the program's order.
//!
//! Memory follows the account in program order ([`shardwright_lower::memory`]), whose peak is the device's budget. A task
//! ahead of the first unfinished one runs only if its results and all tasks in between fit the budget together. The
//! first unfinished task always fits, so waiting for memory ends. With work stealing, thieves allocate results for
//! others, and there is no budget.

use crate::assist::{ReadyTask, StealPool, StolenTask, TaskResult};
use crate::buffer::{Buffer, Pool};
use crate::fabric::Fabric;
use crate::prepare::{DeviceProgram, Job, Task};
use crate::role::Progress;
use shardwright_graph::{Op, TensorType, UPDATE_CHUNK};
use shardwright_lower::InstructionId;
use shardwright_runtime::{Context, KernelError, View, ViewMut, kernels};
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Number of tasks past the first unfinished one that may run: enough to fill waits, few enough to keep memory near that of the
/// program's order.
const AHEAD: usize = 24;

/// A task that a device ran, for a trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TraceEvent {
    /// The instruction that the task belongs to.
    pub instruction: InstructionId,
    /// Seconds from the start of the run.
    pub start: f64,
    /// Its duration.
    pub seconds: f64,
}

/// How a device spent its time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DeviceTimes {
    /// Time in kernels.
    pub computing: Duration,
    /// Time copying and reducing received blocks.
    pub communicating: Duration,
    /// Time waiting for other devices.
    pub waiting: Duration,
}

/// Why a device stopped.
pub enum Stop {
    /// A task failed: one of its own, or a stolen one.
    Failure {
        /// The task's owner.
        device: u32,
        /// The task's number in the owner's program.
        task: u32,
        /// Why.
        reason: KernelError,
    },
    /// Another device failed and raised the stop signal.
    Signal,
}

/// The worker of one device.
pub struct Worker<'a> {
    device: u32,
    program: &'a DeviceProgram,
    fabric: &'a Fabric,
    pool: Pool,
    budget: Budget,
    context: Context,
    values: Vec<Option<Arc<Buffer>>>,
    /// Per value: the value whose buffer it shares; itself where it has its own.
    owners: Vec<u32>,
    /// Per value that owns a buffer: number of values that use it now.
    users: Vec<u32>,
    /// Per value: number of tasks of this step that have yet to read it.
    unread: Vec<u32>,
    /// Per task: number of missing operands, and of the task that it follows.
    missing: Vec<u32>,
    done: Vec<bool>,
    progress: Vec<Progress>,
    /// Ready tasks that cannot be stolen, first ones first.
    ready: BinaryHeap<Reverse<u32>>,
    /// Exchanges that have begun and are not complete, in order.
    open: Vec<u32>,
    /// The first task that is not done.
    frontier: usize,
    /// How the time of all steps was spent.
    pub times: DeviceTimes,
    /// Trace events, if requested.
    pub events: Option<Vec<TraceEvent>>,
    start: Instant,
    /// Factor by which kernels are slowed down on purpose; 1 for none.
    slowness: f64,
    /// The pool that devices steal tasks from; none without work stealing.
    steal_pool: Option<&'a StealPool<'a>>,
    /// Per value: whether it replaces an old weight at the end of the step.
    carried: Vec<bool>,
    /// Values that thieves computed, with the thief whose pool the buffer belongs to.
    lent: BTreeMap<u32, u32>,
    /// Number of other devices' tasks that it has run.
    pub stolen: u64,
}

/// The memory that tasks may take.
struct Budget {
    bytes: u64,
    /// Per task: bytes held while it runs, in program order.
    levels: Vec<u64>,
    /// Per task: bytes of the buffers that it allocates.
    results: Vec<u64>,
    /// Per task: bytes of results that later tasks have allocated ahead of it.
    ahead: Vec<u64>,
    /// Per task: whether it may allocate its results.
    admitted: Vec<bool>,
}

impl Budget {
    /// The budget of a program; without a limit where devices steal work.
    fn new(program: &DeviceProgram, stealing: bool) -> Self {
        let account = program.account();
        let mut results = vec![0; program.tasks.len()];
        for buffer in &account.buffers {
            let made = program.tasks.get(buffer.tasks.start as usize);
            if made.is_some_and(|task| task.writes.contains(&buffer.value)) {
                results[buffer.tasks.start as usize] += buffer.bytes;
            }
        }
        Self {
            bytes: if stealing { u64::MAX } else { account.peak() },
            ahead: vec![0; results.len()],
            admitted: vec![false; results.len()],
            levels: account.levels,
            results,
        }
    }

    fn restart(&mut self) {
        self.ahead.fill(0);
        self.admitted.fill(false);
    }

    /// Whether a task may allocate its results while all tasks before `frontier` are done.
    fn admit(&mut self, task: usize, frontier: usize, workspace: u64) -> bool {
        if self.admitted[task] {
            return true;
        }
        let between = frontier.min(task)..task;
        let more = self.results[task].saturating_add(workspace);
        let fits =
            |at: usize| self.levels[at].saturating_add(self.ahead[at]).saturating_add(more) <= self.bytes;
        if !between.clone().all(fits) {
            return false;
        }
        self.ahead[between].iter_mut().for_each(|ahead| *ahead += self.results[task]);
        self.admitted[task] = true;
        true
    }
}

/// The options of one device's worker.
#[derive(Clone, Copy)]
pub struct WorkerOptions<'a> {
    /// Start of the run.
    pub start: Instant,
    /// Factor by which kernels are slowed down on purpose.
    pub slowness: Option<f64>,
    /// The pool that devices steal tasks from; none without work stealing.
    pub steal_pool: Option<&'a StealPool<'a>>,
}

impl<'a> Worker<'a> {
    /// The worker of a device before its first step; `sources` are its blocks of weights and data, in the program's order.
    pub fn new(
        device: u32,
        program: &'a DeviceProgram,
        fabric: &'a Fabric,
        sources: impl IntoIterator<Item = Arc<Buffer>>,
        worker_options: WorkerOptions<'a>,
    ) -> Self {
        let mut values: Vec<Option<Arc<Buffer>>> = vec![None; program.values.len()];
        let budget = Budget::new(program, worker_options.steal_pool.is_some());
        let mut pool = Pool::within(budget.bytes);
        for (source, buffer) in program.sources.iter().zip(sources) {
            pool.add(buffer.len());
            values[source.value as usize] = Some(buffer);
        }
        let mut owners: Vec<u32> = (0..program.values.len() as u32).collect();
        for task in &program.tasks {
            for (at, &write) in task.writes.iter().enumerate().filter(|_| task.replaces.is_empty()) {
                owners[write as usize] = task.shared(at).map_or(write, |read| owners[read as usize]);
            }
        }
        let users = values.iter().map(|value| u32::from(value.is_some())).collect();
        let mut carried = vec![false; program.values.len()];
        program.carries.iter().for_each(|&(old, new)| carried[new as usize] = old != new);
        Self {
            device,
            program,
            fabric,
            pool,
            budget,
            carried,
            context: Context::default(),
            values,
            owners,
            users,
            unread: vec![0; program.values.len()],
            missing: vec![0; program.tasks.len()],
            done: vec![false; program.tasks.len()],
            progress: program.tasks.iter().map(|_| Progress::default()).collect(),
            ready: BinaryHeap::new(),
            open: Vec::new(),
            frontier: 0,
            times: DeviceTimes::default(),
            events: None,
            start: worker_options.start,
            slowness: worker_options.slowness.unwrap_or(1.0),
            steal_pool: worker_options.steal_pool,
            lent: BTreeMap::new(),
            stolen: 0,
        }
    }

    /// The buffer of a value: of a source, or after a step of a value that outlives it.
    pub fn value(&self, number: u32) -> Option<&Arc<Buffer>> {
        self.values[number as usize].as_ref()
    }

    /// The most bytes that the device has held at once: weights, data, results, idle buffers and workspaces.
    pub fn memory(&self) -> u64 {
        self.pool.peak()
    }

    /// Runs one training step.
    pub fn step(&mut self) -> Result<(), Stop> {
        self.clear();
        if let Some(steal_pool) = self.steal_pool {
            steal_pool.begin_step(self.device, self.context.step);
        }
        self.begin();
        while self.frontier < self.program.tasks.len() {
            if self.fabric.stop.is_raised() {
                return Err(Stop::Signal);
            }
            let seen = self.fabric.notifier(self.device).notifications();
            let progressed = self.exchange();
            if self.collect() | self.run_pushed()? || self.compute_next()? || progressed || self.pull()? {
                continue;
            }
            let before = Instant::now();
            self.fabric.wait(self.device, seen);
            self.times.waiting += before.elapsed();
        }
        self.carry();
        Ok(())
    }

    /// Runs the remaining pushed tasks after the last step, then closes the device's queue.
    pub fn finish_stolen(&mut self) -> Result<(), Stop> {
        let Some(steal_pool) = self.steal_pool else { return Ok(()) };
        while !steal_pool.close(self.device) {
            self.run_pushed()?;
        }
        Ok(())
    }

    /// Runs the first ready task of the device, or pushes one to a thief; returns whether there was one.
    fn compute_next(&mut self) -> Result<bool, Stop> {
        let end = (self.frontier + AHEAD) as u32;
        let own = self.ready.peek().map(|&Reverse(task)| task).filter(|&task| task < end);
        let offered = self.steal_pool.and_then(|steal_pool| steal_pool.first(self.device, end));
        match (own, offered, self.steal_pool) {
            (Some(task), offered, _) if offered.is_none_or(|other| task < other) => {
                if !self.admit(task) {
                    return Ok(false);
                }
                self.ready.pop();
                self.compute(task)?;
            }
            (_, Some(task), Some(steal_pool)) => {
                if !steal_pool.push(self.device, self.fabric) && steal_pool.begin(self.device, task) {
                    self.compute(task)?;
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Whether a ready task may run now: its results fit the memory, and no other task will read the weights that it
    /// replaces.
    fn admit(&mut self, at: u32) -> bool {
        let task = &self.program.tasks[at as usize];
        task.replaces.iter().flatten().all(|&old| self.unread[old as usize] == 1)
            && self.budget.admit(at as usize, self.frontier, task.workspace)
    }

    /// Takes results that thieves computed for this device; returns whether there were any.
    fn collect(&mut self) -> bool {
        let Some(steal_pool) = self.steal_pool else { return false };
        let results = steal_pool.collect(self.device);
        for TaskResult { task, writes, thief } in &results {
            for (&v, buffer) in self.program.tasks[*task as usize].writes.iter().zip(writes) {
                self.put(v, Some(buffer.clone()));
                self.lent.insert(v, *thief);
            }
        }
        let tasks: SmallVec<[u32; 4]> = results.iter().map(|result| result.task).collect();
        drop(results);
        tasks.iter().for_each(|&task| self.finish(task));
        !tasks.is_empty()
    }

    /// Runs a task that another device pushed; returns whether there was one.
    fn run_pushed(&mut self) -> Result<bool, Stop> {
        match self.steal_pool.and_then(|steal_pool| steal_pool.pushed(self.device)) {
            Some(stolen) => self.run_stolen(stolen).map(|()| true),
            None => Ok(false),
        }
    }

    /// Steals a task from a late device and runs it; returns whether there was one.
    fn pull(&mut self) -> Result<bool, Stop> {
        match self.steal_pool.and_then(|steal_pool| steal_pool.pull(self.device)) {
            Some(stolen) => self.run_stolen(stolen).map(|()| true),
            None => Ok(false),
        }
    }

    /// Runs a task of another device and gives it the results.
    fn run_stolen(&mut self, StolenTask { owner, task: at, ready }: StolenTask) -> Result<(), Stop> {
        let Some(steal_pool) = self.steal_pool else { return Ok(()) };
        for buffer in steal_pool.spares(self.device) {
            self.pool.give(buffer);
        }
        let program = &steal_pool.task_graph.devices[owner as usize];
        let task = &program.tasks[at as usize];
        let Job::Compute(op) = &task.job else { return Ok(()) };
        let before = Instant::now();
        let own_step = std::mem::replace(&mut self.context.step, ready.step);
        self.context.micro_batch = u64::from(task.micro_batch);
        let made = run(op, task, program, &ready.reads, &mut self.pool, &mut self.context);
        self.context.scratch.clear();
        self.context.step = own_step;
        let made = made.map_err(|reason| Stop::Failure { device: owner, task: at, reason })?;
        let took = self.record(task, before);
        steal_pool.done(self.device, owner, at, took.as_nanos() as u64);
        self.stolen += 1;
        drop(ready);
        steal_pool.give(owner, TaskResult { task: at, writes: made, thief: self.device }, self.fabric);
        Ok(())
    }

    /// Records a kernel that has run, after waiting as long as a slowed-down device would take. Returns its duration.
    fn record(&mut self, task: &Task, before: Instant) -> Duration {
        if self.slowness > 1.0 {
            let end = before + before.elapsed().mul_f64(self.slowness);
            while Instant::now() < end {
                std::hint::spin_loop();
            }
        }
        let took = before.elapsed();
        self.times.computing += took;
        if let Some(events) = &mut self.events {
            let start = before.duration_since(self.start).as_secs_f64();
            events.push(TraceEvent { instruction: task.instruction, start, seconds: took.as_secs_f64() });
        }
        took
    }

    fn begin(&mut self) {
        self.frontier = 0;
        self.budget.restart();
        self.done.fill(false);
        self.missing.fill(0);
        for (unread, value) in self.unread.iter_mut().zip(&self.program.values) {
            *unread = value.readers.len() as u32;
        }
        for at in 0..self.program.tasks.len() {
            let task = &self.program.tasks[at];
            let missing = task.reads.iter().filter(|&&v| self.values[v as usize].is_none()).count();
            self.missing[at] += missing as u32;
            let missing = self.missing[at];
            if let Some(next) = self.program.followers[at] {
                self.missing[next as usize] += 1;
            }
            if let Job::Exchange(role) = &task.job {
                self.progress[at].restart(role);
            }
            if missing == 0 {
                self.enable(at as u32);
            }
        }
    }

    /// Queues a task whose operands all exist, or begins its exchange.
    fn enable(&mut self, task: u32) {
        let Job::Exchange(role) = &self.program.tasks[task as usize].job else {
            match self.steal_pool {
                Some(steal_pool) if steal_pool.planned(self.device, task).is_some() => {
                    let reads = &self.program.tasks[task as usize].reads;
                    let reads = reads.iter().filter_map(|&v| self.values[v as usize].clone()).collect();
                    steal_pool.offer(self.device, task, ReadyTask { reads, step: self.context.step });
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

    /// Advances open exchanges as far as possible; returns whether one was finished.
    fn exchange(&mut self) -> bool {
        let mut finished: SmallVec<[u32; 8]> = SmallVec::new();
        for &task in &self.open {
            let Job::Exchange(role) = &self.program.tasks[task as usize].job else { continue };
            let own = self.program.tasks[task as usize].reads.first();
            let own = own.and_then(|&v| self.values[v as usize].as_ref());
            let progress = &mut self.progress[task as usize];
            let near = (task as usize) < self.frontier + AHEAD;
            if !near || !self.budget.admit(task as usize, self.frontier, 0) {
                progress.announce(role, self.fabric, own);
                continue;
            }
            let (assembled, before) = (progress.assembled(), Instant::now());
            if progress.advance(role, self.fabric, own, &mut self.pool) {
                finished.push(task);
            }
            if progress.assembled() > assembled {
                let took = before.elapsed();
                self.times.communicating += took;
                if let Some(events) = &mut self.events {
                    let instruction = self.program.tasks[task as usize].instruction;
                    let start = before.duration_since(self.start).as_secs_f64();
                    events.push(TraceEvent { instruction, start, seconds: took.as_secs_f64() });
                }
            }
        }
        self.open.retain(|task| !finished.contains(task));
        for &task in &finished {
            let result = self.progress[task as usize].take_result();
            if let Some(&written) = self.program.tasks[task as usize].writes.first() {
                self.put(written, result);
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
                self.context.micro_batch = u64::from(task.micro_batch);
                let made = match self.update(op, task) {
                    Ok(None) => {
                        let reads = task.reads.iter().filter_map(|&v| self.values[v as usize].clone());
                        run(op, task, program, &reads.collect(), &mut self.pool, &mut self.context)
                    }
                    Ok(Some(updated)) => Ok(updated),
                    Err(reason) => Err(reason),
                };
                self.context.scratch.clear();
                made.map_err(|reason| Stop::Failure { device: self.device, task: at, reason })?
            }
            Job::Regroup => self.regroup(task),
            Job::View | Job::Exchange(_) => {
                task.reads.first().and_then(|&v| self.values[v as usize].clone()).into_iter().collect()
            }
        };
        let took = self.record(task, before);
        if let Some(steal_pool) = self.steal_pool
            && steal_pool.planned(self.device, at).is_some()
        {
            steal_pool.done(self.device, self.device, at, took.as_nanos() as u64);
        }
        for (&v, buffer) in task.writes.iter().zip(made) {
            self.put(v, Some(buffer));
        }
        self.finish(at);
        Ok(())
    }

    /// Runs an update that replaces operands in their own buffers, a chunk of elements at a time. None where the task
    /// replaces nothing, or another task or device still needs one of the buffers.
    fn update(&mut self, op: &Op, task: &Task) -> Result<Option<SmallVec<[Arc<Buffer>; 2]>>, KernelError> {
        let exclusive = |v: Option<u32>| {
            let last = v.filter(|&v| self.unread[v as usize] == 1);
            let buffer = last.and_then(|v| self.values[v as usize].as_mut());
            buffer.is_some_and(|buffer| Arc::get_mut(buffer).is_some())
        };
        if task.replaces.is_empty() || !task.replaces.iter().copied().all(exclusive) {
            return Ok(None);
        }
        self.pool.add_workspace(task.workspace);
        let ty = &self.program.values[task.writes[0] as usize].ty;
        let (elements, size) = (ty.shape.elements(), ty.dtype.bytes() as usize);
        let chunk = elements.min(UPDATE_CHUNK);
        let buffer = |_: &u32| Buffer::zeroed(chunk as usize * size);
        let mut inputs: SmallVec<[Buffer; 4]> = task.reads.iter().map(buffer).collect();
        let mut outputs: SmallVec<[Buffer; 2]> = task.writes.iter().map(buffer).collect();
        for start in (0..elements).step_by(UPDATE_CHUNK as usize) {
            let ty = TensorType::new(ty.dtype, [chunk.min(elements - start)]);
            let bytes = start as usize * size..start as usize * size + ty.bytes() as usize;
            for (&v, input) in task.reads.iter().zip(&mut inputs) {
                let Some(whole) = &self.values[v as usize] else { continue };
                input.bytes_mut()[..bytes.len()].copy_from_slice(&whole.bytes()[bytes.clone()]);
            }
            let views: SmallVec<[View<'_>; 4]> =
                inputs.iter().map(|input| View { shape: &ty.shape, data: input.elements(&ty) }).collect();
            let targets = outputs.iter_mut();
            let mut targets: SmallVec<[ViewMut<'_>; 2]> =
                targets.map(|output| ViewMut { shape: &ty.shape, data: output.elements_mut(&ty) }).collect();
            kernels::run(op, &views, &mut targets, &mut self.context)?;
            drop(targets);
            for (&old, output) in task.replaces.iter().zip(&outputs) {
                let whole = old.and_then(|old| self.values[old as usize].as_mut()).and_then(Arc::get_mut);
                let Some(whole) = whole else { continue };
                whole.bytes_mut()[bytes.clone()].copy_from_slice(&output.bytes()[..bytes.len()]);
            }
        }
        Ok(task.replaces.iter().map(|old| self.take((*old)?)).collect())
    }

    /// Concatenates the bytes of a task's operands and splits them among its results.
    fn regroup(&mut self, task: &Task) -> SmallVec<[Arc<Buffer>; 2]> {
        let program = self.program;
        let bytes = |v: u32| program.values[v as usize].ty.bytes() as usize;
        let sources = task.reads.iter().map(|&v| (self.values[v as usize].as_deref(), bytes(v)));
        let mut sources = sources.flat_map(|(buffer, length)| buffer.map(|b| &b.bytes()[..length]));
        let mut source: &[u8] = &[];
        let mut made = SmallVec::new();
        for &v in &task.writes {
            let mut buffer = self.pool.take(bytes(v));
            // A buffer fresh from the pool has no other holder.
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

    /// Finishes a task: releases operands without further readers and enables tasks that wait for its results.
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
        if let Some(next) = program.followers[at as usize] {
            self.provide(next);
        }
        for &v in &task.writes {
            for &reader in &program.values[v as usize].readers {
                self.provide(reader);
            }
            self.release(v);
        }
    }

    /// Counts one thing that a task was missing: an operand, or the task that it follows.
    fn provide(&mut self, task: u32) {
        self.missing[task as usize] -= 1;
        if self.missing[task as usize] == 0 {
            self.enable(task);
        }
    }

    fn release(&mut self, v: u32) {
        if self.unread[v as usize] == 0 && !self.program.values[v as usize].kept {
            self.discard(v);
        }
    }

    fn put(&mut self, v: u32, buffer: Option<Arc<Buffer>>) {
        self.users[self.owners[v as usize] as usize] += u32::from(buffer.is_some());
        self.values[v as usize] = buffer;
    }

    fn take(&mut self, v: u32) -> Option<Arc<Buffer>> {
        let buffer = self.values[v as usize].take()?;
        self.users[self.owners[v as usize] as usize] -= 1;
        Some(buffer)
    }

    /// Gives a value's buffer back to the pool that it belongs to, unless other values use it.
    fn discard(&mut self, v: u32) {
        let Some(buffer) = self.take(v) else { return };
        let owner = self.owners[v as usize];
        if self.users[owner as usize] > 0 {
            return;
        }
        match (self.lent.remove(&owner), self.steal_pool) {
            (Some(thief), Some(steal_pool)) => steal_pool.give_spare(thief, buffer),
            _ => self.pool.give(buffer),
        }
    }

    /// Replaces old weights and states by the new ones of this step.
    fn carry(&mut self) {
        let program = self.program;
        for &(old, new) in &program.carries {
            if old == new {
                continue;
            }
            // Mostly released already: after its last reader, or replaced in place.
            self.discard(old);
            let buffer = self.values[new as usize].clone();
            self.put(old, buffer);
            if let Some(&thief) = self.lent.get(&self.owners[new as usize]) {
                self.lent.insert(old, thief);
            }
        }
        self.context.step += 1;
    }

    /// Releases the results of the last step.
    fn clear(&mut self) {
        let program = self.program;
        for &v in program.tasks.iter().flat_map(|task| &task.writes) {
            if self.carried[v as usize] {
                // The buffer belongs to the weight that it replaced.
                self.take(v);
                self.lent.remove(&v);
            } else {
                self.discard(v);
            }
        }
    }
}

/// Runs a kernel on a task's operands, into buffers from the pool.
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
    // A buffer fresh from the pool has no other holder.
    let mut outputs: SmallVec<[ViewMut<'_>; 2]> = (made.iter_mut().zip(&task.writes))
        .filter_map(|(buffer, &v)| {
            Some(ViewMut { shape: &ty(v).shape, data: Arc::get_mut(buffer)?.elements_mut(ty(v)) })
        })
        .collect();
    pool.add_workspace(task.workspace);
    let inputs: SmallVec<[View<'_>; 4]> = (task.reads.iter().zip(reads))
        .map(|(&v, buffer)| View { shape: &ty(v).shape, data: buffer.elements(ty(v)) })
        .collect();
    kernels::run(op, &inputs, &mut outputs, context)?;
    debug_assert!(
        context.scratch.bytes() as u64 <= task.workspace.div_ceil(64) * 64,
        "{} needs {} bytes of workspace and declares {}",
        op.kind(),
        context.scratch.bytes(),
        task.workspace
    );
    drop(outputs);
    Ok(made)
}
