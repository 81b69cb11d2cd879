//! Writes a solution down as a plan: the assignment, its price and simulated step, the baselines, and notes for people.

use crate::{
    Planner, PricedRecipe, Solution, Strategy,
    baselines::baseline,
    error::StrategyError,
    recipes::{DATA, RECIPES},
};
use shardwright_cost::TimeSource;
use shardwright_graph::{FactorIndex, FactorKind, Graph, OpId, Phase, factor_kinds};
use shardwright_lower::lower;
use shardwright_machine::{Bytes, LevelId, Mesh, show_bytes};
use shardwright_plan::{
    BaselineCost, Constraints, Context, CostSource, Costs, FORMAT_VERSION, LevelTraffic, OverlapBound,
    Parallelism, Plan, PlanAxis, PlanLayer, PlanOp, PlanPipeline, PlanStage, Recomputation, SearchSpace,
    StepTimes, Throughput, model_hash, padding_hint, step_lower_bound,
};
use shardwright_search::{Control, StopReason, gap};
use shardwright_sim::{SimulatedStep, simulate_bubble, simulate_step};
use shardwright_space::{Assignment, on_finer_axes};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A plan, and the assignment that it writes down.
#[derive(Clone, Debug)]
pub struct PlanAnswer {
    /// The plan.
    pub plan: Plan,
    /// Its assignment.
    pub assignment: Assignment,
    /// The mesh that the assignment is on.
    pub mesh: Mesh,
}

/// Runs a strategy and writes its answer down with simulated times. `search_seconds` is left for the caller, who has a clock.
///
/// # Errors
/// Where no plan is found, or it cannot be simulated.
pub fn plan(
    planner: &Planner<'_>,
    strategy: &dyn Strategy,
    constraints: &Constraints,
    control: &Control<'_>,
) -> Result<PlanAnswer, StrategyError> {
    let mut solution = strategy.solve(planner, constraints, control)?;
    let solved = control.elapsed();
    if solution.step.is_none() {
        match simulate_step(&solution.context, &solution.assignment).map_err(StrategyError::from) {
            Err(StrategyError::Size(error)) => solution.notes.push(format!(
                "step_seconds is the time without overlap, since the step was not simulated: {error}"
            )),
            step => solution.step = Some(step?),
        }
    }
    let priced = planner.recipes(constraints, control)?;
    let limit = constraints.memory.or_else(|| planner.machine().memory_limit());
    let (mut baselines, mut unsimulated) = (BTreeMap::new(), Vec::new());
    for own in RECIPES.iter().filter_map(|recipe| baseline(priced, recipe.name(), constraints)) {
        let is_answer = Arc::ptr_eq(&own.context, &solution.context) && own.assignment == solution.assignment;
        // Beside a simulated step, only simulated ones are comparable.
        let step = own.step.or(solution.step.filter(|_| is_answer));
        if step.is_some() || solution.step.is_none() {
            baselines.insert(
                own.recipe.name().to_string(),
                baseline_cost(own.context.graph, &own.costs, step, limit),
            );
        } else {
            unsimulated.push(own.recipe.name());
        }
    }
    if !unsimulated.is_empty() {
        solution.notes.push(format!("there was no time to simulate {}", unsimulated.join(", ")));
    }
    let mut plan = describe((strategy.name(), strategy.about()), &solution, control.seed);
    plan.pipeline = pipeline(&solution);
    if let (Some(own), Some(_)) = (&mut plan.pipeline, solution.step) {
        own.bubble = simulate_bubble(&solution.context, &solution.assignment)?;
    }
    plan.baselines = baselines;
    plan.parallelism.recipe =
        priced.iter().find(|own| is_same(own, &solution)).map(|own| own.recipe.name().into());
    plan.memory_limit_bytes = constraints.memory.map(|limit| limit.0);
    plan.gap_limit = control.gap;
    plan.fits = limit.is_none_or(|limit| plan.peak_memory_bytes <= limit.0);
    if let Some(step) = solution.step {
        let lower_bound = step_lower_bound(&solution.context, constraints.spmd)?;
        plan.overlap = Some(OverlapBound::of(step.makespan, lower_bound));
    }
    plan.throughput = Throughput::of(solution.context.graph, planner.machine(), plan.simulated.step_seconds);
    plan.stages.describe_seconds = control.elapsed().saturating_sub(solved).as_secs_f64();
    plan.stages = plan.stages.rounded();
    Ok(PlanAnswer { plan, mesh: solution.context.mesh().clone(), assignment: solution.assignment })
}

/// Whether a recipe is the solution's assignment, on the machine's prime axes.
fn is_same(recipe: &PricedRecipe<'_>, solution: &Solution<'_>) -> bool {
    let prime = solution.context.machine.mesh();
    let on_prime = |assignment, context: &Context<'_>| on_finer_axes(assignment, context.mesh(), prime);
    recipe.costs.peak_memory == solution.costs.peak_memory
        && on_prime(&recipe.assignment, &recipe.context) == on_prime(&solution.assignment, &solution.context)
}

fn seconds(picoseconds: i64) -> f64 {
    picoseconds as f64 / 1e12
}

/// What a baseline costs, with its simulated step if there is one.
pub(crate) fn baseline_cost(
    graph: &Graph,
    costs: &Costs,
    step: Option<SimulatedStep>,
    limit: Option<Bytes>,
) -> BaselineCost {
    let times = step.map(|step| step.times);
    BaselineCost {
        step_seconds: times.map_or(seconds(costs.objective()), |times| times.step_seconds),
        compute_seconds: times.map_or(seconds(costs.compute()), |times| times.compute_seconds),
        traffic_bytes: costs.traffic.total().0,
        peak_memory_bytes: costs.peak_memory.0,
        fits: limit.is_none_or(|limit| costs.peak_memory <= limit),
        objective: costs.objective(),
        micro_batches: graph.micro_batches.get(),
        recompute: recomputation(graph).policy,
    }
}

/// The plan of a solution by a strategy of this name, which does what is said about it; without its pipeline.
pub(crate) fn describe((name, about): (&str, &str), solution: &Solution<'_>, seed: u64) -> Plan {
    let Solution { context, assignment, costs, .. } = solution;
    let (mesh, machine, graph) = (context.mesh(), context.machine, context.graph);
    let objective = costs.objective();
    let show = |op: OpId| assignment.config(op).show(&context.shapes[op.index()].rule, mesh);
    let ops = graph.op_ids().map(|id| {
        let (node, rule) = (graph.node(id), &context.shapes[id.index()].rule);
        let degrees = assignment.config(id).degrees(rule, mesh);
        PlanOp {
            name: node.name.clone(),
            kind: node.op.kind().to_string(),
            layer: graph.layers[node.layer.index()].name.clone(),
            recomputes: node.recomputes.map(|op| graph.node(op).name.clone()),
            config: show(id),
            degrees: degrees.into_iter().map(|(name, degree)| (name.to_string(), degree)).collect(),
            axes: assignment.axis_names(id, rule),
        }
    });
    // How the first of each layer's weights is stored: as its update reads it.
    let mut stored: BTreeMap<OpId, String> = BTreeMap::new();
    for op in graph.op_ids().filter(|&op| graph.node(op).phase == Phase::Update) {
        stored.entry(graph.layers[graph.node(op).layer.index()].forward).or_insert_with(|| show(op));
    }
    let layers = graph.layers.iter().zip(&costs.layers).map(|(layer, cost)| PlanLayer {
        name: graph.node(layer.forward).name.clone(),
        weights: stored.get(&layer.forward).cloned(),
        config: show(layer.forward),
        compute_seconds: seconds(cost.compute),
        comm_seconds: seconds(cost.comm),
    });
    let levels = machine.levels().iter().enumerate().map(|(at, level)| LevelTraffic {
        level: level.name.clone(),
        bytes: costs.traffic.level(mesh, LevelId(at as u32)).0,
    });
    let simulated = solution.step.map(|step| step.times).unwrap_or(StepTimes {
        step_seconds: seconds(objective),
        compute_seconds: seconds(costs.compute()),
        exposed_comm_seconds: seconds(costs.comm()),
    });
    Plan {
        format_version: FORMAT_VERSION,
        shardwright_version: env!("CARGO_PKG_VERSION").to_string(),
        model: graph.name.clone(),
        request: None,
        model_hash: model_hash(graph),
        machine: machine.name().to_string(),
        machine_fingerprint: machine.fingerprint().to_string(),
        devices: machine.devices(),
        costs: CostSource {
            measured_device: context.costs().map(|c| c.device.clone()),
            measured: costs.sources.total(TimeSource::Measured),
            interpolated: costs.sources.total(TimeSource::Interpolated),
            roofline: costs.sources.total(TimeSource::Roofline),
        },
        solver: name.to_string(),
        optimised: solution.optimised,
        seed,
        space: SearchSpace {
            description: format!("{about} on {}", context.search_mesh.describe()),
            untied: context.untied,
            prime_axes: context.search_mesh.prime,
            variables: context.variables.members.len(),
            choices: solution.choices,
            coarse: solution.coarse.clone(),
        },
        objective,
        lower_bound: solution.lower_bound.unwrap_or(0),
        gap: solution.lower_bound.and_then(|bound| gap(objective, bound)),
        gap_limit: 0.0,
        proved_optimal: solution.coarse.is_none() && solution.proved_optimal(),
        overlap: None,
        search_seconds: 0.0,
        planning_memory_bytes: None,
        stages: solution.stages,
        simulated,
        peak_memory_bytes: costs.peak_memory.0,
        memory_limit_bytes: None,
        fits: true,
        throughput: Throughput::default(),
        summary: String::new(),
        parallelism: Parallelism::of(context, assignment, costs),
        traffic_bytes: costs.traffic.total().0,
        traffic_per_level: levels.collect(),
        micro_batches: graph.micro_batches.get(),
        recompute: recomputation(graph),
        pipeline: None,
        uniform: None,
        soybean: solution.moves.clone(),
        placements: solution.placements.clone(),
        baselines: BTreeMap::new(),
        axes: mesh.axes().iter().map(|a| PlanAxis { name: a.name.clone(), size: a.size }).collect(),
        layers: layers.collect(),
        ops: ops.collect(),
        warnings: warnings(solution),
        search_notes: search_notes(solution),
    }
}

/// The most that a device of every group holds; nothing where the program cannot be made.
pub(crate) fn peak_by_group(context: &Context<'_>, assignment: &Assignment) -> BTreeMap<u32, u64> {
    let program = lower(context.graph, &context.resharder, assignment).ok();
    program.map_or_else(BTreeMap::new, |program| program.peak_by_group())
}

/// The pipeline as it is written down, without its bubble.
fn pipeline(solution: &Solution<'_>) -> Option<PlanPipeline> {
    let Solution { context, assignment, costs, .. } = solution;
    let pipeline = assignment.pipeline.as_ref()?;
    let (graph, mesh) = (context.graph, context.mesh());
    let groups = pipeline.groups(mesh);
    let peaks = peak_by_group(context, assignment);
    let stages = (0..pipeline.stage_count(mesh)).map(|stage| {
        let own = costs.layers.iter().zip(&pipeline.stages).filter(|(_, own)| **own == stage);
        let group = pipeline.schedule.place(groups, stage).0;
        PlanStage {
            layers: pipeline.layer_names(graph, stage).into_iter().map(String::from).collect(),
            group,
            devices: mesh.devices() / groups,
            seconds: seconds(own.map(|(cost, _)| cost.compute + cost.comm).sum()),
            peak_memory_bytes: peaks.get(&group).copied().unwrap_or(0),
        }
    });
    Some(PlanPipeline {
        schedule: pipeline.schedule.name().to_string(),
        chunks: pipeline.schedule.chunks(),
        axes: pipeline.axes.iter().map(|axis| mesh.axis(axis).name.clone()).collect(),
        stages: stages.collect(),
        bubble: 0.0,
    })
}

/// The ops that a step recomputes. The policy's name is known to those who chose it.
fn recomputation(graph: &Graph) -> Recomputation {
    let mut originals: Vec<OpId> = graph.ops.iter().filter_map(|node| node.recomputes).collect();
    originals.sort_unstable();
    match originals.is_empty() {
        true => Recomputation::default(),
        false => Recomputation {
            policy: "ops".into(),
            ops: originals.into_iter().map(|op| graph.node(op).name.clone()).collect(),
        },
    }
}

/// The note on a batch that the devices cannot share equally.
fn odd_batch(context: &Context<'_>) -> Option<String> {
    let kinds = factor_kinds(context.graph);
    let devices = u64::from(context.machine.devices());
    let data = DATA.assignment(context);
    let forward = context.graph.layers.iter().map(|layer| layer.forward.index());
    forward
        .filter_map(|op| {
            let factor = kinds[op].iter().position(|&kind| kind == FactorKind::Sample)?;
            let rule = &context.shapes[op].rule;
            Some((rule.factors[factor].size, data.configs[op].parts(rule, context.mesh())[factor]))
        })
        .next()
        .filter(|&(_, parts)| parts < devices)
        .map(|(size, parts)| {
            let what = if context.graph.micro_batches.get() > 1 { "micro-batch" } else { "batch" };
            format!(
                "a {what} of {size} does not divide by {devices} devices: data parallelism splits it {parts} ways; a \
                 multiple of {devices} uses all devices"
            )
        })
}

/// The note on layers that cannot be split over all devices: every prime axis splits any factor that it still divides.
fn idle_devices(context: &Context<'_>) -> Option<String> {
    let (mesh, devices) = (context.machine.mesh(), u64::from(context.machine.devices()));
    let most_parts = |op: usize| {
        let rule = &context.shapes[op].rule;
        let mut parts = vec![1u64; rule.factors.len()];
        for axis in mesh.axes() {
            let mut factors = 0..parts.len();
            if let Some(f) = factors.find(|&f| rule.divides(f as FactorIndex, parts[f], axis.size)) {
                parts[f] *= u64::from(axis.size);
            }
        }
        parts.iter().product::<u64>()
    };
    let most = context.graph.layers.iter().map(|layer| most_parts(layer.forward.index())).max();
    most.filter(|&most| most < devices).map(|most| {
        format!(
            "no layer can be split into {devices} equal parts, {most} at most: devices replicate work; plan for fewer \
             devices or larger sizes"
        )
    })
}

/// Why a search did not prove its answer; none where the bound is of another space.
fn why_unproved(reason: &StopReason) -> Option<String> {
    let why = match reason {
        StopReason::Optimal => return None,
        StopReason::Enough => "the gap asked for was reached (--gap)",
        StopReason::Infeasible => "no assignment keeps the memory limit",
        StopReason::Deadline => "the time limit was reached (--time)",
        StopReason::Cancelled => "the search was stopped",
        StopReason::IterationLimit => "the iteration limit was reached",
        StopReason::Exhausted => "the solver was exhausted",
        StopReason::Refused(reason) => reason,
    };
    Some(format!("not proved optimal: {why}"))
}

/// How the search came to its answer, and where its bounds hold.
fn search_notes(solution: &Solution<'_>) -> Vec<String> {
    let axes = &solution.context.search_mesh;
    let merged = (!axes.prime).then(|| {
        format!("merged axes keep the search small: objective and lower bound hold for {}", axes.describe())
    });
    merged.into_iter().chain(solution.search_notes.iter().cloned()).collect()
}

fn warnings(solution: &Solution<'_>) -> Vec<String> {
    let context = &*solution.context;
    let mut all = Vec::new();
    // Devices of a stage share the batch, not all devices.
    all.extend(odd_batch(context).filter(|_| solution.assignment.pipeline.is_none()));
    all.extend(padding_hint(context).ok().flatten());
    all.extend(idle_devices(context));
    let plain = context.resharder.fallback_count();
    if plain > 0 {
        all.push(format!(
            "{plain} reshards have too many paths to search: each is priced as a gather of the whole tensor and a slice, \
             which may not be the fastest path"
        ));
    }
    // A refinement ends without a proof of its own.
    let ended = solution.stop_reason == StopReason::Enough && solution.coarse.is_some();
    if solution.lower_bound.is_some() && !solution.proved_optimal() && !ended {
        all.extend(why_unproved(&solution.stop_reason));
    }
    let peak = solution.costs.peak_memory;
    if let Some(usable) = context.machine.memory_limit().filter(|&usable| peak > usable) {
        all.push(format!(
            "the plan does not fit: a device needs {} and {} are usable",
            show_bytes(peak.0),
            show_bytes(usable.0)
        ));
    }
    all.extend(solution.notes.iter().cloned());
    all
}
