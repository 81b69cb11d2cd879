//! A run: one thread per device, some training steps, and the devices' outcomes.

use crate::assist::{PlannedSchedule, StealPool};
use crate::buffer::Buffer;
use crate::fabric::Fabric;
use crate::outcome::Outcome;
use crate::prepare::{InitialBlock, PrepareError, TaskGraph};
use crate::worker::{DeviceTimes, Stop, TraceEvent, Worker, WorkerOptions};
use shardwright_graph::{Block, Graph, TensorId};
use shardwright_lower::{ParallelGraph, Work};
use shardwright_runtime::{HostTensor, cores::pin, initial_block};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;
use std::time::Instant;

/// How to run a program.
#[derive(Clone, Copy)]
pub struct Options<'a> {
    /// Known initial values of tensors that no op produces, in the order of the tensors.
    pub given: &'a [(TensorId, HostTensor)],
    /// Seed of all other weights and data.
    pub seed: u64,
    /// Number of training steps.
    pub steps: usize,
    /// Whether to record trace events.
    pub trace: bool,
    /// Whether to return the final weights.
    pub finals: bool,
    /// Devices that are slowed down on purpose, each with its factor.
    pub slow: &'a [(u32, f64)],
    /// Turns on work stealing among devices of a process. The planned times tell which devices are late.
    pub assist: Option<&'a PlannedSchedule>,
}

impl Options<'_> {
    fn given(&self, tensor: TensorId) -> Option<&HostTensor> {
        let at = self.given.binary_search_by_key(&tensor, |(tensor, _)| *tensor).ok()?;
        Some(&self.given[at].1)
    }
}

/// Why a run ended early.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// The program cannot be run.
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// A device failed.
    #[error("{0}")]
    Device(String),
}

/// The outcome of one device.
#[derive(Clone, Debug)]
pub struct DeviceOutcome {
    /// The device.
    pub device: u32,
    /// Its block of the loss in each step; empty where it holds none.
    pub losses: Vec<HostTensor>,
    /// Its final blocks of the carried tensors, in the order of the program's carries.
    pub finals: Vec<Option<HostTensor>>,
    /// The end of each step, in seconds from the start of the run.
    pub step_ends: Vec<f64>,
    /// How its time was spent.
    pub times: DeviceTimes,
    /// The most bytes that it held at once, weights and data included. Blocks of data that several devices share count
    /// on each of them.
    pub memory: u64,
    /// Number of other devices' tasks that it ran, in all steps but the first.
    pub stolen: u64,
    /// Its trace events, if requested.
    pub events: Vec<TraceEvent>,
}

/// Runs all devices of a program on threads of this process.
pub fn run(graph: &Graph, program: &ParallelGraph, options: Options<'_>) -> Result<Outcome, EngineError> {
    let task_graph = TaskGraph::new(program, 1)?;
    let fabric = Fabric::new(task_graph.devices.len(), task_graph.edges.clone());
    let devices = 0..task_graph.devices.len() as u32;
    let outcomes = run_devices(graph, program, &task_graph, &fabric, devices, options)?;
    Ok(Outcome::of(program, outcomes))
}

/// Runs these devices of a program on threads of this process. `fabric` connects them with each other and with other processes.
pub fn run_devices(
    graph: &Graph,
    program: &ParallelGraph,
    task_graph: &TaskGraph,
    fabric: &Fabric,
    devices: Range<u32>,
    options: Options<'_>,
) -> Result<Vec<DeviceOutcome>, EngineError> {
    let sources = InitialBlocks::compute(graph, task_graph, devices.clone(), options);
    let steal_pool = options.assist.map(|schedule| StealPool::new(task_graph, schedule, devices.clone()));
    let start = Instant::now();
    let work = |device: u32| {
        // Numbered over all devices, so that several processes do not share cores.
        pin(device as usize, task_graph.devices.len());
        let work = AssertUnwindSafe(|| {
            let slow = options.slow.iter().find(|(slow, _)| *slow == device);
            let worker_options = WorkerOptions {
                start,
                slowness: slow.map(|(_, factor)| *factor),
                steal_pool: steal_pool.as_ref(),
            };
            let worked = work(device, program, task_graph, fabric, &sources, options, worker_options);
            worked.map_err(|stop| match stop {
                Stop::Failure { device: whose, task, reason } => {
                    let instruction = task_graph.devices[whose as usize].tasks[task as usize].instruction;
                    let op = match program.instruction(instruction).work {
                        Work::Compute { op, .. } => graph.node(op).name.as_str(),
                        _ => "communication",
                    };
                    fabric.fail(format!("device {device} failed at `{op}`: {reason}"));
                }
                Stop::Signal => {}
            })
        });
        let result = catch_unwind(work).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<&str>().map(ToString::to_string);
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
            let text = text.unwrap_or_else(|| "a panic without a message".into());
            fabric.fail(format!("device {device} failed, which is a bug: {text}"));
            Err(())
        });
        result.ok()
    };
    let work = &work;
    let outcomes: Vec<Option<DeviceOutcome>> = std::thread::scope(|scope| {
        let start = |device: u32| {
            let thread =
                Builder::new().name(format!("device {device}")).spawn_scoped(scope, move || work(device));
            // The devices that run already wait for this one until they are told to stop.
            let failed = |error| fabric.fail(format!("cannot start a thread for device {device}: {error}"));
            thread.map_err(failed).ok()
        };
        let mut threads = Vec::with_capacity(devices.len());
        for device in devices.clone() {
            let Some(thread) = start(device) else { break };
            threads.push(thread);
        }
        let mut outcomes: Vec<_> = threads.into_iter().map(|thread| thread.join().ok().flatten()).collect();
        outcomes.resize_with(devices.len(), || None);
        outcomes
    });
    match (outcomes.into_iter().collect(), fabric.stop.reason()) {
        (Some(outcomes), None) => Ok(outcomes),
        (_, reason) => Err(EngineError::Device(reason.unwrap_or_else(|| "a device stopped".into()))),
    }
}

fn work(
    device: u32,
    program: &ParallelGraph,
    task_graph: &TaskGraph,
    fabric: &Fabric,
    sources: &InitialBlocks,
    options: Options<'_>,
    worker_options: WorkerOptions<'_>,
) -> Result<DeviceOutcome, Stop> {
    let local = &task_graph.devices[device as usize];
    fabric.notifier(device).claim();
    let carried: BTreeSet<u32> = local.carries.iter().map(|&(old, _)| old).collect();
    let blocks = local
        .sources
        .iter()
        .filter_map(|source| sources.get(source.tensor, &source.block, carried.contains(&source.value)));
    let mut worker = Worker::new(device, local, fabric, blocks, worker_options);
    worker.events = options.trace.then(Vec::new);
    let loss = program.outputs.first().and_then(|output| local.number(output.value));
    let read = |worker: &Worker<'_>, number: u32| {
        Some(worker.value(number)?.to_tensor(&local.values[number as usize].ty))
    };
    let mut outcome = DeviceOutcome {
        device,
        losses: Vec::new(),
        finals: Vec::new(),
        step_ends: Vec::with_capacity(options.steps),
        times: DeviceTimes::default(),
        memory: 0,
        stolen: 0,
        events: Vec::new(),
    };
    for step in 0..options.steps {
        // The first step allocates memory and warms caches: its times say little.
        if step == 1 {
            worker.times = DeviceTimes::default();
            worker.events.iter_mut().for_each(Vec::clear);
            worker.stolen = 0;
        }
        worker.step()?;
        outcome.step_ends.push(worker_options.start.elapsed().as_secs_f64());
        outcome.losses.extend(loss.and_then(|number| read(&worker, number)));
    }
    worker.finish_stolen()?;
    if options.finals {
        let carried = program.carries.iter().map(|carry| local.number(carry.old));
        outcome.finals = carried.map(|number| read(&worker, number?)).collect();
    }
    outcome.times = worker.times;
    outcome.memory = worker.memory();
    outcome.stolen = worker.stolen;
    outcome.events = worker.events.take().unwrap_or_default();
    Ok(outcome)
}

/// Initial values of tensors, each block computed once for all devices that hold it.
struct InitialBlocks(BTreeMap<Key, Mutex<InitialBlockUse>>);

/// A block, until its last device has taken it.
#[derive(Default)]
struct InitialBlockUse {
    buffer: Option<Arc<Buffer>>,
    /// Number of sources that have yet to take it.
    uses: usize,
}

/// A tensor, and the start and end of a block in each dimension.
type Key = (TensorId, Vec<(u64, u64)>);

fn key(tensor: TensorId, block: &Block) -> Key {
    (tensor, block.iter().map(|r| (r.start, r.end)).collect())
}

impl InitialBlocks {
    fn compute(graph: &Graph, task_graph: &TaskGraph, devices: Range<u32>, options: Options<'_>) -> Self {
        let wanted = devices.flat_map(|d| &task_graph.devices[d as usize].sources);
        let mut blocks: BTreeMap<Key, (&InitialBlock, usize)> = BTreeMap::new();
        for source in wanted {
            blocks.entry(key(source.tensor, &source.block)).or_insert((source, 0)).1 += 1;
        }
        let unused = |uses: usize| Mutex::new(InitialBlockUse { buffer: None, uses });
        let cells = Self(blocks.iter().map(|(key, &(_, uses))| (key.clone(), unused(uses))).collect());
        let jobs: Vec<_> = blocks.values().zip(cells.0.values()).collect();
        let next = AtomicUsize::new(0);
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(jobs.len());
        let draw = || {
            while let Some(((source, _), cell)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                let value = match options.given(source.tensor) {
                    Some(whole) => whole.block(&source.block),
                    None => initial_block(options.seed, &graph.whole_tensor(source.tensor), &source.block),
                };
                let mut buffer = Buffer::zeroed(value.ty().bytes() as usize);
                buffer.write(&value);
                cell.lock().unwrap_or_else(PoisonError::into_inner).buffer = Some(Arc::new(buffer));
            }
        };
        std::thread::scope(|scope| {
            // Threads that cannot start leave their share to the others.
            for _ in 1..threads {
                let _ = Builder::new().spawn_scoped(scope, draw);
            }
            draw();
        });
        drop(jobs);
        cells
    }

    /// A block of a tensor. An `exclusive` one has no other holder: it will be replaced in place.
    fn get(&self, tensor: TensorId, block: &Block, exclusive: bool) -> Option<Arc<Buffer>> {
        let mut cell = self.0.get(&key(tensor, block))?.lock().unwrap_or_else(PoisonError::into_inner);
        cell.uses = cell.uses.saturating_sub(1);
        let mut buffer = if cell.uses == 0 { cell.buffer.take()? } else { cell.buffer.clone()? };
        if exclusive && Arc::get_mut(&mut buffer).is_none() {
            buffer = Arc::new(Buffer::copy_of(&buffer));
        }
        Some(buffer)
    }
}
