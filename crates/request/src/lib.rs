//! What a user asks for, and the plan that comes of it: the half that the command line and the Python package share.
//!
//! Models and machines are named, read from files or given as text; errors are for the user to read. Like the shells
//! above it, and unlike the stages below, this crate opens files and reads the clock.
//!
//! ```
//! use shardwright_request::{Ask, Search};
//! use std::sync::atomic::AtomicBool;
//!
//! # fn main() -> anyhow::Result<()> {
//! let request = Ask::of("mlp:batch=64,hidden=1024,layers=2", "flat:4").open()?;
//! let plan = request.plan("exact", &Search::default(), &AtomicBool::new(false), &|_| ())?;
//! assert!(plan.proved_optimal);
//! # Ok(())
//! # }
//! ```

mod ask;
mod external;
mod files;
mod ram;
mod search;
mod stablehlo;
mod summary;

pub use ask::{Ask, Request, is_path, parse_balance, parse_optimizer, parse_role, parse_seconds, parse_size};
pub use external::StoredValues;
pub use files::{open_machine, read};
pub use ram::{half_of_free, most_held};
pub use search::{Event, Search};
pub use stablehlo::Program;
pub use summary::{Detail, show_bytes, show_seconds, summarise};
