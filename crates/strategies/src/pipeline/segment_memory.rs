//! Memory of a step's segments on the mesh of one stage, from the one account of memory ([`shardwright_lower::memory`]).
//!
//! Buffers are of three kinds. *Fixed* ones are held all step long: weights, state, sums of gradients. *Kept* ones are held when
//! a micro-batch turns from its forward to its backward pass: a schedule holds them once per micro-batch in flight. All others
//! are *transient*: a device holds those of one segment at a time.

use super::segment_costs::{Segments, first_readers};
use shardwright_graph::{OpId, Phase, TensorId};
use shardwright_lower::{DeviceAccount, InstructionId, ParallelGraph, Work};
use shardwright_machine::DeviceId;
use shardwright_plan::Context;
use std::collections::BTreeMap;

/// Bytes on one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentMemory {
    /// Held all step long.
    pub fixed: u64,
    /// Kept from the forward to the backward pass, for each micro-batch in flight.
    pub kept: u64,
    /// The most that a pass of the segment holds beside these.
    pub transient: u64,
}

/// The kind of a buffer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Span {
    Fixed,
    Kept,
    Transient,
}

/// The memory of every segment. `program` has the body once.
pub(super) fn segment_memory(
    context: &Context<'_>,
    program: &ParallelGraph,
    segments: &Segments<'_>,
) -> Vec<SegmentMemory> {
    let program = program.unrolled_to(3);
    let DeviceAccount { account, instructions } = DeviceAccount::of(&program, DeviceId(0));
    let readers = first_readers(context);
    let op_of = |id: InstructionId| match program.instruction(id).work {
        Work::Compute { op, .. } => Some(op),
        _ => None,
    };
    // The op that an instruction belongs to: its own, or the first that reads what it moves.
    let near = |id: InstructionId| -> Option<OpId> {
        op_of(id).or_else(|| {
            let value = *program.instruction(id).writes.first()?;
            let tensor = program.value(value).tensor;
            readers[tensor.index()].or(context.graph.tensor(tensor).producer)
        })
    };
    let in_body = |id: InstructionId| program.body.is_empty() || program.body.contains(&id.index());
    let task_copy = |task: usize| program.micro_batch_of(instructions[task]);
    let is_backward = |task: &usize| {
        let phase = op_of(instructions[*task]).map(|op| context.graph.node(op).phase);
        in_body(instructions[*task]) && phase == Some(Phase::Backward)
    };
    // The middle micro-batch is like all but the first and the last.
    let shown = if program.copies > 2 { 1 } else { 0 };
    let turn = (0..instructions.len()).filter(|&task| task_copy(task) == shown).find(is_backward);
    let turn = turn.unwrap_or(instructions.len());
    let mut memory = vec![SegmentMemory::default(); segments.count];
    // Bytes of every sum of gradients, with its segment.
    let mut sums: BTreeMap<TensorId, (usize, u64)> = BTreeMap::new();
    // Changes of transient bytes before each task.
    let mut changes = vec![0i128; instructions.len() + 2];
    for buffer in &account.buffers {
        let (start, end) = (buffer.tasks.start as usize, buffer.tasks.end as usize);
        let value = program.values.get(buffer.value as usize);
        let maker = value.and_then(|value| value.made_by);
        let initial = value.is_some_and(|value| value.made_by.is_none());
        let accumulated =
            maker.and_then(op_of).is_some_and(|op| context.graph.node(op).op.operator().accumulates());
        let outside = maker.is_some_and(|id| !in_body(id));
        let last = instructions.get(end.saturating_sub(1).min(instructions.len().saturating_sub(1))).copied();
        let reaches_body = outside && last.is_some_and(|id| in_body(id) && !program.body.is_empty());
        let span = if initial || accumulated || reaches_body {
            Span::Fixed
        } else if !outside && start < turn && end > turn {
            Span::Kept
        } else {
            Span::Transient
        };
        let tensor = value.map(|value| value.tensor);
        let segment = tensor.map_or(0, |tensor| segments.of_tensor(context, &readers, tensor));
        match span {
            // A sum over micro-batches has one buffer at a time.
            Span::Fixed if accumulated => {
                let tensor = tensor.unwrap_or(TensorId(u32::MAX));
                let known = sums.entry(tensor).or_insert((segment, 0));
                known.1 = known.1.max(buffer.bytes);
            }
            Span::Fixed => memory[segment].fixed += buffer.bytes,
            Span::Kept => memory[segment].kept += buffer.bytes,
            Span::Transient => {
                changes[start.min(instructions.len())] += i128::from(buffer.bytes);
                changes[end.min(instructions.len() + 1)] -= i128::from(buffer.bytes);
            }
        }
    }
    sums.values().for_each(|&(segment, bytes)| memory[segment].fixed += bytes);
    let mut held = 0i128;
    for (task, &id) in instructions.iter().enumerate() {
        held += changes[task];
        let segment = near(id).map_or(0, |op| segments.of_op(context, op));
        let workspace = match op_of(id) {
            Some(_) => program.workspace_bytes(id, DeviceId(0)),
            None => 0,
        };
        let now = u64::try_from(held).unwrap_or(0).saturating_add(workspace);
        memory[segment].transient = memory[segment].transient.max(now);
    }
    memory
}
