//! The bytes that a program sends per instruction, and the lifetimes of its values.

use crate::program::{Instruction, InstructionId, ParallelGraph, Work};
use shardwright_cost::{Comm, ReshardStep, Traffic};
use shardwright_graph::block::elements;

impl ParallelGraph {
    /// The bytes that an instruction sends over each axis, all devices together.
    pub fn traffic_of(&self, comm: &Comm, instruction: &Instruction) -> Traffic {
        match &instruction.work {
            Work::Compute { .. } => Traffic::default(),
            Work::Reshard(step) => {
                let (before, after) = (self.value(instruction.reads[0]), self.value(instruction.writes[0]));
                let (action, axes, message, seconds) = (step.action, step.axes, step.message, step.seconds);
                ReshardStep { action, axes, message, seconds, after: after.at }.traffic(comm, &before.at)
            }
            Work::HaloExchange { axes, .. } => {
                let mut traffic = Traffic::default();
                let bytes = self.value(instruction.writes[0]).ty.dtype.bytes();
                for device in self.devices() {
                    for piece in self.pieces(instruction, 0, device) {
                        let differs =
                            |axis| self.mesh.digit(piece.from, axis) != self.mesh.digit(device, axis);
                        if let Some(axis) = axes.iter().find(|&axis| differs(axis)) {
                            traffic.add(axis, u128::from(elements(&piece.block) * bytes));
                        }
                    }
                }
                traffic
            }
        }
    }

    /// The bytes that a step sends over each axis, all devices together.
    pub fn traffic(&self, comm: &Comm) -> Traffic {
        let mut traffic = Traffic::default();
        for (at, instruction) in self.instructions.iter().enumerate() {
            let runs = self.runs(InstructionId(at as u32));
            traffic.merge(&self.traffic_of(comm, instruction).times(runs));
        }
        traffic
    }

    /// Records every value's writer, its last reader, and whether it outlives the step.
    pub(crate) fn record_lifetimes(&mut self) {
        for value in &mut self.values {
            (value.made_by, value.last_read, value.kept) = (None, None, false);
        }
        for (at, instruction) in self.instructions.iter().enumerate() {
            let id = InstructionId(at as u32);
            instruction.reads.iter().for_each(|v| self.values[v.index()].last_read = Some(id));
            instruction.writes.iter().for_each(|v| self.values[v.index()].made_by = Some(id));
        }
        let sources = self.sources.iter().map(|source| source.value);
        let outputs = self.outputs.iter().map(|output| output.value);
        let carried = self.carries.iter().map(|carry| carry.new);
        for v in sources.chain(outputs).chain(carried) {
            self.values[v.index()].kept = true;
        }
    }
}
