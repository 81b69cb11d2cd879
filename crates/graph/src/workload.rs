//! What decides how long an op takes on a device: the key that measured costs are stored and looked up by.
//!
//! Two ops with the same workload take the same time, whatever their letters, names or roles. Classes are
//! coarse where time is: an op that is bound by memory is its kind and the bytes that it moves; a matrix
//! product is its batch, rows, columns and depth, and which of its operands are transposed.

use crate::{
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
}

impl Workload {
    /// The workload of the same class and element type with other sizes.
    ///
    /// Flops and bytes of products and convolutions follow from the sizes; those of other ops are
    /// proportional to the bytes that are their only size.
    pub fn resized(&self, sizes: &[u64]) -> Workload {
        let element = self.dtype.bytes();
        let gemm = gemm_of(self.class, sizes);
        let (flops, bytes) = match (self.class, &gemm) {
            // A step and the weights stay in cache: what is moved is proportional to the steps' data.
            ("lstm" | "lstm_grad", Some(g)) => {
                let share = (g.steps * g.m * g.n / 4) as f64 / self.lstm_states() as f64;
                (g.flops(), (self.bytes as f64 * share) as u64)
            }
            ("gemm" | "gemm_nt" | "gemm_tn" | "gemm_tt", Some(g)) => {
                let operands = g.m * g.k + g.k * g.n + g.m * g.n;
                (g.flops(), g.batch.saturating_mul(operands).saturating_mul(element))
            }
            (_, Some(g)) => (g.flops(), conv_elements(sizes).saturating_mul(element)),
            (_, None) => {
                let bytes = sizes.first().copied().unwrap_or(0);
                let share = bytes as f64 / self.bytes.max(1) as f64;
                ((self.flops as f64 * share) as u64, bytes)
            }
        };
        Workload { class: self.class, dtype: self.dtype, sizes: sizes.into(), flops, bytes, gemm }
    }
}

impl Workload {
    /// States that a recurrence makes: steps, batch and width multiplied.
    fn lstm_states(&self) -> u64 {
        [0, 1, 3].iter().filter_map(|&i| self.sizes.get(i)).fold(1u64, |n, &s| n.saturating_mul(s)).max(1)
    }
}

impl Gemm {
    /// Floating-point operations.
    pub fn flops(&self) -> u64 {
        [self.batch, self.m, self.n, self.k, 2].iter().fold(self.steps, |n, &s| n.saturating_mul(s))
    }
}

/// Samples, groups, input and output channels per group; output sizes; kernel sizes; strides.
type ConvParts<'a> = ([u64; 4], &'a [u64], &'a [u64], &'a [u64]);

/// Sizes of the three convolution classes: samples, groups, input and output channels per group, then per
/// spatial dimension the output's size, the kernel's and the stride.
fn conv_parts(sizes: &[u64]) -> Option<ConvParts<'_>> {
    let (head, spatial) = sizes.split_first_chunk::<4>()?;
    let dims = spatial.len() / 3;
    let (out, rest) = spatial.split_at(dims);
    let (kernel, stride) = rest.split_at(dims);
    Some((*head, out, kernel, stride))
}

/// Elements that a convolution reads and writes.
fn conv_elements(sizes: &[u64]) -> u64 {
    let Some(([n, g, c, o], out, kernel, stride)) = conv_parts(sizes) else { return 0 };
    let product = |s: &mut dyn Iterator<Item = u64>| s.fold(1u64, |n, x| n.saturating_mul(x));
    let kernel_size = product(&mut kernel.iter().copied());
    let out_size = product(&mut out.iter().copied());
    let in_size = product(&mut (0..out.len()).map(|i| (out[i].saturating_sub(1)) * stride[i] + kernel[i]));
    let (x, y) =
        (product(&mut [n, g, c, in_size].into_iter()), product(&mut [n, g, o, out_size].into_iter()));
    x.saturating_add(y).saturating_add(product(&mut [g, c, o, kernel_size].into_iter()))
}

/// The matrix product that work of a class amounts to, if it is one.
fn gemm_of(class: &str, sizes: &[u64]) -> Option<Gemm> {
    if class.starts_with("gemm") {
        let &[batch, m, n, k] = sizes else { return None };
        return Some(Gemm { steps: 1, batch, m, n, k });
    }
    if let ("lstm" | "lstm_grad", &[steps, m, k, hidden]) = (class, sizes) {
        // Per step: hidden state times weights for all four gates; backwards also the weights' gradient.
        let batch = if class == "lstm" { 1 } else { 2 };
        return Some(Gemm { steps, batch, m, n: hidden.saturating_mul(4), k });
    }
    let ([samples, batch, c, o], out, kernel, _) = conv_parts(sizes).filter(|_| class.starts_with("conv"))?;
    let positions = out.iter().fold(samples, |n, &s| n.saturating_mul(s));
    let window = kernel.iter().fold(1u64, |n, &s| n.saturating_mul(s));
    Some(match class {
        "conv" => Gemm { steps: 1, batch, m: positions, n: o, k: c.saturating_mul(window) },
        "conv_grad_input" => Gemm { steps: 1, batch, m: positions, n: c.saturating_mul(window), k: o },
        "conv_grad_weight" => Gemm { steps: 1, batch, m: o, n: c.saturating_mul(window), k: positions },
        _ => return None,
    })
}

impl Op {
    /// What decides how long this op takes on these types.
    pub fn workload(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Workload {
        let operator = self.operator();
        let (flops, bytes) = (operator.flops(inputs, outputs), operator.bytes(inputs, outputs));
        let (class, sizes) = operator
            .workload(inputs, outputs)
            .unwrap_or_else(|| (self.kind(), SmallVec::from_slice(&[bytes.max(1)])));
        let float = outputs.iter().chain(inputs).map(|t| t.dtype).find(|d| d.is_float());
        let dtype = float.or(outputs.first().map(|t| t.dtype)).unwrap_or(DType::F32);
        let gemm = gemm_of(class, &sizes);
        Workload { class, dtype, sizes, flops, bytes, gemm }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Contract;

    #[test]
    fn products_are_told_apart_by_how_their_operands_lie() {
        let class = |spec: &str, shapes: [&[u64]; 2]| {
            let op: Op = Contract::parse(spec).unwrap().into();
            let inputs = shapes.map(|s| TensorType::new(DType::F32, s));
            let outputs = op.operator().infer(&inputs).unwrap();
            op.workload(&inputs, &outputs).class
        };
        assert_eq!(class("mk,kn->mn", [&[3, 5], &[5, 7]]), "gemm");
        assert_eq!(class("mn,kn->mk", [&[3, 7], &[5, 7]]), "gemm_nt", "the gradient by the first operand");
        assert_eq!(class("mk,mn->kn", [&[3, 5], &[3, 7]]), "gemm_tn", "the gradient by the second");
        assert_eq!(class("km,nk->mn", [&[5, 3], &[7, 5]]), "gemm_tt");
        assert_eq!(class("mkb,bkn->bmn", [&[3, 5, 2], &[2, 5, 7]]), "gemm", "batches do not count");
    }

    #[test]
    fn letters_become_batch_rows_columns_and_depth() {
        let check = |spec: &str, shapes: [&[u64]; 2], expected: [u64; 4]| {
            let op: Op = Contract::parse(spec).unwrap().into();
            let inputs = shapes.map(|s| TensorType::new(DType::Bf16, s));
            let outputs = op.operator().infer(&inputs).unwrap();
            let workload = op.workload(&inputs, &outputs);
            assert_eq!(workload.sizes[..], expected, "{spec}");
            assert_eq!(workload.resized(&expected), workload, "{spec}");
        };
        check("mk,kn->mn", [&[3, 5], &[5, 7]], [1, 3, 7, 5]);
        check("bqhd,bkhd->bhqk", [&[2, 3, 4, 5], &[2, 6, 4, 5]], [8, 3, 6, 5]);
        check("bsk,kn->bsn", [&[2, 3, 5], &[5, 7]], [1, 6, 7, 5]);
    }
}
