//! Measuring: how long ops take, and what this machine's cores and memory give when several work at once.

mod caches;
mod op;
mod rates;

pub use caches::{Caches, Reach};
pub use op::{Bench, Operand, Timings, op_overhead};
pub use rates::{WorkerRates, signal_latency, worker_rates};
