//! T5 (arXiv 1910.10683): an encoder and a decoder with relative position biases, RMS norms and no biases. Version 1.1 has gated
//! feed-forward blocks and logits of their own.

use crate::layers::{
    Attention, LayerResult, add, biased_attention, cross_entropy, embedding, fill, gated_with, ids, linear,
    parameter, rms_norm, scale, sub, tied_logits, unary,
};
use shardwright_graph::{
    DType, GraphBuilder, Init, Real, TensorId, TensorType,
    ops::{Binary, BinaryFn, Cast, Compare, CompareFn, Gather, Iota, Select, UnaryFn},
};

/// An encoder-decoder transformer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct T5 {
    pub layers: u64,
    pub decoder_layers: u64,
    pub hidden: u64,
    pub heads: u64,
    pub head_size: u64,
    pub inner: u64,
    pub activation: UnaryFn,
    pub gated: bool,
    pub vocab: u64,
    /// Rows of the table of relative position biases, and the distance from which all positions share the last.
    pub buckets: u64,
    pub farthest: u64,
    pub tied: bool,
    pub eps: f64,
}

impl T5 {
    /// Adds the forward pass; returns the loss.
    pub fn build(&self, b: &mut GraphBuilder, dtype: DType, [samples, tokens]: [u64; 2]) -> LayerResult {
        let table = (self.vocab, self.hidden);
        let source = ids(b, "tokens", &[samples, tokens], self.vocab)?;
        let (mut x, words) = embedding(b, "embedding", dtype, source, table, 1.0)?;
        // Scores are not scaled: initial weights take that into account.
        let mut cfg = Attention::new(self.heads, self.head_size).unbiased();
        cfg.scores.scale = Some(1.0);
        let bias = b.scoped("encoder.position", |b| self.position_bias(b, dtype, tokens, true))?;
        for layer in 0..self.layers {
            x = b.scoped(&format!("encoder.{layer}"), |b| {
                let x = self.attend(b, "attn", [x, x], &cfg, Some(bias))?;
                self.feed(b, x)
            })?;
        }
        let memory = rms_norm(b, "encoder.norm", x, self.eps)?;

        let target = ids(b, "target", &[samples, tokens], self.vocab)?;
        let rows = Gather { axis: 0, base: 0, extent: self.vocab };
        let mut x = b.emit("decoder.embedding", rows, &[words, target])?;
        let bias = b.scoped("decoder.position", |b| self.position_bias(b, dtype, tokens, false))?;
        for layer in 0..self.decoder_layers {
            x = b.scoped(&format!("decoder.{layer}"), |b| {
                let x = self.attend(b, "attn", [x, x], &cfg.causal(), Some(bias))?;
                let x = self.attend(b, "cross", [x, memory], &cfg, None)?;
                self.feed(b, x)
            })?;
        }
        let x = rms_norm(b, "decoder.norm", x, self.eps)?;
        let logits = if self.tied {
            let x = scale(b, "decoder.scale", x, 1.0 / (self.hidden as f64).sqrt())?;
            tied_logits(b, "logits", x, words)?
        } else {
            linear(b, "logits", x, self.vocab, false)?
        };
        let labels = ids(b, "labels", &[samples, tokens], self.vocab)?;
        cross_entropy(b, "loss", logits, labels)
    }

    /// Norm, attention, residual. `memory` is `x` itself in self-attention, and is normalised with it.
    fn attend(
        &self,
        b: &mut GraphBuilder,
        name: &str,
        [x, memory]: [TensorId; 2],
        cfg: &Attention,
        bias: Option<TensorId>,
    ) -> LayerResult {
        let y = rms_norm(b, &format!("{name}.norm"), x, self.eps)?;
        let memory = if memory == x { y } else { memory };
        let y = b.scoped(name, |b| biased_attention(b, y, memory, cfg, bias))?;
        add(b, &format!("{name}.residual"), x, y)
    }

    fn feed(&self, b: &mut GraphBuilder, x: TensorId) -> LayerResult {
        let y = rms_norm(b, "mlp.norm", x, self.eps)?;
        let y = b.scoped("mlp", |b| {
            if self.gated {
                return gated_with(b, y, self.inner, self.activation, false);
            }
            let y = linear(b, "fc1", y, self.inner, false)?;
            let y = unary(b, "activation", self.activation, y)?;
            linear(b, "fc2", y, self.hidden, false)
        })?;
        add(b, "mlp.residual", x, y)
    }

    /// The bias of every pair of positions, `[h, q, k]`: a row of a learned table by the distance's bucket. Near distances have
    /// a bucket each, farther ones share buckets whose sizes grow.
    fn position_bias(&self, b: &mut GraphBuilder, dtype: DType, tokens: u64, both_ways: bool) -> LayerResult {
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let iota = |shape, axis| Iota { ty: TensorType::new(wide, shape), axis, start: 0 };
        let query = b.emit("query", iota([tokens, 1], 0), &[])?;
        let key = b.emit("key", iota([1, tokens], 1), &[])?;
        let behind = sub(b, "behind", query, key)?;
        let sides = if both_ways { 2 } else { 1 };
        let buckets = self.buckets / sides;
        let distance = match both_ways {
            true => unary(b, "distance", UnaryFn::Abs, behind)?,
            false => unary(b, "distance", UnaryFn::Relu, behind)?,
        };
        let exact = (buckets / 2).max(1) as f64;
        let growth = (buckets as f64 - exact) / (self.farthest as f64 / exact).max(1.0 + 1e-9).ln();
        // Far: exact + growth * ln(distance / exact), at most the last bucket. The maximum keeps the logarithm finite.
        let one = fill(b, "one", wide, &[], 1.0)?;
        let positive = b.emit("positive", Binary { f: BinaryFn::Max }, &[distance, one])?;
        let log = unary(b, "log", UnaryFn::Log, positive)?;
        let far = UnaryFn::Affine { scale: Real(growth), shift: Real(exact - growth * exact.ln()) };
        let far = unary(b, "far", far, log)?;
        let far = unary(b, "far.floor", UnaryFn::Floor, far)?;
        let last = fill(b, "last", wide, &[], buckets as f64 - 1.0)?;
        let far = b.emit("far.bounded", Binary { f: BinaryFn::Min }, &[far, last])?;
        let limit = fill(b, "exact", wide, &[], exact)?;
        let near = b.emit("near", Compare { f: CompareFn::Lt }, &[distance, limit])?;
        let mut bucket = b.emit("bucket", Select {}, &[near, distance, far])?;
        if both_ways {
            // Keys after the query have the second half of the table.
            let ahead = unary(b, "ahead", UnaryFn::Neg, behind)?;
            let ahead = unary(b, "ahead.sign", UnaryFn::Sign, ahead)?;
            let ahead = unary(b, "ahead.positive", UnaryFn::Relu, ahead)?;
            let offset = scale(b, "ahead.offset", ahead, buckets as f64)?;
            bucket = add(b, "bucket.side", bucket, offset)?;
        }
        let bucket = b.emit("bucket.index", Cast { dtype: DType::I32 }, &[bucket])?;
        let table = parameter(b, "weight", dtype, &[self.heads, self.buckets], Init::Normal(Real(1.0)))?;
        b.emit("bias", Gather { axis: 1, base: 0, extent: self.buckets }, &[table, bucket])
    }
}
