//! Writes a priced uniform plan down: the whole step's assignment with its pipeline, and a plan.

use super::{
    degrees::{DegreeError, UniformPlan},
    pricer::{PricedUniform, StepGraph, UniformPricer, role_mesh},
    stage_mesh::AxisRole,
    uniform_configs::{UniformRules, uniform_assignment},
};
use crate::describe::{describe, peak_by_group};
use crate::{PlanAnswer, error::StrategyError, solution::Solution};
use shardwright_graph::Graph;
use shardwright_machine::Bytes;
use shardwright_plan::{
    Context, Costs, LayerCosts, Optimised, OverlapBound, PlanDegrees, PlanPipeline, PlanStage, StepTimes,
    Throughput, predicted_traffic,
};
use shardwright_search::Control;
use shardwright_sim::{SimulatedStep, simulate_bubble, simulate_step};
use shardwright_space::{Assignment, Pipeline};
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;

/// Ops, once per micro-batch, up to which the whole step is simulated: some seconds. Longer ones have the composed price that guides
/// the search.
const MOST_SIMULATED: usize = 5_000_000;
/// The same times stages, each of which has a timeline of its own. Some ops have several instructions: the simulator takes at most
/// [`shardwright_sim::MOST_TASKS`].
const MOST_ON_STAGES: usize = 20_000_000;

/// A uniform plan as a plan of the whole step.
pub struct UniformAnswer {
    /// The step in micro-batches, with the recomputed ops.
    pub graph: Graph,
    /// The plan and its assignment.
    pub answer: PlanAnswer,
}

/// Writes a priced plan down for a solver of this name. `limit` is the memory of a device.
///
/// # Errors
/// Where the step cannot be made, or its assignment not be priced.
pub fn write_down(
    pricer: &UniformPricer<'_>,
    priced: &PricedUniform,
    solver: (&str, &str),
    limit: Option<Bytes>,
    control: &Control<'_>,
) -> Result<UniformAnswer, StrategyError> {
    let plan = &priced.plan;
    let step = whole_graph(pricer, plan)?;
    let (context, assignment) = whole_step(pricer, priced, &step)?;
    let instructions = step.graph.ops.len().saturating_mul(plan.micro_batches as usize);
    let on_stages = instructions.saturating_mul(plan.pipeline as usize);
    let is_simulated = instructions <= MOST_SIMULATED && on_stages <= MOST_ON_STAGES;
    // Where devices compute nothing while they send, every send counts. The program sends whole tensors, and such engines a part
    // from each device of a tensor-parallel group (arXiv 2104.04473, section 4.1), as composed prices do.
    let parted = plan.pipeline > 1 && plan.tensor > 1 && !plan.sequence && !pricer.machine.slowest().overlap;
    // One plan takes seconds: a search that is out of time still ends with an answer.
    let patient = Control { deadline: None, cancel: None, ..control.clone() };
    let (costs, simulated, bubble) = match is_simulated {
        true => {
            let costs = context.price_within(&assignment, &patient)?;
            if parted {
                (costs, composed_step(priced), idle_share(priced))
            } else {
                let bubble = assignment.pipeline.as_ref().map(|_| simulate_bubble(&context, &assignment));
                (costs, simulate_step(&context, &assignment)?, bubble.transpose()?.unwrap_or(0.0))
            }
        }
        false => {
            let LayerCosts { layers, sources } = context.layer_costs(&assignment, &patient)?;
            let traffic = predicted_traffic(&context, &assignment)?;
            let costs = Costs { layers, traffic, peak_memory: Bytes(priced.price.peak_memory), sources };
            (costs, composed_step(priced), idle_share(priced))
        }
    };
    let (makespan, step_seconds) = (simulated.makespan, simulated.times.step_seconds);
    let context = Arc::new(context);
    let mut solution = Solution::priced(Arc::clone(&context), assignment, costs, Optimised::Nothing);
    solution.step = Some(simulated);
    if !is_simulated {
        solution.notes.push(format!(
            "step and memory are composed of segments of the model: the program of {instructions} ops is too long to be simulated as a whole"
        ));
    }
    if is_simulated && parted {
        solution.notes.push(
            "the step is composed of segments of the model: stages send parts of tensors, which the simulated program sends whole".into(),
        );
    }
    let mut written = describe(solver, &solution, control.seed);
    written.pipeline = pipeline(priced, &context, &solution.assignment, bubble);
    if let Some(own) = written.pipeline.as_mut().filter(|_| is_simulated) {
        // The plan's memory is that of the whole program, and so is that of its stages.
        let peaks = peak_by_group(&context, &solution.assignment);
        for stage in &mut own.stages {
            stage.peak_memory_bytes = peaks.get(&stage.group).copied().unwrap_or(stage.peak_memory_bytes);
        }
    }
    written.uniform = Some(degrees(priced));
    written.recompute.policy = plan.recompute.name().to_string();
    written.memory_limit_bytes = limit.map(|limit| limit.0);
    let usable = limit.or_else(|| pricer.machine.memory_limit());
    written.fits = usable.is_none_or(|usable| written.peak_memory_bytes <= usable.0);
    let bound = pricer.step_lower_bound()?;
    written.overlap = Some(OverlapBound::of(makespan, bound));
    written.throughput = Throughput::of(&step.graph, pricer.machine, step_seconds);
    let (answer_mesh, assignment) = (context.mesh().clone(), solution.assignment.clone());
    drop(solution);
    drop(context);
    Ok(UniformAnswer {
        answer: PlanAnswer { plan: written, assignment, mesh: answer_mesh },
        graph: step.graph,
    })
}

/// The whole step of a plan.
///
/// # Errors
/// Where the step cannot be divided, or ops cannot be recomputed.
pub(crate) fn whole_graph(pricer: &UniformPricer<'_>, plan: &UniformPlan) -> Result<StepGraph, DegreeError> {
    let count = NonZeroU32::new(plan.micro_batches).unwrap_or(NonZeroU32::MIN);
    let chain = &pricer.chain;
    let segments = (&chain.layer_segments[..], chain.segments.len());
    StepGraph::of(pricer.graph, segments, count, |graph| plan.recompute.ops(graph), pricer.engine())
        .map_err(|reason| DegreeError { reasons: vec![reason] })
}

/// The assignment of a plan on its whole step.
///
/// # Errors
/// Where the machine has no such groups of devices, or the costs are of another device.
pub(crate) fn whole_step<'g>(
    pricer: &UniformPricer<'g>,
    priced: &PricedUniform,
    step: &'g StepGraph,
) -> Result<(Context<'g>, Assignment), StrategyError> {
    let plan = &priced.plan;
    let mesh = role_mesh(pricer.machine, plan, plan.pipeline)?;
    let context = Context::new(&step.graph, pricer.machine, pricer.costs, mesh.mesh.clone(), true)?;
    let rules = UniformRules { zero: plan.zero, sequence: plan.sequence };
    let mut assignment = uniform_assignment(&context, &mesh, rules);
    if plan.pipeline > 1 {
        let axes = mesh.axes(|role| role == AxisRole::Stage);
        let stages = stage_segments(priced);
        let of_segment = |segment: u32| {
            let found = stages.iter().find(|(_, range)| range.contains(&(segment as usize)));
            found.map_or(0, |(stage, _)| *stage)
        };
        let pipeline =
            Pipeline::new(&step.graph, axes, plan.schedule, |layer| of_segment(step.segments[layer.index()]));
        for (config, stage) in assignment.configs.iter_mut().zip(pipeline.op_stages(&step.graph)) {
            pipeline.pin(context.mesh(), stage, config);
        }
        assignment.pipeline = Some(pipeline);
    }
    let assignment = assignment.without_impossible_sums(&step.graph, &context.shapes, context.mesh());
    Ok((context, assignment))
}

/// The segments of every stage along the layers.
fn stage_segments(priced: &PricedUniform) -> Vec<(u32, Range<usize>)> {
    let plan = &priced.plan;
    let mut stages = Vec::new();
    for (group, stage) in priced.price.stages.iter().enumerate() {
        for (chunk, range) in stage.segments.iter().enumerate() {
            let number = plan.schedule.stage(plan.pipeline, group as u32, chunk as u32);
            stages.push((number, range.clone()));
        }
    }
    stages.sort_by_key(|(number, _)| *number);
    stages
}

/// The step that stages and schedule give.
fn composed_step(priced: &PricedUniform) -> SimulatedStep {
    let (step_seconds, compute_seconds) = (priced.price.step_seconds, priced.price.compute_seconds);
    let times = StepTimes { step_seconds, compute_seconds, exposed_comm_seconds: exposed(priced) };
    SimulatedStep { makespan: (step_seconds * 1e12).round() as u64, times }
}

/// Communication of the busiest group while nothing computes.
fn exposed(priced: &PricedUniform) -> f64 {
    let busiest = priced.price.stages.iter().map(|stage| stage.busy).fold(0.0, f64::max);
    (busiest - priced.price.compute_seconds).max(0.0)
}

/// The share of the step in which a group works on no pass and no update, on average.
fn idle_share(priced: &PricedUniform) -> f64 {
    let busy: f64 = priced.price.stages.iter().map(|stage| stage.busy).sum();
    let all = priced.price.step_seconds * f64::from(priced.plan.pipeline);
    if all > 0.0 { (1.0 - busy / all).max(0.0) } else { 0.0 }
}

/// The degrees as trainers name them.
pub(crate) fn degrees(priced: &PricedUniform) -> PlanDegrees {
    let plan = &priced.plan;
    let blocks =
        |(group, chunk): (u32, u32)| priced.price.stages[group as usize].blocks[chunk as usize].len() as u32;
    let stages = 0..plan.pipeline * plan.schedule.chunks();
    PlanDegrees {
        tp: plan.tensor,
        pp: plan.pipeline,
        vp: plan.schedule.chunks(),
        cp: plan.context,
        ep: plan.expert,
        dp: plan.data,
        mbs: plan.micro_batch,
        zero: plan.zero.number(),
        sp: plan.sequence,
        recompute: plan.recompute.name().to_string(),
        schedule: plan.schedule.name().to_string(),
        blocks: stages.map(|stage| blocks(plan.schedule.place(plan.pipeline, stage))).collect(),
    }
}

/// The pipeline as it is written down; none without one.
fn pipeline(
    priced: &PricedUniform,
    context: &Context<'_>,
    assignment: &Assignment,
    bubble: f64,
) -> Option<PlanPipeline> {
    let pipeline = assignment.pipeline.as_ref()?;
    let (plan, mesh) = (&priced.plan, context.mesh());
    let count = pipeline.stage_count(mesh);
    let stages = (0..count).map(|stage| {
        let (group, chunk) = plan.schedule.place(plan.pipeline, stage);
        let own = &priced.price.stages[group as usize];
        let share = own.segments[chunk as usize].len() as f64
            / own.segments.iter().map(Range::len).sum::<usize>().max(1) as f64;
        PlanStage {
            layers: pipeline.layer_names(context.graph, stage).into_iter().map(String::from).collect(),
            group,
            devices: own.devices,
            seconds: (own.seconds * f64::from(plan.micro_batches) + own.once) * share,
            peak_memory_bytes: own.peak_memory,
        }
    });
    Some(PlanPipeline {
        schedule: plan.schedule.name().to_string(),
        chunks: plan.schedule.chunks(),
        axes: pipeline.axes.iter().map(|axis| mesh.axis(axis).name.clone()).collect(),
        stages: stages.collect(),
        bubble,
    })
}
