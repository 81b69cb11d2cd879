//! Why a step cannot be divided into micro-batches.

use crate::{graph::Graph, ids::OpId};

/// Why a step cannot be divided into micro-batches.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MicroBatchError {
    /// A number that does not divide the batch.
    #[error("{count} micro-batches do not divide a batch of {batch}; choose one of {}", list(.allowed))]
    Count {
        /// The number.
        count: u32,
        /// Samples of the batch.
        batch: u64,
        /// The numbers that do.
        allowed: Vec<u32>,
    },
    /// A step whose batch cannot be found.
    #[error("model `{model}` has no batch to divide: {reason}; plan it with one micro-batch")]
    NoBatch {
        /// The model.
        model: String,
        /// The reason.
        reason: String,
    },
    /// A step that is divided already.
    #[error("the step is divided into {count} micro-batches already")]
    Divided {
        /// Their number.
        count: u32,
    },
    /// An op that cannot run on part of the batch.
    #[error("op `{op}` ({kind}) cannot run on part of the batch: {reason}; plan with one micro-batch")]
    Op {
        /// The op.
        op: String,
        /// Its kind.
        kind: &'static str,
        /// The reason.
        reason: String,
    },
    /// A result of the step that has one value per sample.
    #[error(
        "output `{tensor}` has a value per sample, which no sum over micro-batches gives; plan with one micro-batch"
    )]
    Output {
        /// The output.
        tensor: String,
    },
}

fn list(allowed: &[u32]) -> String {
    let numbers: Vec<String> = allowed.iter().map(u32::to_string).collect();
    numbers.join(", ")
}

impl MicroBatchError {
    pub(super) fn op(graph: &Graph, op: OpId, reason: impl Into<String>) -> Self {
        let node = graph.node(op);
        Self::Op { op: node.name.clone(), kind: node.op.kind(), reason: reason.into() }
    }
}
