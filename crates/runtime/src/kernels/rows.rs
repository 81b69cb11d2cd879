//! Kernels along one dimension: running sums.

use super::{Context, Kernel, Result, loops::count, read, write};
use crate::tensor::{Element, Float, View, ViewMut};
use shardwright_graph::{DType, ops::Cumsum};

impl Kernel for Cumsum {
    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let (x, y) = (&inputs[0], &mut outputs[0]);
        match x.data.dtype() {
            DType::I32 => running_sum(self, x, y, 0, i32::wrapping_add),
            DType::I64 => running_sum(self, x, y, 0, i64::wrapping_add),
            _ => running_sum(self, x, y, T::ZERO, |a, b| a + b),
        }
    }
}

fn running_sum<E: Element>(
    op: &Cumsum,
    x: &View<'_>,
    y: &mut ViewMut<'_>,
    zero: E,
    add: impl Fn(E, E) -> E,
) -> Result {
    let size = x.shape[op.axis] as usize;
    let inner = count(&x.shape[op.axis + 1..]);
    let (x, y) = (read::<E>(x)?, write::<E>(y)?);
    for (x, y) in x.chunks_exact(size * inner).zip(y.chunks_exact_mut(size * inner)) {
        for step in 0..size {
            let place = |step: usize| if op.reverse { size - 1 - step } else { step } * inner;
            let at = place(step);
            if step == 0 {
                if op.exclusive {
                    y[at..at + inner].fill(zero);
                } else {
                    y[at..at + inner].copy_from_slice(&x[at..at + inner]);
                }
                continue;
            }
            let before = place(step - 1);
            // The row before holds the sum so far. This row is added to it, or the one before if the sum is exclusive.
            let added = &x[if op.exclusive { before } else { at }..][..inner];
            let (low, high) = y.split_at_mut(at.max(before));
            let (sum, last) = if op.reverse {
                (&mut low[at..][..inner], &high[..inner])
            } else {
                (&mut high[..inner], &low[before..][..inner])
            };
            for ((sum, &last), &x) in sum.iter_mut().zip(last).zip(added) {
                *sum = add(last, x);
            }
        }
    }
    Ok(())
}
