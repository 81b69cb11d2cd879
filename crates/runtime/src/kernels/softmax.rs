//! Kernels of softmax, log-softmax and their derivatives.
//!
//! Along the last dimension they process one row at a time, along another one all rows of the inner dimensions at
//! once. Both ways run over contiguous memory.

use super::{
    Context, Kernel, Result, read,
    vector::{dot, exp_less, largest, sum, sum_exp},
    write,
};
use crate::tensor::{Float, View, ViewMut};
use shardwright_graph::ops::{LogSoftmax, LogSoftmaxGrad, Softmax, SoftmaxGrad};
use shardwright_simd::vectorised_fn;

/// The tensor as `[blocks, size, inner]`, where `size` is the softmax's dimension.
#[derive(Clone, Copy)]
struct Layout {
    size: usize,
    inner: usize,
}

impl Layout {
    fn new(shape: &[u64], axis: usize) -> Self {
        let inner = shape[axis + 1..].iter().map(|&n| n as usize).product();
        Self { size: shape[axis] as usize, inner }
    }

    fn block(&self) -> usize {
        self.size * self.inner
    }
}

/// Runs `rows` where the softmax's dimension is the last. Otherwise runs `columns`, which needs scratch memory for two inner rows.
fn forward<T: Float>(
    axis: usize,
    inputs: &[View<'_>],
    outputs: &mut [ViewMut<'_>],
    context: &mut Context,
    rows: fn(&[T], &mut [T], usize),
    columns: fn(&[T], &mut [T], Layout, &mut [T]),
) -> Result {
    let layout = Layout::new(inputs[0].shape, axis);
    let (x, y) = (read::<T>(&inputs[0])?, write::<T>(&mut outputs[0])?);
    if layout.inner == 1 {
        rows(x, y, layout.size);
    } else {
        columns(x, y, layout, context.scratch.take(2 * layout.inner));
    }
    Ok(())
}

impl Kernel for Softmax {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result {
        forward::<T>(self.axis, inputs, outputs, context, softmax_rows, softmax_columns)
    }
}

/// A row that is masked everywhere has the maximum minus infinity. Its softmax is zero, not NaN: a query that
/// attends to no key gets zero, as frameworks achieve by a guard around their softmax.
#[inline(always)]
fn finite<T: Float>(max: T) -> T {
    if max == T::NEG_INFINITY { T::ZERO } else { max }
}

/// One over a row's sum of exponentials, which is zero only if the row is masked everywhere.
#[inline(always)]
fn inverse<T: Float>(sum: T) -> T {
    if sum == T::ZERO { T::ZERO } else { T::ONE / sum }
}

vectorised_fn! {
    fn softmax_rows[T: Float][T](x: &[T], y: &mut [T], size: usize) {
        for (x, y) in x.chunks_exact(size).zip(y.chunks_exact_mut(size)) {
            exp_less(x, finite(largest(x)), y);
            let scale = inverse(sum(y));
            y.iter_mut().for_each(|y| *y *= scale);
        }
    }
}

vectorised_fn! {
    fn softmax_columns[T: Float][T](x: &[T], y: &mut [T], layout: Layout, scratch: &mut [T]) {
        let (max, total) = scratch.split_at_mut(layout.inner);
        let blocks = x.chunks_exact(layout.block()).zip(y.chunks_exact_mut(layout.block()));
        for (x, y) in blocks {
            column_sums(x, y, max, total);
            total.iter_mut().for_each(|t| *t = inverse(*t));
            for y in y.chunks_exact_mut(layout.inner) {
                y.iter_mut().zip(&*total).for_each(|(y, &scale)| *y *= scale);
            }
        }
    }
}

/// The maximum of each column, the exponentials `y` of the differences from it, and their sums.
#[inline(always)]
fn column_sums<T: Float>(x: &[T], y: &mut [T], max: &mut [T], total: &mut [T]) {
    let inner = max.len();
    max.fill(T::NEG_INFINITY);
    total.fill(T::ZERO);
    for x in x.chunks_exact(inner) {
        max.iter_mut().zip(x).for_each(|(max, &x)| *max = if x > *max { x } else { *max });
    }
    max.iter_mut().for_each(|max| *max = finite(*max));
    for (x, y) in x.chunks_exact(inner).zip(y.chunks_exact_mut(inner)) {
        for ((y, &x), &max) in y.iter_mut().zip(x).zip(&*max) {
            *y = (x - max).exp();
        }
        total.iter_mut().zip(&*y).for_each(|(total, &y)| *total += y);
    }
}

impl Kernel for LogSoftmax {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result {
        forward::<T>(self.axis, inputs, outputs, context, log_softmax_rows, log_softmax_columns)
    }
}

vectorised_fn! {
    fn log_softmax_rows[T: Float][T](x: &[T], y: &mut [T], size: usize) {
        for (x, y) in x.chunks_exact(size).zip(y.chunks_exact_mut(size)) {
            let max = largest(x);
            let log = sum_exp(x, max).ln();
            y.iter_mut().zip(x).for_each(|(y, &x)| *y = (x - max) - log);
        }
    }
}

vectorised_fn! {
    fn log_softmax_columns[T: Float][T](x: &[T], y: &mut [T], layout: Layout, scratch: &mut [T]) {
        let (max, total) = scratch.split_at_mut(layout.inner);
        let blocks = x.chunks_exact(layout.block()).zip(y.chunks_exact_mut(layout.block()));
        for (x, y) in blocks {
            column_sums(x, y, max, total);
            total.iter_mut().for_each(|t| *t = t.ln());
            for (x, y) in x.chunks_exact(layout.inner).zip(y.chunks_exact_mut(layout.inner)) {
                for (((y, &x), &max), &log) in y.iter_mut().zip(x).zip(&*max).zip(&*total) {
                    *y = (x - max) - log;
                }
            }
        }
    }
}

/// Runs `sum_of` (per row) or `term` summed (per column), then `dx = finish(y, dy, sum)`.
fn backward<T: Float>(
    axis: usize,
    inputs: &[View<'_>],
    outputs: &mut [ViewMut<'_>],
    context: &mut Context,
    sum_of: impl Fn(&[T], &[T]) -> T,
    term: impl Fn(T, T) -> T,
    finish: impl Fn(T, T, T) -> T,
) -> Result {
    let layout = Layout::new(inputs[0].shape, axis);
    let (y, dy) = (read::<T>(&inputs[0])?, read::<T>(&inputs[1])?);
    let dx = write::<T>(&mut outputs[0])?;
    if layout.inner == 1 {
        backward_rows(y, dy, dx, layout.size, sum_of, finish);
    } else {
        backward_columns(y, dy, dx, layout, context.scratch.take(layout.inner), term, finish);
    }
    Ok(())
}

vectorised_fn! {
    fn backward_rows[T: Float, S: Fn(&[T], &[T]) -> T, F: Fn(T, T, T) -> T][T, S, F](
        y: &[T], dy: &[T], dx: &mut [T], size: usize, sum_of: S, finish: F,
    ) {
        let blocks = y.chunks_exact(size).zip(dy.chunks_exact(size)).zip(dx.chunks_exact_mut(size));
        for ((y, dy), dx) in blocks {
            let sum = sum_of(y, dy);
            for ((dx, &y), &dy) in dx.iter_mut().zip(y).zip(dy) {
                *dx = finish(y, dy, sum);
            }
        }
    }
}

vectorised_fn! {
    fn backward_columns[T: Float, S: Fn(T, T) -> T, F: Fn(T, T, T) -> T][T, S, F](
        y: &[T], dy: &[T], dx: &mut [T], layout: Layout, sums: &mut [T], term: S, finish: F,
    ) {
        let (block, inner) = (layout.block(), layout.inner);
        let blocks = y.chunks_exact(block).zip(dy.chunks_exact(block)).zip(dx.chunks_exact_mut(block));
        for ((y, dy), dx) in blocks {
            sums.fill(T::ZERO);
            for (y, dy) in y.chunks_exact(inner).zip(dy.chunks_exact(inner)) {
                sums.iter_mut().zip(y).zip(dy).for_each(|((sum, &y), &dy)| *sum += term(y, dy));
            }
            let rows = y.chunks_exact(inner).zip(dy.chunks_exact(inner)).zip(dx.chunks_exact_mut(inner));
            for ((y, dy), dx) in rows {
                for (((dx, &y), &dy), &sum) in dx.iter_mut().zip(y).zip(dy).zip(&*sums) {
                    *dx = finish(y, dy, sum);
                }
            }
        }
    }
}

impl Kernel for SoftmaxGrad {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result {
        let finish = |y: T, dy: T, sum: T| y * (dy - sum);
        backward(self.axis, inputs, outputs, context, dot::<T>, |y, dy| y * dy, finish)
    }
}

impl Kernel for LogSoftmaxGrad {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result {
        let finish = |y: T, dy: T, sum: T| dy - y.exp() * sum;
        backward(self.axis, inputs, outputs, context, |_, dy| sum(dy), |_, dy| dy, finish)
    }
}
