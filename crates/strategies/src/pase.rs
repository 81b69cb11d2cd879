//! `pase`: PaSE (Elango, IPDPS 2021), splits of any dimension by dynamic programming over dependent sets.

use crate::{
    Planner, Solution, Strategy,
    error::StrategyError,
    network_search::{NetworkSearch, Space},
};
use shardwright_plan::{Constraints, Optimised};
use shardwright_search::Control;

/// The strategy `pase`.
pub struct Pase;

/// The search of `pase`.
pub(crate) const SEARCH: NetworkSearch<'_> = NetworkSearch {
    name: "pase",
    space: Space::All,
    solver: &shardwright_search::pase::Pase,
    keeps_limits: false,
};

impl Strategy for Pase {
    fn name(&self) -> &'static str {
        "pase"
    }

    fn about(&self) -> &'static str {
        "PaSE: splits of any dimension, by dynamic programming over dependent sets"
    }

    fn optimises(&self) -> Optimised {
        Optimised::Sum
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
        SEARCH.solve(planner, constraints, control)
    }
}
