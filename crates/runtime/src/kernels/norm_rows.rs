//! The loops of the norms' kernels, forward and backward.
//!
//! A dimension belongs to one of four classes: the statistics sum over it or keep it, and gamma and beta have it or
//! not. Neighbouring dimensions of one class are merged, so the innermost loop is a long contiguous
//! row. Along it statistics and parameters are each constant or move with `x`. Layer norm (constant statistics,
//! moving parameters), batch norm of images (both constant) and of vectors (both moving) share this code.

use super::vector::{STRIP, sum};
use crate::tensor::Float;
use shardwright_simd::vectorised_fn;
use smallvec::SmallVec;
use std::ops::Range;

/// A merged dimension with the strides of `x`, statistics and parameters.
#[derive(Clone, Copy)]
struct MergedDim {
    size: usize,
    strides: [usize; 3],
}

/// Offsets of a row in `x`, statistics and parameters.
type RowStart = [usize; 3];

/// The loops of a norm: outer dimensions, and a row along which statistics and parameters move or not.
pub(crate) struct NormLoops {
    outer: SmallVec<[MergedDim; 4]>,
    row: usize,
    /// Whether statistics, and whether parameters, move along the row.
    pub moving: [bool; 2],
}

impl NormLoops {
    pub fn new(shape: &[u64], axes: &[usize], params: &[usize]) -> Self {
        // Major first: size, and whether it is kept by statistics and by parameters.
        let mut runs: SmallVec<[(usize, [bool; 2]); 4]> = SmallVec::new();
        for (d, &size) in shape.iter().enumerate().filter(|(_, n)| **n != 1) {
            let class = [!axes.contains(&d), params.contains(&d)];
            match runs.last_mut().filter(|r| r.1 == class) {
                Some(run) => run.0 *= size as usize,
                None => runs.push((size as usize, class)),
            }
        }
        let (row, moving) = runs.pop().unwrap_or((1, [false; 2]));
        let mut next = [row, if moving[0] { row } else { 1 }, if moving[1] { row } else { 1 }];
        let mut outer: SmallVec<[MergedDim; 4]> = SmallVec::new();
        for (size, class) in runs.into_iter().rev() {
            let mut strides = [0; 3];
            for (i, present) in [true, class[0], class[1]].into_iter().enumerate() {
                if present {
                    strides[i] = next[i];
                    next[i] *= size;
                }
            }
            outer.push(MergedDim { size, strides });
        }
        outer.reverse();
        Self { outer, row, moving }
    }

    /// The offsets of all rows, in order.
    #[inline(always)]
    fn rows(&self) -> Rows<'_> {
        Rows { outer: &self.outer, index: SmallVec::from_elem(0, self.outer.len()), next: Some([0; 3]) }
    }
}

/// Iterates over the rows of [`NormLoops`].
struct Rows<'a> {
    outer: &'a [MergedDim],
    index: SmallVec<[usize; 4]>,
    next: Option<RowStart>,
}

impl Iterator for Rows<'_> {
    type Item = RowStart;

    #[inline(always)]
    fn next(&mut self) -> Option<RowStart> {
        let start = self.next?;
        let mut after = start;
        self.next = None;
        for (index, MergedDim { size, strides }) in self.index.iter_mut().zip(self.outer).rev() {
            *index += 1;
            let back = if *index == *size { *size } else { 0 };
            for i in 0..3 {
                after[i] = after[i] + strides[i] - back * strides[i];
            }
            if back == 0 {
                self.next = Some(after);
                break;
            }
            *index = 0;
        }
        Some(start)
    }
}

/// The part of a tensor that a row reads: as long as the row if the tensor moves along it, else one element.
#[inline(always)]
fn part<const MOVING: bool, T>(tensor: &[T], at: usize, row: usize) -> &[T] {
    if MOVING { &tensor[at..at + row] } else { &tensor[at..at + 1] }
}

/// As [`part`], for writing.
#[inline(always)]
fn part_mut<const MOVING: bool, T>(tensor: &mut [T], at: usize, row: usize) -> &mut [T] {
    if MOVING { &mut tensor[at..at + row] } else { &mut tensor[at..at + 1] }
}

#[inline(always)]
fn pick<const MOVING: bool, T: Copy>(part: &[T], j: usize) -> T {
    if MOVING { part[j] } else { part[0] }
}

/// The operands of the norms: whole tensors, with zeros or ones for operands that are left out.
#[derive(Clone, Copy)]
pub(crate) struct Operands<'a, T> {
    /// The incoming gradient, or `x` again in the forward ops.
    pub dy: &'a [T],
    pub x: &'a [T],
    pub mean: &'a [T],
    /// `1 / sqrt(var + eps)`.
    pub rstd: &'a [T],
    pub gamma: &'a [T],
    pub beta: &'a [T],
    /// The sums of the backward pass.
    pub s1: &'a [T],
    pub s2: &'a [T],
}

/// One position of the operands.
pub(crate) struct Point<T> {
    pub dy: T,
    pub x: T,
    pub mean: T,
    pub rstd: T,
    pub gamma: T,
    pub beta: T,
    pub s1: T,
    pub s2: T,
}

impl<'a, T: Float> Operands<'a, T> {
    /// Cuts out a row.
    #[inline(always)]
    fn row<const S: bool, const P: bool>(&self, [x, s, p]: RowStart, row: usize) -> Operands<'a, T> {
        Operands {
            dy: &self.dy[x..x + row],
            x: &self.x[x..x + row],
            mean: part::<S, T>(self.mean, s, row),
            rstd: part::<S, T>(self.rstd, s, row),
            gamma: part::<P, T>(self.gamma, p, row),
            beta: part::<P, T>(self.beta, p, row),
            s1: part::<S, T>(self.s1, s, row),
            s2: part::<S, T>(self.s2, s, row),
        }
    }

    /// Cuts a part out of a row.
    #[inline(always)]
    fn strip<const S: bool, const P: bool>(&self, part: Range<usize>) -> Operands<'a, T> {
        let stat = if S { part.clone() } else { 0..1 };
        let param = if P { part.clone() } else { 0..1 };
        Operands {
            dy: &self.dy[part.clone()],
            x: &self.x[part],
            mean: &self.mean[stat.clone()],
            rstd: &self.rstd[stat.clone()],
            gamma: &self.gamma[param.clone()],
            beta: &self.beta[param],
            s1: &self.s1[stat.clone()],
            s2: &self.s2[stat],
        }
    }

    #[inline(always)]
    fn at<const S: bool, const P: bool>(&self, j: usize) -> Point<T> {
        Point {
            dy: self.dy[j],
            x: self.x[j],
            mean: pick::<S, T>(self.mean, j),
            rstd: pick::<S, T>(self.rstd, j),
            gamma: pick::<P, T>(self.gamma, j),
            beta: pick::<P, T>(self.beta, j),
            s1: pick::<S, T>(self.s1, j),
            s2: pick::<S, T>(self.s2, j),
        }
    }
}

/// Calls a function with the loops' constants: whether statistics and parameters move along rows.
macro_rules! with_moving {
    ($loops:expr, $function:ident::<_, _>($($argument:expr),*)) => {
        match $loops.moving {
            [false, false] => $function::<false, false, _, _>($($argument),*),
            [false, true] => $function::<false, true, _, _>($($argument),*),
            [true, false] => $function::<true, false, _, _>($($argument),*),
            [true, true] => $function::<true, true, _, _>($($argument),*),
        }
    };
}
pub(crate) use with_moving;

vectorised_fn! {
    /// `y = f(operands)` for every element.
    pub(crate) fn map[const S: bool, const P: bool, T: Float, F: Fn(Point<T>) -> T][S, P, T, F](
        loops: &NormLoops, operands: Operands<'_, T>, y: &mut [T], f: F,
    ) {
        let row = loops.row;
        for start in loops.rows() {
            let operands = operands.row::<S, P>(start, row);
            let y = &mut y[start[0]..start[0] + row];
            for (j, y) in y.iter_mut().enumerate() {
                *y = f(operands.at::<S, P>(j));
            }
        }
    }
}

vectorised_fn! {
    /// `stats[k] += f(operands)[k]` over everything that shares a statistic.
    pub(crate) fn sum_to_stats[const S: bool, const P: bool, T: Float, F: Fn(Point<T>) -> [T; 2]][S, P, T, F](
        loops: &NormLoops, operands: Operands<'_, T>, stats: [&mut [T]; 2], f: F,
    ) {
        sum_rows::<S, P, S, T, F>(loops, operands, stats, 1, f);
    }
}

vectorised_fn! {
    /// `params[k] += f(operands)[k]` over everything that shares a parameter.
    pub(crate) fn sum_to_params[const S: bool, const P: bool, T: Float, F: Fn(Point<T>) -> [T; 2]][S, P, T, F](
        loops: &NormLoops, operands: Operands<'_, T>, params: [&mut [T]; 2], f: F,
    ) {
        sum_rows::<S, P, P, T, F>(loops, operands, params, 2, f);
    }
}

/// Adds `f` to two results at offset `start[which]`, which move along the row if `R`.
#[inline(always)]
fn sum_rows<const S: bool, const P: bool, const R: bool, T: Float, F: Fn(Point<T>) -> [T; 2]>(
    loops: &NormLoops,
    operands: Operands<'_, T>,
    [a, b]: [&mut [T]; 2],
    which: usize,
    f: F,
) {
    a.fill(T::ZERO);
    b.fill(T::ZERO);
    let row = loops.row;
    for start in loops.rows() {
        let operands = operands.row::<S, P>(start, row);
        let a = part_mut::<R, T>(a, start[which], row);
        let b = part_mut::<R, T>(b, start[which], row);
        if R {
            add_terms::<S, P, T, F>(operands, a, b, &f);
            continue;
        }
        // Partial sums side by side, so the same simple loop computes them.
        let mut strips = [[T::ZERO; STRIP]; 2];
        let [strip_a, strip_b] = &mut strips;
        for first in (0..row).step_by(STRIP) {
            let operands = operands.strip::<S, P>(first..row.min(first + STRIP));
            let length = operands.x.len();
            add_terms::<S, P, T, F>(operands, &mut strip_a[..length], &mut strip_b[..length], &f);
        }
        a[0] += sum(strip_a);
        b[0] += sum(strip_b);
    }
}

/// `a[j], b[j] += f(operands at j)`.
#[inline(always)]
fn add_terms<const S: bool, const P: bool, T: Float, F: Fn(Point<T>) -> [T; 2]>(
    operands: Operands<'_, T>,
    a: &mut [T],
    b: &mut [T],
    f: &F,
) {
    for (j, (a, b)) in a.iter_mut().zip(b).enumerate() {
        let [da, db] = f(operands.at::<S, P>(j));
        *a += da;
        *b += db;
    }
}
