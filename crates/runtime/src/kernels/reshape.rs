//! Kernel of reshape: a copy.

use super::{Context, Kernel, KernelError};
use crate::tensor::{Elements, ElementsMut, Float, View, ViewMut};
use shardwright_graph::ops::Reshape;

/// Copies all elements of one tensor to another of the same type.
pub(crate) fn copy(x: Elements<'_>, y: &mut ElementsMut<'_>) -> Result<(), KernelError> {
    match (x, y) {
        (Elements::F32(x), ElementsMut::F32(y)) => y.copy_from_slice(x),
        (Elements::F64(x), ElementsMut::F64(y)) => y.copy_from_slice(x),
        (Elements::Bf16(x), ElementsMut::Bf16(y)) => y.copy_from_slice(x),
        (Elements::F16(x), ElementsMut::F16(y)) => y.copy_from_slice(x),
        (Elements::I32(x), ElementsMut::I32(y)) => y.copy_from_slice(x),
        (Elements::I64(x), ElementsMut::I64(y)) => y.copy_from_slice(x),
        (Elements::Bool(x), ElementsMut::Bool(y)) => y.copy_from_slice(x),
        _ => return Err(KernelError::BadValue("element types differ".into())),
    }
    Ok(())
}

impl Kernel for Reshape {
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        _: &mut Context,
    ) -> Result<(), KernelError> {
        copy(inputs[0].data, &mut outputs[0].data)
    }
}
