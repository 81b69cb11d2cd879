//! Kernels compared with the bare matrix-product crate on equivalent matrices, one thread,
//! same run: `cargo bench -p shardwright-runtime`, with part of a name as an optional filter.
//!
//! Each line alternates between the two and takes the fastest run of each, in processor time where the system
//! reports it (Linux), so other work on the machine disturbs little.

use shardwright_graph::{
    Dims, Op, TensorType,
    ops::{Contract, Conv, ConvGeometry, ConvGradInput, ConvGradWeight},
};
use shardwright_runtime::{Context, HostTensor, View, ViewMut, kernels};
use std::time::Instant;

/// Least time spent on each line.
const SECONDS: f64 = 1.5;

/// The bare product `[m, k] · [k, n]`, rows stored one after the other; `b_transposed` stores b as `[n, k]`.
struct Bare {
    sizes: [usize; 3],
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
    a_strides: [usize; 2],
    b_strides: [usize; 2],
}

impl Bare {
    fn new([m, n, k]: [usize; 3], a_transposed: bool, b_transposed: bool) -> Self {
        Self {
            sizes: [m, n, k],
            a: numbers(m * k),
            b: numbers(k * n),
            c: vec![0.0; m * n],
            a_strides: if a_transposed { [1, m] } else { [k, 1] },
            b_strides: if b_transposed { [1, k] } else { [n, 1] },
        }
    }

    fn run(&mut self) {
        let [m, n, k] = self.sizes;
        // SAFETY: the buffers have m*k, k*n and m*n elements, and the strides stay inside them.
        unsafe {
            gemm::gemm(
                m,
                n,
                k,
                self.c.as_mut_ptr(),
                1,
                n as isize,
                false,
                self.a.as_ptr(),
                self.a_strides[1] as isize,
                self.a_strides[0] as isize,
                self.b.as_ptr(),
                self.b_strides[1] as isize,
                self.b_strides[0] as isize,
                1.0,
                1.0,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
    }
}

/// Processor seconds of this thread; wall time where the system does not report them.
fn thread_seconds(start: Instant) -> f64 {
    let stats = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let nanoseconds = stats.and_then(|s| s.split(' ').next()?.parse::<f64>().ok());
    nanoseconds.map_or_else(|| start.elapsed().as_secs_f64(), |n| n * 1e-9)
}

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7919) % 1013) as f32 / 506.0 - 1.0).collect()
}

fn value(shape: &[u64]) -> HostTensor {
    HostTensor::from_vec(shape, numbers(shape.iter().product::<u64>() as usize))
}

/// One line of the table: an op on inputs of these shapes, against `repeats` bare products.
fn compare(name: &str, op: Op, shapes: [&[u64]; 2], mut bare: Bare, repeats: usize) {
    let filters: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    if !filters.is_empty() && !filters.iter().any(|f| name.contains(f.as_str())) {
        return;
    }
    let inputs = shapes.map(value);
    let types: Vec<TensorType> = inputs.iter().map(HostTensor::ty).collect();
    let output_types = op.operator().infer(&types).expect("sizes fit");
    let flops = op.operator().flops(&types, &output_types) as f64;
    let mut outputs: Vec<HostTensor> = output_types.iter().map(HostTensor::zeros).collect();
    let mut context = Context::default();
    let mut run = || {
        let views: Vec<View<'_>> = inputs.iter().map(HostTensor::view).collect();
        let mut views_mut: Vec<ViewMut<'_>> = outputs.iter_mut().map(HostTensor::view_mut).collect();
        kernels::run(&op, &views, &mut views_mut, &mut context).expect("runs");
    };
    let (mut ours, mut theirs, start) = (f64::MAX, f64::MAX, Instant::now());
    let timed = |best: &mut f64, f: &mut dyn FnMut()| {
        // Several runs at a time where they are short: the system's count moves in steps of milliseconds.
        let runs = (2e9 / flops).ceil().max(1.0);
        let before = thread_seconds(start);
        (0..runs as usize).for_each(|_| f());
        *best = best.min((thread_seconds(start) - before) / runs);
    };
    let mut rounds = 0;
    while rounds < 3 || start.elapsed().as_secs_f64() < SECONDS {
        timed(&mut theirs, &mut || (0..repeats).for_each(|_| bare.run()));
        timed(&mut ours, &mut run);
        rounds += 1;
    }
    let [m, n, k] = bare.sizes;
    let (theirs_rate, ours_rate) = (flops / theirs / 1e9, flops / ours / 1e9);
    println!(
        "{name:<34} {repeats:>2} x {m:>5} {n:>6} {k:>6} {theirs_rate:>9.1} {ours_rate:>9.1} {:>7.2}",
        theirs / ours
    );
}

fn linear(name: &str, batch: u64, from: u64, to: u64) {
    let [b, f, t] = [batch, from, to].map(|n| n as usize);
    let op = |spec| Op::from(Contract::parse(spec).expect("an einsum"));
    let (x, w, y) = ([batch, from], [to, from], [batch, to]);
    compare(&format!("{name} forward"), op("mk,nk->mn"), [&x, &w], Bare::new([b, t, f], false, true), 1);
    compare(&format!("{name} grad input"), op("mn,nk->mk"), [&y, &w], Bare::new([b, f, t], false, false), 1);
    compare(&format!("{name} grad weight"), op("mk,mn->nk"), [&x, &y], Bare::new([t, f, b], true, false), 1);
}

/// A product of few rows with weights stored `[from, to]`.
fn few_rows(rows: u64, from: u64, to: u64) {
    let bare = Bare::new([rows, to, from].map(|n| n as usize), false, false);
    let op = Contract::parse("mk,kn->mn").expect("an einsum").into();
    compare(&format!("few rows {rows}x{from} to {to}"), op, [&[rows, from], &[from, to]], bare, 1);
}

/// A convolution that keeps the image's size; `kernel` is odd.
fn conv(name: &str, images: u64, from: u64, to: u64, size: u64, kernel: u64) {
    let half = (kernel / 2) as i64;
    let geometry =
        ConvGeometry { pad: [(half, half), (half, half)].into_iter().collect(), ..ConvGeometry::plain(2) };
    let (x, y) = ([images, from, size, size], [images, to, size, size]);
    let w = [to, from, kernel, kernel];
    let [o, p, k, n] = [to, size * size, from * kernel * kernel, images].map(|n| n as usize);
    compare(
        &format!("{name} forward"),
        Conv { geometry: geometry.clone() }.into(),
        [&x, &w],
        Bare::new([o, p, k], false, false),
        n,
    );
    compare(
        &format!("{name} grad input"),
        ConvGradInput { geometry: geometry.clone(), input: Dims::from_slice(&x[2..]) }.into(),
        [&y, &w],
        Bare::new([k, p, o], true, false),
        n,
    );
    compare(
        &format!("{name} grad weight"),
        ConvGradWeight { geometry, kernel: Dims::from_slice(&w[2..]) }.into(),
        [&x, &y],
        Bare::new([o, k, p], false, true),
        n,
    );
}

fn main() {
    // As a test (without --bench) nothing is measured.
    if !std::env::args().any(|a| a == "--bench") {
        return;
    }
    println!(
        "{:<34} {:>26} {:>9} {:>9} {:>7}",
        "f32, one thread", "products of m n k", "bare", "kernel", "ratio"
    );
    println!("{:<34} {:>26} {:>9} {:>9}", "", "", "GFLOP/s", "GFLOP/s");
    linear("linear 64x1024 to 1024", 64, 1024, 1024);
    linear("linear 32x25088 to 4096", 32, 25_088, 4096);
    linear("linear 512x768 to 3072", 512, 768, 3072);
    for rows in [1, 4, 16] {
        linear(&format!("linear {rows}x4096 to 4096"), rows, 4096, 4096);
    }
    for (rows, size) in [(4, 4096), (16, 512), (16, 2048), (64, 512), (64, 2048), (256, 512), (256, 2048)] {
        few_rows(rows, size, size);
    }
    conv("vgg conv1_1 3 to 64, 224", 1, 3, 64, 224, 3);
    conv("vgg conv1_2 64 to 64, 224", 1, 64, 64, 224, 3);
    conv("vgg conv2_1 64 to 128, 112", 1, 64, 128, 112, 3);
    conv("vgg conv2_2 128 to 128, 112", 1, 128, 128, 112, 3);
    conv("vgg conv3_1 128 to 256, 56", 1, 128, 256, 56, 3);
    conv("vgg conv3_2 256 to 256, 56", 1, 256, 256, 56, 3);
    conv("vgg conv4_1 256 to 512, 28", 2, 256, 512, 28, 3);
    conv("vgg conv4_2 512 to 512, 28", 2, 512, 512, 28, 3);
    conv("vgg conv5 512 to 512, 14", 4, 512, 512, 14, 3);
    conv("pointwise 256 to 64, 56", 2, 256, 64, 56, 1);
    conv("3x3 512 to 512, 7", 8, 512, 512, 7, 3);
    conv("pointwise 512 to 2048, 7", 8, 512, 2048, 7, 1);
}
