//! Solves a search problem with a solver of `shardwright-search`: the common part of `exact`, `optcnn`, `pase` and `auto`.

use crate::{
    Planner, Solution,
    error::StrategyError,
    memory_descent::{Peaked, descend},
    refine::{Refinement, refine},
};
use shardwright_graph::{FactorIndex, FactorKind, factor_kinds};
use shardwright_plan::{
    CoarseSpace, Constraints, MinMemory, Optimised, PatternBound, PlanError, SearchProblem,
    compute_lower_bound, is_on_prime_axes, limited, min_memory, pattern_bound, peak, tighten, why_stopped,
};
use shardwright_search::{Control, Network, NetworkBuilder, Outcome, Solver, StopReason, VarId, gap};
use shardwright_space::{Assignment, AxisUse};
use std::sync::Arc;

/// Most searches with a tighter limit of the network, where the program holds more than the network counts.
const TIGHTER_LIMITS: usize = 8;

/// The bound on prime axes may take one in so many parts of the time.
const PRIME_BOUND_SHARE: u32 = 4;

/// The choices that a strategy searches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// Every config.
    All,
    /// Configs that only split dimensions of the leading op's results, and the batch.
    Outputs,
}

/// A solver on a space.
pub struct NetworkSearch<'s> {
    /// The strategy's name, for messages.
    pub name: &'static str,
    /// The choices.
    pub space: Space,
    /// The solver.
    pub solver: &'s (dyn Solver + Sync),
    /// Whether the solver keeps memory limits. Then the least memory is searched for too, where a limit is tight.
    pub keeps_limits: bool,
}

/// The best assignment of a search, with its bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkAnswer {
    /// The assignment.
    pub assignment: Assignment,
    /// Its cost in picoseconds.
    pub objective: i64,
    /// No assignment in the space costs less.
    pub bound: i64,
    /// Why the search stopped.
    pub stop_reason: StopReason,
}

impl NetworkAnswer {
    /// The answer as a solution on the problem's mesh.
    pub fn solution<'a>(self, problem: &SearchProblem<'a>) -> Result<Solution<'a>, StrategyError> {
        let context = Arc::clone(&problem.context);
        let mut solution = Solution::new(context, self.assignment, Optimised::Sum)?;
        debug_assert_eq!(
            solution.objective(),
            self.objective,
            "the network's cost is the assignment's price"
        );
        solution.lower_bound = Some(self.bound);
        solution.stop_reason = self.stop_reason;
        solution.choices = problem.choices.iter().map(|choices| choices.len()).sum();
        Ok(solution)
    }
}

impl NetworkSearch<'_> {
    /// Searches the planner's problem, then finer axes.
    pub fn solve<'a>(
        &self,
        planner: &Planner<'a>,
        constraints: &Constraints,
        control: &Control<'_>,
    ) -> Result<Solution<'a>, StrategyError> {
        let run = |problem: &SearchProblem<'a>, constraints: &Constraints| {
            Ok(self.run(problem, constraints, control)?)
        };
        self.solve_with(planner, constraints, control, &run)
    }

    /// The same with another first search than [`NetworkSearch::run`].
    pub fn solve_with<'a>(
        &self,
        planner: &Planner<'a>,
        constraints: &Constraints,
        control: &Control<'_>,
        first: &FirstSearch<'_, 'a>,
    ) -> Result<Solution<'a>, StrategyError> {
        let clock = || control.elapsed().as_secs_f64();
        let problem = planner.problem(control)?;
        let build_seconds = clock();
        let answer = first(problem, constraints)?;
        let solve_seconds = clock() - build_seconds;
        let PatternBound { bound: prime_bound, candidates } =
            self.prime_bound(problem, constraints, &answer, control)?;
        let bound_seconds = clock() - build_seconds - solve_seconds;
        let Refinement { best, meshes, cut_short } =
            refine(problem, self, constraints, &answer, prime_bound, &candidates, control);
        let mut solution = match best {
            Some((finer, better)) => refined(problem, &answer, &finer, better, prime_bound)?,
            None => answer.clone().solution(problem)?,
        };
        solution.prime_bound = prime_bound;
        if solution.coarse.is_none() && prime_bound > 0 {
            solution = on_prime_axes(solution)?;
        }
        solution.stages.build_seconds = build_seconds;
        solution.stages.solve_seconds = solve_seconds;
        solution.stages.bound_seconds = bound_seconds;
        solution.stages.refine_seconds = clock() - build_seconds - solve_seconds - bound_seconds;
        if let Some(reason) = cut_short {
            let why = why_stopped(&reason);
            solution.search_notes.push(format!(
                "refinement on finer axes was cut short after {meshes} meshes ({why}): more time (--time) may find a faster plan"
            ));
        }
        if !constraints.configs.is_empty() {
            let free = Constraints { configs: Vec::new(), ..constraints.clone() };
            let free = first(problem, &free)?.objective;
            solution.notes.push(format!(
                "the constraints on configs cost {:.3} ms per step: without them the plan takes {:.3} ms",
                milliseconds(answer.objective - free),
                milliseconds(free)
            ));
        }
        Ok(solution)
    }

    /// A bound that holds on the machine's prime axes, where the problem is on merged ones; else nothing.
    fn prime_bound(
        &self,
        problem: &SearchProblem<'_>,
        constraints: &Constraints,
        answer: &NetworkAnswer,
        control: &Control<'_>,
    ) -> Result<PatternBound, PlanError> {
        let free = self.space == Space::All && constraints.configs.is_empty() && self.keeps_limits;
        if problem.context.search_mesh.prime || !free || control.stop(0).is_some() {
            return Ok(PatternBound { bound: 0, candidates: Vec::new() });
        }
        let control = control.share(PRIME_BOUND_SHARE);
        pattern_bound(&problem.context, answer.objective, constraints.memory, &control)
    }

    /// Searches; only assignments that keep the constraints count.
    ///
    /// A memory limit makes the search harder, and most answers keep it unasked. So a quarter of the time goes to a search
    /// without the limit: an answer that is the best there and keeps the limit is the best within it.
    ///
    /// # Errors
    /// Where none fits the memory, a constraint cannot be kept, or the solver gave up.
    pub fn run(
        &self,
        problem: &SearchProblem<'_>,
        constraints: &Constraints,
        control: &Control<'_>,
    ) -> Result<NetworkAnswer, PlanError> {
        let Some(limit) = constraints.memory.filter(|_| self.keeps_limits) else {
            return self.run_within(problem, constraints, control);
        };
        let free = Constraints { memory: None, ..constraints.clone() };
        let free = self.run_within(problem, &free, &control.share(4)).ok();
        let fits = |answer: &NetworkAnswer| peak(&problem.context, &answer.assignment) <= limit;
        let free = free.filter(fits);
        // The bound holds within the limit too.
        if let Some(best) = free.as_ref().filter(|answer| control.is_near(answer.objective, answer.bound)) {
            return Ok(best.clone());
        }
        let within = self.run_within(problem, constraints, control);
        match (free, within) {
            (Some(free), Ok(within)) if free.objective < within.objective => {
                Ok(NetworkAnswer { assignment: free.assignment, objective: free.objective, ..within })
            }
            (Some(free), Err(_)) => Ok(free),
            (_, within) => within,
        }
    }

    /// Searches on the network with the limits of memory.
    fn run_within(
        &self,
        problem: &SearchProblem<'_>,
        constraints: &Constraints,
        control: &Control<'_>,
    ) -> Result<NetworkAnswer, PlanError> {
        let mut allowed = self.space.choices(problem);
        for constraint in &constraints.configs {
            constraint.apply(problem, &mut allowed)?;
        }
        if let (Some(limit), Some(stop)) = (constraints.memory, control.stop_by_time()) {
            let (solver, limit) = (self.name.to_string(), limit.0);
            return Err(PlanError::NotFound { solver, limit, least: None, lower_bound: 0, stop });
        }
        let limited = constraints.memory.map(|limit| limited(problem, limit, control)).transpose()?;
        let network = limited.as_ref().unwrap_or(&problem.network);
        let part = match self.space {
            Space::All if constraints.configs.is_empty() => None,
            _ => Some(restrict(network, &allowed)?),
        };
        let network = part.as_ref().unwrap_or(network);
        let limit = constraints.memory.map(|limit| limit.0);
        let Some(limit) = limit else {
            let outcome = self.solver.solve(network, control);
            return match outcome.choice.clone() {
                Some(choice) => {
                    answer(problem, &restored(&choice, &allowed), outcome.bound, outcome.stop_reason)
                }
                None => Err(self.without_answer(outcome.stop_reason)),
            };
        };
        self.run_limited(problem, network, &allowed, limit, control)
    }

    /// Searches a network with a memory limit for an assignment whose program keeps the limit.
    fn run_limited(
        &self,
        problem: &SearchProblem<'_>,
        network: &Network,
        allowed: &[Vec<u32>],
        limit: u64,
        control: &Control<'_>,
    ) -> Result<NetworkAnswer, PlanError> {
        // The least memory shows at once whether any assignment keeps the limit in the network.
        let least = match self.keeps_limits {
            true => min_memory(network, limit, &control.share(4))?,
            false => MinMemory::default(),
        };
        let first = match least.lower_bound > limit {
            true => Outcome::empty(StopReason::Infeasible),
            false => self.solver.solve(network, &control.all_but(3)),
        };
        // The assignments that the network offers, by their memory in the program.
        let mut found: Option<Peaked> = None;
        let mut note = |choice: Option<&Vec<u32>>| {
            let Some(choices) = choice.map(|choice| restored(choice, allowed)) else { return u64::MAX };
            let held = peak(&problem.context, &problem.assignment(&choices)).0;
            if found.as_ref().is_none_or(|(least, _)| held < *least) {
                found = Some((held, choices));
            }
            held
        };
        // The program may hold more than the network counts. Then the network's limit leaves room for the difference.
        let (mut held, mut within) = (note(first.choice.as_ref()), limit);
        let rounds = if self.keeps_limits { TIGHTER_LIMITS } else { 0 };
        for _ in 0..rounds {
            if held <= limit
                || held == u64::MAX
                || control.stop(0).is_some_and(|r| r != StopReason::IterationLimit)
            {
                break;
            }
            let scaled = u128::from(within) * u128::from(limit) / u128::from(held);
            within = (scaled as u64).min(within.saturating_sub(1));
            let tighter = network.with_usage_limit(Some(i64::try_from(within).unwrap_or(i64::MAX)));
            held = note(self.solver.solve(&tighter, &control.share(3)).choice.as_ref());
        }
        let mut known = least;
        if held > limit {
            note(known.best.as_ref().map(|(_, choice)| choice));
            note(first.least_overflow.as_ref().map(|(_, choice)| choice));
            if self.keeps_limits && !matches!(first.stop_reason, StopReason::Refused(_)) {
                // The leanest assignment may still keep the limit.
                let leanest = min_memory(network, 0, &control.share(2))?;
                let lower_bound = known.lower_bound.max(leanest.lower_bound);
                known = tighten(network, MinMemory { lower_bound, ..leanest }, &control.share(2))?;
                note(known.best.as_ref().map(|(_, choice)| choice));
            }
        }
        if known.lower_bound <= limit && first.stop_reason != StopReason::Infeasible && self.keeps_limits {
            found = found.map(|found| descend(problem, allowed, found, limit, control));
        }
        match found {
            Some((held, choices)) if held <= limit => {
                answer(problem, &choices, first.bound, first.stop_reason)
            }
            found => {
                Err(self.over_limit(problem, first, limit, found.map(|(held, _)| held), known.lower_bound))
            }
        }
    }

    /// Why there is no answer where no memory limit is given.
    fn without_answer(&self, stop_reason: StopReason) -> PlanError {
        let reason = match stop_reason {
            StopReason::Refused(reason) => reason,
            StopReason::Deadline => "the time limit was reached first; allow more (--time)".into(),
            other => format!("{other:?}"),
        };
        PlanError::NoPlan { solver: self.name.into(), reason }
    }

    /// Why there is no answer that keeps a memory limit: whether that is proved of all assignments, and how much memory is needed.
    fn over_limit(
        &self,
        problem: &SearchProblem<'_>,
        outcome: Outcome,
        limit: u64,
        least: Option<u64>,
        lower_bound: u64,
    ) -> PlanError {
        let (solver, stop) = (self.name.to_string(), outcome.stop_reason);
        if matches!(stop, StopReason::Refused(_)) {
            return self.without_answer(stop);
        }
        if !self.keeps_limits {
            return match least {
                Some(needed) => PlanError::OverLimit { solver, limit, needed },
                None => self.without_answer(stop),
            };
        }
        let proved = if stop == StopReason::Infeasible { limit.saturating_add(1) } else { 0 };
        let lower_bound = lower_bound.max(proved);
        if lower_bound > limit {
            let per = if problem.context.untied { "op" } else { "layer; --untied chooses per op," };
            let space = format!("one config per {per} on {}", problem.context.search_mesh.describe());
            PlanError::DoesNotFit { solver, space, limit, least, lower_bound }
        } else {
            PlanError::NotFound { solver, limit, least, lower_bound, stop }
        }
    }
}

/// The problem's choices from those of a network with only the allowed ones.
fn restored(choice: &[u32], allowed: &[Vec<u32>]) -> Vec<u32> {
    choice.iter().zip(allowed).map(|(&c, allowed)| allowed[c as usize]).collect()
}

/// The answer of some choices.
fn answer(
    problem: &SearchProblem<'_>,
    choices: &[u32],
    bound: i64,
    stop_reason: StopReason,
) -> Result<NetworkAnswer, PlanError> {
    let cost = problem.network.evaluate(choices)?.cost;
    let objective = i64::try_from(cost).unwrap_or(i64::MAX);
    Ok(NetworkAnswer { assignment: problem.assignment(choices), objective, bound, stop_reason })
}

/// The first search of a strategy, before finer axes.
pub type FirstSearch<'f, 'a> =
    dyn Fn(&SearchProblem<'a>, &Constraints) -> Result<NetworkAnswer, StrategyError> + 'f;

/// An answer on finer axes as a solution. The bound of the coarse space does not hold there, where answers may be cheaper;
/// the bound on computing does.
fn refined<'a>(
    problem: &SearchProblem<'a>,
    coarse: &NetworkAnswer,
    finer: &SearchProblem<'a>,
    better: NetworkAnswer,
    prime_bound: i64,
) -> Result<Solution<'a>, StrategyError> {
    let mut solution = better.solution(finer)?;
    let computing = compute_lower_bound(&problem.context)?;
    let holds = is_on_prime_axes(&problem.context, finer.context.mesh(), &solution.assignment);
    let prime_bound = if holds { prime_bound } else { 0 };
    solution.lower_bound = Some(computing.max(prime_bound));
    let what = match prime_bound > computing {
        true => "holds on prime axes",
        false => "is the computing time that no plan on any axes avoids",
    };
    let axes = problem.context.search_mesh.describe();
    let gap = gap(coarse.objective, coarse.bound);
    solution.search_notes.push(format!(
        "refined from {axes}, where the best plan takes {:.3} ms{}; lower_bound {what}",
        milliseconds(coarse.objective),
        gap.map_or(String::new(), |gap| format!(" with a gap of {:.2}%", gap * 100.0))
    ));
    let (objective, lower_bound) = (coarse.objective, coarse.bound);
    solution.coarse = Some(CoarseSpace { axes, objective, lower_bound, gap });
    Ok(solution)
}

/// A solution on merged axes with the bound that holds on prime axes.
fn on_prime_axes(mut solution: Solution<'_>) -> Result<Solution<'_>, StrategyError> {
    let bound = solution.bound_on(&solution.context, &solution.assignment);
    let bound = bound.max(compute_lower_bound(&solution.context)?);
    let (objective, lower_bound) = (solution.objective(), solution.lower_bound.unwrap_or(0));
    let (axes, gap) = (solution.context.search_mesh.describe(), gap(objective, lower_bound));
    solution.coarse = Some(CoarseSpace { axes, objective, lower_bound, gap });
    solution.lower_bound = Some(bound);
    Ok(solution)
}

/// Milliseconds of picoseconds.
pub fn milliseconds(picoseconds: i64) -> f64 {
    picoseconds as f64 / 1e9
}

impl Space {
    /// Per variable: the choices that are searched, ascending.
    fn choices(self, problem: &SearchProblem<'_>) -> Vec<Vec<u32>> {
        let context = &*problem.context;
        let variables = 0..problem.choices.len();
        let all = |variable: usize| 0..problem.choices[variable].len() as u32;
        match self {
            Space::All => variables.map(|variable| all(variable).collect()).collect(),
            Space::Outputs => {
                let kinds = factor_kinds(context.graph);
                let output = |variable: usize, used: &AxisUse| {
                    let op = context.variables.members[variable].forward();
                    // OptCNN's layers all have the batch in their output. Ours are finer: statistics of a norm
                    // and losses sum over it, and are split along it as the paper's whole layer would be.
                    let splits = |f: FactorIndex| {
                        !context.shapes[op.index()].rule.is_reduction(f)
                            || kinds[op.index()][f as usize] == FactorKind::Sample
                    };
                    match used {
                        AxisUse::Split(f) => splits(*f),
                        AxisUse::Replicate | AxisUse::Pin(_) => true,
                    }
                };
                let fits = |variable: usize, c: u32| {
                    problem.forward_config(variable, c).uses().iter().all(|used| output(variable, used))
                };
                variables.map(|v| all(v).filter(|&c| fits(v, c)).collect()).collect()
            }
        }
    }
}

/// The network with only some choices of every variable; variables beyond those listed keep all of theirs.
fn restrict(network: &Network, allowed: &[Vec<u32>]) -> Result<Network, PlanError> {
    let mut builder = NetworkBuilder::new();
    let kept = |v: VarId| match allowed.get(v.index()) {
        Some(allowed) => allowed.clone(),
        None => (0..network.choices(v) as u32).collect(),
    };
    for v in (0..network.variables()).map(|v| VarId(v as u32)) {
        let pick = |from: &[i64]| kept(v).iter().map(|&c| from[c as usize]).collect::<Vec<i64>>();
        builder.variable(&pick(network.unary(v)), &pick(network.usage(v)), network.interval(v))?;
    }
    for edge in network.edges() {
        let (rows, columns) = (kept(edge.u), kept(edge.v));
        let cells = rows.iter().flat_map(|&a| columns.iter().map(move |&b| (a, b)));
        let table: Vec<i64> = cells.map(|(a, b)| network.pair(edge, a, b)).collect();
        builder.edge(edge.u, edge.v, &table)?;
    }
    if let Some(limit) = network.usage_limit() {
        builder.usage_limit(limit)?;
    }
    Ok(builder.build()?)
}
