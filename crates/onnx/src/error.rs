//! Why a model cannot be read or imported.

use std::fmt;

/// Why a model cannot be read or imported.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum OnnxError {
    /// The bytes cannot be decoded as an ONNX model.
    #[error("not a readable ONNX model: {0}")]
    Unreadable(String),
    /// The model as a whole is invalid.
    #[error("{0}")]
    Model(String),
    /// A node cannot be imported.
    #[error("node `{node}` ({op}): {reason}")]
    Node {
        /// The node's name, or its first output's if it has none.
        node: String,
        /// Its op type.
        op: String,
        /// The reason, and the remedy if there is one.
        reason: String,
    },
    /// All ops of the model that the importer does not support.
    #[error("unsupported ops:{}", UnsupportedList(.0))]
    Unsupported(Vec<UnsupportedOp>),
    /// Dimensions without a size.
    #[error(
        "dimensions without a size: {}; give them with --batch N (the first dimension of the inputs) or --dim NAME=N",
        .0.join(", ")
    )]
    Unbound(Vec<String>),
}

/// An op type that is not supported, and where it occurs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnsupportedOp {
    /// Domain and op type.
    pub op: String,
    /// The unsupported variant, if the op is supported otherwise.
    pub reason: String,
    /// The names of the nodes.
    pub nodes: Vec<String>,
}

struct UnsupportedList<'a>(&'a [UnsupportedOp]);

/// The most node names that are printed per op.
const SHOWN: usize = 5;

impl fmt::Display for UnsupportedList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for entry in self.0 {
            let count = entry.nodes.len();
            let names: Vec<_> = entry.nodes.iter().take(SHOWN).map(|n| shown(n)).collect();
            write!(f, "\n  {} x{count}: {}", shown(&entry.op), names.join(", "))?;
            if count > SHOWN {
                write!(f, " and {} more", count - SHOWN)?;
            }
            if !entry.reason.is_empty() {
                write!(f, " ({})", entry.reason)?;
            }
        }
        Ok(())
    }
}

/// A name from a file for messages and for the graph.
pub(crate) fn shown(text: &str) -> String {
    shardwright_graph::printable(text, 120)
}

/// A reason, which may quote attributes of the file.
pub(crate) fn cut(reason: &str) -> String {
    shardwright_graph::printable(reason, 1000)
}

/// Why one node cannot be imported. The importer adds the node's name.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum NodeError {
    /// The node is invalid.
    Invalid(String),
    /// The node is valid, but this variant is not supported.
    Unsupported(String),
    /// A node of its subgraph failed; the error names that node.
    Nested(Box<OnnxError>),
}

/// The result of importing a node.
pub(crate) type NodeResult<T = ()> = Result<T, NodeError>;

impl NodeError {
    pub fn invalid(text: impl Into<String>) -> Self {
        Self::Invalid(text.into())
    }

    /// The error as text.
    pub fn reason(self) -> String {
        match self {
            Self::Invalid(reason) => reason,
            Self::Unsupported(reason) => format!("{reason}: not supported"),
            Self::Nested(error) => error.to_string(),
        }
    }

    pub fn unsupported(text: impl Into<String>) -> Self {
        Self::Unsupported(text.into())
    }
}

impl From<shardwright_graph::BuildError> for NodeError {
    fn from(error: shardwright_graph::BuildError) -> Self {
        use shardwright_graph::BuildError;
        Self::Invalid(match error {
            // The importer adds the node's name.
            BuildError::Op { reason, .. } => reason.to_string(),
            BuildError::Tensor { reason, .. } => reason,
            BuildError::Model(reason) | BuildError::Internal(reason) => reason,
        })
    }
}

impl From<shardwright_graph::OpError> for NodeError {
    fn from(error: shardwright_graph::OpError) -> Self {
        Self::Invalid(error.to_string())
    }
}
