//! Kernel of the sum over micro-batches: a copy in the first, an addition in every later one.

use super::{Context, Kernel, Result, read, reshape::copy, write};
use crate::tensor::{Float, View, ViewMut};
use shardwright_graph::ops::Accumulate;
use shardwright_simd::vectorised;

impl Kernel for Accumulate {
    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let [summand, before] = inputs else { return copy(inputs[0].data, &mut outputs[0].data) };
        let (x, before) = (read::<T>(summand)?, read::<T>(before)?);
        let sum = write::<T>(&mut outputs[0])?;
        vectorised!({
            for ((sum, &x), &before) in sum.iter_mut().zip(x).zip(before) {
                *sum = before + x;
            }
        });
        Ok(())
    }
}
