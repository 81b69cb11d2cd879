//! BERT base, uncased (arXiv 1810.04805), with both pre-training heads.
//!
//! Encoder and pooler have the published 109,482,240 parameters; with the masked-language head (transform,
//! norm, output bias; its matrix is the embedding) and the next-sentence head there are 110,106,428. Every
//! position is predicted, not just the masked ones, and sequences have no padding. Learned positions go up
//! to `seq`, so a shorter sequence has fewer of them.

use super::{
    Family, Loss, Options,
    options::{DTYPE, batch, count, dropout, heads, hidden, layers, seq, vocab},
    sum_of_losses,
};
use crate::layers::{
    self, Attention, Built, add, attention, cross_entropy, embedding, feed_forward, ids, layer_norm, linear,
    parameter, reshape, slice, tied_logits, unary,
};
use shardwright_graph::{GraphBuilder, Init, Real, TensorId, ops::UnaryFn};

pub(super) const FAMILY: Family = Family {
    name: "bert",
    summary: "BERT base with masked-language and next-sentence heads: 12 layers of 768",
    tiny: "batch=2,layers=1,hidden=8,heads=2,ffn=12,vocab=11,seq=4,dropout=0",
    options: &[
        batch(32),
        layers(12),
        hidden(768),
        heads(12),
        count("ffn", 3072, 1 << 22, "width inside the feed-forward blocks"),
        vocab(30_522),
        seq(512),
        dropout(0.1),
        DTYPE,
    ],
    build,
};

const EPS: f64 = 1e-12;
const DEVIATION: f64 = 0.02;

fn residual(b: &mut GraphBuilder, name: &str, x: TensorId, y: TensorId, rate: f64) -> Built {
    let y = layers::dropout(b, &format!("{name}.dropout"), y, rate)?;
    let sum = add(b, &format!("{name}.residual"), x, y)?;
    layer_norm(b, &format!("{name}.norm"), sum, EPS)
}

fn build(b: &mut GraphBuilder, o: &Options) -> Loss {
    let (samples, tokens, vocab, hidden) = (o.batch(), o.count("seq"), o.count("vocab"), o.count("hidden"));
    let (dtype, inner, rate) = (o.dtype(), o.count("ffn"), o.dropout());
    let cfg = Attention { dropout: rate, ..Attention::new(o.count("heads"), o.share("hidden", "heads")?) };

    let words = ids(b, "tokens", &[samples, tokens], vocab)?;
    let (word, table) = embedding(b, "embeddings.word", dtype, words, (vocab, hidden), DEVIATION)?;
    let kinds = ids(b, "token_types", &[samples, tokens], 2)?;
    let (kind, _) = embedding(b, "embeddings.type", dtype, kinds, (2, hidden), DEVIATION)?;
    let init = Init::Normal(Real(DEVIATION));
    let position = parameter(b, "embeddings.position.weight", dtype, &[tokens, hidden], init)?;
    let x = add(b, "embeddings.add_type", word, kind)?;
    let x = add(b, "embeddings.add_position", x, position)?;
    let x = layer_norm(b, "embeddings.norm", x, EPS)?;
    let mut x = layers::dropout(b, "embeddings.dropout", x, rate)?;
    for i in 0..o.count("layers") {
        x = b.scoped(&format!("blocks.{i}"), |b| {
            let y = b.scoped("attn", |b| attention(b, x, x, &cfg))?;
            let x = residual(b, "attn", x, y, rate)?;
            let y = b.scoped("mlp", |b| feed_forward(b, x, inner, UnaryFn::Gelu))?;
            residual(b, "mlp", x, y, rate)
        })?;
    }

    let y = linear(b, "mlm.transform", x, hidden, true)?;
    let y = unary(b, "mlm.gelu", UnaryFn::Gelu, y)?;
    let y = layer_norm(b, "mlm.norm", y, EPS)?;
    let logits = tied_logits(b, "mlm.logits", y, table)?;
    let bias = parameter(b, "mlm.bias", dtype, &[vocab], Init::Constant(Real(0.0)))?;
    let logits = add(b, "mlm.add_bias", logits, bias)?;
    let labels = ids(b, "mlm.labels", &[samples, tokens], vocab)?;
    let masked = cross_entropy(b, "mlm.loss", logits, labels)?;

    let first = slice(b, "pooler.first", x, 1, 0, 1)?;
    let first = reshape(b, "pooler.flatten", first, &[samples, hidden])?;
    let pooled = linear(b, "pooler.dense", first, hidden, true)?;
    let pooled = unary(b, "pooler.tanh", UnaryFn::Tanh, pooled)?;
    let logits = linear(b, "nsp.logits", pooled, 2, true)?;
    let labels = ids(b, "nsp.labels", &[samples], 2)?;
    let next = cross_entropy(b, "nsp.loss", logits, labels)?;
    Ok(sum_of_losses(b, masked, next)?)
}
