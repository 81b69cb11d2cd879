//! The only caller of the matrix-product crate. It checks bounds, so its own callers are safe.

use super::{Scratch, loops::Loop, movement::transpose};
use crate::tensor::Float;
use shardwright_graph::ops;

/// A matrix inside a slice: its offset and strides.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    /// Index of the first element.
    pub offset: usize,
    /// Distance between rows.
    pub row: usize,
    /// Distance between columns.
    pub column: usize,
}

impl Matrix {
    /// A matrix stored row after row without gaps.
    pub fn rows(offset: usize, columns: usize) -> Self {
        Self { offset, row: columns, column: 1 }
    }

    /// The same matrix with rows and columns exchanged.
    pub fn transposed(self) -> Self {
        Self { offset: self.offset, row: self.column, column: self.row }
    }

    fn last(&self, rows: usize, columns: usize) -> usize {
        self.offset + (rows - 1) * self.row + (columns - 1) * self.column
    }
}

/// `c = a * b`, or `c += a * b` if `add`, for `a` of m×k and `b` of k×n.
///
/// The strides of `c` must not overlap, so that its elements are distinct, as in every view of a
/// tensor's dimensions.
pub(crate) fn gemm<T: Float>(
    [m, n, k]: [usize; 3],
    (a, at): (&[T], Matrix),
    (b, bt): (&[T], Matrix),
    (c, ct): (&mut [T], Matrix),
    add: bool,
) {
    if m == 0 || n == 0 || k == 0 {
        return;
    }
    assert!(at.last(m, k) < a.len() && bt.last(k, n) < b.len() && ct.last(m, n) < c.len());
    // SAFETY: the assertion above shows that the farthest element of each matrix lies inside its slice, and
    // strides are not negative, so all elements do; `c` is borrowed mutably, so it overlaps neither operand.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c.as_mut_ptr().add(ct.offset),
            ct.column as isize,
            ct.row as isize,
            add,
            a.as_ptr().add(at.offset),
            at.column as isize,
            at.row as isize,
            b.as_ptr().add(bt.offset),
            bt.column as isize,
            bt.row as isize,
            T::ONE,
            T::ONE,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// Like [`gemm`], for few rows of row-major `c` and column-major `b`.
///
/// Computes the transposed product and transposes it back: 1.0 to 3
/// times as fast, most with fewer than 20 rows. With row-major `b` this would cost up to 40%,
/// so [`gemm`] is called instead. See the benchmark `kernels`, lines `linear ... forward` and `few rows`.
pub(crate) fn gemm_few_rows<T: Float>(
    [m, n, k]: [usize; 3],
    (a, at): (&[T], Matrix),
    (b, bt): (&[T], Matrix),
    (c, ct): (&mut [T], Matrix),
    add: bool,
    scratch: &mut Scratch,
) {
    // The transposition must be little work compared with the product.
    let few = (2..=ops::FEW_ROWS as usize).contains(&m);
    let pays = few && 2 * m <= n && k >= ops::FEW_ROWS_DEPTH as usize;
    if ct.column != 1 || bt.row != 1 || !pays {
        return gemm([m, n, k], (a, at), (b, bt), (c, ct), add);
    }
    let transposed = scratch.take::<T>(m * n);
    let target = (&mut *transposed, Matrix::rows(0, m));
    gemm([n, m, k], (b, bt.transposed()), (a, at.transposed()), target, false);
    let across = Loop { size: m, strides: [1, ct.row] };
    let along = Loop { size: n, strides: [m, 1] };
    let c = &mut c[ct.offset..];
    if add {
        transpose(transposed, c, across, along, |c, x| *c += x);
    } else {
        transpose(transposed, c, across, along, |c, x| *c = x);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_product_of_few_rows_equals_the_plain_one() {
        let (n, k, gap) = (70, 256, 3);
        let value = |i: usize| ((i * 7919) % 101) as f64 / 50.0 - 1.0;
        let b: Vec<f64> = (0..k * n).map(value).collect();
        // Too few rows, the fewest that are transposed, ragged tiles, too many.
        for m in [1, 2, 35, 36] {
            let a: Vec<f64> = (0..m * k).map(|i| value(i + 5)).collect();
            let start: Vec<f64> = (0..1 + m * (n + gap)).map(|i| value(i + 9)).collect();
            for (bt, add) in [(Matrix::rows(0, n), false), (Matrix::rows(0, k).transposed(), true)] {
                let ct = Matrix { offset: 1, row: n + gap, column: 1 };
                let at = Matrix::rows(0, k);
                let [mut plain, mut few] = [start.clone(), start.clone()];
                gemm([m, n, k], (&a, at), (&b, bt), (&mut plain, ct), add);
                let scratch = &mut Scratch::default();
                gemm_few_rows([m, n, k], (&a, at), (&b, bt), (&mut few, ct), add, scratch);
                for (i, (p, f)) in plain.iter().zip(&few).enumerate() {
                    assert!((p - f).abs() < 1e-10, "{m} rows, element {i}: {f}, not {p}");
                }
            }
        }
    }
}
