//! Minimises unary plus pairwise costs over discrete choices, under memory limits over time.
//!
//! A [`Network`] is built through a [`NetworkBuilder`], which validates everything it is given. Every
//! solver implements [`Solver`] and reports its incumbent and lower bound as an [`Outcome`].

pub mod brute;
pub mod exact;
pub mod format;
pub mod network;
pub mod optcnn;
pub mod outcome;
pub mod pase;
pub mod registry;

mod minsum;
mod pairwise;

pub use network::{
    Evaluation, FORBIDDEN, Interval, Limits, Network, NetworkBuilder, NetworkError, VarId, is_forbidden,
};
pub use outcome::{Control, LogEntry, Outcome, Progress, Recorder, Solver, StopReason};
