//! Planning: runs a strategy on a problem.

use crate::{
    describe::{describe_found, describe_refined, seconds},
    error::PlanError,
    evaluate::evaluate,
    leanest::{Leanest, leanest},
    memory::limited,
    plan::{BaselineCost, Plan, StageTimes},
    problem::Problem,
    refine::{Refinement, refine},
    smallest::smallest_limit,
    strategy::{Baseline, Space, Strategy, baselines, restrict},
    tilings::{Moved, moved, tile},
    wish::Wish,
};
use shardwright_machine::Bytes;
use shardwright_search::{Control, Network, Outcome, StopReason, registry};
use shardwright_soybean::Objective;
use shardwright_space::Config;

/// What a plan has to keep, whatever it costs.
#[derive(Clone, Debug, Default)]
pub struct Demands {
    /// The most that one device may hold at once.
    pub memory: Option<Bytes>,
    /// Configs that somebody wants.
    pub wishes: Vec<Wish>,
    /// Where whole layers are placed on devices: by how much one may have more than its share of the work.
    pub balance: Option<f64>,
    /// Every device runs every op, as engines of one program for all devices want it: no pins.
    pub spmd: bool,
}

/// What a strategy found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The config of every op, in the graph's order.
    pub configs: Vec<Config>,
    /// Its cost in picoseconds.
    pub objective: i64,
    /// No choice in the strategy's space costs less.
    pub bound: i64,
    /// Why the search stopped.
    pub stop_reason: StopReason,
    /// For SoyBean: what it moves by its own measure.
    pub moved: Option<Moved>,
}

fn cost(network: &Network, choices: &[u32]) -> Result<i64, PlanError> {
    let cost = network.evaluate(choices)?.cost;
    Ok(i64::try_from(cost).unwrap_or(i64::MAX))
}

/// Runs a strategy; only plans that keep the demands count.
///
/// # Errors
/// Where no plan is found: none fits the memory, a wish cannot be granted, or the solver gave up.
pub fn search(
    problem: &Problem<'_>,
    strategy: &Strategy,
    demands: &Demands,
    control: &Control<'_>,
) -> Result<Found, PlanError> {
    if strategy.name != "auto" {
        return attempt(problem, strategy, demands, control);
    }
    let mut best = if problem.untied {
        untied_or_tied(problem, strategy, demands, control)
    } else {
        attempt(problem, strategy, demands, control)
    };
    // A search that was cut short may hold something worse than what everybody knows.
    for baseline in baselines(problem) {
        let Ok(known) = attempt(problem, baseline, demands, control) else { continue };
        best = match best {
            Ok(found) if found.objective <= known.objective => Ok(found),
            Ok(found) => Ok(Found { bound: found.bound, stop_reason: found.stop_reason, ..known }),
            Err(PlanError::NoPlan { .. } | PlanError::DoesNotFit { .. }) => {
                let stop_reason = control.stop(0).unwrap_or(known.stop_reason.clone());
                Ok(Found { bound: 0, stop_reason, ..known })
            }
            Err(error) => Err(error),
        };
    }
    best
}

/// Searches with three quarters of the time; what is left goes, where nothing is proved by then, to the tied problem,
/// which is smaller and whose plans are untied ones too.
fn untied_or_tied(
    problem: &Problem<'_>,
    strategy: &Strategy,
    demands: &Demands,
    control: &Control<'_>,
) -> Result<Found, PlanError> {
    let found = attempt(problem, strategy, demands, &control.all_but(4));
    let proved = match &found {
        Ok(found) => found.objective <= found.bound,
        Err(error) => {
            !matches!(error, PlanError::NoPlan { .. } | PlanError::DoesNotFit { proved: false, .. })
        }
    };
    if proved {
        return found;
    }
    let tied = Problem::new(problem.graph, problem.machine, problem.costs())?;
    if tied.mesh().axes() != problem.mesh().axes() {
        return found;
    }
    match (found, attempt(&tied, strategy, demands, control)) {
        (Ok(found), Ok(tied)) if tied.objective < found.objective => {
            Ok(Found { configs: tied.configs, objective: tied.objective, ..found })
        }
        (Err(_), Ok(tied)) => Ok(Found { bound: 0, stop_reason: StopReason::Deadline, ..tied }),
        (found, _) => found,
    }
}

/// Runs a strategy without looking at any other.
pub(crate) fn attempt(
    problem: &Problem<'_>,
    strategy: &Strategy,
    demands: &Demands,
    control: &Control<'_>,
) -> Result<Found, PlanError> {
    match strategy.space {
        Space::Fixed(baseline) => given(problem, strategy, baseline.configs(problem), demands),
        Space::Tilings(objective) => {
            let (mut configs, mut least) = tile(problem, objective, control)?;
            if objective == Objective::Elements {
                // Each cut is the best one after those before it; a recipe can still be better at the end.
                for baseline in [Baseline::Data, Baseline::Model, Baseline::Owt] {
                    let known = baseline.configs(problem);
                    match moved(problem, &known, control) {
                        Ok(other) if other.total_elements < least.total_elements => {
                            // Its cuts are given, not found.
                            (configs, least) = (known, Moved { proved: false, ..other });
                        }
                        _ => {}
                    }
                }
            }
            Ok(Found { moved: Some(least), ..given(problem, strategy, configs, demands)? })
        }
        Space::All | Space::Outputs | Space::Whole => solve(problem, strategy, demands, control),
    }
}

/// What comes of configs that are not searched for in the network; wishes and memory are only checked.
fn given(
    problem: &Problem<'_>,
    strategy: &Strategy,
    configs: Vec<Config>,
    demands: &Demands,
) -> Result<Found, PlanError> {
    for wish in &demands.wishes {
        wish.check(problem, &configs)?;
    }
    let costs = evaluate(problem, &configs)?;
    if let Some(limit) = demands.memory.filter(|&limit| costs.peak_memory > limit) {
        return Err(PlanError::DoesNotFit {
            solver: strategy.name.to_string(),
            limit: limit.0,
            least: Some(costs.peak_memory.0),
            floor: costs.peak_memory.0,
            proved: true,
        });
    }
    let objective = costs.objective();
    Ok(Found { configs, objective, bound: objective, stop_reason: StopReason::Exhausted, moved: None })
}

fn solve(
    problem: &Problem<'_>,
    strategy: &Strategy,
    demands: &Demands,
    control: &Control<'_>,
) -> Result<Found, PlanError> {
    let failed = |reason: String| PlanError::NoPlan { solver: strategy.name.into(), reason };
    let known = strategy.solver.and_then(registry::find).zip(strategy.space.choices(problem));
    let Some((solver, mut allowed)) = known else { return Err(failed("it has no solver".into())) };
    for wish in &demands.wishes {
        wish.apply(problem, &mut allowed)?;
    }
    let limited = demands.memory.map(|limit| limited(problem, limit)).transpose()?;
    let network = limited.as_ref().unwrap_or(&problem.network);
    let part = match strategy.space {
        Space::All if demands.wishes.is_empty() => None,
        _ => Some(restrict(network, &allowed)?),
    };
    let network = part.as_ref().unwrap_or(network);
    // What the leanest plan holds tells at once of a limit that none can keep; and where the search finds nothing that
    // keeps the limit, the leanest plan may.
    let exact = strategy.solver == Some("exact");
    let lean = match demands.memory.filter(|_| exact) {
        Some(limit) => leanest(network, limit.0, &control.share(4))?,
        None => Leanest::default(),
    };
    let fits = lean.found.as_ref().is_some_and(|(peak, _)| demands.memory.is_some_and(|l| *peak <= l.0));
    let none_fits = demands.memory.is_some_and(|limit| lean.floor > limit.0);
    let outcome = match (fits, none_fits) {
        (true, _) => solver.solver().solve(network, control),
        (false, true) => Outcome::empty(StopReason::Infeasible),
        // Some time is kept to find out what would do.
        (false, false) => solver.solver().solve(network, &control.all_but(4)),
    };
    let unproved = outcome.choice.is_none() && fits;
    let fallback = lean.found.as_ref().filter(|_| unproved).map(|(_, choice)| choice.clone());
    if let Some(choice) = outcome.choice.or(fallback) {
        let chosen = choice.iter().zip(&allowed);
        let choices: Vec<u32> = chosen.map(|(&c, allowed)| allowed[c as usize]).collect();
        let objective = cost(&problem.network, &choices)?;
        let configs = problem.configs(&choices);
        return Ok(Found {
            configs,
            objective,
            bound: outcome.bound,
            stop_reason: outcome.stop_reason,
            moved: None,
        });
    }
    Err(match (outcome.stop_reason, demands.memory) {
        (StopReason::Refused(reason), _) => failed(reason),
        (reason, Some(limit)) => {
            let infeasible = reason == StopReason::Infeasible;
            let over = outcome.least_overflow.map(|(overflow, _)| overflow.unsigned_abs());
            let found = over.map(|overflow| (limit.0.saturating_add(overflow), Vec::new()));
            let lean = Leanest { found: lean.found.or(found), ..lean };
            let lean = if exact { smallest_limit(network, lean, &control.share(2))? } else { lean };
            let floor = if infeasible { lean.floor.max(limit.0.saturating_add(1)) } else { lean.floor };
            PlanError::DoesNotFit {
                solver: strategy.name.to_string(),
                limit: limit.0,
                least: lean.found.map(|(bytes, _)| bytes),
                floor,
                proved: floor > limit.0,
            }
        }
        (StopReason::Deadline, None) => {
            failed("the time ran out before it had any; give it more (--time)".into())
        }
        (other, None) => failed(format!("{other:?}")),
    })
}

/// Runs the baselines and evaluates them.
pub fn baseline_costs(
    problem: &Problem<'_>,
    control: &Control<'_>,
) -> Result<Vec<(&'static str, BaselineCost)>, PlanError> {
    baselines(problem)
        .map(|baseline| {
            let found = search(problem, baseline, &Demands::default(), control)?;
            let costs = evaluate(problem, &found.configs)?;
            let cost = BaselineCost {
                step_seconds: seconds(found.objective),
                compute_seconds: seconds(costs.compute()),
                traffic_bytes: costs.traffic.total().0,
                peak_memory_bytes: costs.peak_memory.0,
                objective: found.objective,
            };
            Ok((baseline.name, cost))
        })
        .collect()
}

/// Runs a strategy and describes the result; `search_seconds` is left for the caller. What lies between the start of
/// `control` and the call counts as building.
pub fn plan(
    problem: &Problem<'_>,
    strategy: &Strategy,
    demands: &Demands,
    control: &Control<'_>,
) -> Result<Plan, PlanError> {
    let mut stages = StageTimes { build_seconds: clock(control), ..StageTimes::default() };
    let found = search(problem, strategy, demands, control)?;
    stages.solve_seconds = clock(control) - stages.build_seconds;
    let Refinement { best, meshes, cut_short } = refine(problem, strategy, demands, &found, control);
    stages.refine_seconds = clock(control) - stages.build_seconds - stages.solve_seconds;
    let mut plan = match &best {
        Some(refined) => describe_refined(problem, strategy, &found, refined, control)?,
        None => describe_found(problem, strategy, &found, control)?,
    };
    plan.memory_limit_bytes = demands.memory.map(|limit| limit.0);
    if let Some(reason) = cut_short {
        plan.warnings.push(format!(
            "finer axes were not searched to the end ({reason:?}, {meshes} meshes searched): more time (--time) may \
             find a faster plan"
        ));
    }
    if !demands.wishes.is_empty() {
        let free = Demands { wishes: Vec::new(), ..demands.clone() };
        let without = search(problem, strategy, &free, control)?;
        plan.warnings.push(format!(
            "the wishes cost {:.3} ms per step: without them it would take {:.3} ms",
            seconds(found.objective - without.objective) * 1e3,
            seconds(without.objective) * 1e3
        ));
    }
    stages.describe_seconds =
        clock(control) - stages.build_seconds - stages.solve_seconds - stages.refine_seconds;
    plan.stages = stages.rounded();
    Ok(plan)
}

/// Seconds since the work began.
fn clock(control: &Control<'_>) -> f64 {
    control.elapsed().as_secs_f64()
}
