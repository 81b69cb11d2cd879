//! Losses. Each ends in one number: the mean over all predictions.

use super::{LayerResult, add, mul, sub, unary};
use shardwright_graph::{
    BuildError, DType, GraphBuilder, Real, Reduction, TensorId,
    ops::{Cast, CrossEntropy, LogSoftmax, Reduce, SumExp, UnaryFn},
};
use smallvec::smallvec;

/// The mean over all dimensions.
fn mean(b: &mut GraphBuilder, name: &str, x: TensorId) -> LayerResult {
    let op = Reduce::mean((0..b.ty(x).rank()).collect(), b.shape(x));
    b.emit(name, op, &[x])
}

/// Mean cross-entropy of logits `[.., classes]` against labels `[..]`.
///
/// Three ops, so that the class dimension may be split: the largest logit, the sum of exponentials, and each part's
/// contribution to the loss. Logits of 16 bits are widened first, as trainers do: exponentials and means of many losses need
/// more. So a step holds the logits a second time, in `f32`, and so their gradient.
pub fn cross_entropy(b: &mut GraphBuilder, name: &str, logits: TensorId, labels: TensorId) -> LayerResult {
    let (Some(axis), Some(&classes)) = (b.ty(logits).rank().checked_sub(1), b.shape(logits).last()) else {
        return Err(BuildError::Model(format!("`{name}`: logits without classes")));
    };
    let logits = match b.ty(logits).dtype {
        DType::Bf16 | DType::F16 => {
            b.emit(&format!("{name}.widen"), Cast { dtype: DType::F32 }, &[logits])?
        }
        _ => logits,
    };
    let largest = b.emit(&format!("{name}.max"), Reduce::max(smallvec![axis]), &[logits])?;
    let sum = b.emit(&format!("{name}.sum_exp"), SumExp {}, &[logits, largest])?;
    let op = CrossEntropy { base: 0, classes };
    let each = b.emit(&format!("{name}.cross_entropy"), op, &[logits, labels, largest, sum])?;
    mean(b, name, each)
}

/// Mean squared error.
pub fn mse(b: &mut GraphBuilder, name: &str, x: TensorId, target: TensorId) -> LayerResult {
    let difference = sub(b, &format!("{name}.difference"), x, target)?;
    let square = unary(b, &format!("{name}.square"), UnaryFn::Square, difference)?;
    mean(b, name, square)
}

/// Mean binary cross-entropy of logits against labels 0 and 1 (whole numbers of the same shape). The formula cannot
/// overflow: `max(x, 0) - x*y + ln(1 + exp(-|x|))`.
pub fn bce_with_logits(b: &mut GraphBuilder, name: &str, x: TensorId, labels: TensorId) -> LayerResult {
    let part = |what: &str| format!("{name}.{what}");
    let dtype = b.ty(x).dtype;
    let y = b.emit(&part("labels"), Cast { dtype }, &[labels])?;
    let positive = unary(b, &part("relu"), UnaryFn::Relu, x)?;
    let hit = mul(b, &part("hit"), x, y)?;
    let linear = sub(b, &part("linear"), positive, hit)?;
    let size = unary(b, &part("abs"), UnaryFn::Abs, x)?;
    let negated = unary(b, &part("neg"), UnaryFn::Neg, size)?;
    let tail = unary(b, &part("exp"), UnaryFn::Exp, negated)?;
    let one_more = UnaryFn::Affine { scale: Real(1.0), shift: Real(1.0) };
    let tail = unary(b, &part("one_more"), one_more, tail)?;
    let tail = unary(b, &part("log"), UnaryFn::Log, tail)?;
    let each = add(b, &part("each"), linear, tail)?;
    mean(b, name, each)
}

/// SoyBean's loss: an op as large as its input that can be split by samples only (MXNet's `SoftmaxOutput`).
///
/// Here it is a log-softmax over the features, whose axis must stay whole in both passes. The trained number is its
/// negated mean, the cross-entropy against the uniform distribution; a single number adds negligible traffic.
pub fn element_wise_loss(b: &mut GraphBuilder, name: &str, x: TensorId) -> LayerResult {
    let Some(axis) = b.ty(x).rank().checked_sub(1) else {
        return Err(BuildError::Model(format!("`{name}`: a loss of a single number")));
    };
    let each = b.emit(&format!("{name}.log_softmax"), LogSoftmax { axis }, &[x])?;
    let ty = b.ty(each);
    let axes = (0..ty.rank()).collect();
    let op = Reduce { f: Reduction::Sum, axes, scale: Real(-1.0 / ty.shape.elements() as f64) };
    b.emit(name, op, &[each])
}
