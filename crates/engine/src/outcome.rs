//! What a run gave: the devices' blocks put together, and where the time went.

use crate::buffer::Buffer;
use crate::run::DeviceOutcome;
use crate::walk::{Place, Walk, combine_of};
use shardwright_cost::Reduction;
use shardwright_graph::{Dims, TensorId};
use shardwright_lower::{ParallelGraph, ValueId, blocks};
use shardwright_machine::DeviceId;
use shardwright_runtime::{Value, measure::median};

/// What a run gave.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The loss of every step.
    pub losses: Vec<f64>,
    /// The weights and optimizer states after the last step, where they were asked for.
    pub finals: Vec<(TensorId, Value)>,
    /// How long each step took: from when the last device ended the step before to when the last ended this one.
    pub step_seconds: Vec<f64>,
    /// What each device has to tell.
    pub devices: Vec<DeviceOutcome>,
}

impl Outcome {
    /// Puts together what all devices of a program have to tell, in their order.
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

    /// The middle one of the steps' times, without the first, which asks for memory.
    pub fn median_step_seconds(&self) -> f64 {
        median_after_first(&self.step_seconds)
    }
}

/// The middle one of some times, without the first where there are more.
pub fn median_after_first(seconds: &[f64]) -> f64 {
    median(seconds.get(1..).filter(|rest| !rest.is_empty()).unwrap_or(seconds).to_vec())
}

/// The largest difference between two tensors, relative to the largest number in the expected one; infinite where
/// something is not a number.
///
/// Gradients that cancel out (of a key's bias, of what comes before a norm) are nothing but rounding: in tensors of
/// numbers below a thousandth, differences are relative to a thousandth.
pub fn relative_error(found: &[f64], expected: &[f64]) -> f64 {
    let scale = expected.iter().fold(1e-3, |most: f64, x| most.max(x.abs()));
    let worst = |most: f64, apart: f64| if apart.is_nan() { f64::INFINITY } else { most.max(apart) };
    let same_size = if found.len() == expected.len() { 0.0 } else { f64::INFINITY };
    found.iter().zip(expected).map(|(a, b)| (a - b).abs() / scale).fold(same_size, worst)
}

/// A whole tensor, put together from the devices' blocks of a value of the program.
pub fn assemble<'a>(
    program: &ParallelGraph,
    value: ValueId,
    block_of: impl Fn(DeviceId) -> Option<&'a Value>,
) -> Option<Value> {
    let value = program.value(value);
    let (pieces, reduction) = blocks::assemble(&program.mesh, value);
    let mut whole = Value::zeros(&value.ty);
    let mut at = 0;
    while let Some(piece) = pieces.get(at) {
        let origin: Dims = piece.block.iter().map(|r| r.start).collect();
        let parts = pieces[at..].iter().filter(|other| other.block == piece.block);
        at += 1;
        let first = pieces[..at - 1].iter().all(|before| before.block != piece.block);
        match reduction {
            None => whole.set_block(&origin, block_of(piece.from)?),
            Some(how) if first => {
                let parts: Option<Vec<&Value>> = parts.map(|part| block_of(part.from)).collect();
                whole.set_block(&origin, &join(&parts?, how));
            }
            Some(_) => {}
        }
    }
    Some(whole)
}

/// Partial results combined, in order.
fn join(parts: &[&Value], how: Reduction) -> Value {
    let ty = parts[0].ty();
    let buffer = |value: &Value| {
        let mut buffer = Buffer::zeroed(ty.bytes() as usize);
        buffer.write(value);
        buffer
    };
    let buffers: Vec<Buffer> = parts.iter().map(|part| buffer(part)).collect();
    let sources: Vec<&[u8]> = buffers.iter().map(Buffer::bytes).collect();
    let mut result = Buffer::zeroed(ty.bytes() as usize);
    let zero = Dims::from_elem(0, ty.rank());
    let place = Place { shape: &ty.shape, origin: &zero };
    let walk = Walk::new(&ty.shape, &vec![place; parts.len() + 1]);
    walk.combine(ty.dtype, combine_of(how), result.bytes_mut(), &sources);
    result.to_value(&ty)
}
