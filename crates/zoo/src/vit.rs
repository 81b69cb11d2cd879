//! Vision transformer (arXiv 2010.11929): patches of an image as tokens, a class token, learned positions, a classifier on
//! the class token.

use crate::{
    decoder::learned_positions,
    layers::{
        Attention, Conv2d, LayerResult, add, attention, concat, conv2d, cross_entropy, data, feed_forward,
        ids, layer_norm, linear, parameter, reshape, slice,
    },
};
use shardwright_graph::{
    DType, GraphBuilder, Init, Real, Shape,
    ops::{Broadcast, Transpose, UnaryFn},
};
use smallvec::smallvec;

/// A vision transformer for classification.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Vit {
    pub layers: u64,
    pub hidden: u64,
    pub heads: u64,
    pub inner: u64,
    pub activation: UnaryFn,
    /// Height and width of images and of patches.
    pub image: u64,
    pub patch: u64,
    pub channels: u64,
    pub classes: u64,
    pub eps: f64,
    /// Whether queries, keys and values have biases.
    pub bias: bool,
}

impl Vit {
    /// Adds the forward pass; returns the loss.
    pub fn build(&self, b: &mut GraphBuilder, dtype: DType, samples: u64) -> LayerResult {
        let Self { hidden, image, patch, .. } = *self;
        let side = image / patch;
        let pixels = data(b, "image", dtype, &[samples, self.channels, image, image])?;
        let x = conv2d(b, "patches", pixels, Conv2d::square(hidden, patch).stride(patch).biased())?;
        let x = reshape(b, "patches.rows", x, &[samples, hidden, side * side])?;
        let x = b.emit("patches.tokens", Transpose { perm: smallvec![0, 2, 1] }, &[x])?;
        let class = parameter(b, "class.weight", dtype, &[1, hidden], Init::Constant(Real(0.0)))?;
        let shape = Shape::new(&[samples, 1, hidden]);
        let class = b.emit("class", Broadcast { shape, dims: smallvec![1, 2] }, &[class])?;
        let x = concat(b, "tokens", &[class, x], 1)?;
        let mut x = learned_positions(b, "position", x, side * side + 1)?;
        let cfg = Attention { bias: self.bias, ..Attention::new(self.heads, hidden / self.heads) };
        for layer in 0..self.layers {
            x = b.scoped(&format!("blocks.{layer}"), |b| {
                let y = layer_norm(b, "attn.norm", x, self.eps)?;
                let y = b.scoped("attn", |b| attention(b, y, y, &cfg))?;
                let x = add(b, "attn.residual", x, y)?;
                let y = layer_norm(b, "mlp.norm", x, self.eps)?;
                let y = b.scoped("mlp", |b| feed_forward(b, y, self.inner, self.activation))?;
                add(b, "mlp.residual", x, y)
            })?;
        }
        let x = layer_norm(b, "norm", x, self.eps)?;
        let first = slice(b, "class.first", x, 1, 0, 1)?;
        let first = reshape(b, "class.row", first, &[samples, hidden])?;
        let logits = linear(b, "logits", first, self.classes, true)?;
        let labels = ids(b, "labels", &[samples], self.classes)?;
        cross_entropy(b, "loss", logits, labels)
    }
}
