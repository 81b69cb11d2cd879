//! Kernels: one file per op kind, each a function from borrowed inputs to borrowed outputs, one thread.
//!
//! A kernel trusts that shapes and types are those that the op's inference accepted and gave: the graph is verified before
//! it runs, and [`run`] checks the element types. Errors that depend on values, such as an index out of range, are
//! reported.

mod accumulate;
mod along;
mod attention;
mod bits;
mod broadcast;
mod contract;
mod conv;
mod conv_direct;
mod cross_entropy;
mod dropout;
mod dynamic;
mod elementwise;
mod experts;
mod gather;
pub(crate) mod gemm;
mod loops;
mod lstm;
mod movement;
mod norm;
mod norm_rows;
mod optimizer;
mod pool;
mod rearrange;
mod reduce;
mod reshape;
mod rows;
mod softmax;
mod sort;
mod unfold;
mod vector;
mod window;

pub use attention::log_add_exp;

use crate::tensor::{Element, Elements, ElementsMut, Float, HostTensor, View, ViewMut};
use half::{bf16, slice::HalfFloatSliceExt};
use shardwright_graph::{DType, Op, ops};
use shardwright_simd::vectorised;

/// Why a kernel could not run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// A value that the op cannot work with.
    #[error("{0}")]
    BadValue(String),
}

/// The result of a kernel.
pub(crate) type Result<T = (), E = KernelError> = std::result::Result<T, E>;

/// The step number and the scratch memory of kernels.
#[derive(Default)]
pub struct Context {
    /// The training step, from zero: dropout and bias corrections depend on it.
    pub step: u64,
    /// The micro-batch of the step, from zero: dropout depends on it.
    pub micro_batch: u64,
    /// Buffers that later calls reuse.
    pub scratch: Scratch,
}

impl Context {
    /// The number that random masks differ by between steps and micro-batches.
    pub(crate) fn draw(&self) -> u64 {
        self.step ^ (self.micro_batch << 40)
    }
}

/// Reusable buffers.
#[derive(Default)]
pub struct Scratch {
    bytes: Vec<u64>,
}

impl Scratch {
    /// Bytes that it holds.
    pub fn bytes(&self) -> usize {
        self.bytes.len() * size_of::<u64>()
    }

    /// Frees its memory.
    pub fn clear(&mut self) {
        self.bytes = Vec::new();
    }

    /// A buffer of `count` elements of unspecified content.
    pub fn take<T: bytemuck::Pod>(&mut self, count: usize) -> &mut [T] {
        let words = (count * size_of::<T>()).div_ceil(8);
        if self.bytes.len() < words {
            self.bytes.resize(words, 0);
        }
        &mut bytemuck::cast_slice_mut(&mut self.bytes[..words])[..count]
    }
}

/// The kernel of an op kind. `T` is the float type that the call computes in; views have the other element types.
pub(crate) trait Kernel {
    /// Whether the kernel accepts 16-bit floats, as kernels do that only move elements. Others get `f32` instead.
    const TAKES_NARROW: bool = false;

    /// Reads `inputs`, writes every element of `outputs`.
    fn run<T: Float>(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
        context: &mut Context,
    ) -> Result;
}

/// Generates the calls of all kernels. A kind without an implementation of [`Kernel`] does not compile.
macro_rules! kernels {
    ($($kind:ident),* $(,)?) => {
        fn dispatch<T: Float>(
            op: &Op,
            inputs: &[View<'_>],
            outputs: &mut [ViewMut<'_>],
            context: &mut Context,
        ) -> Result {
            match op { $(Op::$kind(op) => op.run::<T>(inputs, outputs, context)),* }
        }

        fn takes_narrow(op: &Op) -> bool {
            match op { $(Op::$kind(_) => <ops::$kind as Kernel>::TAKES_NARROW),* }
        }
    };
}

shardwright_graph::for_each_op_kind!(kernels);

/// Runs one op: reads `inputs`, writes every element of `outputs`.
pub fn run(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], context: &mut Context) -> Result {
    let input_types = inputs.iter().map(|v| v.data.dtype());
    let mut types = outputs.iter().map(|v| v.data.dtype()).chain(input_types);
    let narrow = |dtype: DType| matches!(dtype, DType::Bf16 | DType::F16);
    if types.clone().any(narrow) && !takes_narrow(op) {
        return run_widened(op, inputs, outputs, context);
    }
    match types.find(|d| d.is_float()) {
        Some(DType::F64) => dispatch::<f64>(op, inputs, outputs, context),
        _ => dispatch::<f32>(op, inputs, outputs, context),
    }
}

/// Runs one op on 16-bit floats: widens them to `f32`, computes, rounds once at the end.
fn run_widened(op: &Op, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>], context: &mut Context) -> Result {
    let wide_inputs: Vec<Option<Vec<f32>>> = inputs.iter().map(|v| widen(v.data)).collect();
    let views: Vec<View<'_>> = inputs
        .iter()
        .zip(&wide_inputs)
        .map(|(v, wide)| View { shape: v.shape, data: wide.as_ref().map_or(v.data, |w| Elements::F32(w)) })
        .collect();
    let mut wide_outputs: Vec<Option<Vec<f32>>> = outputs
        .iter()
        .map(|v| match &v.data {
            ElementsMut::Bf16(x) => Some(vec![0.0; x.len()]),
            ElementsMut::F16(x) => Some(vec![0.0; x.len()]),
            _ => None,
        })
        .collect();
    let mut views_mut: Vec<ViewMut<'_>> = outputs
        .iter_mut()
        .zip(&mut wide_outputs)
        .map(|(v, wide)| ViewMut {
            shape: v.shape,
            data: match wide {
                Some(w) => ElementsMut::F32(w),
                None => v.data.reborrow(),
            },
        })
        .collect();
    dispatch::<f32>(op, &views, &mut views_mut, context)?;
    drop(views_mut);
    for (v, wide) in outputs.iter_mut().zip(wide_outputs) {
        let Some(wide) = wide else { continue };
        match &mut v.data {
            ElementsMut::Bf16(x) => vectorised!({
                x.iter_mut().zip(&wide).for_each(|(x, &w)| *x = bf16::from_f32(w));
            }),
            ElementsMut::F16(x) => x.convert_from_f32_slice(&wide),
            _ => {}
        }
    }
    Ok(())
}

fn widen(data: Elements<'_>) -> Option<Vec<f32>> {
    match data {
        Elements::Bf16(x) => Some(vectorised!(x.iter().map(|v| v.to_f32()).collect())),
        Elements::F16(x) => {
            let mut wide = vec![0.0; x.len()];
            x.convert_to_f32_slice(&mut wide);
            Some(wide)
        }
        _ => None,
    }
}

/// The elements of a view as `E`.
pub(crate) fn read<'a, E: Element>(view: &View<'a>) -> Result<&'a [E]> {
    E::of(view.data).ok_or_else(|| mismatch::<E>(view.data.dtype()))
}

/// The elements of a view as `E`, to be written.
pub(crate) fn write<'a, E: Element>(view: &'a mut ViewMut<'_>) -> Result<&'a mut [E]> {
    let dtype = view.data.dtype();
    E::of_mut(&mut view.data).ok_or_else(|| mismatch::<E>(dtype))
}

fn mismatch<E: Element>(found: DType) -> KernelError {
    KernelError::BadValue(format!("the kernel expects {} elements and was given {found}", E::DTYPE))
}

/// Runs one op on owned values; makes its outputs.
pub fn evaluate(op: &Op, inputs: &[&HostTensor], context: &mut Context) -> Result<Vec<HostTensor>> {
    let types: Vec<_> = inputs.iter().map(|v| v.ty()).collect();
    let output_types = op.operator().infer(&types).map_err(|e| KernelError::BadValue(e.to_string()))?;
    let mut outputs: Vec<HostTensor> = output_types.iter().map(HostTensor::zeros).collect();
    let views: Vec<_> = inputs.iter().map(|v| v.view()).collect();
    let mut views_mut: Vec<_> = outputs.iter_mut().map(HostTensor::view_mut).collect();
    run(op, &views, &mut views_mut, context)?;
    Ok(outputs)
}
