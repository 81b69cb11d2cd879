//! Minimises unary plus pairwise costs over discrete choices, under memory limits over time.
//!
//! ```text
//! minimise    Σ cost_v(x_v)  +  Σ cost_uv(x_u, x_v)
//! subject to  Σ usage_v(x_v) over all v alive at t  ≤  limit,   for every time t
//! ```
//!
//! This is the problem of intra-operator parallelism (Alpa, XLA, the ASPLOS/EuroSys 2025 contest), of OptCNN and
//! PaSE (without memory), and of pairwise energies and weighted constraint networks in general. The crate
//! knows nothing of neural networks.
//!
//! ```
//! use shardwright_search::{Control, Interval, NetworkBuilder, registry};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut builder = NetworkBuilder::new();
//! // Two layers, alive at the same time: "replicated" is fast but large, "split" is slow but small.
//! let alive = Interval { lo: 0, hi: 10 };
//! let first = builder.variable(&[10, 14], &[8, 4], alive)?;
//! let second = builder.variable(&[10, 15], &[8, 4], alive)?;
//! // Changing the layout between them costs 3.
//! builder.edge(first, second, &[0, 3, 3, 0])?;
//! builder.usage_limit(12)?;
//! let network = builder.build()?;
//!
//! let solver = registry::find("exact").ok_or("no such solver")?.solver();
//! let outcome = solver.solve(&network, &Control::new().iteration_limit(100));
//! assert_eq!(outcome.choice, Some(vec![1, 0]));
//! assert_eq!(outcome.cost, Some(27));
//! assert!(outcome.bound <= 27);
//! # Ok(())
//! # }
//! ```
//!
//! A [`Network`] is built through a [`NetworkBuilder`], which validates everything it is given, or read by
//! [`mod@format`]. Every solver implements [`Solver`], takes its limits from a [`Control`] and reports
//! incumbent, lower bound and the reason for stopping as an [`Outcome`]; [`registry`] lists them by name.
//! [`min_marginals`] gives the optimal cost under every single choice.

pub mod brute;
pub mod control;
pub mod exact;
pub mod format;
pub mod marginals;
pub mod network;
pub mod optcnn;
pub mod outcome;
pub mod pase;
pub mod registry;

mod minsum;
mod pairwise;

pub use control::{Clock, Control, Enough, FrozenClock};
pub use marginals::{MinMarginals, min_marginals};
pub use network::{
    Evaluation, FORBIDDEN, Interval, Limits, Network, NetworkBuilder, NetworkError, SharedTable, VarId,
    is_forbidden,
};
pub use outcome::{LogEntry, Outcome, Progress, Recorder, Solver, StopReason, gap};
