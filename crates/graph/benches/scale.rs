//! A training step of 100,000 ops: built, differentiated, saved, read, verified; time and peak memory.
//!
//! `cargo bench -p shardwright-graph --bench scale`. The bar: build, differentiate and save together in
//! under a second and well under 1 GB.

use divan::{Bencher, black_box};
use shardwright_graph::{
    BuildError, DType, Graph, GraphBuilder, Init, OpError, Real, Role, TensorType,
    autodiff::differentiate,
    factor_kinds,
    ops::{Binary, BinaryFn, Contract, Reduce, Unary, UnaryFn},
    verify::verify,
};

const OPS: usize = 100_000;

/// A deep perceptron with biases and residual connections: ten ops a layer once differentiated.
fn forward(layers: usize) -> Result<GraphBuilder, BuildError> {
    let bad = |e: OpError| BuildError::Model(e.to_string());
    let f32 = |shape: &[u64]| TensorType::new(DType::F32, shape);
    let linear = Contract::parse("mk,kn->mn").map_err(bad)?;
    let mut b = GraphBuilder::new("deep");
    let mut x = b.source("x", f32(&[64, 256]), Role::Input, Init::Normal(Real(1.0)))?;
    for i in 0..layers {
        x = b.scoped(&format!("block{i}"), |b| {
            let w = b.source("weight", f32(&[256, 256]), Role::Parameter, Init::Normal(Real(0.1)))?;
            let bias = b.source("bias", f32(&[256]), Role::Parameter, Init::Constant(Real(0.0)))?;
            let y = b.emit("linear", linear.clone(), &[x, w])?;
            let y = b.emit("bias_add", Binary { f: BinaryFn::Add }, &[y, bias])?;
            let y = b.emit("relu", Unary { f: UnaryFn::Relu }, &[y])?;
            b.emit("residual", Binary { f: BinaryFn::Add }, &[x, y])
        })?;
    }
    let loss = Reduce::mean((0..2).collect(), b.shape(x));
    let loss = b.emit("loss", loss, &[x])?;
    b.output(loss);
    Ok(b)
}

fn step() -> Result<Graph, BuildError> {
    let mut b = forward(OPS / 9 + 1)?;
    let loss = b.graph().outputs[0];
    differentiate(&mut b, loss)?;
    Ok(b.finish())
}

#[divan::bench]
fn build() {
    black_box(forward(OPS / 9 + 1).is_ok());
}

#[divan::bench]
fn build_differentiate_save() -> usize {
    black_box(step()).map_or(0, |g| g.to_json().len())
}

#[divan::bench]
fn save(bencher: Bencher) {
    with_graph(bencher, |g| g.to_json().len());
}

#[divan::bench]
fn read(bencher: Bencher) {
    let text = step().map_or_else(|_| String::new(), |g| g.to_json());
    bencher.bench(|| Graph::from_json(black_box(text.as_bytes())).is_ok());
}

#[divan::bench]
fn check(bencher: Bencher) {
    with_graph(bencher, |g| verify(g).is_ok());
}

#[divan::bench]
fn print(bencher: Bencher) {
    with_graph(bencher, |g| g.to_string().len());
}

#[divan::bench]
fn kinds(bencher: Bencher) {
    with_graph(bencher, |g| factor_kinds(g).len());
}

#[divan::bench]
fn rules(bencher: Bencher) {
    with_graph(bencher, |g| g.op_ids().map(|id| g.rule(id).factors.len()).sum::<usize>());
}

fn with_graph<R>(bencher: Bencher, work: impl Fn(&Graph) -> R + Sync) {
    let graph = step().unwrap_or_default();
    bencher.bench(|| work(black_box(&graph)));
}

/// The most memory that this process has held so far, where the system tells.
fn peak_memory() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|l| l.starts_with("VmHWM"));
    line.map_or("unknown".into(), |l| l.trim_start_matches("VmHWM:").trim().to_owned())
}

fn main() {
    // Before the benches, which hold several graphs at a time.
    match step() {
        Ok(graph) => {
            let bytes = graph.to_json().len();
            println!("{} ops, {} tensors, {bytes} bytes of JSON", graph.ops.len(), graph.tensors.len());
        }
        Err(error) => println!("the graph cannot be built: {error}"),
    }
    println!("peak memory of building, differentiating and saving: {}", peak_memory());
    divan::main();
}
