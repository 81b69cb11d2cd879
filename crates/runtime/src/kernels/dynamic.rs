//! Kernels of slices and updates at computed positions.

use super::{
    Context, Kernel, KernelError, Result,
    loops::strides,
    movement::{Movement, with_same_type},
};
use crate::tensor::{Elements, ElementsMut, Float, View, ViewMut};
use shardwright_graph::ops::{DynamicSlice, DynamicUpdate};

/// Index of the first element of a box of `sizes` at these starts, clamped so that the box fits.
fn place(shape: &[u64], sizes: &[u64], starts: &[View<'_>], strides: &[usize]) -> Result<usize> {
    let mut index = 0;
    for (d, start) in starts.iter().enumerate() {
        let start = match start.data {
            Elements::I32(x) => x.first().map(|&x| i64::from(x)),
            Elements::I64(x) => x.first().copied(),
            _ => None,
        };
        let start = start.ok_or_else(|| KernelError::BadValue("a start must be one i32 or i64".into()))?;
        index += start.clamp(0, (shape[d] - sizes[d]) as i64) as usize * strides[d];
    }
    Ok(index)
}

impl Kernel for DynamicSlice {
    const TAKES_NARROW: bool = true;

    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let (from, to) = (strides(inputs[0].shape), strides(outputs[0].shape));
        let start = place(inputs[0].shape, outputs[0].shape, &inputs[1..], &from)?;
        let movement = Movement::new(outputs[0].shape, start, 0, |d| [from[d], to[d]]);
        movement.run(inputs[0].data, &mut outputs[0].data)
    }
}

impl Kernel for DynamicUpdate {
    const TAKES_NARROW: bool = true;

    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let (from, to) = (strides(inputs[1].shape), strides(outputs[0].shape));
        with_same_type!(inputs[0].data, &mut outputs[0].data, |x, y| y.copy_from_slice(x));
        let start = place(outputs[0].shape, inputs[1].shape, &inputs[2..], &to)?;
        let movement = Movement::new(inputs[1].shape, 0, start, |d| [from[d], to[d]]);
        movement.run(inputs[1].data, &mut outputs[0].data)
    }
}
