//! What a run's trace says about the cost model: how many times as long as predicted each kind of work took.
//!
//! Such factors are of one model under one engine, and relative to the predictions of one release. They are never used for another.

use serde::{Deserialize, Serialize};
use shardwright_graph::{DType, RooflineKind, Workload};
use shardwright_machine::{CollectiveKind, EngineName};
use std::collections::BTreeMap;

/// The factors that are believed; others are errors of the trace or of the matching.
pub const BELIEVED: std::ops::RangeInclusive<f64> = 0.02..=50.0;

/// Kinds of computing that a trace can tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WorkKind {
    /// Matrix products and recurrences.
    Products,
    /// Convolutions and their gradients.
    Convolutions,
    /// Fused attention and its gradient.
    Attention,
    /// Everything that is bound by memory: element-wise ops, norms, look-ups, updates.
    MemoryBound,
}

impl WorkKind {
    /// All kinds.
    pub const ALL: [WorkKind; 4] =
        [WorkKind::Products, WorkKind::Convolutions, WorkKind::Attention, WorkKind::MemoryBound];

    /// The kind of a workload.
    pub fn of(roofline: &RooflineKind) -> Self {
        match roofline {
            RooflineKind::Stream => Self::MemoryBound,
            RooflineKind::Product(_) | RooflineKind::EightBitProduct(_) => Self::Products,
            RooflineKind::Attention { .. } => Self::Attention,
            RooflineKind::Convolution { .. } => Self::Convolutions,
        }
    }

    /// The kind in words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Products => "matrix products",
            Self::Convolutions => "convolutions",
            Self::Attention => "attention",
            Self::MemoryBound => "memory-bound ops",
        }
    }
}

/// Factors learned from a run: measured over predicted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LearnedRun {
    /// The model that ran.
    pub model: String,
    /// A fingerprint of the shapes and types of its weights.
    pub weights: String,
    /// The engine whose predictions the factors are relative to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineName>,
    /// The release whose predictions they are relative to.
    pub release: String,
    /// Computing.
    #[serde(default)]
    pub computing: BTreeMap<WorkKind, f64>,
    /// Single ops whose shapes the trace has.
    #[serde(default)]
    pub ops: Vec<LearnedOp>,
    /// Collectives.
    #[serde(default)]
    pub collectives: BTreeMap<CollectiveKind, f64>,
}

/// The factor of one op.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LearnedOp {
    /// The workload class.
    pub class: String,
    /// The element type.
    pub dtype: DType,
    /// The workload's sizes.
    pub sizes: Vec<u64>,
    /// Measured over predicted.
    pub factor: f64,
}

impl LearnedRun {
    /// What is wrong with the factors, if anything.
    pub(crate) fn check(&self) -> Result<(), String> {
        let all = self.computing.values().chain(self.collectives.values());
        match all
            .copied()
            .chain(self.ops.iter().map(|op| op.factor))
            .find(|factor| !BELIEVED.contains(factor))
        {
            None => Ok(()),
            Some(factor) => Err(format!(
                "a factor of {factor}; factors are from {} to {}; read the trace again",
                BELIEVED.start(),
                BELIEVED.end()
            )),
        }
    }

    /// The factor of a workload: its own, or that of its kind.
    pub fn factor(&self, workload: &Workload) -> f64 {
        let same = |op: &&LearnedOp| {
            op.class == workload.class.name
                && op.dtype == workload.dtype
                && op.sizes[..] == workload.sizes[..]
        };
        let own = self.ops.iter().find(same).map(|op| op.factor);
        own.unwrap_or_else(|| self.kind_factor(WorkKind::of(&workload.roofline)))
    }

    /// The factor of a kind of work.
    pub fn kind_factor(&self, kind: WorkKind) -> f64 {
        self.computing.get(&kind).copied().unwrap_or(1.0)
    }
}
