//! Writes a plan down: what was found, what it costs, and what there is to say about it.

use crate::{
    error::PlanError,
    evaluate::{Costs, axis_names, evaluate},
    floor::floor,
    plan::{
        BaselineCost, CoarseSpace, CostSource, FORMAT_VERSION, LevelTraffic, Optimised, Plan, PlanAxis,
        PlanLayer, PlanOp, SpaceUsed, StageTimes, StepTimes,
    },
    planner::{Found, baseline_costs},
    problem::Problem,
    recall::model_hash,
    refine::Refined,
    strategy::{Baseline, Space, Strategy},
};
use shardwright_cost::TimeSource;
use shardwright_graph::{FactorKind, OpId, Phase, factor_kinds};
use shardwright_machine::LevelId;
use shardwright_search::{Control, StopReason};
use std::collections::BTreeMap;

pub(crate) fn seconds(picoseconds: i64) -> f64 {
    picoseconds as f64 / 1e12
}

/// Describes a plan that was improved on finer axes.
pub(crate) fn describe_refined(
    problem: &Problem<'_>,
    strategy: &Strategy,
    coarse: &Found,
    refined: &Refined<'_>,
    control: &Control<'_>,
) -> Result<Plan, PlanError> {
    let mut plan = describe_found(&refined.problem, strategy, &refined.found, control)?;
    plan.warnings.push(format!(
        "refined: the best plan found on {} takes {:.3} ms, at most {:.2}% above the optimum there; of this one \
         it is proved only that no plan on any axes computes in less than lower_bound",
        problem.grain.describe(),
        seconds(coarse.objective) * 1e3,
        gap(coarse) * 100.0
    ));
    // The coarse space's bound does not hold here, where plans may well beat it.
    plan.lower_bound = floor(problem)?;
    plan.gap = gap(&Found { bound: plan.lower_bound, ..refined.found.clone() });
    plan.space.coarse = Some(CoarseSpace {
        axes: problem.grain.describe(),
        objective: coarse.objective,
        lower_bound: coarse.bound,
        gap: gap(coarse),
    });
    Ok(plan)
}

/// How far above the bound a plan may be, as a part of its cost.
fn gap(found: &Found) -> f64 {
    if found.objective > found.bound {
        (found.objective - found.bound) as f64 / found.objective as f64
    } else {
        0.0
    }
}

/// Describes what was found; `search_seconds` is left for the caller, who has a clock.
pub fn describe_found(
    problem: &Problem<'_>,
    strategy: &Strategy,
    found: &Found,
    control: &Control<'_>,
) -> Result<Plan, PlanError> {
    let costs = evaluate(problem, &found.configs)?;
    let baselines = baseline_costs(problem, control)?;
    Ok(describe(problem, strategy, control.seed, found, &costs, baselines))
}

fn describe(
    problem: &Problem<'_>,
    strategy: &Strategy,
    seed: u64,
    found: &Found,
    costs: &Costs,
    baselines: Vec<(&'static str, BaselineCost)>,
) -> Plan {
    let (mesh, machine, graph) = (problem.mesh(), problem.machine, problem.graph);
    let searched = strategy.solver.is_some();
    let proved = searched && found.objective <= found.bound;
    let ops = graph.op_ids().zip(&found.configs).map(|(id, config)| {
        let (node, rule) = (graph.node(id), &problem.shapes[id.index()].rule);
        PlanOp {
            name: node.name.clone(),
            kind: node.op.kind().to_string(),
            layer: graph.layers[node.layer.index()].name.clone(),
            config: config.show(rule, mesh),
            degrees: config.degrees(rule, mesh).into_iter().map(|(n, d)| (n.to_string(), d)).collect(),
            axes: axis_names(problem, id.index(), config),
        }
    });
    // How the first of each layer's weights is stored: as its update works.
    let mut stored: BTreeMap<OpId, String> = BTreeMap::new();
    for op in graph.op_ids().filter(|&op| graph.node(op).phase == Phase::Update) {
        let shown = || found.configs[op.index()].show(&problem.shapes[op.index()].rule, mesh);
        stored.entry(graph.layers[graph.node(op).layer.index()].forward).or_insert_with(shown);
    }
    let layers = graph.layers.iter().zip(&costs.layers).map(|(layer, cost)| {
        let op = layer.forward;
        PlanLayer {
            name: graph.node(op).name.clone(),
            weights: stored.get(&layer.forward).cloned(),
            config: found.configs[op.index()].show(&problem.shapes[op.index()].rule, mesh),
            compute_seconds: seconds(cost.compute),
            comm_seconds: seconds(cost.comm),
        }
    });
    let levels = machine.levels().iter().enumerate().map(|(at, level)| LevelTraffic {
        level: level.name.clone(),
        bytes: costs.traffic.level(mesh, LevelId(at as u32)).0,
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
            measured_device: problem.costs().map(|c| c.device.clone()),
            measured: costs.tally.total(TimeSource::Measured),
            interpolated: costs.tally.total(TimeSource::Interpolated),
            roofline: costs.tally.total(TimeSource::Roofline),
        },
        solver: strategy.name.to_string(),
        optimised: match strategy.space {
            Space::All | Space::Outputs => Optimised::Sum,
            Space::Tilings(_) => Optimised::Moves,
            Space::Whole => Optimised::Simulated,
            Space::Fixed(_) => Optimised::Nothing,
        },
        seed,
        space: SpaceUsed {
            description: format!("{} on {}", strategy.about, problem.grain.describe()),
            untied: problem.untied,
            prime_axes: problem.grain.prime,
            variables: problem.variables.splits.len(),
            choices: problem.choices.iter().map(|choices| choices.len()).sum(),
            coarse: None,
        },
        objective: found.objective,
        lower_bound: if searched { found.bound } else { 0 },
        gap: if searched { gap(found) } else { 1.0 },
        proved_optimal: proved,
        search_seconds: 0.0,
        planning_memory_bytes: None,
        stages: StageTimes::default(),
        simulated: StepTimes {
            step_seconds: seconds(found.objective),
            compute_seconds: seconds(costs.compute()),
            exposed_comm_seconds: seconds(costs.comm()),
        },
        peak_memory_bytes: costs.peak_memory.0,
        memory_limit_bytes: None,
        traffic_bytes: costs.traffic.total().0,
        traffic_per_level: levels.collect(),
        soybean: found.moved.clone(),
        placements: Vec::new(),
        baselines: baselines.into_iter().map(|(name, cost)| (name.to_string(), cost)).collect(),
        axes: mesh.axes().iter().map(|a| PlanAxis { name: a.name.clone(), size: a.size }).collect(),
        layers: layers.collect(),
        ops: ops.collect(),
        warnings: warnings(problem, found, costs, searched && !proved),
    }
}

/// What to say about a batch that the devices cannot share evenly.
fn odd_batch(problem: &Problem<'_>) -> Option<String> {
    let kinds = factor_kinds(problem.graph);
    let devices = u64::from(problem.machine.devices());
    let configs = Baseline::Data.configs(problem);
    let forward = problem.graph.layers.iter().map(|layer| layer.forward.index());
    forward
        .filter_map(|op| {
            let factor = kinds[op].iter().position(|&kind| kind == FactorKind::Sample)?;
            let rule = &problem.shapes[op].rule;
            Some((rule.factors[factor].size, configs[op].parts(rule, problem.mesh())[factor]))
        })
        .next()
        .filter(|&(_, parts)| parts < devices)
        .map(|(size, parts)| {
            format!(
                "a batch of {size} cannot be cut into {devices} equal parts: data parallelism splits it {parts} ways; \
                 a multiple of {devices} would use all devices"
            )
        })
}

/// What to say where no layer has work for all devices.
fn idle_devices(problem: &Problem<'_>) -> Option<String> {
    let (mesh, devices) = (problem.mesh(), u64::from(problem.machine.devices()));
    let most = problem.choices.iter().enumerate().flat_map(|(variable, choices)| {
        let rule = &problem.shapes[problem.variables.splits[variable].forward().index()].rule;
        (0..choices.len() as u32).map(move |choice| {
            problem.forward_config(variable, choice).parts(rule, mesh).iter().product::<u64>()
        })
    });
    most.max().filter(|&most| most < devices).map(|most| {
        format!(
            "no layer can be cut into {devices} equal parts: {most} is the most, so devices repeat each other's work; \
             fewer devices or larger sizes would not"
        )
    })
}

/// Why a search that was to prove its plan did not; nothing where the bound just is of another space.
fn why_unproved(reason: &StopReason) -> Option<String> {
    let why = match reason {
        StopReason::Optimal | StopReason::Enough => return None,
        StopReason::Infeasible => "no assignment keeps the limits of the search",
        StopReason::Deadline => "the time was up (--time)",
        StopReason::Cancelled => "the search was stopped",
        StopReason::IterationLimit => "the limit of iterations was reached",
        StopReason::Exhausted => "the solver had nothing left to try",
        StopReason::Refused(reason) => reason,
    };
    Some(format!("not proved optimal: {why}"))
}

fn warnings(problem: &Problem<'_>, found: &Found, costs: &Costs, unproved: bool) -> Vec<String> {
    let mut all = vec![
        "objective, bound and gap are of the cost model's sum: all ops and all communication one after the other, no overlap"
            .to_string(),
    ];
    if !problem.grain.prime {
        all.push(format!(
            "the machine's axes are glued to keep the search small: objective and bound hold for {}",
            problem.grain.describe()
        ));
    }
    all.extend(odd_batch(problem));
    all.extend(idle_devices(problem));
    let plain = problem.relayouts.settled_for_plain();
    if plain > 0 {
        all.push(format!(
            "{plain} re-layouts have too many ways to search: they are priced as if the tensor were made whole and cut \
             again, which works but may not be the fastest way"
        ));
    }
    if unproved {
        all.extend(why_unproved(&found.stop_reason));
    }
    let memory = problem.machine.slowest().memory.0;
    if costs.peak_memory.0 > memory {
        all.push(format!(
            "a device would hold {} bytes at once and has {memory}: the plan does not fit",
            costs.peak_memory.0
        ));
    }
    all
}
