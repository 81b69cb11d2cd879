//! Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values come from one narrow vector per
//! token, and only a separate part of queries and keys is rotated.

use super::{LayerResult, Rotary, Scores, concat, dense, dot_product_attention, last_size, rms_norm, turn};
use shardwright_graph::{BuildError, GraphBuilder, Shape, TensorId, ops::Broadcast};
use smallvec::smallvec;

/// Sizes of a latent attention block.
#[derive(Clone, Copy, Debug)]
pub struct LatentAttention {
    /// Heads of queries, keys and values.
    pub heads: u64,
    /// Width of the latent vector of queries; `None`: queries are projected from the input.
    pub query_rank: Option<u64>,
    /// Width of the latent vector of keys and values.
    pub kv_rank: u64,
    /// Numbers of a query or key head that are not rotated.
    pub plain_size: u64,
    /// Numbers of a query or key head that are rotated. All heads share those of the key.
    pub rotary_size: u64,
    /// Size of a value head.
    pub value_size: u64,
    /// Base of the rotary embedding.
    pub base: f64,
    /// Epsilon of the norms of latent vectors.
    pub eps: f64,
    /// Whether the projections to latent vectors and of the result have biases.
    pub bias: bool,
}

/// Causal latent self-attention of `x` (`[n, s, c]`).
pub fn latent_attention(b: &mut GraphBuilder, x: TensorId, cfg: &LatentAttention) -> LayerResult {
    let width = last_size(b, "latent attention", x)?;
    let &[samples, tokens, _] = b.shape(x) else {
        return Err(BuildError::Model(format!("latent attention needs tokens [n, s, c], got {}", b.ty(x))));
    };
    let rotary = Rotary { base: cfg.base, width: cfg.rotary_size };
    let from_latent = "nsl,lhd->nshd";
    let (source, spec) = match cfg.query_rank {
        Some(rank) => {
            let latent = dense(b, "q.down", "nsc,cl->nsl", x, &[rank], cfg.bias)?;
            (rms_norm(b, "q.norm", latent, cfg.eps)?, from_latent)
        }
        None => (x, "nsc,chd->nshd"),
    };
    let plain = dense(b, "q.plain", spec, source, &[cfg.heads, cfg.plain_size], false)?;
    let turned = dense(b, "q.turned", spec, source, &[cfg.heads, cfg.rotary_size], false)?;
    let turned = turn(b, "q.rotary", turned, &rotary)?;
    let query = concat(b, "q", &[plain, turned], 3)?;

    let latent = dense(b, "kv.down", "nsc,cl->nsl", x, &[cfg.kv_rank], cfg.bias)?;
    let latent = rms_norm(b, "kv.norm", latent, cfg.eps)?;
    let plain = dense(b, "k.plain", from_latent, latent, &[cfg.heads, cfg.plain_size], false)?;
    let value = dense(b, "v", from_latent, latent, &[cfg.heads, cfg.value_size], false)?;
    let shared = dense(b, "k.turned", "nsc,cd->nsd", x, &[cfg.rotary_size], cfg.bias)?;
    let shared = turn(b, "k.rotary", shared, &rotary)?;
    let shape = Shape::new(&[samples, tokens, cfg.heads, cfg.rotary_size]);
    let turned = b.emit("k.shared", Broadcast { shape, dims: smallvec![0, 1, 3] }, &[shared])?;
    let key = concat(b, "k", &[plain, turned], 3)?;

    let scores = Scores { causal: true, ..Scores::default() };
    let context = dot_product_attention(b, [query, key, value], &scores, None)?;
    dense(b, "out", "nshd,hdo->nso", context, &[width], cfg.bias)
}
