//! What things cost on a machine: collectives and re-layouts in seconds and exact bytes.
//!
//! [`Comm`] prices collectives over any set of mesh axes by the α-β model, sharing links among all that use them
//! at once. [`Layout`] says how a tensor lies on the mesh, and [`Relayouts`] finds the cheapest sequence of steps
//! from one layout to another. [`OperatorTimes`] says how long an op takes, measured or by the
//! roofline, and [`Lifetimes`] what memory holds when.
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
//! // Every node sends and receives 2 * 3/4 of them through its network card of 12 GB/s.
//! let by_hand = 2.0 * 0.75 * 553_430_176.0 / 12e9;
//! assert!((seconds.0 - by_hand).abs() < 1e-4, "{seconds}");
//! # Ok::<(), shardwright_machine::MachineError>(())
//! ```
//!
//! ```
//! use shardwright_cost::{Action, Layout, Placement::{Replicated, Shard}, Relayouts, TensorShape};
//! use shardwright_machine::builtin;
//!
//! // Activations, split by rows over two devices, wanted split by columns.
//! let machine = builtin("flat:2")?;
//! let relayouts = Relayouts::new(&machine, machine.mesh());
//! let tensor = relayouts.tensor(TensorShape::new(&[256, 1024], 4)?);
//! let way = relayouts.find(&tensor, &Layout::new(&[Shard(0)]), &Layout::new(&[Shard(1)]))?;
//! assert_eq!(way.steps[0].action, Action::AllToAll);
//! // Each device holds half of the MiB and sends half of that.
//! assert_eq!(way.traffic.total().0, 2 * (1 << 20) / 4);
//!
//! // For cost tables: all times from one layout, looked up one by one.
//! let times = relayouts.times(&tensor, &Layout::new(&[Shard(0)]))?;
//! assert!(times.to(&Layout::new(&[Replicated]))? > times.to(&Layout::new(&[Shard(1)]))?);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod collective;
mod cost_file;
mod directed;
mod frame;
mod glue;
pub mod layout;
mod memory;
mod moves;
mod operator_time;
mod paces;
mod rates;
pub mod relayout;
mod roofline;
mod rows;
mod space;
mod spread;
pub mod step;
mod workloads;

pub use collective::{Algorithm, Collective, Comm, Traffic, parameter_server_traffic};
pub use cost_file::{CostFile, CostFileError, CostTable, TableText};
pub use layout::{Arrangement, Layout, LayoutError, MAX_DIMS, Placement, Reduction, TensorShape};
pub use memory::{Lifetimes, MemoryUse, Peak};
pub use operator_time::{Estimate, OperatorTimes, Tally, TimeSource, WrongDevice};
pub use paces::{Moment, Paces};
pub use relayout::{Relayout, Relayouts, Tensor, Times};
pub use roofline::roofline;
pub use spread::{Branch, spread_traffic};
pub use step::{Action, Step};
pub use workloads::{Sample, WorkloadSet};

#[cfg(test)]
mod oracle;
