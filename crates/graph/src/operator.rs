//! The trait of op kinds: shape inference, sharding rule, gradient, cost. One file per kind in [`crate::ops`];
//! kernels are in the runtime crate.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    ops::Op,
    region::Region,
    rule::Rule,
    types::TensorType,
    workload::{WorkloadClass, WorkloadSizes},
};

/// Why an op does not accept its inputs, in words; the builder adds the op's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct OpError(pub String);

impl OpError {
    /// An error with this explanation.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

/// Returns an [`OpError`] made by `format!` unless the condition holds.
#[macro_export]
macro_rules! require {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err($crate::OpError::new(format!($($text)+)));
        }
    };
}

/// Elements that an update in place works on at a time.
pub const UPDATE_CHUNK: u64 = 2048;

/// An op kind. Everything else in the code base works through this trait and names no kinds.
pub trait Operator {
    /// Types of the outputs, or why the inputs do not fit. Must hold for hostile attributes: no panic,
    /// no overflow, no allocation by a declared size. Output shapes are checked by the caller.
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError>;

    /// The sharding rule. Only called with types that `infer` accepted.
    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule;

    /// Appends backward ops for one op and returns the gradient of each input (`None`: no gradient flows).
    /// Called only if some output has a gradient.
    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError>;

    /// Floating-point operations; one multiply-add counts as two. Data movement counts as none.
    fn flops(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64;

    /// Bytes read and written by a perfect kernel.
    fn bytes(&self, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        inputs.iter().chain(outputs).fold(0u64, |n, t| n.saturating_add(t.bytes()))
    }

    /// Class and sizes of the op's [`crate::Workload`], one of [`Operator::workload_classes`]. `None`: the op is bound
    /// by memory, and its time follows from the bytes that it moves.
    fn workload(
        &self,
        _: &[TensorType],
        _: &[TensorType],
    ) -> Option<(&'static WorkloadClass, WorkloadSizes)> {
        None
    }

    /// The workload classes that this kind declares.
    fn workload_classes() -> Vec<&'static WorkloadClass>
    where
        Self: Sized,
    {
        Vec::new()
    }

    /// The same op with operands rounded to 8-bit floats, if it is a product whose sizes 8-bit matrix units take.
    fn in_eight_bits(&self, _inputs: &[TensorType]) -> Option<Op> {
        None
    }

    /// Whether operands are rounded to 8-bit floats.
    fn is_eight_bit(&self) -> bool {
        false
    }

    /// Whether XLA compiles the op to `dot_general`. Its kernels need the summed dimensions last in the first operand.
    fn xla_is_dot(&self) -> bool {
        false
    }

    /// Bytes that XLA's kernel holds beside operands and results, on a device that holds `held` elements of the first
    /// result.
    fn xla_scratch_bytes(&self, _: &[TensorType], _: &[TensorType], _held: u64) -> u64 {
        0
    }

    /// Most bytes of scratch memory that the runtime's kernel needs beside these operands and results.
    fn workspace_bytes(&self, _: &[TensorType], _: &[TensorType]) -> u64 {
        0
    }

    /// Whether the op works element by element, at any position, and its results may replace operands of the same type:
    /// an optimizer's update.
    fn updates_in_place(&self) -> bool {
        false
    }

    /// Whether the output is the first input's memory seen with another shape.
    fn is_view(&self) -> bool {
        false
    }

    /// Whether the output is the sum of the inputs, where they all have its type: then sums of partial results are
    /// partial results of the sum.
    fn is_sum(&self) -> bool {
        false
    }

    /// Whether the result is the sum of the operand over all micro-batches of a step.
    fn accumulates(&self) -> bool {
        false
    }

    /// Whether results depend on random numbers, which differ by step, micro-batch and position.
    fn is_random(&self) -> bool {
        false
    }

    /// The op that completes the first result where a factor is split that the second result is reduced along by
    /// [`Reduction::LogSumExp`](crate::Reduction::LogSumExp). Operands: the part's first result, the part's second result, and
    /// the reduced second result. Result: a partial sum of the first result. It depends on no position.
    fn completion(&self) -> Option<Op> {
        None
    }

    /// The op that computes `region` from the region's local blocks. Ops whose attributes do not depend on sizes or
    /// positions return a copy of themselves.
    fn localize(&self, region: &Region<'_>) -> Op;
}

/// Bytes of an element in a kernel's scratch memory: 16-bit floats are widened first.
pub(crate) fn scratch_bytes(ty: &TensorType) -> u64 {
    ty.dtype.bytes().max(4)
}

/// Scratch memory of kernels that look up ids: the local row of each.
pub(crate) fn row_scratch_bytes(inputs: &[TensorType]) -> u64 {
    let ids = inputs.iter().filter(|ty| ty.dtype.is_int()).map(|ty| ty.shape.elements());
    ids.max().unwrap_or(0).saturating_mul(8)
}

/// Elements of a type as a flop count.
pub(crate) fn elements(ty: &TensorType) -> u64 {
    ty.shape.elements()
}

/// The result of a check that inference has passed before. Debug builds stop if it fails now; others go on without.
pub(crate) fn accepted<T>(checked: Result<T, OpError>) -> Option<T> {
    if let Err(reason) = &checked {
        debug_assert!(false, "types that the op's inference refuses: {reason}");
    }
    checked.ok()
}

/// Refuses a wrong number of inputs.
pub(crate) fn arity(inputs: &[TensorType], expected: usize) -> Result<(), OpError> {
    require!(inputs.len() == expected, "takes {expected} inputs, got {}", inputs.len());
    Ok(())
}

/// Refuses anything but floating-point elements, and inputs whose element types differ.
pub(crate) fn same_float(inputs: &[TensorType]) -> Result<(), OpError> {
    let first = inputs[0].dtype;
    require!(first.is_float(), "needs floating-point elements, got {first}");
    for t in inputs {
        require!(t.dtype == first, "element types differ: {first} and {}", t.dtype);
    }
    Ok(())
}

/// Refuses an axis that the tensor does not have.
pub(crate) fn axis_in(axis: usize, ty: &TensorType) -> Result<(), OpError> {
    require!(axis < ty.rank(), "axis {axis} does not exist in {ty}");
    Ok(())
}
