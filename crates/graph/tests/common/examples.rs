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

/// A 3x3 convolution that keeps the image's size.
fn same_conv() -> ConvGeometry {
    ConvGeometry { pad: smallvec![(1, 1), (1, 1)], ..ConvGeometry::plain(2) }
}

/// A batch norm of three channels over eight samples of five positions.
fn batch_norm() -> Normalize {
    let axes = smallvec![0, 2];
    let params = smallvec![1];
    Normalize { axes, params, centered: true, scaled: true, shifted: true, eps: Real(1e-5), count: 40 }
}

#[rustfmt::skip]
pub fn examples() -> Vec<Example> {
    vec![
        example(Adam { lr: Real(1e-3), beta1: Real(0.9), beta2: Real(0.999), eps: Real(1e-8) }, &["f32[8,6]"; 4], "([d0, d1], [d0, d1], [d0, d1], [d0, d1])->([d0, d1], [d0, d1], [d0, d1]) {d0=8, d1=6}"),
        example(AvgPool { geometry: PoolGeometry::plain(&[2, 2], &[2, 2]) }, &["f32[8,3,12,12]"], "([n, c, h>2*2+0, w>2*2+0])->([n, c, h, w]) {n=8, c=3, h=6, w=6}"),
        example(AvgPoolGrad { geometry: PoolGeometry::plain(&[2, 2], &[2, 2]), input: smallvec![12, 12] }, &["f32[8,3,6,6]"], "([n, c, h<2*2+0, w<2*2+0])->([n, c, h, w]) {n=8, c=3, h=12, w=12}"),
        example(Binary { f: BinaryFn::Add }, &["f32[8,6]", "f32[6]"], "([d0, d1], [d1])->([d0, d1]) {d0=8, d1=6}"),
        example(Bitcast { dtype: DType::I32 }, &["f32[8,6]"], "([d0, d1])->([d0, d1]) {d0=8, d1=6}"),
        example(Broadcast { shape: [8, 6].into(), dims: smallvec![1] }, &["f32[6]"], "([d1])->([d0, d1]) {d0=8, d1=6}"),
        example(Cast { dtype: DType::Bf16 }, &["f32[8,6]"], "([d0, d1])->([d0, d1]) {d0=8, d1=6}"),
        example(Compare { f: CompareFn::Lt }, &["f32[8,6]", "f32[1,6]"], "([d0, d1], [_, d1])->([d0, d1]) {d0=8, d1=6}"),
        example(Concat { axis: 1 }, &["f32[8,6]", "f32[8,2]"], "([d0, _], [d0, _])->([d0, _]) {d0=8}"),
        example(Contract::parse("mk,kn->mn").unwrap(), &["f32[8,16]", "f32[16,4]"], "([m, k], [k, n])->([m, n]) {m=8, n=4, k=16} reduction={k}"),
        example(Conv { geometry: same_conv() }, &["f32[8,3,12,12]", "f32[6,3,3,3]"], "([n, c, h>3*1-1, w>3*1-1], [o, c, kh, kw])->([n, o, h, w]) {n=8, o=6, c=3, h=12, w=12, kh=3, kw=3} reduction={c} whole={kh, kw}"),
        example(ConvGradInput { geometry: same_conv(), input: smallvec![12, 12] }, &["f32[8,6,12,12]", "f32[6,3,3,3]"], "([n, o, h<3*1-1, w<3*1-1], [o, c, kh, kw])->([n, c, h, w]) {n=8, o=6, c=3, h=12, w=12, kh=3, kw=3} reduction={o} whole={kh, kw}"),
        example(ConvGradWeight { geometry: same_conv(), kernel: smallvec![3, 3] }, &["f32[8,3,12,12]", "f32[8,6,12,12]"], "([n, c, h>3*1-1, w>3*1-1], [n, o, h, w])->([o, c, kh, kw]) {n=8, o=6, c=3, h=12, w=12, kh=3, kw=3} reduction={n, h, w} whole={kh, kw}"),
        example(CrossEntropy { base: 0, classes: 10 }, &["f32[8,10]", "i32[8]", "f32[8]", "f32[8]"], "([d0, d1], [d0], [d0], [d0])->([d0]) {d0=8, d1=10} reduction={d1}"),
        example(CrossEntropyGrad { base: 0, classes: 10 }, &["f32[8,10]", "i32[8]", "f32[8]", "f32[8]", "f32[8]"], "([d0, d1], [d0], [d0], [d0], [d0])->([d0, d1]) {d0=8, d1=10}"),
        example(Cumsum { axis: 1, exclusive: true, reverse: false }, &["f32[8,6]"], "([d0, d1])->([d0, d1]) {d0=8, d1=6} whole={d1}"),
        example(Dropout::new(0.1, 7, &[8, 6].into()), &["f32[8,6]"], "([d0, d1])->([d0, d1]) {d0=8, d1=6}"),
        example(DynamicSlice { sizes: smallvec![8, 2] }, &["f32[8,6]", "i32[]", "i32[]"], "([d0, _], [], [])->([d0, _]) {d0=8}"),
        example(DynamicUpdate {}, &["f32[8,6]", "f32[8,2]", "i32[]", "i32[]"], "([d0, _], [d0, _], [], [])->([d0, _]) {d0=8}"),
        example(Fill { value: Real(f64::NEG_INFINITY), ty: "f32[8]".parse().unwrap() }, &[], "()->([d0]) {d0=8}"),
        example(Gather { axis: 0, base: 0, extent: 100 }, &["f32[100,6]", "i32[8,5]"], "([v, d1], [i0, i1])->([i0, i1, d1]) {v=100, i0=8, i1=5, d1=6} reduction={v}"),
        example(Iota { ty: "i32[8,6]".parse().unwrap(), axis: 1, start: 0 }, &[], "()->([d0, d1]) {d0=8, d1=6}"),
        example(Literal { ty: "f32[2]".parse().unwrap(), values: vec![Real(1.0), Real(2.5)].into() }, &[], "()->([d0]) {d0=2}"),
        example(LogSoftmax { axis: 1 }, &["f32[8,10]"], "([d0, d1])->([d0, d1]) {d0=8, d1=10} whole={d1}"),
        example(LogSoftmaxGrad { axis: 1 }, &["f32[8,10]"; 2], "([d0, d1], [d0, d1])->([d0, d1]) {d0=8, d1=10} whole={d1}"),
        example(Lstm {}, &["f32[5,8,4,6]", "f32[6,4,6]", "f32[8,6]", "f32[8,6]"], "([t, b, gate, h], [k, gate, h], [b, k], [b, h])->([t, b, h], [t, b, h], [t, b, gate, h]) {t=5, b=8, gate=4, h=6, k=6} whole={t, gate, h, k}"),
        example(LstmGrad { dy: true, dc: false }, &["f32[6,4,6]", "f32[8,6]", "f32[8,6]", "f32[5,8,6]", "f32[5,8,6]", "f32[5,8,4,6]", "f32[5,8,6]"], "([k, gate, h], [b, k], [b, h], [t, b, h], [t, b, h], [t, b, gate, h], [t, b, h])->([t, b, gate, h], [k, gate, h], [b, k], [b, h]) {t=5, b=8, gate=4, h=6, k=6} reduction={b} whole={t, gate, h, k}"),
        example(MaxPool { geometry: PoolGeometry::plain(&[3, 3], &[2, 2]) }, &["f32[8,3,13,13]"], "([n, c, h>3*2+0, w>3*2+0])->([n, c, h, w], [n, c, h, w]) {n=8, c=3, h=6, w=6}"),
        example(MaxPoolGrad { geometry: PoolGeometry::plain(&[3, 3], &[2, 2]), input: smallvec![13, 13] }, &["f32[8,3,6,6]", "i32[8,3,6,6]"], "([n, c, h<3*2+0, w<3*2+0], [n, c, h<3*2+0, w<3*2+0])->([n, c, h, w]) {n=8, c=3, h=13, w=13}"),
        example(Momentum { lr: Real(0.1), momentum: Real(0.9) }, &["f32[8,6]"; 3], "([d0, d1], [d0, d1], [d0, d1])->([d0, d1], [d0, d1]) {d0=8, d1=6}"),
        example(batch_norm(), &["f32[8,3,5]", "f32[3]", "f32[3]", "f32[3]", "f32[3]"], "([d0, d1, d2], [d1], [d1], [d1], [d1])->([d0, d1, d2]) {d0=8, d1=3, d2=5}"),
        example(NormGradInput { norm: batch_norm() }, &["f32[8,3,5]", "f32[8,3,5]", "f32[3]", "f32[3]", "f32[3]", "f32[3]", "f32[3]"], "([d0, d1, d2], [d0, d1, d2], [d1], [d1], [d1], [d1], [d1])->([d0, d1, d2]) {d0=8, d1=3, d2=5}"),
        example(NormGradParams { norm: batch_norm() }, &["f32[8,3,5]", "f32[8,3,5]", "f32[3]", "f32[3]"], "([d0, d1, d2], [d0, d1, d2], [d1], [d1])->([d1], [d1]) {d0=8, d1=3, d2=5} reduction={d0, d2}"),
        example(NormGradStats { norm: batch_norm() }, &["f32[8,3,5]", "f32[8,3,5]", "f32[3]", "f32[3]", "f32[3]"], "([d0, d1, d2], [d0, d1, d2], [d1], [d1], [d1])->([d1], [d1]) {d0=8, d1=3, d2=5} reduction={d0, d2}"),
        example(OneHot { depth: 10, base: 0, dtype: DType::F32 }, &["i32[8]"], "([d0])->([d0, depth]) {d0=8, depth=10}"),
        example(Opaque { call: "library".into(), makes: vec!["f32[8,6]".parse().unwrap()] }, &["f32[8,6]"], "([_, _])->([_, _]) {}"),
        example(Pad { low: smallvec![0, 1], high: smallvec![0, 2], interior: smallvec![0, 1], value: Real(0.0) }, &["f32[8,6]"], "([d0, _])->([d0, _]) {d0=8}"),
        example(PutAlong { axis: 1, base: 0, extent: 100, rows: 100 }, &["i32[8,5]", "f32[8,5]"], "([d0, i], [d0, i])->([d0, v]) {d0=8, v=100, i=5} reduction={i}"),
        example(Reduce::max(smallvec![1]), &["f32[8,6]"], "([d0, d1])->([d0]max) {d0=8, d1=6} reduction={d1}"),
        example(Reshape { shape: [8, 12, 64].into() }, &["f32[8,768]"], "([d0, d1d2])->([d0, d1, d2]) {d0=8, d1=12, d2=64} whole={d2}"),
        example(Reverse { axes: smallvec![1] }, &["f32[8,6]"], "([d0, d1])->([d0, d1]) {d0=8, d1=6} whole={d1}"),
        example(ScatterAdd { axis: 0, base: 0, extent: 100, rows: 100 }, &["i32[8,5]", "f32[8,5,6]"], "([i0, i1], [i0, i1, d1])->([v, d1]) {v=100, i0=8, i1=5, d1=6} reduction={i0, i1}"),
        example(Select {}, &["bool[8,6]", "f32[8,6]", "f32[]"], "([d0, d1], [d0, d1], [])->([d0, d1]) {d0=8, d1=6}"),
        example(Sgd { lr: Real(0.1) }, &["f32[8,6]"; 2], "([d0, d1], [d0, d1])->([d0, d1]) {d0=8, d1=6}"),
        example(Slice { start: smallvec![0, 1], limit: smallvec![8, 6], stride: smallvec![1, 2] }, &["f32[8,6]"], "([d0, _])->([d0, _]) {d0=8}"),
        example(Softmax { axis: 1 }, &["f32[8,10]"], "([d0, d1])->([d0, d1]) {d0=8, d1=10} whole={d1}"),
        example(SoftmaxGrad { axis: 1 }, &["f32[8,10]"; 2], "([d0, d1], [d0, d1])->([d0, d1]) {d0=8, d1=10} whole={d1}"),
        example(Sort { axis: 1, descending: false }, &["f32[8,6]", "i32[8,6]"], "([d0, d1], [d0, d1])->([d0, d1], [d0, d1]) {d0=8, d1=6} whole={d1}"),
        example(SumExp {}, &["f32[8,10]", "f32[8]"], "([d0, d1], [d0])->([d0]) {d0=8, d1=10} reduction={d1}"),
        example(TakeAlong { axis: 1, base: 0, extent: 100 }, &["f32[8,100]", "i32[8,5]"], "([d0, v], [d0, i])->([d0, i]) {d0=8, v=100, i=5} reduction={v}"),
        example(TopK { k: 2 }, &["f32[8,10]"], "([d0, _])->([d0, _], [d0, _]) {d0=8}"),
        example(TopKMask { k: 2 }, &["f32[8,10]"], "([d0, d1])->([d0, d1]) {d0=8, d1=10} whole={d1}"),
        example(Transpose { perm: smallvec![2, 0, 1] }, &["f32[8,6,4]"], "([d0, d1, d2])->([d2, d0, d1]) {d0=8, d1=6, d2=4}"),
        example(TransposeGrad { perm: smallvec![2, 0, 1] }, &["f32[4,8,6]"], "([d2, d0, d1])->([d0, d1, d2]) {d0=8, d1=6, d2=4}"),
        example(Unary { f: UnaryFn::Affine { scale: Real(0.1), shift: Real(1.0) } }, &["f32[8]"], "([d0])->([d0]) {d0=8}"),
        example(UnaryGrad { f: UnaryFn::LeakyRelu(Real(0.3)) }, &["f32[8]", "f32[8]"], "([d0], [d0])->([d0]) {d0=8}"),
        example(Variance::over(smallvec![0, 2], true, &[8, 3, 5]), &["f32[8,3,5]", "f32[3]"], "([d0, d1, d2], [d1])->([d1]) {d0=8, d1=3, d2=5} reduction={d0, d2}"),
    ]
}
