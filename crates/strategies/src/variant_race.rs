//! Plans the variants of a step ([`crate::variants`]) and returns the one with the shortest simulated step.
//!
//! 1. Every number of micro-batches gets two lower bounds that hold for all of its plans: on memory, and on computing. Computing
//!    bounds all policies of recomputation too.
//! 2. In the order of their computing, variants get bounds of their own and a first answer: the fastest recipe that fits. One
//!    whose memory exceeds the limit is ruled out. It stops where computing alone takes longer than the best answer. Where time is
//!    left, recipes are priced in the other variants too, for the baselines ([`crate::variant_baselines`]).
//! 3. The variants are searched, those with the shortest first answer first, each with half of the time that is left. A
//!    variant whose computing alone takes longer than the best step is not searched. Nor is one that keeps less than
//!    the best plan's variant, where that plan takes at most [`BINDING`] of the memory limit.
//!
//! The reported bound is the least over all variants that are not ruled out. A variant that was not searched counts
//! with its computing. Variants that are left out because memory does not bind the plan are not covered; a note says so.

use crate::{
    Planner, Strategy,
    describe::{PlanAnswer, plan},
    error::StrategyError,
    recompute_ops::plan_ops,
    variant_baselines::{FirstAnswer, VariantBaselines, of_variant},
    variants::{Variant, VariantGraph, VariantGraphError, VariantInputs},
};
use rayon::prelude::*;
use shardwright_graph::{Graph, OpId, RecomputePolicy, recomputed_ops};
use shardwright_machine::show_bytes;
use shardwright_plan::{Constraints, Plan, PlanError, memory_lower_bound, step_lower_bound};
use shardwright_search::{Control, gap};
use std::num::NonZeroU32;

/// The share of the memory limit above which a plan counts as limited by it, in percent.
const BINDING: u64 = 75;
/// The share of the time that first answers may take: one in so many parts.
const FIRST_ANSWERS: u32 = 3;

/// The best variant's plan.
pub struct VariantAnswer<'g> {
    /// The variant and its graph.
    pub step: VariantGraph<'g>,
    /// Its plan.
    pub answer: PlanAnswer,
}

/// Why no variant has a plan: the error of the variant that keeps least, or of one for which that is not proved.
pub struct VariantError<'g> {
    /// The variant; none where no variant of the step exists.
    pub step: Option<Box<VariantGraph<'g>>>,
    /// Its error.
    pub error: StrategyError,
}

impl From<StrategyError> for VariantError<'_> {
    fn from(error: StrategyError) -> Self {
        Self { step: None, error }
    }
}

/// Plans the variants and returns the one with the shortest simulated step.
///
/// # Errors
/// Where no variant has a plan, or one cannot be priced.
pub fn plan_variants<'g>(
    base: &'g Graph,
    variants: &[Variant],
    inputs: VariantInputs<'_>,
    strategy: &dyn Strategy,
    constraints: &Constraints,
    control: &Control<'_>,
) -> Result<VariantAnswer<'g>, VariantError<'g>> {
    if inputs.recompute_ops {
        let blocks = VariantInputs { recompute_ops: false, ..inputs };
        return plan_ops(base, variants, blocks, strategy, constraints, control);
    }
    let race = Race { base, inputs, strategy, constraints, control };
    if let &[only] = variants {
        return race.only(only);
    }
    let (mut entries, warnings) = race.entries(variants)?;
    let mut notes = Notes { warnings, search: Vec::new() };
    let all = entries.len();
    let mut baselines = VariantBaselines::default();
    let ruled_out = race.first_answers(&mut entries, &mut baselines)?;
    if let Some(limit) = constraints.memory.filter(|_| ruled_out > 0) {
        notes.search.push(format!(
            "{ruled_out} of {all} variants (micro-batches and recomputation) were ruled out: each of their plans needs more than {}",
            show_bytes(limit.0)
        ));
    }
    // Stable: of equal answers, the one with the least computing comes first.
    entries.sort_by_key(|own| own.first_answer.map_or(u64::MAX, |first| first.makespan));
    let mut found = race.search(entries, &mut notes)?;
    baselines.replace_in(&mut found.answer.plan);
    Ok(found)
}

/// What is said of the race in the plan.
#[derive(Default)]
struct Notes {
    /// What people must know.
    warnings: Vec<String>,
    /// How the plan was found.
    search: Vec<String>,
}

/// What is known of a variant before its search.
struct Entry {
    variant: Variant,
    bounds: Bounds,
    /// Whether the bounds are the variant's own, not those of the step that recomputes nothing.
    is_exact: bool,
    first_answer: Option<FirstAnswer>,
}

impl Entry {
    /// Whether the variant's own memory is bounded.
    fn is_bounded(&self) -> bool {
        self.is_exact && self.bounds.memory > 0
    }
}

/// Lower bounds that hold for all plans of a variant; zero where nothing is known.
#[derive(Clone, Copy, Default)]
struct Bounds {
    /// Picoseconds of computing that no step avoids, with overlap or without.
    computing: i64,
    /// Bytes that some device holds.
    memory: u64,
}

struct Race<'r, 'g> {
    base: &'g Graph,
    inputs: VariantInputs<'r>,
    strategy: &'r dyn Strategy,
    constraints: &'r Constraints,
    control: &'r Control<'r>,
}

impl<'g> Race<'_, 'g> {
    /// Plans the only variant.
    fn only(&self, variant: Variant) -> Result<VariantAnswer<'g>, VariantError<'g>> {
        let step = self.step(variant)?;
        let planner = self.inputs.planner(&step.graph);
        let planned = self.bound_memory(&planner).and_then(|needed| match self.impossible(needed) {
            Some(error) => Err(error.into()),
            None => plan(&planner, self.strategy, self.constraints, self.control),
        });
        drop(planner);
        match planned {
            Ok(mut answer) => {
                name_variant(&mut answer.plan, variant);
                Ok(VariantAnswer { step, answer })
            }
            Err(error) => Err(VariantError { step: Some(Box::new(step)), error }),
        }
    }

    /// Bytes that some device holds under any plan; zero where no limit asks.
    fn bound_memory(&self, planner: &Planner<'_>) -> Result<u64, StrategyError> {
        Ok(match self.constraints.memory {
            Some(_) => memory_lower_bound(&*planner.prime()?).0,
            None => 0,
        })
    }

    /// The error of a step whose every plan needs more memory than the limit: no search changes that.
    fn impossible(&self, lower_bound: u64) -> Option<PlanError> {
        let limit = self.constraints.memory.filter(|limit| lower_bound > limit.0)?.0;
        let (solver, space) = (self.strategy.name().into(), "every plan on all devices".into());
        Some(PlanError::DoesNotFit { solver, space, limit, least: None, lower_bound })
    }

    fn step(&self, variant: Variant) -> Result<VariantGraph<'g>, StrategyError> {
        let refuse = |reason: String| PlanError::NoPlan { solver: self.strategy.name().into(), reason };
        Ok(variant.graph(self.base).map_err(|error| refuse(error.to_string()))?)
    }

    /// The variants with the bounds of their numbers of micro-batches, and notes on those that do not exist. What recomputes
    /// nothing computes least, so its computing bounds that of all policies.
    fn entries(&self, variants: &[Variant]) -> Result<(Vec<Entry>, Vec<String>), StrategyError> {
        let limits = self.control.share(FIRST_ANSWERS);
        let mut counts: Vec<NonZeroU32> = variants.iter().map(|variant| variant.micro_batches).collect();
        counts.dedup();
        let bounds = counts.par_iter().map(|&micro_batches| {
            // What the engine recomputes by itself belongs to every variant.
            let engine = variants.first().and_then(|variant| variant.engine);
            let step = match (Variant { micro_batches, engine, ..Variant::BASE }).graph(self.base) {
                Ok(step) => step,
                Err(error) => return Ok(Err(error)),
            };
            // Where the time does not suffice for bounds, nothing is claimed.
            if limits.is_over() {
                return Ok(Ok(Bounds::default()));
            }
            self.bounds(&step).map(Ok)
        });
        let bounds = bounds.collect::<Result<Vec<Result<Bounds, VariantGraphError>>, StrategyError>>()?;
        let missing = bounds.iter().filter(|own| own.is_err()).count();
        let mut notes = Vec::new();
        if let Some(Err(error)) = bounds.iter().find(|own| own.is_err()) {
            notes.push(format!(
                "{missing} of {} numbers of micro-batches are impossible: {error}",
                counts.len()
            ));
        }
        let mut entries = Vec::new();
        for &variant in variants {
            let at = counts.iter().position(|&count| count == variant.micro_batches);
            let Some(Ok(bounds)) = at.map(|at| &bounds[at]) else { continue };
            let own = variant.recompute == RecomputePolicy::Off;
            // The memory of a step that keeps everything is no bound on one that recomputes.
            let bounds = Bounds { memory: if own { bounds.memory } else { 0 }, ..*bounds };
            entries.push(Entry { variant, bounds, is_exact: own, first_answer: None });
        }
        Ok((entries, notes))
    }

    /// The bounds of a variant.
    fn bounds(&self, step: &VariantGraph<'_>) -> Result<Bounds, StrategyError> {
        let context = self.inputs.planner(&step.graph).prime()?;
        let computing = step_lower_bound(&context, self.constraints.spmd)?;
        Ok(Bounds { computing, memory: memory_lower_bound(&context).0 })
    }

    /// Finds first answers, the variant with the least computing first, until computing rules out all others. Bounds of
    /// policies are computed when their turn comes. Returns the number of variants that memory rules out.
    fn first_answers(
        &self,
        entries: &mut Vec<Entry>,
        baselines: &mut VariantBaselines,
    ) -> Result<usize, StrategyError> {
        let limits = self.control.share(FIRST_ANSWERS);
        let limit = self.constraints.memory.map_or(u64::MAX, |limit| limit.0);
        let (mut open, mut done) = (std::mem::take(entries), Vec::new());
        let mut recomputed: Vec<(NonZeroU32, Vec<OpId>)> = Vec::new();
        let mut shortest = u64::MAX;
        let mut decided: Option<Variant> = None;
        let (mut ruled_out, mut unvisited): (Vec<Entry>, Vec<Entry>) = (Vec::new(), Vec::new());
        while let Some(at) = (0..open.len()).min_by_key(|&at| (open[at].bounds.computing, at)) {
            let mut entry = open.remove(at);
            let hopeless = u64::try_from(entry.bounds.computing).unwrap_or(0) >= shortest
                || decided.is_some_and(|known| known.keeps_no_less_than(entry.variant))
                || (shortest < u64::MAX && limits.is_over());
            if hopeless {
                unvisited.push(entry);
                continue;
            }
            let step = self.step(entry.variant)?;
            if !entry.is_exact {
                let key = (entry.variant.micro_batches, recomputed_ops(&step.graph));
                // A policy that recomputes the same ops as another is the same variant, and none recomputes nothing.
                if key.1.is_empty() || recomputed.contains(&key) {
                    continue;
                }
                recomputed.push(key);
                entry.is_exact = true;
                // Without time, the computing of a step that recomputes nothing has to do.
                if !limits.is_over() {
                    entry.bounds = self.bounds(&step)?;
                    open.push(entry);
                    continue;
                }
            }
            if entry.bounds.memory > limit {
                ruled_out.push(entry);
                continue;
            }
            entry.first_answer = self.visit(entry.variant, &step, baselines, &limits)?;
            if let Some(first) = entry.first_answer {
                shortest = shortest.min(first.makespan);
                if !self.binds(first.held) && decided.is_none() {
                    decided = Some(entry.variant);
                }
            }
            done.push(entry);
        }
        for mut entry in unvisited {
            if baselines.may_improve(entry.bounds.computing) && !limits.is_over() {
                let step = self.step(entry.variant)?;
                entry.first_answer = self.visit(entry.variant, &step, baselines, &limits)?;
            }
            done.push(entry);
        }
        let count = ruled_out.len();
        if done.is_empty() {
            // The refusal of the leanest variant says how much is missing.
            done.extend(ruled_out.into_iter().min_by_key(|own| own.bounds.memory));
        }
        *entries = done;
        Ok(count)
    }

    fn visit(
        &self,
        variant: Variant,
        step: &VariantGraph<'_>,
        baselines: &mut VariantBaselines,
        limits: &Control<'_>,
    ) -> Result<Option<FirstAnswer>, StrategyError> {
        baselines.visit(variant, &self.inputs.planner(&step.graph), self.constraints, limits)
    }

    /// Whether memory limits a plan that holds so many bytes.
    fn binds(&self, held: u64) -> bool {
        let limit = self.constraints.memory.map(|limit| limit.0);
        limit.is_some_and(|limit| held.saturating_mul(100) > limit.saturating_mul(BINDING))
    }

    /// Searches the entries in their order.
    fn search(&self, entries: Vec<Entry>, notes: &mut Notes) -> Result<VariantAnswer<'g>, VariantError<'g>> {
        let mut standing = Standing::default();
        let mut left = entries.len();
        let mut unsearched: Vec<&Entry> = Vec::new();
        let mut left_out = 0;
        for entry in &entries {
            left -= 1;
            let seconds = entry.bounds.computing as f64 / 1e12;
            let best = standing.best.as_ref();
            let dominated = best.is_some_and(|(variant, answer)| {
                !self.binds(answer.plan.peak_memory_bytes) && variant.keeps_no_less_than(entry.variant)
            });
            if dominated {
                left_out += 1;
                continue;
            }
            let slower = best.is_some_and(|(_, best)| seconds >= best.plan.simulated.step_seconds);
            if slower || (best.is_some() && self.control.is_over()) {
                unsearched.push(entry);
                continue;
            }
            let step = self.step(entry.variant)?;
            let planner = self.inputs.planner(&step.graph);
            // Where the time ended before its bounds were computed, this one still is: it takes no search.
            let memory = if entry.is_bounded() { entry.bounds.memory } else { self.bound_memory(&planner)? };
            if let Some(error) = self.impossible(memory) {
                standing.failed(entry, error);
                continue;
            }
            // A first answer that memory does not limit leaves nothing to the variants that keep less.
            let alone = left == 0 || entry.first_answer.is_some_and(|first| !self.binds(first.held));
            let control = if alone { self.control.clone() } else { self.control.share(2) };
            match plan(&planner, self.strategy, self.constraints, &control) {
                Ok(answer) => standing.add(entry.variant, answer),
                Err(StrategyError::Plan(error)) if error.is_without_answer() => {
                    standing.failed(entry, error);
                }
                Err(error) => {
                    drop(planner);
                    return Err(VariantError { step: Some(Box::new(step)), error });
                }
            }
        }
        // A step in a given number of micro-batches is proved for what it keeps; a choice among numbers, for all of them.
        let chosen = entries.iter().any(|own| own.variant.micro_batches != entries[0].variant.micro_batches);
        if let Some((_, best)) = standing.best.as_ref().filter(|_| left_out > 0 && chosen) {
            let limit = self.constraints.memory.map_or(u64::MAX, |limit| limit.0).max(1);
            notes.warnings.push(format!(
                "the plan takes {}% of the memory limit, so {left_out} variants that divide further or recompute more were not searched: the \
                 lower bound does not cover them",
                u128::from(best.plan.peak_memory_bytes) * 100 / u128::from(limit)
            ));
        }
        if !unsearched.is_empty() {
            let least = unsearched.iter().map(|own| own.bounds.computing).min().unwrap_or(0);
            notes.search.push(format!(
                "{} variants (micro-batches and recomputation) were not searched: their computing alone takes {:.4} s or more",
                unsearched.len(),
                least as f64 / 1e12
            ));
        }
        for entry in unsearched {
            standing.bound(entry.bounds.computing);
        }
        let notes = std::mem::take(notes);
        match standing.finish(notes) {
            Ok((variant, answer)) => Ok(VariantAnswer { step: self.step(variant)?, answer }),
            Err((variant, error)) => {
                let step = variant.map(|variant| self.step(variant)).transpose()?.map(Box::new);
                Err(VariantError { step, error: error.into() })
            }
        }
    }
}

/// A variant that has no plan.
struct Failure {
    variant: Variant,
    error: PlanError,
    memory: u64,
}

impl Failure {
    /// Whether no plan exists in the searched space.
    fn is_proof(&self) -> bool {
        matches!(self.error, PlanError::DoesNotFit { .. })
    }
}

/// The answers so far.
#[derive(Default)]
struct Standing {
    best: Option<(Variant, PlanAnswer)>,
    failure: Option<Failure>,
    /// Lower bounds of the variants.
    bounds: Vec<i64>,
    /// Their bounds on the step with overlap, in seconds.
    overlaps: Vec<f64>,
}

/// Lowers a plan's bounds to those of a larger space: on the objective in picoseconds, and on the step with overlap in seconds.
pub(crate) fn lower_bounds(plan: &mut Plan, objective: i64, overlap: f64) {
    if objective < plan.lower_bound {
        plan.lower_bound = objective;
        plan.gap = gap(plan.objective, objective);
        plan.proved_optimal = plan.proved_optimal && plan.objective <= objective;
    }
    if let Some(own) = plan.overlap.as_mut().filter(|own| overlap < own.lower_bound_seconds) {
        own.lower_bound_seconds = overlap;
        own.gap = (overlap > 0.0).then(|| plan.simulated.step_seconds / overlap - 1.0);
    }
}

/// Writes the policy of recomputation into a plan and its baselines.
fn name_variant(plan: &mut Plan, variant: Variant) {
    plan.recompute.policy = variant.recompute.name().into();
    for cost in plan.baselines.values_mut() {
        *cost = of_variant(cost.clone(), variant);
    }
}

impl Standing {
    fn add(&mut self, variant: Variant, mut answer: PlanAnswer) {
        name_variant(&mut answer.plan, variant);
        self.bounds.push(answer.plan.lower_bound);
        self.overlaps.extend(answer.plan.overlap.map(|bound| bound.lower_bound_seconds));
        let step = |answer: &PlanAnswer| answer.plan.simulated.step_seconds;
        if self.best.as_ref().is_none_or(|(_, best)| step(&answer) < step(best)) {
            self.best = Some((variant, answer));
        }
    }

    /// Counts a variant of which only the computing is known.
    fn bound(&mut self, computing: i64) {
        self.bounds.push(computing);
        self.overlaps.push(computing as f64 / 1e12);
    }

    fn failed(&mut self, entry: &Entry, error: PlanError) {
        let own = Failure { variant: entry.variant, error, memory: entry.bounds.memory };
        // The proof that nothing fits is of the searched space; the bound with overlap is of all plans.
        self.overlaps.push(entry.bounds.computing as f64 / 1e12);
        if !own.is_proof() {
            // What was not found may exist: only its computing bounds it.
            self.bounds.push(entry.bounds.computing);
        }
        // Where one variant may have a plan, the refusal must not sound like a proof. Of others the leanest counts.
        let rank = |own: &Failure| (own.is_proof(), own.memory);
        if self.failure.as_ref().is_none_or(|known| rank(&own) <= rank(known)) {
            self.failure = Some(own);
        }
    }

    fn finish(self, notes: Notes) -> Result<(Variant, PlanAnswer), (Option<Variant>, PlanError)> {
        let Some((variant, mut answer)) = self.best else {
            return Err(match self.failure {
                Some(failure) => (Some(failure.variant), failure.error),
                None => {
                    let reason = "there are no variants of the step to plan".into();
                    (None, PlanError::NoPlan { solver: "variants".into(), reason })
                }
            });
        };
        let plan = &mut answer.plan;
        let least = self.bounds.iter().copied().min().unwrap_or(plan.lower_bound);
        lower_bounds(plan, least, self.overlaps.iter().copied().fold(f64::INFINITY, f64::min));
        if let Some(failure) = self.failure.filter(|failure| failure.variant.keeps_no_less_than(variant)) {
            plan.warnings.push(format!(
                "no plan with {} was found that keeps the memory limit",
                failure.variant.options()
            ));
        }
        plan.warnings.extend(notes.warnings);
        plan.search_notes.extend(notes.search);
        Ok((variant, answer))
    }
}
