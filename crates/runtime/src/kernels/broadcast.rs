//! Kernel of explicit broadcast.

use super::{Context, Kernel, Result, elementwise::for_rows, movement::with_same_type};
use crate::tensor::{Element, Elements, ElementsMut, Float, View, ViewMut};
use shardwright_graph::{Dims, ops::Broadcast};

impl Kernel for Broadcast {
    const TAKES_NARROW: bool = true;

    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        // The input's shape at the result's rank: size one in dimensions that the input lacks.
        let mut shape = Dims::from_elem(1, outputs[0].shape.len());
        for (&d, &size) in self.dims.iter().zip(inputs[0].shape) {
            shape[d] = size;
        }
        let (x, y) = (inputs[0].data, &mut outputs[0]);
        with_same_type!(x, &mut y.data, |x, z| repeat(&shape, x, y.shape, z));
        Ok(())
    }
}

/// Fills `y` with copies of `x`, whose sizes are those of `y` or one.
fn repeat<E: Element>(from: &[u64], x: &[E], to: &[u64], y: &mut [E]) {
    let row = to.last().map_or(1, |&n| n as usize);
    for_rows(to, [from], |at, [i], [step]| {
        let y = &mut y[at..at + row];
        if step == 0 { y.fill(x[i]) } else { y.copy_from_slice(&x[i..i + row]) }
    });
}
