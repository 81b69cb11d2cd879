//! Predicts the engine's step time from a simulated step.
//!
//! The simulator lets a device compute while data moves. A device of this engine is one core that does one after the other, so
//! its step takes at least its computing time plus the time of all transfers that it takes part in.

use shardwright_lower::{Instruction, ParallelGraph, Work};
use shardwright_machine::DeviceId;

/// Predicted seconds of a step of the engine: the simulated step, or the computing plus the communication of the busiest
/// device, whichever is longer.
///
/// `simulated_seconds` is the simulated step with overlap, `compute_seconds` the computing time of its busiest device.
pub fn predicted_step_seconds(program: &ParallelGraph, simulated_seconds: f64, compute_seconds: f64) -> f64 {
    let communication = program.devices().map(|device| communication_seconds(program, device));
    simulated_seconds.max(compute_seconds + communication.fold(0.0, f64::max))
}

/// Predicted seconds of all transfers that a device takes part in.
fn communication_seconds(program: &ParallelGraph, device: DeviceId) -> f64 {
    let takes_part = |instruction: &&Instruction| {
        let values = instruction.reads.iter().chain(&instruction.writes);
        values.into_iter().any(|&v| program.value(v).is_on(&program.mesh, device))
    };
    let seconds = |instruction: &Instruction| match instruction.work {
        Work::Reshard(step) => step.seconds.0,
        Work::HaloExchange { seconds, .. } => seconds.0,
        Work::Compute { .. } => 0.0,
    };
    program.instructions.iter().filter(takes_part).map(seconds).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardwright_lower::lower;
    use shardwright_machine::builtin;
    use shardwright_plan::Context;
    use shardwright_strategies::recipes::DATA;
    use shardwright_zoo::{BuildOptions, build};

    #[test]
    fn communication_adds_to_computing_where_nothing_overlaps() {
        let graph = build("mlp:batch=4,hidden=8,layers=2", &BuildOptions::default()).unwrap();
        let machine = builtin("flat:2").unwrap();
        let context = Context::new(&graph, &machine, None, machine.mesh().clone(), true).unwrap();
        let program = lower(&graph, &context.resharder, &DATA.assignment(&context)).unwrap();
        let communication = communication_seconds(&program, DeviceId(0));
        assert!(communication > 0.0, "gradients are reduced");
        assert_eq!(predicted_step_seconds(&program, 0.0, 1.0), 1.0 + communication);
        assert_eq!(predicted_step_seconds(&program, 5.0, 1.0), 5.0, "the simulated step is longer");
    }
}
