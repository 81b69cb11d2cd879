//! Times of a step's segments on the mesh of one stage, from the ordinary simulator.
//!
//! The short step of a chain is lowered, and a few micro-batches of it are simulated with overlap. The times between the ends of
//! neighbouring segments in the last but one are the segments' times, so they add up to a micro-batch between others. Sums of
//! gradients are no part of a pass. What runs once per step (updates, gathers of weights) is what the simulated step takes
//! beyond its micro-batches. It is divided among segments by durations.
//!
//! Where links have more work than devices, a backlog grows from one micro-batch to the next, which few micro-batches do not
//! show. So the work of every segment on the step's busiest stream is counted too: no step is shorter than that of its segments.

use super::segment_memory::{SegmentMemory, segment_memory};
use crate::error::StrategyError;
use shardwright_graph::{OpId, Phase, TensorId};
use shardwright_lower::{InstructionId, ParallelGraph, Work, lower};
use shardwright_plan::Context;
use shardwright_sim::{Links, device_schedule};
use shardwright_space::Assignment;

/// The costs of one segment on one stage's mesh, for one micro-batch where nothing else is said.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SegmentCost {
    /// Seconds of the forward pass.
    pub forward: f64,
    /// Seconds of the backward pass, recomputation included.
    pub backward: f64,
    /// The part of the backward pass that only makes gradients of weights.
    pub weight_backward: f64,
    /// Seconds of computing alone, forwards and backwards.
    pub computing: f64,
    /// Seconds in which the host launches the kernels of the forward and of the backward pass.
    pub host: [f64; 2],
    /// Exposed seconds per step: gradients are summed, weights updated and gathered.
    pub once: f64,
    /// Seconds of updates alone, per step.
    pub once_computing: f64,
    /// Seconds of work on the step's busiest stream: the device or one of its ports.
    pub busy: f64,
    /// Such work once per step.
    pub once_busy: f64,
    /// Memory.
    pub memory: SegmentMemory,
    /// Bytes of the result that the next segment reads, on one device.
    pub boundary_bytes: u64,
    /// Devices of a tensor-parallel group that hold the same result.
    pub boundary_copies: u32,
    /// Seconds of gathering the result from parts on these devices.
    pub boundary_gather: f64,
    /// Bytes of weights on one device.
    pub weight_bytes: u64,
}

/// The segments of a step, by layer.
pub(super) struct Segments<'s> {
    /// Per layer of the graph: its segment.
    pub of_layer: &'s [u32],
    /// Their number.
    pub count: usize,
}

impl Segments<'_> {
    pub fn of_op(&self, context: &Context<'_>, op: OpId) -> usize {
        self.of_layer[context.graph.node(op).layer.index()] as usize
    }

    /// The segment of a tensor: of its producer, else of its first reader.
    pub fn of_tensor(&self, context: &Context<'_>, readers: &[Option<OpId>], tensor: TensorId) -> usize {
        let op = context.graph.tensor(tensor).producer.or(readers[tensor.index()]);
        op.map_or(0, |op| self.of_op(context, op))
    }
}

/// The first reader of every tensor.
pub(super) fn first_readers(context: &Context<'_>) -> Vec<Option<OpId>> {
    let mut readers = vec![None; context.graph.tensors.len()];
    for op in context.graph.op_ids() {
        for t in &context.graph.node(op).inputs {
            readers[t.index()].get_or_insert(op);
        }
    }
    readers
}

/// Micro-batches that are simulated. The last but one has others before and after it.
const SIMULATED: u32 = 5;

/// The costs of every segment under an assignment.
///
/// # Errors
/// Where the assignment cannot be lowered or simulated.
pub(super) fn segment_costs(
    context: &Context<'_>,
    assignment: &Assignment,
    segments: &Segments<'_>,
) -> Result<Vec<SegmentCost>, StrategyError> {
    let program = lower(context.graph, &context.resharder, assignment)?;
    let memory = segment_memory(context, &program, segments);
    let program = program.unrolled_to(SIMULATED);
    let tasks = device_schedule(context, assignment, &program, Links::of(context.machine))?;
    let timeline = tasks.simulate();
    let readers = first_readers(context);
    let mut marks = Marks::new(&program, segments);
    let mut costs = vec![SegmentCost::default(); segments.count];
    let per_kernel = context.kernel_launch_seconds();
    let weight_gradient = weight_gradients(context);
    let (mut weight, mut backward) = (vec![0u64; segments.count], vec![0u64; segments.count]);
    let mut once = vec![0u64; segments.count];
    // Per stream and segment: work per micro-batch, and once.
    let mut work = vec![vec![[0u64; 2]; segments.count]; tasks.tasks.stream_count()];
    let seconds = |picoseconds: u64| picoseconds as f64 / 1e12;
    for task in tasks.tasks.ids() {
        let (id, duration, end) = (tasks.instructions[task], tasks.tasks.duration(task), timeline.end[task]);
        let instruction = program.instruction(id);
        let in_body = marks.in_body(id.index());
        let runs = match in_body {
            true => program.micro_batch_of(id) == marks.shown(),
            false => true,
        };
        for &stream in tasks.tasks.streams(task).iter().filter(|_| runs) {
            let segment = instruction_segment(context, &program, segments, &readers, id);
            work[stream as usize][segment][usize::from(!in_body)] += duration;
        }
        match instruction.work {
            Work::Compute { op, .. } => {
                let segment = segments.of_op(context, op);
                let phase = context.graph.node(op).phase;
                let copy = program.micro_batch_of(id);
                if in_body && phase != Phase::Update {
                    if copy == 0 {
                        costs[segment].host[usize::from(phase == Phase::Backward)] +=
                            context.launch_seconds(op);
                    }
                    if !program.accumulates(instruction) {
                        marks.mark(copy, phase, segment, end, timeline.start[task]);
                    }
                    if copy == marks.shown() {
                        costs[segment].computing += seconds(duration);
                        if phase == Phase::Backward {
                            backward[segment] += duration;
                            weight[segment] += if weight_gradient[op.index()] { duration } else { 0 };
                        }
                    }
                } else {
                    once[segment] += duration;
                    costs[segment].once_computing += seconds(duration);
                }
            }
            _ if !in_body => {
                once[instruction_segment(context, &program, segments, &readers, id)] += duration;
            }
            // The host launches collectives too.
            _ if program.micro_batch_of(id) == 0 && duration > 0 => {
                let tensor = instruction.writes.first().map(|value| program.value(*value).tensor);
                let Some(tensor) = tensor else { continue };
                let segment = segments.of_tensor(context, &readers, tensor);
                let reader = readers[tensor.index()].map(|op| context.graph.node(op).phase);
                costs[segment].host[usize::from(reader == Some(Phase::Backward))] += per_kernel;
            }
            _ => {}
        }
    }
    let micro_batches = u128::from(context.graph.micro_batches.get());
    let total = |stream: &&Vec<[u64; 2]>| -> u128 {
        stream.iter().map(|[each, once]| u128::from(*each) * micro_batches + u128::from(*once)).sum()
    };
    let busiest = work.iter().max_by_key(total);
    let busy: u64 = busiest.map_or(0, |stream| stream.iter().map(|[each, _]| each).sum());
    let (times, exposed) = marks.times(timeline.makespan(), busy);
    let all_once: u64 = once.iter().sum::<u64>().max(1);
    for (at, cost) in costs.iter_mut().enumerate() {
        (cost.forward, cost.backward) = (seconds(times[at][0]), seconds(times[at][1]));
        let share = weight[at] as f64 / backward[at].max(1) as f64;
        cost.weight_backward = cost.backward * share;
        cost.once = seconds(exposed) * once[at] as f64 / all_once as f64;
        [cost.busy, cost.once_busy] = busiest.map_or([0.0; 2], |stream| stream[at].map(seconds));
        cost.memory = memory[at];
    }
    boundaries(context, assignment, segments, &mut costs);
    Ok(costs)
}

/// The segment that an instruction works for.
fn instruction_segment(
    context: &Context<'_>,
    program: &ParallelGraph,
    segments: &Segments<'_>,
    readers: &[Option<OpId>],
    id: InstructionId,
) -> usize {
    let instruction = program.instruction(id);
    if let Work::Compute { op, .. } = instruction.work {
        return segments.of_op(context, op);
    }
    let tensor = instruction.writes.first().map(|value| program.value(*value).tensor);
    tensor.map_or(0, |tensor| segments.of_tensor(context, readers, tensor))
}

/// Which backward ops only make gradients of weights.
fn weight_gradients(context: &Context<'_>) -> Vec<bool> {
    let graph = context.graph;
    let consumers = graph.consumers();
    let mut gradient = vec![false; graph.tensors.len()];
    graph.gradients.iter().for_each(|pair| gradient[pair.gradient.index()] = true);
    let mut only = vec![false; graph.ops.len()];
    for op in graph.op_ids().rev() {
        let node = graph.node(op);
        let serves = |t: &TensorId| {
            let readers = consumers.of(*t);
            let later = |reader: &OpId| only[reader.index()] || graph.node(*reader).phase == Phase::Update;
            (gradient[t.index()] || !readers.is_empty()) && readers.iter().all(later)
        };
        only[op.index()] = node.phase == Phase::Backward && node.outputs.iter().all(serves);
    }
    only
}

/// Sizes at the ends of segments: results that the next segment reads, and weights.
fn boundaries(
    context: &Context<'_>,
    assignment: &Assignment,
    segments: &Segments<'_>,
    costs: &mut [SegmentCost],
) {
    let (graph, mesh) = (context.graph, context.mesh());
    let readers = first_readers(context);
    let local = |tensor: TensorId| {
        let source = context.transfers.sources[tensor.index()]?;
        let layout = source.layout(&context.shapes, assignment.config(source.op), mesh);
        Some(shardwright_plan::local_bytes(context, tensor, &layout))
    };
    // Tensors that forward ops of the next segment read.
    let mut crossing = vec![false; graph.tensors.len()];
    for op in graph.op_ids().filter(|&op| graph.node(op).phase == Phase::Forward) {
        for t in &graph.node(op).inputs {
            let from = graph.tensor(*t).producer.map(|producer| segments.of_op(context, producer));
            crossing[t.index()] |= from.is_some_and(|from| from + 1 == segments.of_op(context, op));
        }
    }
    for tensor in graph.tensor_ids() {
        let segment = segments.of_tensor(context, &readers, tensor);
        let Some(producer) = graph.tensor(tensor).producer else {
            if graph.tensor(tensor).role == shardwright_graph::Role::Parameter {
                costs[segment].weight_bytes += local(tensor).unwrap_or(0);
            }
            continue;
        };
        if graph.node(producer).phase != Phase::Forward {
            continue;
        }
        let crosses = crossing[tensor.index()];
        // What several segments read is there from the start, such as tables of positions.
        if crosses && is_data(context, tensor) {
            costs[segment].boundary_bytes += local(tensor).unwrap_or(0);
        }
    }
}

/// Whether a tensor is larger than its row of positions: it has the samples of the micro-batch.
fn is_data(context: &Context<'_>, tensor: TensorId) -> bool {
    let samples =
        context.graph.step_size().samples.unwrap_or(1) / u64::from(context.graph.micro_batches.get());
    context.graph.tensor(tensor).ty.shape.first() == Some(&samples.max(1))
}

/// The ends of segments in every micro-batch.
struct Marks {
    body: std::ops::Range<usize>,
    copies: u32,
    segments: usize,
    /// Per copy, phase and segment: when its last op ended.
    ends: Vec<u64>,
    first_start: u64,
}

impl Marks {
    fn new(program: &ParallelGraph, segments: &Segments<'_>) -> Self {
        // Without micro-batches, everything but the update is the body.
        let body = match program.body.is_empty() {
            false => program.body.clone(),
            true => 0..program.instructions.len(),
        };
        let copies = program.copies.max(1);
        let ends = vec![0; copies as usize * 2 * segments.count];
        Self { body, copies, segments: segments.count, ends, first_start: u64::MAX }
    }

    fn in_body(&self, at: usize) -> bool {
        self.body.contains(&at)
    }

    fn mark(&mut self, copy: u32, phase: Phase, segment: usize, end: u64, start: u64) {
        let half = usize::from(phase == Phase::Backward);
        let at = (copy as usize * 2 + half) * self.segments + segment;
        self.ends[at] = self.ends[at].max(end);
        if end > start {
            self.first_start = self.first_start.min(start);
        }
    }

    /// The micro-batch whose times are taken: one between others, if there is one.
    fn shown(&self) -> u32 {
        self.copies.saturating_sub(2)
    }

    /// Per segment: picoseconds of a micro-batch's forward and backward pass; and what a step takes beyond its micro-batches, each
    /// of which takes at least the `busy` time of a stream.
    fn times(&self, makespan: u64, busy: u64) -> (Vec<[u64; 2]>, u64) {
        let first = if self.first_start == u64::MAX { 0 } else { self.first_start };
        let of_copy = |copy: u32| {
            let start = copy as usize * 2 * self.segments;
            &self.ends[start..start + 2 * self.segments]
        };
        let shown = self.shown();
        let before = match shown {
            0 => first,
            _ => of_copy(shown - 1).iter().copied().max().unwrap_or(0),
        };
        let mut times = vec![[0; 2]; self.segments];
        let mut now = before;
        let order = (0..self.segments).map(|s| (0, s)).chain((0..self.segments).rev().map(|s| (1, s)));
        for (half, segment) in order {
            let end = of_copy(shown)[half * self.segments + segment];
            times[segment][half] = end.saturating_sub(now);
            now = now.max(end);
        }
        let passes = now.saturating_sub(before).max(busy).saturating_mul(u64::from(self.copies));
        (times, makespan.saturating_sub(passes))
    }
}
