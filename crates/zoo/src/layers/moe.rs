//! Mixture of experts with dense dispatch and fixed capacity, after GShard (arXiv 2006.16668).
//!
//! An expert has a fixed number of slots per sequence, and only the tokens of one sequence compete for them. So a split
//! of the batch never changes which tokens are dropped, and stays exact. Slots are assigned in order of position. A
//! token without a slot passes through on the residual alone. There is no balancing loss.

use super::{LayerResult, dense, einsum, mul, reshape, unary};
use shardwright_graph::{
    BuildError, DType, GraphBuilder, Real, TensorId,
    ops::{Binary, BinaryFn, Cast, Cumsum, OneHot, Reduce, Softmax, TopKMask, UnaryFn},
};
use smallvec::smallvec;

/// The sizes of a mixture of experts.
#[derive(Clone, Copy, Debug)]
pub struct Moe {
    /// Number of experts.
    pub experts: u64,
    /// Number of experts per token.
    pub top_k: u64,
    /// Width inside an expert.
    pub inner: u64,
    /// Slots of an expert, relative to an even split of the tokens.
    pub capacity_factor: f64,
}

impl Moe {
    /// Slots of each expert per sequence of `tokens`.
    pub fn capacity(&self, tokens: u64) -> u64 {
        let even = self.top_k as f64 * tokens as f64 / self.experts.max(1) as f64;
        // Float to integer casts saturate. More slots than tokens are never used.
        ((even * self.capacity_factor).ceil() as u64).clamp(1, tokens.max(1))
    }
}

/// Routes each token of `x` (`[n, s, c]`) to its `top_k` experts (SiLU-gated feed-forward blocks) and sums their results,
/// weighted by the gate.
pub fn moe(b: &mut GraphBuilder, x: TensorId, cfg: &Moe) -> LayerResult {
    let &[samples, tokens, channels] = b.shape(x) else {
        return Err(BuildError::Model(format!("experts need tokens [n, s, c], got {}", b.ty(x))));
    };
    if cfg.top_k == 0 || cfg.top_k > cfg.experts {
        return Err(BuildError::Model(format!("top_k={} of {} experts", cfg.top_k, cfg.experts)));
    }
    let dtype = b.ty(x).dtype;
    let mut logits = dense(b, "gate", "nsc,ce->nse", x, &[cfg.experts], false)?;
    if dtype != DType::F32 && dtype != DType::F64 {
        // Sixteen-bit floats cannot count the slots of a long sequence.
        logits = b.emit("gate.widen", Cast { dtype: DType::F32 }, &[logits])?;
    }
    let probability = b.emit("gate.softmax", Softmax { axis: 2 }, &[logits])?;
    let chosen = b.emit("gate.top_k", TopKMask { k: cfg.top_k }, &[probability])?;
    let weight = mul(b, "gate.chosen", probability, chosen)?;
    let weight = if cfg.top_k > 1 { normalised(b, weight)? } else { weight };
    let mut weight = reshape(b, "gate.weight", weight, &[samples, tokens, cfg.experts, 1])?;
    if b.ty(weight).dtype != dtype {
        weight = b.emit("gate.narrow", Cast { dtype }, &[weight])?;
    }

    // A chosen token's slot is the number of earlier tokens that chose the same expert; all others get -1. One-hot of a
    // number out of range is all zeros, which drops the others and the tokens beyond the capacity.
    let count = b.emit("place.count", Cumsum { axis: 1, exclusive: false, reverse: false }, &[chosen])?;
    let place = mul(b, "place.chosen", count, chosen)?;
    let from_zero = UnaryFn::Affine { scale: Real(1.0), shift: Real(-1.0) };
    let place = unary(b, "place", from_zero, place)?;
    let place = b.emit("place.index", Cast { dtype: DType::I32 }, &[place])?;
    let depth = cfg.capacity(tokens);
    let dispatch = b.emit("dispatch", OneHot { depth, base: 0, dtype }, &[place])?;
    let combine = mul(b, "combine.weight", dispatch, weight)?;

    let work = einsum(b, "dispatched", "nsep,nsc->nepc", &[dispatch, x])?;
    let gate = dense(b, "experts.gate", "nepc,eco->nepo", work, &[cfg.inner], false)?;
    let gate = unary(b, "experts.silu", UnaryFn::Silu, gate)?;
    let up = dense(b, "experts.up", "nepc,eco->nepo", work, &[cfg.inner], false)?;
    let gated = mul(b, "experts.gated", gate, up)?;
    let done = dense(b, "experts.down", "nepc,eco->nepo", gated, &[channels], false)?;
    einsum(b, "combined", "nsep,nepc->nsc", &[combine, done])
}

/// Divides the weights of the chosen experts by their sum.
fn normalised(b: &mut GraphBuilder, weight: TensorId) -> LayerResult {
    let &[samples, tokens, _] = b.shape(weight) else {
        return Err(BuildError::Model("gate weights without experts".into()));
    };
    let sum = b.emit("gate.sum", Reduce::sum(smallvec![2]), &[weight])?;
    let sum = reshape(b, "gate.total", sum, &[samples, tokens, 1])?;
    b.emit("gate.normalised", Binary { f: BinaryFn::Div }, &[weight, sum])
}
