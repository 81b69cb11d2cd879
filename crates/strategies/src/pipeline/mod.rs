//! Pipelines of uniform stages, as trainers take them: every block is split the same way on its stage's devices.
//!
//! A stage's costs are those of its segments ([`shardwright_graph::BlockChain`]): each is priced and simulated once, by the
//! ordinary planner and simulator, on the sub-mesh of a stage (`segment_costs`). `compose` adds segments up to stages, lets
//! the schedule run on them, and counts memory. [`UniformPlan`] names one such plan, [`UniformPricer`] prices it, and
//! [`search`] finds the best.

mod balance;
mod compose;
mod degrees;
mod pricer;
mod search;
mod segment_costs;
mod segment_memory;
mod stage_checks;
mod stage_mesh;
mod uniform_configs;
mod written;

pub use balance::balanced;
pub use compose::{PipelinePrice, StagePrice};
pub use degrees::{DegreeError, UniformPlan, UniformRequest, ZeroLevel};
pub use pricer::{PricedUniform, UniformPricer};
pub use search::{SearchedUniform, UniformScope, search};
pub use segment_costs::SegmentCost;
pub use segment_memory::SegmentMemory;
pub(crate) use stage_mesh::{AxisRole, RoleMesh};
pub(crate) use uniform_configs::{UniformRules, expert_factor, uniform_assignment};
pub use written::{UniformAnswer, write_down};
pub(crate) use written::{degrees, whole_graph, whole_step};
