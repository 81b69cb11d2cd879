//! Softmax, losses, norms, dropout and updates against their formulas, one number at a time. Rows are long enough for
//! whole vectors and a remainder.

use crate::case::assert_close;
use shardwright_graph::{
    DType, Init, Op, Real, Region, Role, Shape, Tensor, TensorType,
    ops::{
        Adam, Cast, CrossEntropy, CrossEntropyGrad, Dropout, LogSoftmax, LogSoftmaxGrad, Momentum,
        NormGradInput, NormGradParams, NormGradStats, Normalize, Reduce, Sgd, Softmax, SoftmaxGrad, SumExp,
    },
};
use shardwright_runtime::{Context, HostTensor as Value, KernelError, initial_value, kernels::evaluate};

/// Row lengths around the width of a vector and multiples of it.
const LENGTHS: [u64; 8] = [1, 2, 15, 16, 17, 33, 64, 100];

fn random(name: &str, shape: &[u64]) -> Value {
    let ty = TensorType::new(DType::F64, shape);
    let init = Some(Init::Normal(Real(1.0)));
    initial_value(7, &Tensor { name: name.into(), ty, role: Role::Input, producer: None, init })
}

fn run(op: impl Into<Op>, inputs: &[&Value]) -> Vec<Value> {
    evaluate(&op.into(), inputs, &mut Context::default()).unwrap()
}

fn to_f32(value: &Value) -> Value {
    if value.ty().dtype != DType::F64 {
        return value.clone();
    }
    run(Cast { dtype: DType::F32 }, &[value]).remove(0)
}

/// Asserts that the op gives these outputs in f64, and nearly so in f32.
fn check(op: impl Into<Op>, inputs: &[&Value], expected: &[Value]) {
    let op = op.into();
    let outputs = run(op.clone(), inputs);
    assert_eq!(outputs.len(), expected.len(), "{op:?}");
    for (o, e) in outputs.iter().zip(expected) {
        assert_close(e, o, 1e-12, &format!("{op:?} in f64"));
    }
    let narrow: Vec<Value> = inputs.iter().map(|v| to_f32(v)).collect();
    let outputs = run(op.clone(), &narrow.iter().collect::<Vec<_>>());
    for (o, e) in outputs.iter().zip(expected) {
        let wide = run(Cast { dtype: DType::F64 }, &[o]).remove(0);
        assert_close(e, &wide, 5e-6, &format!("{op:?} in f32"));
    }
}

/// `[a, n, b]` seen as `a * b` rows of `n` elements: maps each row of the inputs to a row of the result.
fn by_rows(shape: [u64; 3], inputs: &[&Value], f: impl Fn(&[Vec<f64>]) -> Vec<f64>) -> Value {
    let [a, n, b] = shape.map(|s| s as usize);
    let data: Vec<Vec<f64>> = inputs.iter().map(|v| v.to_f64_vec()).collect();
    let mut result = vec![0.0; a * n * b];
    for i in 0..a {
        for k in 0..b {
            let at = |j: usize| (i * n + j) * b + k;
            let rows: Vec<Vec<f64>> = data.iter().map(|d| (0..n).map(|j| d[at(j)]).collect()).collect();
            for (j, y) in f(&rows).into_iter().enumerate() {
                result[at(j)] = y;
            }
        }
    }
    Value::from_vec(shape, result)
}

fn naive_softmax(x: &[f64]) -> Vec<f64> {
    let total: f64 = x.iter().map(|x| x.exp()).sum();
    x.iter().map(|x| x.exp() / total).collect()
}

#[test]
fn softmax_and_its_gradients_follow_their_formulas_along_any_dimension() {
    for n in LENGTHS {
        for shape in [[3, n, 1], [2, n, 5], [1, 4, n]] {
            let (x, dy) = (random("x", &shape), random("dy", &shape));
            let y = by_rows(shape, &[&x], |r| naive_softmax(&r[0]));
            let log = by_rows(shape, &[&x], |r| naive_softmax(&r[0]).iter().map(|y| y.ln()).collect());
            check(Softmax { axis: 1 }, &[&x], std::slice::from_ref(&y));
            check(LogSoftmax { axis: 1 }, &[&x], std::slice::from_ref(&log));
            let dx = by_rows(shape, &[&y, &dy], |r| {
                let sum: f64 = r[0].iter().zip(&r[1]).map(|(y, dy)| y * dy).sum();
                r[0].iter().zip(&r[1]).map(|(y, dy)| y * (dy - sum)).collect()
            });
            check(SoftmaxGrad { axis: 1 }, &[&y, &dy], &[dx]);
            let dx = by_rows(shape, &[&log, &dy], |r| {
                let sum: f64 = r[1].iter().sum();
                r[0].iter().zip(&r[1]).map(|(y, dy)| dy - y.exp() * sum).collect()
            });
            check(LogSoftmaxGrad { axis: 1 }, &[&log, &dy], &[dx]);
        }
    }
}

#[test]
fn softmax_survives_numbers_whose_exponentials_do_not() {
    let x = Value::from_vec([3], vec![1e4f32, 1e4, -1e4]);
    assert_eq!(run(Softmax { axis: 0 }, &[&x])[0].to_f64_vec(), [0.5, 0.5, 0.0]);
    let log = run(LogSoftmax { axis: 0 }, &[&x]).remove(0).to_f64_vec();
    assert!((log[0] + 2f64.ln()).abs() < 1e-6 && (log[2] + 2e4).abs() < 1.0, "{log:?}");
    let masked = Value::from_vec([3], vec![0.0f32, f32::NEG_INFINITY, f32::NEG_INFINITY]);
    assert_eq!(run(Softmax { axis: 0 }, &[&masked])[0].to_f64_vec(), [1.0, 0.0, 0.0]);
}

fn statistics(logits: &Value) -> (Value, Value) {
    let m = run(Reduce::max([1].into_iter().collect()), &[logits]).remove(0);
    let s = run(SumExp {}, &[logits, &m]).remove(0);
    (m, s)
}

#[test]
fn cross_entropy_is_the_negative_logarithm_of_the_labels_softmax() {
    for n in LENGTHS {
        let logits = random("logits", &[6, n]);
        let dloss = random("dloss", &[6]);
        let labels: Vec<i64> = (0..6).map(|i| (i * 37 + 5) % n as i64).collect();
        let (m, s) = statistics(&logits);
        let rows: Vec<Vec<f64>> = logits.to_f64_vec().chunks(n as usize).map(naive_softmax).collect();
        let loss: Vec<f64> = rows.iter().zip(&labels).map(|(r, &l)| -r[l as usize].ln()).collect();
        let scale = dloss.to_f64_vec();
        let mut gradient = vec![];
        for (i, row) in rows.iter().enumerate() {
            for (j, y) in row.iter().enumerate() {
                gradient.push((y - if j as i64 == labels[i] { 1.0 } else { 0.0 }) * scale[i]);
            }
        }
        let narrow = Value::from_vec([6], labels.iter().map(|&l| l as i32).collect());
        for labels in [Value::from_vec([6], labels), narrow] {
            let op = CrossEntropy { base: 0, classes: n };
            check(op, &[&logits, &labels, &m, &s], &[Value::from_vec([6], loss.clone())]);
            let op = CrossEntropyGrad { base: 0, classes: n };
            let expected = Value::from_vec([6, n], gradient.clone());
            check(op, &[&logits, &labels, &m, &s, &dloss], &[expected]);
        }
    }
}

#[test]
fn labels_that_no_class_has_are_refused() {
    let logits = random("logits", &[2, 5]);
    let (m, s) = statistics(&logits);
    for bad in [-1i64, 5, i64::MIN, i64::MAX] {
        let labels = Value::from_vec([2], vec![4, bad]);
        let inputs = [&logits, &labels, &m, &s];
        let op = CrossEntropy { base: 0, classes: 5 }.into();
        let error = evaluate(&op, &inputs, &mut Context::default()).unwrap_err();
        assert_eq!(error, KernelError::BadValue(format!("id {bad} at place 1 is outside 0..5")));
        let op = CrossEntropyGrad { base: 0, classes: 5 }.into();
        assert!(evaluate(&op, &[&logits, &labels, &m, &s, &m], &mut Context::default()).is_err());
    }
    // A class that another part holds is not an error, and adds nothing.
    let elsewhere = Value::from_vec([2], vec![0i64, 9]);
    let op = CrossEntropy { base: 2, classes: 10 };
    assert_eq!(run(op, &[&logits, &elsewhere, &m, &s])[0].to_f64_vec(), [0.0, 0.0]);
}

/// The statistics and every result of a norm by its formulas, for `x` seen as groups of positions that share
/// a statistic (`group`) and a parameter (`param`).
struct NaiveNorm {
    mean: Vec<f64>,
    var: Vec<f64>,
    y: Vec<f64>,
    dx: Vec<f64>,
    dgamma: Vec<f64>,
    dbeta: Vec<f64>,
}

fn naive_norm(
    [x, dy, gamma, beta]: [&[f64]; 4],
    groups: usize,
    centered: bool,
    eps: f64,
    group: impl Fn(usize) -> usize,
    param: impl Fn(usize) -> usize,
) -> NaiveNorm {
    let count = (x.len() / groups) as f64;
    let mean_by_group = |f: &dyn Fn(usize) -> f64| {
        let mut sums = vec![0.0; groups];
        (0..x.len()).for_each(|i| sums[group(i)] += f(i) / count);
        sums
    };
    let mean = if centered { mean_by_group(&|i| x[i]) } else { vec![0.0; groups] };
    let var = mean_by_group(&|i| (x[i] - mean[group(i)]).powi(2));
    let xhat: Vec<f64> =
        (0..x.len()).map(|i| (x[i] - mean[group(i)]) / (var[group(i)] + eps).sqrt()).collect();
    let g: Vec<f64> = (0..x.len()).map(|i| dy[i] * gamma[param(i)]).collect();
    let s1 = if centered { mean_by_group(&|i| g[i]) } else { vec![0.0; groups] };
    let s2 = mean_by_group(&|i| g[i] * xhat[i]);
    let y = (0..x.len()).map(|i| xhat[i] * gamma[param(i)] + beta[param(i)]).collect();
    let dx = (0..x.len())
        .map(|i| (g[i] - s1[group(i)] - xhat[i] * s2[group(i)]) / (var[group(i)] + eps).sqrt())
        .collect();
    let (mut dgamma, mut dbeta) = (vec![0.0; gamma.len()], vec![0.0; gamma.len()]);
    for i in 0..x.len() {
        dgamma[param(i)] += dy[i] * xhat[i];
        dbeta[param(i)] += dy[i];
    }
    NaiveNorm { mean, var, y, dx, dgamma, dbeta }
}

/// Runs all ops of a norm and compares with its formulas.
fn check_norm(
    norm: &Normalize,
    shape: &[u64],
    group: impl Fn(usize) -> usize,
    param: impl Fn(usize) -> usize,
) {
    let (x, dy) = (random("x", shape), random("dy", shape));
    let params: Vec<u64> = norm.params.iter().map(|&d| shape[d]).collect();
    let stats = Shape::new(shape).without(&norm.axes);
    let (gamma, mut beta) = (random("gamma", &params), random("beta", &params));
    if !norm.shifted {
        beta = Value::zeros(&beta.ty());
    }
    let [xs, dys, gammas, betas] = [&x, &dy, &gamma, &beta].map(Value::to_f64_vec);
    let groups = stats.elements() as usize;
    let naive = naive_norm([&xs, &dys, &gammas, &betas], groups, norm.centered, norm.eps.0, group, param);
    let as_stats = |v: &[f64]| Value::from_vec(stats.clone(), v.to_vec());
    let as_params = |v: &[f64]| Value::from_vec(&params[..], v.to_vec());
    let (mean, var) = (as_stats(&naive.mean), as_stats(&naive.var));
    let means: Vec<&Value> = norm.centered.then_some(&mean).into_iter().collect();
    let with = |first: &[&Value], last: &[&Value]| -> Vec<Value> {
        first.iter().chain(&means).copied().chain([&var]).chain(last.iter().copied()).cloned().collect()
    };
    let check = |op: Op, inputs: &[Value], expected: &[Value]| {
        check(op, &inputs.iter().collect::<Vec<_>>(), expected);
    };
    let mut inputs = vec![x.clone()];
    inputs.extend(means.iter().map(|&m| m.clone()));
    check(norm.variance().into(), &inputs, std::slice::from_ref(&var));
    let betas: Vec<&Value> = norm.shifted.then_some(&beta).into_iter().collect();
    let parameters: Vec<&Value> = [&gamma].into_iter().chain(betas).collect();
    check(norm.clone().into(), &with(&[&x], &parameters), &[Value::from_vec(shape, naive.y)]);
    let mut grads = vec![as_params(&naive.dgamma)];
    if norm.shifted {
        grads.push(as_params(&naive.dbeta));
    }
    check(NormGradParams { norm: norm.clone() }.into(), &with(&[&dy, &x], &[]), &grads);
    let inputs = with(&[&dy, &x], &[&gamma]);
    let sums = run(NormGradStats { norm: norm.clone() }, &inputs.iter().collect::<Vec<_>>());
    let inputs: Vec<Value> = inputs.into_iter().chain(sums).collect();
    check(NormGradInput { norm: norm.clone() }.into(), &inputs, &[Value::from_vec(shape, naive.dx)]);
}

#[test]
fn layer_and_rms_norm_follow_their_formulas() {
    for n in LENGTHS {
        let shape = [3, 2, n];
        for norm in [Normalize::layer(&shape, 1e-3), Normalize::rms(&shape, 1e-3)] {
            check_norm(&norm, &shape, |i| i / n as usize, |i| i % n as usize);
        }
    }
}

#[test]
fn batch_norm_follows_its_formula_on_images_and_on_vectors() {
    for n in LENGTHS {
        let shape = [3, 4, n, 2];
        let channel = |i: usize| i / (2 * n as usize) % 4;
        check_norm(&Normalize::batch(&shape, 1e-3), &shape, channel, channel);
        let shape = [5, n];
        let channel = |i: usize| i % n as usize;
        check_norm(&Normalize::batch(&shape, 1e-3), &shape, channel, channel);
    }
}

fn ones(shape: &[u64]) -> Value {
    Value::from_vec(shape, vec![1.0f32; shape.iter().product::<u64>() as usize])
}

fn dropped(op: &Dropout, step: u64, x: &Value) -> Vec<f64> {
    let mut context = Context { step, ..Context::default() };
    evaluate(&op.clone().into(), &[x], &mut context).unwrap()[0].to_f64_vec()
}

#[test]
fn dropout_drops_at_its_rate_and_keeps_the_mean() {
    let shape = [500, 401];
    let count = (500 * 401) as f64;
    for rate in [0.0, 0.1, 0.5, 0.9] {
        let op = Dropout::new(rate, 3, &shape.into());
        let y = dropped(&op, 0, &ones(&shape));
        let zeros = y.iter().filter(|&&y| y == 0.0).count() as f64;
        let deviation = (count * rate * (1.0 - rate)).sqrt();
        assert!((zeros - rate * count).abs() <= 5.0 * deviation, "{zeros} zeros at rate {rate}");
        let kept = (1.0 / (1.0 - rate)) as f32;
        assert!(y.iter().all(|&y| y == 0.0 || y == f64::from(kept)));
        // Neighbours along both dimensions are dropped independently.
        for apart in [1, 401, 402] {
            let both = y.iter().zip(&y[apart..]).filter(|(a, b)| **a == 0.0 && **b == 0.0).count() as f64;
            let expected = rate * rate * (count - apart as f64);
            let deviation = (count * rate * rate).sqrt().max(1e-9);
            assert!((both - expected).abs() <= 6.0 * deviation, "{both} pairs {apart} apart at rate {rate}");
        }
    }
}

#[test]
fn dropout_masks_depend_on_seed_and_step_and_on_nothing_else() {
    let shape = [40, 50];
    let x = ones(&shape);
    let op = Dropout::new(0.5, 3, &shape.into());
    let other_seed = Dropout::new(0.5, 4, &shape.into());
    let first = dropped(&op, 0, &x);
    assert_eq!(first, dropped(&op, 0, &x));
    let differing = |other: &[f64]| first.iter().zip(other).filter(|(a, b)| a != b).count();
    for other in [dropped(&op, 1, &x), dropped(&op, 2, &x), dropped(&other_seed, 0, &x)] {
        let count = differing(&other);
        assert!((800..1200).contains(&count), "{count} of 2000 differ");
    }
}

#[test]
fn every_part_of_a_split_drops_what_the_whole_drops() {
    let shape = [6u64, 4, 10];
    let x = ones(&shape);
    let op = Dropout::new(0.4, 9, &shape.into());
    let whole = Value::from_vec(shape, dropped(&op, 5, &x));
    let ty = [TensorType::new(DType::F32, shape)];
    let rule = Op::from(op.clone()).rule(&ty, &ty);
    for (a, b, c) in [(0, 0, 0), (1, 1, 1), (2, 0, 3), (1, 1, 4)] {
        let region = Region::whole(&rule, &ty, &ty).split(0, a, 3).split(1, b, 2).split(2, c, 5);
        let Op::Dropout(local) = Op::from(op.clone()).operator().localize(&region) else {
            panic!("not a dropout");
        };
        let block = region.output_block(0);
        let part = dropped(&local, 5, &x.block(&block));
        assert_eq!(part, whole.block(&block).to_f64_vec());
    }
}

#[test]
fn optimizers_take_the_steps_of_their_formulas() {
    let (lr, momentum, beta1, beta2, eps) = (0.1f64, 0.9, 0.8, 0.95, 1e-3);
    let gradients = [0.5, -0.25, 2.0, 0.125f64];
    let scalar = |x: f64| Value::from_vec([1], vec![x]);
    let (mut w, mut heavy, mut v) = (scalar(1.0), scalar(1.0), scalar(0.0));
    let (mut adam_w, mut m1, mut m2) = (scalar(1.0), scalar(0.0), scalar(0.0));
    let (mut hand_w, mut hand_heavy, mut hand_v) = (1.0, 1.0, 0.0);
    let (mut hand_adam, mut hand_m1, mut hand_m2) = (1.0, 0.0, 0.0);
    for (step, g) in gradients.into_iter().enumerate() {
        let mut context = Context { step: step as u64, ..Context::default() };
        let gradient = scalar(g);
        let op = Sgd { lr: Real(lr) }.into();
        w = evaluate(&op, &[&w, &gradient], &mut context).unwrap().remove(0);
        hand_w -= lr * g;

        let op = Momentum { lr: Real(lr), momentum: Real(momentum) }.into();
        let new = evaluate(&op, &[&heavy, &gradient, &v], &mut context).unwrap();
        [heavy, v] = new.try_into().unwrap();
        hand_v = momentum * hand_v + g;
        hand_heavy -= lr * hand_v;

        let op = Adam {
            lr: Real(lr),
            beta1: Real(beta1),
            beta2: Real(beta2),
            eps: Real(eps),
            weight_decay: Real(0.0),
        }
        .into();
        let new = evaluate(&op, &[&adam_w, &gradient, &m1, &m2], &mut context).unwrap();
        [adam_w, m1, m2] = new.try_into().unwrap();
        let t = step as i32 + 1;
        hand_m1 = beta1 * hand_m1 + (1.0 - beta1) * g;
        hand_m2 = beta2 * hand_m2 + (1.0 - beta2) * g * g;
        let (a, b) = (hand_m1 / (1.0 - beta1.powi(t)), hand_m2 / (1.0 - beta2.powi(t)));
        hand_adam -= lr * a / (b.sqrt() + eps);

        for (value, hand) in [(&w, hand_w), (&heavy, hand_heavy), (&v, hand_v), (&adam_w, hand_adam)] {
            assert!((value.to_f64_vec()[0] - hand).abs() < 1e-13, "step {step}");
        }
    }
    // The first step of Adam is the learning rate in the gradient's direction, whatever its size.
    let op = Adam {
        lr: Real(lr),
        beta1: Real(beta1),
        beta2: Real(beta2),
        eps: Real(0.0),
        weight_decay: Real(0.0),
    };
    let first = run(op, &[&scalar(1.0), &scalar(1e-3), &scalar(0.0), &scalar(0.0)]);
    assert!((first[0].to_f64_vec()[0] - 0.9).abs() < 1e-12);
}
