//! Pricing and search problems: from a training graph and a machine to costs, networks and plan files.
//!
//! [`Context`] is a graph on a mesh of a machine; it prices any [`Assignment`](shardwright_space::Assignment).
//! [`SearchProblem`] prices every config of every layer (or, untied, of every op) and every reshard between them, as a
//! cost network. [`Plan`] is the file format of an answer. Strategies that find answers are in
//! `shardwright-strategies`.
//!
//! ```
//! use shardwright_machine::builtin;
//! use shardwright_plan::SearchProblem;
//! use shardwright_search::{Control, Solver, exact::Exact};
//! use shardwright_zoo::{BuildOptions, build};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let graph = build("mlp:batch=64,hidden=1024,layers=2", &BuildOptions::default())?;
//! let machine = builtin("flat:4")?;
//! let problem = SearchProblem::new(&graph, &machine, None)?;
//! let outcome = Exact.solve(&problem.network, &Control::new());
//! assert!(outcome.proved_optimal());
//! // The network's cost is the price of the assignment.
//! let assignment = problem.assignment(&outcome.choice.unwrap());
//! assert_eq!(problem.context.price(&assignment)?.objective(), outcome.cost.unwrap());
//! # Ok(())
//! # }
//! ```

mod alignment;
mod compute_lower_bound;
mod constraints;
mod context;
mod conv_format;
mod direct;
mod error;
mod fusion;
mod graph_facts;
mod keep;
mod limited;
mod memory;
mod memory_shares;
mod min_memory;
mod op_times;
mod operand_copies;
mod parallelism;
mod pattern_bound;
mod plan;
mod price;
mod pricer;
mod reading;
mod search_problem;
mod throughput;
mod traffic;
mod transfer_times;
mod variable_classes;
mod variables;

pub use alignment::padding_hint;
pub use compute_lower_bound::{compute_lower_bound, repeated_step_lower_bound, step_lower_bound};
pub use constraints::{ConfigConstraint, Constraints};
pub use context::Context;
pub use direct::optcnn_bytes;
pub use error::{PlanError, why_stopped};
pub use graph_facts::FactorKinds;
pub use keep::{
    KeepNetwork, KeepPrice, KeepPricer, KeepSolution, KeepSpace, KeepState, Moment, keep_network,
};
pub use limited::limited;
pub use memory::{local_bytes, memory_lower_bound, network_peak, peak};
pub use memory_shares::{MemoryShares, memory_shares};
pub use min_memory::{MinMemory, min_memory, tighten};
pub use op_times::{OpTimes, picoseconds};
pub use parallelism::{AxisRole, AxisRoles, Parallelism, RoleShare};
pub use pattern_bound::{PatternBound, is_on_prime_axes, pattern_bound};
pub use plan::{
    BaselineCost, CoarseSpace, CostSource, FORMAT_VERSION, LevelTraffic, MoveCount, Optimised, OverlapBound,
    PlacementRow, Plan, PlanAxis, PlanDegrees, PlanLayer, PlanOp, PlanPipeline, PlanStage, Recomputation,
    SearchSpace, StageTimes, StepTimes,
};
pub use price::{Costs, LayerCost, LayerCosts};
pub use reading::model_hash;
pub use search_problem::{Candidates, Choice, Choices, MOST_AXES, MOST_CONFIGS, SearchProblem};
pub use throughput::{Throughput, ideal_device_seconds};
pub use traffic::predicted_traffic;
pub use variables::Variables;
