//! How fast elements are moved, against a plain copy of as many bytes, and how much of an LSTM's time its
//! matrix products take, in one run.

use divan::{Bencher, counter::BytesCount};
use shardwright_graph::{
    DType, Init, Op, Real, Role, Tensor, TensorType,
    ops::{Contract, Lstm, LstmGrad, Reshape, Transpose},
};
use shardwright_runtime::{Context, Value, initial_value, kernels::run};

fn main() {
    divan::main();
}

fn value(shape: &[u64]) -> Value {
    let ty = TensorType::new(DType::F32, shape);
    let init = Some(Init::Normal(Real(0.1)));
    initial_value(0, &Tensor { name: "x".into(), ty, role: Role::Input, producer: None, init })
}

/// Times one op on random inputs of these shapes.
fn bench(bencher: Bencher<'_, '_>, op: Op, shapes: &[&[u64]]) {
    let inputs: Vec<Value> = shapes.iter().map(|s| value(s)).collect();
    let types: Vec<TensorType> = inputs.iter().map(Value::ty).collect();
    let output_types = op.operator().infer(&types).unwrap();
    let bytes = op.operator().bytes(&types, &output_types);
    let mut outputs: Vec<Value> = output_types.iter().map(Value::zeros).collect();
    let mut context = Context::default();
    bencher.counter(BytesCount::new(bytes)).bench_local(|| {
        let views: Vec<_> = inputs.iter().map(Value::view).collect();
        let mut views_mut: Vec<_> = outputs.iter_mut().map(Value::view_mut).collect();
        run(&op, &views, &mut views_mut, &mut context).unwrap();
    });
}

#[divan::bench]
fn copy_of_1024_by_1024(bencher: Bencher<'_, '_>) {
    bench(bencher, Reshape { shape: [1 << 20].into() }.into(), &[&[1024, 1024]]);
}

#[divan::bench]
fn transpose_of_1024_by_1024(bencher: Bencher<'_, '_>) {
    bench(bencher, Transpose { perm: vec![1, 0].into() }.into(), &[&[1024, 1024]]);
}

#[divan::bench]
fn transpose_of_1000_by_1000(bencher: Bencher<'_, '_>) {
    bench(bencher, Transpose { perm: vec![1, 0].into() }.into(), &[&[1000, 1000]]);
}

#[divan::bench]
fn heads_before_positions(bencher: Bencher<'_, '_>) {
    bench(bencher, Transpose { perm: vec![0, 2, 1, 3].into() }.into(), &[&[8, 128, 16, 64]]);
}

#[divan::bench]
fn channels_last_to_first(bencher: Bencher<'_, '_>) {
    bench(bencher, Transpose { perm: vec![0, 3, 1, 2].into() }.into(), &[&[8, 56, 56, 40]]);
}

const STEPS: u64 = 8;
const BATCH: u64 = 32;
const HIDDEN: u64 = 512;

#[divan::bench]
fn lstm_products_alone(bencher: Bencher<'_, '_>) {
    let (steps, batch, hidden) = (STEPS, BATCH, HIDDEN);
    let op = Contract::parse("tbk,tkn->tbn").unwrap();
    bench(bencher, op.into(), &[&[steps, batch, hidden], &[steps, hidden, 4 * hidden]]);
}

#[divan::bench]
fn lstm_forward(bencher: Bencher<'_, '_>) {
    let (t, b, h) = (STEPS, BATCH, HIDDEN);
    bench(bencher, Lstm {}.into(), &[&[t, b, 4, h], &[h, 4, h], &[b, h], &[b, h]]);
}

#[divan::bench]
fn lstm_backward(bencher: Bencher<'_, '_>) {
    let (t, b, h) = (STEPS, BATCH, HIDDEN);
    let (state, steps): (&[u64], &[u64]) = (&[b, h], &[t, b, h]);
    let shapes: &[&[u64]] = &[&[h, 4, h], state, state, steps, steps, &[t, b, 4, h], steps];
    bench(bencher, LstmGrad { dy: true, dc: false }.into(), shapes);
}
