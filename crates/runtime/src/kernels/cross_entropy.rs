//! Kernels of the cross-entropy loss, its sum of exponentials and its gradient.

use super::{
    Context, Kernel, KernelError, read,
    vector::{sum, vectorised},
    write,
};
use crate::tensor::{Elements, Float, View, ViewMut};
use shardwright_graph::ops::{CrossEntropy, CrossEntropyGrad, SumExp};

/// The labels of all rows, checked when read.
struct Labels<'a> {
    data: Elements<'a>,
    base: u64,
    classes: u64,
    /// How many classes this part holds.
    held: usize,
}

impl<'a> Labels<'a> {
    fn new(labels: &View<'a>, logits: &View<'_>, base: u64, classes: u64) -> Self {
        let held = logits.shape.last().map_or(1, |&n| n as usize);
        Self { data: labels.data, base, classes, held }
    }

    /// The column of a row's label, if this part holds it.
    fn column(&self, row: usize) -> Result<Option<usize>, KernelError> {
        let label = match self.data {
            Elements::I32(labels) => i64::from(labels[row]),
            Elements::I64(labels) => labels[row],
            other => return Err(KernelError::BadValue(format!("labels of type {}", other.dtype()))),
        };
        if label < 0 || label as u64 >= self.classes {
            let last = self.classes - 1;
            return Err(KernelError::BadValue(format!("label {label} of row {row} is not in 0..={last}")));
        }
        Ok((label as u64).checked_sub(self.base).map(|c| c as usize).filter(|&c| c < self.held))
    }
}

impl Kernel for SumExp {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        _: &mut Context,
    ) -> Result<(), KernelError> {
        let (x, m) = (read::<T>(&inputs[0])?, read::<T>(&inputs[1])?);
        let s = write::<T>(&mut outputs[0])?;
        let rows = x.chunks_exact(x.len() / m.len());
        vectorised(|| {
            for ((s, x), &m) in s.iter_mut().zip(rows).zip(m) {
                *s = sum(x, |x| (x - m).exp());
            }
        });
        Ok(())
    }
}

impl Kernel for CrossEntropy {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        _: &mut Context,
    ) -> Result<(), KernelError> {
        let labels = Labels::new(&inputs[1], &inputs[0], self.base, self.classes);
        let logits = read::<T>(&inputs[0])?;
        let (m, s) = (read::<T>(&inputs[2])?, read::<T>(&inputs[3])?);
        let loss = write::<T>(&mut outputs[0])?;
        for (row, loss) in loss.iter_mut().enumerate() {
            *loss = match labels.column(row)? {
                Some(column) => s[row].ln() + (m[row] - logits[row * labels.held + column]),
                None => T::ZERO,
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
        _: &mut Context,
    ) -> Result<(), KernelError> {
        let labels = Labels::new(&inputs[1], &inputs[0], self.base, self.classes);
        let logits = read::<T>(&inputs[0])?.chunks_exact(labels.held);
        let (m, s) = (read::<T>(&inputs[2])?, read::<T>(&inputs[3])?);
        let dloss = read::<T>(&inputs[4])?;
        let rows = write::<T>(&mut outputs[0])?.chunks_exact_mut(labels.held);
        for (row, (dx, x)) in rows.zip(logits).enumerate() {
            let (m, scale) = (m[row], dloss[row] / s[row]);
            vectorised(|| dx.iter_mut().zip(x).for_each(|(dx, &x)| *dx = (x - m).exp() * scale));
            if let Some(column) = labels.column(row)? {
                dx[column] = dx[column] - dloss[row];
            }
        }
        Ok(())
    }
}
