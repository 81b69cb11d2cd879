//! How long a step takes under one config per op: its program, lowered and simulated.

use crate::{
    classes::Classes,
    error::SimError,
    schedule::{Links, Schedule},
    usage::usages,
};
use shardwright_lower::lower;
use shardwright_plan::{Problem, StepTimes};
use shardwright_space::{Config, place};

/// What a simulation says of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Picoseconds of the whole step.
    pub makespan: u64,
    /// The same in seconds, with computing and exposed communication of the device that computes longest.
    pub times: StepTimes,
}

/// Simulates the step as it would run.
///
/// # Errors
/// Where the configs cannot be lowered, or there are too many tasks.
pub fn simulate_step(problem: &Problem<'_>, configs: &[Config]) -> Result<Step, SimError> {
    let program = lower(problem.graph, &problem.relayouts, configs)?;
    let times = problem.times()?;
    // Sums of partial results are run otherwise than planned.
    let run_as = place(problem.graph, &problem.shapes, configs, problem.mesh()).configs;
    let schedule = Schedule::new(&program, Classes::of(&program), Links::of(problem.machine), |op| {
        times.compute(op, &run_as[op.index()])
    })?;
    let timeline = schedule.simulate();
    let busiest = usages(&schedule, &timeline).into_iter().max_by_key(|usage| usage.busy).unwrap_or_default();
    let seconds = |picoseconds: u64| picoseconds as f64 / 1e12;
    let makespan = timeline.makespan();
    let times = StepTimes {
        step_seconds: seconds(makespan),
        compute_seconds: seconds(busiest.busy),
        exposed_comm_seconds: seconds(busiest.exposed),
    };
    Ok(Step { makespan, times })
}
