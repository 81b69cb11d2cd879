//! Runs parallel programs on this machine: one worker per device, and true collectives between them.
//!
//! Devices share nothing but messages: references to buffers, passed through slots without locks. A collective is an
//! [`Exchange`]: every member sends its block to the members that need parts of it, and copies or reduces the blocks
//! that it receives. Nothing waits inside an exchange, so a device computes while messages are on their way.
//!
//! ```
//! use shardwright_engine::{Exchange, Member};
//! use shardwright_graph::DType;
//!
//! // Two devices hold a row each of a 2 x 3 matrix, and want all of it: an all-gather.
//! let member = |row| Member { holds: Some([row..row + 1, 0..3].into_iter().collect()),
//!                             wants: Some([0..2, 0..3].into_iter().collect()) };
//! let gather = Exchange::between(DType::F32, None, vec![member(0), member(1)])?;
//! assert_eq!(gather.traffic(), 2 * 3 * 4, "each fetches the other's row");
//! # Ok::<(), shardwright_engine::ExchangeError>(())
//! ```
//!
//! [`run`] trains a lowered program for some steps and returns losses, weights and times. [`Check`] compares them with
//! those of the serial program.

mod assist;
mod buffer;
mod check;
mod exchange;
mod fabric;
mod footprint;
mod notifier;
mod outcome;
mod predict;
mod prepare;
mod probe;
mod remote;
mod role;
mod run;
mod slot;
mod trial;
mod walk;
mod wire;
mod worker;

pub use assist::PlannedSchedule;
pub use buffer::{Buffer, Pool};
pub use check::{Check, Difference};
pub use exchange::{BlockSource, Exchange, ExchangeError, Member, all_reduce};
pub use fabric::{Edge, Fabric, Packing, ProcessMap};
pub use footprint::{held_bytes, serial_bytes};
pub use notifier::{Notifier, StopSignal};
pub use outcome::{Outcome, assemble, median_after_first, relative_error};
pub use predict::predicted_step_seconds;
pub use prepare::{DeviceProgram, InitialBlock, Job, LocalValue, PrepareError, Task, TaskGraph};
pub use probe::{WorkerGroups, collective_seconds};
pub use remote::{RemoteProcesses, Sockets};
pub use role::{ExchangeRole, Progress};
pub use run::{DeviceOutcome, EngineError, Options, run, run_devices};
pub use walk::{BlockView, Walk};
pub use wire::{read_outcomes, write_outcomes};
pub use worker::{DeviceTimes, TraceEvent};
