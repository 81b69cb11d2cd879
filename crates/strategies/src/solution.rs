//! A strategy's answer: an assignment on a mesh, its price, and what is proved of it.

use crate::error::StrategyError;
use shardwright_plan::{
    CoarseSpace, Constraints, Context, Costs, MoveCount, Optimised, PlacementRow, PlanError, SearchProblem,
    StageTimes, compute_lower_bound, is_on_prime_axes,
};
use shardwright_search::{StopReason, gap};
use shardwright_sim::SimulatedStep;
use shardwright_space::Assignment;
use std::sync::Arc;

/// A strategy's answer.
#[derive(Clone)]
pub struct Solution<'a> {
    /// The mesh that the assignment is on.
    pub context: Arc<Context<'a>>,
    /// The answer.
    pub assignment: Assignment,
    /// Its price.
    pub costs: Costs,
    /// Where the network was searched: no assignment of the space costs less. Zero: nothing is known.
    pub lower_bound: Option<i64>,
    /// No assignment of the searched variables on the machine's prime axes costs less. Zero: nothing is known.
    pub prime_bound: i64,
    /// Why the search stopped.
    pub stop_reason: StopReason,
    /// The quantity that was minimised.
    pub optimised: Optimised,
    /// How many choices all variables had together.
    pub choices: usize,
    /// Where the answer was refined on finer axes: the answer on the coarse ones.
    pub coarse: Option<CoarseSpace>,
    /// For SoyBean: elements that the answer moves.
    pub moves: Option<MoveCount>,
    /// For `place`: the placements that were compared.
    pub placements: Vec<PlacementRow>,
    /// The simulated step, if the strategy simulated it.
    pub step: Option<SimulatedStep>,
    /// What people must know of the answer.
    pub notes: Vec<String>,
    /// How the search came to it.
    pub search_notes: Vec<String>,
    /// Seconds that the parts of the search took.
    pub stages: StageTimes,
}

impl<'a> Solution<'a> {
    /// An assignment with its price, of which nothing is proved.
    ///
    /// # Errors
    /// Where the assignment is not one of the context's graph and mesh.
    pub fn new(
        context: Arc<Context<'a>>,
        assignment: Assignment,
        optimised: Optimised,
    ) -> Result<Self, PlanError> {
        let costs = context.price(&assignment)?;
        Ok(Self::priced(context, assignment, costs, optimised))
    }

    /// An assignment whose price is known, of which nothing is proved.
    pub(crate) fn priced(
        context: Arc<Context<'a>>,
        assignment: Assignment,
        costs: Costs,
        optimised: Optimised,
    ) -> Self {
        Self {
            context,
            assignment,
            costs,
            lower_bound: None,
            prime_bound: 0,
            stop_reason: StopReason::Exhausted,
            optimised,
            choices: 0,
            coarse: None,
            moves: None,
            placements: Vec::new(),
            step: None,
            notes: Vec::new(),
            search_notes: Vec::new(),
            stages: StageTimes::default(),
        }
    }

    /// The price in picoseconds, without overlap.
    pub fn objective(&self) -> i64 {
        self.costs.objective()
    }

    /// Whether no assignment of the searched space costs less.
    pub fn proved_optimal(&self) -> bool {
        self.lower_bound.is_some_and(|bound| self.objective() <= bound)
    }

    /// The same search, with its notes and an answer that another strategy found. The bound of the searched space
    /// does not hold for a plan outside of it; the bound on computing does.
    ///
    /// # Errors
    /// Where the bound cannot be computed.
    pub(crate) fn with_answer_of(
        self,
        other: Solution<'a>,
        problem: Option<&SearchProblem<'a>>,
    ) -> Result<Self, PlanError> {
        let inside = self.coarse.is_none()
            && problem.is_some_and(|problem| {
                problem.context.mesh() == other.context.mesh() && problem.contains(&other.assignment)
            });
        let (mut lower_bound, mut coarse) = (self.lower_bound, self.coarse.clone());
        if !inside {
            if coarse.is_none() && other.context.mesh().axes() != self.context.mesh().axes() {
                coarse = Some(self.as_coarse());
            }
            let computing = compute_lower_bound(&other.context)?;
            lower_bound = Some(computing.max(self.bound_on(&other.context, &other.assignment)));
        }
        let Solution { context, assignment, costs, optimised, step, .. } = other;
        Ok(Self { context, assignment, costs, optimised, step, lower_bound, coarse, ..self })
    }

    /// The bound on prime axes, if it holds for an assignment; else zero.
    pub(crate) fn bound_on(&self, context: &Context<'_>, assignment: &Assignment) -> i64 {
        match self.prime_bound > 0 && is_on_prime_axes(&self.context, context.mesh(), assignment) {
            true => self.prime_bound,
            false => 0,
        }
    }

    /// The answer as one on coarser axes than those of another answer.
    fn as_coarse(&self) -> CoarseSpace {
        let (objective, lower_bound) = (self.objective(), self.lower_bound.unwrap_or(0));
        let axes = self.context.search_mesh.describe();
        CoarseSpace { axes, objective, lower_bound, gap: gap(objective, lower_bound) }
    }

    /// Refuses an answer that breaks a constraint, for strategies that search without them.
    pub(crate) fn checked(self, constraints: &Constraints, name: &str) -> Result<Self, StrategyError> {
        for constraint in &constraints.configs {
            constraint.check(&self.context, &self.assignment)?;
        }
        let peak = self.costs.peak_memory;
        match constraints.memory.filter(|&limit| peak > limit) {
            None => Ok(self),
            Some(limit) => {
                Err(PlanError::OverLimit { solver: name.to_string(), limit: limit.0, needed: peak.0 }.into())
            }
        }
    }
}
