//! What decides how long an op takes on a device: the key that measured costs are stored and looked up by.
//!
//! Two ops with the same workload take the same time, whatever their letters, names or roles. Classes are
//! coarse where time is: an op that is bound by memory is its kind and the bytes that it moves; a matrix
//! product is its batch, rows, columns and depth.

use crate::{
    operator::Operator,
    ops::Op,
    types::{DType, TensorType},
};
use smallvec::SmallVec;

/// The sizes that decide an op's time, in an order that the class fixes.
pub type WorkloadSizes = SmallVec<[u64; 12]>;

/// What decides how long an op takes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Workload {
    /// What kind of work it is.
    pub class: &'static str,
    /// The type that is computed in or moved.
    pub dtype: DType,
    /// Sizes; what they mean depends on the class.
    pub sizes: WorkloadSizes,
    /// Floating-point operations.
    pub flops: u64,
    /// Bytes that a perfect kernel moves.
    pub bytes: u64,
    /// The matrix product that it amounts to, if it is one.
    pub gemm: Option<Gemm>,
}

/// The matrix product that a piece of work amounts to, for models of how well it fills a device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Gemm {
    /// Independent products.
    pub batch: u64,
    /// Rows of each result.
    pub m: u64,
    /// Columns of each result.
    pub n: u64,
    /// Depth: products added up per element.
    pub k: u64,
}

impl Op {
    /// What decides how long this op takes on these types.
    pub fn workload(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Workload {
        let operator: &dyn Operator = self.operator();
        let (flops, bytes) = (operator.flops(inputs, outputs), operator.bytes(inputs, outputs));
        let (class, sizes) = operator
            .workload(inputs, outputs)
            .unwrap_or_else(|| (self.kind(), SmallVec::from_slice(&[bytes])));
        let float = outputs.iter().chain(inputs).map(|t| t.dtype).find(|d| d.is_float());
        let dtype = float.or(outputs.first().map(|t| t.dtype)).unwrap_or(DType::F32);
        let gemm = operator.gemm(inputs, outputs);
        Workload { class, dtype, sizes, flops, bytes, gemm }
    }
}
