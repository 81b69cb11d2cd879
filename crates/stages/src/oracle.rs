//! What the search asks about a stage: the interface between the search and the prices of stages.
//!
//! A stage is a contiguous part of the layers: a suffix of the topological order without a smaller suffix, its tail. The oracle
//! prices it on a shape (tensor-parallel degree × replicas) for a number of micro-batches in flight.

use crate::lattice::Lattice;

/// The devices of a stage: `tensor` devices share each layer, and `replicas` such groups share the micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shape {
    /// Tensor-parallel degree.
    pub tensor: u32,
    /// Data-parallel degree.
    pub replicas: u32,
}

impl Shape {
    /// The number of devices.
    pub fn devices(self) -> u32 {
        self.tensor.saturating_mul(self.replicas)
    }
}

/// The least time of a stage, bounded from both sides. Infinite seconds mean that no option fits the memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quote {
    /// No option takes less time.
    pub lower_bound_seconds: f64,
    /// The time of an option that fits.
    pub seconds: f64,
}

impl Quote {
    /// No option fits.
    pub const NONE: Quote = Quote { lower_bound_seconds: f64::INFINITY, seconds: f64::INFINITY };
}

/// An option that realises a quote.
#[derive(Clone, Debug, PartialEq)]
pub struct StageOption {
    /// The stage's time in seconds.
    pub seconds: f64,
    /// Bytes per device at the stated number of micro-batches in flight.
    pub memory_bytes: f64,
    /// The layers of the stage, in the caller's numbering.
    pub layers: Vec<u32>,
    /// The chosen option of every layer, in the order of `layers`; a single entry for the whole stage in table problems.
    pub options: Vec<u32>,
}

/// Prices of stages. The search opens a stage and then asks for quotes.
pub trait StageOracle {
    /// The shapes of stages, in families. Within a family, devices and replicas both rise.
    fn families(&self) -> &[Vec<Shape>];

    /// A lower bound of devices × seconds that a group of layers takes in any stage.
    fn device_seconds(&self, group: usize) -> f64;

    /// Prepares for stages between the suffixes of this lattice.
    fn enter(&mut self, lattice: &Lattice);

    /// The next stages have this tail.
    fn open_tail(&mut self, lattice: &Lattice, tail: usize);

    /// The next quotes are about the layers of suffix `whole` that are not in the opened tail.
    fn open(&mut self, lattice: &Lattice, whole: usize);

    /// The first shape of a family that may take at most this time. All shapes before it take longer.
    fn first_shape(&self, family: usize, at_most_seconds: f64) -> usize;

    /// The time of the opened stage. `at_most_seconds` allows an oracle to stop early: a quote above it need not be tight, but its
    /// lower bound is above it too unless the oracle is inexact.
    fn quote(&mut self, lattice: &Lattice, query: Query, at_most_seconds: f64, precision: Precision)
    -> Quote;

    /// The option behind the opened stage's quote; `None` where nothing fits.
    fn option(&mut self, lattice: &Lattice, query: Query) -> Option<StageOption>;
}

/// What a quote is needed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// Only whether the stage can stay within the time: any option within it will do.
    Decision,
    /// The least time.
    Least,
}

/// A shape of the opened stage, and the micro-batches in flight there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Query {
    /// Family of shapes.
    pub family: usize,
    /// Shape within its family.
    pub shape: usize,
    /// Micro-batches that are in flight at once.
    pub in_flight: u32,
}
