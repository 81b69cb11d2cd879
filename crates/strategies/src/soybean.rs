//! `soybean`: SoyBean's tilings as configs of ops, and its measure for any assignment.
//!
//! SoyBean (Wang et al., arXiv 1805.04170) gives every op one aligned request per cut, which is the factor that the cut's axis
//! splits: a config on the machine's prime axes. Tilings of tensors are not part of an assignment: a tensor goes straight from
//! the layout in which it is produced to those in which it is read. Weights are the exception: they are stored as their update
//! reads them, and the update has the weight's tiling.

use crate::{
    Planner, Solution, Strategy,
    error::StrategyError,
    recipes::{DATA, MODEL, OWT, Recipe},
};
use shardwright_cost::Comm;
use shardwright_plan::{Constraints, Context, MoveCount, Optimised, PlanError};
use shardwright_search::Control;
use shardwright_soybean::{Cuts, Objective, count, solve};
use shardwright_space::{Assignment, Config};
use std::sync::Arc;

/// SoyBean's cuts by one measure.
pub struct SoyBean {
    name: &'static str,
    about: &'static str,
    objective: Objective,
}

/// The paper's measure: elements moved.
pub static SOYBEAN: SoyBean = SoyBean {
    name: "soybean",
    about: "SoyBean: tilings that move the fewest elements, by successive binary cuts",
    objective: Objective::Elements,
};

/// Our measure: time of the moves.
pub static SOYBEAN_TIME: SoyBean = SoyBean {
    name: "soybean-time",
    about: "SoyBean's cuts, with moves weighted by their time (not in the paper)",
    objective: Objective::Time,
};

impl Strategy for SoyBean {
    fn name(&self) -> &'static str {
        self.name
    }

    fn about(&self) -> &'static str {
        self.about
    }

    fn optimises(&self) -> Optimised {
        Optimised::Moves
    }

    fn searches_within_memory(&self) -> bool {
        false
    }

    fn solve<'a>(
        &self,
        planner: &Planner<'a>,
        constraints: &Constraints,
        control: &Control<'_>,
    ) -> Result<Solution<'a>, StrategyError> {
        // Weights have tilings of their own: the untied space.
        let context = Arc::clone(planner.untied_prime()?);
        let micro_batches = context.graph.micro_batches.get();
        if micro_batches > 1 {
            let reason = format!("its tilings know no sums over {micro_batches} micro-batches");
            return Err(PlanError::NoPlan { solver: self.name.into(), reason }.into());
        }
        let (shapes, comm) = (&context.shapes, context.resharder.comm());
        let cuts = solve(context.graph, shapes, comm, self.objective, control)?;
        let mut least = move_count(&cuts);
        let mut assignment = Assignment::new(cuts.configs);
        if self.objective == Objective::Elements {
            // Each cut is the best one after those before it; a recipe can still be better at the end.
            let recipes: [&Recipe; 3] = [&DATA, &MODEL, &OWT];
            for recipe in recipes {
                let known = recipe.assignment(&context);
                match count_moves(&context, &known, control) {
                    Ok(other) if other.total_elements < least.total_elements => {
                        // Its cuts are given, not found.
                        (assignment, least) = (known, MoveCount { proved: false, ..other });
                    }
                    _ => {}
                }
            }
        }
        // Iterations are those of the cuts' solver.
        let costs = context.price_within(&assignment, &Control { iterations: None, ..control.clone() })?;
        let solution = Solution::priced(context, assignment, costs, self.optimises());
        Solution { moves: Some(least), ..solution }.checked(constraints, self.name)
    }
}

fn move_count(cuts: &Cuts) -> MoveCount {
    MoveCount { cuts: cuts.cuts.clone(), total_elements: cuts.total_elements(), proved: cuts.proved }
}

/// Elements that an assignment moves by SoyBean's measure; an op that it replicates counts as split in the way that moves the
/// fewest.
///
/// # Errors
/// Where the machine's devices are not a power of two, an op is pinned, or the time runs out.
pub fn count_moves(
    context: &Context<'_>,
    assignment: &Assignment,
    control: &Control<'_>,
) -> Result<MoveCount, StrategyError> {
    let primes = context.machine.mesh();
    let configs: Vec<Config> =
        assignment.configs.iter().map(|config| config.on_primes(context.mesh())).collect();
    let comm = Comm::new(context.machine, primes);
    Ok(move_count(&count(context.graph, &context.shapes, &comm, &configs, control)?))
}
