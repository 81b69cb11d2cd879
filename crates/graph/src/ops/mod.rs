//! The op kinds, one file each (close relatives share one), and the list of them.
//!
//! To add an op: write its file here (attributes, [`Operator`], [examples](crate::examples::Examples)), add a line to
//! the list below, and add its kernel to the runtime crate. The generic tests pick the examples up: golden rule line,
//! rule against kernel, gradient against finite differences. `docs/adding-an-op.md` has the steps.

mod accumulate;
mod attention;
mod attention_grad;
mod attention_kernel;
mod attention_rescale;
mod binary;
mod broadcast;
mod cast;
mod combine;
mod concat;
mod contract;
mod conv;
mod conv_grad;
mod cross_entropy;
mod cumsum;
mod dispatch;
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
mod route;
mod select;
mod slice;
mod slide;
mod slot_grid;
mod slots;
mod softmax;
mod sort;
mod source;
mod take_along;
mod transpose;
mod unary;

pub use attention::{KEY_BLOCK, QUERY_BLOCK, Span};
pub use attention_kernel::AttentionKernel;
pub use binary::BinaryFn;
pub use contract::{FEW_ROWS, FEW_ROWS_DEPTH};
pub use conv::ConvGeometry;
pub use conv::ConvTile;
pub use literal::LiteralValues;
pub use pool::PoolGeometry;
pub use select::CompareFn;
pub use slide::{Slide, Slides};
pub use slot_grid::SlotGrid;
pub use unary::UnaryFn;

use crate::{
    examples::OpExamples, operator::Operator, rule::Rule, types::TensorType, workload::WorkloadClass,
};
use serde::{Deserialize, Serialize};

/// Generates all code that lists op kinds. Each line is a kind's description, type, name in files, and module. The first
/// token is a dollar sign for the generated macro.
macro_rules! ops {
    ($dollar:tt, $(#[doc = $about:literal] $kind:ident = $name:literal in $file:ident),* $(,)?) => {
        $(pub use $file::$kind;)*

        /// An op with its attributes.
        #[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
        #[serde(tag = "kind", deny_unknown_fields)]
        pub enum Op {
            $(#[doc = $about] #[serde(rename = $name)] $kind($kind),)*
        }

        /// The position of each kind in the list.
        enum Position {
            $($kind,)*
        }

        impl Op {
            /// The names of all op kinds.
            pub const KINDS: &[&str] = &[$($name),*];

            /// A description of each kind, in the same order.
            pub const ABOUT: &[&str] = &[$($about),*];

            /// Examples of each kind, in the same order.
            #[doc(hidden)]
            pub const EXAMPLES: &[OpExamples] = &[$(OpExamples::of::<$kind>($name)),*];

            fn position(&self) -> usize {
                match self { $(Op::$kind(_) => Position::$kind as usize,)* }
            }

            /// The op as an [`Operator`].
            pub fn operator(&self) -> &dyn Operator {
                match self { $(Op::$kind(op) => op,)* }
            }

            /// The workload classes that op kinds declare.
            pub(crate) fn declared_classes() -> Vec<&'static WorkloadClass> {
                [$(<$kind as Operator>::workload_classes()),*].concat()
            }
        }

        /// The workload class of each kind where it is bound by memory, in the order of the list.
        pub(crate) static STREAM_CLASSES: [WorkloadClass; Op::KINDS.len()] = [$(WorkloadClass::stream($name)),*];

        $(impl From<$kind> for Op {
            fn from(op: $kind) -> Self {
                Op::$kind(op)
            }
        })*

        /// Calls a macro with the types of all op kinds, separated by commas: for tables of other crates that have an
        /// entry per kind.
        #[macro_export]
        macro_rules! for_each_op_kind {
            ($dollar callback:ident) => {
                $dollar callback! { $($kind),* }
            };
        }
    };
}

ops! {
    $,
    /// Sum over the micro-batches of a step.
    Accumulate = "accumulate" in accumulate,
    /// Update of a weight by Adam.
    Adam = "adam" in optimizer,
    /// Fused attention: softmax of queries by keys, times values, without stored scores.
    Attention = "attention" in attention,
    /// Derivatives of fused attention, from scores that are computed again.
    AttentionGrad = "attention_grad" in attention_grad,
    /// A part of fused attention's result, scaled by its share of the log-sum-exp.
    AttentionRescale = "attention_rescale" in attention_rescale,
    /// Mean over sliding windows.
    AvgPool = "avg_pool" in pool,
    /// Derivative of average pooling.
    AvgPoolGrad = "avg_pool_grad" in pool,
    /// Element-wise function of two tensors, with broadcasting.
    Binary = "binary" in binary,
    /// The same bits as another element type.
    Bitcast = "bitcast" in cast,
    /// Repetition along dimensions.
    Broadcast = "broadcast" in broadcast,
    /// Change of element type.
    Cast = "cast" in cast,
    /// Weighted sum of each token's slots: what its experts made of it.
    Combine = "combine" in combine,
    /// Derivative of a combination by its weights.
    CombineGradWeights = "combine_grad_weights" in combine,
    /// Comparison of two tensors, with broadcasting.
    Compare = "compare" in select,
    /// One tensor after the other along a dimension.
    Concat = "concat" in concat,
    /// Einsum of one or two operands: linear layers, matrix products, batched products.
    Contract = "contract" in contract,
    /// Convolution with one to three spatial dimensions.
    Conv = "conv" in conv,
    /// Derivative of a convolution by its input.
    ConvGradInput = "conv_grad_input" in conv_grad,
    /// Derivative of a convolution by its weight.
    ConvGradWeight = "conv_grad_weight" in conv_grad,
    /// Cross-entropy from logits and labels, row maxima and sums of exponentials.
    CrossEntropy = "cross_entropy" in cross_entropy,
    /// Derivative of the cross-entropy by the logits.
    CrossEntropyGrad = "cross_entropy_grad" in cross_entropy,
    /// Running sum along a dimension.
    Cumsum = "cumsum" in cumsum,
    /// Tokens copied to the slots of their experts.
    Dispatch = "dispatch" in dispatch,
    /// Random zeros, by a mask that every split shares.
    Dropout = "dropout" in dropout,
    /// A box of a tensor at a computed place.
    DynamicSlice = "dynamic_slice" in dynamic,
    /// A tensor with a box at a computed place replaced.
    DynamicUpdate = "dynamic_update" in dynamic,
    /// The same number everywhere.
    Fill = "fill" in source,
    /// Rows of a table by their ids.
    Gather = "gather" in gather,
    /// Each element's own position along a dimension.
    Iota = "iota" in source,
    /// Elements that are written down.
    Literal = "literal" in literal,
    /// Logarithm of the softmax along one dimension.
    LogSoftmax = "log_softmax" in softmax,
    /// Derivative of the log-softmax times the incoming gradient.
    LogSoftmaxGrad = "log_softmax_grad" in softmax,
    /// LSTM over time, without its input projection.
    Lstm = "lstm" in lstm,
    /// Gradient of an LSTM.
    LstmGrad = "lstm_grad" in lstm,
    /// Maximum over sliding windows, and where it was.
    MaxPool = "max_pool" in pool,
    /// Derivative of maximum pooling.
    MaxPoolGrad = "max_pool_grad" in pool,
    /// Update of a weight by gradient descent with momentum.
    Momentum = "momentum" in optimizer,
    /// Layer, batch or RMS norm from given statistics.
    Normalize = "normalize" in norm,
    /// Gradient of a norm's input.
    NormGradInput = "norm_grad_input" in norm_grad,
    /// Gradients of a norm's scale and shift.
    NormGradParams = "norm_grad_params" in norm_grad,
    /// Sums that stand for the gradients through a norm's statistics.
    NormGradStats = "norm_grad_stats" in norm_grad,
    /// 1 at the position that an id names, 0 elsewhere.
    OneHot = "one_hot" in one_hot,
    /// An op of which only the types are known.
    Opaque = "opaque" in opaque,
    /// A constant around and between the elements.
    Pad = "pad" in pad,
    /// Elements added up at positions named along a dimension.
    PutAlong = "put_along" in take_along,
    /// Sum, mean or maximum over dimensions.
    Reduce = "reduce" in reduce,
    /// The same elements in another shape.
    Reshape = "reshape" in reshape,
    /// Dimensions turned around.
    Reverse = "reverse" in reverse,
    /// The experts that each token goes to: its best scores, within its best groups.
    Route = "route" in route,
    /// Rows added up into a table by their ids.
    ScatterAdd = "scatter_add" in gather,
    /// One of two tensors by a truth value, with broadcasting.
    Select = "select" in select,
    /// Update of a weight by plain gradient descent.
    Sgd = "sgd" in optimizer,
    /// A box of a tensor.
    Slice = "slice" in slice,
    /// The next free slot of each of a token's experts.
    Slots = "slots" in slots,
    /// Softmax along one dimension.
    Softmax = "softmax" in softmax,
    /// Derivative of the softmax times the incoming gradient.
    SoftmaxGrad = "softmax_grad" in softmax,
    /// Rows in order.
    Sort = "sort" in sort,
    /// Sum of exponentials along the last dimension, from given maxima.
    SumExp = "sum_exp" in cross_entropy,
    /// Elements at positions named along a dimension.
    TakeAlong = "take_along" in take_along,
    /// The largest elements of each row and where they are.
    TopK = "top_k" in sort,
    /// The dimensions in another order.
    Transpose = "transpose" in transpose,
    /// The inverse of a transposition.
    TransposeGrad = "transpose_grad" in transpose,
    /// Element-wise function of one tensor.
    Unary = "unary" in unary,
    /// Derivative of a unary function times the incoming gradient.
    UnaryGrad = "unary_grad" in unary,
    /// Mean of squares, or of squared differences from a given mean.
    Variance = "variance" in norm,
}

impl Op {
    /// The name of this op's kind.
    pub fn kind(&self) -> &'static str {
        Self::KINDS[self.position()]
    }

    /// The sharding rule of this op on these types.
    pub fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        self.operator().rule(inputs, outputs)
    }

    /// The class of this op's workload where it is bound by memory.
    pub(crate) fn stream_class(&self) -> &'static WorkloadClass {
        &STREAM_CLASSES[self.position()]
    }
}
