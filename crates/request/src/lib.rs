//! Requests of users, and the plans that answer them: the half that the command line and the Python package share.
//!
//! Models and machines are named, read from files or given as text; errors are for the user to read. Like the shells
//! above it, and unlike the stages below, this crate opens files and reads the clock.
//!
//! ```
//! use shardwright_request::Request;
//! use std::sync::atomic::AtomicBool;
//!
//! # fn main() -> anyhow::Result<()> {
//! let inputs = Request::new("mlp:batch=64,hidden=1024,layers=2", "flat:4").open()?;
//! let opened = inputs.plan("exact", &AtomicBool::new(false), &|_| ())?;
//! assert!(opened.plan.proved_optimal);
//! # Ok(())
//! # }
//! ```

mod clock;
mod columns;
mod external;
mod files;
mod inputs;
mod no_fit;
mod opened_plan;
mod planning;
mod printed;
mod ram;
mod request;
mod stablehlo;
mod summary;
mod uniform;

pub use clock::WallClock;
pub use columns::{WIDTH, hanging, shortened, wrapped};
pub use external::StoredValues;
pub use files::{open_machine, read};
pub use inputs::{Inputs, is_path, weights_fingerprint};
pub use opened_plan::{OpenedPlan, read_known_plan, read_plan};
pub use planning::Event;
pub use printed::printed;
pub use ram::{free as free_memory, half_of_free, most_held};
pub use request::{
    MemoryLimit, MicroBatchChoice, ModelSpec, PipelineChoice, RecomputeChoice, RecomputeUnit, Request,
    parse_balance, parse_optimizer, parse_precision, parse_price, parse_role, parse_seconds, parse_size,
};
pub use shardwright_machine::show_bytes;
pub use stablehlo::Program;
pub use summary::{Detail, grouped, headline, show_seconds, stem, summarise};
