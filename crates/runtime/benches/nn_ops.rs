//! Bytes per second of the ops of network layers, compared with a plain copy of the same bytes in one run; and
//! the gain of vector code over the standard library's functions.

use divan::{Bencher, black_box, counter::BytesCount};
use shardwright_graph::{
    DType, Real, TensorType,
    ops::{
        Adam, CrossEntropyGrad, Dropout, LogSoftmax, NormGradInput, NormGradParams, NormGradStats, Normalize,
        Reshape, Softmax, SoftmaxGrad, SumExp, Unary, UnaryFn,
    },
};

mod timed;

use timed::{bench, value};

fn main() {
    divan::main();
}

#[divan::bench]
fn copy(bencher: Bencher<'_, '_>) {
    bench(bencher, Reshape { shape: [1 << 20].into() }, &["f32[1024,1024]"]);
}

#[divan::bench]
fn exp(bencher: Bencher<'_, '_>) {
    bench(bencher, Unary { f: UnaryFn::Exp }, &["f32[1024,1024]"]);
}

#[divan::bench]
fn exp_by_the_standard_library(bencher: Bencher<'_, '_>) {
    let x = value(TensorType::new(DType::F32, [1024, 1024]));
    let x = x.as_slice::<f32>().unwrap();
    let mut y = vec![0.0; x.len()];
    bencher.counter(BytesCount::new(8 * x.len())).bench_local(|| {
        y.iter_mut().zip(x).for_each(|(y, x)| *y = x.exp());
        black_box(&mut y);
    });
}

#[divan::bench(args = [UnaryFn::Tanh, UnaryFn::Sigmoid, UnaryFn::Gelu, UnaryFn::GeluTanh, UnaryFn::Silu])]
fn unary(bencher: Bencher<'_, '_>, f: &UnaryFn) {
    bench(bencher, Unary { f: *f }, &["f32[1024,1024]"]);
}

#[divan::bench]
fn softmax(bencher: Bencher<'_, '_>) {
    bench(bencher, Softmax { axis: 1 }, &["f32[1024,1024]"]);
}

#[divan::bench]
fn softmax_along_the_first_dimension(bencher: Bencher<'_, '_>) {
    bench(bencher, Softmax { axis: 0 }, &["f32[1024,1024]"]);
}

#[divan::bench]
fn softmax_grad(bencher: Bencher<'_, '_>) {
    bench(bencher, SoftmaxGrad { axis: 1 }, &["f32[1024,1024]"; 2]);
}

#[divan::bench]
fn log_softmax(bencher: Bencher<'_, '_>) {
    bench(bencher, LogSoftmax { axis: 1 }, &["f32[1024,1024]"]);
}

#[divan::bench]
fn sum_exp(bencher: Bencher<'_, '_>) {
    bench(bencher, SumExp {}, &["f32[1024,1024]", "f32[1024]"]);
}

#[divan::bench]
fn cross_entropy_grad(bencher: Bencher<'_, '_>) {
    let inputs = ["f32[1024,1024]", "i32[1024]", "f32[1024]", "f32[1024]", "f32[1024]"];
    bench(bencher, CrossEntropyGrad { base: 0, classes: 1024 }, &inputs);
}

const LAYER: [u64; 2] = [1024, 1024];
const IMAGES: [u64; 4] = [16, 64, 32, 32];

#[divan::bench]
fn layer_norm(bencher: Bencher<'_, '_>) {
    let inputs = ["f32[1024,1024]", "f32[1024]", "f32[1024]", "f32[1024]", "f32[1024]"];
    bench(bencher, Normalize::layer(&LAYER, 1.5), &inputs);
}

#[divan::bench]
fn layer_norm_variance(bencher: Bencher<'_, '_>) {
    bench(bencher, Normalize::layer(&LAYER, 1.5).variance(), &["f32[1024,1024]", "f32[1024]"]);
}

#[divan::bench]
fn layer_norm_grad_stats(bencher: Bencher<'_, '_>) {
    let inputs = ["f32[1024,1024]", "f32[1024,1024]", "f32[1024]", "f32[1024]", "f32[1024]"];
    bench(bencher, NormGradStats { norm: Normalize::layer(&LAYER, 1.5) }, &inputs);
}

#[divan::bench]
fn layer_norm_grad_params(bencher: Bencher<'_, '_>) {
    let inputs = ["f32[1024,1024]", "f32[1024,1024]", "f32[1024]", "f32[1024]"];
    bench(bencher, NormGradParams { norm: Normalize::layer(&LAYER, 1.5) }, &inputs);
}

#[divan::bench]
fn layer_norm_grad_input(bencher: Bencher<'_, '_>) {
    let rows = "f32[1024]";
    let inputs = ["f32[1024,1024]", "f32[1024,1024]", rows, rows, rows, rows, rows];
    bench(bencher, NormGradInput { norm: Normalize::layer(&LAYER, 1.5) }, &inputs);
}

#[divan::bench]
fn batch_norm(bencher: Bencher<'_, '_>) {
    let inputs = ["f32[16,64,32,32]", "f32[64]", "f32[64]", "f32[64]", "f32[64]"];
    bench(bencher, Normalize::batch(&IMAGES, 1.5), &inputs);
}

#[divan::bench]
fn batch_norm_variance(bencher: Bencher<'_, '_>) {
    bench(bencher, Normalize::batch(&IMAGES, 1.5).variance(), &["f32[16,64,32,32]", "f32[64]"]);
}

#[divan::bench]
fn batch_norm_grad_params(bencher: Bencher<'_, '_>) {
    let inputs = ["f32[16,64,32,32]", "f32[16,64,32,32]", "f32[64]", "f32[64]"];
    bench(bencher, NormGradParams { norm: Normalize::batch(&IMAGES, 1.5) }, &inputs);
}

#[divan::bench]
fn dropout(bencher: Bencher<'_, '_>) {
    bench(bencher, Dropout::new(0.1, 1, &[1024, 1024].into()), &["f32[1024,1024]"]);
}

#[divan::bench]
fn adam(bencher: Bencher<'_, '_>) {
    let op = Adam {
        lr: Real(1e-3),
        beta1: Real(0.9),
        beta2: Real(0.999),
        eps: Real(1e-8),
        weight_decay: Real(0.0),
    };
    bench(bencher, op, &["f32[1024,1024]"; 4]);
}
