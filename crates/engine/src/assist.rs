//! Scheduling assistants: devices of one process hand over work that is ready to each other while a step runs.
//!
//! The rule is the simulator's, with measured times. Every device has a desk: work that is ready, work that others have asked
//! it to do, results that others have made for it, and a [`Forecast`] of when it will be through, given how long its kernels
//! have taken compared with the plan. A device that will be later than planned, before it begins a kernel, asks others that have been
//! faster to run those that they would be done with earlier, as long as they would still be less late; and one that has
//! nothing to do looks at the desks of the others for such work. As long as all are about equally fast, nothing moves, nor where a
//! [`Trial`] has shown that it does not pay. Kernels read
//! operands where they lie: within a process, moving work moves no data. The kernels and what they read are the
//! same wherever they run, and so are the numbers.

use crate::buffer::Buffer;
use crate::fabric::Fabric;
use crate::prepare::{Job, Prepared};
use crate::trial::Trial;
use shardwright_lower::InstructionId;
use shardwright_place::{Forecast, Planned};
use smallvec::SmallVec;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// How many of the tasks that wait at a desk are looked at.
const WINDOW: usize = 8;

/// Nanoseconds that it takes to hand over a task and its results: two bells, and caches that are cold.
const HANDING_OVER: u64 = 10_000;

/// When the plan has devices do what: per device and instruction, in nanoseconds.
pub struct Guide(pub Vec<Vec<Option<Planned>>>);

impl Guide {
    fn planned(&self, device: u32, instruction: InstructionId) -> Option<Planned> {
        *self.0.get(device as usize)?.get(instruction.index())?
    }
}

/// A task that is ready, with all that is needed to run it elsewhere.
pub struct Offer {
    /// What it reads.
    pub reads: SmallVec<[Arc<Buffer>; 4]>,
    /// The training step that it belongs to.
    pub step: u64,
}

/// A task of another device.
pub struct Taken {
    /// Whose it is.
    pub owner: u32,
    /// Which of its tasks.
    pub task: u32,
    /// What it needs.
    pub offer: Offer,
}

/// What another device made.
pub struct Returned {
    /// The task.
    pub task: u32,
    /// What it wrote.
    pub made: SmallVec<[Arc<Buffer>; 2]>,
    /// Whose memory that is.
    pub helper: u32,
}

struct Desk {
    ready: BTreeMap<u32, Offer>,
    asked: VecDeque<Taken>,
    returned: Vec<Returned>,
    spare: Vec<Arc<Buffer>>,
    forecast: Forecast,
    /// When the step began, and when the present kernel is predicted to be over, on the clock of all.
    began: u64,
    free: u64,
    /// Nanoseconds that what is ready, and what others have asked for, was planned to take.
    queued: u64,
    /// Whether the device has stopped.
    closed: bool,
}

impl Desk {
    /// When the device is predicted to be done with its present kernel, from the beginning of its step.
    fn present(&self, now: u64) -> u64 {
        self.free.max(now).saturating_sub(self.began)
    }
}

/// One device's part of the plan.
struct Part {
    pieces: Vec<Planned>,
    /// Per task: its place among the pieces; none where it always stays.
    place: Vec<Option<u32>>,
}

/// All desks of a process.
pub struct Floor<'a> {
    /// What devices do.
    pub prepared: &'a Prepared,
    devices: Range<u32>,
    parts: Vec<Part>,
    desks: Vec<Mutex<Desk>>,
    clock: Instant,
    /// Whether work may move, and what decides that.
    open: AtomicBool,
    trial: Mutex<Trial>,
}

impl<'a> Floor<'a> {
    /// For these devices, which share a process.
    pub fn new(prepared: &'a Prepared, guide: &Guide, devices: Range<u32>) -> Self {
        let part = |device: u32| {
            let tasks = &prepared.devices[device as usize].tasks;
            let mut planned: Vec<(Planned, usize)> = (tasks.iter().enumerate())
                .filter(|(_, task)| matches!(task.job, Job::Compute(_)))
                .filter_map(|(at, task)| Some((guide.planned(device, task.instruction)?, at)))
                .collect();
            planned.sort_by_key(|(piece, at)| (piece.start, *at));
            let mut place = vec![None; tasks.len()];
            planned.iter().enumerate().for_each(|(nth, (_, at))| place[*at] = Some(nth as u32));
            Part { pieces: planned.into_iter().map(|(piece, _)| piece).collect(), place }
        };
        let parts: Vec<Part> = devices.clone().map(part).collect();
        let desk = |part: &Part| {
            Mutex::new(Desk {
                ready: BTreeMap::new(),
                asked: VecDeque::new(),
                returned: Vec::new(),
                spare: Vec::new(),
                forecast: Forecast::new(&part.pieces),
                began: 0,
                free: 0,
                queued: 0,
                closed: false,
            })
        };
        Self {
            prepared,
            devices,
            desks: parts.iter().map(desk).collect(),
            parts,
            clock: Instant::now(),
            open: AtomicBool::new(false),
            trial: Mutex::default(),
        }
    }

    fn now(&self) -> u64 {
        self.clock.elapsed().as_nanos() as u64
    }

    fn part(&self, device: u32) -> &Part {
        &self.parts[(device - self.devices.start) as usize]
    }

    fn desk(&self, device: u32) -> MutexGuard<'_, Desk> {
        let desk = &self.desks[(device - self.devices.start) as usize];
        desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nanoseconds that a task was planned to take; none if it always stays where it is.
    pub fn planned(&self, device: u32, task: u32) -> Option<u64> {
        let part = self.part(device);
        part.place[task as usize].map(|place| part.pieces[place as usize].duration)
    }

    /// A device begins a step.
    pub fn begin_step(&self, device: u32, step: u64) {
        let pieces = &self.part(device).pieces;
        let mut desk = self.desk(device);
        // The first step asks for memory: its times say little.
        if step <= 1 {
            desk.forecast = Forecast::new(pieces);
        } else {
            desk.forecast.restart(pieces);
        }
        // Work that others asked for before the step began is still to be done.
        let asked: u64 = desk.asked.iter().filter_map(|taken| self.planned(taken.owner, taken.task)).sum();
        desk.forecast.promise(asked);
        desk.queued = asked;
        let now = self.now();
        if device == self.devices.start {
            let mut trial = self.trial.lock().unwrap_or_else(PoisonError::into_inner);
            self.open.store(trial.step(step, now - desk.began), Ordering::Relaxed);
        }
        (desk.began, desk.free) = (now, 0);
    }

    /// A task of a device is ready.
    pub fn offer(&self, device: u32, task: u32, offer: Offer) {
        let mut desk = self.desk(device);
        desk.queued += self.planned(device, task).unwrap_or(0);
        desk.ready.insert(task, offer);
    }

    /// The first task that is ready at a device and before `end`.
    pub fn first(&self, device: u32, end: u32) -> Option<u32> {
        self.desk(device).ready.keys().next().copied().filter(|&task| task < end)
    }

    /// A device is about to run a task of its own; false where somebody else has taken it.
    pub fn begin(&self, device: u32, task: u32) -> bool {
        let (now, planned) = (self.now(), self.planned(device, task).unwrap_or(0));
        let mut desk = self.desk(device);
        if desk.ready.remove(&task).is_none() {
            return false;
        }
        self.begun(&mut desk, device, task);
        desk.free = now + desk.forecast.scaled(planned);
        true
    }

    fn begun(&self, desk: &mut Desk, device: u32, task: u32) {
        let part = self.part(device);
        if let Some(place) = part.place[task as usize] {
            let planned = part.pieces[place as usize].duration;
            desk.forecast.begin(place as usize, planned);
            desk.queued = desk.queued.saturating_sub(planned);
        }
    }

    /// A device has run a task.
    pub fn done(&self, device: u32, owner: u32, task: u32, took: u64) {
        let planned = self.planned(owner, task).unwrap_or(0);
        let mut desk = self.desk(device);
        desk.forecast.done(planned, took);
        desk.free = 0;
    }

    /// What of a device's desk others might do: tasks, when they would be over, and how long they were planned to take.
    fn candidates(&self, desk: &Desk, owner: u32, now: u64) -> SmallVec<[(u32, u64, u64); WINDOW]> {
        let mut end = desk.began + desk.present(now);
        let tasks = desk.ready.keys().take(WINDOW);
        let ends = tasks.filter_map(|&task| {
            let planned = self.planned(owner, task)?;
            end += desk.forecast.scaled(planned);
            Some((task, end, planned))
        });
        ends.collect()
    }

    /// Of the tasks that wait at the desks of owners that are late, the one that a helper gains most with: whose, which, and who.
    fn best(&self, owners: Range<u32>, helpers: Range<u32>) -> Option<(u32, u32, u32)> {
        if !self.open.load(Ordering::Relaxed) {
            return None;
        }
        let now = self.now();
        let mut best: Option<(u64, (u32, u32, u32))> = None;
        for owner in owners {
            let (late, candidates) = {
                let desk = self.desk(owner);
                (desk.forecast.standing(desk.present(now)), self.candidates(&desk, owner, now))
            };
            if late.lateness <= 0 || candidates.is_empty() {
                continue;
            }
            for helper in helpers.clone().filter(|&helper| helper != owner) {
                let desk = self.desk(helper);
                let present = desk.present(now);
                let standing = desk.forecast.standing(present);
                let available = desk.began + present + desk.forecast.scaled(desk.queued);
                for &(task, end, planned) in candidates.iter().filter(|_| !desk.closed) {
                    let takes = desk.forecast.scaled(planned);
                    let gain = end.saturating_sub(available + takes + HANDING_OVER);
                    if gain > best.map_or(0, |(known, _)| known) && standing.should_help(&late, takes) {
                        best = Some((gain, (owner, task, helper)));
                    }
                }
            }
        }
        best.map(|(_, found)| found)
    }

    /// A device that is late asks another to run one of the tasks that are ready at its desk; whether there was one.
    pub fn hand_over(&self, owner: u32, fabric: &Fabric) -> bool {
        let Some((_, task, helper)) = self.best(owner..owner + 1, self.devices.clone()) else { return false };
        let Some(taken) = self.take(owner, task) else { return true };
        let mut desk = self.desk(helper);
        if desk.closed {
            drop(desk);
            self.put_back(taken);
            return false;
        }
        let planned = self.planned(owner, task).unwrap_or(0);
        desk.forecast.promise(planned);
        desk.queued += planned;
        desk.asked.push_back(taken);
        drop(desk);
        fabric.bell(helper).ring();
        true
    }

    /// Takes a task from a desk, if it is still there.
    fn take(&self, owner: u32, task: u32) -> Option<Taken> {
        let mut desk = self.desk(owner);
        let offer = desk.ready.remove(&task)?;
        self.begun(&mut desk, owner, task);
        Some(Taken { owner, task, offer })
    }

    fn put_back(&self, Taken { owner, task, offer }: Taken) {
        let planned = self.planned(owner, task).unwrap_or(0);
        let mut desk = self.desk(owner);
        // It counts as begun already: what is still ahead is counted as if promised.
        desk.forecast.promise(planned);
        desk.queued += planned;
        desk.ready.insert(task, offer);
    }

    /// Work for a device that has nothing to do at the moment: what waits at the desk of one that is late.
    pub fn work_for(&self, helper: u32) -> Option<Taken> {
        let (owner, task, _) = self.best(self.devices.clone(), helper..helper + 1)?;
        let taken = self.take(owner, task)?;
        let mut desk = self.desk(helper);
        desk.free = self.now() + desk.forecast.scaled(self.planned(owner, task).unwrap_or(0));
        Some(taken)
    }

    /// What others have asked a device to do.
    pub fn asked(&self, helper: u32) -> Option<Taken> {
        let now = self.now();
        let mut desk = self.desk(helper);
        let taken = desk.asked.pop_front()?;
        let planned = self.planned(taken.owner, taken.task).unwrap_or(0);
        desk.forecast.redeem(planned);
        desk.queued = desk.queued.saturating_sub(planned);
        desk.free = now + desk.forecast.scaled(planned);
        Some(taken)
    }

    /// Gives a result to the one whose task it was.
    pub fn give(&self, owner: u32, returned: Returned, fabric: &Fabric) {
        self.desk(owner).returned.push(returned);
        fabric.bell(owner).ring();
    }

    /// What others have made for a device since it last looked.
    pub fn collect(&self, device: u32) -> Vec<Returned> {
        std::mem::take(&mut self.desk(device).returned)
    }

    /// A buffer that a helper lent is no longer needed.
    pub fn give_spare(&self, helper: u32, buffer: Arc<Buffer>) {
        self.desk(helper).spare.push(buffer);
    }

    /// Buffers that have come back to a device.
    pub fn spares(&self, device: u32) -> Vec<Arc<Buffer>> {
        std::mem::take(&mut self.desk(device).spare)
    }

    /// A device stops, unless it is still asked for something; whether it does.
    pub fn close(&self, device: u32) -> bool {
        let mut desk = self.desk(device);
        desk.closed = desk.asked.is_empty();
        desk.closed
    }
}
