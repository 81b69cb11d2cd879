//! What profilers' traces of PyTorch and JAX say about a plan's predictions.
//!
//! [`Trace`] reads a file, [`DeviceWork`] finds what the devices did, and [`Findings`] compares it with predictions. A trace that is
//! damaged, or of another model, is refused.

mod events;
mod findings;
mod kernels;

pub use events::{Event, MAX_BYTES, MAX_EVENTS, Profiler, Trace, TraceError, is_trace};
pub use findings::{Finding, Findings, MatchError, Prediction};
pub use kernels::{DeviceWork, Kernel, KernelKind, ProductSizes, product_sizes};
