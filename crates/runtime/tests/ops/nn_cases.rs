//! Generators of the ops of network layers: softmax, losses, norms, dropout, updates.

use crate::{
    case::{Case, Rng},
    cases::{NORMAL, case, f64s},
};
use shardwright_graph::{
    DType, Init, Real, Shape, TensorType,
    ops::{
        Adam, CrossEntropy, CrossEntropyGrad, Dropout, LogSoftmax, LogSoftmaxGrad, Momentum, NormGradInput,
        NormGradParams, NormGradStats, Normalize, Reduce, Sgd, Softmax, SoftmaxGrad, SumExp, Variance,
    },
};

type Input = (TensorType, Init);

fn positive(shape: impl Into<Shape>) -> Input {
    (TensorType::new(DType::F64, shape), Init::Constant(Real(1.3)))
}

fn axis(rng: &mut Rng, shape: &[u64]) -> usize {
    rng.between(0, shape.len() as u64 - 1) as usize
}

fn repeat(rng: &mut Rng, low: u64, count: usize) -> (Vec<u64>, Vec<Input>) {
    let shape = rng.shape(low, 3);
    let inputs = vec![f64s(&shape[..]); count];
    (shape, inputs)
}

pub fn softmax(rng: &mut Rng) -> Case {
    let (shape, inputs) = repeat(rng, 1, 1);
    case(Softmax { axis: axis(rng, &shape) }, inputs)
}

pub fn softmax_grad(rng: &mut Rng) -> Case {
    let (shape, inputs) = repeat(rng, 1, 2);
    case(SoftmaxGrad { axis: axis(rng, &shape) }, inputs)
}

pub fn log_softmax(rng: &mut Rng) -> Case {
    let (shape, inputs) = repeat(rng, 1, 1);
    case(LogSoftmax { axis: axis(rng, &shape) }, inputs)
}

pub fn log_softmax_grad(rng: &mut Rng) -> Case {
    let (shape, inputs) = repeat(rng, 1, 2);
    case(LogSoftmaxGrad { axis: axis(rng, &shape) }, inputs)
}

pub fn sum_exp(rng: &mut Rng) -> Case {
    let shape = rng.shape(1, 3);
    case(SumExp {}, vec![f64s(&shape[..]), f64s(&shape[..shape.len() - 1])])
}

/// Logits, labels, maxima and sums; the logits are a part of all classes now and then.
fn loss_inputs(rng: &mut Rng) -> (u64, u64, Vec<Input>) {
    let shape = rng.shape(1, 3);
    let (rows, held) = (&shape[..shape.len() - 1], shape[shape.len() - 1]);
    let (base, after) = if rng.flip() { (0, 0) } else { (rng.between(0, 3), rng.between(0, 3)) };
    let classes = base + held + after;
    let labels = TensorType::new(rng.pick(&[DType::I32, DType::I64]), rows);
    let inputs = vec![f64s(&shape[..]), (labels, Init::Below(classes)), f64s(rows), positive(rows)];
    (base, classes, inputs)
}

pub fn cross_entropy(rng: &mut Rng) -> Case {
    let (base, classes, inputs) = loss_inputs(rng);
    case(CrossEntropy { base, classes }, inputs)
}

pub fn cross_entropy_grad(rng: &mut Rng) -> Case {
    let (base, classes, mut inputs) = loss_inputs(rng);
    inputs.push((inputs[2].0.clone(), NORMAL));
    case(CrossEntropyGrad { base, classes }, inputs)
}

pub fn variance(rng: &mut Rng) -> Case {
    let shape = rng.shape(1, 4);
    let axes = (0..shape.len()).filter(|_| rng.flip()).collect();
    let op = Variance::over(axes, rng.flip(), &shape);
    let mut inputs = vec![f64s(&shape[..])];
    if op.centered {
        inputs.push(f64s(Shape::new(&shape).without(&op.axes)));
    }
    case(op, inputs)
}

/// Any norm: layer, batch and RMS norms, and others that no network has.
fn norm(rng: &mut Rng) -> (Normalize, Shape) {
    let shape = rng.shape(2, 4);
    let eps = 1e-3;
    let norm = match rng.between(0, 4) {
        0 => Normalize::layer(&shape, eps),
        1 => Normalize::batch(&shape, eps),
        2 => Normalize::rms(&shape, eps),
        _ => {
            let axes: Vec<usize> = (0..shape.len()).filter(|_| rng.flip()).collect();
            Normalize {
                params: (0..shape.len()).filter(|_| rng.flip()).collect(),
                centered: rng.flip(),
                scaled: rng.flip(),
                shifted: rng.flip(),
                eps: Real(eps),
                count: Reduce::mean(axes.clone().into(), &shape).scale.0.recip().round() as u64,
                axes: axes.into(),
            }
        }
    };
    (norm, Shape::new(&shape))
}

/// The norm's inputs up to the variance, preceded by `first`, and followed by gamma if the norm has one.
fn norm_inputs(norm: &Normalize, shape: &Shape, gradient: bool, gamma: bool) -> Vec<Input> {
    let stats = shape.without(&norm.axes);
    let mut inputs = vec![f64s(shape.clone()); 1 + usize::from(gradient)];
    if norm.centered {
        inputs.push(f64s(stats.clone()));
    }
    inputs.push(positive(stats));
    if gamma && norm.scaled {
        inputs.push(f64s(parameter_shape(norm, shape)));
    }
    inputs
}

fn parameter_shape(norm: &Normalize, shape: &Shape) -> Shape {
    norm.params.iter().map(|&d| shape[d]).collect()
}

pub fn normalize(rng: &mut Rng) -> Case {
    let (norm, shape) = norm(rng);
    let mut inputs = norm_inputs(&norm, &shape, false, true);
    if norm.shifted {
        inputs.push(f64s(parameter_shape(&norm, &shape)));
    }
    case(norm, inputs)
}

pub fn norm_grad_stats(rng: &mut Rng) -> Case {
    let (norm, shape) = norm(rng);
    let inputs = norm_inputs(&norm, &shape, true, true);
    case(NormGradStats { norm }, inputs)
}

pub fn norm_grad_params(rng: &mut Rng) -> Case {
    let (mut norm, shape) = norm(rng);
    norm.scaled |= !norm.shifted;
    let inputs = norm_inputs(&norm, &shape, true, false);
    case(NormGradParams { norm }, inputs)
}

pub fn norm_grad_input(rng: &mut Rng) -> Case {
    let (norm, shape) = norm(rng);
    let mut inputs = norm_inputs(&norm, &shape, true, true);
    let stats = f64s(shape.without(&norm.axes));
    inputs.extend(vec![stats; 1 + usize::from(norm.centered)]);
    case(NormGradInput { norm }, inputs)
}

pub fn dropout(rng: &mut Rng) -> Case {
    let shape = rng.shape(0, 4);
    let mut op = Dropout::new(rng.pick(&[0.0, 0.1, 0.5, 0.9]), rng.next(), &Shape::new(&shape));
    if rng.flip() {
        // Already a part of something larger.
        for d in 0..shape.len() {
            op.origin[d] = rng.between(0, 2);
            op.whole.0[d] += op.origin[d] + rng.between(0, 2);
        }
    }
    case(op, vec![f64s(&shape[..])])
}

pub fn sgd(rng: &mut Rng) -> Case {
    let (_, inputs) = repeat(rng, 0, 2);
    case(Sgd { lr: Real(0.1) }, inputs)
}

pub fn momentum(rng: &mut Rng) -> Case {
    let (_, inputs) = repeat(rng, 0, 3);
    case(Momentum { lr: Real(0.1), momentum: Real(0.9) }, inputs)
}

pub fn adam(rng: &mut Rng) -> Case {
    let (shape, mut inputs) = repeat(rng, 0, 3);
    inputs.push(positive(&shape[..]));
    case(Adam { lr: Real(0.1), beta1: Real(0.9), beta2: Real(0.99), eps: Real(1e-3) }, inputs)
}
