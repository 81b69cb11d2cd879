//! The op kinds, one file each (close relatives share one), and the list of them.
//!
//! To add an op: write its file here (attributes, [`Operator`]), add a line to the list below, add its
//! kernel to the runtime crate, and the generic tests (rule against kernel, gradient against finite
//! differences, golden rule line) pick it up from its example.

mod binary;
mod broadcast;
mod cast;
mod concat;
mod contract;
mod conv;
mod conv_grad;
mod cross_entropy;
mod cumsum;
mod dropout;
mod dynamic;
mod gather;
mod literal;
mod lstm;
mod norm;
mod norm_grad;
mod one_hot;
mod opaque;
mod optimizer;
mod pad;
mod pool;
mod reduce;
mod reshape;
mod reverse;
mod select;
mod slice;
mod slide;
mod softmax;
mod sort;
mod source;
mod take_along;
mod top_k;
mod transpose;
mod unary;

pub use binary::{Binary, BinaryFn};
pub use broadcast::Broadcast;
pub use cast::{Bitcast, Cast};
pub use concat::Concat;
pub use contract::Contract;
pub use conv::{Conv, ConvGeometry};
pub use conv_grad::{ConvGradInput, ConvGradWeight};
pub use cross_entropy::{CrossEntropy, CrossEntropyGrad, SumExp};
pub use cumsum::Cumsum;
pub use dropout::Dropout;
pub use dynamic::{DynamicSlice, DynamicUpdate};
pub use gather::{Gather, ScatterAdd};
pub use literal::{Literal, LiteralValues};
pub use lstm::{Lstm, LstmGrad};
pub use norm::{Normalize, Variance};
pub use norm_grad::{NormGradInput, NormGradParams, NormGradStats};
pub use one_hot::OneHot;
pub use opaque::Opaque;
pub use optimizer::{Adam, Momentum, Sgd};
pub use pad::Pad;
pub use pool::{AvgPool, AvgPoolGrad, MaxPool, MaxPoolGrad, PoolGeometry};
pub use reduce::{Reduce, ReduceFn};
pub use reshape::Reshape;
pub use reverse::Reverse;
pub use select::{Compare, CompareFn, Select};
pub use slice::Slice;
pub use slide::{Slide, Slides};
pub use softmax::{LogSoftmax, LogSoftmaxGrad, Softmax, SoftmaxGrad};
pub use sort::{Sort, TopK};
pub use source::{Fill, Iota};
pub use take_along::{PutAlong, TakeAlong};
pub use top_k::TopKMask;
pub use transpose::{Transpose, TransposeGrad};
pub use unary::{Unary, UnaryFn, UnaryGrad};

use crate::{operator::Operator, rule::Rule, types::TensorType};
use serde::{Deserialize, Serialize};

macro_rules! ops {
    ($(#[doc = $about:literal] $kind:ident = $name:literal),* $(,)?) => {
        /// An op with its attributes.
        #[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
        #[serde(tag = "kind", deny_unknown_fields)]
        pub enum Op {
            $(#[doc = $about] #[serde(rename = $name)] $kind($kind),)*
        }

        impl Op {
            /// The names of all op kinds.
            pub const KINDS: &[&str] = &[$($name),*];

            /// What each kind is, in the same order.
            pub const ABOUT: &[&str] = &[$($about),*];

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
    /// Update of a weight by Adam.
    Adam = "adam",
    /// Mean over sliding windows.
    AvgPool = "avg_pool",
    /// Derivative of average pooling.
    AvgPoolGrad = "avg_pool_grad",
    /// Element-wise function of two tensors, with broadcasting.
    Binary = "binary",
    /// The same bits as another element type.
    Bitcast = "bitcast",
    /// Repetition along dimensions.
    Broadcast = "broadcast",
    /// Change of element type.
    Cast = "cast",
    /// Comparison of two tensors, with broadcasting.
    Compare = "compare",
    /// One tensor after the other along a dimension.
    Concat = "concat",
    /// Einsum of one or two operands: linear layers, matrix products, batched products.
    Contract = "contract",
    /// Convolution with one to three spatial dimensions.
    Conv = "conv",
    /// Derivative of a convolution by its input.
    ConvGradInput = "conv_grad_input",
    /// Derivative of a convolution by its weight.
    ConvGradWeight = "conv_grad_weight",
    /// Cross-entropy from logits and labels, row maxima and sums of exponentials.
    CrossEntropy = "cross_entropy",
    /// Derivative of the cross-entropy by the logits.
    CrossEntropyGrad = "cross_entropy_grad",
    /// Running sum along a dimension.
    Cumsum = "cumsum",
    /// Random zeros, by a mask that every split shares.
    Dropout = "dropout",
    /// A box of a tensor at a computed place.
    DynamicSlice = "dynamic_slice",
    /// A tensor with a box at a computed place replaced.
    DynamicUpdate = "dynamic_update",
    /// The same number everywhere.
    Fill = "fill",
    /// Rows of a table by their ids.
    Gather = "gather",
    /// Each element's own position along a dimension.
    Iota = "iota",
    /// Elements that are written down.
    Literal = "literal",
    /// Logarithm of the softmax along one dimension.
    LogSoftmax = "log_softmax",
    /// Derivative of the log-softmax times the incoming gradient.
    LogSoftmaxGrad = "log_softmax_grad",
    /// LSTM over time, without its input projection.
    Lstm = "lstm",
    /// Gradient of an LSTM.
    LstmGrad = "lstm_grad",
    /// Maximum over sliding windows, and where it was.
    MaxPool = "max_pool",
    /// Derivative of maximum pooling.
    MaxPoolGrad = "max_pool_grad",
    /// Update of a weight by gradient descent with momentum.
    Momentum = "momentum",
    /// Layer, batch or RMS norm from given statistics.
    Normalize = "normalize",
    /// Gradient of a norm's input.
    NormGradInput = "norm_grad_input",
    /// Gradients of a norm's scale and shift.
    NormGradParams = "norm_grad_params",
    /// Sums that stand for the gradients through a norm's statistics.
    NormGradStats = "norm_grad_stats",
    /// 1 at the position that an id names, 0 elsewhere.
    OneHot = "one_hot",
    /// An op of which only the types are known.
    Opaque = "opaque",
    /// A constant around and between the elements.
    Pad = "pad",
    /// Elements added up at positions named along a dimension.
    PutAlong = "put_along",
    /// Sum, mean or maximum over dimensions.
    Reduce = "reduce",
    /// The same elements in another shape.
    Reshape = "reshape",
    /// Dimensions turned around.
    Reverse = "reverse",
    /// Rows added up into a table by their ids.
    ScatterAdd = "scatter_add",
    /// One of two tensors by a truth value, with broadcasting.
    Select = "select",
    /// Update of a weight by plain gradient descent.
    Sgd = "sgd",
    /// A box of a tensor.
    Slice = "slice",
    /// Softmax along one dimension.
    Softmax = "softmax",
    /// Derivative of the softmax times the incoming gradient.
    SoftmaxGrad = "softmax_grad",
    /// Rows in order.
    Sort = "sort",
    /// Sum of exponentials along the last dimension, from given maxima.
    SumExp = "sum_exp",
    /// Elements at positions named along a dimension.
    TakeAlong = "take_along",
    /// The largest elements of each row and where they are.
    TopK = "top_k",
    /// 1 at the largest elements of each row, 0 elsewhere.
    TopKMask = "top_k_mask",
    /// The dimensions in another order.
    Transpose = "transpose",
    /// The inverse of a transposition.
    TransposeGrad = "transpose_grad",
    /// Element-wise function of one tensor.
    Unary = "unary",
    /// Derivative of a unary function times the incoming gradient.
    UnaryGrad = "unary_grad",
    /// Mean of squares, or of squared differences from a given mean.
    Variance = "variance",
}

impl Op {
    /// The sharding rule of this op on these types.
    pub fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        self.operator().rule(inputs, outputs)
    }
}
