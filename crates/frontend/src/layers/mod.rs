//! Building blocks of networks: functions that add a few ops to a [`GraphBuilder`] and return the result.
//!
//! A block makes its own weights, named after it (`fc1.weight`), and takes its element type from its input.
//! Einsum letters are chosen so that a dimension keeps its name from layer to layer: `n` samples, `s`
//! positions in a sequence, `c` and `o` channels read and made, `h` heads, `e` experts; recurrent layers,
//! which are time-major, have `t` and `b`. These are the names that people see in plans.
//!
//! Blocks are compositions: nothing below this crate knows about attention or experts.

mod attention;
mod conv;
mod dense;
mod loss;
mod moe;
mod norm;
mod position;
mod recurrent;

pub use attention::{Attention, attention};
pub use conv::{Conv2d, Pool2d, avg_pool2d, conv2d, global_avg_pool, max_pool2d};
pub(crate) use dense::tied_logits;
pub use dense::{dense, dropout, embedding, feed_forward, flatten, gated_feed_forward, linear};
pub use loss::{bce_with_logits, cross_entropy, element_wise_loss, mse};
pub use moe::{Moe, moe};
pub use norm::{batch_norm, layer_norm, rms_norm};
pub use position::{rotary, rotary_tables, sinusoids};
pub use recurrent::{LstmOutput, LstmState, Sequence, attend, ids_by_step, last, lstm};

use shardwright_graph::{
    BuildError, DType, GraphBuilder, Init, Real, Role, Shape, TensorId, TensorType,
    ops::{Binary, BinaryFn, Concat, Contract, Fill, Reshape, Slice, Unary, UnaryFn},
};

/// A tensor, or why it cannot be built.
pub type Built = Result<TensorId, BuildError>;

/// PyTorch's default for the weights and biases of linear, convolution and recurrent layers.
pub fn fan_in(inputs: u64) -> Init {
    Init::Uniform(Real(1.0 / (inputs.max(1) as f64).sqrt()))
}

/// A trained weight.
pub fn parameter(b: &mut GraphBuilder, name: &str, dtype: DType, shape: &[u64], init: Init) -> Built {
    b.source(name, TensorType::new(dtype, shape), Role::Parameter, init)
}

/// Data given anew each step; for want of data, standard normal numbers.
pub fn data(b: &mut GraphBuilder, name: &str, dtype: DType, shape: &[u64]) -> Built {
    b.source(name, TensorType::new(dtype, shape), Role::Input, Init::Normal(Real(1.0)))
}

/// Whole numbers below `below`, given anew each step: token ids, class labels.
pub fn ids(b: &mut GraphBuilder, name: &str, shape: &[u64], below: u64) -> Built {
    b.source(name, TensorType::new(DType::I32, shape), Role::Input, Init::Below(below))
}

/// An einsum of existing tensors.
pub fn einsum(b: &mut GraphBuilder, name: &str, spec: &str, inputs: &[TensorId]) -> Built {
    let op = Contract::parse(spec).map_err(|reason| BuildError::Op {
        name: name.into(),
        kind: "contract",
        reason,
    })?;
    b.emit(name, op, inputs)
}

/// An element-wise function of one tensor.
pub fn unary(b: &mut GraphBuilder, name: &str, f: UnaryFn, x: TensorId) -> Built {
    b.emit(name, Unary { f }, &[x])
}

/// Rectified linear unit.
pub fn relu(b: &mut GraphBuilder, name: &str, x: TensorId) -> Built {
    unary(b, name, UnaryFn::Relu, x)
}

/// `factor * x`.
pub fn scale(b: &mut GraphBuilder, name: &str, x: TensorId, factor: f64) -> Built {
    unary(b, name, UnaryFn::Affine { scale: Real(factor), shift: Real(0.0) }, x)
}

/// `x + y`, with broadcasting.
pub fn add(b: &mut GraphBuilder, name: &str, x: TensorId, y: TensorId) -> Built {
    b.emit(name, Binary { f: BinaryFn::Add }, &[x, y])
}

/// `x - y`, with broadcasting.
pub fn sub(b: &mut GraphBuilder, name: &str, x: TensorId, y: TensorId) -> Built {
    b.emit(name, Binary { f: BinaryFn::Sub }, &[x, y])
}

/// `x * y`, with broadcasting.
pub fn mul(b: &mut GraphBuilder, name: &str, x: TensorId, y: TensorId) -> Built {
    b.emit(name, Binary { f: BinaryFn::Mul }, &[x, y])
}

/// The same elements in another shape.
pub fn reshape(b: &mut GraphBuilder, name: &str, x: TensorId, shape: &[u64]) -> Built {
    b.emit(name, Reshape { shape: Shape::new(shape) }, &[x])
}

/// Several tensors one after the other along `axis`.
pub fn concat(b: &mut GraphBuilder, name: &str, parts: &[TensorId], axis: usize) -> Built {
    b.emit(name, Concat { axis }, parts)
}

/// Positions `start..limit` along `axis`.
pub fn slice(b: &mut GraphBuilder, name: &str, x: TensorId, axis: usize, start: u64, limit: u64) -> Built {
    let sizes = b.shape(x);
    let at = |i: usize, inside: u64, outside: u64| if i == axis { inside } else { outside };
    let op = Slice {
        start: (0..sizes.len()).map(|i| at(i, start, 0)).collect(),
        limit: sizes.iter().enumerate().map(|(i, &size)| at(i, limit, size)).collect(),
        stride: sizes.iter().map(|_| 1).collect(),
    };
    b.emit(name, op, &[x])
}

/// One number everywhere.
pub fn fill(b: &mut GraphBuilder, name: &str, dtype: DType, shape: &[u64], value: f64) -> Built {
    b.emit(name, Fill { value: Real(value), ty: TensorType::new(dtype, shape) }, &[])
}
