//! What XLA allocates for a plan: not what the step needs at least, but what its compiled program is given.
//!
//! - Arguments stay all step long; a result takes a donated argument's place, or has memory of its own, in which other
//!   things lie before it is made (`xla_heap`).
//! - Element-wise ops, views and slices are part of the loops that read them, where all their readers are loops or
//!   reductions, and costly functions where there is one reader: they have no memory, and what they read is needed as
//!   long as their readers run. A loop writes where it has just read.
//! - On CPUs partial sums are summed up whole, also where everybody keeps a part only. Sums that only results are made of are
//!   done in one go when the last of them is there, from one memory into another.
//! - A re-layout makes a copy, from its first reader to its last. What is gathered along an inner dimension arrives with that
//!   outside, and is turned round. Of what a loop makes, only the part is made that all readers take.
//! - Parts that are put together are made where they go, and parts that are taken out are taken anew by each reader: loops
//!   are written out in our graph, and that is how they stack what they make and read what is stacked.
//! - A product that adds up along several dimensions has its first operand turned round, so that these come last; the loop
//!   that makes the operand makes it both ways.
//! - The derivative of maximum pooling looks for the maxima again: a number per element and dimension says where that is,
//!   and so do as many for each window.
//!
//! What the kernels of a processor need for themselves is not known.

use crate::shardings::ExportError;
use crate::ways::{Known, Leg};
use crate::xla_heap::{Buffer, pack};
use shardwright_cost::{Layout, Placement, Relayouts};
use shardwright_graph::{Consumers, DType, Graph, Op, OpId, Rule, TensorId};
use shardwright_space::Config;

/// From how many operations per element on XLA does not do a function twice.
const COSTLY: u64 = 4;

/// Bytes that one device's program is given; `donated` are arguments whose memory it may use again.
///
/// # Errors
/// Where the configs cannot be said in shardings.
pub fn xla_memory(
    graph: &Graph,
    relayouts: &Relayouts,
    configs: &[Config],
    donated: &[TensorId],
) -> Result<u64, ExportError> {
    let known = Known::of(graph, relayouts, configs)?;
    let program = Program::of(graph, &known, donated);
    let mut held = Held::default();
    let mut arguments: u64 = 0;
    for t in graph.tensor_ids() {
        match graph.tensor(t).producer {
            None => arguments = arguments.saturating_add(program.stored(t)),
            Some(producer) => program.hold(t, producer, &mut held),
        }
        for wanted in known.ways[t.index()]
            .wanted
            .iter()
            .filter(|wanted| wanted.legs.iter().any(|leg| leg.kind.is_some()))
        {
            let reads = |op: &&OpId| {
                let mut inputs = graph.node(**op).inputs.iter().enumerate().filter(|(_, input)| **input == t);
                let shapes = &known.shapes[op.index()];
                inputs.any(|(i, _)| known.places.input(**op, i, shapes, known.mesh) == wanted.layout)
            };
            let readers = program.consumers.of(t).iter().filter(reads).map(|op| program.runs[op.index()]);
            if let (Some(first), Some(last)) = (readers.clone().min(), readers.max()) {
                held.add(first, last, program.local(t, &wanted.layout));
                program.hold_on_the_way(t, &wanted.legs, first, &mut held);
            }
        }
    }
    for op in graph.op_ids() {
        program.hold_scratch(op, &mut held);
    }
    for t in graph.tensor_ids().filter(|t| program.fresh[t.index()]) {
        // As it is handed to the next step.
        let old = graph.carries.iter().find(|carry| carry.new == t).map(|carry| carry.old);
        let bytes = program.stored(old.unwrap_or(t));
        let written = program.loop_of(t).is_some();
        let made = graph.tensor(t).producer.map_or(0, |op| 2 * op.index() + usize::from(written));
        held.buffers.push(Buffer { bytes, live: made..2 * graph.ops.len() + 1, result: true });
    }
    Ok(arguments.saturating_add(pack(held.buffers)))
}

/// What is needed when. An op reads at an even time and writes at the odd one after it.
#[derive(Default)]
struct Held {
    buffers: Vec<Buffer>,
}

impl Held {
    /// From when an op begins until another has ended.
    fn add(&mut self, first: usize, last: usize, bytes: u64) {
        self.buffers.push(Buffer { bytes, live: 2 * first..2 * last + 1, result: false });
    }

    /// What a loop makes, where it has just read.
    fn add_written(&mut self, first: usize, last: usize, bytes: u64) {
        let live = 2 * first + 1..2 * last.max(first) + 2;
        self.buffers.push(Buffer { bytes, live, result: false });
    }
}

/// What the compiled program looks like.
struct Program<'k> {
    graph: &'k Graph,
    known: &'k Known<'k>,
    consumers: Consumers,
    /// Per tensor: whether the step hands it out.
    result: Vec<bool>,
    /// Of these: whether it has memory of its own, and not that of an argument.
    fresh: Vec<bool>,
    /// Per op: whether it is part of the loops that read its result.
    fused: Vec<bool>,
    /// Per op: when the last of the loops runs that it is part of.
    runs: Vec<usize>,
    /// Per tensor: whether it is a sum of which only results are made.
    gradient: Vec<bool>,
    /// When all of these are there.
    all_there: usize,
}

impl<'k> Program<'k> {
    fn of(graph: &'k Graph, known: &'k Known<'k>, donated: &[TensorId]) -> Self {
        let ops = graph.ops.len();
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
            fused: vec![false; ops],
            runs: (0..ops).collect(),
            gradient: vec![false; graph.tensors.len()],
            all_there: 0,
        };
        // Whether an op makes results, or is part of what does.
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
            let last =
                !readers.is_empty() && readers.iter().all(|&op| ends[op.index()] && !program.joins(op));
            if let (Some(_), Some(producer), true) =
                (known.ways[t.index()].reduced.first(), graph.tensor(t).producer, last)
            {
                program.gradient[t.index()] = true;
                program.all_there = program.all_there.max(producer.index());
            }
        }
        program
    }

    /// What a tensor that an op makes holds, and when.
    fn hold(&self, t: TensorId, producer: OpId, held: &mut Held) {
        let made = producer.index();
        let readers = self.consumers.of(t);
        let last = readers.iter().map(|op| self.runs[op.index()]).max().unwrap_or(made).max(made);
        if let Some(&(_, _, bytes)) = self.known.ways[t.index()].reduced.first() {
            let summed = if self.gradient[t.index()] { self.all_there.max(made) } else { made };
            held.add(made, summed, bytes);
            if !self.is_joined(t) {
                held.add(summed, last.max(summed), bytes);
            }
        } else if self.result[t.index()] || self.fused[made] || self.is_joined(t) {
            // Has no memory of its own.
        } else if self.takes_part(producer) {
            for reader in readers {
                let runs = self.runs[reader.index()];
                held.add(runs, runs, self.stored(t));
            }
        } else if self.joins(producer) {
            let parts =
                self.graph.node(producer).inputs.iter().filter_map(|t| self.graph.tensor(*t).producer);
            held.add(parts.map(OpId::index).min().unwrap_or(made), last, self.stored(t));
        } else if self.loop_of(t).is_some() && !readers.iter().any(|&op| self.is_turned_round(op)) {
            held.add_written(made, last, self.written(t));
        } else {
            held.add(made, last, self.stored(t));
        }
    }

    /// What a re-layout needs beside what it starts from and what it comes to, at the time of its first reader.
    fn hold_on_the_way(&self, t: TensorId, legs: &[Leg], when: usize, held: &mut Held) {
        let shape = &self.graph.tensor(t).ty.shape;
        for (i, leg) in legs.iter().enumerate().filter(|(_, leg)| leg.kind.is_some()) {
            let bytes = self.local(t, leg.after.layout());
            let inner = |dim: u8| shape.iter().take(usize::from(dim)).any(|&n| n > 1);
            if leg.gathered.is_some_and(inner) {
                held.add(when, when, bytes);
            }
            if i + 1 < legs.len() {
                held.add(when, when, bytes);
            }
        }
    }

    /// Bytes of a tensor that a loop makes: only the part that all readers take, where that is the same.
    fn written(&self, t: TensorId) -> u64 {
        let ways = &self.known.ways[t.index()];
        let wanted = self.consumers.of(t).iter().flat_map(|&op| {
            let inputs = self.graph.node(op).inputs.iter().enumerate().filter(|(_, input)| **input == t);
            inputs.map(move |(i, _)| {
                self.known.places.input(op, i, &self.known.shapes[op.index()], self.known.mesh)
            })
        });
        let mut wanted = wanted.collect::<Vec<Layout>>();
        wanted.dedup();
        let moved = ways.wanted.iter().any(|wanted| wanted.legs.iter().any(|leg| leg.kind.is_some()));
        match wanted[..] {
            [ref layout] if !moved => self.local(t, layout).min(self.stored(t)),
            _ => self.stored(t),
        }
    }

    /// What an op needs beside its operands and results.
    fn hold_scratch(&self, op: OpId, held: &mut Held) {
        let node = self.graph.node(op);
        match &node.op {
            _ if self.is_turned_round(op) => {
                let (t, shapes) = (node.inputs[0], &self.known.shapes[op.index()]);
                let bytes = self.local(t, &self.known.places.input(op, 0, shapes, self.known.mesh));
                match self.loop_of(t) {
                    // It is made no other way.
                    Some(_) if self.consumers.of(t).len() == 1 => {}
                    Some(made) => held.add(made, op.index(), bytes),
                    None => held.add(op.index(), op.index(), bytes),
                }
            }
            Op::MaxPoolGrad(_) => {
                let (from, to) =
                    (&self.graph.tensor(node.inputs[0]).ty, &self.graph.tensor(node.outputs[0]).ty);
                let image = self.stored(node.outputs[0]) / to.dtype.bytes().max(1);
                let windows = u128::from(image) * u128::from(from.shape.elements());
                let windows = (windows / u128::from(to.shape.elements().max(1))) as u64;
                // The image once more, and for each window its maximum.
                let each = to.dtype.bytes() + DType::I32.bytes() * to.rank() as u64;
                held.add(op.index(), op.index(), image.saturating_add(windows).saturating_mul(each));
            }
            _ => {}
        }
    }

    /// When a tensor is made, if by a loop that writes it as it is.
    fn loop_of(&self, t: TensorId) -> Option<usize> {
        let ways = &self.known.ways[t.index()];
        let moved = ways.wanted.iter().any(|wanted| wanted.legs.iter().any(|leg| leg.kind.is_some()));
        let producer = self.graph.tensor(t).producer?;
        let written = is_loop(self.rule(producer)) && !moved && ways.reduced.is_empty();
        (written && !self.joins(producer) && !self.takes_part(producer)).then(|| producer.index())
    }

    /// Whether a product adds up along several dimensions of its first operand, and these are not the last ones.
    fn is_turned_round(&self, op: OpId) -> bool {
        let rule = self.rule(op);
        if !matches!(self.graph.node(op).op, Op::Contract(_)) {
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

    /// Bytes of a tensor as it lies.
    fn stored(&self, t: TensorId) -> u64 {
        self.known.ways[t.index()].settled.map_or_else(|| self.bytes(t), |layout| self.local(t, &layout))
    }

    fn rule(&self, op: OpId) -> &Rule {
        &self.known.shapes[op.index()].rule
    }

    fn is_fused(&self, op: OpId) -> bool {
        let node = self.graph.node(op);
        let [t] = node.outputs[..] else { return false };
        let (ways, readers) = (&self.known.ways[t.index()], self.consumers.of(t));
        let moved = ways.wanted.iter().any(|wanted| wanted.legs.iter().any(|leg| leg.kind.is_some()));
        let elements = self.graph.tensor(t).ty.shape.elements();
        let costly = self.graph.flops(op) / elements.max(1) >= COSTLY;
        is_loop(self.rule(op))
            && !moved
            && ways.reduced.is_empty()
            && !self.result[t.index()]
            && (readers.len() == 1 || !readers.is_empty() && !costly)
            && readers.iter().all(|&reader| is_loop(self.rule(reader)) || is_reduction(self.rule(reader)))
    }

    /// Whether a tensor is only a part of others.
    fn is_joined(&self, t: TensorId) -> bool {
        let readers = self.consumers.of(t);
        !readers.is_empty() && readers.iter().all(|&op| self.joins(op))
    }

    /// Whether an op puts its operands together.
    fn joins(&self, op: OpId) -> bool {
        let node = self.graph.node(op);
        let sum =
            |tensors: &[TensorId]| tensors.iter().fold(0u64, |sum, t| sum.saturating_add(self.bytes(*t)));
        node.inputs.len() > 1 && sum(&node.inputs) == sum(&node.outputs)
    }

    /// Whether an op takes a part of its operand.
    fn takes_part(&self, op: OpId) -> bool {
        let node = self.graph.node(op);
        node.inputs.len() == 1
            && is_loop(self.rule(op))
            && self.bytes(node.outputs[0]) < self.bytes(node.inputs[0])
    }
}

/// Whether every element of the result is made of single elements: no sums, no windows.
fn is_loop(rule: &Rule) -> bool {
    let windows = rule.inputs.iter().flat_map(|map| &map.dims).any(|dim| dim.window.is_some());
    let sums = (0..rule.factors.len()).any(|f| rule.is_reduction(f as u8));
    !windows && !sums && rule.outputs.len() == 1
}

/// Whether an op adds up one operand.
fn is_reduction(rule: &Rule) -> bool {
    rule.inputs.len() == 1 && rule.inputs[0].dims.iter().all(|dim| dim.window.is_none())
}
