//! The one door to the matrix-product crate: bounds are checked here, so that callers stay safe.

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
