//! Uniform plans: `--as` prices a trainer's plan, `--uniform` searches the best one.

use crate::{
    inputs::Inputs, opened_plan::OpenedPlan, planning::Event, ram::most_held, request::PipelineChoice,
    summary::headline,
};
use shardwright_machine::Bytes;
use shardwright_plan::{BaselineCost, Plan, PlanError};
use shardwright_search::{Control, StopReason};
use shardwright_strategies::{
    EXPERT, PlanAnswer, STRATEGIES, StrategyError,
    pipeline::{
        PricedUniform, SearchedUniform, UniformAnswer, UniformPricer, UniformRequest, UniformScope, balanced,
        search, write_down,
    },
};
use std::sync::atomic::AtomicBool;

/// The most ops of a step that `--pipeline auto` also searches op by op.
const MOST_OPS: usize = 3000;

/// The names of the two ways to a uniform plan, and what they do.
const AS: (&str, &str) = ("as", "the plan that was asked for");
const UNIFORM: (&str, &str) = ("uniform", "the best uniform plan: all blocks alike, searched exhaustively");

impl Inputs {
    /// Prices the plan that `--as` states, or finds the best uniform plan.
    ///
    /// # Errors
    /// Where degrees do not suit the model or the machine, or no plan fits the memory.
    pub(crate) fn plan_uniform(
        mut self,
        request: Option<&UniformRequest>,
        unequal_stages: bool,
        cancel: &AtomicBool,
        listen: &(dyn Fn(Event<'_>) + Sync),
    ) -> anyhow::Result<OpenedPlan> {
        let option = if request.is_some() { "--as" } else { "--uniform" };
        anyhow::ensure!(
            !self.spmd,
            "{option}: the step is a program of an engine; uniform plans need a model file or a model by name"
        );
        let control = self.control(STRATEGIES[0], cancel);
        // The search op by op has the other half of the time.
        let control =
            if unequal_stages && self.graph.ops.len() <= MOST_OPS { control.share(2) } else { control };
        let limit = self.request.memory.on(&self.machine);
        let (answer, notes, expert) = self.request.on_threads(|| {
            listen(Event::Searching);
            let pricer = UniformPricer::new(&self.graph, &self.machine, self.costs.as_ref())
                .map_err(|error| anyhow::anyhow!("{option}: {error}"))?;
            match request {
                Some(request) => {
                    let priced = fastest(&pricer, request, limit.map(|limit| limit.0))?;
                    let answer = write_down(&pricer, &priced, AS, limit, &control)?;
                    let notes = [fewest_stages(&pricer, &priced), more_stages(&pricer, &priced)];
                    anyhow::Ok((answer, notes.into_iter().flatten().collect(), None))
                }
                None => {
                    let found = search(&pricer, limit, UniformScope::default(), &control.all_but(3))?;
                    let plans = (found.plans, found.priced, found.complete);
                    let alone = found.without_pipeline.clone();
                    let (best, equal, simulated) = simulate_finalists(&pricer, found, limit, &control)?;
                    let mut notes = vec![searched(&best, plans, simulated)];
                    if let Some(alone) = alone.filter(|_| best.plan.pipeline > 1) {
                        notes.push(compared("without a pipeline", &best, &alone));
                    }
                    notes.extend(more_stages(&pricer, &best));
                    let expert = baseline(&equal.answer.plan);
                    let unequal = balanced(&pricer, &best, limit)?.filter(|_| unequal_stages);
                    let answer = match unequal {
                        None => equal,
                        Some(unequal) => {
                            let written = write_down(&pricer, &unequal, UNIFORM, limit, &control)?;
                            notes.push(unequal_blocks(&unequal, &written, &equal));
                            let fits =
                                limit.is_none_or(|limit| written.answer.plan.peak_memory_bytes <= limit.0);
                            if fits && step(&written) < step(&equal) { written } else { equal }
                        }
                    };
                    Ok((answer, notes, Some(expert)))
                }
            }
        })??;
        let UniformAnswer { graph, answer: PlanAnswer { mut plan, assignment, mesh } } = answer;
        if let Some(limit) = limit.map(|limit| limit.0).filter(|&limit| plan.peak_memory_bytes > limit) {
            let needed = plan.peak_memory_bytes;
            return Err(PlanError::OverLimit { solver: AS.0.to_string(), limit, needed }.into());
        }
        plan.baselines.extend(expert.map(|cost| (EXPERT.to_string(), cost)));
        self.graph = graph;
        plan.planning_memory_bytes = most_held();
        plan.search_seconds = control.elapsed().as_secs_f64();
        if let Some(price) = self.request.price {
            plan.throughput = plan.throughput.priced(price, plan.devices);
        }
        plan.summary = headline(&plan);
        plan.request = Some(serde_json::to_value(&self.request)?);
        plan.warnings.extend(notes);
        plan.warnings.extend(self.notes.iter().cloned());
        Ok(OpenedPlan { inputs: self, plan, mesh, assignment })
    }

    /// The shorter of the best plan without a pipeline and the best pipeline whose blocks are split alike. Steps of more ops than
    /// [`MOST_OPS`] are not searched op by op: without a pipeline they are uniform too.
    ///
    /// # Errors
    /// Where neither has a plan.
    pub(crate) fn plan_pipeline(
        self,
        strategy: &str,
        cancel: &AtomicBool,
        listen: &(dyn Fn(Event<'_>) + Sync),
    ) -> anyhow::Result<OpenedPlan> {
        let mut request = self.request.clone();
        request.pipeline = PipelineChoice::Off;
        let (small, start) = (self.graph.ops.len() <= MOST_OPS, self.start);
        let uniform = self.plan_uniform(None, true, cancel, listen);
        if !small && uniform.is_ok() {
            return uniform;
        }
        // Both searches have one time limit.
        let ordinary = Inputs { start, ..request.open()? }.plan(strategy, cancel, listen);
        match (uniform, ordinary) {
            (Ok(uniform), Ok(mut ordinary)) => {
                if uniform.plan.simulated.step_seconds < ordinary.plan.simulated.step_seconds {
                    return Ok(uniform);
                }
                let expert = uniform.plan.baselines.get(EXPERT).cloned();
                ordinary.plan.baselines.extend(expert.map(|cost| (EXPERT.to_string(), cost)));
                // Pipelines were searched too: the bound is one on them and on all numbers of micro-batches.
                if let (Some(own), Some(other)) = (ordinary.plan.overlap, uniform.plan.overlap) {
                    ordinary.plan.overlap = Some(own.weakened_to(other.lower_bound_seconds));
                }
                Ok(ordinary)
            }
            (Ok(uniform), Err(_)) => Ok(uniform),
            (Err(_), ordinary) => ordinary,
        }
    }
}

/// The best of a search's finalists by their simulated steps, and the number of those that were simulated.
///
/// # Errors
/// Where no plan fits the limit.
fn simulate_finalists(
    pricer: &UniformPricer<'_>,
    found: SearchedUniform,
    limit: Option<Bytes>,
    control: &Control<'_>,
) -> anyhow::Result<(PricedUniform, UniformAnswer, usize)> {
    let mut best: Option<(PricedUniform, UniformAnswer)> = None;
    let (mut least, mut simulated) = (found.least_memory, 0);
    let (complete, lower_bound) = (found.complete, found.lower_bound);
    for own in found.into_finalists() {
        let fits = limit.is_none_or(|limit| own.price.peak_memory <= limit.0);
        let skipped = match &best {
            Some((_, known)) => control.is_over() || own.least_seconds() >= step(known),
            // Where the time is up, a plan that fits is still looked for.
            None => simulated > 0 && control.is_over() && !fits,
        };
        if skipped {
            continue;
        }
        let written = write_down(pricer, &own, UNIFORM, limit, control)?;
        simulated += 1;
        let peak = written.answer.plan.peak_memory_bytes;
        least = Some(least.map_or(peak, |least| least.min(peak)));
        let fits = limit.is_none_or(|limit| peak <= limit.0);
        if fits && best.as_ref().is_none_or(|(_, known)| step(&written) < step(known)) {
            best = Some((own, written));
        }
    }
    let (priced, answer) = best.ok_or_else(|| {
        let (solver, limit) = (UNIFORM.0.to_string(), limit.map_or(0, |limit| limit.0));
        match (complete, least.filter(|&least| least > limit)) {
            // Weights, gradients and state alone rule out every plan.
            (true, None) if lower_bound > limit => {
                let space = "uniform plans".to_string();
                PlanError::DoesNotFit { solver, space, limit, least: None, lower_bound }
            }
            (true, least @ Some(_)) => {
                PlanError::NotFound { solver, limit, least, lower_bound, stop: StopReason::Exhausted }
            }
            // The time ended before any plan that fits was simulated.
            _ => {
                let stop = control.stop_by_time().unwrap_or(StopReason::Deadline);
                PlanError::NotFound { solver, limit, least: None, lower_bound, stop }
            }
        }
    })?;
    Ok((priced, answer, simulated))
}

/// Seconds of a plan's step.
fn step(answer: &UniformAnswer) -> f64 {
    answer.answer.plan.simulated.step_seconds
}

/// What a search went through: plans of the space, plans that were priced, whether it was complete.
fn searched(best: &PricedUniform, plans: (usize, usize, bool), simulated: usize) -> String {
    let (all, priced, complete) = plans;
    let end = match complete {
        true => "memory or a bound rules all others out by prices composed of segments",
        false => "the time limit ended the search (--time)",
    };
    format!("uniform plan {}: {all} plans, {priced} priced, {simulated} simulated; {end}", best.plan)
}

/// What stages of unequal blocks take.
fn unequal_blocks(priced: &PricedUniform, unequal: &UniformAnswer, equal: &UniformAnswer) -> String {
    let blocks: Vec<String> =
        priced.price.stages.iter().map(|stage| stage.blocks[0].len().to_string()).collect();
    format!(
        "stages of unequal blocks ({}) take {:.3} s, equal ones {:.3} s",
        blocks.join(", "),
        step(unequal),
        step(equal)
    )
}

/// The fastest of the plans that a request allows, those that fit first.
fn fastest(
    pricer: &UniformPricer<'_>,
    request: &UniformRequest,
    limit: Option<u64>,
) -> anyhow::Result<PricedUniform> {
    let mut best: Option<PricedUniform> = None;
    let mut refused: Option<StrategyError> = None;
    for plan in pricer.plans(request).map_err(|error| anyhow::anyhow!("--as: {error}"))? {
        match pricer.price(&plan) {
            Ok(priced) => {
                let order = |own: &PricedUniform| {
                    (limit.is_some_and(|limit| own.price.peak_memory > limit), own.price.step_seconds)
                };
                if best.as_ref().is_none_or(|known| order(&priced) < order(known)) {
                    best = Some(priced);
                }
            }
            Err(error @ StrategyError::Degrees(_)) => refused = refused.or(Some(error)),
            Err(other) => return Err(other.into()),
        }
    }
    let reason = || refused.map_or_else(|| "no plan".to_string(), |error| error.to_string());
    best.ok_or_else(|| anyhow::anyhow!("--as: {}", reason()))
}

/// What a pipeline would take without stages; none without a pipeline, or where the degrees then do not suit.
fn fewest_stages(pricer: &UniformPricer<'_>, own: &PricedUniform) -> Option<String> {
    let other = (own.plan.pipeline > 1).then(|| with_stages(pricer, own, 1)).flatten()?;
    Some(compared("without stages", own, &other))
}

/// What a pipeline would take with more stages and fewer replicas; none without a pipeline, or where nothing suits.
fn more_stages(pricer: &UniformPricer<'_>, own: &PricedUniform) -> Option<String> {
    let plan = &own.plan;
    let groups = plan.pipeline.saturating_mul(plan.data);
    let counts =
        (plan.pipeline + 1..=groups.min(pricer.blocks())).filter(|count| groups.is_multiple_of(*count));
    let mut others = counts.filter(|_| plan.pipeline > 1).map(|count| with_stages(pricer, own, count));
    let other = others.find_map(|other| other)?;
    Some(compared(&format!("with {} stages", other.plan.pipeline), own, &other))
}

/// The same plan on another number of stages, with as many replicas as devices are left for.
fn with_stages(pricer: &UniformPricer<'_>, own: &PricedUniform, stages: u32) -> Option<PricedUniform> {
    let plan = &own.plan;
    let request = UniformRequest {
        tensor: Some(plan.tensor),
        pipeline: Some(stages),
        context: Some(plan.context),
        expert: Some(plan.expert),
        micro_batch: Some(plan.micro_batch),
        zero: Some(plan.zero),
        sequence: Some(plan.sequence),
        recompute: Some(plan.recompute),
        schedule: (stages > 1).then(|| plan.schedule.name()),
        ..UniformRequest::default()
    };
    fastest(pricer, &request, None).ok()
}

fn compared(how: &str, own: &PricedUniform, other: &PricedUniform) -> String {
    let (own, price) = (&own.price, &other.price);
    format!(
        "{how} ({}) a step takes {:.2} times as long and {:.2} times the memory, by prices composed of segments",
        other.plan,
        price.step_seconds / own.step_seconds,
        price.peak_memory as f64 / own.peak_memory.max(1) as f64
    )
}

fn baseline(plan: &Plan) -> BaselineCost {
    BaselineCost {
        step_seconds: plan.simulated.step_seconds,
        compute_seconds: plan.simulated.compute_seconds,
        traffic_bytes: plan.traffic_bytes,
        peak_memory_bytes: plan.peak_memory_bytes,
        fits: plan.fits,
        objective: plan.objective,
        micro_batches: plan.micro_batches,
        recompute: plan.recompute.policy.clone(),
    }
}
