//! The cost model: seconds and exact bytes of collectives, reshards and ops on a machine.
//!
//! [`Comm`] prices collectives over any set of mesh axes by the α-β model; groups that use a link at once share it.
//! [`Layout`] describes a tensor's layout on the mesh, and [`Resharder`] finds the cheapest path of steps from one
//! layout to another. [`OperatorTimes`] gives the time of an op, measured or by the roofline. [`Lifetimes`] gives the
//! memory in use over time.
//!
//! ```
//! use shardwright_cost::{Collective, Comm};
//! use shardwright_machine::{Bytes, builtin};
//!
//! // VGG-16's gradients, all-reduced over 16 P100s in four nodes.
//! let machine = builtin("p100x16")?;
//! let comm = Comm::new(&machine, machine.mesh());
//! let gradients = Bytes(138_357_544 * 4);
//! let seconds = comm.seconds(Collective::AllReduce, machine.mesh().all(), gradients);
//! // One ring through all devices sends 2 * 15/16 of them through every network card of 12 GB/s.
//! let by_hand = 2.0 * 15.0 / 16.0 * 553_430_176.0 / 12e9;
//! assert!((seconds.0 - by_hand).abs() < 1e-4, "{seconds}");
//! # Ok::<(), shardwright_machine::MachineError>(())
//! ```
//!
//! ```
//! use shardwright_cost::{Action, Layout, Placement::{Replicated, Shard}, Resharder, TensorShape};
//! use shardwright_machine::builtin;
//!
//! // Activations, sharded by rows over two devices, to be sharded by columns.
//! let machine = builtin("flat:2")?;
//! let resharder = Resharder::new(&machine, machine.mesh());
//! let tensor = resharder.tensor(TensorShape::new(&[256, 1024], 4)?);
//! let path = resharder.find(&tensor, &Layout::new(&[Shard(0)]), &Layout::new(&[Shard(1)]))?;
//! assert_eq!(path.steps[0].action, Action::AllToAll);
//! // Each device holds half of the MiB and sends half of that.
//! assert_eq!(path.traffic.total().0, 2 * (1 << 20) / 4);
//!
//! // For cost tables: the times from one layout to many.
//! let times = resharder.times(&tensor, &Layout::new(&[Shard(0)]))?;
//! assert!(times.to(&Layout::new(&[Replicated]))? > times.to(&Layout::new(&[Shard(1)]))?);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod arrangement_graph;
mod cache;
mod candidate_steps;
mod canonical_dims;
pub mod collective;
mod cost_file;
mod directed_search;
mod engine;
pub mod layout;
mod layout_patterns;
mod learned;
mod memory;
mod merged_axes;
mod operator_time;
mod rates;
pub mod reshard;
pub mod reshard_step;
pub mod reshard_tree;
mod roofline;
mod speed_trace;
mod step_lists;
mod time_rows;
mod workloads;

pub use collective::{Algorithm, Collective, Comm, Traffic, parameter_server_traffic};
pub use cost_file::{CostFile, CostFileError, CostTable, Mode, TableText};
pub use engine::{CachedCalls, Engine, KernelKind, MixedRules, Reserves, WIDE};
pub use layout::{Arrangement, Layout, LayoutError, MAX_DIMS, Placement, Reduction, TensorShape};
pub use layout_patterns::{PatternResharder, PatternTensor};
pub use learned::{BELIEVED, LearnedOp, LearnedRun, WorkKind};
pub use memory::Lifetimes;
pub use operator_time::{Estimate, OperatorTimes, TimeSource, TimeSourceCounts, WrongDevice};
pub use reshard::{ReshardPath, ReshardTensor, ReshardTimes, Resharder};
pub use reshard_step::{Action, ReshardStep};
pub use reshard_tree::{ReshardBranch, ReshardTree};
pub use roofline::{arithmetic_rate, roofline};
pub use speed_trace::{SpeedSample, SpeedTrace};
pub use workloads::{Sample, WorkloadSet};

#[cfg(test)]
mod oracle;
