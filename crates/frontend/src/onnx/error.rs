//! Why a model cannot be read or imported.

use std::fmt;

/// Why a model cannot be read or imported.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum OnnxError {
    /// The bytes are not an ONNX model that can be read at all.
    #[error("not a readable ONNX model: {0}")]
    Unreadable(String),
    /// The model as a whole asks for something that cannot be.
    #[error("{0}")]
    Model(String),
    /// A node cannot be imported.
    #[error("node `{node}` ({op}): {reason}")]
    Node {
        /// The node's name, or its first output's where it has none.
        node: String,
        /// Its op type.
        op: String,
        /// What is wrong.
        reason: String,
    },
    /// Ops that this importer does not know, all of them.
    #[error("ops that are not supported:{}", Listed(.0))]
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
    /// Why, where the op is known but not in this form.
    pub reason: String,
    /// The names of the nodes.
    pub nodes: Vec<String>,
}

struct Listed<'a>(&'a [UnsupportedOp]);

/// The most node names that are printed per op.
const SHOWN: usize = 5;

impl fmt::Display for Listed<'_> {
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

/// Text from a file as it may be printed: without control characters, and not endless.
pub(crate) fn shown(text: &str) -> String {
    const MOST: usize = 120;
    let mut out: String = text
        .chars()
        .take(MOST)
        .map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c })
        .collect();
    if text.chars().nth(MOST).is_some() {
        out.push_str("...");
    }
    out
}

/// Why one node cannot be imported; the importer adds the node's name.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Trouble {
    /// Something is wrong with the node.
    Wrong(String),
    /// The node is fine, but in a form that is not supported.
    Unsupported(String),
    /// A node of its subgraph is in trouble, and was named already.
    Nested(Box<OnnxError>),
}

/// What importing a node gives.
pub(crate) type Tried<T = ()> = Result<T, Trouble>;

impl Trouble {
    pub fn wrong(text: impl Into<String>) -> Self {
        Self::Wrong(text.into())
    }

    /// In words, without the kind of trouble.
    pub fn reason(self) -> String {
        match self {
            Self::Wrong(reason) => reason,
            Self::Unsupported(reason) => format!("{reason}: not supported"),
            Self::Nested(error) => error.to_string(),
        }
    }

    pub fn unsupported(text: impl Into<String>) -> Self {
        Self::Unsupported(text.into())
    }
}

impl From<shardwright_graph::BuildError> for Trouble {
    fn from(error: shardwright_graph::BuildError) -> Self {
        use shardwright_graph::BuildError;
        Self::Wrong(match error {
            // The importer says which node it was.
            BuildError::Op { reason, .. } => reason.to_string(),
            BuildError::Tensor { reason, .. } => reason,
            BuildError::Model(reason) => reason,
        })
    }
}

impl From<shardwright_graph::OpError> for Trouble {
    fn from(error: shardwright_graph::OpError) -> Self {
        Self::Wrong(error.to_string())
    }
}
