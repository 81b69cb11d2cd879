//! Programs with the body written out once per micro-batch, for those who run or simulate them instruction by instruction.
//!
//! A value of the body becomes one value per micro-batch, and each micro-batch has its own slices of the data. From the second
//! micro-batch on, an instruction that accumulates reads the sum so far as its second operand. Instructions after the body read
//! the last micro-batch's values.
//!
//! The micro-batches follow each other, unless a pipeline's schedule orders their passes ([`crate::pipeline`]).

use crate::pipeline::StagePass;
use crate::program::{Carry, Instruction, InstructionId, Output, ParallelGraph, Source, ValueId, Work};

impl ParallelGraph {
    /// The program with the bodies of all micro-batches.
    pub fn unrolled(&self) -> Self {
        self.unrolled_to(self.micro_batches.get())
    }

    /// The program with the bodies of the first `copies` micro-batches, at least one; the last copy holds the data of all
    /// further ones. The step of a program with fewer copies than micro-batches is shorter, its memory is the same from
    /// [`ParallelGraph::memory_copies`] copies on.
    pub fn unrolled_to(&self, copies: u32) -> Self {
        let copies = copies.clamp(1, self.micro_batches.get());
        if self.copies > 1 || self.body.is_empty() {
            return self.clone();
        }
        let mut program = Self { instructions: Vec::new(), sources: Vec::new(), copies, ..self.clone() };
        // Per value: its value in the current micro-batch.
        let mut current: Vec<ValueId> = (0..self.values.len() as u32).map(ValueId).collect();
        let made: Vec<ValueId> =
            self.instructions[self.body.clone()].iter().flat_map(|i| i.writes.iter().copied()).collect();
        let (sliced, whole): (Vec<&Source>, Vec<&Source>) =
            self.sources.iter().partition(|source| source.sliced.is_some());
        program.sources.extend(whole.into_iter().cloned());
        program.instructions.extend_from_slice(&self.instructions[..self.body.start]);
        let mut bodies: Vec<Vec<Instruction>> = Vec::with_capacity(copies as usize);
        for copy in 0..copies {
            let before = current.clone();
            if copy > 0 {
                for value in made.iter().copied().chain(sliced.iter().map(|source| source.value)) {
                    program.values.push(self.value(value).clone());
                    current[value.index()] = ValueId(program.values.len() as u32 - 1);
                }
            }
            for source in &sliced {
                let last = if copy + 1 == copies { self.micro_batches.get() } else { copy + 1 };
                let value = current[source.value.index()];
                program.sources.push(Source { value, slices: copy..last, ..(*source).clone() });
            }
            let again = self.instructions[self.body.clone()].iter().map(|instruction| {
                let mut again = renamed(instruction, &current);
                if copy > 0 && self.accumulates(instruction) {
                    again.reads.extend(instruction.writes.iter().map(|value| before[value.index()]));
                }
                again
            });
            bodies.push(again.collect());
        }
        match &self.pipeline {
            None => program.instructions.extend(bodies.into_iter().flatten()),
            Some(pipeline) => {
                let (ordered, pipeline) = pipeline.order(&self.mesh, bodies);
                program.instructions.extend(ordered);
                program.pipeline = Some(pipeline);
            }
        }
        program.body = self.body.start..program.instructions.len();
        let rest = self.instructions[self.body.end..].iter();
        program.instructions.extend(rest.map(|instruction| renamed(instruction, &current)));
        let now = |value: ValueId| current[value.index()];
        program.outputs =
            self.outputs.iter().map(|output| Output { value: now(output.value), ..*output }).collect();
        program.carries =
            self.carries.iter().map(|carry| Carry { old: carry.old, new: now(carry.new) }).collect();
        program.record_lifetimes();
        program
    }

    /// Whether an instruction adds up a tensor over micro-batches.
    pub fn accumulates(&self, instruction: &Instruction) -> bool {
        let Work::Compute { op, .. } = instruction.work else { return false };
        self.ops[op.index()].op.operator().accumulates()
    }

    /// The micro-batch that an instruction belongs to; the first for instructions outside the body.
    pub fn micro_batch_of(&self, id: InstructionId) -> u32 {
        if self.pipeline.is_some() {
            return self.stage_pass(id).map_or(0, |pass| pass.micro_batch);
        }
        let length = (self.body.len() / self.copies.max(1) as usize).max(1);
        if self.body.contains(&id.index()) { ((id.index() - self.body.start) / length) as u32 } else { 0 }
    }

    /// The pass of a pipeline's stage that an instruction belongs to; none outside the body, and without a pipeline.
    pub fn stage_pass(&self, id: InstructionId) -> Option<StagePass> {
        let at = id.index().checked_sub(self.body.start)?;
        self.pipeline.as_ref()?.passes.get(at).copied()
    }

    /// Copies of the body from which on memory is that of all micro-batches. Without a pipeline the first micro-batch, one in
    /// between and the last differ.
    pub fn memory_copies(&self) -> u32 {
        let count = self.micro_batches.get();
        self.pipeline.as_ref().map_or(count.min(3), |pipeline| pipeline.memory_copies(&self.mesh, count))
    }

    /// How often a step runs an instruction.
    pub fn runs(&self, id: InstructionId) -> u32 {
        if self.copies == 1 && self.body.contains(&id.index()) { self.micro_batches.get() } else { 1 }
    }
}

fn renamed(instruction: &Instruction, current: &[ValueId]) -> Instruction {
    let now = |value: &ValueId| current[value.index()];
    Instruction {
        work: instruction.work.clone(),
        reads: instruction.reads.iter().map(now).collect(),
        writes: instruction.writes.iter().map(now).collect(),
    }
}
