//! Recomputation op by op (`--recompute-policy ops`): beside the policies for whole blocks, every forward op is kept or
//! recomputed, as the memory limit allows.
//!
//! 1. The variants with policies are planned ([`crate::variant_race`]); the best is the first answer.
//! 2. Layers choose configs and keep states together, in one network, where that is small enough
//!    ([`shardwright_plan::keep_network`]). Its bound holds for all sets of recomputed ops.
//! 3. With the configs of the first answer, or of a recipe where there is none, the cheapest set within the limit is searched
//!    ([`crate::keep_search`]). In models of more than [`MOST_ALONE`] forward ops, ops at one position of equal blocks are
//!    chosen together.
//! 4. The strategy plans the step with that set, so that configs follow it.
//!
//! The answer is the plan with the shortest simulated step. Each value is recomputed at most once.

use crate::{
    Planner, Strategy,
    describe::{PlanAnswer, plan},
    error::StrategyError,
    keep_search::cheapest_set,
    known_plan::Given,
    variant_baselines::better_baselines,
    variant_race::{VariantAnswer, VariantError, lower_bounds, plan_variants},
    variants::{Variant, VariantGraph, VariantInputs},
};
use shardwright_graph::{Graph, OpId, RecomputePolicy, block_positions, remat};
use shardwright_machine::{Bytes, Mesh};
use shardwright_plan::{
    Candidates, Constraints, Context, KeepPricer, KeepSpace, PlanError, SearchProblem, keep_network, peak,
    step_lower_bound,
};
use shardwright_search::{Control, Solver, exact::Exact};
use shardwright_space::{Assignment, Config};
use std::borrow::Cow;
use std::num::NonZeroU32;

/// The most forward ops that each choose for themselves.
pub(crate) const MOST_ALONE: usize = 256;
/// Searches with a tighter limit, where the program holds more than the network counts.
const TIGHTER_LIMITS: usize = 6;
/// Recipes whose configs are tried where no policy fits.
const RECIPES_TRIED: usize = 3;

/// Configs and recomputed ops that keep the limit.
struct OpsAnswer {
    recomputed: Vec<OpId>,
    mesh: Mesh,
    /// On the graph with clones.
    assignment: Assignment,
    objective: i64,
}

/// Plans the variants, then chooses recomputed ops one by one.
///
/// # Errors
/// As [`plan_variants`].
pub(crate) fn plan_ops<'g>(
    base: &'g Graph,
    variants: &[Variant],
    inputs: VariantInputs<'_>,
    strategy: &dyn Strategy,
    constraints: &Constraints,
    control: &Control<'_>,
) -> Result<VariantAnswer<'g>, VariantError<'g>> {
    let blocks = plan_variants(base, variants, inputs, strategy, constraints, &control.share(2));
    // Without a limit, keeping everything is fastest.
    let Some(limit) = constraints.memory else { return blocks };
    let mut counts: Vec<NonZeroU32> = variants.iter().map(|variant| variant.micro_batches).collect();
    counts.sort_unstable();
    counts.dedup();
    let chosen = match &blocks {
        Ok(found) => found.step.variant,
        Err(VariantError { step: Some(step), error: StrategyError::Plan(error) })
            if error.is_without_answer() =>
        {
            step.variant
        }
        Err(_) => return blocks,
    };
    let mut best = blocks;
    let mut proved: Option<NetworkBound> = None;
    // Fewer micro-batches hold more, which recomputed ops may make up for.
    let at = counts.partition_point(|count| *count < chosen.micro_batches);
    for &micro_batches in counts[..=at.min(counts.len() - 1)].iter().rev().take(2) {
        let off = Variant { micro_batches, recompute: RecomputePolicy::Off, ..chosen };
        let Ok(step) = off.graph(base) else { continue };
        let search = OpsSearch { inputs, strategy, constraints, control, limit };
        let first = best.as_ref().ok();
        let (answer, bound) = search.step(&step, first)?;
        proved = bound.filter(|_| counts.len() == 1);
        let Some((mut answer, graph)) = answer else { continue };
        let shorter = |known: &VariantAnswer<'_>| {
            answer.plan.simulated.step_seconds < known.answer.plan.simulated.step_seconds
        };
        if best.as_ref().ok().is_none_or(shorter) {
            if let Ok(known) = &best {
                better_baselines(&mut answer.plan, known.answer.plan.baselines.clone());
            }
            let VariantGraph { statistics, .. } = step;
            let step = VariantGraph { variant: off, graph: Cow::Owned(graph), statistics, policy: "ops" };
            best = Ok(VariantAnswer { step, answer });
        }
    }
    // The bounds of policies do not hold for all sets of ops; computing that nothing repeats does.
    if let Ok(found) = &mut best {
        let mut computing = i64::MAX;
        for &micro_batches in &counts {
            let Ok(step) = (Variant { micro_batches, recompute: RecomputePolicy::Off, ..chosen }).graph(base)
            else {
                continue;
            };
            let context = inputs.planner(&step.graph).prime().map_err(StrategyError::from)?;
            computing =
                computing.min(step_lower_bound(&context, constraints.spmd).map_err(StrategyError::from)?);
        }
        let plan = &mut found.answer.plan;
        // A plan on other axes, or one below the bound, is outside of the searched space.
        let mesh = &found.answer.mesh;
        let inside = |known: &NetworkBound| {
            plan.space.coarse.is_none() && known.mesh == *mesh && known.bound <= plan.objective
        };
        match proved.filter(inside) {
            Some(NetworkBound { bound, .. }) => {
                plan.lower_bound = bound;
                plan.gap = shardwright_search::gap(plan.objective, bound);
                plan.proved_optimal = plan.objective <= bound;
            }
            None => lower_bounds(plan, computing, f64::INFINITY),
        }
        lower_bounds(plan, i64::MAX, computing as f64 / 1e12);
    }
    best
}

/// A lower bound on all configs per layer with all sets of recomputed ops, on a mesh.
struct NetworkBound {
    mesh: Mesh,
    bound: i64,
}

struct OpsSearch<'s> {
    inputs: VariantInputs<'s>,
    strategy: &'s dyn Strategy,
    constraints: &'s Constraints,
    control: &'s Control<'s>,
    limit: Bytes,
}

impl OpsSearch<'_> {
    /// The best plan of a step with some ops recomputed, with its graph; and a bound on all of them, if there is one.
    #[allow(clippy::type_complexity, reason = "one caller takes it apart at once")]
    fn step(
        &self,
        step: &VariantGraph<'_>,
        first: Option<&VariantAnswer<'_>>,
    ) -> Result<(Option<(PlanAnswer, Graph)>, Option<NetworkBound>), StrategyError> {
        let graph: &Graph = &step.graph;
        let planner = self.inputs.planner(graph);
        let space = KeepSpace::of(graph);
        let mut found: Vec<OpsAnswer> = Vec::new();
        let mut bound = None;
        if !self.inputs.untied
            && self.strategy.searches_within_memory()
            && self.constraints.configs.is_empty()
        {
            (found, bound) = self.joint(&planner, &space)?;
        }
        // A plan that keeps everything at once needs no other set for its configs.
        let kept = first.is_some_and(|own| {
            own.step.graph.ops.len() == graph.ops.len()
                && own.step.variant.micro_batches == graph.micro_batches
        });
        let configs = if kept { Vec::new() } else { self.configs(&planner, graph, first)? };
        for (mesh, assignment) in configs {
            found.extend(self.cheapest(&planner, &space, &mesh, &assignment)?);
        }
        let Some(best) = found.into_iter().min_by_key(|own| own.objective) else { return Ok((None, bound)) };
        let graph = with_clones(graph, &space, &best.recomputed)?;
        let planner = self.inputs.planner(&graph);
        let given = Given {
            strategy: self.strategy,
            mesh: &best.mesh,
            untied: self.inputs.untied,
            assignment: &best.assignment,
            note: None,
        };
        let mut answer = match plan(&planner, &given, self.constraints, self.control) {
            Err(StrategyError::Plan(error)) if error.is_without_answer() => return Ok((None, bound)),
            answer => answer?,
        };
        if !self.control.is_over()
            && let Ok(other) = plan(&planner, self.strategy, self.constraints, self.control)
            && other.plan.simulated.step_seconds < answer.plan.simulated.step_seconds
        {
            answer = other;
        }
        answer.plan.search_notes.push(format!(
            "recomputed ops were chosen {}; each value is recomputed at most once",
            if groups(planner.graph(), &space).iter().all(|group| group.len() == 1) {
                "one by one"
            } else {
                "by their position in equal blocks"
            }
        ));
        drop(planner);
        Ok((Some((answer, graph)), bound))
    }

    /// Configs and keep states in one network, and its bound.
    fn joint(
        &self,
        planner: &Planner<'_>,
        space: &KeepSpace,
    ) -> Result<(Vec<OpsAnswer>, Option<NetworkBound>), StrategyError> {
        let limits = self.control.share(2);
        let problem = match planner.problem(&limits) {
            Err(PlanError::Stopped(_)) => return Ok((Vec::new(), None)),
            problem => problem?,
        };
        let built = match keep_network(problem, space, Some(self.limit), &limits) {
            Err(PlanError::Stopped(_)) => None,
            built => built?,
        };
        let Some(built) = built else { return Ok((Vec::new(), None)) };
        let mut within = self.limit.0;
        let mut bound = None;
        let mut found = Vec::new();
        for _ in 0..TIGHTER_LIMITS {
            let network = built.network.with_usage_limit(Some(i64::try_from(within).unwrap_or(i64::MAX)));
            let outcome = Exact.solve(&network, &limits.share(2));
            // Kernels that an engine fuses differ with clones, so the network's prices bound nothing.
            if bound.is_none() && problem.context.engine().is_none() {
                bound = Some(NetworkBound { mesh: problem.context.mesh().clone(), bound: outcome.bound });
            }
            let Some(choice) = outcome.choice else { break };
            let solution = built.solution(&choice);
            let assignment = problem.assignment(&solution.choices);
            let mesh = problem.context.mesh().clone();
            match self.fit(planner, space, &mesh, &assignment, &solution.recomputed)? {
                Ok(answer) => {
                    found.push(answer);
                    break;
                }
                Err(held) => within = tighter(within, self.limit.0, held),
            }
            if limits.is_over() {
                break;
            }
        }
        Ok((found, bound))
    }

    /// Assignments of the step without clones, whose configs are tried: the first answer's, or those of recipes.
    fn configs(
        &self,
        planner: &Planner<'_>,
        graph: &Graph,
        first: Option<&VariantAnswer<'_>>,
    ) -> Result<Vec<(Mesh, Assignment)>, StrategyError> {
        if let Some(VariantAnswer { step, answer }) = first.filter(|own| !own.answer.assignment.has_pins()) {
            let own = step.graph.ops.iter().zip(&answer.assignment.configs);
            let kept: Vec<Config> =
                own.filter(|(node, _)| node.recomputes.is_none()).map(|(_, config)| config.clone()).collect();
            if kept.len() == graph.ops.len() {
                let assignment = Assignment::of(graph, kept);
                let context = planner.context(answer.mesh.clone(), true)?;
                if assignment.check(graph, &context.shapes, context.mesh()).is_ok() {
                    return Ok(vec![(answer.mesh.clone(), assignment)]);
                }
            }
        }
        // Recipes of the step that keeps everything: those with the least sum, and those that hold least.
        let free = Constraints { memory: None, ..self.constraints.clone() };
        let mut priced = planner.first_recipes(&free, self.control)?;
        priced.retain(|own| own.keeps(&free) && !own.assignment.has_pins());
        priced.sort_by_key(|own| own.costs.objective());
        let least = (0..priced.len()).min_by_key(|&at| priced[at].costs.peak_memory);
        let chosen = (0..priced.len()).filter(|at| *at < RECIPES_TRIED || Some(*at) == least);
        Ok(chosen.map(|at| (priced[at].context.mesh().clone(), priced[at].assignment.clone())).collect())
    }

    /// The cheapest set with given configs.
    fn cheapest(
        &self,
        planner: &Planner<'_>,
        space: &KeepSpace,
        mesh: &Mesh,
        assignment: &Assignment,
    ) -> Result<Option<OpsAnswer>, StrategyError> {
        let context = planner.context(mesh.clone(), true)?;
        let graph = context.graph;
        let configs = assignment.configs.iter().map(|config| vec![config.clone()]).collect();
        let candidates = Candidates { mesh: mesh.clone(), configs };
        let patient = Control { deadline: None, ..self.control.clone() };
        let problem = SearchProblem::among(&context, candidates, &patient)?;
        let Some(mut pricer) = KeepPricer::new(&problem, space)? else { return Ok(None) };
        let groups = groups(graph, space);
        let policies = RecomputePolicy::ALL.map(|policy| policy.ops(graph));
        let mut within = self.limit.0;
        for _ in 0..TIGHTER_LIMITS {
            let Some(found) = cheapest_set(&mut pricer, &groups, &policies, within, &self.control.share(3))
            else {
                return Ok(None);
            };
            match self.fit(planner, space, mesh, assignment, &found.recomputed)? {
                Ok(answer) => return Ok(Some(answer)),
                Err(held) => within = tighter(within, self.limit.0, held),
            }
        }
        Ok(None)
    }

    /// The answer of some configs and recomputed ops, or the bytes of its program where those exceed the limit.
    fn fit(
        &self,
        planner: &Planner<'_>,
        space: &KeepSpace,
        mesh: &Mesh,
        assignment: &Assignment,
        recomputed: &[OpId],
    ) -> Result<Result<OpsAnswer, u64>, StrategyError> {
        let graph = with_clones(planner.graph(), space, recomputed)?;
        let context = Context::new(&graph, planner.machine(), planner.costs(), mesh.clone(), true)?;
        let assignment = clones_follow(&graph, assignment);
        let held = peak(&context, &assignment);
        if held > self.limit {
            return Ok(Err(held.0));
        }
        let objective = context.layer_costs(&assignment, &Control::new())?.objective();
        Ok(Ok(OpsAnswer { recomputed: recomputed.to_vec(), mesh: mesh.clone(), assignment, objective }))
    }
}

/// A limit of the network that leaves room for what the program holds beside it.
fn tighter(within: u64, limit: u64, held: u64) -> u64 {
    let scaled = u128::from(within) * u128::from(limit) / u128::from(held.max(1));
    (scaled as u64).min(within.saturating_sub(1))
}

/// The ops that are chosen together.
fn groups(graph: &Graph, space: &KeepSpace) -> Vec<Vec<OpId>> {
    let free = space.recomputable();
    if free.len() <= MOST_ALONE {
        return free.into_iter().map(|op| vec![op]).collect();
    }
    let mut groups = block_positions(graph);
    for group in &mut groups {
        group.retain(|op| free.binary_search(op).is_ok());
    }
    groups.retain(|group| !group.is_empty());
    groups
}

fn with_clones(graph: &Graph, space: &KeepSpace, recomputed: &[OpId]) -> Result<Graph, StrategyError> {
    remat(graph, &space.with_views(recomputed)).map_err(|error| {
        PlanError::NoPlan { solver: "recomputation".into(), reason: error.to_string() }.into()
    })
}

/// The assignment of a graph with clones: each has its original's config.
fn clones_follow(graph: &Graph, assignment: &Assignment) -> Assignment {
    let mut own = assignment.configs.iter();
    let mut configs: Vec<Config> = Vec::with_capacity(graph.ops.len());
    for node in &graph.ops {
        let config = match node.recomputes {
            Some(original) => configs[original.index()].clone(),
            None => own.next().cloned().unwrap_or_else(|| configs[0].clone()),
        };
        configs.push(config);
    }
    Assignment::of(graph, configs)
}
