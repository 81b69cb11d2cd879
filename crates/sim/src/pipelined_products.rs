//! Collectives in parts beside the products that they belong to.
//!
//! A product may start with the first part of an operand that is being gathered, and the first part of its result may be reduced
//! while the others are computed (Wang et al., "Overlap Communication with Dependent Computation via Decomposition", ASPLOS 2023;
//! Megatron's `--tp-comm-overlap`, torchtitan's asynchronous tensor parallelism). In `g` parts on `g` devices, collective and
//! product take the longer of both and one part of the shorter one. The product keeps its task, and the collective's task keeps
//! what is left. Its other parts use links while the product runs, which no other task sees.

use crate::schedule::Schedule;
use shardwright_cost::Action;
use shardwright_graph::TensorId;
use shardwright_lower::{Instruction, InstructionId, ParallelGraph, ValueId, Work};
use shardwright_plan::Context;
use std::collections::BTreeSet;

/// Ops without a time between a collective and a product: views and casts of gathered operands.
const MOST_BETWEEN: usize = 16;

/// Shortens all-gathers and reduce-scatters of activations on the innermost links by what runs beside their products, where the
/// context's engine runs them so.
pub(crate) fn pipeline_products(context: &Context<'_>, program: &ParallelGraph, schedule: &mut Schedule) {
    if !context.engine().is_some_and(|engine| engine.pipelines_products) {
        return;
    }
    let chains = Chains::new(context, program, schedule);
    let gradients = weight_gradients(context);
    let innermost = program.mesh.axes().iter().map(|axis| axis.level.0).max().unwrap_or(0);
    let mut exposed: Vec<Option<u64>> = vec![None; schedule.tasks.len()];
    for (at, instruction) in program.instructions.iter().enumerate() {
        let Work::Reshard(step) = &instruction.work else { continue };
        let products = match step.action {
            Action::AllGather => chains.after(&instruction.reads, &instruction.writes),
            // Sums of weights' gradients overlap with other products as they are.
            Action::ReduceScatter if !reads_any(program, instruction, &gradients) => {
                chains.before(&instruction.reads)
            }
            _ => continue,
        };
        let near = step.axes.iter().all(|axis| program.mesh.axis(axis).level.0 == innermost);
        if products.is_empty() || !near {
            continue;
        }
        let parts: u64 = step.axes.iter().map(|axis| u64::from(program.mesh.axis(axis).size)).product();
        for class in schedule.classes.ids() {
            let Some(task) = schedule.task(InstructionId(at as u32), class) else { continue };
            let computing = products.iter().filter_map(|product| schedule.task(*product, class));
            let computing: u64 = computing.map(|product| schedule.tasks.duration(product as usize)).sum();
            let left = left_over(schedule.tasks.duration(task as usize), computing, parts);
            // Devices of other classes may hide less.
            let known = &mut exposed[task as usize];
            *known = Some(known.map_or(left, |other| other.max(left)));
        }
    }
    schedule.tasks.rescale(|task, duration| exposed[task].unwrap_or(duration));
}

/// Whether an instruction reads one of these tensors.
fn reads_any(program: &ParallelGraph, instruction: &Instruction, tensors: &[bool]) -> bool {
    instruction.reads.iter().any(|value| tensors[program.value(*value).tensor.index()])
}

/// Per tensor: whether it is the gradient of a weight, or becomes one by sums and casts.
fn weight_gradients(context: &Context<'_>) -> Vec<bool> {
    let graph = context.graph;
    let mut found = vec![false; graph.tensors.len()];
    graph.gradients.iter().for_each(|pair| found[pair.gradient.index()] = true);
    for op in graph.op_ids().rev() {
        let node = graph.node(op);
        let Some(made) = node.outputs.iter().find(|t| found[t.index()]) else { continue };
        let alike = |t: &&TensorId| graph.tensor(**t).ty.shape == graph.tensor(*made).ty.shape;
        if !context.is_product(op) {
            node.inputs.iter().filter(alike).for_each(|t| found[t.index()] = true);
        }
    }
    found
}

/// What a collective in so many parts adds to the time of its product.
fn left_over(collective: u64, product: u64, parts: u64) -> u64 {
    let shorter = collective.min(product) / parts.max(1);
    (collective.max(product) - product + shorter).min(collective)
}

/// Who reads what in a program.
struct Chains<'p> {
    program: &'p ParallelGraph,
    /// Per instruction: whether it computes a product.
    products: Vec<bool>,
    /// Per instruction: whether it takes no time.
    free: Vec<bool>,
    /// Per value: the instructions that read it.
    readers: Vec<Vec<u32>>,
}

impl<'p> Chains<'p> {
    fn new(context: &Context<'_>, program: &'p ParallelGraph, schedule: &Schedule) -> Self {
        let count = program.instructions.len();
        let (mut products, mut free) = (vec![false; count], vec![true; count]);
        let mut readers = vec![Vec::new(); program.values.len()];
        for (at, instruction) in program.instructions.iter().enumerate() {
            products[at] = matches!(instruction.work, Work::Compute { op, .. } if context.is_product(op));
            let tasks =
                schedule.classes.ids().filter_map(|class| schedule.task(InstructionId(at as u32), class));
            free[at] = tasks.into_iter().all(|task| schedule.tasks.duration(task as usize) == 0);
            instruction.reads.iter().for_each(|value| readers[value.index()].push(at as u32));
        }
        Self { program, products, free, readers }
    }

    /// The products that read what a gather writes, itself or a view of it. Nothing for gathers of stored tensors, which no product
    /// comes before.
    fn after(&self, reads: &[ValueId], writes: &[ValueId]) -> BTreeSet<InstructionId> {
        let mut found = BTreeSet::new();
        if reads.iter().all(|value| self.is_stored(*value)) {
            return found;
        }
        let mut open: Vec<ValueId> = writes.to_vec();
        for _ in 0..MOST_BETWEEN {
            let Some(value) = open.pop() else { break };
            for &reader in &self.readers[value.index()] {
                if self.products[reader as usize] {
                    found.insert(InstructionId(reader));
                } else if self.free[reader as usize] {
                    open.extend(&self.program.instructions[reader as usize].writes);
                }
            }
        }
        found
    }

    /// The products whose partial results a reduction adds up: its operand, or what sums of partial results add to it.
    fn before(&self, reads: &[ValueId]) -> BTreeSet<InstructionId> {
        let mut found = BTreeSet::new();
        let mut open: Vec<ValueId> = reads.to_vec();
        for _ in 0..MOST_BETWEEN {
            let Some(value) = open.pop() else { break };
            let value = self.program.value(value);
            let Some(made_by) = value.made_by.filter(|_| value.partial().is_some()) else { continue };
            if self.products[made_by.index()] {
                found.insert(made_by);
            } else {
                open.extend(&self.program.instruction(made_by).reads);
            }
        }
        found
    }

    /// Whether a value is a source, or a slice or view of one.
    fn is_stored(&self, value: ValueId) -> bool {
        let mut value = value;
        for _ in 0..MOST_BETWEEN {
            let Some(made_by) = self.program.value(value).made_by else { return true };
            let instruction = self.program.instruction(made_by);
            match instruction.reads.first().filter(|_| self.free[made_by.index()]) {
                Some(&before) => value = before,
                None => return false,
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_take_the_longer_one_and_a_part_of_the_shorter() {
        let together = |collective, product, parts| product + left_over(collective, product, parts);
        assert_eq!(together(40, 100, 4), 100 + 10);
        assert_eq!(together(100, 40, 4), 100 + 10);
        assert_eq!(together(100, 100, 2), 150);
        assert_eq!(together(100, 0, 4), 100, "nothing to hide behind");
        assert_eq!(together(40, 100, 1), 140, "a single part");
    }
}
