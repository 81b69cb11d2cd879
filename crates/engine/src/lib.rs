//! Runs parallel programs on this machine: one worker per device, and true collectives between them.
//!
//! Devices share nothing but messages: references to buffers, passed through slots without locks. A collective is an
//! [`Exchange`]: every member gives its block to those who need parts of it, and copies or adds up what it needs from
//! the blocks of others. Nothing waits inside an exchange, so a device computes while messages are on their way.
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
//! [`run`] trains a lowered program for some steps and returns losses, weights and times; [`Check`] holds them against
//! the serial program's.

mod assist;
mod bell;
mod buffer;
mod check;
mod exchange;
mod fabric;
mod outcome;
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

pub use assist::Guide;
pub use bell::{Alarm, Bell};
pub use buffer::{Buffer, Pool};
pub use check::{Check, Difference};
pub use exchange::{Exchange, ExchangeError, Member, Take, all_reduce, extents};
pub use fabric::{Edge, Fabric, Packing, Placement};
pub use outcome::{Outcome, assemble, median_after_first, relative_error};
pub use prepare::{DeviceProgram, Job, Local, PrepareError, Prepared, SourceBlock, Task};
pub use probe::{Groups, collective_seconds};
pub use remote::{Remote, Sockets};
pub use role::{Progress, Role};
pub use run::{DeviceOutcome, EngineError, Options, run, run_devices};
pub use walk::{Combine, Place, Walk};
pub use wire::{read_outcomes, write_outcomes};
pub use worker::{Event, Spent};
