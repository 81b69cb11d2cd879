//! From a training graph and a machine to a plan: one config per op, what it is predicted to cost, and a proof of
//! how good it is.
//!
//! [`Problem`] prices every way to run every layer (or, untied, every op) and every re-layout between them, which
//! makes a cost network;
//! [`strategy`] says which part of it is searched and how; [`plan`] runs a strategy and describes the result.
//!
//! ```
//! use shardwright_frontend::zoo::{BuildOptions, build};
//! use shardwright_machine::builtin;
//! use shardwright_plan::{Demands, Problem, plan, strategy};
//! use shardwright_search::Control;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let graph = build("mlp:batch=64,hidden=1024,layers=2", &BuildOptions::default())?;
//! let machine = builtin("flat:4")?;
//! let problem = Problem::new(&graph, &machine, None)?;
//! let plan = plan(&problem, strategy::find("auto")?, &Demands::default(), &Control::new())?;
//! assert!(plan.proved_optimal);
//! assert!(plan.baselines.values().all(|baseline| plan.objective <= baseline.objective));
//! # Ok(())
//! # }
//! ```

mod alike;
mod baseline;
mod describe;
mod direct;
mod error;
mod evaluate;
mod floor;
mod groups;
mod leanest;
mod maker;
mod memory;
mod plan;
mod planner;
mod problem;
mod recall;
mod refine;
mod smallest;
pub mod strategy;
mod tables;
mod tilings;
mod times;
mod traffic;
mod transfer;
mod wish;

pub use describe::describe_found;
pub use direct::optcnn_bytes;
pub use error::PlanError;
pub use evaluate::{Costs, LayerCost, evaluate};
pub use floor::floor;
pub use groups::Groups;
pub use memory::{limited, peak};
pub use plan::{
    BaselineCost, CoarseSpace, CostSource, FORMAT_VERSION, LevelTraffic, Optimised, PlacementRow, Plan,
    PlanAxis, PlanLayer, PlanOp, PlanRequest, SpaceUsed, StageTimes, StepTimes,
};
pub use planner::{Demands, Found, baseline_costs, plan, search};
pub use problem::{Choice, Choices, MOST_AXES, MOST_CONFIGS, Near, Problem};
pub use refine::{Refined, Refinement, refine};
pub use tilings::{Moved, moved};
pub use times::{OpTimes, picoseconds};
pub use traffic::predicted_traffic;
pub use transfer::{End, Transfer, Transfers};
pub use wish::Wish;
