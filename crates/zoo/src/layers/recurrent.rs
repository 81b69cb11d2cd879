//! Recurrent layers over time-major sequences `[t, b, c]`: one op per layer, or one op per layer and time step.
//!
//! A layer is an input projection and a recurrent op. Unrolled time steps share the layer's weights, so their gradients
//! add up.

use super::{
    LayerResult, add, concat, dense, einsum, fan_in, fill, first_size, ids, last_size, parameter, reshape,
    slice, unary,
};
use shardwright_graph::{
    BuildError, GraphBuilder, TensorId,
    ops::{Lstm, Softmax, Transpose, UnaryFn},
};

/// Token ids or labels `[t, b]`. The input itself is `[b, t]`, since the first dimension of every input is the batch; a
/// transpose follows.
pub fn ids_by_step(b: &mut GraphBuilder, name: &str, [steps, samples]: [u64; 2], below: u64) -> LayerResult {
    let given = ids(b, name, &[samples, steps], below)?;
    b.emit(&format!("{name}.by_step"), Transpose { perm: [1, 0].into_iter().collect() }, &[given])
}

/// A sequence `[t, b, c]`: one tensor, or one tensor `[1, b, c]` per time step.
#[derive(Clone, Debug)]
pub enum Sequence {
    /// One tensor.
    Whole(TensorId),
    /// One tensor per time step.
    Steps(Vec<TensorId>),
}

impl Sequence {
    /// Slices a tensor into time steps.
    pub fn unroll(b: &mut GraphBuilder, name: &str, x: TensorId) -> Result<Self, BuildError> {
        let steps = first_size(b, name, x)?;
        (0..steps)
            .map(|t| slice(b, &format!("{name}.{t}"), x, 0, t, t + 1))
            .collect::<Result<_, _>>()
            .map(Self::Steps)
    }

    /// The sequence as one tensor.
    pub fn whole(&self, b: &mut GraphBuilder, name: &str) -> LayerResult {
        match self {
            Self::Whole(x) => Ok(*x),
            Self::Steps(steps) => concat(b, name, steps, 0),
        }
    }

    fn steps(&self) -> &[TensorId] {
        match self {
            Self::Whole(x) => std::slice::from_ref(x),
            Self::Steps(steps) => steps,
        }
    }
}

/// The initial state of a recurrent layer, `[b, h]` each.
#[derive(Clone, Copy, Debug)]
pub struct LstmState {
    /// Output.
    pub h: TensorId,
    /// Cell.
    pub c: TensorId,
}

/// The result of a recurrent layer: outputs and cells of all time steps.
#[derive(Clone, Debug)]
pub struct LstmOutput {
    /// Outputs.
    pub y: Sequence,
    /// Cells.
    pub c: Sequence,
}

/// The last time step of a sequence, `[b, h]`.
pub fn last(b: &mut GraphBuilder, name: &str, sequence: &Sequence) -> LayerResult {
    let step = match sequence {
        Sequence::Steps(steps) => steps.last().copied(),
        Sequence::Whole(x) => {
            let steps = first_size(b, name, *x)?;
            Some(slice(b, &format!("{name}.step"), *x, 0, steps - 1, steps)?)
        }
    };
    match step {
        Some(step) => without_time(b, name, step),
        None => Err(BuildError::Model(format!("`{name}`: a sequence without steps"))),
    }
}

/// Drops the time dimension: `[1, b, h]` becomes `[b, h]`.
fn without_time(b: &mut GraphBuilder, name: &str, x: TensorId) -> LayerResult {
    let &[_, batch, hidden] = b.shape(x) else {
        return Err(BuildError::Model(format!("`{name}`: a time step needs [1, b, h], got {}", b.ty(x))));
    };
    reshape(b, name, x, &[batch, hidden])
}

/// An LSTM layer with new weights. It starts from `state`, or from zeros. One bias per gate, not cuDNN's two.
///
/// A whole sequence gives one recurrent op called `name`; an unrolled one gives an op per time step, such as `name.3`.
pub fn lstm(
    b: &mut GraphBuilder,
    name: &str,
    x: &Sequence,
    hidden: u64,
    state: Option<LstmState>,
) -> Result<LstmOutput, BuildError> {
    let shapeless = || BuildError::Model(format!("`{name}`: an LSTM needs a sequence [t, b, c]"));
    let ty = x.steps().first().map(|&x| b.ty(x).clone()).ok_or_else(shapeless)?;
    let &[_, batch, inputs] = &ty.shape[..] else { return Err(shapeless()) };
    let init = fan_in(hidden);
    let w = parameter(b, &format!("{name}.weight"), ty.dtype, &[inputs, 4, hidden], init)?;
    let bias = parameter(b, &format!("{name}.bias"), ty.dtype, &[4, hidden], init)?;
    let u = parameter(b, &format!("{name}.recurrent"), ty.dtype, &[hidden, 4, hidden], init)?;
    let mut state = match state {
        Some(state) => state,
        None => LstmState {
            h: fill(b, &format!("{name}.h0"), ty.dtype, &[batch, hidden], 0.0)?,
            c: fill(b, &format!("{name}.c0"), ty.dtype, &[batch, hidden], 0.0)?,
        },
    };
    let steps = x.steps();
    let (mut ys, mut cs) = (Vec::with_capacity(steps.len()), Vec::with_capacity(steps.len()));
    for (t, &step) in steps.iter().enumerate() {
        let label = match x {
            Sequence::Whole(_) => name.to_string(),
            Sequence::Steps(_) => format!("{name}.{t}"),
        };
        if let (Some(&y), Some(&c)) = (ys.last(), cs.last()) {
            state.h = without_time(b, &format!("{label}.h"), y)?;
            state.c = without_time(b, &format!("{label}.c"), c)?;
        }
        let gates = einsum(b, &format!("{label}.input"), "tbc,cgh->tbgh", &[step, w])?;
        let gates = add(b, &format!("{label}.add_bias"), gates, bias)?;
        let made = b.add(&label, Lstm {}, &[gates, u, state.h, state.c])?;
        ys.push(made[0]);
        cs.push(made[1]);
    }
    let gather = |mut parts: Vec<TensorId>| match x {
        Sequence::Whole(_) => Sequence::Whole(parts.remove(0)),
        Sequence::Steps(_) => Sequence::Steps(parts),
    };
    Ok(LstmOutput { y: gather(ys), c: gather(cs) })
}

/// Luong's attention from decoder outputs `[q, b, h]` to encoder outputs `[k, b, h]`, with general scores. The result is
/// `tanh(W1 context + W2 output)`, equal to the usual linear map of the concatenation.
pub fn attend(b: &mut GraphBuilder, output: TensorId, memory: TensorId) -> LayerResult {
    let hidden = last_size(b, "attention", output)?;
    let keys = dense(b, "keys", "tbc,ch->tbh", memory, &[hidden], false)?;
    let scores = einsum(b, "scores", "qbh,kbh->bqk", &[output, keys])?;
    let weights = b.emit("weights", Softmax { axis: 2 }, &[scores])?;
    let context = einsum(b, "context", "bqk,kbh->qbh", &[weights, memory])?;
    let context = dense(b, "from_context", "tbc,ch->tbh", context, &[hidden], false)?;
    let output = dense(b, "from_output", "tbc,ch->tbh", output, &[hidden], false)?;
    let sum = add(b, "sum", context, output)?;
    unary(b, "tanh", UnaryFn::Tanh, sum)
}
