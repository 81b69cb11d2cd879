//! The encoder-decoder transformer of "Attention is all you need" (arXiv 1706.03762), base size.
//!
//! Norms follow the residual, positions are sinusoidal, and source, target and logits share one embedding. The body is
//! PyTorch's `nn.Transformer`: biases in attention, a norm at the end of each stack, 44,140,544 parameters. With the
//! shared table of 37,000 x 512 there are 63,084,544; the paper rounds its count to 65 million.

use super::{
    Family, LossResult, OptionValues,
    options::{ATTENTION, DTYPE, batch, count, dropout, heads, hidden, layers, seq, vocab},
};
use crate::layers::{
    self, Attention, LayerResult, add, attention, cross_entropy, embedding, feed_forward, ids, layer_norm,
    scale, sinusoids, tied_logits,
};
use shardwright_graph::{
    GraphBuilder, TensorId,
    ops::{Gather, UnaryFn},
};

pub(super) const FAMILY: Family = Family {
    name: "transformer",
    summary: "encoder-decoder transformer, base size: 6+6 layers of 512",
    tiny: "batch=2,layers=1,hidden=8,heads=2,ffn=12,vocab=11,seq=4,dropout=0",
    transformer: true,
    options: &[
        batch(64),
        layers(6),
        hidden(512),
        heads(8),
        count("ffn", 2048, 1 << 22, "width inside the feed-forward blocks"),
        vocab(37_000),
        seq(256),
        dropout(0.1),
        ATTENTION,
        DTYPE,
    ],
    build,
};

const EPS: f64 = 1e-5;

/// Adds a block's output to its input and normalises the sum.
fn residual(b: &mut GraphBuilder, name: &str, x: TensorId, y: TensorId, rate: f64) -> LayerResult {
    let y = layers::dropout(b, &format!("{name}.dropout"), y, rate)?;
    let sum = add(b, &format!("{name}.residual"), x, y)?;
    layer_norm(b, &format!("{name}.norm"), sum, EPS)
}

/// Embedded tokens, scaled, plus their positions.
fn positioned(b: &mut GraphBuilder, o: &OptionValues, x: TensorId) -> LayerResult {
    let hidden = o.count("hidden");
    let x = scale(b, "scale", x, (hidden as f64).sqrt())?;
    let positions = b.scoped("position", |b| sinusoids(b, o.dtype(), o.count("seq"), hidden))?;
    let x = add(b, "add_position", x, positions)?;
    layers::dropout(b, "dropout", x, o.dropout())
}

fn build(b: &mut GraphBuilder, o: &OptionValues) -> LossResult {
    let (samples, tokens, vocab) = (o.batch(), o.count("seq"), o.count("vocab"));
    let (hidden, inner, rate) = (o.count("hidden"), o.count("ffn"), o.dropout());
    if hidden % 2 != 0 {
        return Err(o.conflict(format!("hidden={hidden} must be even, for sines and cosines")).into());
    }
    let heads = Attention::new(o.count("heads"), o.share("hidden", "heads")?);
    let cfg = heads.dropout(rate).fused(o.fused_attention());

    let source = ids(b, "source", &[samples, tokens], vocab)?;
    let deviation = 1.0 / (hidden as f64).sqrt();
    let (x, table) = embedding(b, "embedding", o.dtype(), source, (vocab, hidden), deviation)?;
    let mut x = b.scoped("encoder", |b| positioned(b, o, x))?;
    for i in 0..o.count("layers") {
        x = b.scoped(&format!("encoder.{i}"), |b| {
            let y = b.scoped("attn", |b| attention(b, x, x, &cfg))?;
            let x = residual(b, "attn", x, y, rate)?;
            let y = b.scoped("ffn", |b| feed_forward(b, x, inner, UnaryFn::Relu))?;
            residual(b, "ffn", x, y, rate)
        })?;
    }
    let memory = layer_norm(b, "encoder.norm", x, EPS)?;

    let target = ids(b, "target", &[samples, tokens], vocab)?;
    let x = b.emit("decoder.embedding", Gather { axis: 0, base: 0, extent: vocab }, &[table, target])?;
    let mut x = b.scoped("decoder", |b| positioned(b, o, x))?;
    for i in 0..o.count("layers") {
        x = b.scoped(&format!("decoder.{i}"), |b| {
            let y = b.scoped("attn", |b| attention(b, x, x, &cfg.causal()))?;
            let x = residual(b, "attn", x, y, rate)?;
            let y = b.scoped("cross", |b| attention(b, x, memory, &cfg))?;
            let x = residual(b, "cross", x, y, rate)?;
            let y = b.scoped("ffn", |b| feed_forward(b, x, inner, UnaryFn::Relu))?;
            residual(b, "ffn", x, y, rate)
        })?;
    }
    let x = layer_norm(b, "decoder.norm", x, EPS)?;
    let logits = tied_logits(b, "logits", x, table)?;
    let labels = ids(b, "labels", &[samples, tokens], vocab)?;
    Ok(cross_entropy(b, "loss", logits, labels)?)
}
