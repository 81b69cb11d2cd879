//! A request's inputs, and everything that strategies share: each part is built once, when it is first needed.

use crate::{
    Solution,
    baselines::{PricedRecipe, first_recipes, price_recipes},
    error::StrategyError,
};
use shardwright_cost::CostFile;
use shardwright_graph::Graph;
use shardwright_machine::{Machine, Mesh};
use shardwright_plan::{Constraints, Context, PlanError, SearchProblem};
use shardwright_search::Control;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// A strategy's answer under some constraints.
struct KnownAnswer<'a> {
    strategy: &'static str,
    constraints: Constraints,
    solution: Solution<'a>,
}

/// A graph, a machine and costs, with what strategies share.
pub struct Planner<'a> {
    graph: &'a Graph,
    machine: &'a Machine,
    costs: Option<&'a CostFile>,
    untied: bool,
    prime: OnceLock<Arc<Context<'a>>>,
    problem: OnceLock<SearchProblem<'a>>,
    untied_prime: OnceLock<Arc<Context<'a>>>,
    recipes: OnceLock<Vec<PricedRecipe<'a>>>,
    answers: Mutex<Vec<KnownAnswer<'a>>>,
}

impl<'a> Planner<'a> {
    /// Nothing is built before a strategy needs it.
    pub fn new(graph: &'a Graph, machine: &'a Machine, costs: Option<&'a CostFile>, untied: bool) -> Self {
        Self {
            graph,
            machine,
            costs,
            untied,
            prime: OnceLock::new(),
            problem: OnceLock::new(),
            untied_prime: OnceLock::new(),
            recipes: OnceLock::new(),
            answers: Mutex::default(),
        }
    }

    /// The machine.
    pub fn machine(&self) -> &'a Machine {
        self.machine
    }

    /// The step.
    pub(crate) fn graph(&self) -> &'a Graph {
        self.graph
    }

    /// Measured operator costs.
    pub(crate) fn costs(&self) -> Option<&'a CostFile> {
        self.costs
    }

    /// Whether every op chooses for itself.
    pub(crate) fn is_untied(&self) -> bool {
        self.untied
    }

    /// The search problem, with tables as large as the control's memory allows.
    ///
    /// # Errors
    /// Where it cannot be built, or the control stops the building.
    pub fn problem(&self, control: &Control<'_>) -> Result<&SearchProblem<'a>, PlanError> {
        if let Some(problem) = self.problem.get() {
            return Ok(problem);
        }
        // Iterations are those of a solver: they do not stop the building.
        let control = Control { iterations: None, enough: None, ..control.clone() };
        let problem = SearchProblem::within(&*self.prime()?, self.untied, &control)?;
        Ok(self.problem.get_or_init(|| problem))
    }

    /// The search problem, if a strategy needed it.
    pub(crate) fn problem_if_built(&self) -> Option<&SearchProblem<'a>> {
        self.problem.get()
    }

    /// The search problem of choosing per layer.
    ///
    /// # Errors
    /// As [`Planner::problem`].
    pub(crate) fn tied_problem(&self, control: &Control<'_>) -> Result<SearchProblem<'a>, PlanError> {
        let control = Control { iterations: None, enough: None, ..control.clone() };
        SearchProblem::within(&*self.prime()?, false, &control)
    }

    /// The context on a mesh.
    ///
    /// # Errors
    /// Where the graph has no ops, or the costs are of another device.
    pub fn context(&self, mesh: Mesh, untied: bool) -> Result<Arc<Context<'a>>, PlanError> {
        Ok(Arc::new(self.prime()?.with(mesh, untied)))
    }

    /// The context on the machine's prime axes.
    ///
    /// # Errors
    /// As [`Planner::context`].
    pub fn prime(&self) -> Result<Arc<Context<'a>>, PlanError> {
        if let Some(context) = self.prime.get() {
            return Ok(Arc::clone(context));
        }
        let mesh = self.machine.mesh().clone();
        let context = Context::new(self.graph, self.machine, self.costs, mesh, self.untied)?;
        Ok(Arc::clone(self.prime.get_or_init(|| Arc::new(context))))
    }

    /// The untied context on the machine's prime axes. It keeps the reshard paths that were found, which take long on many
    /// axes.
    ///
    /// # Errors
    /// As [`Planner::context`].
    pub(crate) fn untied_prime(&self) -> Result<&Arc<Context<'a>>, PlanError> {
        if let Some(context) = self.untied_prime.get() {
            return Ok(context);
        }
        let context = self.context(self.machine.mesh().clone(), true)?;
        Ok(self.untied_prime.get_or_init(|| context))
    }

    /// Every recipe on the mesh that suits it best, without simulated steps; where the time is up, until one keeps the
    /// constraints.
    ///
    /// # Errors
    /// Where a recipe cannot be priced.
    pub(crate) fn first_recipes(
        &self,
        constraints: &Constraints,
        control: &Control<'_>,
    ) -> Result<Vec<PricedRecipe<'a>>, StrategyError> {
        first_recipes(&self.prime()?, constraints, control)
    }

    /// Every recipe on the meshes that suit it. Where the time was up at the first call: recipes until one of them keeps the
    /// constraints.
    ///
    /// # Errors
    /// Where a recipe cannot be priced or simulated.
    pub fn recipes(
        &self,
        constraints: &Constraints,
        control: &Control<'_>,
    ) -> Result<&[PricedRecipe<'a>], StrategyError> {
        if let Some(recipes) = self.recipes.get() {
            return Ok(recipes);
        }
        let recipes = price_recipes(&self.prime()?, constraints, control)?;
        // A list that ran out of time before its first recipe is not kept: a caller with more time prices it.
        if recipes.is_empty() {
            return Ok(&[]);
        }
        Ok(self.recipes.get_or_init(|| recipes))
    }

    /// Keeps a strategy's answer: `auto` takes it as a candidate and does not run the strategy again.
    pub fn keep(&self, strategy: &'static str, constraints: &Constraints, solution: &Solution<'a>) {
        let constraints = constraints.clone();
        let answer = KnownAnswer { strategy, constraints, solution: solution.clone() };
        self.answers.lock().unwrap_or_else(PoisonError::into_inner).push(answer);
    }

    /// The answer of a strategy that was kept.
    pub(crate) fn kept(&self, strategy: &str, constraints: &Constraints) -> Option<Solution<'a>> {
        let answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        let known = |own: &&KnownAnswer<'a>| own.strategy == strategy && own.constraints == *constraints;
        answers.iter().find(known).map(|own| own.solution.clone())
    }
}
