//! `mcmc`: FlexFlow's search. Markov chains start from the answer of `exact`, the recipes and random assignments. The result is
//! never slower in the simulated step than any start.

use crate::{
    Planner, Solution, Strategy,
    chain::{Limits, run_chains},
    error::StrategyError,
    exact::Exact,
    moves::Moves,
    pins::{fits, walk_with_pins},
    recipes::RECIPES,
};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use rayon::prelude::*;
use shardwright_plan::{Choices, Constraints, Context, Optimised, PlanError};
use shardwright_search::{Control, StopReason};
use shardwright_sim::{SimulatedStep, simulate_step};
use shardwright_space::{Assignment, Config};
use std::sync::Arc;

/// The strategy `mcmc`.
pub struct Mcmc;

const NAME: &str = "mcmc";

/// Proposals of a chain: so many for each choice of each variable, and the paper's number at most.
const PER_CHOICE: u64 = 50;
const MOST_PROPOSALS: u64 = 250_000;
/// Random assignments to start from.
const RANDOM_STARTS: usize = 2;

impl Strategy for Mcmc {
    fn name(&self) -> &'static str {
        NAME
    }

    fn about(&self) -> &'static str {
        "FlexFlow: Markov chains over all configs on the simulated step, from several plans"
    }

    fn optimises(&self) -> Optimised {
        Optimised::Simulated
    }

    fn searches_within_memory(&self) -> bool {
        true
    }

    fn takes_all_time(&self) -> bool {
        true
    }

    fn takes_proposals(&self) -> bool {
        true
    }

    fn solve<'a>(
        &self,
        planner: &Planner<'a>,
        constraints: &Constraints,
        control: &Control<'_>,
    ) -> Result<Solution<'a>, StrategyError> {
        // Proposals are the chains' alone, and some time must be left for them.
        let before = Control { iterations: None, ..control.all_but(4) };
        let proved = Exact.solve(planner, constraints, &before);
        let (context, choices, mut stages) = match &proved {
            Ok(proved) => (Arc::clone(&proved.context), proved.choices, proved.stages),
            Err(_) => {
                let problem = planner.problem(control)?;
                let choices = problem.choices.iter().map(|choices| choices.len()).sum();
                (Arc::clone(&problem.context), choices, Default::default())
            }
        };
        let planned = control.elapsed();
        let priced: &[Choices] = match planner.problem_if_built() {
            Some(problem) if Arc::ptr_eq(&context, &problem.context) => &problem.choices,
            _ => &[],
        };
        let proved = proved.map(|proved| proved.assignment);
        let (assignment, step, stop_reason) = walk(&context, priced, proved, constraints, control)?;
        // On its own axes a recipe may be faster than any walk on the searched ones.
        let recipes = planner.recipes(constraints, control)?.iter().filter(|own| own.keeps(constraints));
        let fastest = recipes.filter_map(|own| Some((own.step?, own))).min_by_key(|(step, _)| step.makespan);
        let (context, assignment, step) = match fastest {
            Some((shorter, own)) if shorter.makespan < step.makespan => {
                (Arc::clone(&own.context), own.assignment.clone(), shorter)
            }
            _ => (context, assignment, step),
        };
        stages.polish_seconds = control.elapsed().saturating_sub(planned).as_secs_f64();
        let solution = Solution::new(context, assignment, self.optimises())?;
        Ok(Solution { step: Some(step), stop_reason, stages, choices, ..solution })
    }
}

/// Variables that config constraints fix.
pub(crate) fn fixed_variables(
    context: &Context<'_>,
    constraints: &Constraints,
) -> Result<Vec<usize>, PlanError> {
    let mut fixed = Vec::new();
    for constraint in &constraints.configs {
        fixed.extend(constraint.ops(context)?.into_iter().map(|op| context.variables.variable_of(op)));
    }
    Ok(fixed)
}

/// The recipes on a mesh that keep the constraints.
fn allowed_recipes(context: &Context<'_>, constraints: &Constraints) -> Vec<Assignment> {
    let offered =
        RECIPES.iter().filter(|recipe| recipe.applies(context) && (context.untied || !recipe.needs_untied()));
    let keeps = |own: &Assignment| {
        fits(context, constraints, own)
            && constraints.configs.iter().all(|constraint| constraint.check(context, own).is_ok())
    };
    offered.map(|recipe| recipe.assignment(context)).filter(keeps).collect()
}

/// The assignment with the shortest simulated step; the first of equals.
pub(crate) fn shortest(
    context: &Context<'_>,
    assignments: Vec<Assignment>,
) -> Result<Option<(SimulatedStep, Assignment)>, StrategyError> {
    let simulate = |assignment: Assignment| Ok((simulate_step(context, &assignment)?, assignment));
    let steps = assignments.into_par_iter().map(simulate).collect::<Result<Vec<_>, StrategyError>>()?;
    Ok(steps.into_iter().min_by_key(|(step, _)| step.makespan))
}

/// An assignment with a random choice of every variable.
fn random_assignment(context: &Context<'_>, moves: &Moves<'_>, seed: u64) -> Assignment {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut configs = vec![Config::replicated(context.mesh().len()); context.graph.ops.len()];
    for variable in 0..context.variables.members.len() {
        let choice = random.random_range(0..moves.count(variable).max(1));
        for (op, config) in moves.ops(variable).iter().zip(moves.configs(variable, choice)) {
            configs[op.index()] = config.clone();
        }
    }
    let assignment = Assignment::of(context.graph, configs);
    assignment.without_impossible_sums(context.graph, &context.shapes, context.mesh())
}

fn walk(
    context: &Context<'_>,
    priced: &[Choices],
    proved: Result<Assignment, StrategyError>,
    constraints: &Constraints,
    control: &Control<'_>,
) -> Result<(Assignment, SimulatedStep, StopReason), StrategyError> {
    let mut starts = allowed_recipes(context, constraints);
    match proved {
        Ok(assignment) => starts.insert(0, assignment),
        Err(error) if starts.is_empty() => return Err(error),
        Err(_) => {}
    }
    let moves = Moves::new(context, priced, &starts[0]);
    let fixed = fixed_variables(context, constraints)?;
    let seeds = (0..RANDOM_STARTS as u64).map(|n| control.seed.wrapping_add(n));
    let random = seeds.map(|seed| random_assignment(context, &moves, seed));
    starts.extend(random.filter(|start| fixed.is_empty() && fits(context, constraints, start)));
    let mut distinct: Vec<Assignment> = Vec::new();
    for start in starts {
        if !distinct.contains(&start) {
            distinct.push(start);
        }
    }
    let most = (PER_CHOICE * moves.total() as u64).min(MOST_PROPOSALS);
    let proposals = control.iterations.unwrap_or(most);
    let limits = Limits { proposals, memory: constraints.memory, fixed, ..Limits::default() };
    let chains = run_chains(context, &moves, &distinct, &limits, &control.all_but(4))?;
    let mut found: Vec<Assignment> = chains.into_iter().map(|chain| chain.assignment).collect();
    if let Some(best) = found.first() {
        found.extend(walk_with_pins(context, moves, &best.clone(), limits, constraints, control));
    }
    let stopped = control.stop_by_time();
    found.extend(distinct);
    let Some((step, assignment)) = shortest(context, found)? else {
        let reason = "there is nothing to start from".to_string();
        return Err(PlanError::NoPlan { solver: NAME.into(), reason }.into());
    };
    Ok((assignment, step, stopped.unwrap_or(StopReason::Exhausted)))
}
