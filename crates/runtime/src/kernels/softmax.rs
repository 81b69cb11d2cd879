//! Kernels of softmax, log-softmax and their derivatives.
//!
//! Along the last dimension they work row by row; along another one, on all rows of the inner dimensions at
//! once, so that both run over contiguous memory.

use super::{
    Context, Kernel, KernelError, read,
    vector::{dot, largest, sum, vectorised},
    write,
};
use crate::tensor::{Float, View, ViewMut};
use shardwright_graph::ops::{LogSoftmax, LogSoftmaxGrad, Softmax, SoftmaxGrad};

/// The tensor seen as `[blocks, size, inner]` around the softmax's own dimension.
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

impl Kernel for Softmax {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result<(), KernelError> {
        let layout = Layout::new(inputs[0].shape, self.axis);
        let (x, y) = (read::<T>(&inputs[0])?, write::<T>(&mut outputs[0])?);
        let blocks = x.chunks_exact(layout.block()).zip(y.chunks_exact_mut(layout.block()));
        if layout.inner == 1 {
            vectorised(|| {
                for (x, y) in blocks {
                    let max = largest(x);
                    y.iter_mut().zip(x).for_each(|(y, &x)| *y = (x - max).exp());
                    let scale = T::ONE / sum(y, |y| y);
                    y.iter_mut().for_each(|y| *y *= scale);
                }
            });
            return Ok(());
        }
        let (max, total) = context.scratch.take::<T>(2 * layout.inner).split_at_mut(layout.inner);
        vectorised(|| {
            for (x, y) in blocks {
                column_sums(x, max, total);
                for (x, y) in x.chunks_exact(layout.inner).zip(y.chunks_exact_mut(layout.inner)) {
                    for (((y, &x), &max), &total) in y.iter_mut().zip(x).zip(&*max).zip(&*total) {
                        *y = (x - max).exp() / total;
                    }
                }
            }
        });
        Ok(())
    }
}

/// The maximum of each column, and the sum of the exponentials of the differences from it.
#[inline(always)]
fn column_sums<T: Float>(x: &[T], max: &mut [T], total: &mut [T]) {
    let inner = max.len();
    max.fill(T::NEG_INFINITY);
    total.fill(T::ZERO);
    for x in x.chunks_exact(inner) {
        max.iter_mut().zip(x).for_each(|(max, &x)| *max = if x > *max { x } else { *max });
    }
    for x in x.chunks_exact(inner) {
        for ((total, &x), &max) in total.iter_mut().zip(x).zip(&*max) {
            *total += (x - max).exp();
        }
    }
}

impl Kernel for LogSoftmax {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result<(), KernelError> {
        let layout = Layout::new(inputs[0].shape, self.axis);
        let (x, y) = (read::<T>(&inputs[0])?, write::<T>(&mut outputs[0])?);
        let blocks = x.chunks_exact(layout.block()).zip(y.chunks_exact_mut(layout.block()));
        if layout.inner == 1 {
            vectorised(|| {
                for (x, y) in blocks {
                    let max = largest(x);
                    let log = sum(x, |x| (x - max).exp()).ln();
                    y.iter_mut().zip(x).for_each(|(y, &x)| *y = (x - max) - log);
                }
            });
            return Ok(());
        }
        let (max, total) = context.scratch.take::<T>(2 * layout.inner).split_at_mut(layout.inner);
        vectorised(|| {
            for (x, y) in blocks {
                column_sums(x, max, total);
                total.iter_mut().for_each(|t| *t = t.ln());
                for (x, y) in x.chunks_exact(layout.inner).zip(y.chunks_exact_mut(layout.inner)) {
                    for (((y, &x), &max), &log) in y.iter_mut().zip(x).zip(&*max).zip(&*total) {
                        *y = (x - max) - log;
                    }
                }
            }
        });
        Ok(())
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
) -> Result<(), KernelError> {
    let layout = Layout::new(inputs[0].shape, axis);
    let (y, dy) = (read::<T>(&inputs[0])?, read::<T>(&inputs[1])?);
    let dx = write::<T>(&mut outputs[0])?;
    let block = layout.block();
    let blocks = y.chunks_exact(block).zip(dy.chunks_exact(block)).zip(dx.chunks_exact_mut(block));
    if layout.inner == 1 {
        vectorised(|| {
            for ((y, dy), dx) in blocks {
                let sum = sum_of(y, dy);
                dx.iter_mut().zip(y).zip(dy).for_each(|((dx, &y), &dy)| *dx = finish(y, dy, sum));
            }
        });
        return Ok(());
    }
    let inner = layout.inner;
    let sums = context.scratch.take::<T>(inner);
    vectorised(|| {
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
    });
    Ok(())
}

impl Kernel for SoftmaxGrad {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result<(), KernelError> {
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
    ) -> Result<(), KernelError> {
        let finish = |y: T, dy: T, sum: T| dy - y.exp() * sum;
        backward(self.axis, inputs, outputs, context, |_, dy| sum(dy, |g: T| g), |_, dy| dy, finish)
    }
}
