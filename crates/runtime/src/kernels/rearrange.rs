//! Kernels of the ops that only move elements: transpose, slice, pad, concat, reverse.

use super::{
    Context, Kernel, Result,
    elementwise::fill,
    loops::{count, strides},
    movement::{Movement, with_same_type},
};
use crate::tensor::{Elements, ElementsMut, Float, View, ViewMut};
use shardwright_graph::ops::{Concat, Pad, Reverse, Slice, Transpose, TransposeGrad};

impl Kernel for Transpose {
    const TAKES_NARROW: bool = true;

    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let (from, to) = (strides(inputs[0].shape), strides(outputs[0].shape));
        let movement = Movement::new(outputs[0].shape, 0, 0, |d| [from[self.perm[d]], to[d]]);
        movement.run(inputs[0].data, &mut outputs[0].data)
    }
}

impl Kernel for TransposeGrad {
    const TAKES_NARROW: bool = true;

    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result {
        self.as_transpose().run::<T>(inputs, outputs, context)
    }
}

/// Index of the element at a position.
fn index(position: &[u64], strides: &[usize]) -> usize {
    position.iter().zip(strides).map(|(&p, &s)| p as usize * s).sum()
}

impl Kernel for Slice {
    const TAKES_NARROW: bool = true;

    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let (from, to) = (strides(inputs[0].shape), strides(outputs[0].shape));
        let start = index(&self.start, &from);
        let step = |d: usize| [from[d] * self.stride[d] as usize, to[d]];
        Movement::new(outputs[0].shape, start, 0, step).run(inputs[0].data, &mut outputs[0].data)
    }
}

impl Kernel for Pad {
    const TAKES_NARROW: bool = true;

    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let (from, to) = (strides(inputs[0].shape), strides(outputs[0].shape));
        if inputs[0].shape != outputs[0].shape {
            fill(&mut outputs[0].data, self.value.0);
        }
        let start = index(&self.low, &to);
        let step = |d: usize| [from[d], to[d] * (self.interior[d] as usize + 1)];
        Movement::new(inputs[0].shape, 0, start, step).run(inputs[0].data, &mut outputs[0].data)
    }
}

impl Kernel for Concat {
    const TAKES_NARROW: bool = true;

    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let to = strides(outputs[0].shape);
        let mut start = 0;
        for x in inputs {
            let from = strides(x.shape);
            Movement::new(x.shape, 0, start, |d| [from[d], to[d]]).run(x.data, &mut outputs[0].data)?;
            start += count(&x.shape[self.axis..]);
        }
        Ok(())
    }
}

impl Kernel for Reverse {
    const TAKES_NARROW: bool = true;

    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let (shape, strides) = (inputs[0].shape, strides(inputs[0].shape));
        with_same_type!(inputs[0].data, &mut outputs[0].data, |x, y| {
            for (at, y) in y.iter_mut().enumerate() {
                let from = self.axes.iter().fold(at, |from, &d| {
                    let (size, stride) = (shape[d] as usize, strides[d]);
                    let position = at / stride % size;
                    from - position * stride + (size - 1 - position) * stride
                });
                *y = x[from];
            }
        });
        Ok(())
    }
}
