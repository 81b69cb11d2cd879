//! Llama (arXiv 2302.13971, 2407.21783): RMS norm, rotary embedding, grouped queries, SiLU-gated
//! feed-forward, no biases. The default is Llama 3.2 1B: 1,235,814,400 parameters.
//!
//! Llama 2 7B is `layers=32,hidden=4096,heads=32,kv_heads=32,ffn=11008,vocab=32000,tied=no,theta=10000`,
//! Llama 3 8B `layers=32,hidden=4096,heads=32,kv_heads=8,ffn=14336,tied=no`.

use super::{
    Failure, Family, LossResult, OptionValues,
    options::{
        ATTENTION, DTYPE, Domain, OptionSpec, batch, choice, count, heads, hidden, layers, seq, vocab,
    },
};
use crate::{
    decoder::{AttentionKind, BlockForm, Decoder, Experts, FeedForward, Norm},
    layers::Attention,
};
use shardwright_graph::{GraphBuilder, ops::UnaryFn};

pub(super) const FAMILY: Family = Family {
    name: "llama",
    summary: "Llama: RMS norm, rotary embedding, grouped queries; Llama 3.2 1B by default",
    tiny: "batch=2,layers=1,hidden=8,heads=2,kv_heads=1,ffn=12,vocab=11,seq=4",
    transformer: true,
    options: &[
        batch(8),
        layers(16),
        hidden(2048),
        heads(32),
        kv_heads(8),
        count("ffn", 8192, 1 << 22, "width inside the feed-forward blocks"),
        vocab(128_256),
        seq(2048),
        choice("tied", &["yes", "no"], "whether the logits use the embedding table"),
        theta(500_000.0),
        ATTENTION,
        DTYPE,
    ],
    build,
};

/// Key and value heads.
pub(super) const fn kv_heads(default: u64) -> OptionSpec {
    count("kv_heads", default, 1 << 16, "key and value heads; divides heads")
}

/// Base of the rotary embedding.
pub(super) const fn theta(default: f64) -> OptionSpec {
    let domain = Domain::Number { default, min: 2.0, max: 1e12 };
    OptionSpec { name: "theta", domain, help: "base of the rotary embedding" }
}

const EPS: f64 = 1e-5;

fn build(b: &mut GraphBuilder, o: &OptionValues) -> LossResult {
    Ok(decoder(o, None)?.build(b, o.dtype(), [o.batch(), o.count("seq")])?)
}

/// The decoder that options describe; `experts` take the place of feed-forward blocks.
pub(super) fn decoder(o: &OptionValues, experts: Option<Experts>) -> Result<Decoder, Failure> {
    o.share("heads", "kv_heads")?;
    let head_size = o.share("hidden", "heads")?;
    if head_size % 2 != 0 {
        return Err(o.conflict(format!("hidden/heads={head_size} must be even, for rotary pairs")).into());
    }
    let heads = Attention::new(o.count("heads"), head_size).unbiased().causal().fused(o.fused_attention());
    Ok(Decoder {
        layers: o.count("layers"),
        hidden: o.count("hidden"),
        vocab: o.count("vocab"),
        norm: Norm { centered: false, eps: EPS },
        attention: AttentionKind::Heads(heads.grouped(o.count("kv_heads")).rotary(o.number("theta"))),
        windows: None,
        feed_forward: FeedForward::gated(o.count("ffn"), UnaryFn::Silu),
        experts,
        dense_layers: Vec::new(),
        block: BlockForm::Sequential,
        positions: None,
        scaled_embedding: false,
        tied: o.word("tied") == "yes",
        logits_bias: false,
        logit_cap: None,
    })
}
