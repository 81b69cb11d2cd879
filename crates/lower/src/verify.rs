//! The verifier: invariants of every program. Tests run it on every lowered program.
//!
//! 1. Every value is a source or written by exactly one instruction, and read only after that.
//! 2. The lifetimes `made_by`, `last_read` and `kept` agree with the instructions.
//! 3. A compute instruction has a local op on exactly the devices that hold its results and operands. That op infers
//!    the results' local types from the operands' local types.
//! 4. An instruction that moves data covers every block that it writes: by disjoint pieces, or, if it reduces, by one
//!    whole piece per member.
//! 5. A carried value has the layout of its source.
//! 6. In a pipeline, only the devices of a stage's group compute its passes, and every group finds its passes in the order of its
//!    schedule. With 1, no group waits for a pass that waits for it.

use crate::pipeline::ProgramPipeline;
use crate::program::{Instruction, InstructionId, ParallelGraph, ValueId, Work};
use shardwright_graph::{TensorType, block::elements};

impl ParallelGraph {
    /// Checks every invariant in the module's documentation. The error names the broken invariant and its place.
    pub fn verify(&self) -> Result<(), String> {
        let mut written = vec![false; self.values.len()];
        let mut write = |v: ValueId| match std::mem::replace(&mut written[v.index()], true) {
            true => Err(format!("{v:?} is written twice")),
            false => Ok(()),
        };
        self.sources.iter().try_for_each(|source| write(source.value))?;
        let mut last_read = vec![None; self.values.len()];
        for (at, instruction) in self.instructions.iter().enumerate() {
            let id = InstructionId(at as u32);
            for v in &instruction.reads {
                if !written[v.index()] {
                    return Err(format!("{id:?} reads {v:?} before it is written"));
                }
                last_read[v.index()] = Some(id);
            }
            for &v in &instruction.writes {
                if std::mem::replace(&mut written[v.index()], true) {
                    return Err(format!("{v:?} is written twice"));
                }
                if self.value(v).made_by != Some(id) {
                    return Err(format!("{v:?} does not name its writer {id:?}"));
                }
            }
            self.verify_instruction(instruction).map_err(|e| format!("{id:?}: {e}"))?;
        }
        for (at, value) in self.values.iter().enumerate() {
            if !written[at] || value.last_read != last_read[at] {
                return Err(format!("%{at} is never written, or its last reader is wrong"));
            }
        }
        for carry in &self.carries {
            let (old, new) = (self.value(carry.old), self.value(carry.new));
            if old.at != new.at || old.ty != new.ty || !new.kept {
                return Err(format!("{:?} cannot replace {:?}", carry.new, carry.old));
            }
        }
        self.pipeline.as_ref().map_or(Ok(()), |pipeline| self.verify_pipeline(pipeline))
    }

    /// Checks that groups compute their own passes in the order of their schedule.
    fn verify_pipeline(&self, own: &ProgramPipeline) -> Result<(), String> {
        if own.passes.len() != self.body.len() {
            return Err(format!(
                "{} passes for a body of {} instructions",
                own.passes.len(),
                self.body.len()
            ));
        }
        if self.body.is_empty() {
            return Ok(());
        }
        let turns = own.turns(&self.mesh, self.copies)?;
        let mut now = vec![0; own.pipeline.groups(&self.mesh) as usize];
        for (at, pass) in self.body.clone().zip(&own.passes) {
            let (id, instruction) = (InstructionId(at as u32), &self.instructions[at]);
            let Work::Compute { .. } = instruction.work else { continue };
            let group = own.pipeline.schedule.place(now.len() as u32, pass.stage).0;
            let mut devices = self.devices().filter(|&device| self.computes(instruction, device));
            if !devices.all(|device| own.group_of(&self.mesh, device) == group) {
                return Err(format!("{id:?} of stage {} runs outside of group {group}", pass.stage));
            }
            // A body that is written once is no order yet.
            let turn = turns.get(pass).copied().filter(|_| self.copies > 1);
            if turn.is_some_and(|turn| turn < now[group as usize]) || (turn.is_none() && self.copies > 1) {
                return Err(format!("{id:?} of {pass:?} is against the order of group {group}"));
            }
            now[group as usize] = turn.unwrap_or(0);
        }
        Ok(())
    }

    fn verify_instruction(&self, instruction: &Instruction) -> Result<(), String> {
        for device in self.devices() {
            let local = |&v: &ValueId| self.value(v).local_type(&self.mesh, device);
            let Work::Compute { .. } = instruction.work else {
                for (which, written) in instruction.writes.iter().enumerate() {
                    let Some(wanted) = local(written) else { continue };
                    let pieces = self.pieces(instruction, which, device);
                    let covered: u64 = pieces.iter().map(|piece| elements(&piece.block)).sum();
                    let (wanted, members) = (wanted.shape.elements(), pieces.len() as u64);
                    let reduces = matches!(&instruction.work, Work::Reshard(s) if s.reduction.is_some());
                    let expected = if reduces { wanted * members } else { wanted };
                    if covered != expected || pieces.is_empty() {
                        return Err(format!("device {} receives {covered} of {expected} elements", device.0));
                    }
                }
                continue;
            };
            let reads: Option<Vec<TensorType>> = instruction.reads.iter().map(local).collect();
            let writes: Option<Vec<TensorType>> = instruction.writes.iter().map(local).collect();
            match (self.local_op(instruction, device), reads, writes) {
                (Some(op), Some(reads), Some(writes)) => {
                    let inferred = op.operator().infer(&reads).map_err(|e| format!("{op:?}: {e}"))?;
                    if inferred != writes {
                        return Err(format!("{op:?} infers {inferred:?}, not {writes:?}"));
                    }
                }
                (None, _, None) => {}
                _ => {
                    return Err(format!(
                        "device {} has operands, results or a local op without the others",
                        device.0
                    ));
                }
            }
        }
        Ok(())
    }
}
