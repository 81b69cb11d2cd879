//! Searches a step on the machine's prime axes without tables over all configs.
//!
//! [`pattern_bound`](shardwright_plan::pattern_bound) bounds all assignments on the prime axes, and chooses configs while it
//! does. The problem of choosing among these configs, and those of known assignments, is small. Its answer is within a proved gap of
//! every assignment on the prime axes.

use crate::{
    network_search::{NetworkAnswer, NetworkSearch},
    refine::agreed,
};
use shardwright_machine::{Axis, Mesh};
use shardwright_plan::{Candidates, Constraints, Context, PlanError, SearchProblem, pattern_bound};
use shardwright_search::Control;
use shardwright_space::{Assignment, Config};

/// The bound may take one in so many parts of the time.
const BOUND_SHARE: u32 = 2;

/// An answer on prime axes, and a bound that holds for all others.
pub struct PrimeAnswer<'a> {
    /// The problem of choosing among few configs.
    pub problem: SearchProblem<'a>,
    /// Its best answer.
    pub answer: NetworkAnswer,
    /// No assignment of the variables on prime axes costs less.
    pub bound: i64,
}

/// Bounds the context's variables on prime axes, and searches among the configs that lead to the bound and those of known
/// assignments. None where there are too many configs, or nothing is found in time that keeps the constraints.
///
/// # Errors
/// Where the costs are of another device.
pub fn search_prime<'a>(
    context: &Context<'a>,
    search: &NetworkSearch<'_>,
    constraints: &Constraints,
    known: &[(&Mesh, &Assignment)],
    target: i64,
    control: &Control<'_>,
) -> Result<Option<PrimeAnswer<'a>>, PlanError> {
    let found = pattern_bound(context, target, constraints.memory, &control.share(BOUND_SHARE))?;
    if found.candidates.is_empty() {
        return Ok(None);
    }
    let answer = among(context, search, constraints, &found.candidates, known, control);
    Ok(answer.map(|(problem, answer)| PrimeAnswer { problem, answer, bound: found.bound }))
}

/// The best answer among some configs on prime axes, per variable, and those of known assignments on other axes. Axes are merged
/// on which all of them agree.
pub fn among<'a>(
    context: &Context<'a>,
    search: &NetworkSearch<'_>,
    constraints: &Constraints,
    candidates: &[Vec<Config>],
    known: &[(&Mesh, &Assignment)],
    control: &Control<'_>,
) -> Option<(SearchProblem<'a>, NetworkAnswer)> {
    let prime = context.machine.mesh();
    let mut configs: Vec<Vec<Config>> = candidates.to_vec();
    for (own, split) in configs.iter_mut().zip(&context.variables.members) {
        for (mesh, assignment) in known.iter().filter(|(_, assignment)| !assignment.has_pins()) {
            let config = assignment.config(split.forward()).on_primes(mesh);
            if !own.contains(&config) {
                own.push(config);
            }
        }
    }
    if configs.iter().any(Vec::is_empty) {
        return None;
    }
    let all: Vec<Config> = configs.iter().flatten().cloned().collect();
    let mesh = prime.merge_axes(&agreed(prime, &all)).ok()?;
    let first = |axis: &Axis| axis.primes.iter().next();
    let merged =
        |config: &Config| Config::new(mesh.axes().iter().filter_map(first).map(|prime| config.get(prime)));
    let configs = configs.iter().map(|own| own.iter().map(merged).collect()).collect();
    let near = SearchProblem::among(context, Candidates { mesh, configs }, control).ok()?;
    let found = search.run(&near, constraints, control).ok()?;
    Some((near, NetworkAnswer { bound: 0, ..found }))
}
