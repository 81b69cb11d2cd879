//! Decoder-only transformers: one description that covers the published families, and its graph.
//!
//! Configs of Llama, Mistral, Qwen, Gemma, Phi, GPT-2, GPT-NeoX and DeepSeek differ in a dozen choices, which are the fields
//! of [`Decoder`]. A new family is a reader that fills them (`config/`).

use crate::layers::{
    Attention, LatentAttention, LayerResult, Moe, Rotary, add, attention, cross_entropy, embedding,
    feed_forward, gated_with, ids, latent_attention, layer_norm, linear, moe, mul, parameter, rms_norm,
    scale, slice, soft_cap, tied_logits, unary,
};
use shardwright_graph::{DType, GraphBuilder, Init, Real, TensorId, ops::UnaryFn};

/// A decoder-only transformer with its loss.
#[derive(Clone, Debug)]
pub(crate) struct Decoder {
    pub layers: u64,
    pub hidden: u64,
    pub vocab: u64,
    pub norm: Norm,
    pub attention: AttentionKind,
    /// Layers with a sliding window.
    pub windows: Option<Windows>,
    pub feed_forward: FeedForward,
    pub experts: Option<Experts>,
    /// Single layers without experts, beside those that [`Experts`] leaves out.
    pub dense_layers: Vec<u64>,
    /// The order of norms and residuals in a block.
    pub block: BlockForm,
    /// Rows of a table of learned positions.
    pub positions: Option<u64>,
    /// Whether embedded tokens are multiplied by the root of `hidden`.
    pub scaled_embedding: bool,
    /// Whether the logits use the embedding table.
    pub tied: bool,
    pub logits_bias: bool,
    /// Soft cap of the logits.
    pub logit_cap: Option<f64>,
}

/// A norm over the channels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Norm {
    /// Centred, with a bias; else divided by the root mean square.
    pub centered: bool,
    pub eps: f64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum AttentionKind {
    Heads(Attention),
    Latent(LatentAttention),
}

/// Sliding windows of attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Windows {
    /// Positions that are visible.
    pub size: u64,
    /// Layers before the first with a window.
    pub first: u64,
    /// Every so manieth layer sees all positions; `None`: no layer does.
    pub global_every: Option<u64>,
    /// Base of the rotary embedding of layers with a window, where it differs.
    pub base: Option<f64>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct FeedForward {
    pub inner: u64,
    pub activation: UnaryFn,
    /// `down(f(gate(x)) * up(x))`; else `fc2(f(fc1(x)))`.
    pub gated: bool,
    /// Whether gated products have biases. The others always do.
    pub bias: bool,
}

impl FeedForward {
    /// A gated block without biases.
    pub fn gated(inner: u64, activation: UnaryFn) -> Self {
        Self { inner, activation, gated: true, bias: false }
    }

    /// A plain block.
    pub fn plain(inner: u64, activation: UnaryFn) -> Self {
        Self { inner, activation, gated: false, bias: true }
    }
}

/// Mixtures of experts in place of feed-forward blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Experts {
    /// The experts that tokens choose from.
    pub routed: Moe,
    /// Width inside the experts that every token goes to, together.
    pub shared: Option<u64>,
    /// Whether a gate weighs the shared experts.
    pub shared_gate: bool,
    /// Layers before the first mixture.
    pub first: u64,
    /// Every so manieth layer is a mixture.
    pub every: u64,
}

impl Experts {
    fn at(&self, layer: u64) -> bool {
        layer >= self.first && (layer + 1).is_multiple_of(self.every)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockForm {
    /// Norm, attention, residual; norm, feed-forward, residual.
    Sequential,
    /// The same, with norms after attention and feed-forward too (Gemma 2).
    Sandwich,
    /// Attention and feed-forward of the same input, each after its own norm (GPT-NeoX).
    Parallel,
    /// Attention and feed-forward of the same input, after one norm (Phi).
    ParallelOneNorm,
}

/// Deviation of initial embeddings.
const DEVIATION: f64 = 0.02;

impl Decoder {
    /// Adds the forward pass; returns the loss.
    pub fn build(&self, b: &mut GraphBuilder, dtype: DType, [samples, tokens]: [u64; 2]) -> LayerResult {
        let words = ids(b, "tokens", &[samples, tokens], self.vocab)?;
        let (mut x, table) = embedding(b, "embedding", dtype, words, (self.vocab, self.hidden), DEVIATION)?;
        if self.scaled_embedding {
            x = scale(b, "embedding.scale", x, (self.hidden as f64).sqrt())?;
        }
        if let Some(rows) = self.positions {
            x = learned_positions(b, "position", x, rows)?;
        }
        for layer in 0..self.layers {
            x = b.scoped(&format!("blocks.{layer}"), |b| self.block(b, x, layer))?;
        }
        let x = self.normalise(b, "norm", x)?;
        let mut logits = match self.tied {
            true => tied_logits(b, "logits", x, table)?,
            false => linear(b, "logits", x, self.vocab, self.logits_bias)?,
        };
        if self.tied && self.logits_bias {
            let bias = parameter(b, "logits.bias", dtype, &[self.vocab], Init::Constant(Real(0.0)))?;
            logits = add(b, "logits.add_bias", logits, bias)?;
        }
        if let Some(cap) = self.logit_cap {
            logits = soft_cap(b, "logits", logits, cap)?;
        }
        let labels = ids(b, "labels", &[samples, tokens], self.vocab)?;
        cross_entropy(b, "loss", logits, labels)
    }

    fn normalise(&self, b: &mut GraphBuilder, name: &str, x: TensorId) -> LayerResult {
        match self.norm.centered {
            true => layer_norm(b, name, x, self.norm.eps),
            false => rms_norm(b, name, x, self.norm.eps),
        }
    }

    fn block(&self, b: &mut GraphBuilder, x: TensorId, layer: u64) -> LayerResult {
        let sandwich = self.block == BlockForm::Sandwich;
        let y = self.normalise(b, "attn.norm", x)?;
        let mut seen = b.scoped("attn", |b| self.attend(b, y, layer))?;
        if sandwich {
            seen = self.normalise(b, "attn.post_norm", seen)?;
        }
        let summed = add(b, "attn.residual", x, seen)?;
        let z = match self.block {
            BlockForm::Sequential | BlockForm::Sandwich => self.normalise(b, "mlp.norm", summed)?,
            BlockForm::Parallel => self.normalise(b, "mlp.norm", x)?,
            BlockForm::ParallelOneNorm => y,
        };
        let mut fed = self.feed(b, z, layer)?;
        if sandwich {
            fed = self.normalise(b, "mlp.post_norm", fed)?;
        }
        add(b, "mlp.residual", summed, fed)
    }

    fn attend(&self, b: &mut GraphBuilder, x: TensorId, layer: u64) -> LayerResult {
        let mut cfg = match &self.attention {
            AttentionKind::Latent(latent) => return latent_attention(b, x, latent),
            AttentionKind::Heads(heads) => *heads,
        };
        let local = |windows: &&Windows| {
            layer >= windows.first
                && windows.global_every.is_none_or(|every| !(layer + 1).is_multiple_of(every))
        };
        if let Some(windows) = self.windows.as_ref().filter(local) {
            cfg.scores.window = Some(windows.size);
            let base = |rotary: Rotary| Rotary { base: windows.base.unwrap_or(rotary.base), ..rotary };
            cfg.rotary = cfg.rotary.map(base);
        }
        attention(b, x, x, &cfg)
    }

    fn feed(&self, b: &mut GraphBuilder, x: TensorId, layer: u64) -> LayerResult {
        let FeedForward { inner, activation, gated, bias } = self.feed_forward;
        let mixture = |experts: &Experts| experts.at(layer) && !self.dense_layers.contains(&layer);
        let Some(experts) = self.experts.filter(mixture) else {
            return b.scoped("mlp", |b| match gated {
                true => gated_with(b, x, inner, activation, bias),
                false => feed_forward(b, x, inner, activation),
            });
        };
        let Experts { routed, shared, shared_gate, .. } = experts;
        let mixed = b.scoped("moe", |b| moe(b, x, &routed))?;
        let Some(inner) = shared else { return Ok(mixed) };
        let mut fed = b.scoped("shared", |b| gated_with(b, x, inner, activation, bias))?;
        if shared_gate {
            let gate = linear(b, "shared.gate_weight", x, 1, false)?;
            let gate = unary(b, "shared.sigmoid", UnaryFn::Sigmoid, gate)?;
            fed = mul(b, "shared.weighted", fed, gate)?;
        }
        add(b, "moe.sum", mixed, fed)
    }
}

/// Adds the first rows of a table of learned positions to `x` (`[n, s, c]`).
pub(crate) fn learned_positions(b: &mut GraphBuilder, name: &str, x: TensorId, rows: u64) -> LayerResult {
    let (dtype, tokens, width) = (b.ty(x).dtype, b.shape(x)[1], b.shape(x)[2]);
    let init = Init::Normal(Real(DEVIATION));
    let mut table = parameter(b, &format!("{name}.weight"), dtype, &[rows, width], init)?;
    if tokens < rows {
        table = slice(b, &format!("{name}.rows"), table, 0, 0, tokens)?;
    }
    add(b, name, x, table)
}
