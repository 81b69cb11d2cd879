//! Kernels of bitcast and literal, and of the opaque op, which has none.

use super::{Context, Kernel, KernelError, Result};
use crate::tensor::{Elements, ElementsMut, Float, View, ViewMut};
use half::{bf16, f16};
use shardwright_graph::ops::{Bitcast, Literal, Opaque};

impl Kernel for Bitcast {
    const TAKES_NARROW: bool = true;

    fn run<T: Float>(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        let from: &[u8] = match inputs[0].data {
            Elements::F32(x) => bytemuck::cast_slice(x),
            Elements::F64(x) => bytemuck::cast_slice(x),
            Elements::I32(x) => bytemuck::cast_slice(x),
            Elements::I64(x) => bytemuck::cast_slice(x),
            Elements::Bool(x) => x,
            Elements::Bf16(x) => {
                if let ElementsMut::F16(y) = &mut outputs[0].data {
                    y.iter_mut().zip(x).for_each(|(y, x)| *y = f16::from_bits(x.to_bits()));
                }
                if let ElementsMut::Bf16(y) = &mut outputs[0].data {
                    y.copy_from_slice(x);
                }
                return Ok(());
            }
            Elements::F16(x) => {
                if let ElementsMut::Bf16(y) = &mut outputs[0].data {
                    y.iter_mut().zip(x).for_each(|(y, x)| *y = bf16::from_bits(x.to_bits()));
                }
                if let ElementsMut::F16(y) = &mut outputs[0].data {
                    y.copy_from_slice(x);
                }
                return Ok(());
            }
        };
        let to: &mut [u8] = match &mut outputs[0].data {
            ElementsMut::F32(y) => bytemuck::cast_slice_mut(y),
            ElementsMut::F64(y) => bytemuck::cast_slice_mut(y),
            ElementsMut::I32(y) => bytemuck::cast_slice_mut(y),
            ElementsMut::I64(y) => bytemuck::cast_slice_mut(y),
            ElementsMut::Bool(y) => y,
            ElementsMut::Bf16(_) | ElementsMut::F16(_) => {
                return Err(KernelError::BadValue("element types of different widths".into()));
            }
        };
        to.copy_from_slice(from);
        Ok(())
    }
}

impl Kernel for Literal {
    const TAKES_NARROW: bool = true;

    fn run<T: Float>(&self, _: &[View<'_>], outputs: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        macro_rules! put {
            ($y:expr, |$x:ident| $to:expr) => {
                $y.iter_mut().zip(self.values.0.iter()).for_each(|(y, value)| {
                    let $x = value.0;
                    *y = $to;
                })
            };
        }
        match &mut outputs[0].data {
            ElementsMut::F32(y) => put!(y, |x| x as f32),
            ElementsMut::F64(y) => put!(y, |x| x),
            ElementsMut::Bf16(y) => put!(y, |x| bf16::from_f64(x)),
            ElementsMut::F16(y) => put!(y, |x| f16::from_f64(x)),
            ElementsMut::I32(y) => put!(y, |x| x as i32),
            ElementsMut::I64(y) => put!(y, |x| x as i64),
            ElementsMut::Bool(y) => put!(y, |x| u8::from(x != 0.0)),
        }
        Ok(())
    }
}

impl Kernel for Opaque {
    fn run<T: Float>(&self, _: &[View<'_>], _: &mut [ViewMut<'_>], _: &mut Context) -> Result {
        Err(KernelError::BadValue(format!("`{}` is opaque: it can be planned but not run here", self.call)))
    }
}
