//! Baselines: every recipe, priced on the meshes that suit it.
//!
//! The price of a recipe depends on the mesh. A batch that a merged axis does not divide may still be split on finer axes. A
//! collective over several axes may take longer than the same collective over their merged axis. So each recipe is priced on
//! the prime axes after a merge of those that all its ops use alike, and on every mesh that the search may choose, from fine to
//! coarse. Of meshes on which it is one and the same assignment, the one with the least sum counts. The baseline is the one with
//! the shortest simulated step.
//!
//! A recipe is the first answer of a search. So when the time is up, recipes are still priced until one keeps the constraints, in
//! the order of the memory that they usually need.

use crate::{
    Solution, Strategy,
    error::StrategyError,
    recipes::{DATA, EP, FSDP, HSDP, MEGATRON, MEGATRON_SP, MODEL, OWT, RECIPES, Recipe, ZERO1, ZERO2},
    refine::agreed,
};
use rayon::prelude::*;
use shardwright_lower::lower;
use shardwright_machine::{Bytes, Machine, Mesh};
use shardwright_plan::{
    Constraints, Context, Costs, LayerCosts, MOST_AXES, Optimised, PlanError, network_peak,
};
use shardwright_search::Control;
use shardwright_sim::{SimulatedStep, simulate_program};
use shardwright_space::{Assignment, Config, SearchMesh};
use std::cmp::Reverse;
use std::sync::Arc;

/// A recipe on one mesh, with its price.
pub struct PricedRecipe<'a> {
    /// The recipe.
    pub recipe: &'static Recipe,
    /// The mesh.
    pub context: Arc<Context<'a>>,
    /// The recipe's assignment on it.
    pub assignment: Assignment,
    /// Its price.
    pub costs: Costs,
    /// Its simulated step; none where the program is too large, or the time was up.
    pub step: Option<SimulatedStep>,
}

impl<'a> PricedRecipe<'a> {
    /// Whether it keeps the constraints.
    pub fn keeps(&self, constraints: &Constraints) -> bool {
        constraints.memory.is_none_or(|limit| self.costs.peak_memory <= limit)
            && constraints.configs.iter().all(|own| own.check(&self.context, &self.assignment).is_ok())
    }

    /// The recipe as an answer. Nothing is searched: every variable has one choice.
    pub fn solution(&self) -> Solution<'a> {
        let (context, assignment) = (Arc::clone(&self.context), self.assignment.clone());
        let solution = Solution::priced(context, assignment, self.costs.clone(), Optimised::Nothing);
        Solution { choices: self.context.variables.members.len(), step: self.step, ..solution }
    }
}

/// The recipes, those first that usually hold least.
static LEANEST_FIRST: [&Recipe; 10] =
    [&FSDP, &EP, &MEGATRON_SP, &HSDP, &ZERO2, &ZERO1, &MODEL, &MEGATRON, &OWT, &DATA];

/// The recipes of a step with at most this many ops are priced in milliseconds, so the time does not matter.
const FEW_OPS: usize = 2_000;

/// Whether a mesh has so few axes that all reshard paths are found exactly.
fn is_small(mesh: &Mesh) -> bool {
    mesh.len() <= MOST_AXES
}

/// The finest meshes of four axes at most, of three, and so on; where there is none, one axis per level.
fn meshes(machine: &Machine) -> Vec<Mesh> {
    let finest = |axes| SearchMesh::choose(machine, [], axes, usize::MAX).mesh;
    let mut meshes: Vec<Mesh> = (1..=MOST_AXES).rev().map(finest).collect();
    meshes.dedup();
    meshes
}

/// A recipe and the meshes that it is priced on.
struct OnMeshes<'a> {
    recipe: &'static Recipe,
    /// The first is the one on which axes are merged that all its ops use alike.
    contexts: Vec<Arc<Context<'a>>>,
    /// The bytes that the network counts on the prime axes, if they are known: no program holds less.
    least: Option<Bytes>,
}

/// The contexts of meshes, each built once.
struct Contexts<'a> {
    prime: Arc<Context<'a>>,
    known: Vec<Arc<Context<'a>>>,
}

impl<'a> Contexts<'a> {
    fn on(&mut self, mesh: Mesh, untied: bool) -> Arc<Context<'a>> {
        let same = |own: &&Arc<Context<'a>>| own.untied == untied && *own.mesh() == mesh;
        if let Some(context) = self.known.iter().find(same) {
            return Arc::clone(context);
        }
        let context = Arc::new(self.prime.with(mesh, untied));
        self.known.push(Arc::clone(&context));
        context
    }

    /// The recipe and its meshes.
    fn of(&mut self, recipe: &'static Recipe, offered: &[Mesh], counted: bool) -> OnMeshes<'a> {
        let untied = self.prime.untied || recipe.needs_untied();
        let primes = self.prime.mesh();
        let assignment = recipe.assignment(&self.prime);
        let least = counted.then(|| network_peak(&self.prime, &assignment));
        let alike = agreed(primes, &assignment.configs);
        let alike = primes.merge_axes(&alike).ok().filter(is_small);
        // Merging may only rename axes: plans on the axes that are searched keep their proofs.
        let axes = |mesh: &Mesh| mesh.axes().iter().map(|axis| axis.primes).collect::<Vec<_>>();
        let known = |mesh: Mesh| offered.iter().find(|own| axes(own) == axes(&mesh)).cloned().unwrap_or(mesh);
        let alike = alike.map(known);
        // Only there the first mesh has the same assignment.
        let least = least.filter(|_| alike.is_some());
        let others = offered.iter().filter(|mesh| alike.as_ref() != Some(mesh)).cloned();
        let meshes: Vec<Mesh> = alike.clone().into_iter().chain(others).collect();
        OnMeshes { recipe, contexts: meshes.into_iter().map(|mesh| self.on(mesh, untied)).collect(), least }
    }
}

impl<'a> OnMeshes<'a> {
    /// The recipe on its first mesh. If asked for, the step is simulated, unless the time is up.
    fn first(&self, simulated: bool, control: &Control<'_>) -> Result<PricedRecipe<'a>, StrategyError> {
        let context = &self.contexts[0];
        let assignment = self.recipe.assignment(context);
        let layers = context.layer_costs(&assignment, &Control::new())?;
        self.price(context, assignment, layers, simulated.then_some(control))
    }

    /// The recipe on its other meshes, until the time is up, where it is another assignment, has a smaller sum, or the same
    /// sum on more axes.
    fn others(
        &self,
        first: &PricedRecipe<'a>,
        control: &Control<'_>,
    ) -> Result<Vec<PricedRecipe<'a>>, StrategyError> {
        // Per different assignment on the prime axes: the least sum, and the number of axes.
        let on_primes = |context: &Context<'a>, assignment: &Assignment| -> Vec<Config> {
            assignment.configs.iter().map(|config| config.on_primes(context.mesh())).collect()
        };
        let rank = |context: &Context<'a>, sum: i64| (sum, Reverse(context.mesh().len()));
        let least = rank(&first.context, first.costs.objective());
        let mut known = vec![(on_primes(&first.context, &first.assignment), least)];
        let mut cheaper: Vec<Option<(&Arc<Context<'a>>, Assignment, LayerCosts)>> = vec![None];
        for context in self.contexts.iter().skip(1) {
            let assignment = self.recipe.assignment(context);
            let layers = match context.layer_costs(&assignment, control) {
                Err(PlanError::Stopped(_)) => break,
                layers => layers?,
            };
            let (fine, own) = (on_primes(context, &assignment), rank(context, layers.objective()));
            match known.iter().position(|(other, _)| *other == fine) {
                None => {
                    known.push((fine, own));
                    cheaper.push(Some((context, assignment, layers)));
                }
                Some(at) if own < known[at].1 => {
                    known[at].1 = own;
                    cheaper[at] = Some((context, assignment, layers));
                }
                Some(_) => {}
            }
        }
        let mut priced = Vec::new();
        for (context, assignment, layers) in cheaper.into_iter().flatten() {
            if control.is_over() {
                break;
            }
            priced.push(self.price(context, assignment, layers, Some(control))?);
        }
        Ok(priced)
    }

    fn price(
        &self,
        context: &Arc<Context<'a>>,
        assignment: Assignment,
        layers: LayerCosts,
        simulate_within: Option<&Control<'_>>,
    ) -> Result<PricedRecipe<'a>, StrategyError> {
        let program = lower(context.graph, &context.resharder, &assignment).ok();
        let costs = context.price_program(&assignment, layers, program.as_ref())?;
        let small = context.graph.ops.len() <= FEW_OPS;
        let in_time = simulate_within.is_some_and(|control| small || !control.is_over());
        let step = match program.filter(|_| in_time) {
            None => None,
            Some(program) => {
                match simulate_program(context, &assignment, &program).map_err(StrategyError::from) {
                    Err(StrategyError::Size(_)) => None,
                    step => Some(step?),
                }
            }
        };
        Ok(PricedRecipe { recipe: self.recipe, context: Arc::clone(context), assignment, costs, step })
    }
}

/// A recipe on its first mesh.
///
/// # Errors
/// Where it cannot be priced or simulated.
pub fn price_recipe<'a>(
    prime: &Arc<Context<'a>>,
    recipe: &'static Recipe,
    control: &Control<'_>,
) -> Result<PricedRecipe<'a>, StrategyError> {
    let mut contexts = Contexts { prime: Arc::clone(prime), known: vec![Arc::clone(prime)] };
    contexts.of(recipe, &meshes(prime.machine), false).first(true, control)
}

/// Prices recipes of one step.
struct RecipePricer<'a, 'c> {
    contexts: Contexts<'a>,
    offered: Vec<Mesh>,
    constraints: &'c Constraints,
    control: Control<'c>,
}

impl<'a, 'c> RecipePricer<'a, 'c> {
    fn new(prime: &Arc<Context<'a>>, constraints: &'c Constraints, control: &Control<'c>) -> Self {
        Self {
            contexts: Contexts { prime: Arc::clone(prime), known: vec![Arc::clone(prime)] },
            offered: meshes(prime.machine),
            constraints,
            // Iterations are those of a solver: they do not stop this.
            control: Control { iterations: None, ..control.clone() },
        }
    }

    /// The recipes that differ from all others here, those first that usually hold least.
    fn recipes(&self) -> Vec<&'static Recipe> {
        LEANEST_FIRST.into_iter().filter(|recipe| recipe.applies(&self.contexts.prime)).collect()
    }

    /// Whether there is time for a recipe. The recipes of a small step take none.
    fn has_time(&self) -> bool {
        self.contexts.prime.graph.ops.len() <= FEW_OPS || !self.control.is_over()
    }

    /// The recipes on their first meshes, as far as there is time.
    fn first(&mut self, simulated: bool) -> Result<Vec<(OnMeshes<'a>, PricedRecipe<'a>)>, StrategyError> {
        let mut listed: Vec<OnMeshes<'a>> = Vec::new();
        for recipe in self.recipes() {
            if self.has_time() {
                listed.push(self.contexts.of(recipe, &self.offered, false));
            }
        }
        let own = &*self;
        let price = |on: OnMeshes<'a>| match own.has_time() {
            true => on.first(simulated, &own.control).map(|priced| Some((on, priced))),
            false => Ok(None),
        };
        let priced = listed.into_par_iter().map(price).collect::<Result<Vec<_>, StrategyError>>()?;
        Ok(priced.into_iter().flatten().collect())
    }

    /// Prices what time did not allow, until something is an answer; all in the order of [`RECIPES`], the least sum first.
    fn finish(&mut self, mut priced: Vec<PricedRecipe<'a>>) -> Result<Vec<PricedRecipe<'a>>, StrategyError> {
        let limit = self.constraints.memory;
        for recipe in self.recipes() {
            if priced.iter().any(|own| own.keeps(self.constraints)) {
                break;
            }
            if priced.iter().any(|own| own.recipe == recipe) {
                continue;
            }
            let own = self.contexts.of(recipe, &self.offered, limit.is_some());
            let may_fit = own.least.is_none_or(|least| limit.is_none_or(|limit| least <= limit));
            if may_fit {
                priced.push(own.first(true, &self.control)?);
            }
        }
        let place = |recipe: &Recipe| RECIPES.iter().position(|other| *other == recipe);
        let axes = |own: &PricedRecipe<'a>| Reverse(own.context.mesh().len());
        priced.sort_by_key(|own| (place(own.recipe), own.costs.objective(), axes(own)));
        Ok(priced)
    }
}

/// The recipes on one mesh each, not simulated. When the control stops, until one keeps the constraints.
///
/// # Errors
/// Where a recipe cannot be priced.
pub fn first_recipes<'a>(
    prime: &Arc<Context<'a>>,
    constraints: &Constraints,
    control: &Control<'_>,
) -> Result<Vec<PricedRecipe<'a>>, StrategyError> {
    let mut pricer = RecipePricer::new(prime, constraints, control);
    let first = pricer.first(false)?;
    pricer.finish(first.into_iter().map(|(_, priced)| priced).collect())
}

/// All recipes on their meshes. When the control stops, recipes are priced on one mesh each until one keeps the constraints.
///
/// # Errors
/// Where a recipe cannot be priced or simulated.
pub fn price_recipes<'a>(
    prime: &Arc<Context<'a>>,
    constraints: &Constraints,
    control: &Control<'_>,
) -> Result<Vec<PricedRecipe<'a>>, StrategyError> {
    let mut pricer = RecipePricer::new(prime, constraints, control);
    let first = pricer.first(true)?;
    // Where no recipe fits, better prices of them are of no use. Elsewhere most of the time is the search's.
    let fits = first.iter().any(|(_, priced)| priced.keeps(constraints));
    let part = pricer.control.share(4);
    let others = first.par_iter().map(|(on, priced)| match fits {
        true => on.others(priced, &part),
        false => Ok(Vec::new()),
    });
    let others = others.collect::<Result<Vec<_>, StrategyError>>()?;
    let first = first.into_iter().map(|(_, priced)| priced);
    pricer.finish(first.chain(others.into_iter().flatten()).collect())
}

/// The baseline of a recipe: of its meshes those that keep the constraints, if there are any, then the shortest step.
pub fn baseline<'r, 'a>(
    recipes: &'r [PricedRecipe<'a>],
    name: &str,
    constraints: &Constraints,
) -> Option<&'r PricedRecipe<'a>> {
    let own = recipes.iter().filter(|own| own.recipe.name() == name);
    own.min_by_key(|own| {
        let makespan = own.step.map_or(u64::MAX, |step| step.makespan);
        (!own.keeps(constraints), makespan, own.costs.objective())
    })
}
