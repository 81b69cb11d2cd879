//! Llama (arXiv 2302.13971, 2407.21783): RMS norm, rotary embedding, grouped queries, SiLU-gated
//! feed-forward, no biases. The default is Llama 3.2 1B: 1,235,814,400 parameters.
//!
//! Llama 2 7B is `layers=32,hidden=4096,heads=32,kv_heads=32,ffn=11008,vocab=32000,tied=no,theta=10000`,
//! Llama 3 8B `layers=32,hidden=4096,heads=32,kv_heads=8,ffn=14336,tied=no`.

use super::{
    Failure, Family, Loss, Options,
    options::{DTYPE, Domain, OptionSpec, batch, choice, count, heads, hidden, layers, seq, vocab},
};
use crate::layers::{
    Attention, Built, add, attention, cross_entropy, embedding, gated_feed_forward, ids, linear, rms_norm,
    tied_logits,
};
use shardwright_graph::{GraphBuilder, TensorId};

pub(super) const FAMILY: Family = Family {
    name: "llama",
    summary: "Llama: RMS norm, rotary embedding, grouped queries; Llama 3.2 1B by default",
    tiny: "batch=2,layers=1,hidden=8,heads=2,kv_heads=1,ffn=12,vocab=11,seq=4",
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

fn build(b: &mut GraphBuilder, o: &Options) -> Loss {
    let inner = o.count("ffn");
    decoder(b, o, |b, x| b.scoped("mlp", |b| gated_feed_forward(b, x, inner)))
}

/// The whole model, with `feed_forward` in its place in every block.
pub(super) fn decoder(
    b: &mut GraphBuilder,
    o: &Options,
    feed_forward: impl Fn(&mut GraphBuilder, TensorId) -> Built,
) -> Loss {
    let (samples, tokens, vocab, hidden) = (o.batch(), o.count("seq"), o.count("vocab"), o.count("hidden"));
    let cfg = attention_of(o)?;
    let words = ids(b, "tokens", &[samples, tokens], vocab)?;
    let (mut x, table) = embedding(b, "embedding", o.dtype(), words, (vocab, hidden), 0.02)?;
    for i in 0..o.count("layers") {
        x = b.scoped(&format!("blocks.{i}"), |b| {
            let y = rms_norm(b, "attn.norm", x, EPS)?;
            let y = b.scoped("attn", |b| attention(b, y, y, &cfg))?;
            let x = add(b, "attn.residual", x, y)?;
            let y = rms_norm(b, "mlp.norm", x, EPS)?;
            let y = feed_forward(b, y)?;
            add(b, "mlp.residual", x, y)
        })?;
    }
    let x = rms_norm(b, "norm", x, EPS)?;
    let logits = match o.word("tied") {
        "yes" => tied_logits(b, "logits", x, table)?,
        _ => linear(b, "logits", x, vocab, false)?,
    };
    let labels = ids(b, "labels", &[samples, tokens], vocab)?;
    Ok(cross_entropy(b, "loss", logits, labels)?)
}

fn attention_of(o: &Options) -> Result<Attention, Failure> {
    o.share("heads", "kv_heads")?;
    let head_size = o.share("hidden", "heads")?;
    if head_size % 2 != 0 {
        return Err(o.conflict(format!("hidden/heads={head_size} must be even, for rotary pairs")).into());
    }
    let (heads, kv_heads) = (o.count("heads"), o.count("kv_heads"));
    let rotary = Some(o.number("theta"));
    Ok(Attention { heads, kv_heads, head_size, bias: false, causal: true, rotary, dropout: 0.0 })
}
