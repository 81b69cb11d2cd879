//! Baselines: every recipe, priced on the meshes that suit it.
//!
//! The price of a recipe depends on the mesh. A batch that a merged axis does not divide may still be split on finer axes. A
//! collective over several axes may take longer than the same collective over their merged axis. So each recipe is priced on
//! every mesh that the search may choose, from fine to coarse, and on the prime axes after a merge of those that all its ops
//! use alike. Its baseline is the one with the shortest simulated step.

use crate::{
    Solution, Strategy,
    error::StrategyError,
    recipes::{RECIPES, Recipe},
    refine::agreed,
};
use rayon::prelude::*;
use shardwright_machine::{Machine, Mesh};
use shardwright_plan::{Constraints, Context, Costs, MOST_AXES, Optimised};
use shardwright_search::Control;
use shardwright_sim::{SimulatedStep, simulate_step};
use shardwright_space::{Assignment, SearchMesh};
use std::sync::Arc;

/// A recipe on one mesh, with its price.
#[derive(Clone)]
pub struct PricedRecipe<'a> {
    /// The recipe.
    pub recipe: &'static Recipe,
    /// The mesh.
    pub context: Arc<Context<'a>>,
    /// The recipe's assignment on it.
    pub assignment: Assignment,
    /// Its price.
    pub costs: Costs,
    /// Its simulated step; none where the program is too large, or the time was up and the recipe is simulated on another
    /// mesh.
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

    /// Simulates the step, unless the program is too large.
    fn simulate(&mut self) -> Result<(), StrategyError> {
        match simulate_step(&self.context, &self.assignment).map_err(StrategyError::from) {
            Err(StrategyError::Size(_)) => Ok(()),
            step => {
                self.step = Some(step?);
                Ok(())
            }
        }
    }
}

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

/// All recipes on their meshes, not simulated. Those of one recipe follow each other, the least sum first.
///
/// # Errors
/// Where a recipe cannot be priced.
pub fn price_recipes<'a>(prime: &Arc<Context<'a>>) -> Result<Vec<PricedRecipe<'a>>, StrategyError> {
    let offered = meshes(prime.machine);
    let mut contexts: Vec<Arc<Context<'a>>> = vec![Arc::clone(prime)];
    let mut priced = Vec::new();
    for recipe in RECIPES.into_iter().filter(|recipe| recipe.applies(prime)) {
        let untied = prime.untied || recipe.needs_untied();
        let alike = agreed(prime.mesh(), &recipe.assignment(prime).configs);
        let alike =
            prime.mesh().merge_axes(&alike).ok().filter(|mesh| is_small(mesh) && !offered.contains(mesh));
        for mesh in offered.iter().cloned().chain(alike) {
            let known =
                contexts.iter().find(|context| context.untied == untied && *context.mesh() == mesh).cloned();
            let context = match known {
                Some(context) => context,
                None => {
                    let (graph, machine, costs) = (prime.graph, prime.machine, prime.costs());
                    let context = Arc::new(Context::new(graph, machine, costs, mesh, untied)?);
                    contexts.push(Arc::clone(&context));
                    context
                }
            };
            priced.push((recipe, context));
        }
    }
    let price = |(recipe, context): (&'static Recipe, Arc<Context<'a>>)| {
        let assignment = recipe.assignment(&context);
        let costs = context.price(&assignment)?;
        Ok(PricedRecipe { recipe, context, assignment, costs, step: None })
    };
    let mut priced = priced.into_par_iter().map(price).collect::<Result<Vec<_>, StrategyError>>()?;
    let place = |recipe: &Recipe| RECIPES.iter().position(|other| *other == recipe);
    priced.sort_by_key(|own| (place(own.recipe), own.costs.objective()));
    Ok(priced)
}

/// The recipes with their simulated steps. When the control stops, each is simulated on one mesh only: where its sum is least.
///
/// # Errors
/// Where a recipe cannot be simulated.
pub fn simulate_recipes<'a>(
    priced: &[PricedRecipe<'a>],
    control: &Control<'_>,
) -> Result<Vec<PricedRecipe<'a>>, StrategyError> {
    // Iterations are those of a solver: they do not stop this.
    let control = Control { iterations: None, ..control.clone() };
    let mut priced = priced.to_vec();
    let groups: Vec<&mut [PricedRecipe<'a>]> = priced.chunk_by_mut(|a, b| a.recipe == b.recipe).collect();
    groups.into_par_iter().try_for_each(|group| -> Result<(), StrategyError> {
        for (nth, own) in group.iter_mut().enumerate() {
            if nth == 0 || control.stop(0).is_none() {
                own.simulate()?;
            }
        }
        Ok(())
    })?;
    Ok(priced)
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
