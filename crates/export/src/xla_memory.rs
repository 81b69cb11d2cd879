//! What XLA allocates for a plan: not what the step needs at least, but what its compiled program is given.
//!
//! - Arguments stay all step long, and results have memory of their own from the beginning, but for those that take a
//!   donated argument's place.
//! - Element-wise ops, views and slices are part of the loops that read them, where all their readers are loops or
//!   reductions, and costly functions where there is one reader: they have no memory, and what they read is needed as
//!   long as their readers run.
//! - On CPUs partial sums are summed up whole, also where everybody keeps a part only. Sums that only results are made of are
//!   done in one go when the last of them is there, from one memory into another: the result's, where it has that size.
//! - A re-layout makes a copy, from its first reader to its last.
//! - Parts that are put together are made where they go, and parts that are taken out are taken anew by each reader: loops
//!   are written out in our graph, and that is how they stack what they make and read what is stacked.
//!
//! What the kernels of a processor need for themselves is not known.

use crate::shardings::ExportError;
use crate::ways::Known;
use shardwright_cost::{Layout, Placement, Relayouts};
use shardwright_graph::{Consumers, Graph, OpId, Rule, TensorId};
use shardwright_space::Config;
use std::ops::Range;

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
    let mut held = Held { change: vec![0; graph.ops.len() + 1] };
    let mut fixed: u64 = 0;
    for t in graph.tensor_ids() {
        match graph.tensor(t).producer {
            None => fixed = fixed.saturating_add(program.stored(t)),
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
                held.add(first..last + 1, program.local(t, &wanted.layout));
            }
        }
    }
    for t in graph.tensor_ids().filter(|t| program.fresh[t.index()]) {
        // As it is handed to the next step.
        let old = graph.carries.iter().find(|carry| carry.new == t).map(|carry| carry.old);
        fixed = fixed.saturating_add(program.stored(old.unwrap_or(t)));
    }
    Ok(fixed.saturating_add(held.peak()))
}

/// Memory over time.
struct Held {
    change: Vec<i128>,
}

impl Held {
    fn add(&mut self, when: Range<usize>, bytes: u64) {
        self.change[when.start] += i128::from(bytes);
        self.change[when.end] -= i128::from(bytes);
    }

    fn peak(&self) -> u64 {
        let held = self.change.iter().scan(0i128, |now, change| {
            *now += change;
            Some(*now)
        });
        u64::try_from(held.max().unwrap_or(0)).unwrap_or(u64::MAX)
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
            held.add(made..summed + 1, bytes);
            if !self.replaces(t, bytes) && !self.is_joined(t) {
                held.add(summed..last.max(summed) + 1, bytes);
            }
        } else if self.result[t.index()] || self.fused[made] || self.is_joined(t) {
            // Has no memory of its own.
        } else if self.takes_part(producer) {
            for reader in readers {
                let runs = self.runs[reader.index()];
                held.add(runs..runs + 1, self.stored(t));
            }
        } else {
            let parts =
                self.graph.node(producer).inputs.iter().filter_map(|t| self.graph.tensor(*t).producer);
            let first = parts.map(OpId::index).min().filter(|_| self.joins(producer)).unwrap_or(made);
            held.add(first..last + 1, self.stored(t));
        }
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

    /// Whether a sum can be written where the result that is made of it goes.
    fn replaces(&self, t: TensorId, bytes: u64) -> bool {
        let mut next = if self.gradient[t.index()] { self.consumers.of(t).to_vec() } else { Vec::new() };
        while let Some(op) = next.pop() {
            for made in &self.graph.node(op).outputs {
                if self.fresh[made.index()] && self.stored(*made) == bytes {
                    return true;
                }
                if self.fused[op.index()] {
                    next.extend(self.consumers.of(*made));
                }
            }
        }
        false
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
