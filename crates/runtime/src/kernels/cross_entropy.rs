//! Kernels of the cross-entropy loss, its sum of exponentials and its gradient.

use super::{
    Context, Kernel, Result, Scratch,
    gather::{ELSEWHERE, local_rows},
    read,
    vector::sum_exp,
    write,
};
use crate::tensor::{Float, View, ViewMut};
use shardwright_graph::ops::{CrossEntropy, CrossEntropyGrad, SumExp};
use shardwright_simd::{vectorised, vectorised_fn};

/// The column of each row's label, or [`ELSEWHERE`], and the number of classes in this part of the logits.
fn columns<'a>(
    labels: &View<'_>,
    logits: &View<'_>,
    [base, classes]: [u64; 2],
    scratch: &'a mut Scratch,
) -> Result<(&'a [u64], usize)> {
    let held = logits.shape.last().copied().unwrap_or(1);
    Ok((local_rows(labels, [base, held, classes], scratch)?, held as usize))
}

impl Kernel for SumExp {
    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let (x, m) = (read::<T>(&inputs[0])?, read::<T>(&inputs[1])?);
        let s = write::<T>(&mut outputs[0])?;
        sum_exp_rows(x, m, s);
        Ok(())
    }
}

vectorised_fn! {
    fn sum_exp_rows[T: Float][T](x: &[T], m: &[T], s: &mut [T]) {
        let rows = x.chunks_exact(x.len() / m.len());
        for ((s, x), &m) in s.iter_mut().zip(rows).zip(m) {
            *s = sum_exp(x, m);
        }
    }
}

impl Kernel for CrossEntropy {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result {
        let part = [self.base, self.classes];
        let (columns, held) = columns(&inputs[1], &inputs[0], part, &mut context.scratch)?;
        let logits = read::<T>(&inputs[0])?.chunks_exact(held);
        let (m, s) = (read::<T>(&inputs[2])?, read::<T>(&inputs[3])?);
        let loss = write::<T>(&mut outputs[0])?;
        for (row, ((loss, x), &column)) in loss.iter_mut().zip(logits).zip(columns).enumerate() {
            *loss = match column {
                ELSEWHERE => T::ZERO,
                column => s[row].ln() + (m[row] - x[column as usize]),
            };
        }
        Ok(())
    }
}

impl Kernel for CrossEntropyGrad {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result {
        let part = [self.base, self.classes];
        let (columns, held) = columns(&inputs[1], &inputs[0], part, &mut context.scratch)?;
        let logits = read::<T>(&inputs[0])?.chunks_exact(held);
        let (m, s) = (read::<T>(&inputs[2])?, read::<T>(&inputs[3])?);
        let dloss = read::<T>(&inputs[4])?;
        let rows = write::<T>(&mut outputs[0])?.chunks_exact_mut(held);
        for (row, ((dx, x), &column)) in rows.zip(logits).zip(columns).enumerate() {
            let (m, scale) = (m[row], dloss[row] / s[row]);
            vectorised!({
                for (dx, &x) in dx.iter_mut().zip(x) {
                    *dx = (x - m).exp() * scale;
                }
            });
            if column != ELSEWHERE {
                let dx = &mut dx[column as usize];
                *dx = *dx - dloss[row];
            }
        }
        Ok(())
    }
}
