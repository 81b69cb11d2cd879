//! Measurements on this machine: times of ops, and the rates of cores and memory while several cores work at once.

mod caches;
mod op;
mod rates;
mod reuse;

pub use caches::{Caches, Reach};
pub use op::{Bench, Operand, Timings, op_overhead};
pub use rates::{WorkerRates, signal_latency, worker_rates};
pub use reuse::reaches;

/// The median of some numbers, the larger of the two middle ones of an even number; zero of no numbers.
pub fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or(0.0)
}
