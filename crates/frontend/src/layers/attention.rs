//! Multi-head attention, self and cross, causal or not, with grouped queries and rotary embedding.
//!
//! Heads are dimensions of the weights, not made by reshapes: `nsc,chd->nshd`. So a split of the heads is
//! a split of a factor that every op of the block has.

use super::{Built, dense, dropout, einsum, fill, rotary, rotary_tables, scale};
use shardwright_graph::{
    BuildError, DType, GraphBuilder, TensorId, TensorType,
    ops::{Compare, CompareFn, Iota, Select, Softmax},
};

/// The sizes and habits of an attention block.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// Query heads.
    pub heads: u64,
    /// Key and value heads; each serves `heads / kv_heads` query heads.
    pub kv_heads: u64,
    /// Size of a head.
    pub head_size: u64,
    /// Whether projections have biases.
    pub bias: bool,
    /// Whether a position sees only itself and what came before.
    pub causal: bool,
    /// The base of the rotary embedding, if there is one.
    pub rotary: Option<f64>,
    /// Dropout rate of the attention weights.
    pub dropout: f64,
}

impl Attention {
    /// Plain attention: as many key heads as query heads, biases, nothing else.
    pub fn new(heads: u64, head_size: u64) -> Self {
        Self { heads, kv_heads: heads, head_size, bias: true, causal: false, rotary: None, dropout: 0.0 }
    }

    /// The same, causal.
    pub fn causal(self) -> Self {
        Self { causal: true, ..self }
    }

    /// The einsums of the block: query, key and value, scores, context, output. Grouped queries have two
    /// dimensions, the group `g` that shares a key head, and the query `r` within it.
    fn specs(&self) -> [&'static str; 5] {
        if self.heads == self.kv_heads {
            ["nsc,chd->nshd", "nsc,chd->nshd", "nqhd,nkhd->nhqk", "nhqk,nkhd->nqhd", "nshd,hdo->nso"]
        } else {
            ["nsc,cgrd->nsgrd", "nsc,cgd->nsgd", "nqgrd,nkgd->ngrqk", "ngrqk,nkgd->nqgrd", "nsgrd,grdo->nso"]
        }
    }
}

/// What a score becomes where a position must not look. Finite, so that no later difference is undefined.
const MASKED: f64 = -1e9;

/// Attention of `x` (`[n, s, c]`) to `memory` (`x` itself in self-attention).
pub fn attention(b: &mut GraphBuilder, x: TensorId, memory: TensorId, cfg: &Attention) -> Built {
    let width = b.shape(x).last().copied().unwrap_or(1);
    if cfg.kv_heads == 0 || !cfg.heads.is_multiple_of(cfg.kv_heads) {
        return Err(BuildError::Model(format!(
            "{} query heads cannot share {} key heads equally",
            cfg.heads, cfg.kv_heads
        )));
    }
    let [query_spec, key_spec, score_spec, context_spec, output_spec] = cfg.specs();
    let (groups, per_group, size) = (cfg.kv_heads, cfg.heads / cfg.kv_heads, cfg.head_size);
    let plain = [groups, size];
    let grouped = [groups, per_group, size];
    let query_sizes = if per_group == 1 { &plain[..] } else { &grouped[..] };

    let mut query = dense(b, "q", query_spec, x, query_sizes, cfg.bias)?;
    let mut key = dense(b, "k", key_spec, memory, &plain, cfg.bias)?;
    let value = dense(b, "v", key_spec, memory, &plain, cfg.bias)?;
    if let Some(base) = cfg.rotary {
        query = turn(b, "q.rotary", query, base)?;
        key = turn(b, "k.rotary", key, base)?;
    }
    // Scaling the query rather than the scores: far fewer numbers for long sequences.
    let query = scale(b, "q.scale", query, 1.0 / (size as f64).sqrt())?;
    let mut scores = einsum(b, "scores", score_spec, &[query, key])?;
    if cfg.causal {
        scores = b.scoped("mask", |b| causal_mask(b, scores))?;
    }
    let axis = b.ty(scores).rank().saturating_sub(1);
    let weights = b.emit("weights", Softmax { axis }, &[scores])?;
    let weights = dropout(b, "weights.dropout", weights, cfg.dropout)?;
    let context = einsum(b, "context", context_spec, &[weights, value])?;
    dense(b, "out", output_spec, context, &[width], cfg.bias)
}

fn turn(b: &mut GraphBuilder, scope: &str, x: TensorId, base: f64) -> Built {
    b.scoped(scope, |b| {
        let tables = rotary_tables(b, x, base)?;
        rotary(b, x, tables)
    })
}

/// Scores of positions that a query must not see become [`MASKED`].
fn causal_mask(b: &mut GraphBuilder, scores: TensorId) -> Built {
    let ty = b.ty(scores).clone();
    let &[.., queries, keys] = &ty.shape[..] else {
        return Err(BuildError::Model(format!("attention scores of shape {ty}")));
    };
    let iota = |shape, axis| Iota { ty: TensorType::new(DType::I32, shape), axis, start: 0 };
    let query = b.emit("query", iota([queries, 1], 0), &[])?;
    let key = b.emit("key", iota([1, keys], 1), &[])?;
    let visible = b.emit("visible", Compare { f: CompareFn::Ge }, &[query, key])?;
    let masked = fill(b, "masked", ty.dtype, &[], MASKED)?;
    b.emit("scores", Select {}, &[visible, scores, masked])
}
