//! One example of every op kind, with the line that its rule prints as.

use shardwright_graph::{DType, Op, Real, TensorType, ops::*};
use smallvec::smallvec;

/// An op, the types of its operands, and its rule.
pub struct Example {
    pub op: Op,
    pub inputs: Vec<TensorType>,
    pub rule: &'static str,
}

fn example(op: impl Into<Op>, inputs: &[&str], rule: &'static str) -> Example {
    Example { op: op.into(), inputs: inputs.iter().map(|t| t.parse().unwrap()).collect(), rule }
}

#[rustfmt::skip]
pub fn examples() -> Vec<Example> {
    vec![
        example(Binary { f: BinaryFn::Add }, &["f32[8,6]", "f32[6]"], "([d0, d1], [d1])->([d0, d1]) {d0=8, d1=6}"),
        example(Broadcast { shape: [8, 6].into(), dims: smallvec![1] }, &["f32[6]"], "([d1])->([d0, d1]) {d0=8, d1=6}"),
        example(Cast { dtype: DType::Bf16 }, &["f32[8,6]"], "([d0, d1])->([d0, d1]) {d0=8, d1=6}"),
        example(Compare { f: CompareFn::Lt }, &["f32[8,6]", "f32[1,6]"], "([d0, d1], [_, d1])->([d0, d1]) {d0=8, d1=6}"),
        example(Contract::parse("mk,kn->mn").unwrap(), &["f32[8,16]", "f32[16,4]"], "([m, k], [k, n])->([m, n]) {m=8, n=4, k=16} reduction={k}"),
        example(Fill { value: Real(f64::NEG_INFINITY), ty: "f32[8]".parse().unwrap() }, &[], "()->([d0]) {d0=8}"),
        example(Iota { ty: "i32[8,6]".parse().unwrap(), axis: 1, start: 0 }, &[], "()->([d0, d1]) {d0=8, d1=6}"),
        example(Reduce::max(smallvec![1]), &["f32[8,6]"], "([d0, d1])->([d0]max) {d0=8, d1=6} reduction={d1}"),
        example(Reshape { shape: [8, 12, 64].into() }, &["f32[8,768]"], "([d0, d1d2])->([d0, d1, d2]) {d0=8, d1=12, d2=64} whole={d2}"),
        example(Select {}, &["bool[8,6]", "f32[8,6]", "f32[]"], "([d0, d1], [d0, d1], [])->([d0, d1]) {d0=8, d1=6}"),
        example(Unary { f: UnaryFn::Affine { scale: Real(0.1), shift: Real(1.0) } }, &["f32[8]"], "([d0])->([d0]) {d0=8}"),
        example(UnaryGrad { f: UnaryFn::LeakyRelu(Real(0.3)) }, &["f32[8]", "f32[8]"], "([d0], [d0])->([d0]) {d0=8}"),
    ]
}
