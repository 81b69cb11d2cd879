//! BERT base, uncased (arXiv 1810.04805), with both pre-training heads.
//!
//! Encoder and pooler have the published 109,482,240 parameters. The masked-language head (transform, norm and output
//! bias; its matrix is the embedding) and the next-sentence head raise that to 110,106,428. Every position is
//! predicted, not only the masked ones, and sequences have no padding. There are `seq` learned positions, so a
//! shorter sequence has fewer.

use super::{
    Family, LossResult, OptionValues,
    options::{ATTENTION, DTYPE, batch, count, dropout, heads, hidden, layers, seq, vocab},
    sum_of_losses,
};
use crate::layers::{
    self, Attention, LayerResult, add, attention, cross_entropy, embedding, feed_forward, ids, layer_norm,
    linear, parameter, reshape, slice, tied_logits, unary,
};
use shardwright_graph::{DType, GraphBuilder, Init, Real, TensorId, ops::UnaryFn};

pub(super) const FAMILY: Family = Family {
    name: "bert",
    summary: "BERT base with masked-language and next-sentence heads: 12 layers of 768",
    tiny: "batch=2,layers=1,hidden=8,heads=2,ffn=12,vocab=11,seq=4,dropout=0",
    transformer: true,
    options: &[
        batch(32),
        layers(12),
        hidden(768),
        heads(12),
        count("ffn", 3072, 1 << 22, "width inside the feed-forward blocks"),
        vocab(30_522),
        seq(512),
        dropout(0.1),
        ATTENTION,
        DTYPE,
    ],
    build,
};

const EPS: f64 = 1e-12;
const DEVIATION: f64 = 0.02;

fn residual(b: &mut GraphBuilder, name: &str, x: TensorId, y: TensorId, rate: f64) -> LayerResult {
    let y = layers::dropout(b, &format!("{name}.dropout"), y, rate)?;
    let sum = add(b, &format!("{name}.residual"), x, y)?;
    layer_norm(b, &format!("{name}.norm"), sum, EPS)
}

fn build(b: &mut GraphBuilder, o: &OptionValues) -> LossResult {
    o.share("hidden", "heads")?;
    let bert = Bert {
        layers: o.count("layers"),
        hidden: o.count("hidden"),
        heads: o.count("heads"),
        inner: o.count("ffn"),
        activation: UnaryFn::Gelu,
        vocab: o.count("vocab"),
        types: 2,
        positions: o.count("seq"),
        dropout: o.dropout(),
        fused: o.fused_attention(),
        next_sentence: true,
    };
    Ok(bert.build(b, o.dtype(), [o.batch(), o.count("seq")])?)
}

/// BERT with the masked-language head, and perhaps the next-sentence head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bert {
    pub layers: u64,
    pub hidden: u64,
    pub heads: u64,
    pub inner: u64,
    pub activation: UnaryFn,
    pub vocab: u64,
    /// Kinds of tokens: first and second sentence.
    pub types: u64,
    /// Rows of the table of learned positions.
    pub positions: u64,
    pub dropout: f64,
    /// Whether attention is one op.
    pub fused: bool,
    /// Whether there are a pooler and a next-sentence head.
    pub next_sentence: bool,
}

impl Bert {
    /// Adds the forward pass; returns the loss.
    pub fn build(&self, b: &mut GraphBuilder, dtype: DType, [samples, tokens]: [u64; 2]) -> LayerResult {
        let Self { hidden, vocab, inner, dropout: rate, .. } = *self;
        let cfg = Attention::new(self.heads, hidden / self.heads).dropout(rate).fused(self.fused);

        let words = ids(b, "tokens", &[samples, tokens], vocab)?;
        let (word, table) = embedding(b, "embeddings.word", dtype, words, (vocab, hidden), DEVIATION)?;
        let kinds = ids(b, "token_types", &[samples, tokens], self.types)?;
        let (kind, _) = embedding(b, "embeddings.type", dtype, kinds, (self.types, hidden), DEVIATION)?;
        let init = Init::Normal(Real(DEVIATION));
        let mut position =
            parameter(b, "embeddings.position.weight", dtype, &[self.positions, hidden], init)?;
        if tokens < self.positions {
            position = slice(b, "embeddings.position.rows", position, 0, 0, tokens)?;
        }
        let x = add(b, "embeddings.add_type", word, kind)?;
        let x = add(b, "embeddings.add_position", x, position)?;
        let x = layer_norm(b, "embeddings.norm", x, EPS)?;
        let mut x = layers::dropout(b, "embeddings.dropout", x, rate)?;
        for i in 0..self.layers {
            x = b.scoped(&format!("blocks.{i}"), |b| {
                let y = b.scoped("attn", |b| attention(b, x, x, &cfg))?;
                let x = residual(b, "attn", x, y, rate)?;
                let y = b.scoped("mlp", |b| feed_forward(b, x, inner, self.activation))?;
                residual(b, "mlp", x, y, rate)
            })?;
        }

        let y = linear(b, "mlm.transform", x, hidden, true)?;
        let y = unary(b, "mlm.gelu", self.activation, y)?;
        let y = layer_norm(b, "mlm.norm", y, EPS)?;
        let logits = tied_logits(b, "mlm.logits", y, table)?;
        let bias = parameter(b, "mlm.bias", dtype, &[vocab], Init::Constant(Real(0.0)))?;
        let logits = add(b, "mlm.add_bias", logits, bias)?;
        let labels = ids(b, "mlm.labels", &[samples, tokens], vocab)?;
        let masked = cross_entropy(b, "mlm.loss", logits, labels)?;

        if !self.next_sentence {
            return Ok(masked);
        }
        let first = slice(b, "pooler.first", x, 1, 0, 1)?;
        let first = reshape(b, "pooler.flatten", first, &[samples, hidden])?;
        let pooled = linear(b, "pooler.dense", first, hidden, true)?;
        let pooled = unary(b, "pooler.tanh", UnaryFn::Tanh, pooled)?;
        let logits = linear(b, "nsp.logits", pooled, 2, true)?;
        let labels = ids(b, "nsp.labels", &[samples], 2)?;
        let next = cross_entropy(b, "nsp.loss", logits, labels)?;
        sum_of_losses(b, masked, next)
    }
}
