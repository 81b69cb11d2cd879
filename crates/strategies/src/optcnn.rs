//! `optcnn`: OptCNN (Jia, Lin, Qi, Aiken; ICML 2018), splits of output dimensions by node and edge elimination.

use crate::{
    Planner, Solution, Strategy,
    error::StrategyError,
    network_search::{NetworkSearch, Space},
};
use shardwright_plan::{Constraints, Optimised};
use shardwright_search::Control;

/// The strategy `optcnn`.
pub struct OptCnn;

impl Strategy for OptCnn {
    fn name(&self) -> &'static str {
        "optcnn"
    }

    fn about(&self) -> &'static str {
        "OptCNN: splits of output dimensions, by node and edge elimination"
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
        let solver = &shardwright_search::optcnn::OptCnn::default();
        let search = NetworkSearch { name: self.name(), space: Space::Outputs, solver, keeps_limits: false };
        search.solve(planner, constraints, control)
    }
}
