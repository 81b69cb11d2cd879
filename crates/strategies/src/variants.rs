//! Variants of a step: the same model in other micro-batches and with other ops recomputed. Each variant is an ordinary graph
//! with a search of its own ([`crate::variant_race`]).

use shardwright_cost::{CostFile, Engine};
use shardwright_graph::{
    Graph, MicroBatchError, RecomputePolicy, RematError, compiler_recompute, microbatch, remat,
};
use shardwright_machine::{EngineName, Machine};
use std::borrow::Cow;
use std::num::NonZeroU32;

use crate::Planner;

/// The choices that make a step's graph out of the model's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    /// Equal passes over parts of the batch before one update.
    pub micro_batches: NonZeroU32,
    /// The forward ops that are recomputed.
    pub recompute: RecomputePolicy,
    /// The engine, which recomputes ops by itself.
    pub engine: Option<EngineName>,
}

/// Why a variant of a step does not exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VariantGraphError {
    /// The step cannot be divided.
    #[error("--micro-batches {count}: {error}")]
    MicroBatches {
        /// The number of micro-batches.
        count: u32,
        /// The reason.
        error: MicroBatchError,
    },
    /// The ops cannot be recomputed.
    #[error(transparent)]
    Remat(#[from] RematError),
}

/// A variant with its graph.
#[derive(Clone)]
pub struct VariantGraph<'g> {
    /// The choices.
    pub variant: Variant,
    /// The step.
    pub graph: Cow<'g, Graph>,
    /// Names of sums over samples that are those of one micro-batch: statistics of batch norms.
    pub statistics: Vec<String>,
    /// The name of the policy of recomputation: the variant's, or `ops` where ops were chosen one by one.
    pub policy: &'static str,
}

impl Variant {
    /// The step as it is.
    pub const BASE: Self =
        Self { micro_batches: NonZeroU32::MIN, recompute: RecomputePolicy::Off, engine: None };

    /// The variant's graph; the model's own where nothing changes.
    ///
    /// # Errors
    /// Where the step cannot be divided, or the ops cannot be recomputed.
    pub fn graph(self, base: &Graph) -> Result<VariantGraph<'_>, VariantGraphError> {
        let (mut graph, mut statistics) = (Cow::Borrowed(base), Vec::new());
        if self.micro_batches.get() > 1 {
            let count = self.micro_batches.get();
            let divided = microbatch(base, self.micro_batches)
                .map_err(|error| VariantGraphError::MicroBatches { count, error })?;
            (graph, statistics) = (Cow::Owned(divided.graph), divided.statistics);
        }
        let mut ops = self.recompute.ops(&graph);
        if let Some(engine) = self.engine.and_then(Engine::of).filter(|engine| !engine.recomputes.is_empty())
        {
            let fuses = |class: &str| engine.recomputes_in_kernels && engine.families_of(class) != 0;
            ops.extend(compiler_recompute(&graph, |class| engine.recomputes.contains(class), fuses));
            ops.sort_unstable();
            ops.dedup();
        }
        if !ops.is_empty() {
            graph = Cow::Owned(remat(&graph, &ops)?);
        }
        Ok(VariantGraph { variant: self, graph, statistics, policy: self.recompute.name() })
    }

    /// Whether the variant keeps at least as much as another and divides the batch no further. Where memory does not limit
    /// it, it is at least as fast.
    pub(crate) fn keeps_no_less_than(self, other: Self) -> bool {
        self.micro_batches <= other.micro_batches && self.recompute.keeps_no_less_than(other.recompute)
    }

    /// The options that ask for the variant.
    pub fn options(self) -> String {
        let policy = self.recompute.name();
        match self.micro_batches.get() {
            1 => format!("--recompute {policy}"),
            count => format!("--micro-batches {count} --recompute {policy}"),
        }
    }
}

/// The parts of a planner that all variants share.
#[derive(Clone, Copy)]
pub struct VariantInputs<'a> {
    /// The machine.
    pub machine: &'a Machine,
    /// Measured operator costs.
    pub costs: Option<&'a CostFile>,
    /// Whether every op chooses for itself.
    pub untied: bool,
    /// Whether recomputed ops are chosen one by one, beside the policies (`recompute_ops.rs`).
    pub recompute_ops: bool,
}

impl<'a> VariantInputs<'a> {
    /// The planner of a variant.
    pub fn planner(&self, graph: &'a Graph) -> Planner<'a> {
        Planner::new(graph, self.machine, self.costs, self.untied)
    }
}
