//! Polishing: walks on the simulated step from a known answer. `auto` ends with them.

use crate::{
    Solution,
    chain::{Limits, run_chains},
    error::StrategyError,
    mcmc::{fixed_variables, shortest},
    moves::Moves,
    pins::{pinned_axes, walk_with_pins},
};
use shardwright_plan::{Choices, Constraints, MOST_AXES, SearchProblem, compute_lower_bound};
use shardwright_search::Control;
use shardwright_sim::{Links, SimulatedStep};
use shardwright_space::Assignment;
use std::sync::Arc;

/// Proposals of a polishing chain per choice of each variable, and the limit of the whole chain.
const PER_CHOICE: u64 = 1;
const MOST_PROPOSALS: u64 = 5_000;

/// On more axes a proposal takes too long: its reshard paths are new, and take long to find.
const MOST_WALKED_AXES: usize = MOST_AXES + 1;

/// Walks from an answer, where they may reach a step of at most `least` picoseconds; on a small machine walks go on with
/// pins. Returns the best assignment of the walks, if it reaches that step.
///
/// # Errors
/// Where an assignment cannot be simulated.
pub fn polish(
    start: &Solution<'_>,
    problem: Option<&SearchProblem<'_>>,
    least: u64,
    constraints: &Constraints,
    control: &Control<'_>,
) -> Result<Option<(SimulatedStep, Assignment)>, StrategyError> {
    let (context, assignment) = (&*start.context, &start.assignment);
    if control.stop(0).is_some() || context.mesh().len() > MOST_WALKED_AXES {
        return Ok(None);
    }
    let priced: &[Choices] = match problem {
        Some(problem) if Arc::ptr_eq(&start.context, &problem.context) => &problem.choices,
        _ => &[],
    };
    // No walk shortens a step below the computing that every assignment has to do; a step within the gap asked for is short
    // enough. Where nothing overlaps, the step is the
    // sum, which has been searched already.
    let bound = compute_lower_bound(context)?;
    let near = i64::try_from(least).is_ok_and(|least| bound > least || control.is_near(least, bound));
    let hopeless = Links::of(context.machine) == Links::Core || near;
    // Layers side by side on parts of a small machine: no bound is known there.
    let small = pinned_axes(context.mesh()).0 == context.mesh().all();
    if hopeless && !small {
        return Ok(None);
    }
    let moves = Moves::new(context, priced, assignment);
    let limits = Limits {
        proposals: (PER_CHOICE * moves.total() as u64).min(MOST_PROPOSALS),
        memory: constraints.memory,
        fixed: fixed_variables(context, constraints)?,
        ends_idle: true,
        ..Limits::default()
    };
    let starts = if hopeless { Vec::new() } else { vec![assignment.clone()] };
    let chains = match run_chains(context, &moves, &starts, &limits, control) {
        Ok(chains) => chains.into_iter().map(|chain| chain.assignment).collect(),
        // A machine that delta simulation does not support.
        Err(_) => Vec::new(),
    };
    let mut best = shortest(context, chains)?;
    if small {
        let so_far = best.as_ref().map_or(assignment, |(_, best)| best).clone();
        let pinned = walk_with_pins(context, moves, &so_far, limits, constraints, control);
        best = shortest(context, pinned)?.into_iter().chain(best).min_by_key(|(step, _)| step.makespan);
    }
    Ok(best.filter(|(step, _)| step.makespan <= least))
}
