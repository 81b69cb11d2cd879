//! The one door to the matrix-product crate: bounds are checked here, so that callers stay safe.

use super::{Scratch, loops::Loop, movement::transpose};
use crate::tensor::Float;

/// A matrix inside a slice: where it starts and how far rows and columns are apart.
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
/// `c`'s elements must be distinct places (strides that do not overlap), as they are for every view of a
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

/// Like [`gemm`], for few rows of `c`, stored row after row, and `b` stored column after column.
///
/// The crate is then asked for the result with rows and columns exchanged, which is turned back: 1.0 to 3
/// times as fast, most where there are fewer than 20 rows. With `b` stored row after row that costs up to 40%,
/// so it is left alone; see the benchmark `kernels`, lines `linear ... forward` and `few rows`.
pub(crate) fn gemm_few_rows<T: Float>(
    [m, n, k]: [usize; 3],
    (a, at): (&[T], Matrix),
    (b, bt): (&[T], Matrix),
    (c, ct): (&mut [T], Matrix),
    add: bool,
    scratch: &mut Scratch,
) {
    // The turning back must be little work against the product.
    let pays = (2..=256).contains(&m) && 2 * m <= n && k >= 256;
    if ct.column != 1 || bt.row != 1 || !pays {
        return gemm([m, n, k], (a, at), (b, bt), (c, ct), add);
    }
    let turned = scratch.take::<T>(m * n);
    let target = (&mut *turned, Matrix::rows(0, m));
    gemm([n, m, k], (b, bt.transposed()), (a, at.transposed()), target, false);
    let across = Loop { size: m, strides: [1, ct.row] };
    let along = Loop { size: n, strides: [m, 1] };
    let c = &mut c[ct.offset..];
    if add {
        transpose(turned, c, across, along, |c, x| *c += x);
    } else {
        transpose(turned, c, across, along, |c, x| *c = x);
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
        // Too few rows, the fewest that are turned, ragged tiles, too many.
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
