//! The program for people: one line per source and instruction.

use crate::program::{Instruction, ParallelGraph, ValueId, Work};
use shardwright_graph::Graph;
use shardwright_machine::AxisSet;
use std::fmt::{self, Write};

/// A program with its graph, for printing.
pub struct Listing<'a> {
    program: &'a ParallelGraph,
    graph: &'a Graph,
}

impl ParallelGraph {
    /// The program as text: `%3 fc.grad f32[4,8] R = all-reduce gpu.0 (%2)`.
    pub fn listing<'a>(&'a self, graph: &'a Graph) -> Listing<'a> {
        Listing { program: self, graph }
    }
}

impl Listing<'_> {
    fn axes(&self, axes: AxisSet) -> String {
        axes.iter().map(|axis| self.program.mesh.axis(axis).name.as_str()).collect::<Vec<_>>().join("×")
    }

    fn value(&self, id: ValueId) -> String {
        let value = self.program.value(id);
        let mut text = format!("{id:?} {} {} {:?}", self.graph.tensor(value.tensor).name, value.ty, value.at);
        for cut in &value.cuts {
            let ranges: Vec<String> = cut.ranges.iter().map(|r| format!("{}..{}", r.start, r.end)).collect();
            // Writing to a string cannot fail.
            let _ = write!(text, " {}:[{}]", cut.dim, ranges.join(" "));
        }
        text
    }

    fn work(&self, instruction: &Instruction) -> String {
        match &instruction.work {
            Work::Compute { op, completes } => {
                let node = self.graph.node(*op);
                let completion = if *completes { "completion of " } else { "" };
                format!("{completion}{} {}", node.op.kind(), node.name)
            }
            Work::Reshard(step) => format!("{} {}", step.action.name(), self.axes(step.axes)),
            Work::HaloExchange { axes, .. } => format!("window {}", self.axes(*axes)),
        }
    }
}

impl fmt::Display for Listing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for source in &self.program.sources {
            writeln!(f, "{}", self.value(source.value))?;
        }
        let body = &self.program.body;
        for (at, instruction) in self.program.instructions.iter().enumerate() {
            if at == body.start && !body.is_empty() {
                writeln!(f, "{} micro-batches:", self.program.micro_batches)?;
            }
            if at == body.end && !body.is_empty() {
                writeln!(f, "after them:")?;
            }
            let written: Vec<String> = instruction.writes.iter().map(|&v| self.value(v)).collect();
            let reads: Vec<String> = instruction.reads.iter().map(|v| format!("{v:?}")).collect();
            writeln!(f, "{} = {} ({})", written.join(", "), self.work(instruction), reads.join(", "))?;
        }
        for output in &self.program.outputs {
            writeln!(f, "output {:?}", output.value)?;
        }
        for carry in &self.program.carries {
            writeln!(f, "carry {:?} <- {:?}", carry.old, carry.new)?;
        }
        Ok(())
    }
}
