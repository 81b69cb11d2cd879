//! Measuring: how long ops take, and what this machine's cores and memory give when several work at once.

mod caches;
mod op;
mod rates;

pub use caches::{Caches, Reach};
pub use op::{Bench, Operand, Timings, op_overhead};
pub use rates::{WorkerRates, signal_latency, worker_rates};

/// The middle one of some numbers; zero where there are none.
pub fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or(0.0)
}
