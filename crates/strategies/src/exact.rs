//! `exact`: every config of every variable, with a proof.
//!
//! The recipes are priced before the search. A search that is stopped before it has an answer returns the cheapest recipe that
//! keeps the constraints. So does one on merged axes, where a recipe on its own axes is cheaper.

use crate::{
    Planner, Solution, Strategy,
    baselines::PricedRecipe,
    error::StrategyError,
    network_search::{NetworkAnswer, NetworkSearch, Space},
    prime_search::search_prime,
};
use shardwright_plan::{Constraints, MOST_AXES, Optimised, PlanError, SearchProblem};
use shardwright_search::{Control, StopReason};

/// The strategy `exact`.
pub struct Exact;

/// The search of `exact`.
const SEARCH: NetworkSearch<'_> = NetworkSearch {
    name: "exact",
    space: Space::All,
    solver: &shardwright_search::exact::Exact,
    keeps_limits: true,
};

impl Strategy for Exact {
    fn name(&self) -> &'static str {
        "exact"
    }

    fn about(&self) -> &'static str {
        "exact search over every config of every layer, with a lower bound"
    }

    fn optimises(&self) -> Optimised {
        Optimised::Sum
    }

    fn searches_within_memory(&self) -> bool {
        true
    }

    fn solve<'a>(
        &self,
        planner: &Planner<'a>,
        constraints: &Constraints,
        control: &Control<'_>,
    ) -> Result<Solution<'a>, StrategyError> {
        let in_space = |own: &&PricedRecipe<'a>| planner.is_untied() || !own.recipe.needs_untied();
        let recipes = planner.recipes(constraints, control)?;
        let kept = recipes.iter().filter(in_space).filter(|own| own.keeps(constraints));
        let recipe = kept.min_by_key(|own| own.costs.objective());
        // The untied problem of a large machine takes long. Its relaxation on prime axes does not, and often suffices.
        let early = match planner.is_untied() {
            true => untied_on_prime_axes(planner, constraints, &[], &control.share(2))?,
            false => None,
        };
        let is_near = |own: &Solution<'_>| control.is_near(own.objective(), own.prime_bound);
        if let Some(near) = early.as_ref().filter(|own| is_near(own)) {
            return Ok(near.clone());
        }
        let first = |problem: &SearchProblem<'a>, constraints: &Constraints| {
            if problem.context.untied {
                untied_or_tied(planner, problem, constraints, control)
            } else {
                Ok(SEARCH.run(problem, constraints, control)?)
            }
        };
        let searched = SEARCH.solve_with(planner, constraints, control, &first);
        match (better(searched, early, planner)?, recipe) {
            (Ok(found), Some(recipe)) if recipe.costs.objective() < found.objective() => {
                let answer = Solution { optimised: Optimised::Sum, ..recipe.solution() };
                let mut solution = found.with_answer_of(answer, planner.problem_if_built())?;
                solution.search_notes.push(note(recipe));
                Ok(solution)
            }
            (Err(StrategyError::Plan(error)), Some(recipe))
                if error.is_without_answer() && !error.is_too_large() =>
            {
                let stop_reason = match error {
                    PlanError::Stopped(reason) => reason,
                    _ => control.stop(0).unwrap_or(StopReason::Exhausted),
                };
                let search_notes = vec![note(recipe)];
                Ok(Solution { lower_bound: Some(0), stop_reason, search_notes, ..recipe.solution() })
            }
            (Err(StrategyError::Plan(error)), None) => {
                let limit = constraints.memory.map(|limit| limit.0);
                let error = match (error, limit) {
                    (PlanError::Stopped(stop), Some(limit)) => {
                        let solver = self.name().to_string();
                        PlanError::NotFound { solver, limit, least: None, lower_bound: 0, stop }
                    }
                    (error, _) => error,
                };
                let free = recipes.iter().filter(|_| constraints.configs.is_empty());
                let least = free.filter(in_space).map(|own| own.costs.peak_memory.0).min();
                Err(error.with_known(least).into())
            }
            (found, _) => found,
        }
    }
}

/// The cheaper of an answer of the full search and one on prime axes that was found before, with the bounds of both.
fn better<'a>(
    searched: Result<Solution<'a>, StrategyError>,
    early: Option<Solution<'a>>,
    planner: &Planner<'a>,
) -> Result<Result<Solution<'a>, StrategyError>, StrategyError> {
    let Some(early) = early else { return Ok(searched) };
    let Ok(mut searched) = searched else { return Ok(Ok(early)) };
    searched.prime_bound = searched.prime_bound.max(early.prime_bound);
    if early.objective() < searched.objective() {
        return Ok(Ok(searched.with_answer_of(early, planner.problem_if_built())?));
    }
    searched.lower_bound = searched.lower_bound.max(Some(searched.prime_bound));
    Ok(Ok(searched))
}

/// The untied answer on prime axes: a plan that chooses per op, with a bound that holds for all plans without pins. None on
/// machines whose prime axes are searched anyway, and where nothing is found. The configs of the recipes and of `others` are
/// among its choices.
///
/// # Errors
/// Where an answer cannot be priced.
pub fn untied_on_prime_axes<'a>(
    planner: &Planner<'a>,
    constraints: &Constraints,
    others: &[&Solution<'a>],
    control: &Control<'_>,
) -> Result<Option<Solution<'a>>, StrategyError> {
    let free = constraints.configs.is_empty() && planner.machine().mesh().len() > MOST_AXES;
    if !free || control.is_over() {
        return Ok(None);
    }
    let recipes = planner.recipes(constraints, control)?;
    let others = others.iter().map(|own| (own.context.mesh(), &own.assignment));
    let known: Vec<_> =
        recipes.iter().map(|own| (own.context.mesh(), &own.assignment)).chain(others).collect();
    let context = planner.untied_prime()?;
    let fitting = recipes.iter().filter(|own| own.keeps(constraints));
    let target = fitting.map(|own| own.costs.objective()).min().unwrap_or(i64::MAX);
    let Some(found) = search_prime(context, &SEARCH, constraints, &known, target, control)? else {
        return Ok(None);
    };
    let mut solution = found.answer.solution(&found.problem)?;
    (solution.prime_bound, solution.lower_bound) = (found.bound, Some(found.bound));
    Ok(Some(solution))
}

/// The note on a recipe that is the answer.
fn note(recipe: &PricedRecipe<'_>) -> String {
    let (name, axes) = (recipe.recipe.name(), recipe.context.search_mesh.describe());
    format!("the search found nothing cheaper than {name} on {axes}")
}

/// Searches the untied problem with three quarters of the time. If nothing is proved by then, the tied problem gets the rest:
/// it is smaller, and its answers are untied ones too.
fn untied_or_tied<'a>(
    planner: &Planner<'a>,
    problem: &SearchProblem<'a>,
    constraints: &Constraints,
    control: &Control<'_>,
) -> Result<NetworkAnswer, StrategyError> {
    let found = SEARCH.run(problem, constraints, &control.all_but(4));
    let proved = match &found {
        Ok(found) => control.is_near(found.objective, found.bound),
        Err(error) => !matches!(error, PlanError::NoPlan { .. } | PlanError::NotFound { .. }),
    };
    if proved {
        return Ok(found?);
    }
    let tied = match planner.tied_problem(control) {
        Ok(tied) if tied.context.mesh().axes() == problem.context.mesh().axes() => tied,
        _ => return Ok(found?),
    };
    Ok(match (found, SEARCH.run(&tied, constraints, control)) {
        (Ok(found), Ok(tied)) if tied.objective < found.objective => {
            NetworkAnswer { assignment: tied.assignment, objective: tied.objective, ..found }
        }
        (Err(_), Ok(tied)) => NetworkAnswer { bound: 0, stop_reason: StopReason::Deadline, ..tied },
        (found, _) => found?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardwright_graph::Optimizer;
    use shardwright_machine::builtin;
    use shardwright_zoo::{BuildOptions, build};

    #[test]
    fn where_nothing_is_proved_in_time_the_tied_plan_is_a_fallback() {
        // No round of search at all: only what reductions alone solve is found.
        let (free, at_once) = (Constraints::default(), Control::new().iteration_limit(0));
        let options =
            BuildOptions { batch: Some(32), optimizer: Optimizer::adam(1e-3), ..BuildOptions::default() };
        let mut fallbacks = 0;
        for model in [
            "mlp:batch=32,hidden=256,layers=3",
            "gpt:layers=1,hidden=64,heads=4,seq=16,vocab=256",
            "vgg16",
            "lenet5",
        ] {
            let (graph, machine) = (build(model, &options).unwrap(), builtin("flat:4").unwrap());
            let planner = Planner::new(&graph, &machine, None, true);
            let found = Exact.solve(&planner, &free, &at_once).unwrap();
            let recipes = planner.recipes(&free, &at_once).unwrap();
            assert!(recipes.iter().all(|recipe| found.objective() <= recipe.costs.objective()), "{model}");
            assert!(found.lower_bound.unwrap() <= found.objective(), "{model}");
            let (untied, tied) =
                (planner.problem(&at_once).unwrap(), planner.tied_problem(&at_once).unwrap());
            let alone = SEARCH.run(untied, &free, &at_once);
            if let (Err(_), Ok(layers)) = (alone, SEARCH.run(&tied, &free, &at_once)) {
                // Nothing is known about ops that choose for themselves, so nothing is claimed.
                assert!(found.objective() <= layers.objective, "{model}");
                assert!(!found.proved_optimal(), "{model}");
                fallbacks += 1;
            }
        }
        assert!(fallbacks > 0, "the search never needed the tied plan");
    }

    #[test]
    fn a_search_that_is_stopped_before_it_begins_returns_the_cheapest_recipe() {
        let graph = build("mlp:batch=64,hidden=256,layers=3", &BuildOptions::default()).unwrap();
        let machine = builtin("flat:4").unwrap();
        let cancel = std::sync::atomic::AtomicBool::new(true);
        let stopped = Control { cancel: Some(&cancel), ..Control::new() };
        let planner = Planner::new(&graph, &machine, None, false);
        let found = Exact.solve(&planner, &Constraints::default(), &stopped).unwrap();
        assert_eq!((found.stop_reason.clone(), found.lower_bound), (StopReason::Cancelled, Some(0)));
        let recipes = planner.recipes(&Constraints::default(), &stopped).unwrap();
        let tied = recipes.iter().filter(|own| !own.recipe.needs_untied());
        assert_eq!(tied.map(|own| own.costs.objective()).min(), Some(found.objective()));
        assert!(recipes.iter().any(|own| own.step.is_some()), "every recipe is simulated once");
    }
}
