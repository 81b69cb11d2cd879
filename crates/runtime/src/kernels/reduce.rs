//! Kernel of reductions over any set of dimensions.
//!
//! Neighbouring dimensions that are all kept or all reduced are merged first, so the common cases (last
//! dimensions, first dimensions) run over long contiguous rows.

use super::{Context, Kernel, KernelError, Result, read, write};
use crate::tensor::{Element, Float, View, ViewMut};
use shardwright_graph::{DType, Reduction, ops::Reduce};
use shardwright_simd::vectorised;
use smallvec::SmallVec;

impl Kernel for Reduce {
    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let (x, y) = (&inputs[0], &mut outputs[0]);
        match (self.f, x.data.dtype()) {
            (Reduction::Sum, DType::I32) => reduce(x, y, &self.axes, 0, i32::wrapping_add),
            (Reduction::Sum, DType::I64) => reduce(x, y, &self.axes, 0, i64::wrapping_add),
            (Reduction::Max, DType::I32) => reduce(x, y, &self.axes, i32::MIN, i32::max),
            (Reduction::Max, DType::I64) => reduce(x, y, &self.axes, i64::MIN, i64::max),
            (Reduction::LogSumExp, _) => {
                Err(KernelError::BadValue("a reduction is a sum or a maximum".into()))
            }
            (Reduction::Max, _) => reduce(x, y, &self.axes, T::NEG_INFINITY, |a: T, b: T| a.max(b)),
            (Reduction::Sum, _) => {
                reduce(x, y, &self.axes, T::ZERO, |a: T, b: T| a + b)?;
                let scale = T::from_f64(self.scale.0);
                if scale != T::ONE {
                    write::<T>(y)?.iter_mut().for_each(|v| *v *= scale);
                }
                Ok(())
            }
        }
    }
}

/// A run of neighbouring dimensions that are all kept or all reduced.
#[derive(Clone, Copy)]
struct Run {
    size: usize,
    kept: bool,
}

fn reduce<E: Element>(
    x: &View<'_>,
    y: &mut ViewMut<'_>,
    axes: &[usize],
    start: E,
    join: impl Fn(E, E) -> E + Copy,
) -> Result {
    let mut runs: SmallVec<[Run; 6]> = SmallVec::new();
    for (d, &size) in x.shape.iter().enumerate().filter(|(_, n)| **n != 1) {
        let kept = !axes.contains(&d);
        match runs.last_mut().filter(|r| r.kept == kept) {
            Some(run) => run.size *= size as usize,
            None => runs.push(Run { size: size as usize, kept }),
        }
    }
    let x = read::<E>(x)?;
    let y = write::<E>(y)?;
    y.fill(start);
    fold(x, y, &runs, join);
    Ok(())
}

/// Folds `x`, laid out by `runs`, into `y`, laid out by the kept ones among them.
fn fold<E: Element>(x: &[E], y: &mut [E], runs: &[Run], join: impl Fn(E, E) -> E + Copy) {
    match *runs {
        [] => y[0] = join(y[0], x[0]),
        [Run { kept: true, .. }] => vectorised!({
            for (y, &x) in y.iter_mut().zip(x) {
                *y = join(*y, x);
            }
        }),
        [Run { kept: false, .. }] => y[0] = join(y[0], vectorised!(fold_row(x, join))),
        [Run { size, kept }, ref inner @ ..] => {
            let inner_x = x.len() / size;
            let inner_y = if kept { y.len() / size } else { 0 };
            let width = if kept { inner_y } else { y.len() };
            for i in 0..size {
                fold(&x[i * inner_x..][..inner_x], &mut y[i * inner_y..][..width], inner, join);
            }
        }
    }
}

/// Folds a contiguous row by sixteen independent partial results, which the compiler keeps in registers;
/// also more accurate than one running sum.
#[inline(always)]
fn fold_row<E: Element>(x: &[E], join: impl Fn(E, E) -> E + Copy) -> E {
    const LANES: usize = 16;
    let (chunks, rest) = x.as_chunks::<LANES>();
    let fold_rest = |first: E, rest: &[E]| rest.iter().fold(first, |a, &b| join(a, b));
    match chunks.split_first() {
        None => fold_rest(rest[0], &rest[1..]),
        Some((first, chunks)) => {
            let mut lanes = *first;
            for chunk in chunks {
                for (lane, &v) in lanes.iter_mut().zip(chunk) {
                    *lane = join(*lane, v);
                }
            }
            fold_rest(fold_rest(lanes[0], &lanes[1..]), rest)
        }
    }
}
