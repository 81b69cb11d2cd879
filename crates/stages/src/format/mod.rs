//! Problems as JSON: this crate's own format, and Piper's.
//!
//! Readers treat their input as hostile: every number and name is checked, and messages name the layer.

mod piper;
mod scalar;

use crate::problem::{LayerProblem, ProblemError};

/// Values that replace those of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Overrides {
    /// The number of devices.
    pub devices: Option<u32>,
    /// Memory per device.
    pub memory_bytes: Option<f64>,
    /// Micro-batches per batch.
    pub micro_batches: Option<u64>,
    /// Bandwidth in bytes per second.
    pub bandwidth: Option<f64>,
}

/// Reads and checks a problem.
pub fn read(bytes: &[u8], overrides: &Overrides) -> Result<LayerProblem, ProblemError> {
    piper::read(bytes, overrides)
}
