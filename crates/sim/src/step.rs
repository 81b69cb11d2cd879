//! How long a step takes under one config per op: its program, lowered and simulated.

use crate::{
    classes::Classes,
    error::SimError,
    schedule::{Links, Schedule},
    usage::usages,
};
use shardwright_lower::{ParallelGraph, lower};
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
    let schedule = tasks(problem, configs, &program, Classes::of(&program), Links::of(problem.machine))?;
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

/// The step's program and its tasks with every device by itself, for devices that turn out not to be alike; transfers wait for each other on links.
///
/// # Errors
/// As [`simulate_step`].
pub fn apart(problem: &Problem<'_>, configs: &[Config]) -> Result<(ParallelGraph, Schedule), SimError> {
    let program = lower(problem.graph, &problem.relayouts, configs)?;
    let schedule = tasks(problem, configs, &program, Classes::each(problem.mesh()), Links::Fifo)?;
    Ok((program, schedule))
}

fn tasks(
    problem: &Problem<'_>,
    configs: &[Config],
    program: &ParallelGraph,
    classes: Classes,
    links: Links,
) -> Result<Schedule, SimError> {
    let times = problem.times()?;
    // Sums of partial results are run otherwise than planned.
    let run_as = place(problem.graph, &problem.shapes, configs, problem.mesh()).configs;
    Ok(Schedule::new(program, classes, links, |op| times.compute(op, &run_as[op.index()]))?)
}
