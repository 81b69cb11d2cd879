//! Baselines of a step with several variants: every recipe in the variant that suits it best.
//!
//! No step is shorter than its computing. So a recipe is simulated only in variants in which it may be faster than in those
//! before, and a variant is visited only where that holds for some recipe.

use crate::{
    Planner, PricedRecipe, Strategy, describe::baseline_cost, error::StrategyError, known_plan::KnownPlan,
    variants::Variant,
};
use shardwright_plan::{BaselineCost, Constraints, Plan};
use shardwright_search::Control;
use shardwright_sim::{SimulatedStep, simulate_step};
use std::collections::BTreeMap;

/// Recipes of a variant that are simulated in any case: those with the least sums.
const SIMULATED_RECIPES: usize = 2;

/// The fastest recipe that keeps the constraints.
#[derive(Clone, Copy)]
pub(crate) struct FirstAnswer {
    /// Seconds of its simulated step.
    pub seconds: f64,
    /// Bytes that a device holds.
    pub held: u64,
}

/// What recipes show of a variant.
#[derive(Default)]
pub(crate) struct Visit {
    /// The fastest recipe.
    pub first: Option<FirstAnswer>,
    /// The fastest recipe that is an answer of the strategy.
    pub known: Option<KnownPlan>,
}

/// The recipes in the variants that were visited.
#[derive(Default)]
pub(crate) struct VariantBaselines {
    /// By name: the best cost so far; none where the recipe keeps the constraints in no visited variant.
    best: BTreeMap<&'static str, Option<BaselineCost>>,
}

impl VariantBaselines {
    /// Whether a recipe may be faster in a variant whose plans all compute for so many picoseconds, or fit there only.
    pub fn may_improve(&self, computing: i64) -> bool {
        let seconds = computing as f64 / 1e12;
        self.best.is_empty()
            || self.best.values().any(|best| best.as_ref().is_none_or(|best| best.step_seconds > seconds))
    }

    /// Prices the recipes in a variant. Returns the fastest that keep the constraints.
    pub fn visit(
        &mut self,
        variant: Variant,
        planner: &Planner<'_>,
        strategy: &dyn Strategy,
        constraints: &Constraints,
        control: &Control<'_>,
    ) -> Result<Visit, StrategyError> {
        let mut priced = planner.first_recipes(constraints, control)?;
        priced.iter().for_each(|own| {
            self.best.entry(own.recipe.name()).or_default();
        });
        priced.retain(|own| own.keeps(constraints));
        priced.sort_by_key(|own| own.costs.objective());
        let limit = constraints.memory.or_else(|| planner.machine().memory_limit());
        let Visit { mut first, mut known } = Visit::default();
        for (at, own) in priced.iter().enumerate() {
            let best = self.best.entry(own.recipe.name()).or_default();
            let computing = own.costs.compute() as f64 / 1e12;
            let hopeless = best.as_ref().is_some_and(|best| best.step_seconds <= computing);
            if (hopeless && at >= SIMULATED_RECIPES) || (first.is_some() && control.is_over()) {
                continue;
            }
            let step = simulated(own)?;
            let plan = KnownPlan::of(own, step);
            if first.is_none_or(|first| plan.seconds < first.seconds) {
                first = Some(FirstAnswer { seconds: plan.seconds, held: own.costs.peak_memory.0 });
            }
            // Beside a simulated plan, only simulated steps are comparable.
            if step.is_some() {
                let cost = of_variant(baseline_cost(own.context.graph, &own.costs, step, limit), variant);
                if best.as_ref().is_none_or(|best| cost.is_better_than(best)) {
                    *best = Some(cost);
                }
            }
            if strategy.accepts(own.recipe) && known.as_ref().is_none_or(|known| plan.seconds < known.seconds)
            {
                known = Some(plan);
            }
        }
        Ok(Visit { first, known })
    }

    /// Replaces those baselines of a plan that are better in other variants.
    pub fn replace_in(self, plan: &mut Plan) {
        let found = self.best.into_iter().filter_map(|(name, cost)| Some((name.to_string(), cost?)));
        better_baselines(plan, found);
    }
}

/// Replaces a plan's baselines by those that are better. Without a simulated step, baselines stay as they are.
pub(crate) fn better_baselines(plan: &mut Plan, others: impl IntoIterator<Item = (String, BaselineCost)>) {
    if plan.overlap.is_none() {
        return;
    }
    for (name, cost) in others {
        if plan.baselines.get(&name).is_none_or(|own| cost.is_better_than(own)) {
            plan.baselines.insert(name, cost);
        }
    }
}

/// A cost with the choices of its variant.
pub(crate) fn of_variant(cost: BaselineCost, variant: Variant) -> BaselineCost {
    let micro_batches = variant.micro_batches.get();
    BaselineCost { micro_batches, recompute: variant.recompute.name().into(), ..cost }
}

/// The simulated step of a recipe; none where its program is too large.
fn simulated(own: &PricedRecipe<'_>) -> Result<Option<SimulatedStep>, StrategyError> {
    if own.step.is_some() {
        return Ok(own.step);
    }
    match simulate_step(&own.context, &own.assignment).map_err(StrategyError::from) {
        Err(StrategyError::Size(_)) => Ok(None),
        step => step.map(Some),
    }
}
