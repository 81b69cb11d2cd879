//! The part of an op that a device runs.
//!
//! Parts are computed on demand. A program for thousands of devices is simulated through one device per class, so
//! lowering must not visit every device.

use crate::program::{Instruction, ParallelGraph, Work};
use shardwright_graph::{Op, Region};
use shardwright_machine::{DeviceId, Mesh};
use shardwright_space::{AxisUse, Config, OpShapes};
use smallvec::SmallVec;

/// An op of the graph, and its split over the devices.
#[derive(Clone, Debug)]
pub struct SplitOp {
    /// The whole op.
    pub op: Op,
    /// Its rule and the types of its operands and results.
    pub shapes: OpShapes,
    /// The op's config.
    pub config: Config,
}

impl SplitOp {
    /// Whether a device runs a part of it: no axis pins it to another digit.
    pub fn runs_on(&self, mesh: &Mesh, device: DeviceId) -> bool {
        mesh.all().iter().zip(self.config.uses()).all(|(axis, used)| match used {
            AxisUse::Pin(pinned) => u32::from(*pinned) == mesh.digit(device, axis),
            _ => true,
        })
    }

    /// The part that a device runs; none if it runs no part.
    pub fn on(&self, mesh: &Mesh, device: DeviceId) -> Option<Op> {
        if !self.runs_on(mesh, device) {
            return None;
        }
        let parts = self.config.parts(&self.shapes.rule, mesh);
        if parts.iter().all(|&count| count == 1) {
            return Some(self.op.clone());
        }
        let mut index: SmallVec<[u64; 6]> = SmallVec::from_elem(0, parts.len());
        for (axis, &used) in mesh.all().iter().zip(self.config.uses()) {
            if let AxisUse::Split(factor) = used {
                let at = &mut index[factor as usize];
                *at = *at * u64::from(mesh.axis(axis).size) + u64::from(mesh.digit(device, axis));
            }
        }
        let mut region = Region::whole(&self.shapes.rule, &self.shapes.inputs, &self.shapes.outputs);
        for (factor, (&at, &count)) in index.iter().zip(&parts).enumerate() {
            region = region.split(factor as u8, at, count);
        }
        Some(self.op.operator().localize(&region))
    }
}

impl ParallelGraph {
    /// Whether a device computes in an instruction.
    pub fn computes(&self, instruction: &Instruction, device: DeviceId) -> bool {
        let Work::Compute { op, .. } = instruction.work else { return false };
        self.ops[op.index()].runs_on(&self.mesh, device)
    }

    /// The op that a device runs for a compute instruction; none if it does not compute.
    pub fn local_op(&self, instruction: &Instruction, device: DeviceId) -> Option<Op> {
        let Work::Compute { op, completes } = instruction.work else { return None };
        let split = &self.ops[op.index()];
        match completes {
            true => split.op.operator().completion().filter(|_| split.runs_on(&self.mesh, device)),
            false => split.on(&self.mesh, device),
        }
    }
}
