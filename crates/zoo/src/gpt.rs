//! GPT-2 (Radford et al. 2019). The default is the smallest: 124,439,808 parameters.
//!
//! Norms precede the blocks, positions are learned (`seq` of them), and the embedding is tied. The larger checkpoints:
//! `layers=24,hidden=1024,heads=16` (355 M), `layers=36,hidden=1280,heads=20` (774 M),
//! `layers=48,hidden=1600,heads=25` (1.56 B).

use super::{
    Family, LossResult, OptionValues,
    options::{ATTENTION, DTYPE, batch, count_from, dropout, heads, hidden, layers, seq, vocab},
};
use crate::layers::{
    self, Attention, LayerResult, add, attention, cross_entropy, embedding, feed_forward, ids, layer_norm,
    parameter, tied_logits,
};
use shardwright_graph::{GraphBuilder, Init, Real, TensorId, ops::UnaryFn};

pub(super) const FAMILY: Family = Family {
    name: "gpt",
    summary: "GPT-2: decoder-only transformer, 12 layers of 768 by default",
    tiny: "batch=2,layers=1,hidden=8,heads=2,vocab=11,seq=4",
    transformer: true,
    options: &[
        batch(8),
        layers(12),
        hidden(768),
        heads(12),
        count_from("ffn", (0, 0, 1 << 22), "width inside the feed-forward blocks; 0: four times hidden"),
        vocab(50_257),
        seq(1024),
        dropout(0.0),
        ATTENTION,
        DTYPE,
    ],
    build,
};

const EPS: f64 = 1e-5;
const DEVIATION: f64 = 0.02;

fn build(b: &mut GraphBuilder, o: &OptionValues) -> LossResult {
    let (samples, tokens, vocab, hidden) = (o.batch(), o.count("seq"), o.count("vocab"), o.count("hidden"));
    let (dtype, rate) = (o.dtype(), o.dropout());
    let inner = if o.count("ffn") == 0 { 4 * hidden } else { o.count("ffn") };
    let heads = Attention::new(o.count("heads"), o.share("hidden", "heads")?);
    let cfg = heads.causal().dropout(rate).fused(o.fused_attention());

    let words = ids(b, "tokens", &[samples, tokens], vocab)?;
    let (x, table) = embedding(b, "wte", dtype, words, (vocab, hidden), DEVIATION)?;
    let init = Init::Normal(Real(DEVIATION));
    let position = parameter(b, "wpe.weight", dtype, &[tokens, hidden], init)?;
    let x = add(b, "wpe", x, position)?;
    let mut x = layers::dropout(b, "dropout", x, rate)?;
    for i in 0..o.count("layers") {
        x = b.scoped(&format!("blocks.{i}"), |b| block(b, x, &cfg, inner))?;
    }
    let x = layer_norm(b, "ln_f", x, EPS)?;
    let logits = tied_logits(b, "logits", x, table)?;
    let labels = ids(b, "labels", &[samples, tokens], vocab)?;
    Ok(cross_entropy(b, "loss", logits, labels)?)
}

fn block(b: &mut GraphBuilder, x: TensorId, cfg: &Attention, inner: u64) -> LayerResult {
    let y = layer_norm(b, "ln1", x, EPS)?;
    let y = b.scoped("attn", |b| attention(b, y, y, cfg))?;
    let y = layers::dropout(b, "attn.dropout", y, cfg.scores.dropout)?;
    let x = add(b, "attn.residual", x, y)?;
    let y = layer_norm(b, "ln2", x, EPS)?;
    let y = b.scoped("mlp", |b| feed_forward(b, y, inner, UnaryFn::GeluTanh))?;
    let y = layers::dropout(b, "mlp.dropout", y, cfg.scores.dropout)?;
    add(b, "mlp.residual", x, y)
}
