//! The verifier: what must hold for every program. Tests run it on all that they lower.
//!
//! 1. Every value is a source or written by exactly one instruction, and read only after that.
//! 2. Lifetimes say so: `made_by`, `last_read`, `kept`.
//! 3. A compute instruction has a local op on exactly the devices that have its results and operands; given the
//!    operands' local types, that op infers the results' local types.
//! 4. An instruction that moves data covers every block that it writes: by disjoint pieces, or, where it reduces, by
//!    one whole piece per member.
//! 5. What is carried over lies as its source does.

use crate::{
    blocks::elements,
    program::{Instruction, InstructionId, ParallelGraph, ValueId, Work},
};
use shardwright_graph::TensorType;

impl ParallelGraph {
    /// Checks every invariant in the module's documentation; says what is broken and where.
    pub fn verify(&self) -> Result<(), String> {
        let mut there = vec![false; self.values.len()];
        let mut write = |v: ValueId| match std::mem::replace(&mut there[v.index()], true) {
            true => Err(format!("{v:?} is written twice")),
            false => Ok(()),
        };
        self.sources.iter().try_for_each(|source| write(source.value))?;
        let mut last_read = vec![None; self.values.len()];
        for (at, instruction) in self.instructions.iter().enumerate() {
            let id = InstructionId(at as u32);
            for v in &instruction.reads {
                if !there[v.index()] {
                    return Err(format!("{id:?} reads {v:?} before it is there"));
                }
                last_read[v.index()] = Some(id);
            }
            for &v in &instruction.writes {
                if std::mem::replace(&mut there[v.index()], true) {
                    return Err(format!("{v:?} is written twice"));
                }
                if self.value(v).made_by != Some(id) {
                    return Err(format!("{v:?} does not say that {id:?} makes it"));
                }
            }
            self.verify_instruction(instruction).map_err(|e| format!("{id:?}: {e}"))?;
        }
        for (at, value) in self.values.iter().enumerate() {
            if !there[at] || value.last_read != last_read[at] {
                return Err(format!("%{at} is never made, or its last reader is wrong"));
            }
        }
        for carry in &self.carries {
            let (old, new) = (self.value(carry.old), self.value(carry.new));
            if old.at != new.at || old.ty != new.ty || !new.kept {
                return Err(format!("{:?} cannot take the place of {:?}", carry.new, carry.old));
            }
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
                    let reduces = matches!(&instruction.work, Work::Relayout(s) if s.reduction.is_some());
                    let expected = if reduces { wanted * members } else { wanted };
                    if covered != expected || pieces.is_empty() {
                        return Err(format!("device {} gets {covered} of {expected} elements", device.0));
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
                        return Err(format!("{op:?} makes {inferred:?}, not {writes:?}"));
                    }
                }
                (None, _, None) => {}
                _ => return Err(format!("device {} does not take part as it should", device.0)),
            }
        }
        Ok(())
    }
}
