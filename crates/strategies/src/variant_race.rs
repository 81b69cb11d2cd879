//! Plans the variants of a step ([`crate::variants`]) and returns the one with the shortest simulated step.
//!
//! 1. Variants get lower bounds and first answers: the best uniform plan ([`crate::expert`]) and the recipes that fit
//!    ([`crate::first_answers`]). The fastest of them is the incumbent: it is the answer where no search finds a faster plan,
//!    however little time there is.
//! 2. The variants are searched, the one with the shortest first answer first. It gets two thirds of the time, and each one after
//!    it two thirds of what is left. A variant whose computing alone takes longer than the best step is not searched. Nor is one
//!    that keeps less than the best plan's variant, where that plan takes at most [`BINDING`] of the memory limit.
//! 3. After each search, the configs of its answer are tried in the other variants ([`KnownPlan::transfer`]).
//!
//! The reported bound is the least over all variants that are not ruled out. A variant that was not searched counts
//! with its computing. Variants that are left out because memory does not bind the plan are not covered; a note says so.

use crate::{
    Planner, Strategy,
    describe::{PlanAnswer, plan},
    error::StrategyError,
    expert::Expert,
    first_answers::{Entry, FirstAnswers, first_answers},
    known_plan::KnownPlan,
    recipes::RECIPES,
    recompute_ops::plan_ops,
    variant_baselines::of_variant,
    variants::{Variant, VariantGraph, VariantInputs},
};
use shardwright_graph::Graph;
use shardwright_machine::show_bytes;
use shardwright_plan::{Constraints, Optimised, Plan, PlanError, memory_lower_bound};
use shardwright_search::{Control, gap};

/// The share of the memory limit above which a plan counts as limited by it, in percent.
const BINDING: u64 = 75;
/// A search leaves one in so many parts of the remaining time to other variants.
const OTHER_VARIANTS: u32 = 3;
/// The configs of an answer may be tried in other variants for one in so many parts of the remaining time.
const TRANSFERS: u32 = 2;

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
    // Recipes by name search nothing, and are held against nothing.
    let expert = match strategy.optimises() {
        Optimised::Nothing => None,
        _ => Expert::find(base, variants, inputs, constraints, control)?,
    };
    let race = Race { base, inputs, strategy, constraints, control, expert: expert.as_ref() };
    let mut found = race.run(variants)?;
    if let Some(expert) = expert {
        expert.write_beside(&mut found.answer);
    }
    Ok(found)
}

/// What is said of the race in the plan.
struct Notes {
    /// What people must know.
    warnings: Vec<String>,
    /// How the plan was found.
    search: Vec<String>,
}

/// The inputs of a race.
pub(crate) struct Race<'r, 'g> {
    pub base: &'g Graph,
    pub inputs: VariantInputs<'r>,
    pub strategy: &'r dyn Strategy,
    pub constraints: &'r Constraints,
    pub control: &'r Control<'r>,
    /// The best uniform plan.
    pub expert: Option<&'r Expert>,
}

impl<'g> Race<'_, 'g> {
    /// Plans the variants.
    fn run(&self, variants: &[Variant]) -> Result<VariantAnswer<'g>, VariantError<'g>> {
        if let &[only] = variants {
            return self.only(only);
        }
        let FirstAnswers { entries, incumbent, baselines, ruled_out, notes } = first_answers(self, variants)?;
        let mut notes = Notes { warnings: notes, search: Vec::new() };
        if let Some(limit) = self.constraints.memory.filter(|_| ruled_out > 0) {
            notes.search.push(format!(
                "{ruled_out} of {} variants (micro-batches and recomputation) were ruled out: each of their plans needs more than {}",
                variants.len(),
                show_bytes(limit.0)
            ));
        }
        let mut found = self.search(entries, incumbent, notes)?;
        baselines.replace_in(&mut found.answer.plan);
        Ok(found)
    }

    /// The best uniform plan, where it is an answer of the strategy.
    pub(crate) fn known_expert(&self) -> Option<&Expert> {
        self.expert.filter(|_| takes_all(self.strategy))
    }

    /// Plans the only variant.
    fn only(&self, variant: Variant) -> Result<VariantAnswer<'g>, VariantError<'g>> {
        let step = self.step(variant)?;
        let planner = self.inputs.planner(&step.graph);
        let planned = self.bound_memory(&planner).and_then(|needed| match self.impossible(needed) {
            Some(error) => Err(error.into()),
            None => self.plan(variant, &planner, self.control),
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

    /// Plans a variant.
    fn plan(
        &self,
        variant: Variant,
        planner: &Planner<'_>,
        control: &Control<'_>,
    ) -> Result<PlanAnswer, StrategyError> {
        if let Some(expert) = self.known_expert() {
            expert.keep_in(variant, planner, self.constraints)?;
        }
        plan(planner, self.strategy, self.constraints, control)
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

    /// The graph of a variant.
    pub(crate) fn step(&self, variant: Variant) -> Result<VariantGraph<'g>, StrategyError> {
        let refuse = |reason: String| PlanError::NoPlan { solver: self.strategy.name().into(), reason };
        Ok(variant.graph(self.base).map_err(|error| refuse(error.to_string()))?)
    }

    /// Whether memory limits a plan that holds so many bytes.
    pub(crate) fn binds(&self, held: u64) -> bool {
        let limit = self.constraints.memory.map(|limit| limit.0);
        limit.is_some_and(|limit| held.saturating_mul(100) > limit.saturating_mul(BINDING))
    }

    /// Searches the entries, the one with the shortest first answer first.
    fn search(
        &self,
        mut open: Vec<Entry>,
        incumbent: Option<(Variant, KnownPlan)>,
        mut notes: Notes,
    ) -> Result<VariantAnswer<'g>, VariantError<'g>> {
        // A step in a given number of micro-batches is proved for what it keeps; a choice among numbers, for all of them.
        let chosen = open.iter().any(|own| own.variant.micro_batches != open[0].variant.micro_batches);
        let mut standing = Standing { incumbent, ..Standing::default() };
        let mut unsearched: Vec<i64> = Vec::new();
        let mut left_out = 0;
        while let Some(at) = next(&open) {
            let entry = open.remove(at);
            let dominated = standing.best.as_ref().is_some_and(|(variant, answer)| {
                !self.binds(answer.plan.peak_memory_bytes) && variant.keeps_no_less_than(entry.variant)
            });
            if dominated {
                left_out += 1;
                continue;
            }
            let known = standing.seconds();
            if entry.bounds.computing as f64 / 1e12 >= known || (known.is_finite() && self.control.is_over())
            {
                unsearched.push(entry.bounds.computing);
                continue;
            }
            let step = self.step(entry.variant)?;
            let planner = self.inputs.planner(&step.graph);
            // Where the time ended before its bounds were computed, this one still is: it takes no search.
            let memory = if entry.is_bounded() { entry.bounds.memory } else { self.bound_memory(&planner)? };
            if let Some(error) = self.impossible(memory) {
                standing.failed(&entry, error);
                continue;
            }
            // A first answer that memory does not limit leaves nothing to the variants that keep less.
            let alone = open.is_empty() || entry.first_answer.is_some_and(|first| !self.binds(first.held));
            let control = if alone { self.control.clone() } else { self.control.all_but(OTHER_VARIANTS) };
            match self.plan(entry.variant, &planner, &control) {
                Ok(answer) => {
                    drop(planner);
                    self.transfer(&step, &answer, &mut open, &mut standing)?;
                    standing.add(entry.variant, answer);
                }
                Err(StrategyError::Plan(error)) if error.is_without_answer() => {
                    standing.failed(&entry, error);
                }
                Err(error) => {
                    drop(planner);
                    return Err(VariantError { step: Some(Box::new(step)), error });
                }
            }
        }
        self.take_incumbent(&mut standing)?;
        if let Some((_, best)) = standing.best.as_ref().filter(|_| left_out > 0 && chosen) {
            let limit = self.constraints.memory.map_or(u64::MAX, |limit| limit.0).max(1);
            notes.warnings.push(format!(
                "the plan takes {}% of the memory limit, so {left_out} variants that divide further or recompute more were not searched: the \
                 lower bound does not cover them",
                u128::from(best.plan.peak_memory_bytes) * 100 / u128::from(limit)
            ));
        }
        if let Some(&least) = unsearched.iter().min() {
            notes.search.push(format!(
                "{} variants (micro-batches and recomputation) were not searched: their computing alone takes {:.4} s or more",
                unsearched.len(),
                least as f64 / 1e12
            ));
        }
        unsearched.into_iter().for_each(|computing| standing.bound(computing));
        match standing.finish(notes) {
            Ok((variant, answer)) => Ok(VariantAnswer { step: self.step(variant)?, answer }),
            Err((variant, error)) => {
                let step = variant.map(|variant| self.step(variant)).transpose()?.map(Box::new);
                Err(VariantError { step, error: error.into() })
            }
        }
    }

    /// Tries the configs of an answer in open variants, those first that differ least from its own.
    fn transfer(
        &self,
        step: &VariantGraph<'_>,
        answer: &PlanAnswer,
        open: &mut [Entry],
        standing: &mut Standing,
    ) -> Result<(), StrategyError> {
        // Only a strategy whose answers are those of all others takes one from another variant.
        if !takes_all(self.strategy) {
            return Ok(());
        }
        let limits = self.control.share(TRANSFERS);
        let known = KnownPlan {
            seconds: answer.plan.simulated.step_seconds,
            mesh: answer.mesh.clone(),
            untied: answer.plan.space.untied,
            assignment: answer.assignment.clone(),
            source: format!("the search with {}", step.variant.options()),
        };
        // A variant that keeps less is faster only where memory limits the answer.
        let binds = self.binds(answer.plan.peak_memory_bytes);
        let mut near: Vec<&mut Entry> = open.iter_mut().collect();
        near.sort_by_cached_key(|own| {
            let (a, b) = (own.variant.micro_batches.get(), step.variant.micro_batches.get());
            let apart = (own.variant.recompute as i32 - step.variant.recompute as i32).abs();
            ((a.max(b) / a.min(b)), apart)
        });
        for entry in near {
            let best = standing.seconds().min(known.seconds);
            let hopeless = entry.bounds.computing as f64 / 1e12 >= best
                || (!binds && step.variant.keeps_no_less_than(entry.variant));
            if hopeless || limits.is_over() {
                continue;
            }
            let other = self.step(entry.variant)?;
            let planner = self.inputs.planner(&other.graph);
            let Some(own) = known.transfer(&step.graph, &planner, self.constraints)? else { continue };
            if let Some(first) = entry.first_answer.as_mut().filter(|first| own.seconds < first.seconds) {
                first.seconds = own.seconds;
            }
            if own.seconds < best {
                standing.incumbent = Some((entry.variant, own));
            }
        }
        Ok(())
    }

    /// Makes the incumbent the answer where no search found a faster plan.
    fn take_incumbent(&self, standing: &mut Standing) -> Result<(), VariantError<'g>> {
        let searched =
            standing.best.as_ref().map_or(f64::INFINITY, |(_, best)| best.plan.simulated.step_seconds);
        let Some((variant, known)) = standing.incumbent.take().filter(|(_, own)| own.seconds < searched)
        else {
            return Ok(());
        };
        let step = self.step(variant)?;
        let planner = self.inputs.planner(&step.graph);
        match known.plan(&planner, self.strategy, self.constraints, self.control) {
            Ok(answer) => standing.add(variant, answer),
            Err(StrategyError::Plan(error)) if error.is_without_answer() => {}
            Err(error) => {
                drop(planner);
                return Err(VariantError { step: Some(Box::new(step)), error });
            }
        }
        Ok(())
    }
}

/// Whether the answers of all others are those of a strategy.
fn takes_all(strategy: &dyn Strategy) -> bool {
    RECIPES.iter().all(|recipe| strategy.accepts(recipe))
}

/// The open entry with the shortest first answer; of equal ones, and of those without, the first.
fn next(open: &[Entry]) -> Option<usize> {
    let seconds = |at: &usize| open[*at].first_answer.map_or(f64::INFINITY, |first| first.seconds);
    (0..open.len()).min_by(|a, b| seconds(a).total_cmp(&seconds(b)).then(a.cmp(b)))
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
    /// The fastest plan that is known without a search.
    incumbent: Option<(Variant, KnownPlan)>,
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
    /// Seconds of the fastest step that is known.
    fn seconds(&self) -> f64 {
        let searched = self.best.as_ref().map_or(f64::INFINITY, |(_, best)| best.plan.simulated.step_seconds);
        self.incumbent.as_ref().map_or(searched, |(_, known)| known.seconds.min(searched))
    }

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
