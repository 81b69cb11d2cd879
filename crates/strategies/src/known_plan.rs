//! Assignments that are known before a search ends: a recipe's, or the answer of another variant of the step. A race of variants
//! returns the fastest of them where no search finds a faster plan ([`crate::variant_race`]).

use crate::{
    Planner, PricedRecipe, Solution, Strategy, describe::PlanAnswer, describe::plan, error::StrategyError,
};
use shardwright_graph::Graph;
use shardwright_machine::Mesh;
use shardwright_plan::{Constraints, Optimised, compute_lower_bound};
use shardwright_search::Control;
use shardwright_sim::{SimulatedStep, simulate_step};
use shardwright_space::{Assignment, Config};
use std::collections::BTreeMap;

/// An assignment that keeps the constraints, with its price.
#[derive(Clone)]
pub(crate) struct KnownPlan {
    /// Seconds of its simulated step; without overlap where its program is too large.
    pub seconds: f64,
    /// The mesh that it is on.
    pub mesh: Mesh,
    /// Whether every op chooses for itself.
    pub untied: bool,
    /// The assignment.
    pub assignment: Assignment,
    /// The recipe or the search that it comes from, for people.
    pub source: String,
}

impl KnownPlan {
    /// A priced recipe.
    pub fn of(own: &PricedRecipe<'_>, step: Option<SimulatedStep>) -> Self {
        Self {
            seconds: step.map_or(own.costs.objective() as f64 / 1e12, |step| step.times.step_seconds),
            mesh: own.context.mesh().clone(),
            untied: own.context.untied,
            assignment: own.assignment.clone(),
            source: own.recipe.name().into(),
        }
    }

    /// The plan, written down as a strategy's answer. A recipe that is known by now, and faster, takes its place: no baseline
    /// beside the plan is better.
    ///
    /// # Errors
    /// Where it cannot be priced.
    pub fn plan(
        self,
        planner: &Planner<'_>,
        strategy: &dyn Strategy,
        constraints: &Constraints,
        control: &Control<'_>,
    ) -> Result<PlanAnswer, StrategyError> {
        let recipes = planner.recipes(constraints, control)?.iter();
        let accepted = recipes.filter(|own| strategy.accepts(own.recipe) && own.keeps(constraints));
        let simulated = accepted.filter_map(|own| own.step.map(|step| Self::of(own, Some(step))));
        let known = simulated.fold(self, |best, own| if own.seconds < best.seconds { own } else { best });
        let given = Given {
            strategy,
            mesh: &known.mesh,
            untied: known.untied,
            assignment: &known.assignment,
            note: Some(format!("the plan is that of {}: no search found a faster one", known.source)),
        };
        plan(planner, &given, constraints, control)
    }

    /// The plan's configs in another variant of its step, with their price there. None where ops of that variant have no
    /// counterpart, or the constraints are not kept.
    ///
    /// # Errors
    /// Where the assignment cannot be priced.
    pub fn transfer(
        &self,
        graph: &Graph,
        planner: &Planner<'_>,
        constraints: &Constraints,
    ) -> Result<Option<Self>, StrategyError> {
        let Some(solution) = self.in_variant(graph, planner, constraints)? else { return Ok(None) };
        let seconds = solution.step.map_or(f64::INFINITY, |step| step.times.step_seconds);
        Ok(Some(Self { seconds, assignment: solution.assignment, ..self.clone() }))
    }

    /// The plan's configs as an answer in another variant of its step.
    ///
    /// # Errors
    /// As [`KnownPlan::transfer`].
    pub fn in_variant<'a>(
        &self,
        graph: &Graph,
        planner: &Planner<'a>,
        constraints: &Constraints,
    ) -> Result<Option<Solution<'a>>, StrategyError> {
        let Some(assignment) = counterpart(graph, &self.assignment, planner.graph()) else { return Ok(None) };
        Self { assignment, ..self.clone() }.solution(planner, constraints)
    }

    /// The plan as an answer in its variant, with its simulated step. None where it does not suit the step, breaks a constraint, or
    /// its program is too large.
    ///
    /// # Errors
    /// Where the assignment cannot be priced.
    pub fn solution<'a>(
        &self,
        planner: &Planner<'a>,
        constraints: &Constraints,
    ) -> Result<Option<Solution<'a>>, StrategyError> {
        let context = planner.context(self.mesh.clone(), self.untied)?;
        if self.assignment.check(planner.graph(), &context.shapes, context.mesh()).is_err() {
            return Ok(None);
        }
        let solution = Solution::new(context, self.assignment.clone(), Optimised::Nothing)?;
        let Ok(solution) = solution.checked(constraints, "known") else { return Ok(None) };
        match simulate_step(&solution.context, &solution.assignment).map_err(StrategyError::from) {
            Err(StrategyError::Size(_)) => Ok(None),
            step => Ok(Some(Solution { step: Some(step?), ..solution })),
        }
    }
}

/// The assignment of a variant in which every op has the config of the op with its name in another variant, and every clone that
/// of its original. None where an op has no counterpart.
fn counterpart(from: &Graph, assignment: &Assignment, to: &Graph) -> Option<Assignment> {
    if assignment.has_pins() || assignment.pipeline.is_some() {
        return None;
    }
    let known: BTreeMap<&str, &Config> =
        from.ops.iter().zip(&assignment.configs).map(|(node, config)| (node.name.as_str(), config)).collect();
    let mut configs: Vec<Config> = Vec::with_capacity(to.ops.len());
    for node in &to.ops {
        let config = match node.recomputes {
            Some(original) => configs.get(original.index())?.clone(),
            None => (*known.get(node.name.as_str())?).clone(),
        };
        configs.push(config);
    }
    Some(Assignment::of(to, configs))
}

/// An assignment that is known, as a strategy's answer.
pub(crate) struct Given<'s> {
    /// The strategy that it stands for.
    pub strategy: &'s dyn Strategy,
    /// The mesh.
    pub mesh: &'s Mesh,
    /// Whether every op chooses for itself.
    pub untied: bool,
    /// The assignment.
    pub assignment: &'s Assignment,
    /// A fact about it, for people.
    pub note: Option<String>,
}

impl Strategy for Given<'_> {
    fn name(&self) -> &'static str {
        self.strategy.name()
    }

    fn about(&self) -> &'static str {
        self.strategy.about()
    }

    fn optimises(&self) -> Optimised {
        self.strategy.optimises()
    }

    fn searches_within_memory(&self) -> bool {
        true
    }

    fn solve<'a>(
        &self,
        planner: &Planner<'a>,
        constraints: &Constraints,
        control: &Control<'_>,
    ) -> Result<Solution<'a>, StrategyError> {
        let context = planner.context(self.mesh.clone(), self.untied)?;
        let optimised = if self.note.is_some() { Optimised::Simulated } else { Optimised::Sum };
        let mut solution = Solution::new(context, self.assignment.clone(), optimised)?;
        solution.lower_bound = Some(compute_lower_bound(&solution.context)?);
        if let Some(stop) = control.stop_by_time() {
            solution.stop_reason = stop;
        }
        solution.search_notes.extend(self.note.clone());
        solution.checked(constraints, self.name())
    }
}
