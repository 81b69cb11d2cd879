//! Planning with the simulator: FlexFlow's search as a strategy beside the others, and `auto`, which polishes the proved
//! plan on the simulated step.
//!
//! The strategies of [`shardwright_plan`] minimise a sum in which nothing overlaps, and prove it. The simulator knows what
//! overlaps, and can prove nothing. So `auto` takes the proved plan, walks on from there on the simulated step, and
//! gives the proof up only for a gain that is worth it; the bound stays that of the sum.

use crate::{
    Limits, Links, Moves,
    error::SimError,
    mcmc::mcmc,
    moves::MOST_PINNED_AXES,
    placing::{self, PLACE, Placed},
    step::{Step, simulate_step},
};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use rayon::prelude::*;
use shardwright_machine::{AxisId, AxisSet, Mesh};
use shardwright_plan::{
    Demands, Found, Optimised, Plan, PlanError, Problem, StageTimes, describe_found, evaluate, floor, peak,
    strategy::{self, Baseline, STRATEGIES, Space, Strategy, baselines},
};
use shardwright_search::{Control, StopReason};
use shardwright_space::Config;

/// FlexFlow's search.
pub static MCMC: Strategy = Strategy {
    name: "mcmc",
    about: "FlexFlow: a random walk over all configs on the simulated step, from several plans",
    space: Space::All,
    solver: None,
};

/// A proof is given up for at least this part of the simulated step.
const LEAST_GAIN: f64 = 0.02;
/// Proposals of a chain of `mcmc`: as many for each choice of each variable, and the paper's number at most.
const PER_CHOICE: u64 = 50;
const MOST_PROPOSALS: u64 = 250_000;
/// The same for polishing.
const POLISH_PER_CHOICE: u64 = 1;
const MOST_POLISHING: u64 = 5_000;
/// The most devices that pins tell apart.
const MOST_APART: u64 = 8;
/// Random plans to start from.
const RANDOM_STARTS: usize = 2;

/// All strategies; the first is the default.
pub fn strategies() -> impl Iterator<Item = &'static Strategy> {
    // After those that search, before SoyBean's and the recipes.
    let split = STRATEGIES.iter().position(|s| s.solver.is_none()).unwrap_or(STRATEGIES.len());
    STRATEGIES[..split].iter().chain([&MCMC, &PLACE]).chain(&STRATEGIES[split..])
}

/// The strategy of a name.
///
/// # Errors
/// Where there is none.
pub fn find(name: &str) -> Result<&'static Strategy, PlanError> {
    strategies().find(|s| s.name == name).ok_or_else(|| PlanError::UnknownStrategy {
        name: name.chars().take(40).collect(),
        known: strategies().map(|s| s.name).collect::<Vec<_>>().join(", "),
    })
}

/// Runs a strategy on a problem's axes; only plans that keep the demands count.
///
/// # Errors
/// Where no plan is found, or it cannot be simulated.
pub fn search(
    problem: &Problem<'_>,
    strategy: &Strategy,
    demands: &Demands,
    control: &Control<'_>,
) -> Result<Found, SimError> {
    if strategy.name == MCMC.name {
        let proved =
            shardwright_plan::search(problem, strategy::find("exact")?, demands, &before_walk(control));
        return walk(problem, proved.map(|found| found.configs), demands, control);
    }
    if strategy.name == PLACE.name {
        return placing::place(problem, demands, control).map(|placed| placed.found);
    }
    let found = shardwright_plan::search(problem, strategy, demands, control)?;
    if strategy.name == "auto" {
        let better = match simulated(problem, &found.configs) {
            Err(SimError::Size(_)) => None,
            steps => polish(problem, &found.configs, &steps?, demands, control)?,
        };
        if let Some((_, configs)) = better {
            let objective = evaluate(problem, &configs)?.objective();
            return Ok(Found { configs, objective, ..found });
        }
    }
    Ok(found)
}

/// Runs a strategy and describes the result with its simulated times; `search_seconds` is left for the caller, who has a
/// clock.
///
/// # Errors
/// Where no plan is found, or it cannot be simulated.
pub fn plan(
    problem: &Problem<'_>,
    strategy: &Strategy,
    demands: &Demands,
    control: &Control<'_>,
) -> Result<Plan, SimError> {
    if strategy.name == MCMC.name {
        return walked(problem, strategy, demands, control);
    }
    let mut plan = if strategy.name == PLACE.name {
        let Placed { found, rows } = placing::place(problem, demands, control)?;
        let mut plan = describe_found(problem, strategy, &found, control)?;
        plan.memory_limit_bytes = demands.memory.map(|limit| limit.0);
        // Every layer on every device.
        plan.space.choices = plan.space.variables * problem.mesh().devices() as usize;
        plan.placements = rows;
        plan
    } else {
        shardwright_plan::plan(problem, strategy, demands, control)?
    };
    let planned = control.elapsed();
    let (finer, configs) = on_its_axes(problem, &plan)?;
    let problem = finer.as_ref().unwrap_or(problem);
    let mut steps = simulated(problem, &configs);
    if strategy.name == "auto"
        && let Ok(steps) = &mut steps
        && let Some((step, better)) = polish(problem, &configs, steps, demands, control)?
    {
        plan = revise(&plan, problem, strategy, &better, control)?;
        steps.plan = step;
    }
    note(&mut plan, steps)?;
    plan.stages.polish_seconds = control.elapsed().saturating_sub(planned).as_secs_f64();
    plan.stages = plan.stages.rounded();
    Ok(plan)
}

/// The plan of a walk that starts where `exact` ends, on the same axes.
fn walked(
    problem: &Problem<'_>,
    strategy: &Strategy,
    demands: &Demands,
    control: &Control<'_>,
) -> Result<Plan, SimError> {
    let (mut finer, mut stages) = (None, StageTimes::default());
    let proved =
        match shardwright_plan::plan(problem, strategy::find("exact")?, demands, &before_walk(control)) {
            Ok(plan) => {
                let configs;
                (finer, configs) = on_its_axes(problem, &plan)?;
                stages = plan.stages;
                Ok(configs)
            }
            Err(error) => Err(error),
        };
    let planned = control.elapsed();
    let problem = finer.as_ref().unwrap_or(problem);
    let found = walk(problem, proved, demands, control)?;
    let mut plan = describe_found(problem, strategy, &found, control)?;
    plan.optimised = Optimised::Simulated;
    plan.memory_limit_bytes = demands.memory.map(|limit| limit.0);
    note(&mut plan, simulated(problem, &found.configs))?;
    stages.polish_seconds = control.elapsed().saturating_sub(planned).as_secs_f64();
    plan.stages = stages.rounded();
    Ok(plan)
}

/// A plan's configs, and the problem on the plan's own axes where it was refined and has others.
fn on_its_axes<'a>(
    problem: &Problem<'a>,
    plan: &Plan,
) -> Result<(Option<Problem<'a>>, Vec<Config>), SimError> {
    let mesh = plan.mesh(problem.machine)?;
    let configs = plan.configs(problem.graph, &mesh)?;
    if mesh.axes() == problem.mesh().axes() {
        return Ok((None, configs));
    }
    let finer = Problem::bare(problem.graph, problem.machine, problem.costs(), mesh, problem.untied)?;
    Ok((Some(finer), configs))
}

/// The steps of a plan and of the baselines on its axes.
struct Steps {
    plan: Step,
    baselines: Vec<(&'static str, Step, Vec<Config>)>,
}

/// Simulates a plan and the baselines.
fn simulated(problem: &Problem<'_>, configs: &[Config]) -> Result<Steps, SimError> {
    let known = baselines(problem).filter_map(|strategy| match strategy.space {
        Space::Fixed(baseline) => Some((strategy.name, baseline)),
        _ => None,
    });
    let known: Vec<_> = known.collect();
    let baseline = |&(name, baseline): &(&'static str, Baseline)| {
        let configs = baseline.configs(problem);
        Ok((name, simulate_step(problem, &configs)?, configs))
    };
    let (plan, baselines) = rayon::join(
        || simulate_step(problem, configs),
        || known.par_iter().map(baseline).collect::<Result<Vec<_>, SimError>>(),
    );
    Ok(Steps { plan: plan?, baselines: baselines? })
}

/// Writes down what the simulator says of the plan and of the baselines, or that they are too large for it.
fn note(plan: &mut Plan, steps: Result<Steps, SimError>) -> Result<(), SimError> {
    let steps = match steps {
        Err(SimError::Size(error)) => {
            plan.warnings.push(format!("step_seconds is the cost model's sum, not simulated: {error}"));
            return Ok(());
        }
        steps => steps?,
    };
    plan.simulated = steps.plan.times;
    for (name, step, _) in &steps.baselines {
        if let Some(cost) = plan.baselines.get_mut(*name) {
            (cost.step_seconds, cost.compute_seconds) = (step.times.step_seconds, step.times.compute_seconds);
        }
    }
    Ok(())
}

/// The plan with other configs: the same space and bound, other costs.
fn revise(
    plan: &Plan,
    problem: &Problem<'_>,
    strategy: &Strategy,
    configs: &[Config],
    control: &Control<'_>,
) -> Result<Plan, SimError> {
    let found = Found {
        configs: configs.to_vec(),
        objective: evaluate(problem, configs)?.objective(),
        bound: plan.lower_bound,
        stop_reason: StopReason::Exhausted,
        moved: None,
    };
    let milliseconds = |picoseconds: i64| picoseconds as f64 / 1e9;
    let mut revised = describe_found(problem, strategy, &found, control)?;
    revised.optimised = Optimised::Simulated;
    revised.space = plan.space.clone();
    revised.stages = plan.stages;
    revised.memory_limit_bytes = plan.memory_limit_bytes;
    revised.warnings.clone_from(&plan.warnings);
    revised.warnings.push(format!(
        "polished: the sum's best plan takes {:.3} ms where nothing overlaps{}; this one takes {:.3} ms so, and less in \
         the simulated step, which is what was made small here",
        milliseconds(plan.objective),
        if plan.proved_optimal { ", which is proved optimal" } else { "" },
        milliseconds(found.objective)
    ));
    Ok(revised)
}

/// Variables that wishes are about.
fn fixed(problem: &Problem<'_>, demands: &Demands) -> Result<Vec<usize>, PlanError> {
    let mut fixed = Vec::new();
    for wish in &demands.wishes {
        fixed.extend(wish.ops(problem)?.into_iter().map(|op| problem.variables.part(op)));
    }
    Ok(fixed)
}

/// The baselines that keep the demands.
fn known(problem: &Problem<'_>, demands: &Demands, control: &Control<'_>) -> Vec<Vec<Config>> {
    let attempt =
        |strategy| shardwright_plan::search(problem, strategy, demands, control).ok().map(|f| f.configs);
    baselines(problem).filter_map(attempt).collect()
}

/// The plan whose step is simulated to be the shortest; the first of equals.
fn shortest(problem: &Problem<'_>, plans: Vec<Vec<Config>>) -> Result<Option<(Step, Vec<Config>)>, SimError> {
    let simulated = plans.into_par_iter().map(|configs| Ok((simulate_step(problem, &configs)?, configs)));
    let simulated: Vec<(Step, Vec<Config>)> = simulated.collect::<Result<_, SimError>>()?;
    Ok(simulated.into_iter().min_by_key(|(step, _)| step.makespan))
}

/// Looks for a plan whose simulated step is shorter than this one's by enough to be worth a proof, starting from it, among
/// its neighbours and the baselines; only among the baselines where the search has been stopped already.
fn polish(
    problem: &Problem<'_>,
    configs: &[Config],
    steps: &Steps,
    demands: &Demands,
    control: &Control<'_>,
) -> Result<Option<(Step, Vec<Config>)>, SimError> {
    // Nobody wants a plan slower than what everybody knows, proved or not.
    let allowed = known(problem, demands, control);
    let recipes = steps.baselines.iter().filter(|(_, _, configs)| allowed.contains(configs));
    let recipe = recipes.min_by_key(|(_, step, _)| step.makespan);
    let before = steps.plan.makespan;
    let least = match recipe {
        Some((_, step, _)) if step.makespan < before => step.makespan,
        _ => (before as f64 * (1.0 - LEAST_GAIN)) as u64,
    };
    let mut best = recipe.map(|(_, step, configs)| (*step, configs.clone()));
    if control.stop(0).is_none() {
        best = walk_on(problem, configs, least, best, demands, control)?;
    }
    Ok(best.filter(|(step, _)| step.makespan <= least))
}

/// The best of `best` and of what walks from the plan come to, where they may reach a step of `least`; on a small machine they go
/// on with pins.
fn walk_on(
    problem: &Problem<'_>,
    configs: &[Config],
    least: u64,
    best: Option<(Step, Vec<Config>)>,
    demands: &Demands,
    control: &Control<'_>,
) -> Result<Option<(Step, Vec<Config>)>, SimError> {
    // No walk shortens a step below the computing that every plan has to do; and where nothing overlaps, steps are as long
    // as the sum that has been searched already.
    let hopeless = Links::of(problem.machine) == Links::Core
        || u64::try_from(floor(problem)?).is_ok_and(|floor| floor > least);
    // Layers side by side, on parts of a small machine. No floor is known here: what is split badly may be placed well.
    let small = told_apart(problem.mesh()).0 == problem.mesh().all();
    if hopeless && !small {
        return Ok(best);
    }
    let moves = Moves::new(problem, configs);
    let limits = Limits {
        proposals: (POLISH_PER_CHOICE * moves.total() as u64).min(MOST_POLISHING),
        memory: demands.memory,
        fixed: fixed(problem, demands)?,
        ..Limits::default()
    };
    let starts = if hopeless { Vec::new() } else { vec![configs.to_vec()] };
    let chains = match mcmc(problem, &moves, &starts, &limits, control) {
        Ok(chains) => chains.into_iter().map(|chain| chain.configs).collect(),
        // A machine that delta simulation does not know: the baselines are left.
        Err(_) => Vec::new(),
    };
    let mut best = shortest(problem, chains)?.into_iter().chain(best).min_by_key(|(step, _)| step.makespan);
    if small {
        let so_far = best.as_ref().map_or(configs, |(_, configs)| configs);
        let placed = placed(problem, moves, so_far, limits, demands, control);
        best = shortest(problem, placed)?.into_iter().chain(best).min_by_key(|(step, _)| step.makespan);
    }
    Ok(best)
}

/// A plan with a random choice of every variable.
fn random_plan(problem: &Problem<'_>, moves: &Moves<'_>, seed: u64) -> Vec<Config> {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut configs = vec![Config::replicated(problem.mesh().len()); problem.graph.ops.len()];
    for variable in 0..problem.variables.splits.len() {
        let choice = random.random_range(0..moves.count(variable).max(1));
        for (op, config) in moves.ops(variable).iter().zip(moves.configs(variable, choice)) {
            configs[op.index()] = config.clone();
        }
    }
    configs
}

/// The innermost axes that pins are tried along, and how many devices differ then: all of a small machine, a few devices of a
/// large one.
fn told_apart(mesh: &Mesh) -> (AxisSet, u64) {
    let (mut apart, mut lanes) = (AxisSet::EMPTY, 1);
    if mesh.len() > MOST_PINNED_AXES {
        return (apart, lanes);
    }
    for (at, axis) in mesh.axes().iter().enumerate().rev() {
        if lanes * u64::from(axis.size) > MOST_APART {
            break;
        }
        apart = apart.with(AxisId(at as u32));
        lanes *= u64::from(axis.size);
    }
    (apart, lanes)
}

/// Whether a plan keeps to the memory.
fn fits(problem: &Problem<'_>, demands: &Demands, configs: &[Config]) -> bool {
    demands.memory.is_none_or(|limit| peak(problem, configs) <= limit)
}

/// Walks on with pins, from the best plan without and from whole layers on devices, to be split from there. Pins make devices
/// differ, which takes as much longer to simulate as there are different ones.
fn placed(
    problem: &Problem<'_>,
    moves: Moves<'_>,
    best: &[Config],
    mut limits: Limits,
    demands: &Demands,
    control: &Control<'_>,
) -> Vec<Vec<Config>> {
    let (apart, lanes) = told_apart(problem.mesh());
    if demands.spmd || lanes == 1 {
        return Vec::new();
    }
    let mut starts = vec![best.to_vec()];
    if apart == problem.mesh().all() && limits.fixed.is_empty() {
        let whole = placing::start(problem, demands).ok();
        starts.extend(whole.filter(|configs| fits(problem, demands, configs)));
    }
    limits.pins = apart;
    limits.proposals /= lanes;
    match mcmc(problem, &moves.with_pins(apart), &starts, &limits, control) {
        Ok(chains) => chains.into_iter().map(|chain| chain.configs).collect(),
        // More levels than delta simulation tells apart.
        Err(_) => starts,
    }
}

/// What `exact` may do before a walk: proposals are the walk's, and some time must be left for it.
fn before_walk<'a>(control: &Control<'a>) -> Control<'a> {
    Control { iterations: None, ..control.all_but(4) }
}

/// FlexFlow's search: from the proved plan, if there is one, the baselines, and random plans. Never worse in the simulated
/// step than any of those.
fn walk(
    problem: &Problem<'_>,
    proved: Result<Vec<Config>, PlanError>,
    demands: &Demands,
    control: &Control<'_>,
) -> Result<Found, SimError> {
    let mut starts = known(problem, demands, control);
    match proved {
        Ok(configs) => starts.insert(0, configs),
        Err(error) if starts.is_empty() => return Err(error.into()),
        Err(_) => {}
    }
    let moves = Moves::new(problem, &starts[0]);
    let fixed = fixed(problem, demands)?;
    let random =
        (0..RANDOM_STARTS as u64).map(|n| random_plan(problem, &moves, control.seed.wrapping_add(n)));
    starts.extend(random.filter(|configs| fixed.is_empty() && fits(problem, demands, configs)));
    let mut distinct: Vec<Vec<Config>> = Vec::new();
    for start in starts {
        if !distinct.contains(&start) {
            distinct.push(start);
        }
    }
    let most = (PER_CHOICE * moves.total() as u64).min(MOST_PROPOSALS);
    let proposals = control.iterations.unwrap_or(most);
    let limits = Limits { proposals, memory: demands.memory, fixed, ..Limits::default() };
    let reserve = control.remaining().unwrap_or_default() / 4;
    let most_time = Control {
        deadline: control.deadline.map(|deadline| deadline.checked_sub(reserve).unwrap_or(deadline)),
        ..control.clone()
    };
    let chains = mcmc(problem, &moves, &distinct, &limits, &most_time)?;
    let mut plans: Vec<Vec<Config>> = chains.into_iter().map(|chain| chain.configs).collect();
    if let Some(best) = plans.first() {
        let found = placed(problem, moves, best, limits, demands, control);
        plans.extend(found);
    }
    let stopped = Control { iterations: None, ..control.clone() }.stop(0);
    plans.extend(distinct);
    let Some((_, configs)) = shortest(problem, plans)? else {
        let reason = "there is nothing to start from".to_string();
        return Err(PlanError::NoPlan { solver: MCMC.name.into(), reason }.into());
    };
    let objective = evaluate(problem, &configs)?.objective();
    let stop_reason = stopped.unwrap_or(StopReason::Exhausted);
    Ok(Found { configs, objective, bound: 0, stop_reason, moved: None })
}
