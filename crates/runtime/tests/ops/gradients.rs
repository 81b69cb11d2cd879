//! Every op's gradient against central finite differences in f64.

use crate::case::{Case, Rng};
use shardwright_graph::{
    GraphBuilder, Init, Op, Real, Role, TensorId, TensorType,
    autodiff::differentiate,
    ops::{Binary, BinaryFn, Reduce},
};
use shardwright_runtime::{HostTensor as Value, Serial};

const CASES_PER_KIND: u64 = 25;
const STEP: f64 = 1e-5;

/// A graph whose parameters are the op's float inputs, and whose loss is the sum of its float outputs, each weighted by
/// fixed random numbers.
fn graph_of(case: &Case, auxiliary_outputs: &[usize]) -> Option<(GraphBuilder, Vec<TensorId>)> {
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
        let auxiliary = auxiliary_outputs.contains(&i);
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
    for examples in Op::EXAMPLES.iter().filter(|examples| examples.differentiable) {
        let kind = examples.kind;
        let mut checked = 0;
        for seed in 0..CASES_PER_KIND {
            let case = (examples.case)(&mut Rng::new(seed));
            let Some((builder, inputs)) = graph_of(&case, examples.auxiliary_outputs) else { continue };
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
        assert!(checked >= 5, "{kind}: only {checked} elements were checked");
    }
}
