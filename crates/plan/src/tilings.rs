//! SoyBean in planning: its tilings as configs of ops, and its measure for everybody else's configs.
//!
//! SoyBean gives every op one aligned request per cut, which is the factor that the cut's axis splits: a config on the
//! machine's prime axes. Tensors' own tilings are not part of a plan: a tensor goes straight from the layout in which
//! it is made to those in which it is read. Weights are the exception: they are stored as their update works, and
//! the update has the weight's tiling.

use crate::{error::PlanError, problem::Problem};
use serde::{Deserialize, Serialize};
use shardwright_cost::Comm;
use shardwright_search::Control;
use shardwright_soybean::{Cuts, Objective, count, solve};
use shardwright_space::{AxisUse, Config};

/// What a plan moves by SoyBean's measure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// Elements that each cut moves in one of the groups of devices that it cuts, first cut first.
    pub cuts: Vec<u64>,
    /// Elements that all devices move: `Σ 2^(i-1) cuts[i]`.
    pub total_elements: u64,
    /// Whether every cut moves the least that it can after those before.
    pub proved: bool,
}

impl From<&Cuts> for Moved {
    fn from(found: &Cuts) -> Self {
        Self { cuts: found.cuts.clone(), total_elements: found.total_elements(), proved: found.proved }
    }
}

/// SoyBean's configs, in the graph's order, and what they move.
pub(crate) fn tile(
    problem: &Problem<'_>,
    objective: Objective,
    control: &Control<'_>,
) -> Result<(Vec<Config>, Moved), PlanError> {
    let found = solve(problem.graph, &problem.shapes, problem.relayouts.comm(), objective, control)?;
    let moved = Moved::from(&found);
    Ok((found.configs, moved))
}

/// What any configs on the problem's mesh move by SoyBean's measure; ops that they repeat are counted as split in the way
/// that moves the least.
///
/// # Errors
/// Where the machine's devices are not a power of two, an op is pinned, or the time runs out.
pub fn moved(problem: &Problem<'_>, configs: &[Config], control: &Control<'_>) -> Result<Moved, PlanError> {
    let primes = problem.machine.mesh();
    let fine = |config: &Config| {
        let mut fine = Config::replicated(primes.len());
        for (axis, &used) in problem.mesh().axes().iter().zip(config.uses()) {
            for prime in axis.primes.iter().filter(|_| used != AxisUse::Replicate) {
                fine.set(prime, used);
            }
        }
        fine
    };
    let configs: Vec<Config> = configs.iter().map(fine).collect();
    let comm = Comm::new(problem.machine, primes);
    let found = count(problem.graph, &problem.shapes, &comm, &configs, control)?;
    Ok(Moved::from(&found))
}
