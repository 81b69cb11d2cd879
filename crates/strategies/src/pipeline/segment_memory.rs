//! Memory of a step's segments on the mesh of one stage, from the one account of memory ([`shardwright_lower::memory`]).
//!
//! Buffers are of three kinds. *Fixed* ones are held all step long: weights, state, sums of gradients. *Kept* ones are made by a
//! forward op and read by a backward op: a schedule holds them once per micro-batch in flight. All others are *transient*: a
//! device holds those of one segment at a time.

use super::segment_costs::{Segments, first_readers};
use shardwright_graph::{OpId, Phase};
use shardwright_lower::{DeviceAccount, InstructionId, ParallelGraph, Work};
use shardwright_machine::DeviceId;
use shardwright_plan::Context;

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
    // The middle micro-batch is like all but the first and the last.
    let shown = if program.copies > 2 { 1 } else { 0 };
    let mut memory = vec![SegmentMemory::default(); segments.count];
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
        let backwards = |id: Option<InstructionId>| {
            id.and_then(near).is_some_and(|op| context.graph.node(op).phase == Phase::Backward)
        };
        let forwards = maker.and_then(near).is_some_and(|op| context.graph.node(op).phase == Phase::Forward);
        let reaches_body = outside && last.is_some_and(|id| in_body(id) && !program.body.is_empty());
        let span = if initial || accumulated || reaches_body {
            Span::Fixed
        } else if !outside && forwards && backwards(last) {
            Span::Kept
        } else {
            Span::Transient
        };
        let tensor = value.map(|value| value.tensor);
        let segment = tensor.map_or(0, |tensor| segments.of_tensor(context, &readers, tensor));
        match span {
            // A sum over micro-batches has one buffer at a time.
            Span::Fixed if accumulated && task_copy(start) != shown => {}
            Span::Fixed => memory[segment].fixed += buffer.bytes,
            Span::Kept if task_copy(start) == shown => memory[segment].kept += buffer.bytes,
            Span::Kept => {}
            Span::Transient => {
                changes[start.min(instructions.len())] += i128::from(buffer.bytes);
                changes[end.min(instructions.len() + 1)] -= i128::from(buffer.bytes);
            }
        }
    }
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
