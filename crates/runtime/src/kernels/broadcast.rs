//! Kernel of explicit broadcast.

use super::{Context, Kernel, KernelError, elementwise::for_rows, read, write};
use crate::tensor::{Element, Float, View, ViewMut};
use shardwright_graph::{DType, Dims, ops::Broadcast};

impl Kernel for Broadcast {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        _: &mut Context,
    ) -> Result<(), KernelError> {
        // The input seen with the result's rank: size one wherever it has no dimension of its own.
        let mut shape = Dims::from_elem(1, outputs[0].shape.len());
        for (&d, &size) in self.dims.iter().zip(inputs[0].shape) {
            shape[d] = size;
        }
        fn repeat<E: Element>(shape: &[u64], x: &View<'_>, y: &mut ViewMut<'_>) -> Result<(), KernelError> {
            let x = read::<E>(x)?;
            let row = y.shape.last().map_or(1, |&n| n as usize);
            let to = y.shape;
            let y = write::<E>(y)?;
            for_rows(to, [shape], |at, [i], [step]| {
                let y = &mut y[at..at + row];
                if step == 0 { y.fill(x[i]) } else { y.copy_from_slice(&x[i..i + row]) }
            });
            Ok(())
        }
        match inputs[0].data.dtype() {
            DType::Bool => repeat::<u8>(&shape, &inputs[0], &mut outputs[0]),
            DType::I32 => repeat::<i32>(&shape, &inputs[0], &mut outputs[0]),
            DType::I64 => repeat::<i64>(&shape, &inputs[0], &mut outputs[0]),
            _ => repeat::<T>(&shape, &inputs[0], &mut outputs[0]),
        }
    }
}
