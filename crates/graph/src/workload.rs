//! Workloads: the key that measured operator times are stored and looked up by.
//!
//! Two ops with equal workloads take the same time, whatever their letters, names or roles. An op that is bound by
//! memory has its kind as class and the bytes that it moves as only size. Other ops declare classes in their own files
//! ([`crate::Operator::workload_classes`]): a matrix product, for example, has batch, rows, columns and depth as
//! sizes, and its class says which operands are transposed.

use crate::{
    ops::{Op, STREAM_CLASSES},
    types::{DType, TensorType},
};
use smallvec::SmallVec;
use std::{
    cmp::Ordering,
    fmt,
    hash::{Hash, Hasher},
};

/// The sizes that decide an op's time, in the order that the class fixes.
pub type WorkloadSizes = SmallVec<[u64; 12]>;

/// A kind of work whose time depends on its sizes alone. Classes are equal if their names are.
#[derive(Clone, Copy)]
pub struct WorkloadClass {
    /// The key in cost files.
    pub name: &'static str,
    /// The class whose measurements stand in for this one in cost files that have none of it.
    pub fallback: Option<&'static str>,
    /// How the roofline models work of these sizes; `None` if the class does not have sizes like these.
    pub roofline: fn(&[u64]) -> Option<RooflineKind>,
    /// Bytes that a perfect kernel moves for other sizes than those of a given workload of the class. Only called with
    /// sizes that `roofline` accepts.
    pub bytes: fn(&Workload, &[u64]) -> u64,
}

impl WorkloadClass {
    /// The class of an op kind that is bound by memory: its only size is the bytes that it moves.
    pub const fn stream(kind: &'static str) -> Self {
        Self {
            name: kind,
            fallback: None,
            roofline: |sizes| matches!(sizes, [_]).then_some(RooflineKind::Stream),
            bytes: |_, sizes| sizes[0],
        }
    }

    /// The class of this name, if some op kind has it.
    pub fn find(name: &str) -> Option<&'static WorkloadClass> {
        Op::declared_classes().into_iter().chain(&STREAM_CLASSES).find(|class| class.name == name)
    }

    /// How the roofline models work of these sizes. Debug builds stop at sizes that the class cannot have.
    fn roofline_kind(&self, sizes: &[u64]) -> Option<RooflineKind> {
        let kind = (self.roofline)(sizes);
        debug_assert!(kind.is_some(), "{sizes:?} are not the sizes of a workload of class {}", self.name);
        kind
    }
}

impl PartialEq for WorkloadClass {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for WorkloadClass {}

impl PartialOrd for WorkloadClass {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for WorkloadClass {
    fn cmp(&self, other: &Self) -> Ordering {
        self.name.cmp(other.name)
    }
}

impl Hash for WorkloadClass {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl fmt::Debug for WorkloadClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// The work that decides an op's time.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Workload {
    /// The kind of work.
    pub class: &'static WorkloadClass,
    /// The type that is computed in or moved.
    pub dtype: DType,
    /// Sizes, in the order that the class fixes.
    pub sizes: WorkloadSizes,
    /// Floating-point operations.
    pub flops: u64,
    /// Bytes that a perfect kernel moves.
    pub bytes: u64,
    /// How the roofline models it.
    pub roofline: RooflineKind,
}

/// How an analytic model sees a piece of work.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum RooflineKind {
    /// Reads, computes element by element, writes: bound by memory or by the vector units.
    Stream,
    /// A matrix product, or a recurrence of them.
    Product(Gemm),
    /// A matrix product whose operands are rounded to 8-bit floats first.
    EightBitProduct(Gemm),
    /// Fused attention or its gradient.
    Attention {
        /// The matrix product with as many flops: queries by visible keys.
        product: Gemm,
        /// Forward or backward.
        pass: AttentionPass,
    },
    /// A convolution or one of its derivatives.
    Convolution {
        /// The matrix product over unfolded windows that it amounts to.
        product: Gemm,
        /// The tensor that it computes.
        pass: ConvolutionPass,
        /// Set for ungrouped convolutions of images by 3x3 kernels with stride 1, for which faster algorithms exist.
        filter_3x3: Option<Filter3x3>,
    },
}

impl RooflineKind {
    /// The matrix product that the work amounts to, if it is one.
    pub fn product(&self) -> Option<&Gemm> {
        match self {
            RooflineKind::Stream => None,
            RooflineKind::Product(product)
            | RooflineKind::EightBitProduct(product)
            | RooflineKind::Attention { product, .. }
            | RooflineKind::Convolution { product, .. } => Some(product),
        }
    }
}

/// The matrix product that a piece of work amounts to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Gemm {
    /// Products that wait for each other (steps of a recurrence).
    pub steps: u64,
    /// Independent products.
    pub batch: u64,
    /// Rows of each result.
    pub m: u64,
    /// Columns of each result.
    pub n: u64,
    /// Depth: products added up per element.
    pub k: u64,
    /// The largest power of two, up to [`Gemm::ALIGNED`], that divides every size along which operands or the result are
    /// contiguous in memory.
    pub align: u64,
}

impl Gemm {
    /// The alignment of sizes that no device needs more of: vectors of 16 bytes of 16-bit floats.
    pub const ALIGNED: u64 = 8;

    /// The alignment of contiguous sizes.
    pub fn alignment(contiguous: [u64; 3]) -> u64 {
        contiguous.iter().fold(Self::ALIGNED, |align, size| align.min(1 << size.trailing_zeros().min(3)))
    }

    /// Floating-point operations.
    pub fn flops(&self) -> u64 {
        [self.batch, self.m, self.n, self.k, 2].iter().fold(self.steps, |n, &s| n.saturating_mul(s))
    }
}

/// The pass of fused attention that is computed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum AttentionPass {
    /// The result.
    Forward,
    /// The gradients by queries, keys and values.
    Backward,
}

/// Which of the three tensors of a convolution is computed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum ConvolutionPass {
    /// The output.
    Forward,
    /// The gradient by the input.
    InputGradient,
    /// The gradient by the weight.
    WeightGradient,
}

/// Sizes of an ungrouped convolution of images by 3x3 kernels with stride 1.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Filter3x3 {
    /// Images.
    pub samples: u64,
    /// Input channels.
    pub inputs: u64,
    /// Output channels.
    pub outputs: u64,
    /// Rows of the output.
    pub height: u64,
    /// Columns of the output.
    pub width: u64,
}

impl Workload {
    /// The workload of the same class and element type with other sizes.
    ///
    /// Flops of products follow from the sizes; those of other ops are proportional to the bytes.
    pub fn resized(&self, sizes: &[u64]) -> Workload {
        // Sizes come from ops, or from tables with the same number of columns. Others leave the workload as it is.
        let Some(roofline) = self.class.roofline_kind(sizes) else { return self.clone() };
        let bytes = (self.class.bytes)(self, sizes);
        let flops = match roofline.product() {
            Some(product) => product.flops(),
            None => (self.flops as f64 * (bytes as f64 / self.bytes.max(1) as f64)) as u64,
        };
        Workload { class: self.class, dtype: self.dtype, sizes: sizes.into(), flops, bytes, roofline }
    }
}

impl Op {
    /// The workload of this op on these types.
    pub fn workload(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Workload {
        let operator = self.operator();
        let (flops, bytes) = (operator.flops(inputs, outputs), operator.bytes(inputs, outputs));
        let (class, sizes) = operator
            .workload(inputs, outputs)
            .unwrap_or_else(|| (self.stream_class(), SmallVec::from_slice(&[bytes.max(1)])));
        let float = outputs.iter().chain(inputs).map(|t| t.dtype).find(|d| d.is_float());
        // Every op has an output; `F32` stands for the type of none.
        debug_assert!(!outputs.is_empty(), "a workload of {} without outputs", self.kind());
        let dtype = float.or(outputs.first().map(|t| t.dtype)).unwrap_or(DType::F32);
        // Work without a model counts as bound by memory.
        let roofline = class.roofline_kind(&sizes).unwrap_or(RooflineKind::Stream);
        Workload { class, dtype, sizes, flops, bytes, roofline }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declared_classes_have_names_of_their_own_and_fallbacks_that_exist() {
        let declared = Op::declared_classes();
        for (i, class) in declared.iter().enumerate() {
            assert!(declared[..i].iter().all(|other| other != class), "{class:?} is declared twice");
            assert_eq!(WorkloadClass::find(class.name), Some(*class));
            if let Some(fallback) = class.fallback {
                assert!(declared.iter().any(|other| other.name == fallback), "{class:?} by {fallback}");
            }
        }
        assert!(Op::KINDS.iter().all(|kind| WorkloadClass::find(kind).is_some()));
        assert_eq!(WorkloadClass::find("abacus"), None);
    }
}
