//! Moves a box of elements from one tensor to another: the one loop behind transpose, slice, pad and concat.
//!
//! A movement is a nest of loops with a stride in the source and one in the target. Loops that are contiguous in
//! both are merged. The rest is copied row by row where both sides are contiguous, by
//! square tiles where each side is contiguous along another loop (a transposition),
//! and element by element otherwise.

use super::{
    Result,
    loops::{Loop, Loops, for_each_index},
};
use crate::tensor::{Element, Elements, ElementsMut};
use std::cmp::Reverse;

/// Runs a function on the elements of two tensors of the same type.
macro_rules! with_same_type {
    ($x:expr, $y:expr, |$a:ident, $b:ident| $body:expr) => {
        match ($x, $y) {
            (Elements::F32($a), ElementsMut::F32($b)) => $body,
            (Elements::F64($a), ElementsMut::F64($b)) => $body,
            (Elements::Bf16($a), ElementsMut::Bf16($b)) => $body,
            (Elements::F16($a), ElementsMut::F16($b)) => $body,
            (Elements::I32($a), ElementsMut::I32($b)) => $body,
            (Elements::I64($a), ElementsMut::I64($b)) => $body,
            (Elements::Bool($a), ElementsMut::Bool($b)) => $body,
            _ => return Err($crate::kernels::KernelError::BadValue("element types differ".into())),
        }
    };
}
pub(crate) use with_same_type;

/// Source and target, in the order of a loop's strides.
const FROM: usize = 0;
const TO: usize = 1;

/// The loops that copy a box of elements.
#[derive(Debug)]
pub(crate) struct Movement {
    loops: Loops<2>,
    from: usize,
    to: usize,
}

impl Movement {
    /// A box of `shape` whose first element goes from index `from` to index `to`; `strides` gives the
    /// distances of neighbours along a dimension in source and target.
    pub fn new(shape: &[u64], from: usize, to: usize, strides: impl Fn(usize) -> [usize; 2]) -> Self {
        let mut loops: Loops<2> = shape
            .iter()
            .enumerate()
            .filter(|(_, size)| **size != 1)
            .map(|(d, &size)| Loop { size: size as usize, strides: strides(d) })
            .collect();
        // In the order of the target, so it is written from front to back.
        loops.sort_by_key(|l| Reverse(l.strides[TO]));
        loops.dedup_by(|minor, major| {
            let joined = (0..2).all(|i| major.strides[i] == minor.strides[i] * minor.size);
            if joined {
                *major = Loop { size: major.size * minor.size, strides: minor.strides };
            }
            joined
        });
        Self { loops, from, to }
    }

    /// Moves the elements; both tensors must be of the same type.
    pub fn run(&self, x: Elements<'_>, y: &mut ElementsMut<'_>) -> Result {
        with_same_type!(x, y, |x, y| self.copy(x, y));
        Ok(())
    }

    fn copy<E: Element>(&self, x: &[E], y: &mut [E]) {
        let (x, y) = (&x[self.from..], &mut y[self.to..]);
        let Some((&inner, outer)) = self.loops.split_last() else {
            y[0] = x[0];
            return;
        };
        if inner.strides == [1, 1] {
            for_each_index(outer, |[i, j]| y[j..j + inner.size].copy_from_slice(&x[i..i + inner.size]));
            return;
        }
        let crossing = outer.iter().position(|l| l.strides[FROM] == 1);
        match crossing.filter(|_| inner.strides[TO] == 1) {
            Some(crossing) => {
                let mut outer = Loops::from_slice(outer);
                let across = outer.remove(crossing);
                for_each_index(&outer, |[i, j]| {
                    transpose(&x[i..], &mut y[j..], across, inner, |y, x| *y = x)
                });
            }
            None => {
                let [from, to] = inner.strides;
                for_each_index(outer, |[i, j]| {
                    let source = x[i..].iter().step_by(from);
                    for (y, &x) in y[j..].iter_mut().step_by(to).zip(source).take(inner.size) {
                        *y = x;
                    }
                });
            }
        }
    }
}

/// Elements per side of a tile: small enough that the rows of a tile stay in the first-level cache.
const TILE: usize = 16;

/// Transposes a matrix whose rows are contiguous in the source along `across` and whose columns are
/// contiguous in the target along `along`; `put` sets an element of the target.
pub(crate) fn transpose<E: Element>(
    x: &[E],
    y: &mut [E],
    across: Loop<2>,
    along: Loop<2>,
    put: impl Fn(&mut E, E),
) {
    let (row, column) = (along.strides[FROM], across.strides[TO]);
    let mut tile = [[E::default(); TILE]; TILE];
    for a in (0..across.size).step_by(TILE) {
        let width = TILE.min(across.size - a);
        for b in (0..along.size).step_by(TILE) {
            let height = TILE.min(along.size - b);
            for (r, line) in tile[..height].iter_mut().enumerate() {
                let at = (b + r) * row + a;
                line[..width].copy_from_slice(&x[at..at + width]);
            }
            for c in 0..width {
                let at = (a + c) * column + b;
                for (y, line) in y[at..at + height].iter_mut().zip(&tile) {
                    put(y, line[c]);
                }
            }
        }
    }
}
