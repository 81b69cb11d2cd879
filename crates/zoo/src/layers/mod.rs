//! Building blocks of networks: functions that add a few ops to a [`GraphBuilder`] and return the result tensor.
//!
//! A block creates its weights, names them after itself (`fc1.weight`), and takes its element type from its input.
//! Blocks are compositions: no other crate knows about attention or experts.
//!
//! A dimension keeps its einsum letter from layer to layer, since plans show these letters as factor names:
//!
//! | letter | dimension |
//! |---|---|
//! | `n` | samples |
//! | `s` | positions in a sequence |
//! | `c`, `o` | input and output channels |
//! | `h`, `d` | heads, size of a head |
//! | `e` | experts |
//! | `t`, `b` | time steps and samples of recurrent layers, which are time-major |
//!
//! ```
//! use shardwright_graph::{DType, GraphBuilder, Optimizer, train};
//! use shardwright_zoo::layers;
//!
//! # fn main() -> Result<(), shardwright_graph::BuildError> {
//! let mut b = GraphBuilder::new("classifier");
//! let x = layers::data(&mut b, "x", DType::F32, &[32, 784])?;
//! let y = layers::linear(&mut b, "fc1", x, 128, true)?;
//! let y = layers::relu(&mut b, "relu1", y)?;
//! let logits = layers::linear(&mut b, "fc2", y, 10, true)?;
//! let labels = layers::ids(&mut b, "labels", &[32], 10)?;
//! let loss = layers::cross_entropy(&mut b, "loss", logits, labels)?;
//! b.output(loss);
//! train(&mut b, loss, &Optimizer::sgd(0.01))?;
//! assert_eq!(b.finish().parameters().count(), 4);
//! # Ok(())
//! # }
//! ```

mod attention;
mod conv;
mod dense;
mod latent;
mod loss;
mod moe;
mod norm;
mod position;
mod recurrent;

pub(crate) use attention::turn;
pub use attention::{
    Attention, HeadNorm, Rotary, Scores, attention, biased_attention, dot_product_attention, soft_cap,
};
pub use conv::{Conv2d, Pool2d, avg_pool2d, conv2d, global_avg_pool, max_pool2d};
pub(crate) use dense::tied_logits;
pub use dense::{dense, dropout, embedding, feed_forward, flatten, gated_feed_forward, gated_with, linear};
pub use latent::{LatentAttention, latent_attention};
pub use loss::{bce_with_logits, cross_entropy, element_wise_loss, mse};
pub use moe::{ExpertGroups, Moe, Router, Scoring, moe};
pub use norm::{batch_norm, layer_norm, rms_norm};
pub use position::{rotary, rotary_tables, sinusoids};
pub use recurrent::{LstmOutput, LstmState, Sequence, attend, ids_by_step, last, lstm};

use shardwright_graph::{
    BuildError, DType, GraphBuilder, Init, Real, Role, Shape, TensorId, TensorType,
    ops::{Binary, BinaryFn, Concat, Contract, Fill, Reshape, Slice, Unary, UnaryFn},
};

/// The result tensor of a layer, or why it cannot be built.
pub type LayerResult = Result<TensorId, BuildError>;

/// PyTorch's initial distribution for linear, convolution and recurrent layers: uniform within `1 / sqrt(inputs)`.
pub fn fan_in(inputs: u64) -> Init {
    Init::Uniform(Real(1.0 / (inputs.max(1) as f64).sqrt()))
}

/// A trained weight.
pub fn parameter(b: &mut GraphBuilder, name: &str, dtype: DType, shape: &[u64], init: Init) -> LayerResult {
    b.source(name, TensorType::new(dtype, shape), Role::Parameter, init)
}

/// An input of real numbers. Runs without data draw it from the standard normal distribution.
pub fn data(b: &mut GraphBuilder, name: &str, dtype: DType, shape: &[u64]) -> LayerResult {
    b.source(name, TensorType::new(dtype, shape), Role::Input, Init::Normal(Real(1.0)))
}

/// An input of whole numbers below `below`: token ids, class labels.
pub fn ids(b: &mut GraphBuilder, name: &str, shape: &[u64], below: u64) -> LayerResult {
    b.source(name, TensorType::new(DType::I32, shape), Role::Input, Init::Below(below))
}

/// An einsum of existing tensors.
pub fn einsum(b: &mut GraphBuilder, name: &str, spec: &str, inputs: &[TensorId]) -> LayerResult {
    let op = Contract::parse(spec).map_err(|reason| BuildError::Op {
        name: name.into(),
        kind: "contract",
        reason,
    })?;
    b.emit(name, op, inputs)
}

/// An element-wise function of one tensor.
pub fn unary(b: &mut GraphBuilder, name: &str, f: UnaryFn, x: TensorId) -> LayerResult {
    b.emit(name, Unary { f }, &[x])
}

/// Rectified linear unit.
pub fn relu(b: &mut GraphBuilder, name: &str, x: TensorId) -> LayerResult {
    unary(b, name, UnaryFn::Relu, x)
}

/// `factor * x`.
pub fn scale(b: &mut GraphBuilder, name: &str, x: TensorId, factor: f64) -> LayerResult {
    unary(b, name, UnaryFn::Affine { scale: Real(factor), shift: Real(0.0) }, x)
}

/// The size of the last dimension.
fn last_size(b: &GraphBuilder, layer: &str, x: TensorId) -> Result<u64, BuildError> {
    let scalar = || BuildError::Model(format!("{layer} needs channels, got the single number `{}`", b.ty(x)));
    b.shape(x).last().copied().ok_or_else(scalar)
}

/// The size of the first dimension.
fn first_size(b: &GraphBuilder, layer: &str, x: TensorId) -> Result<u64, BuildError> {
    let scalar =
        || BuildError::Model(format!("`{layer}` needs a dimension, got the single number `{}`", b.ty(x)));
    b.shape(x).first().copied().ok_or_else(scalar)
}

/// `x + y`, with broadcasting.
pub fn add(b: &mut GraphBuilder, name: &str, x: TensorId, y: TensorId) -> LayerResult {
    b.emit(name, Binary { f: BinaryFn::Add }, &[x, y])
}

/// `x - y`, with broadcasting.
pub fn sub(b: &mut GraphBuilder, name: &str, x: TensorId, y: TensorId) -> LayerResult {
    b.emit(name, Binary { f: BinaryFn::Sub }, &[x, y])
}

/// `x * y`, with broadcasting.
pub fn mul(b: &mut GraphBuilder, name: &str, x: TensorId, y: TensorId) -> LayerResult {
    b.emit(name, Binary { f: BinaryFn::Mul }, &[x, y])
}

/// The same elements in another shape.
pub fn reshape(b: &mut GraphBuilder, name: &str, x: TensorId, shape: &[u64]) -> LayerResult {
    b.emit(name, Reshape { shape: Shape::new(shape) }, &[x])
}

/// Concatenates tensors along `axis`.
pub fn concat(b: &mut GraphBuilder, name: &str, parts: &[TensorId], axis: usize) -> LayerResult {
    b.emit(name, Concat { axis }, parts)
}

/// Positions `start..limit` along `axis`.
pub fn slice(
    b: &mut GraphBuilder,
    name: &str,
    x: TensorId,
    axis: usize,
    start: u64,
    limit: u64,
) -> LayerResult {
    let sizes = b.shape(x);
    let at = |i: usize, inside: u64, outside: u64| if i == axis { inside } else { outside };
    let op = Slice {
        start: (0..sizes.len()).map(|i| at(i, start, 0)).collect(),
        limit: sizes.iter().enumerate().map(|(i, &size)| at(i, limit, size)).collect(),
        stride: sizes.iter().map(|_| 1).collect(),
    };
    b.emit(name, op, &[x])
}

/// A tensor filled with one number.
pub fn fill(b: &mut GraphBuilder, name: &str, dtype: DType, shape: &[u64], value: f64) -> LayerResult {
    b.emit(name, Fill { value: Real(value), ty: TensorType::new(dtype, shape) }, &[])
}
