//! Nested loops over strided tensors: one index moves through several tensors at once.

use smallvec::SmallVec;

/// A loop: its number of iterations, and its stride in each of `N` tensors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Loop<const N: usize> {
    /// Number of iterations.
    pub size: usize,
    /// Elements per iteration in each tensor; 0 where the tensor is broadcast.
    pub strides: [usize; N],
}

/// Loops, outermost first.
pub(crate) type Loops<const N: usize> = SmallVec<[Loop<N>; 8]>;

/// Visits every combination of the loops' indices, last fastest, with the offsets in the tensors.
pub(crate) fn for_each_index<const N: usize>(loops: &[Loop<N>], mut visit: impl FnMut([usize; N])) {
    let mut index: SmallVec<[usize; 8]> = smallvec::smallvec![0; loops.len()];
    let mut offsets = [0usize; N];
    loop {
        visit(offsets);
        let mut d = loops.len();
        loop {
            if d == 0 {
                return;
            }
            d -= 1;
            index[d] += 1;
            for (offset, stride) in offsets.iter_mut().zip(loops[d].strides) {
                *offset += stride;
            }
            if index[d] < loops[d].size {
                break;
            }
            for (offset, stride) in offsets.iter_mut().zip(loops[d].strides) {
                *offset -= stride * loops[d].size;
            }
            index[d] = 0;
        }
    }
}

/// Strides of a contiguous tensor.
pub(crate) fn strides(shape: &[u64]) -> SmallVec<[usize; 6]> {
    let mut strides: SmallVec<[usize; 6]> = smallvec::smallvec![1; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d] as usize;
    }
    strides
}

/// Number of elements of this shape.
pub(crate) fn count(shape: &[u64]) -> usize {
    shape.iter().map(|&n| n as usize).product()
}
