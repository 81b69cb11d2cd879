//! The memory that XLA allocates for a plan. It is more than the step needs: XLA's compiled program decides what shares
//! memory.
//!
//! - Arguments stay for the whole step. A result takes over a donated argument's memory, or has its own, which other
//!   buffers use before the result is written (`xla_heap`).
//! - Element-wise ops, views and slices are fused into the loops that read them, if all readers are loops or reductions.
//!   Expensive functions are fused into a single reader only. A fused op has no buffer, and its operands stay until its
//!   readers have run. A loop may write where it has just read.
//! - On CPUs a reduce-scatter is an all-reduce of the whole tensor. All-reduces that only results depend on run together
//!   when the last operand is there, from one buffer into another.
//! - A reshard makes a copy, which lives from its first reader to its last. An all-gather along an inner dimension arrives
//!   with that dimension outermost and is transposed. A loop computes only the part of its result that all readers take.
//! - Operands of a concatenation are written where they go. A slice is taken again by each reader. Our graph unrolls
//!   loops, and these are how loops stack their results and read stacks.
//! - What a loop stacks for another loop is written, however cheap it is, into a stack that lasts from the start of the
//!   first loop to the end of the second (`add_stack`).
//! - A product that sums over several dimensions transposes its first operand, so that these come last. The loop that
//!   makes the operand writes it in both orders.
//! - Ops state what their kernels hold beside operands and results (`Operator::xla_scratch_bytes`).
//!
//! Scratch memory of a CPU's library kernels is not modelled.

use crate::shardings::ExportError;
use crate::tensor_paths::{EngineStep, PlanLayouts};
use crate::xla_heap::{Buffer, pack};
use shardwright_cost::{Layout, Placement, Resharder};
use shardwright_graph::{Consumers, Graph, OpId, Rule, TensorId};
use shardwright_space::Assignment;

/// Functions of at least this many operations per element are not fused into several readers.
const EXPENSIVE: u64 = 4;

/// Bytes that XLA allocates for one device's program. `donated` are arguments whose memory results may take over, `stacks`
/// the slices of every stack that one loop fills and another one reads.
///
/// # Errors
/// If shardings cannot express the configs.
pub fn xla_memory(
    graph: &Graph,
    resharder: &Resharder,
    assignment: &Assignment,
    donated: &[TensorId],
    stacks: &[Vec<TensorId>],
) -> Result<u64, ExportError> {
    let known = PlanLayouts::of(graph, resharder, assignment)?;
    let program = Program::of(graph, &known, donated, stacks);
    let mut buffers = BufferList::default();
    let mut arguments: u64 = 0;
    for t in graph.tensor_ids() {
        match graph.tensor(t).producer {
            None => arguments = arguments.saturating_add(program.stored(t)),
            Some(producer) => program.add_tensor(t, producer, &mut buffers),
        }
        for wanted in known.paths[t.index()]
            .wanted
            .iter()
            .filter(|wanted| wanted.steps.iter().any(|step| step.kind.is_some()))
        {
            let reads = |op: &&OpId| {
                let mut inputs = graph.node(**op).inputs.iter().enumerate().filter(|(_, input)| **input == t);
                let shapes = &known.shapes[op.index()];
                inputs.any(|(i, _)| known.layouts.input(**op, i, shapes, known.mesh) == wanted.layout)
            };
            let readers = program.consumers.of(t).iter().filter(reads).map(|op| program.runs[op.index()]);
            if let (Some(first), Some(last)) = (readers.clone().min(), readers.max()) {
                buffers.add(first, last, program.local(t, &wanted.layout));
                program.add_reshard(t, &wanted.steps, first, &mut buffers);
            }
        }
    }
    for op in graph.op_ids() {
        program.add_scratch(op, &mut buffers);
    }
    for stack in stacks {
        program.add_stack(stack, &mut buffers);
    }
    for t in graph.tensor_ids().filter(|t| program.fresh[t.index()]) {
        // A carried result has the layout of the argument that it replaces.
        let old = graph.carries.iter().find(|carry| carry.new == t).map(|carry| carry.old);
        let bytes = program.stored(old.unwrap_or(t));
        let written = program.loop_writing(t).is_some();
        let made = graph.tensor(t).producer.map_or(0, |op| 2 * op.index() + usize::from(written));
        buffers.list.push(Buffer { bytes, live: made..2 * graph.ops.len() + 1, result: true });
    }
    Ok(arguments.saturating_add(pack(buffers.list)))
}

/// Buffers with the times at which they are live. Op `i` reads at time `2 * i` and writes at `2 * i + 1`.
#[derive(Default)]
struct BufferList {
    list: Vec<Buffer>,
}

impl BufferList {
    /// A buffer from the start of op `first` to the end of op `last`.
    fn add(&mut self, first: usize, last: usize, bytes: u64) {
        self.list.push(Buffer { bytes, live: 2 * first..2 * last + 1, result: false });
    }

    /// The result of a loop, which may lie where the loop has just read.
    fn add_written(&mut self, first: usize, last: usize, bytes: u64) {
        let live = 2 * first + 1..2 * last.max(first) + 2;
        self.list.push(Buffer { bytes, live, result: false });
    }
}

/// The decisions of XLA's compiler about a graph.
struct Program<'k> {
    graph: &'k Graph,
    known: &'k PlanLayouts<'k>,
    consumers: Consumers,
    /// Per tensor: whether it is a result of the step.
    result: Vec<bool>,
    /// Per tensor: whether it is a result with a buffer that is no donated argument's.
    fresh: Vec<bool>,
    /// Per tensor that a loop stacks for another loop: the last op that makes one of the stack.
    filled: Vec<Option<usize>>,
    /// Per op: whether it is fused into the loops that read its result.
    fused: Vec<bool>,
    /// Per op: the last op of the loops that it is fused into, or itself.
    runs: Vec<usize>,
    /// Per tensor: whether it is all-reduced and only results depend on it.
    late_sum: Vec<bool>,
    /// The last op that makes such a tensor.
    last_sum: usize,
}

impl<'k> Program<'k> {
    fn of(
        graph: &'k Graph,
        known: &'k PlanLayouts<'k>,
        donated: &[TensorId],
        stacks: &[Vec<TensorId>],
    ) -> Self {
        let ops = graph.ops.len();
        let mut filled = vec![None; graph.tensors.len()];
        for stack in stacks {
            let last = stack.iter().filter_map(|t| graph.tensor(*t).producer).map(OpId::index).max();
            stack.iter().for_each(|t| filled[t.index()] = filled[t.index()].max(last));
        }
        let mut result = vec![false; graph.tensors.len()];
        let mut fresh = vec![false; graph.tensors.len()];
        for t in &graph.outputs {
            (result[t.index()], fresh[t.index()]) = (true, true);
        }
        for carry in &graph.carries {
            (result[carry.new.index()], fresh[carry.new.index()]) = (true, !donated.contains(&carry.old));
        }
        let mut program = Self {
            graph,
            known,
            consumers: graph.consumers(),
            result,
            fresh,
            filled,
            fused: vec![false; ops],
            runs: (0..ops).collect(),
            late_sum: vec![false; graph.tensors.len()],
            last_sum: 0,
        };
        // Whether an op makes results, or is fused into ops that do.
        let mut ends = vec![false; ops];
        for op in (0..ops).rev().map(OpId::new) {
            let outputs = &graph.node(op).outputs;
            let readers = || outputs.iter().flat_map(|t| program.consumers.of(*t));
            let (fused, at) = (program.is_fused(op), op.index());
            let runs = readers().map(|reader| program.runs[reader.index()]).max();
            ends[at] = outputs.iter().any(|t| program.result[t.index()])
                || (fused && readers().all(|reader| ends[reader.index()]));
            program.fused[at] = fused;
            if fused {
                program.runs[at] = runs.unwrap_or(at);
            }
        }
        for t in graph.tensor_ids() {
            let readers = program.consumers.of(t);
            let last = !readers.is_empty()
                && readers.iter().all(|&op| ends[op.index()] && !program.concatenates(op));
            if let (Some(_), Some(producer), true) =
                (known.paths[t.index()].reduced.first(), graph.tensor(t).producer, last)
            {
                program.late_sum[t.index()] = true;
                program.last_sum = program.last_sum.max(producer.index());
            }
        }
        program
    }

    /// Adds the buffer of a tensor that an op makes, if it has one.
    fn add_tensor(&self, t: TensorId, producer: OpId, buffers: &mut BufferList) {
        let made = producer.index();
        let readers = self.consumers.of(t);
        // Later readers of a stacked tensor read the stack.
        let filled = self.filled[t.index()];
        let own =
            readers.iter().map(|op| self.runs[op.index()]).filter(|&at| filled.is_none_or(|end| at <= end));
        let last = own.max().unwrap_or(made).max(made);
        if let Some(&(_, _, bytes)) = self.known.paths[t.index()].reduced.first() {
            let summed = if self.late_sum[t.index()] { self.last_sum.max(made) } else { made };
            buffers.add(made, summed, bytes);
            if !self.is_concatenated(t) {
                buffers.add(summed, last.max(summed), bytes);
            }
        } else if self.result[t.index()]
            || self.fused[made]
            || self.is_concatenated(t)
            || (filled.is_some() && last == made && self.loop_writing(t).is_some())
        {
            // Results are added by the caller; the others have no buffer, or one in a stack.
        } else if self.slices(producer) {
            for reader in readers {
                let runs = self.runs[reader.index()];
                buffers.add(runs, runs, self.stored(t));
            }
        } else if self.concatenates(producer) {
            let parts =
                self.graph.node(producer).inputs.iter().filter_map(|t| self.graph.tensor(*t).producer);
            buffers.add(parts.map(OpId::index).min().unwrap_or(made), last, self.stored(t));
        } else if self.loop_writing(t).is_some()
            && !readers.iter().any(|&op| self.transposes_first_operand(op))
        {
            buffers.add_written(made, last, self.written(t));
        } else {
            buffers.add(made, last, self.stored(t));
        }
    }

    /// Adds a stack: all of its slices last from the start of the loop that fills it to the end of the one that reads it. An op
    /// that is no loop reads a copy of its slice, which later ones share.
    fn add_stack(&self, slices: &[TensorId], buffers: &mut BufferList) {
        let made = slices.iter().filter_map(|t| self.graph.tensor(*t).producer).map(OpId::index);
        let (Some(first), Some(filled)) = (made.clone().min(), made.max()) else { return };
        let readers =
            |t: TensorId| self.consumers.of(t).iter().copied().filter(move |op| op.index() > filled);
        let ends = slices.iter().flat_map(|&t| readers(t)).map(|op| self.runs[op.index()]);
        let last = ends.max().unwrap_or(filled);
        for &t in slices {
            buffers.add(first, last, self.stored(t));
            let copied = readers(t).filter(|&op| !is_loop(self.rule(op))).map(OpId::index);
            if let (Some(start), Some(end)) = (copied.clone().min(), copied.max()) {
                buffers.add(start, end, self.stored(t));
            }
        }
    }

    /// Adds the intermediate buffers of a reshard, which live while op `when` runs: its first reader.
    fn add_reshard(&self, t: TensorId, steps: &[EngineStep], when: usize, buffers: &mut BufferList) {
        let shape = &self.graph.tensor(t).ty.shape;
        for (i, step) in steps.iter().enumerate().filter(|(_, step)| step.kind.is_some()) {
            let bytes = self.local(t, step.after.layout());
            let inner = |dim: u8| shape.iter().take(usize::from(dim)).any(|&n| n > 1);
            if step.gathered.is_some_and(inner) {
                buffers.add(when, when, bytes);
            }
            if i + 1 < steps.len() {
                buffers.add(when, when, bytes);
            }
        }
    }

    /// Bytes of a loop's result. If all readers take the same part, the loop computes only that.
    fn written(&self, t: TensorId) -> u64 {
        let paths = &self.known.paths[t.index()];
        let wanted = self.consumers.of(t).iter().flat_map(|&op| {
            let inputs = self.graph.node(op).inputs.iter().enumerate().filter(|(_, input)| **input == t);
            inputs.map(move |(i, _)| {
                self.known.layouts.input(op, i, &self.known.shapes[op.index()], self.known.mesh)
            })
        });
        let mut wanted = wanted.collect::<Vec<Layout>>();
        wanted.dedup();
        let moved = paths.wanted.iter().any(|wanted| wanted.steps.iter().any(|step| step.kind.is_some()));
        match wanted[..] {
            [ref layout] if !moved => self.local(t, layout).min(self.stored(t)),
            _ => self.stored(t),
        }
    }

    /// Adds the buffers that an op's kernel holds beside operands and results.
    fn add_scratch(&self, op: OpId, buffers: &mut BufferList) {
        let node = self.graph.node(op);
        if self.transposes_first_operand(op) {
            let (t, shapes) = (node.inputs[0], &self.known.shapes[op.index()]);
            let bytes = self.local(t, &self.known.layouts.input(op, 0, shapes, self.known.mesh));
            match self.loop_writing(t).filter(|_| self.filled[t.index()].is_none()) {
                // The loop writes it in this order alone.
                Some(_) if self.consumers.of(t).len() == 1 => {}
                Some(made) => buffers.add(made, op.index(), bytes),
                None => buffers.add(op.index(), op.index(), bytes),
            }
        }
        let [first, ..] = node.outputs[..] else { return };
        let elements = self.stored(first) / self.graph.tensor(first).ty.dtype.bytes();
        let (inputs, outputs) = (self.graph.input_types(op), self.graph.output_types(op));
        let scratch = node.op.operator().xla_scratch_bytes(&inputs, &outputs, elements);
        if scratch > 0 {
            buffers.add(op.index(), op.index(), scratch);
        }
    }

    /// The loop that writes a tensor in its final layout, if one does.
    fn loop_writing(&self, t: TensorId) -> Option<usize> {
        let paths = &self.known.paths[t.index()];
        let moved = paths.wanted.iter().any(|wanted| wanted.steps.iter().any(|step| step.kind.is_some()));
        let producer = self.graph.tensor(t).producer?;
        let written = is_loop(self.rule(producer)) && !moved && paths.reduced.is_empty();
        (written && !self.concatenates(producer) && !self.slices(producer)).then(|| producer.index())
    }

    /// Whether an op is a product that sums over several dimensions of its first operand that are not the last ones.
    fn transposes_first_operand(&self, op: OpId) -> bool {
        let rule = self.rule(op);
        if !self.graph.node(op).op.operator().xla_is_dot() {
            return false;
        }
        let long = rule.inputs[0].dims.iter().filter_map(|dim| rule.leading(dim));
        let long = long.filter(|&f| rule.factors[f as usize].size > 1);
        let summed: Vec<bool> = long.map(|f| rule.is_reduction(f)).collect();
        let count = summed.iter().filter(|summed| **summed).count();
        count > 1 && summed[..summed.len() - count].contains(&true)
    }

    fn bytes(&self, t: TensorId) -> u64 {
        self.graph.tensor(t).ty.bytes()
    }

    fn local(&self, t: TensorId, layout: &Layout) -> u64 {
        let sharded = layout.axes_where(|p| matches!(p, Placement::Shard(_)));
        self.bytes(t) / u64::from(self.known.mesh.group_size(sharded)).max(1)
    }

    /// Bytes of a tensor's block on a device.
    fn stored(&self, t: TensorId) -> u64 {
        self.known.paths[t.index()].settled.map_or_else(|| self.bytes(t), |layout| self.local(t, &layout))
    }

    fn rule(&self, op: OpId) -> &Rule {
        &self.known.shapes[op.index()].rule
    }

    fn is_fused(&self, op: OpId) -> bool {
        let node = self.graph.node(op);
        let [t] = node.outputs[..] else { return false };
        let (paths, readers) = (&self.known.paths[t.index()], self.consumers.of(t));
        let moved = paths.wanted.iter().any(|wanted| wanted.steps.iter().any(|step| step.kind.is_some()));
        let elements = self.graph.tensor(t).ty.shape.elements();
        let expensive = self.graph.flops(op) / elements.max(1) >= EXPENSIVE;
        is_loop(self.rule(op))
            && !moved
            && paths.reduced.is_empty()
            && !self.result[t.index()]
            && self.filled[t.index()].is_none()
            && (readers.len() == 1 || !readers.is_empty() && !expensive)
            && readers.iter().all(|&reader| is_loop(self.rule(reader)) || is_reduction(self.rule(reader)))
    }

    /// Whether a tensor is only read by concatenations, which have it written where it goes.
    fn is_concatenated(&self, t: TensorId) -> bool {
        let readers = self.consumers.of(t);
        !readers.is_empty() && readers.iter().all(|&op| self.concatenates(op))
    }

    /// Whether an op's results are its operands side by side.
    fn concatenates(&self, op: OpId) -> bool {
        let node = self.graph.node(op);
        let sum =
            |tensors: &[TensorId]| tensors.iter().fold(0u64, |sum, t| sum.saturating_add(self.bytes(*t)));
        node.inputs.len() > 1 && sum(&node.inputs) == sum(&node.outputs)
    }

    /// Whether an op's result is a part of its operand.
    fn slices(&self, op: OpId) -> bool {
        let node = self.graph.node(op);
        node.inputs.len() == 1
            && is_loop(self.rule(op))
            && self.bytes(node.outputs[0]) < self.bytes(node.inputs[0])
    }
}

/// Whether every element of the result depends on one element of each operand: no sums, no windows.
fn is_loop(rule: &Rule) -> bool {
    let windows = rule.inputs.iter().flat_map(|map| &map.dims).any(|dim| dim.window.is_some());
    let sums = (0..rule.factors.len()).any(|f| rule.is_reduction(f as u8));
    !windows && !sums && rule.outputs.len() == 1
}

/// Whether an op reduces one operand, without windows.
fn is_reduction(rule: &Rule) -> bool {
    rule.inputs.len() == 1 && rule.inputs[0].dims.iter().all(|dim| dim.window.is_none())
}
