//! The outcome of a run: whole tensors assembled from the devices' blocks, and step times.

use crate::buffer::Buffer;
use crate::run::DeviceOutcome;
use crate::walk::{BlockView, Walk};
use shardwright_cost::Reduction;
use shardwright_graph::{Dims, TensorId, block::start};
use shardwright_lower::{ParallelGraph, ValueId, blocks};
use shardwright_machine::DeviceId;
use shardwright_runtime::{HostTensor, measure::median};

/// The outcome of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The loss of every step.
    pub losses: Vec<f64>,
    /// Weights and optimizer states after the last step, if requested.
    pub finals: Vec<(TensorId, HostTensor)>,
    /// Seconds of each step, from the last device's end of the step before to the last device's end of this one.
    pub step_seconds: Vec<f64>,
    /// The outcome of each device.
    pub devices: Vec<DeviceOutcome>,
}

impl Outcome {
    /// Combines the outcomes of all devices of a program, given in device order.
    pub fn of(program: &ParallelGraph, devices: Vec<DeviceOutcome>) -> Self {
        let steps = devices.iter().map(|d| d.step_ends.len()).min().unwrap_or(0);
        let ends = (0..steps).map(|s| devices.iter().map(|d| d.step_ends[s]).fold(0.0, f64::max));
        let mut before = 0.0;
        let step_seconds = ends.map(|end| end - std::mem::replace(&mut before, end)).collect();
        let loss = |step: usize| {
            let value = program.outputs.first()?.value;
            let whole = assemble(program, value, |d| devices[d.index()].losses.get(step))?;
            whole.to_f64_vec().first().copied()
        };
        let losses = (0..steps).map_while(loss).collect();
        let finals = (0..program.carries.len()).filter_map(|at| {
            let value = program.carries[at].old;
            let whole = assemble(program, value, |d| devices[d.index()].finals.get(at)?.as_ref())?;
            Some((program.value(value).tensor, whole))
        });
        Self { losses, finals: finals.collect(), step_seconds, devices }
    }

    /// The median step time without the first step, which allocates memory.
    pub fn median_step_seconds(&self) -> f64 {
        median_after_first(&self.step_seconds)
    }
}

/// The median of some times, without the first where there are more.
pub fn median_after_first(seconds: &[f64]) -> f64 {
    median(seconds.get(1..).filter(|rest| !rest.is_empty()).unwrap_or(seconds).to_vec())
}

/// The largest difference between two tensors, relative to the largest number in the expected one. Infinite where the sizes
/// differ, or where one number is NaN or infinite and the other is not the same.
///
/// Gradients that cancel out (of a key's bias, of an input to a norm) are nothing but rounding. So in tensors of
/// numbers below a thousandth, differences are relative to a thousandth.
pub fn relative_error(actual: &[f64], expected: &[f64]) -> f64 {
    relative_errors(actual, expected)[0]
}

/// The largest difference between two tensors and the root of the mean squared one, relative as in [`relative_error`].
pub(crate) fn relative_errors(actual: &[f64], expected: &[f64]) -> [f64; 2] {
    let finite = expected.iter().filter(|x| x.is_finite());
    let scale = finite.fold(1e-3, |most: f64, x| most.max(x.abs()));
    let same_size = if actual.len() == expected.len() { 0.0 } else { f64::INFINITY };
    let apart = |(a, b): (&f64, &f64)| match (a - b).abs() / scale {
        _ if a == b || a.is_nan() && b.is_nan() => 0.0,
        apart if apart.is_nan() => f64::INFINITY,
        apart => apart,
    };
    let (most, squares) =
        actual.iter().zip(expected).map(apart).fold((same_size, same_size), |(most, squares), apart| {
            (most.max(apart), squares + apart * apart)
        });
    [most, (squares / expected.len().max(1) as f64).sqrt()]
}

/// A whole tensor, assembled from the devices' blocks of a value of the program; none where a block is missing.
pub fn assemble<'a>(
    program: &ParallelGraph,
    value: ValueId,
    block_of: impl Fn(DeviceId) -> Option<&'a HostTensor>,
) -> Option<HostTensor> {
    let value = program.value(value);
    let (pieces, reduction) = blocks::assemble(&program.mesh, value);
    let mut whole = HostTensor::zeros(&value.ty);
    let mut at = 0;
    while let Some(piece) = pieces.get(at) {
        let origin = start(&piece.block);
        let parts = pieces[at..].iter().filter(|other| other.block == piece.block);
        at += 1;
        let first = pieces[..at - 1].iter().all(|before| before.block != piece.block);
        match reduction {
            None => whole.set_block(&origin, block_of(piece.from)?),
            Some(how) if first => {
                let parts: Option<Vec<&HostTensor>> = parts.map(|part| block_of(part.from)).collect();
                whole.set_block(&origin, &join(&parts?, how));
            }
            Some(_) => {}
        }
    }
    Some(whole)
}

/// Combines partial results, in order.
fn join(parts: &[&HostTensor], how: Reduction) -> HostTensor {
    let ty = parts[0].ty();
    let buffer = |value: &HostTensor| {
        let mut buffer = Buffer::zeroed(ty.bytes() as usize);
        buffer.write(value);
        buffer
    };
    let buffers: Vec<Buffer> = parts.iter().map(|part| buffer(part)).collect();
    let sources: Vec<&[u8]> = buffers.iter().map(Buffer::bytes).collect();
    let mut result = Buffer::zeroed(ty.bytes() as usize);
    let zero = Dims::from_elem(0, ty.rank());
    let place = BlockView { shape: &ty.shape, origin: &zero };
    let walk = Walk::new(&ty.shape, &vec![place; parts.len() + 1]);
    walk.combine(ty.dtype, how, result.bytes_mut(), &sources);
    result.to_tensor(&ty)
}
