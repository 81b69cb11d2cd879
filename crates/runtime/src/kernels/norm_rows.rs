//! The loops of the norms' kernels, forward and backward.
//!
//! A dimension is either summed over or kept by the statistics, and either has its own gamma and beta or
//! not. Neighbouring dimensions of one class are joined, so that the innermost loop is a long contiguous
//! row along which statistics and parameters each stand still or move in step: layer norm (statistics
//! still, parameters moving), batch norm of images (both still) and of vectors (both moving) share one code.

use super::vector::{LANES, sums, vectorised};
use crate::tensor::Float;
use smallvec::SmallVec;

/// How far `x`, statistics and parameters move per step of a joined dimension.
#[derive(Clone, Copy)]
struct Joined {
    size: usize,
    strides: [usize; 3],
}

/// Where a row begins in `x`, statistics and parameters.
type Place = [usize; 3];

/// The loops of a norm: `outer` ones, and a row along which statistics and parameters move or not.
pub(crate) struct Layout {
    outer: SmallVec<[Joined; 4]>,
    row: usize,
    /// Whether statistics, and whether parameters, move along the row.
    pub moving: [bool; 2],
}

impl Layout {
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
        let mut outer: SmallVec<[Joined; 4]> = SmallVec::new();
        for (size, class) in runs.into_iter().rev() {
            let mut strides = [0; 3];
            for (i, present) in [true, class[0], class[1]].into_iter().enumerate() {
                if present {
                    strides[i] = next[i];
                    next[i] *= size;
                }
            }
            outer.push(Joined { size, strides });
        }
        outer.reverse();
        Self { outer, row, moving }
    }

    /// Calls `visit` for every row, in order.
    #[inline(always)]
    fn for_rows(&self, mut visit: impl FnMut(Place)) {
        let mut index: SmallVec<[usize; 4]> = SmallVec::from_elem(0, self.outer.len());
        let mut place = [0; 3];
        loop {
            visit(place);
            let mut d = self.outer.len();
            loop {
                if d == 0 {
                    return;
                }
                d -= 1;
                let Joined { size, strides } = self.outer[d];
                index[d] += 1;
                let back = if index[d] == size { size } else { 0 };
                for i in 0..3 {
                    place[i] = place[i] + strides[i] - back * strides[i];
                }
                if back == 0 {
                    break;
                }
                index[d] = 0;
            }
        }
    }
}

/// The part of a tensor that a row reads: as long as the row if it moves along it, else one element.
#[inline(always)]
fn part<const MOVING: bool, T>(tensor: &[T], at: usize, row: usize) -> &[T] {
    if MOVING { &tensor[at..at + row] } else { &tensor[at..at + 1] }
}

/// As [`part`], to be written.
#[inline(always)]
fn part_mut<const MOVING: bool, T>(tensor: &mut [T], at: usize, row: usize) -> &mut [T] {
    if MOVING { &mut tensor[at..at + row] } else { &mut tensor[at..at + 1] }
}

#[inline(always)]
fn pick<const MOVING: bool, T: Copy>(part: &[T], j: usize) -> T {
    if MOVING { part[j] } else { part[0] }
}

#[inline(always)]
fn pick_chunk<const MOVING: bool, T: Copy>(part: &[T], i: usize) -> [T; LANES] {
    if MOVING { part.as_chunks().0[i] } else { [part[0]; LANES] }
}

/// What the norms read: whole tensors, with zeros or ones where an operand is left out.
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
    fn row<const S: bool, const P: bool>(&self, [x, s, p]: Place, row: usize) -> Operands<'a, T> {
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

/// Calls a function with the layout's constants: whether statistics and parameters move along rows.
macro_rules! with_moving {
    ($layout:expr, $function:ident::<_, _>($($argument:expr),*)) => {
        match $layout.moving {
            [false, false] => $function::<false, false, _, _>($($argument),*),
            [false, true] => $function::<false, true, _, _>($($argument),*),
            [true, false] => $function::<true, false, _, _>($($argument),*),
            [true, true] => $function::<true, true, _, _>($($argument),*),
        }
    };
}
pub(crate) use with_moving;

/// `y = f(operands)` for every element.
pub(crate) fn map<const S: bool, const P: bool, T: Float, F: Fn(Point<T>) -> T>(
    layout: &Layout,
    operands: Operands<'_, T>,
    y: &mut [T],
    f: F,
) {
    let row = layout.row;
    vectorised(|| {
        layout.for_rows(|place| {
            let operands = operands.row::<S, P>(place, row);
            let y = &mut y[place[0]..place[0] + row];
            for (j, y) in y.iter_mut().enumerate() {
                *y = f(operands.at::<S, P>(j));
            }
        });
    });
}

/// `stats[k] += f(operands)[k]` over everything that shares a statistic.
pub(crate) fn sum_to_stats<const S: bool, const P: bool, T: Float, F: Fn(Point<T>) -> [T; 2]>(
    layout: &Layout,
    operands: Operands<'_, T>,
    stats: [&mut [T]; 2],
    f: F,
) {
    vectorised(|| sum_rows::<S, P, S, T, F>(layout, operands, stats, 1, f));
}

/// `params[k] += f(operands)[k]` over everything that shares a parameter.
pub(crate) fn sum_to_params<const S: bool, const P: bool, T: Float, F: Fn(Point<T>) -> [T; 2]>(
    layout: &Layout,
    operands: Operands<'_, T>,
    params: [&mut [T]; 2],
    f: F,
) {
    vectorised(|| sum_rows::<S, P, P, T, F>(layout, operands, params, 2, f));
}

/// Adds `f` to two results that lie at `place[which]` and move along the row if `R`.
#[inline(always)]
fn sum_rows<const S: bool, const P: bool, const R: bool, T: Float, F: Fn(Point<T>) -> [T; 2]>(
    layout: &Layout,
    operands: Operands<'_, T>,
    [a, b]: [&mut [T]; 2],
    which: usize,
    f: F,
) {
    a.fill(T::ZERO);
    b.fill(T::ZERO);
    let row = layout.row;
    layout.for_rows(|place| {
        let operands = operands.row::<S, P>(place, row);
        let a = part_mut::<R, T>(a, place[which], row);
        let b = part_mut::<R, T>(b, place[which], row);
        if R {
            for (j, (a, b)) in a.iter_mut().zip(b).enumerate() {
                let [da, db] = f(operands.at::<S, P>(j));
                *a += da;
                *b += db;
            }
            return;
        }
        let chunk = |i: usize| {
            let dy = pick_chunk::<true, T>(operands.dy, i);
            let x = pick_chunk::<true, T>(operands.x, i);
            let mean = pick_chunk::<S, T>(operands.mean, i);
            let rstd = pick_chunk::<S, T>(operands.rstd, i);
            let gamma = pick_chunk::<P, T>(operands.gamma, i);
            let mut terms = [[T::ZERO; LANES]; 2];
            for k in 0..LANES {
                let [da, db] = f(Point {
                    dy: dy[k],
                    x: x[k],
                    mean: mean[k],
                    rstd: rstd[k],
                    gamma: gamma[k],
                    // No sum needs these.
                    beta: T::ZERO,
                    s1: T::ZERO,
                    s2: T::ZERO,
                });
                terms[0][k] = da;
                terms[1][k] = db;
            }
            terms
        };
        let [da, db] = sums(row, chunk, |j| f(operands.at::<S, P>(j)));
        a[0] += da;
        b[0] += db;
    });
}
