//! The op kinds, one file each (close relatives share one), and the list of them.
//!
//! To add an op: write its file here (attributes, [`Operator`]), add a line to the list below, add its
//! kernel to the runtime crate, and the generic tests (rule against kernel, gradient against finite
//! differences, golden rule line) pick it up from its example.

mod binary;
mod broadcast;
mod cast;
mod contract;
mod reduce;
mod reshape;
mod select;
mod source;
mod unary;

pub use binary::{Binary, BinaryFn};
pub use broadcast::Broadcast;
pub use cast::Cast;
pub use contract::Contract;
pub use reduce::{Reduce, ReduceFn};
pub use reshape::Reshape;
pub use select::{Compare, CompareFn, Select};
pub use source::{Fill, Iota};
pub use unary::{Unary, UnaryFn, UnaryGrad};

use crate::{operator::Operator, rule::Rule, types::TensorType};
use serde::{Deserialize, Serialize};

macro_rules! ops {
    ($($(#[$doc:meta])* $kind:ident = $name:literal),* $(,)?) => {
        /// An op with its attributes.
        #[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
        #[serde(tag = "op", deny_unknown_fields)]
        pub enum Op {
            $($(#[$doc])* #[serde(rename = $name)] $kind($kind),)*
        }

        impl Op {
            /// The names of all op kinds.
            pub const KINDS: &[&str] = &[$($name),*];

            /// The name of this op's kind.
            pub fn kind(&self) -> &'static str {
                match self { $(Op::$kind(_) => $name,)* }
            }

            /// The op as what all ops have in common.
            pub fn operator(&self) -> &dyn Operator {
                match self { $(Op::$kind(op) => op,)* }
            }
        }

        $(impl From<$kind> for Op {
            fn from(op: $kind) -> Self {
                Op::$kind(op)
            }
        })*
    };
}

ops! {
    /// Element-wise function of two tensors, with broadcasting.
    Binary = "binary",
    /// Repetition along dimensions.
    Broadcast = "broadcast",
    /// Change of element type.
    Cast = "cast",
    /// Comparison of two tensors, with broadcasting.
    Compare = "compare",
    /// Einsum of one or two operands: linear layers, matrix products, batched products.
    Contract = "contract",
    /// The same number everywhere.
    Fill = "fill",
    /// Each element's own position along a dimension.
    Iota = "iota",
    /// Sum, mean or maximum over dimensions.
    Reduce = "reduce",
    /// The same elements in another shape.
    Reshape = "reshape",
    /// One of two tensors by a truth value, with broadcasting.
    Select = "select",
    /// Element-wise function of one tensor.
    Unary = "unary",
    /// Derivative of a unary function times the incoming gradient.
    UnaryGrad = "unary_grad",
}

impl Op {
    /// The sharding rule of this op on these types.
    pub fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        self.operator().rule(inputs, outputs)
    }
}
