//! Every op's gradient against central finite differences in f64.

use crate::{
    case::{Case, Rng},
    cases::GENERATORS,
};
use shardwright_graph::{
    GraphBuilder, Init, Real, Role, TensorId, TensorType,
    autodiff::differentiate,
    ops::{Binary, BinaryFn, Reduce},
};
use shardwright_runtime::{Serial, Value};

const CASES_PER_KIND: u64 = 25;
const STEP: f64 = 1e-5;

/// Kinds without a gradient: made by differentiation themselves, of whole numbers or truth values, or
/// differentiated by the op that uses them.
const WITHOUT_GRADIENT: &[&str] = &[
    "adam",
    "bitcast",
    "compare",
    // Differentiated together with its statistics, in the tests of whole layers.
    "cross_entropy",
    "cross_entropy_grad",
    "fill",
    "iota",
    "literal",
    "log_softmax_grad",
    "lstm_grad",
    "max_pool_grad",
    "momentum",
    // As cross_entropy.
    "normalize",
    "norm_grad_input",
    "norm_grad_params",
    "norm_grad_stats",
    "one_hot",
    "opaque",
    "sgd",
    "softmax_grad",
    "sort",
    "top_k",
    "top_k_mask",
    "unary_grad",
];

/// Float outputs into which no gradient flows: kept for the op's own gradient.
const AUXILIARY_OUTPUTS: &[(&str, usize)] = &[("lstm", 2)];

/// The op with every float input as a parameter, and as loss the sum of its float outputs, each weighted by
/// fixed random numbers.
fn graph_of(case: &Case) -> Option<(GraphBuilder, Vec<TensorId>)> {
    let mut b = GraphBuilder::new("case");
    let mut inputs = vec![];
    for (i, (ty, init)) in case.inputs.iter().enumerate() {
        let role = if ty.dtype.is_float() { Role::Parameter } else { Role::Input };
        inputs.push(b.source(&format!("input{i}"), ty.clone(), role, *init).unwrap());
    }
    let outputs = b.add("op", case.op.clone(), &inputs).unwrap();
    let mut loss: Option<TensorId> = None;
    for (i, &y) in outputs.iter().enumerate() {
        let ty: TensorType = b.ty(y).clone();
        let auxiliary = AUXILIARY_OUTPUTS.contains(&(case.op.kind(), i));
        if ty.dtype != shardwright_graph::DType::F64 || auxiliary {
            continue;
        }
        let axes = (0..ty.rank()).collect();
        let weights = b.source(&format!("weights{i}"), ty, Role::Constant, Init::Normal(Real(1.0))).unwrap();
        let product = b.emit("product", Binary { f: BinaryFn::Mul }, &[y, weights]).unwrap();
        let sum = b.emit("sum", Reduce::sum(axes), &[product]).unwrap();
        loss = Some(match loss {
            None => sum,
            Some(before) => b.emit("total", Binary { f: BinaryFn::Add }, &[before, sum]).unwrap(),
        });
    }
    b.output(loss?);
    differentiate(&mut b, loss?).unwrap_or_else(|e| panic!("{case:?}: {e}"));
    Some((b, inputs))
}

#[test]
fn every_gradient_equals_finite_differences() {
    for (kind, generate) in GENERATORS {
        let mut checked = 0;
        for seed in 0..CASES_PER_KIND {
            let case = generate(&mut Rng::new(seed));
            if WITHOUT_GRADIENT.contains(kind) {
                continue;
            }
            let Some((builder, inputs)) = graph_of(&case) else { continue };
            let graph = builder.finish();
            let keep: Vec<TensorId> = graph.gradients.iter().map(|g| g.gradient).collect();
            let mut serial = Serial::new(&graph, seed, &keep);
            serial.evaluate().unwrap_or_else(|e| panic!("{case:?}: {e}"));
            let gradients: Vec<Vec<f64>> =
                keep.iter().map(|&t| serial.value(t).unwrap().to_f64_vec()).collect();
            for (pair, gradient) in graph.gradients.iter().zip(gradients) {
                assert!(inputs.contains(&pair.parameter));
                let value = serial.value(pair.parameter).unwrap().clone();
                let elements = value.to_f64_vec();
                let scale = gradient.iter().fold(1.0f64, |m, g| m.max(g.abs()));
                for probe in 0..elements.len().min(6) {
                    let i = (probe * 7919 + seed as usize) % elements.len();
                    let mut loss_at = |x: f64| {
                        let mut moved = elements.clone();
                        moved[i] = x;
                        serial.set(pair.parameter, Value::from_vec(value.shape().clone(), moved)).unwrap();
                        serial.evaluate().unwrap();
                        serial.loss().unwrap()
                    };
                    let difference =
                        (loss_at(elements[i] + STEP) - loss_at(elements[i] - STEP)) / (2.0 * STEP);
                    serial.set(pair.parameter, value.clone()).unwrap();
                    assert!(
                        (difference - gradient[i]).abs() <= 1e-6 * scale,
                        "{kind} {case:?}: gradient of {}[{i}] is {}, finite differences give {difference}",
                        graph.tensor(pair.parameter).name,
                        gradient[i]
                    );
                    checked += 1;
                }
            }
        }
        assert!(
            checked >= 5 || WITHOUT_GRADIENT.contains(kind),
            "{kind}: only {checked} elements were checked"
        );
    }
}
