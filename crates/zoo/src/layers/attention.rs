//! Multi-head attention, self and cross, causal or not, with grouped queries and rotary embedding; by one fused op, or by
//! products and a softmax that store the scores.
//!
//! Heads are dimensions of the weights (`nsc,chd->nshd`) instead of results of a reshape. So heads are a factor of
//! every op of the block, and a config can split them.

use super::{
    LayerResult, add, concat, dense, dropout, einsum, fill, last_size, layer_norm, rms_norm, rotary,
    rotary_tables, scale, slice, unary,
};
use shardwright_graph::{
    BuildError, DType, GraphBuilder, TensorId, TensorType,
    ops::{self, Binary, BinaryFn, Compare, CompareFn, Dropout, Iota, Select, Softmax, UnaryFn},
};

/// The rotary embedding of an attention block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotary {
    /// The base of the frequencies.
    pub base: f64,
    /// How many numbers of each head are rotated; an even number, the first ones. The others are left as they are.
    pub width: u64,
}

/// A norm of each head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadNorm {
    /// Centred, with a bias; else divided by the root mean square.
    pub centered: bool,
    /// Added to the variance.
    pub eps: f64,
}

/// Sizes and variants of an attention block.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// Query heads.
    pub heads: u64,
    /// Key and value heads. Each is shared by `heads / kv_heads` query heads.
    pub kv_heads: u64,
    /// Size of a head.
    pub head_size: u64,
    /// Whether the projections to queries, keys and values have biases.
    pub bias: bool,
    /// Whether the projection of the result has a bias.
    pub output_bias: bool,
    /// The rotary embedding of queries and keys.
    pub rotary: Option<Rotary>,
    /// Norms of every query and key head.
    pub head_norm: Option<HeadNorm>,
    /// Scores, mask and weights.
    pub scores: Scores,
}

/// How queries and keys become attention weights.
#[derive(Clone, Copy, Debug)]
pub struct Scores {
    /// The factor of the scores; `None`: one over the root of the head's size.
    pub scale: Option<f64>,
    /// Whether a position attends only to itself and earlier positions.
    pub causal: bool,
    /// With a causal mask: how many positions back a position attends to, itself included.
    pub window: Option<u64>,
    /// Soft cap: scores are `cap * tanh(score / cap)`.
    pub cap: Option<f64>,
    /// Dropout rate of the attention weights.
    pub dropout: f64,
    /// Whether one op computes scores, weights and result, so that no scores are stored. Capped scores are always stored.
    pub fused: bool,
}

impl Default for Scores {
    fn default() -> Self {
        Self { scale: None, causal: false, window: None, cap: None, dropout: 0.0, fused: true }
    }
}

impl Attention {
    /// One key head per query head, with biases, not causal, no rotary embedding, fused.
    pub fn new(heads: u64, head_size: u64) -> Self {
        Self {
            heads,
            kv_heads: heads,
            head_size,
            bias: true,
            output_bias: true,
            rotary: None,
            head_norm: None,
            scores: Scores::default(),
        }
    }

    /// The same block with a causal mask.
    pub fn causal(self) -> Self {
        Self { scores: Scores { causal: true, ..self.scores }, ..self }
    }

    /// The same block with dropout of the attention weights.
    pub fn dropout(self, dropout: f64) -> Self {
        Self { scores: Scores { dropout, ..self.scores }, ..self }
    }

    /// The same block with one op for scores, weights and result, or with an op for each.
    pub fn fused(self, fused: bool) -> Self {
        Self { scores: Scores { fused, ..self.scores }, ..self }
    }

    /// The same block with grouped queries.
    pub fn grouped(self, kv_heads: u64) -> Self {
        Self { kv_heads, ..self }
    }

    /// The same block with a rotary embedding of whole heads.
    pub fn rotary(self, base: f64) -> Self {
        Self { rotary: Some(Rotary { base, width: self.head_size }), ..self }
    }

    /// The same block without biases.
    pub fn unbiased(self) -> Self {
        Self { bias: false, output_bias: false, ..self }
    }
}

/// The score of a masked position. Finite, so that no later difference is undefined.
const MASKED: f64 = -1e9;

/// Attention from `x` (`[n, s, c]`) to `memory`, which is `x` itself in self-attention.
///
/// With grouped queries the query heads are two dimensions: the group `g` that shares a key head, and the query `r` inside
/// the group.
pub fn attention(b: &mut GraphBuilder, x: TensorId, memory: TensorId, cfg: &Attention) -> LayerResult {
    biased_attention(b, x, memory, cfg, None)
}

/// [`attention`] with a bias that is added to the scores (`[h, q, k]`).
pub fn biased_attention(
    b: &mut GraphBuilder,
    x: TensorId,
    memory: TensorId,
    cfg: &Attention,
    score_bias: Option<TensorId>,
) -> LayerResult {
    let width = last_size(b, "attention", x)?;
    if cfg.kv_heads == 0 || !cfg.heads.is_multiple_of(cfg.kv_heads) {
        return Err(BuildError::Model(format!(
            "{} query heads cannot share {} key heads equally",
            cfg.heads, cfg.kv_heads
        )));
    }
    let (groups, per_group, size) = (cfg.kv_heads, cfg.heads / cfg.kv_heads, cfg.head_size);
    let plain = [groups, size];
    let grouped = [groups, per_group, size];
    let (query_spec, query_sizes, output_spec) = match per_group {
        1 => ("nsc,chd->nshd", &plain[..], "nshd,hdo->nso"),
        _ => ("nsc,cgrd->nsgrd", &grouped[..], "nsgrd,grdo->nso"),
    };
    let key_spec = if per_group == 1 { "nsc,chd->nshd" } else { "nsc,cgd->nsgd" };

    let mut query = dense(b, "q", query_spec, x, query_sizes, cfg.bias)?;
    let mut key = dense(b, "k", key_spec, memory, &plain, cfg.bias)?;
    let value = dense(b, "v", key_spec, memory, &plain, cfg.bias)?;
    if let Some(HeadNorm { centered, eps }) = cfg.head_norm {
        let norm = if centered { layer_norm } else { rms_norm };
        query = norm(b, "q.norm", query, eps)?;
        key = norm(b, "k.norm", key, eps)?;
    }
    if let Some(rotary) = &cfg.rotary {
        query = turn(b, "q.rotary", query, rotary)?;
        key = turn(b, "k.rotary", key, rotary)?;
    }
    let context = dot_product_attention(b, [query, key, value], &cfg.scores, score_bias)?;
    dense(b, "out", output_spec, context, &[width], cfg.output_bias)
}

/// Attention of queries (`[n, q, h, d]`, or `[n, q, g, r, d]` in groups) to keys and values (`[n, k, h, d]`), whose heads may
/// have other sizes than keys'. The result is shaped like the queries.
pub fn dot_product_attention(
    b: &mut GraphBuilder,
    operands: [TensorId; 3],
    cfg: &Scores,
    bias: Option<TensorId>,
) -> LayerResult {
    let size = last_size(b, "attention", operands[0])?;
    let factor = cfg.scale.unwrap_or(1.0 / (size as f64).sqrt());
    match cfg.fused && cfg.cap.is_none() {
        true => fused(b, operands, cfg, factor, bias),
        false => plain(b, operands, cfg, factor, bias),
    }
}

/// The attended values by one op.
fn fused(
    b: &mut GraphBuilder,
    operands: [TensorId; 3],
    cfg: &Scores,
    factor: f64,
    bias: Option<TensorId>,
) -> LayerResult {
    let [query, key, _] = operands.map(|t| b.ty(t).shape.clone());
    let (Some(&queries), Some(&keys)) = (query.get(1), key.get(1)) else {
        return Err(BuildError::Model(format!("attention from {query} to {key}")));
    };
    let mut op = ops::Attention::new(factor, queries, keys);
    if cfg.causal {
        op = op.causal();
        op.before = cfg.window.map(|window| window.saturating_sub(1));
    }
    if cfg.dropout > 0.0 {
        // The seed is the op's index, as in every dropout of a model.
        let heads = &query[2..query.rank().saturating_sub(1)];
        let scores: Vec<u64> = [&query[..1], heads, &[queries, keys]].concat();
        op.dropout = Some(Dropout::new(cfg.dropout, b.graph().ops.len() as u64, &scores.into()));
    }
    let inputs: Vec<TensorId> = operands.into_iter().chain(bias).collect();
    Ok(b.add("context", op, &inputs)?[0])
}

/// The attended values by scores, softmax and a product, each an op.
fn plain(
    b: &mut GraphBuilder,
    [query, key, value]: [TensorId; 3],
    cfg: &Scores,
    factor: f64,
    bias: Option<TensorId>,
) -> LayerResult {
    let (score_spec, context_spec) = match b.ty(query).rank() {
        5 => ("nqgrd,nkgd->ngrqk", "ngrqk,nkgd->nqgrd"),
        _ => ("nqhd,nkhd->nhqk", "nhqk,nkhd->nqhd"),
    };
    // The query is scaled instead of the scores: far fewer elements for long sequences.
    let query = if factor == 1.0 { query } else { scale(b, "q.scale", query, factor)? };
    let mut scores = einsum(b, "scores", score_spec, &[query, key])?;
    if let Some(cap) = cfg.cap {
        scores = soft_cap(b, "scores", scores, cap)?;
    }
    if let Some(bias) = bias {
        scores = add(b, "scores.bias", scores, bias)?;
    }
    if cfg.causal {
        scores = b.scoped("mask", |b| causal_mask(b, scores, cfg.window))?;
    }
    let axis = b.ty(scores).rank().saturating_sub(1);
    let weights = b.emit("weights", Softmax { axis }, &[scores])?;
    let weights = dropout(b, "weights.dropout", weights, cfg.dropout)?;
    einsum(b, "context", context_spec, &[weights, value])
}

/// `cap * tanh(x / cap)`.
pub fn soft_cap(b: &mut GraphBuilder, name: &str, x: TensorId, cap: f64) -> LayerResult {
    let x = scale(b, &format!("{name}.over_cap"), x, 1.0 / cap)?;
    let x = unary(b, &format!("{name}.tanh"), UnaryFn::Tanh, x)?;
    scale(b, &format!("{name}.capped"), x, cap)
}

/// Rotates the first numbers of the last dimension, as many as the embedding is wide.
pub(crate) fn turn(b: &mut GraphBuilder, scope: &str, x: TensorId, rotary_of: &Rotary) -> LayerResult {
    let size = last_size(b, "rotary embedding", x)?;
    let axis = b.ty(x).rank().saturating_sub(1);
    b.scoped(scope, |b| {
        if rotary_of.width >= size {
            let tables = rotary_tables(b, x, rotary_of.base)?;
            return rotary(b, x, tables);
        }
        let part = slice(b, "part", x, axis, 0, rotary_of.width)?;
        let rest = slice(b, "rest", x, axis, rotary_of.width, size)?;
        let tables = rotary_tables(b, part, rotary_of.base)?;
        let turned = rotary(b, part, tables)?;
        concat(b, "joined", &[turned, rest], axis)
    })
}

/// Sets the scores of positions after the query, and of those before its window, to [`MASKED`].
fn causal_mask(b: &mut GraphBuilder, scores: TensorId, window: Option<u64>) -> LayerResult {
    let ty = b.ty(scores).clone();
    let &[.., queries, keys] = &ty.shape[..] else {
        return Err(BuildError::Model(format!("attention scores of shape {ty}")));
    };
    let iota = |shape, axis, start| Iota { ty: TensorType::new(DType::I32, shape), axis, start };
    let query = b.emit("query", iota([queries, 1], 0, 0), &[])?;
    let key = b.emit("key", iota([1, keys], 1, 0), &[])?;
    let mut visible = b.emit("visible", Compare { f: CompareFn::Ge }, &[query, key])?;
    if let Some(window) = window.filter(|&window| window < keys) {
        let end = b.emit("window.end", iota([1, keys], 1, window), &[])?;
        let near = b.emit("window", Compare { f: CompareFn::Lt }, &[query, end])?;
        visible = b.emit("visible.window", Binary { f: BinaryFn::And }, &[visible, near])?;
    }
    let masked = fill(b, "masked", ty.dtype, &[], MASKED)?;
    b.emit("scores", Select {}, &[visible, scores, masked])
}
