//! Bytes per second of moving elements, compared with a plain copy of the same bytes, and the share of an LSTM's time in its
//! matrix products, in one run.

use divan::Bencher;
use shardwright_graph::{
    DType, Op, TensorType,
    ops::{Contract, Lstm, LstmGrad, Reshape, Transpose},
};

mod timed;

fn main() {
    divan::main();
}

/// Times one op on random inputs of these shapes.
fn bench(bencher: Bencher<'_, '_>, op: impl Into<Op>, shapes: &[&[u64]]) {
    let types: Vec<String> =
        shapes.iter().map(|&shape| TensorType::new(DType::F32, shape).to_string()).collect();
    timed::bench(bencher, op, &types.iter().map(String::as_str).collect::<Vec<_>>());
}

#[divan::bench]
fn copy_of_1024_by_1024(bencher: Bencher<'_, '_>) {
    bench(bencher, Reshape { shape: [1 << 20].into() }, &[&[1024, 1024]]);
}

#[divan::bench]
fn transpose_of_1024_by_1024(bencher: Bencher<'_, '_>) {
    bench(bencher, Transpose { perm: vec![1, 0].into() }, &[&[1024, 1024]]);
}

#[divan::bench]
fn transpose_of_1000_by_1000(bencher: Bencher<'_, '_>) {
    bench(bencher, Transpose { perm: vec![1, 0].into() }, &[&[1000, 1000]]);
}

#[divan::bench]
fn heads_before_positions(bencher: Bencher<'_, '_>) {
    bench(bencher, Transpose { perm: vec![0, 2, 1, 3].into() }, &[&[8, 128, 16, 64]]);
}

#[divan::bench]
fn channels_last_to_first(bencher: Bencher<'_, '_>) {
    bench(bencher, Transpose { perm: vec![0, 3, 1, 2].into() }, &[&[8, 56, 56, 40]]);
}

const STEPS: u64 = 8;
const BATCH: u64 = 32;
const HIDDEN: u64 = 512;

#[divan::bench]
fn lstm_products_alone(bencher: Bencher<'_, '_>) {
    let (steps, batch, hidden) = (STEPS, BATCH, HIDDEN);
    let op = Contract::parse("tbk,tkn->tbn").unwrap();
    bench(bencher, op, &[&[steps, batch, hidden], &[steps, hidden, 4 * hidden]]);
}

#[divan::bench]
fn lstm_forward(bencher: Bencher<'_, '_>) {
    let (t, b, h) = (STEPS, BATCH, HIDDEN);
    bench(bencher, Lstm {}, &[&[t, b, 4, h], &[h, 4, h], &[b, h], &[b, h]]);
}

#[divan::bench]
fn lstm_backward(bencher: Bencher<'_, '_>) {
    let (t, b, h) = (STEPS, BATCH, HIDDEN);
    let (state, steps): (&[u64], &[u64]) = (&[b, h], &[t, b, h]);
    let shapes: &[&[u64]] = &[&[h, 4, h], state, state, steps, steps, &[t, b, 4, h], steps];
    bench(bencher, LstmGrad { dy: true, dc: false }, shapes);
}
