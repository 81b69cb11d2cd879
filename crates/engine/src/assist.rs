//! Scheduling assistants: devices of one process steal ready tasks from each other while a step runs.
//!
//! The rule is the simulator's ([`shardwright_assist`]), with measured times. Every device has a [`DeviceQueue`]: its ready
//! tasks, tasks that other devices pushed to it, results that thieves computed for it, and a [`Forecast`] of its lateness.
//! A late device pushes ready tasks to faster devices before it begins a kernel. An idle device pulls tasks from the queues of
//! late ones. In both cases the thief must finish the task earlier and stay less late than its victim. Nothing moves while all
//! devices are about equally fast, or where a [`StealTrial`] has shown that stealing does not pay.
//!
//! Kernels read operands where they lie: within a process a stolen task moves no data. Kernel and operands
//! are the same on every device, and so are the numbers.

use crate::buffer::Buffer;
use crate::fabric::Fabric;
use crate::prepare::{Job, TaskGraph};
use crate::trial::StealTrial;
use shardwright_assist::{Forecast, PlannedTask, WINDOW};
use shardwright_lower::InstructionId;
use smallvec::SmallVec;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Nanoseconds that stealing a task costs: two notifications, and cold caches on the thief.
const STEAL_COST: u64 = 10_000;

/// The planned start and duration of every instruction, per device and instruction, in nanoseconds; none where the device
/// does not take part.
pub struct PlannedSchedule(pub Vec<Vec<Option<PlannedTask>>>);

impl PlannedSchedule {
    fn planned(&self, device: u32, instruction: InstructionId) -> Option<PlannedTask> {
        *self.0.get(device as usize)?.get(instruction.index())?
    }
}

/// A ready task with everything that another device needs to run it.
pub struct ReadyTask {
    /// Its operands.
    pub reads: SmallVec<[Arc<Buffer>; 4]>,
    /// The training step that it belongs to.
    pub step: u64,
}

/// A task that another device runs for its owner.
pub struct StolenTask {
    /// The device whose task it is.
    pub owner: u32,
    /// Its number in the owner's program.
    pub task: u32,
    /// Its operands.
    pub ready: ReadyTask,
}

/// The results of a stolen task.
pub struct TaskResult {
    /// The task's number in its owner's program.
    pub task: u32,
    /// The buffers that it wrote.
    pub writes: SmallVec<[Arc<Buffer>; 2]>,
    /// The device that ran it and whose pool the buffers belong to.
    pub thief: u32,
}

/// The queue of one device, which all devices of the process may look into.
struct DeviceQueue {
    /// The device's ready tasks, by number.
    ready: BTreeMap<u32, ReadyTask>,
    /// Tasks that other devices pushed to it.
    pushed: VecDeque<StolenTask>,
    /// Results of its own tasks that thieves ran.
    results: Vec<TaskResult>,
    /// Buffers of its pool that came back from owners of stolen tasks.
    spare: Vec<Arc<Buffer>>,
    forecast: Forecast,
    /// When the device's step began, in nanoseconds of the pool's clock.
    began: u64,
    /// The predicted end of its current kernel, on the same clock; 0 while it runs none.
    free: u64,
    /// Planned nanoseconds of `ready` and `pushed` together.
    queued: u64,
    /// Whether the device has stopped and takes no more tasks.
    closed: bool,
}

impl DeviceQueue {
    fn new(plan: &DevicePlan) -> Self {
        Self {
            ready: BTreeMap::new(),
            pushed: VecDeque::new(),
            results: Vec::new(),
            spare: Vec::new(),
            forecast: Forecast::new(&plan.tasks),
            began: 0,
            free: 0,
            queued: 0,
            closed: false,
        }
    }

    /// The predicted end of the current kernel, in nanoseconds from the beginning of the device's step.
    fn present(&self, now: u64) -> u64 {
        self.free.max(now).saturating_sub(self.began)
    }
}

/// One device's part of the planned schedule.
struct DevicePlan {
    /// Its compute tasks, in the order of their starts.
    tasks: Vec<PlannedTask>,
    /// Per task of its program: the position in `tasks`; none for tasks that cannot be stolen.
    position: Vec<Option<u32>>,
}

impl DevicePlan {
    fn new(task_graph: &TaskGraph, schedule: &PlannedSchedule, device: u32) -> Self {
        let tasks = &task_graph.devices[device as usize].tasks;
        let mut planned: Vec<(PlannedTask, usize)> = (tasks.iter().enumerate())
            .filter(|(_, task)| matches!(task.job, Job::Compute(_)))
            .filter_map(|(at, task)| Some((schedule.planned(device, task.instruction)?, at)))
            .collect();
        planned.sort_by_key(|(task, at)| (task.start, *at));
        let mut position = vec![None; tasks.len()];
        planned.iter().enumerate().for_each(|(nth, (_, at))| position[*at] = Some(nth as u32));
        Self { tasks: planned.into_iter().map(|(task, _)| task).collect(), position }
    }
}

/// The queues of all devices of a process.
pub struct StealPool<'a> {
    /// The programs of all devices.
    pub task_graph: &'a TaskGraph,
    devices: Range<u32>,
    plans: Vec<DevicePlan>,
    queues: Vec<Mutex<DeviceQueue>>,
    clock: Instant,
    /// Whether tasks may be stolen in this step, as `trial` decided.
    open: AtomicBool,
    trial: Mutex<StealTrial>,
}

impl<'a> StealPool<'a> {
    /// The pool of these devices, which share a process.
    pub fn new(task_graph: &'a TaskGraph, schedule: &PlannedSchedule, devices: Range<u32>) -> Self {
        let plans: Vec<DevicePlan> =
            devices.clone().map(|device| DevicePlan::new(task_graph, schedule, device)).collect();
        Self {
            task_graph,
            devices,
            queues: plans.iter().map(|plan| Mutex::new(DeviceQueue::new(plan))).collect(),
            plans,
            clock: Instant::now(),
            open: AtomicBool::new(false),
            trial: Mutex::default(),
        }
    }

    fn now(&self) -> u64 {
        self.clock.elapsed().as_nanos() as u64
    }

    fn plan(&self, device: u32) -> &DevicePlan {
        &self.plans[(device - self.devices.start) as usize]
    }

    fn queue(&self, device: u32) -> MutexGuard<'_, DeviceQueue> {
        let queue = &self.queues[(device - self.devices.start) as usize];
        queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Planned nanoseconds of a task; none if it cannot be stolen.
    pub fn planned(&self, device: u32, task: u32) -> Option<u64> {
        let plan = self.plan(device);
        plan.position[task as usize].map(|position| plan.tasks[position as usize].duration)
    }

    /// Planned nanoseconds of a task in a queue. The caller has queued only tasks that can be stolen.
    fn planned_time(&self, owner: u32, task: u32) -> u64 {
        let planned = self.planned(owner, task);
        debug_assert!(planned.is_some(), "task {task} of device {owner} is queued without a planned time");
        // Without a planned time a task would count as free, which only makes predictions worse.
        planned.unwrap_or(0)
    }

    /// Begins a device's step.
    pub fn begin_step(&self, device: u32, step: u64) {
        let tasks = &self.plan(device).tasks;
        let mut queue = self.queue(device);
        // The first step allocates memory: its times say little about the device.
        if step <= 1 {
            queue.forecast = Forecast::new(tasks);
        } else {
            queue.forecast.restart(tasks);
        }
        // Tasks that were pushed before the step began are still ahead.
        let pushed: u64 =
            queue.pushed.iter().map(|stolen| self.planned_time(stolen.owner, stolen.task)).sum();
        queue.forecast.promise(pushed);
        queue.queued = pushed;
        let now = self.now();
        if device == self.devices.start {
            let mut trial = self.trial.lock().unwrap_or_else(PoisonError::into_inner);
            self.open.store(trial.step(step, now - queue.began), Ordering::Relaxed);
        }
        (queue.began, queue.free) = (now, 0);
    }

    /// Queues a ready task of a device. It must have a planned time ([`Self::planned`]).
    pub fn offer(&self, device: u32, task: u32, ready: ReadyTask) {
        let planned = self.planned_time(device, task);
        let mut queue = self.queue(device);
        queue.queued += planned;
        queue.ready.insert(task, ready);
    }

    /// The first ready task of a device with a number below `end`.
    pub fn first(&self, device: u32, end: u32) -> Option<u32> {
        self.queue(device).ready.keys().next().copied().filter(|&task| task < end)
    }

    /// Begins one of a device's own tasks on the device itself; false where a thief has taken it.
    pub fn begin(&self, device: u32, task: u32) -> bool {
        let now = self.now();
        let mut queue = self.queue(device);
        if queue.ready.remove(&task).is_none() {
            return false;
        }
        self.record_begin(&mut queue, device, task);
        queue.free = now + queue.forecast.scaled(self.planned_time(device, task));
        true
    }

    fn record_begin(&self, queue: &mut DeviceQueue, device: u32, task: u32) {
        let plan = self.plan(device);
        if let Some(position) = plan.position[task as usize] {
            let planned = plan.tasks[position as usize].duration;
            queue.forecast.begin(position as usize, planned);
            queue.queued = queue.queued.saturating_sub(planned);
        }
    }

    /// Records that a device has run a task of `owner` in `measured` nanoseconds.
    pub fn done(&self, device: u32, owner: u32, task: u32, measured: u64) {
        let planned = self.planned_time(owner, task);
        let mut queue = self.queue(device);
        queue.forecast.done(planned, measured);
        queue.free = 0;
    }

    /// The tasks of a queue that may be stolen: number, predicted end on the owner, planned time.
    fn candidates(&self, queue: &DeviceQueue, owner: u32, now: u64) -> SmallVec<[(u32, u64, u64); WINDOW]> {
        let mut end = queue.began + queue.present(now);
        let tasks = queue.ready.keys().take(WINDOW);
        let ends = tasks.filter_map(|&task| {
            let planned = self.planned(owner, task)?;
            end += queue.forecast.scaled(planned);
            Some((task, end, planned))
        });
        ends.collect()
    }

    /// The steal with the largest gain among these victims and thieves: victim, task, thief.
    fn best(&self, victims: Range<u32>, thieves: Range<u32>) -> Option<(u32, u32, u32)> {
        if !self.open.load(Ordering::Relaxed) {
            return None;
        }
        let now = self.now();
        let mut best: Option<(u64, (u32, u32, u32))> = None;
        for victim in victims {
            let (late, candidates) = {
                let queue = self.queue(victim);
                (queue.forecast.status(queue.present(now)), self.candidates(&queue, victim, now))
            };
            if late.lateness <= 0 || candidates.is_empty() {
                continue;
            }
            for thief in thieves.clone().filter(|&thief| thief != victim) {
                let queue = self.queue(thief);
                let present = queue.present(now);
                let status = queue.forecast.status(present);
                let available = queue.began + present + queue.forecast.scaled(queue.queued);
                for &(task, end, planned) in candidates.iter().filter(|_| !queue.closed) {
                    let duration = queue.forecast.scaled(planned);
                    let gain = end.saturating_sub(available + duration + STEAL_COST);
                    if gain > best.map_or(0, |(gain, _)| gain) && status.should_steal_from(&late, duration) {
                        best = Some((gain, (victim, task, thief)));
                    }
                }
            }
        }
        best.map(|(_, steal)| steal)
    }

    /// Pushes a ready task of a late device to a thief; returns whether there was one to push.
    pub fn push(&self, owner: u32, fabric: &Fabric) -> bool {
        let Some((_, task, thief)) = self.best(owner..owner + 1, self.devices.clone()) else { return false };
        let Some(stolen) = self.take(owner, task) else { return true };
        let mut queue = self.queue(thief);
        if queue.closed {
            drop(queue);
            self.put_back(stolen);
            return false;
        }
        let planned = self.planned_time(owner, task);
        queue.forecast.promise(planned);
        queue.queued += planned;
        queue.pushed.push_back(stolen);
        drop(queue);
        fabric.notifier(thief).notify();
        true
    }

    /// Takes a task out of its owner's queue; none where it is gone.
    fn take(&self, owner: u32, task: u32) -> Option<StolenTask> {
        let mut queue = self.queue(owner);
        let ready = queue.ready.remove(&task)?;
        self.record_begin(&mut queue, owner, task);
        Some(StolenTask { owner, task, ready })
    }

    fn put_back(&self, StolenTask { owner, task, ready }: StolenTask) {
        let planned = self.planned_time(owner, task);
        let mut queue = self.queue(owner);
        // The forecast counts it as begun. A promise of the same time puts it back among the work ahead.
        queue.forecast.promise(planned);
        queue.queued += planned;
        queue.ready.insert(task, ready);
    }

    /// Steals a task for an idle device from the queue of a late one.
    pub fn pull(&self, thief: u32) -> Option<StolenTask> {
        let (owner, task, _) = self.best(self.devices.clone(), thief..thief + 1)?;
        let stolen = self.take(owner, task)?;
        let mut queue = self.queue(thief);
        queue.free = self.now() + queue.forecast.scaled(self.planned_time(owner, task));
        Some(stolen)
    }

    /// The first task that others pushed to a device.
    pub fn pushed(&self, thief: u32) -> Option<StolenTask> {
        let now = self.now();
        let mut queue = self.queue(thief);
        let stolen = queue.pushed.pop_front()?;
        let planned = self.planned_time(stolen.owner, stolen.task);
        queue.forecast.redeem(planned);
        queue.queued = queue.queued.saturating_sub(planned);
        queue.free = now + queue.forecast.scaled(planned);
        Some(stolen)
    }

    /// Gives the result of a stolen task to its owner.
    pub fn give(&self, owner: u32, result: TaskResult, fabric: &Fabric) {
        self.queue(owner).results.push(result);
        fabric.notifier(owner).notify();
    }

    /// The results that thieves have computed for a device since its last call.
    pub fn collect(&self, device: u32) -> Vec<TaskResult> {
        std::mem::take(&mut self.queue(device).results)
    }

    /// Gives a buffer back to the thief whose pool it belongs to.
    pub fn give_spare(&self, thief: u32, buffer: Arc<Buffer>) {
        self.queue(thief).spare.push(buffer);
    }

    /// The buffers that have come back to a device since its last call.
    pub fn spares(&self, device: u32) -> Vec<Arc<Buffer>> {
        std::mem::take(&mut self.queue(device).spare)
    }

    /// Closes a device's queue unless tasks are still pushed to it; returns whether it is closed.
    pub fn close(&self, device: u32) -> bool {
        let mut queue = self.queue(device);
        queue.closed = queue.pushed.is_empty();
        queue.closed
    }
}
