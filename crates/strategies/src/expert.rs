//! The best uniform plan without a pipeline: what a trainer's flags can express, with all blocks split alike. It is a candidate of
//! `auto`, and the baseline `expert` of every plan.

use crate::{
    Planner, Solution,
    describe::{PlanAnswer, baseline_cost},
    error::StrategyError,
    known_plan::KnownPlan,
    pipeline::{PricedUniform, UniformPricer, UniformScope, degrees, search, whole_graph, whole_step},
    variants::{Variant, VariantInputs},
};
use shardwright_graph::Graph;
use shardwright_plan::{BaselineCost, Constraints, PlanDegrees};
use shardwright_search::Control;
use shardwright_space::on_finer_axes;
use std::num::NonZeroU32;

/// The name of the baseline.
pub const EXPERT: &str = "expert";
/// The search takes at most one in so many parts of the time.
const SEARCH: u32 = 6;
/// The search and the simulations of whole steps together.
const SEARCH_AND_STEPS: u32 = 4;

/// The best uniform plan of a model's step.
pub struct Expert {
    /// Its micro-batches and recomputation.
    pub variant: Variant,
    /// Its price.
    pub cost: BaselineCost,
    /// Seconds that no plan's step is shorter than, in any number of micro-batches and whatever it recomputes.
    pub bound_seconds: f64,
    /// Its degrees.
    pub degrees: PlanDegrees,
    known: KnownPlan,
    /// The same layouts on the machine's prime axes, and the bytes that a device holds there: several short collectives may be
    /// faster than one along a whole role, which trainers run.
    finer: Option<(KnownPlan, u64)>,
}

impl Expert {
    /// Searches the uniform plans of these variants. None where the model is no chain of blocks, ops are fixed, or nothing fits.
    ///
    /// # Errors
    /// Where a plan cannot be simulated.
    pub fn find(
        base: &Graph,
        variants: &[Variant],
        inputs: VariantInputs<'_>,
        constraints: &Constraints,
        control: &Control<'_>,
    ) -> Result<Option<Self>, StrategyError> {
        // Programs of engines and fixed configs are outside of the space of trainers.
        if constraints.spmd || !constraints.configs.is_empty() || inputs.machine.devices() == 1 {
            return Ok(None);
        }
        let Ok(pricer) = UniformPricer::new(base, inputs.machine, inputs.costs) else { return Ok(None) };
        let limit = constraints.memory.or_else(|| inputs.machine.memory_limit());
        let scope = UniformScope { most_stages: Some(1), variants: Some(variants) };
        let quiet = Control { progress: None, ..control.clone() };
        let found = search(&pricer, limit, scope, &quiet.share(SEARCH))?;
        let limits = quiet.share(SEARCH_AND_STEPS);
        let mut best: Option<Self> = None;
        for priced in found.into_finalists() {
            let hopeless = |best: &Self| priced.least_seconds() >= best.known.seconds || limits.is_over();
            if best.as_ref().is_some_and(hopeless) || (best.is_none() && control.is_over()) {
                continue;
            }
            let own = Self::of(base, &pricer, &priced, variants, inputs, constraints)?;
            if let Some(own) =
                own.filter(|own| best.as_ref().is_none_or(|best| own.known.seconds < best.known.seconds))
            {
                best = Some(own);
            }
        }
        if let Some(best) = &mut best
            && !limits.is_over()
        {
            best.finer = best.on_prime_axes(base, inputs, constraints)?;
        }
        Ok(best)
    }

    /// The plan on the machine's prime axes, if it is faster there.
    fn on_prime_axes(
        &self,
        base: &Graph,
        inputs: VariantInputs<'_>,
        constraints: &Constraints,
    ) -> Result<Option<(KnownPlan, u64)>, StrategyError> {
        let Ok(step) = self.variant.graph(base) else { return Ok(None) };
        let mesh = inputs.machine.mesh().clone();
        let assignment = on_finer_axes(&self.known.assignment, &self.known.mesh, &mesh);
        let source = format!("{} on prime axes", self.known.source);
        let known = KnownPlan { seconds: f64::INFINITY, mesh, assignment, source, ..self.known.clone() };
        let planner = inputs.planner(&step.graph);
        let Some(solution) = known.solution(&planner, constraints)? else { return Ok(None) };
        let seconds = solution.step.map_or(f64::INFINITY, |step| step.times.step_seconds);
        let held = solution.costs.peak_memory.0;
        Ok((seconds < self.known.seconds).then_some((KnownPlan { seconds, ..known }, held)))
    }

    /// The fastest known plan with these layouts, and the bytes that a device holds.
    pub(crate) fn fastest(&self) -> (&KnownPlan, u64) {
        match &self.finer {
            Some((finer, held)) => (finer, *held),
            None => (&self.known, self.cost.peak_memory_bytes),
        }
    }

    /// Makes the fastest plan with these layouts a candidate of `auto`, if the planner is that of its variant.
    ///
    /// # Errors
    /// Where it cannot be priced.
    pub fn keep_in(
        &self,
        variant: Variant,
        planner: &Planner<'_>,
        constraints: &Constraints,
    ) -> Result<(), StrategyError> {
        if self.variant == variant
            && let Some(solution) = self.fastest().0.solution(planner, constraints)?
        {
            planner.keep(EXPERT, constraints, &solution);
        }
        Ok(())
    }

    /// A priced plan with its whole step simulated. None where it breaks a constraint, or its program is too large.
    fn of(
        base: &Graph,
        pricer: &UniformPricer<'_>,
        priced: &PricedUniform,
        variants: &[Variant],
        inputs: VariantInputs<'_>,
        constraints: &Constraints,
    ) -> Result<Option<Self>, StrategyError> {
        let plan = &priced.plan;
        let count = NonZeroU32::new(plan.micro_batches).unwrap_or(NonZeroU32::MIN);
        let asked = variants.iter().find(|own| own.micro_batches == count && own.recompute == plan.recompute);
        let Some(&variant) = asked else { return Ok(None) };
        let whole = whole_graph(pricer, plan)?;
        let (context, assignment) = whole_step(pricer, priced, &whole)?;
        let source = format!("uniform plan {plan}");
        let (mesh, untied) = (context.mesh().clone(), inputs.untied);
        let known = KnownPlan { seconds: f64::INFINITY, mesh, untied, assignment, source };
        let Ok(step) = variant.graph(base) else { return Ok(None) };
        let planner = inputs.planner(&step.graph);
        let Some(solution) = known.in_variant(&whole.graph, &planner, constraints)? else { return Ok(None) };
        let limit = constraints.memory.or_else(|| inputs.machine.memory_limit());
        let cost = baseline_cost(&step.graph, &solution.costs, solution.step, limit);
        let cost = BaselineCost { recompute: variant.recompute.name().into(), ..cost };
        let (seconds, assignment) = (cost.step_seconds, solution.assignment);
        let known = KnownPlan { seconds, assignment, ..known };
        let bound_seconds = pricer.step_lower_bound()? as f64 / 1e12;
        Ok(Some(Self { variant, cost, bound_seconds, degrees: degrees(priced), known, finer: None }))
    }

    /// The uniform plan as an answer, if the planner is that of its variant.
    ///
    /// # Errors
    /// Where it cannot be priced.
    pub fn solution<'a>(
        &self,
        variant: Variant,
        planner: &Planner<'a>,
        constraints: &Constraints,
    ) -> Result<Option<Solution<'a>>, StrategyError> {
        if self.variant == variant { self.known.solution(planner, constraints) } else { Ok(None) }
    }

    /// Writes the baseline and the bound beside a plan, and the degrees into it where it is this one.
    pub(crate) fn write_beside(self, answer: &mut PlanAnswer) {
        let is_answer = self.known.mesh.axes() == answer.mesh.axes()
            && self.known.assignment == answer.assignment
            && self.cost.micro_batches == answer.plan.micro_batches;
        if is_answer {
            answer.plan.uniform = Some(self.degrees);
        }
        let step_seconds = answer.plan.simulated.step_seconds;
        answer.plan.overlap = answer.plan.overlap.map(|own| own.raised_to(self.bound_seconds, step_seconds));
        // Beside a simulated step, only simulated ones are comparable.
        if answer.plan.overlap.is_some() {
            answer.plan.baselines.insert(EXPERT.into(), self.cost);
        }
    }
}
