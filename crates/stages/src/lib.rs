//! Pipeline stages: which layers share devices, how many devices each stage gets, and in which order micro-batches run.
//!
//! This crate knows nothing of neural networks. It is given layers in a partial order and, through a [`StageOracle`], the time
//! and memory of any contiguous part of them on any shape of devices; [`solve`] finds the stages with the least objective and
//! proves it. [`LayerProblem`] is the bare problem of Piper (NeurIPS 2021), where every layer has options of its own.
//!
//! Reads no files and no clock.

mod chain;
mod control;
pub mod format;
mod knapsack;
mod lattice;
mod layer_oracle;
mod no_fit;
mod oracle;
mod problem;
mod reduce;
pub mod schedule;
mod solve;
mod table;
mod walk;

pub use chain::{ChainOracle, RangeCosts, RangeOption};
pub use control::{Control, Progress};
pub use lattice::{Lattice, Order, TooManySuffixes};
pub use layer_oracle::LayerOracle;
pub use no_fit::no_fit;
pub use oracle::{Precision, Query, Quote, Shape, StageOption, StageOracle};
pub use problem::{Edge, Layer, LayerOption, LayerProblem, ProblemError};
pub use reduce::{Groups, reduce};
pub use solve::{Limits, Objective, Outcome, PlacedStage, StopReason, TOLERANCE, solve, solve_layers};
pub use table::{TableOption, TableProblem, TableStage};
