//! Recomputation in the search: beside its config, every forward op has a keep state.
//!
//! The graph is the step without clones. An op's result is *kept* up to its last backward reader, *dropped* after its last
//! forward reader, or *recomputed* before its first backward reader; [`shardwright_graph::remat`] then clones the op. A
//! clone has its original's config.
//!
//! - [`space`]: the keep states of every op: when its clone runs, and who reads its result first and last;
//! - [`charges`]: memory that results take under a state;
//! - [`costs`]: times of clones, and transfers under the states of producer and reader;
//! - [`network`]: the cost network over configs and states, with rules between neighbours as forbidden pairs;
//! - [`chosen`]: price and memory of one set of recomputed ops, for local search where the network is too large.

mod charges;
mod chosen;
mod costs;
mod network;
mod space;

pub use chosen::{KeepPrice, KeepPricer};
pub use network::{KeepNetwork, KeepSolution, keep_network};
pub use space::{KeepSpace, KeepState, Moment};
