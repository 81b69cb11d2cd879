//! Strategies: every way to find an assignment for a training step on a machine, behind one trait.
//!
//! | name | space | found by |
//! |---|---|---|
//! | `auto` | everything | all other strategies, and a random walk on the simulated step |
//! | `exact` | everything | reductions, bounds, branch and bound |
//! | `optcnn` | splits of the output's dimensions only | OptCNN's eliminations |
//! | `pase` | everything (PaSE's iteration space) | PaSE's dynamic program |
//! | `mcmc` | everything, and pins on small machines | FlexFlow's random walk on the simulated step |
//! | `place` | whole layers on devices | partitioning, then moves on the simulated step |
//! | `soybean` | a tiling of every tensor per binary cut, fewest elements moved | SoyBean's k cuts |
//! | `soybean-time` | the same, least time of moves: ours, not the paper's | the same |
//! | `data`, `model`, `owt`, `megatron`, `zero1`, `zero2`, `fsdp`, `hsdp` | one config per op, by rule | nothing is searched |
//!
//! A [`Planner`] holds a request's inputs and everything that strategies share. A [`Solution`] is a strategy's answer, a
//! value until [`plan`] writes it down. One file per strategy: a new one is a file and a line in [`STRATEGIES`].
//!
//! ```
//! use shardwright_machine::builtin;
//! use shardwright_plan::Constraints;
//! use shardwright_search::Control;
//! use shardwright_strategies::{Planner, find, plan};
//! use shardwright_zoo::{BuildOptions, build};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let graph = build("mlp:batch=64,hidden=1024,layers=2", &BuildOptions::default())?;
//! let machine = builtin("flat:4")?;
//! let planner = Planner::new(&graph, &machine, None, false);
//! let plan = plan(&planner, find("exact")?, &Constraints::default(), &Control::new())?.plan;
//! assert!(plan.proved_optimal);
//! assert!(plan.baselines.values().all(|baseline| plan.objective <= baseline.objective));
//! # Ok(())
//! # }
//! ```

mod auto;
mod balanced_pipeline;
mod baselines;
pub mod chain;
mod describe;
mod error;
mod exact;
mod expert;
mod first_answers;
mod keep_search;
mod known_plan;
mod mcmc;
mod memory_descent;
mod migration;
mod moves;
mod network_search;
mod optcnn;
mod pase;
mod pins;
pub mod pipeline;
mod place;
mod planner;
mod polish;
mod prime_search;
pub mod recipes;
mod recompute_ops;
mod refine;
mod solution;
mod soybean;
mod stored_ops;
mod variant_baselines;
mod variant_race;
mod variants;

pub use balanced_pipeline::BalancedPipeline;
pub use baselines::PricedRecipe;
pub use describe::{PlanAnswer, plan};
pub use error::StrategyError;
pub use expert::{EXPERT, Expert};
pub use keep_search::{KeepAnswer, cheapest_set};
pub use migration::{Migration, migrate, slowdowns};
pub use moves::Moves;
pub use planner::Planner;
pub use refine::{Refinement, refine};
pub use shardwright_soybean::SoyBeanError;
pub use solution::Solution;
pub use soybean::count_moves;
pub use variant_race::{VariantAnswer, VariantError, plan_variants};
pub use variants::{Variant, VariantGraph, VariantGraphError, VariantInputs};

use shardwright_plan::{Constraints, Optimised};
use shardwright_search::Control;
use shardwright_suggest::did_you_mean;

/// A way to find an assignment.
pub trait Strategy: Sync {
    /// The name that users type.
    fn name(&self) -> &'static str;

    /// A line that says what it does.
    fn about(&self) -> &'static str;

    /// The quantity that it minimises.
    fn optimises(&self) -> Optimised;

    /// Whether it searches within a memory limit. The others only check it.
    fn searches_within_memory(&self) -> bool;

    /// Whether a recipe is an answer of this strategy, in any variant of the step.
    fn accepts(&self, _recipe: &recipes::Recipe) -> bool {
        false
    }

    /// Whether it searches until its time is over, or its proposals are used up.
    fn takes_all_time(&self) -> bool {
        false
    }

    /// Whether a limit of proposals ends its walks.
    fn takes_proposals(&self) -> bool {
        false
    }

    /// Finds an assignment that keeps the constraints.
    ///
    /// # Errors
    /// Where none is found, or it cannot be simulated.
    fn solve<'a>(
        &self,
        planner: &Planner<'a>,
        constraints: &Constraints,
        control: &Control<'_>,
    ) -> Result<Solution<'a>, StrategyError>;
}

/// All strategies; the first is the default.
pub static STRATEGIES: [&dyn Strategy; 18] = [
    &auto::Auto,
    &exact::Exact,
    &optcnn::OptCnn,
    &pase::Pase,
    &mcmc::Mcmc,
    &place::Place,
    &soybean::SOYBEAN,
    &soybean::SOYBEAN_TIME,
    &recipes::DATA,
    &recipes::MODEL,
    &recipes::OWT,
    &recipes::MEGATRON,
    &recipes::ZERO1,
    &recipes::ZERO2,
    &recipes::FSDP,
    &recipes::HSDP,
    &recipes::EP,
    &recipes::MEGATRON_SP,
];

/// The strategy of a name.
///
/// # Errors
/// Where there is none.
pub fn find(name: &str) -> Result<&'static dyn Strategy, StrategyError> {
    STRATEGIES.iter().copied().find(|strategy| strategy.name() == name).ok_or_else(|| {
        StrategyError::Unknown {
            name: name.chars().take(40).collect(),
            nearest: did_you_mean(name, STRATEGIES.iter().map(|strategy| strategy.name())),
            known: STRATEGIES.iter().map(|strategy| strategy.name()).collect::<Vec<_>>().join(", "),
        }
    })
}
