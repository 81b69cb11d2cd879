//! The best uniform plan, by exhaustive search.
//!
//! The space: tensor, context and expert parallelism of whole inner parts of the machine, pipeline stages that divide machine and
//! blocks, micro-batches of at most 16 samples, ZeRO 1 and 3, every recomputation policy, and the schedules 1F1B, interleaved and
//! ZB-H1. Sequence parallelism goes with tensor parallelism. A plan is left out without a simulation where its weights, gradients
//! and state alone exceed the memory, or where a bound on its step is longer than the best plan's. So the answer is the optimum
//! by prices composed of segments.
//!
//! Composed prices differ from the simulated step by some percent, and composed memory is an upper bound. So the search also
//! names finalists: plans that may be best once their whole steps are simulated.

use super::{
    degrees::{UniformPlan, ZeroLevel},
    pricer::{PricedUniform, UniformPricer},
};
use crate::{error::StrategyError, variants::Variant};
use rayon::prelude::*;
use shardwright_graph::{RecomputePolicy, Role};
use shardwright_machine::{Bytes, Machine};
use shardwright_plan::ideal_device_seconds;
use shardwright_search::Control;
use shardwright_stages::schedule::Schedule;

/// Plans that are priced at once; the best of them is known to the next ones.
const AT_ONCE: usize = 8;
/// The most plans whose whole steps are worth a simulation, by composed prices.
const FINALISTS: usize = 8;
/// The same by their computing alone, of plans that fit: composed prices of plans that gather weights are often too high.
const FINALISTS_BY_COMPUTING: usize = 4;
/// How much longer than the best a finalist may take by composed prices.
const LONGER: f64 = 1.1;
/// How much more than the limit a finalist may hold by composed memory.
const FULLER: f64 = 1.4;
/// The largest micro-batch that is tried.
const MOST_SAMPLES: u64 = 16;
/// Sequences from this length on are worth dividing.
const LONG_SEQUENCE: u64 = 16_384;

/// What a search found.
#[derive(Clone, Debug)]
pub struct SearchedUniform {
    /// The plan with the shortest step among those that fit; none where no plan fits.
    pub best: Option<PricedUniform>,
    /// The plan with the shortest step that has no pipeline, among those that fit.
    pub without_pipeline: Option<PricedUniform>,
    /// Plans that may be the best once simulated, the shortest first; the best is one of them.
    pub finalists: Vec<PricedUniform>,
    /// The least memory of any plan that was priced.
    pub least_memory: Option<u64>,
    /// Bytes that the fullest device of any plan holds at least: weights, gradients and state.
    pub lower_bound: u64,
    /// Plans of the space.
    pub plans: usize,
    /// Plans that were priced.
    pub priced: usize,
    /// Whether the search went through the whole space.
    pub complete: bool,
}

/// The part of the space that is searched.
#[derive(Clone, Copy, Debug, Default)]
pub struct UniformScope<'s> {
    /// The most pipeline stages.
    pub most_stages: Option<u32>,
    /// The micro-batches and policies of recomputation; all where there are none.
    pub variants: Option<&'s [Variant]>,
}

impl UniformScope<'_> {
    /// The samples of a micro-batch, of a replica that has so many.
    fn sizes(self, per_replica: u64) -> Vec<u64> {
        let mut sizes: Vec<u64> = match self.variants {
            None => (1..=MOST_SAMPLES.min(per_replica)).collect(),
            Some(variants) => {
                let counts = variants.iter().map(|variant| u64::from(variant.micro_batches.get()));
                counts
                    .filter(|count| per_replica.is_multiple_of(*count))
                    .map(|count| per_replica / count)
                    .collect()
            }
        };
        sizes.retain(|size| per_replica.is_multiple_of(*size));
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    /// Whether ops may be recomputed by a policy in so many micro-batches.
    fn allows(self, micro_batches: u32, recompute: RecomputePolicy) -> bool {
        let is_asked = |own: &Variant| own.micro_batches.get() == micro_batches && own.recompute == recompute;
        self.variants.is_none_or(|variants| variants.iter().any(is_asked))
    }
}

/// Searches the uniform plans of a model within a memory limit.
///
/// # Errors
/// Where a stage cannot be simulated.
pub fn search(
    pricer: &UniformPricer<'_>,
    limit: Option<Bytes>,
    scope: UniformScope<'_>,
    control: &Control<'_>,
) -> Result<SearchedUniform, StrategyError> {
    let mut plans = space(pricer, scope);
    let sizes = StepSizes::of(pricer);
    let all = plans.len();
    let least = plans.iter().map(|plan| sizes.least(plan)).fold(f64::INFINITY, f64::min);
    plans.retain(|plan| limit.is_none_or(|limit| sizes.least(plan) <= limit.0 as f64));
    // Likely plans first: a good one early leaves out many.
    plans.sort_by_cached_key(|plan| ordered(pricer.guess(plan, &sizes)));
    let mut found = SearchedUniform {
        best: None,
        without_pipeline: None,
        finalists: Vec::new(),
        least_memory: None,
        lower_bound: if least.is_finite() { least as u64 } else { 0 },
        plans: all,
        priced: 0,
        complete: true,
    };
    let mut too_full: Vec<UniformPlan> = Vec::new();
    let mut left = plans.into_iter();
    loop {
        let open = left.by_ref().filter(|plan| !too_full.iter().any(|own| holds_no_less(plan, own)));
        let group: Vec<UniformPlan> = open.take(AT_ONCE).collect();
        if group.is_empty() {
            break;
        }
        if control.is_over() {
            found.complete = false;
            break;
        }
        let step = |known: &Option<PricedUniform>| {
            known.as_ref().map_or(f64::INFINITY, |own| own.price.step_seconds)
        };
        let (best, alone) = (step(&found.best), step(&found.without_pipeline));
        let priced = group.par_iter().map(|plan| {
            let below = if plan.pipeline == 1 { alone } else { best };
            match pricer.price_below(plan, below * LONGER) {
                // Degrees that do not divide the model are outside of the space.
                Err(StrategyError::Degrees(_)) => Ok(None),
                other => other,
            }
        });
        for own in priced.collect::<Result<Vec<_>, _>>()?.into_iter().flatten() {
            found.priced += 1;
            let peak = own.price.peak_memory;
            found.least_memory = Some(found.least_memory.map_or(peak, |least| least.min(peak)));
            match limit.is_none_or(|limit| peak as f64 <= limit.0 as f64 * FULLER) {
                true => found.finalists.push(own.clone()),
                false => too_full.push(own.plan),
            }
            if limit.is_some_and(|limit| peak > limit.0) {
                continue;
            }
            let better = |known: &Option<PricedUniform>| own.price.step_seconds < step(known);
            if own.plan.pipeline == 1 && better(&found.without_pipeline) {
                found.without_pipeline = Some(own.clone());
            }
            if better(&found.best) {
                found.best = Some(own);
            }
        }
    }
    found.keep_finalists(limit);
    Ok(found)
}

impl SearchedUniform {
    /// The finalists, the best plan by composed prices first: it is known where the time ends.
    pub fn into_finalists(self) -> impl Iterator<Item = PricedUniform> {
        let best = self.best.map(|best| best.plan);
        let (first, others): (Vec<_>, Vec<_>) =
            self.finalists.into_iter().partition(|own| Some(own.plan) == best);
        first.into_iter().chain(others)
    }

    /// Leaves the shortest finalists, and the best plan among them. Where none fits, those that hold least.
    fn keep_finalists(&mut self, limit: Option<Bytes>) {
        let step = |own: &PricedUniform| own.price.step_seconds;
        match self.best {
            Some(_) => self.finalists.sort_by(|a, b| step(a).total_cmp(&step(b))),
            None => self.finalists.sort_by_key(|own| own.price.peak_memory),
        }
        let best = self.best.as_ref().map(|best| (best.plan, step(best)));
        let longest = best.map_or(f64::INFINITY, |(_, step)| step * LONGER);
        let mut all = std::mem::take(&mut self.finalists);
        let first = all.iter().take(FINALISTS).filter(|own| step(own) <= longest).count();
        let mut others = all.split_off(first);
        let computing = |own: &PricedUniform| own.price.compute_seconds;
        others.sort_by(|a, b| computing(a).total_cmp(&computing(b)).then(step(a).total_cmp(&step(b))));
        let is_best = |own: &PricedUniform| best.is_some_and(|(plan, _)| plan == own.plan);
        let at = others.iter().position(is_best);
        all.extend(at.map(|at| others.remove(at)));
        let shorter = |own: &PricedUniform| {
            let fits = limit.is_none_or(|limit| own.price.peak_memory <= limit.0);
            fits && best.is_none_or(|(_, step)| computing(own) < step)
        };
        all.extend(others.into_iter().filter(shorter).take(FINALISTS_BY_COMPUTING));
        self.finalists = all;
    }
}

/// Whether a plan holds at least as much as another one of the same degrees.
fn holds_no_less(plan: &UniformPlan, other: &UniformPlan) -> bool {
    let degrees = |own: &UniformPlan| (own.tensor, own.pipeline, own.context, own.expert, own.data);
    degrees(plan) == degrees(other)
        && plan.schedule == other.schedule
        && plan.zero <= other.zero
        && plan.micro_batch >= other.micro_batch
        && plan.recompute.keeps_no_less_than(other.recompute)
}

/// A number that sorts as a time that is at least zero does.
fn ordered(seconds: f64) -> u64 {
    seconds.max(0.0).to_bits()
}

impl UniformPricer<'_> {
    /// A guess at the time that a plan's step takes beyond that of an ideal one, as a share of it.
    fn guess(&self, plan: &UniformPlan, sizes: &StepSizes) -> f64 {
        let inner = self.machine.levels().last().map_or(1, |level| level.count);
        let (micro_batches, chunks) = (f64::from(plan.micro_batches), f64::from(plan.schedule.chunks()));
        let bubble = f64::from(plan.pipeline - 1) / chunks / micro_batches;
        let stages = 0.01 * f64::from(plan.pipeline) / f64::from(self.machine.devices());
        let sums = if plan.tensor > inner { 2.0 } else { 0.03 * f64::from(plan.tensor) / f64::from(inner) };
        let again = match plan.recompute {
            RecomputePolicy::Off => 0.0,
            RecomputePolicy::Elementwise => 0.02,
            RecomputePolicy::Selective => 0.1,
            RecomputePolicy::Full => 0.33,
        };
        let gathers = match plan.zero {
            ZeroLevel::Weights => {
                let parts = f64::from(plan.tensor) * f64::from(plan.pipeline) * f64::from(plan.expert);
                let each = self.gather_seconds((sizes.weights / parts) as u64);
                // Forwards and backwards, and the sums of gradients.
                let ideal = sizes.ideal_seconds;
                0.03 + (3.0 * each * micro_batches / ideal.max(f64::MIN_POSITIVE) - 0.9).max(0.0)
            }
            _ => 0.0,
        };
        // Of equal plans the one that holds least first: where it does not fit, no other does.
        let large = 0.02 * (plan.micro_batch as f64).log2();
        bubble + stages + sums + again + gathers + large
    }
}

/// Degrees that are products of the machine's innermost axes, ascending.
fn inner_degrees(machine: &Machine, most: u32) -> Vec<u32> {
    let mut degrees = vec![1];
    let mut degree = 1u32;
    for axis in machine.mesh().axes().iter().rev() {
        degree = degree.saturating_mul(axis.size);
        if degree > most {
            break;
        }
        degrees.push(degree);
    }
    degrees
}

/// All plans, as degrees that multiply to the machine and divide batch and blocks.
fn space(pricer: &UniformPricer<'_>, scope: UniformScope<'_>) -> Vec<UniformPlan> {
    let (machine, blocks, batch) = (pricer.machine, pricer.blocks(), pricer.batch());
    let devices = machine.devices();
    let tokens = pricer.graph.step_size().tokens.unwrap_or(0) / batch.max(1);
    let contexts: &[u32] = if tokens >= LONG_SEQUENCE { &[1, 2, 4, 8, 16] } else { &[1] };
    let count = pricer.experts();
    let experts: Vec<u32> =
        [1, 2, 4, 8, 16, 32, 64].into_iter().filter(|d| count.is_multiple_of(u64::from(*d))).collect();
    let stages = (1..=devices.min(blocks + 2)).filter(|p| devices.is_multiple_of(*p));
    let stages = stages.filter(|p| scope.most_stages.is_none_or(|most| *p <= most));
    let mut plans = Vec::new();
    for pipeline in stages {
        for tensor in inner_degrees(machine, 64) {
            for &context in contexts {
                let inner = u64::from(tensor) * u64::from(pipeline) * u64::from(context);
                if !u64::from(devices).is_multiple_of(inner) {
                    continue;
                }
                let data = (u64::from(devices) / inner) as u32;
                if !batch.is_multiple_of(u64::from(data)) {
                    continue;
                }
                for &expert in experts.iter().filter(|expert| data.is_multiple_of(**expert)) {
                    let base = [tensor, pipeline, context, expert, data];
                    inner_plans(pricer, scope, base, batch / u64::from(data), &mut plans);
                }
            }
        }
    }
    plans
}

/// The plans of fixed degrees: micro-batches, schedules, ZeRO levels, recomputation.
fn inner_plans(
    pricer: &UniformPricer<'_>,
    scope: UniformScope<'_>,
    [tensor, pipeline, context, expert, data]: [u32; 5],
    per_replica: u64,
    plans: &mut Vec<UniformPlan>,
) {
    let mut schedules =
        vec![if pipeline == 1 { Schedule::Accumulate } else { Schedule::OneForwardOneBackward }];
    if pipeline > 1 {
        schedules.push(Schedule::ZbH1);
        schedules.extend((2..=12).map(|chunks| Schedule::Interleaved { chunks }));
    }
    schedules.retain(|schedule| pricer.divides(pipeline.saturating_mul(schedule.chunks())));
    let levels: &[ZeroLevel] = match data * context {
        1 => &[ZeroLevel::Off],
        _ => &[ZeroLevel::State, ZeroLevel::Weights],
    };
    for size in scope.sizes(per_replica) {
        let micro_batches = u32::try_from(per_replica / size).unwrap_or(u32::MAX);
        for &schedule in schedules.iter().filter(|schedule| schedule.check(pipeline, micro_batches).is_ok()) {
            for &zero in levels {
                let policies = RecomputePolicy::ALL.into_iter();
                let policies = policies.filter(|policy| scope.allows(micro_batches, *policy));
                plans.extend(policies.map(|recompute| UniformPlan {
                    tensor,
                    pipeline,
                    context,
                    expert,
                    data,
                    micro_batch: size,
                    micro_batches,
                    zero,
                    sequence: tensor > 1,
                    recompute,
                    schedule,
                }));
            }
        }
    }
}

/// What every plan of a step holds and computes somewhere.
struct StepSizes {
    /// Bytes.
    weights: f64,
    gradients: f64,
    state: f64,
    /// Seconds of the model's flops at the peak of all devices.
    ideal_seconds: f64,
}

impl StepSizes {
    fn of(pricer: &UniformPricer<'_>) -> Self {
        let graph = pricer.graph;
        let role = |role: Role| graph.sources(role).map(|t| graph.tensor(t).ty.bytes() as f64).sum();
        let gradients = graph.gradients.iter().map(|pair| graph.tensor(pair.gradient).ty.bytes() as f64);
        Self {
            weights: role(Role::Parameter),
            gradients: gradients.sum(),
            state: role(Role::OptimizerState),
            ideal_seconds: ideal_device_seconds(graph, pricer.machine) / f64::from(pricer.machine.devices()),
        }
    }

    /// The bytes that the fullest device holds at least.
    fn least(&self, plan: &UniformPlan) -> f64 {
        let parts = f64::from(plan.tensor) * f64::from(plan.pipeline) * f64::from(plan.expert);
        let replicas = f64::from(plan.data) * f64::from(plan.context);
        let gradients = if plan.micro_batches > 1 { self.gradients } else { 0.0 };
        let held = match plan.zero {
            ZeroLevel::Off => self.weights + gradients + self.state,
            ZeroLevel::State => self.weights + gradients + self.state / replicas,
            ZeroLevel::Gradients => self.weights + (gradients + self.state) / replicas,
            ZeroLevel::Weights => (self.weights + gradients + self.state) / replicas,
        };
        // Embedding and head are not divided among stages: a tenth is left for them.
        0.9 * held / parts
    }
}
