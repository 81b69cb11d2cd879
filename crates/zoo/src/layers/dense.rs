//! Layers of one matrix product or one table look-up: linear maps, embeddings, feed-forward blocks. Dropout and
//! flattening are here too.

use super::{LayerResult, add, einsum, fan_in, first_size, last_size, mul, parameter, reshape, unary};
use shardwright_graph::{
    BuildError, DType, Dims, GraphBuilder, Init, Real, TensorId,
    ops::{Contract, Dropout, Gather, UnaryFn},
};
use smallvec::SmallVec;

/// Contracts `x` with a new weight: `nsc,chd->nshd` projects to heads.
///
/// The weight's letters that `x` has take their sizes from `x`; the others take theirs from `sizes`, in order. The bias
/// has the letters that `x` lacks, which must be the result's last.
pub fn dense(
    b: &mut GraphBuilder,
    name: &str,
    spec: &str,
    x: TensorId,
    sizes: &[u64],
    bias: bool,
) -> LayerResult {
    let error = |reason| BuildError::Op { name: name.into(), kind: "contract", reason };
    let op = Contract::parse(spec).map_err(error)?;
    let ty = b.ty(x).clone();
    let [from, weight] = op.operands.as_slice() else {
        return Err(BuildError::Model(format!("`{name}`: einsum `{spec}` does not have two operands")));
    };
    let mut new_sizes = sizes.iter().copied();
    let mut inputs = 1u64;
    let mut shape: SmallVec<[u64; 4]> = SmallVec::new();
    for letter in weight {
        let size = match from.iter().position(|c| c == letter) {
            Some(i) => ty.shape.get(i).copied(),
            None => new_sizes.next(),
        };
        let Some(size) = size else {
            return Err(BuildError::Model(format!("`{name}`: einsum `{spec}` does not fit {ty}")));
        };
        shape.push(size);
        if !op.result.contains(letter) {
            inputs = inputs.saturating_mul(size);
        }
    }
    let w = parameter(b, &format!("{name}.weight"), ty.dtype, &shape, fan_in(inputs))?;
    let y = b.emit(name, op, &[x, w])?;
    if !bias {
        return Ok(y);
    }
    let shift = parameter(b, &format!("{name}.bias"), ty.dtype, sizes, fan_in(inputs))?;
    add(b, &format!("{name}.add_bias"), y, shift)
}

/// A linear map of the last dimension. `x` has samples and up to two more dimensions.
pub fn linear(b: &mut GraphBuilder, name: &str, x: TensorId, outputs: u64, bias: bool) -> LayerResult {
    let spec = match b.ty(x).rank() {
        2 => "nc,co->no",
        3 => "nsc,co->nso",
        4 => "nstc,co->nsto",
        rank => return Err(BuildError::Model(format!("`{name}`: linear layer on {rank} dimensions"))),
    };
    dense(b, name, spec, x, &[outputs], bias)
}

/// Looks up rows of a new table `[rows, width]` with normally distributed weights. Returns the rows and the table.
pub fn embedding(
    b: &mut GraphBuilder,
    name: &str,
    dtype: DType,
    ids: TensorId,
    (rows, width): (u64, u64),
    deviation: f64,
) -> Result<(TensorId, TensorId), BuildError> {
    let init = Init::Normal(Real(deviation));
    let table = parameter(b, &format!("{name}.weight"), dtype, &[rows, width], init)?;
    Ok((b.emit(name, Gather { axis: 0, base: 0, extent: rows }, &[table, ids])?, table))
}

/// `fc2(f(fc1(x)))` with biases: the feed-forward block of most transformers.
pub fn feed_forward(b: &mut GraphBuilder, x: TensorId, inner: u64, f: UnaryFn) -> LayerResult {
    let outputs = last_size(b, "feed-forward", x)?;
    let y = linear(b, "fc1", x, inner, true)?;
    let y = unary(b, "activation", f, y)?;
    linear(b, "fc2", y, outputs, true)
}

/// `down(silu(gate(x)) * up(x))`: the feed-forward block of Llama, without biases.
pub fn gated_feed_forward(b: &mut GraphBuilder, x: TensorId, inner: u64) -> LayerResult {
    gated_with(b, x, inner, UnaryFn::Silu, false)
}

/// `down(f(gate(x)) * up(x))`, each with a bias or none.
pub fn gated_with(b: &mut GraphBuilder, x: TensorId, inner: u64, f: UnaryFn, bias: bool) -> LayerResult {
    let outputs = last_size(b, "feed-forward", x)?;
    let gate = linear(b, "gate", x, inner, bias)?;
    let name = if f == UnaryFn::Silu { "gate.silu" } else { "gate.activation" };
    let gate = unary(b, name, f, gate)?;
    let up = linear(b, "up", x, inner, bias)?;
    let gated = mul(b, "gated", gate, up)?;
    linear(b, "down", gated, outputs, bias)
}

/// Sets a fraction `rate` of the elements to zero and scales the rest up. Rate zero adds no op.
///
/// The seed is the op's index, so that no two dropouts of a model share a mask.
pub fn dropout(b: &mut GraphBuilder, name: &str, x: TensorId, rate: f64) -> LayerResult {
    if rate == 0.0 {
        return Ok(x);
    }
    let whole = b.ty(x).shape.clone();
    let origin: Dims = whole.iter().map(|_| 0).collect();
    let seed = b.graph().ops.len() as u64;
    b.emit(name, Dropout { rate: Real(rate), seed, origin, whole }, &[x])
}

/// Reshapes to `[samples, features]`.
pub fn flatten(b: &mut GraphBuilder, name: &str, x: TensorId) -> LayerResult {
    let samples = first_size(b, name, x)?;
    let features = b.shape(x).iter().skip(1).product();
    reshape(b, name, x, &[samples, features])
}

/// Logits over the rows of an embedding table (tied weights).
pub(crate) fn tied_logits(b: &mut GraphBuilder, name: &str, x: TensorId, table: TensorId) -> LayerResult {
    einsum(b, name, "nsc,vc->nsv", &[x, table])
}
