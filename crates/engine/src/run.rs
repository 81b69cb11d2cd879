//! A run: one thread per device, some steps, and what came of it.

use crate::assist::{Floor, Guide};
use crate::buffer::Buffer;
use crate::fabric::Fabric;
use crate::outcome::Outcome;
use crate::prepare::{PrepareError, Prepared};
use crate::worker::{Circumstances, Event, Spent, Stop, Worker};
use shardwright_graph::{Block, Graph, TensorId};
use shardwright_lower::{ParallelGraph, Work};
use shardwright_runtime::{Value, cores::pin, initial_block};
use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// What to run.
#[derive(Clone, Copy)]
pub struct Options<'a> {
    /// First values of tensors that no op makes, as far as they are known, in the order of the tensors.
    pub given: &'a [(TensorId, Value)],
    /// Decides all other weights and data.
    pub seed: u64,
    /// How many training steps.
    pub steps: usize,
    /// Whether to write down when every device did what.
    pub trace: bool,
    /// Whether the weights at the end are wanted.
    pub finals: bool,
    /// Devices that take so many times as long as they could to compute, to see what becomes of a run.
    pub slow: &'a [(u32, f64)],
    /// Lets devices that are late hand over work to others of their process; the plan tells who is late.
    pub assist: Option<&'a Guide>,
}

impl Options<'_> {
    fn given(&self, tensor: TensorId) -> Option<&Value> {
        let place = self.given.binary_search_by_key(&tensor, |(tensor, _)| *tensor).ok()?;
        Some(&self.given[place].1)
    }
}

/// Why a run ended early.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// The program cannot be carried out.
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// A device failed.
    #[error("{0}")]
    Device(String),
}

/// What one device has to tell.
#[derive(Clone, Debug)]
pub struct DeviceOutcome {
    /// Which one.
    pub device: u32,
    /// Its block of the loss, step by step; empty where it has none.
    pub losses: Vec<Value>,
    /// Its blocks of what is carried over, at the end, in the order of the program's carries.
    pub finals: Vec<Option<Value>>,
    /// When each step ended, in seconds from the start of the run.
    pub step_ends: Vec<f64>,
    /// Where the time went.
    pub spent: Spent,
    /// Bytes that it asked for, weights and data aside.
    pub memory: u64,
    /// Tasks of other devices that it ran, in all steps but the first.
    pub helped: u64,
    /// What it did when, if that was asked for.
    pub events: Vec<Event>,
}

/// Runs all devices of a program on threads of this process.
pub fn run(graph: &Graph, program: &ParallelGraph, options: Options<'_>) -> Result<Outcome, EngineError> {
    let prepared = Prepared::new(program, 1)?;
    let fabric = Fabric::new(prepared.devices.len(), prepared.edges.clone());
    let devices = 0..prepared.devices.len() as u32;
    let outcomes = run_devices(graph, program, &prepared, &fabric, devices, options)?;
    Ok(Outcome::of(program, outcomes))
}

/// Runs these devices of a program on threads of this process; `fabric` connects them with each other and the rest.
pub fn run_devices(
    graph: &Graph,
    program: &ParallelGraph,
    prepared: &Prepared,
    fabric: &Fabric,
    devices: Range<u32>,
    options: Options<'_>,
) -> Result<Vec<DeviceOutcome>, EngineError> {
    let sources = Sources::make(graph, prepared, devices.clone(), options);
    let floor = options.assist.map(|guide| Floor::new(prepared, guide, devices.clone()));
    let start = Instant::now();
    let work = |device: u32| {
        // Counted over all devices, so that several processes do not share cores.
        pin(device as usize, prepared.devices.len());
        let work = AssertUnwindSafe(|| {
            let slow = options.slow.iter().find(|(slow, _)| *slow == device);
            let circumstances =
                Circumstances { start, slowness: slow.map(|(_, factor)| *factor), floor: floor.as_ref() };
            let worked = work(device, program, prepared, fabric, &sources, options, circumstances);
            worked.map_err(|stop| match stop {
                Stop::Failed { device: whose, task, reason } => {
                    let instruction = prepared.devices[whose as usize].tasks[task as usize].instruction;
                    let op = match program.instruction(instruction).work {
                        Work::Compute { op } => graph.node(op).name.as_str(),
                        _ => "communication",
                    };
                    fabric.fail(format!("device {device} failed at `{op}`: {reason}"));
                }
                Stop::Told => {}
            })
        });
        let result = catch_unwind(work).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<&str>().map(ToString::to_string);
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
            fabric.fail(format!("device {device} failed, which is a bug: {text}"));
            Err(())
        });
        result.ok()
    };
    let work = &work;
    let outcomes: Vec<Option<DeviceOutcome>> = std::thread::scope(|scope| {
        let threads: Vec<_> = devices.clone().map(|d| scope.spawn(move || work(d))).collect();
        threads.into_iter().map(|thread| thread.join().ok().flatten()).collect()
    });
    match (outcomes.into_iter().collect(), fabric.alarm.reason()) {
        (Some(outcomes), None) => Ok(outcomes),
        (_, reason) => Err(EngineError::Device(reason.unwrap_or_else(|| "a device stopped".into()))),
    }
}

fn work(
    device: u32,
    program: &ParallelGraph,
    prepared: &Prepared,
    fabric: &Fabric,
    sources: &Sources,
    options: Options<'_>,
    circumstances: Circumstances<'_>,
) -> Result<DeviceOutcome, Stop> {
    let local = &prepared.devices[device as usize];
    fabric.bell(device).claim();
    let blocks = local.sources.iter().filter_map(|source| sources.get(source.tensor, &source.block));
    let mut worker = Worker::new(device, local, fabric, blocks, circumstances);
    worker.events = options.trace.then(Vec::new);
    let loss = program.outputs.first().and_then(|output| local.number(output.value));
    let read = |worker: &Worker<'_>, number: u32| {
        Some(worker.value(number)?.to_value(&local.values[number as usize].ty))
    };
    let mut outcome = DeviceOutcome {
        device,
        losses: Vec::new(),
        finals: Vec::new(),
        step_ends: Vec::with_capacity(options.steps),
        spent: Spent::default(),
        memory: 0,
        helped: 0,
        events: Vec::new(),
    };
    for step in 0..options.steps {
        // The first step asks for memory and warms caches: its times would say little.
        if step == 1 {
            worker.spent = Spent::default();
            worker.events.iter_mut().for_each(Vec::clear);
            worker.helped = 0;
        }
        worker.step()?;
        outcome.step_ends.push(circumstances.start.elapsed().as_secs_f64());
        outcome.losses.extend(loss.and_then(|number| read(&worker, number)));
    }
    worker.part()?;
    if options.finals {
        let carried = program.carries.iter().map(|carry| local.number(carry.old));
        outcome.finals = carried.map(|number| read(&worker, number?)).collect();
    }
    outcome.spent = worker.spent;
    outcome.memory = worker.memory();
    outcome.helped = worker.helped;
    outcome.events = worker.events.take().unwrap_or_default();
    Ok(outcome)
}

/// The first values, each block made once however many devices hold it.
struct Sources(BTreeMap<Key, OnceLock<Arc<Buffer>>>);

/// A tensor, and where a block of it starts and ends in each dimension.
type Key = (TensorId, Vec<(u64, u64)>);

fn key(tensor: TensorId, block: &Block) -> Key {
    (tensor, block.iter().map(|r| (r.start, r.end)).collect())
}

impl Sources {
    fn make(graph: &Graph, prepared: &Prepared, devices: Range<u32>, options: Options<'_>) -> Self {
        let wanted = devices.flat_map(|d| &prepared.devices[d as usize].sources);
        let blocks: BTreeMap<_, _> = wanted.map(|s| (key(s.tensor, &s.block), s)).collect();
        let made = Self(blocks.keys().map(|key| (key.clone(), OnceLock::new())).collect());
        let jobs: Vec<_> = blocks.values().zip(made.0.values()).collect();
        let next = AtomicUsize::new(0);
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(jobs.len());
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    while let Some((source, place)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let value = match options.given(source.tensor) {
                            Some(whole) => whole.block(&source.block),
                            None => initial_block(options.seed, graph.tensor(source.tensor), &source.block),
                        };
                        let mut buffer = Buffer::zeroed(value.ty().bytes() as usize);
                        buffer.write(&value);
                        // Each place is filled by the one thread that drew its number.
                        let _ = place.set(Arc::new(buffer));
                    }
                });
            }
        });
        drop(jobs);
        made
    }

    fn get(&self, tensor: TensorId, block: &Block) -> Option<Arc<Buffer>> {
        self.0.get(&key(tensor, block))?.get().cloned()
    }
}
