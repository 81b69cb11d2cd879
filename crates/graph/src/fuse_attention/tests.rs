//! Patterns that are recognised, and patterns that are not.

use super::*;
use crate::{
    graph::Role,
    ops::{Attention, Contract, Reduce, Softmax, Unary, UnaryFn},
    types::DType,
    verify::verify,
};

fn source(b: &mut GraphBuilder, name: &str, dtype: DType, shape: &[u64], role: Role) -> TensorId {
    let init = if dtype == DType::Bool { Init::Below(2) } else { Init::Normal(Real(1.0)) };
    b.source(name, TensorType::new(dtype, shape), role, init).unwrap()
}

fn einsum(b: &mut GraphBuilder, name: &str, spec: &str, inputs: &[TensorId]) -> TensorId {
    b.emit(name, Contract::parse(spec).unwrap(), inputs).unwrap()
}

/// Products by these einsums on operands of these shapes, with steps between product and softmax.
fn attention(
    specs: [&str; 2],
    shapes: [&[u64]; 3],
    steps: impl Fn(&mut GraphBuilder, TensorId) -> TensorId,
) -> AttentionFusion {
    let mut b = GraphBuilder::new("plain");
    let mut operand = |name, shape| source(&mut b, name, DType::F32, shape, Role::Input);
    let [q, k, v] = [operand("q", shapes[0]), operand("k", shapes[1]), operand("v", shapes[2])];
    let scores = einsum(&mut b, "scores", specs[0], &[q, k]);
    let scores = steps(&mut b, scores);
    let axis = b.shape(scores).len() - 1;
    let weights = b.emit("weights", Softmax { axis }, &[scores]).unwrap();
    let y = einsum(&mut b, "context", specs[1], &[weights, v]);
    let loss = b.emit("loss", Reduce::sum((0..b.shape(y).len()).collect()), &[y]).unwrap();
    b.output(loss);
    let causal =
        |t: TensorId| (t.index() == 4).then(|| (0..48).map(|i| f64::from(i % 8 <= i / 8 + 2)).collect());
    let fusion = fuse_attention(b.finish(), &[], &causal).unwrap();
    assert_eq!(verify(&fusion.graph), Ok(()));
    fusion
}

fn kinds(graph: &Graph) -> Vec<&'static str> {
    graph.ops.iter().map(|node| node.op.kind()).collect()
}

fn fused(graph: &Graph) -> &Attention {
    let find = |node: &Node| matches!(node.op, Op::Attention(_));
    let Op::Attention(op) = &graph.ops.iter().find(|node| find(node)).expect("an attention").op else {
        panic!("no attention")
    };
    op
}

const POSITIONS_FIRST: [&[u64]; 3] = [&[2, 6, 4, 16], &[2, 8, 4, 16], &[2, 8, 4, 10]];

fn affine(b: &mut GraphBuilder, x: TensorId) -> TensorId {
    let f = UnaryFn::Affine { scale: Real(0.25), shift: Real(0.0) };
    b.emit("scale", Unary { f }, &[x]).unwrap()
}

#[test]
fn every_order_of_dimensions_is_recognised() {
    let check = |specs, shapes, expected: &[&str]| {
        let found = attention(specs, shapes, affine);
        assert_eq!(kinds(&found.graph), expected, "{specs:?}");
        assert_eq!(found.fused, ["context"]);
        assert_eq!(fused(&found.graph).scale, Real(0.25));
    };
    check(["nqhd,nkhd->nhqk", "nhqk,nkhe->nqhe"], POSITIONS_FIRST, &["attention", "reduce"]);
    check(
        ["bhqd,bhkd->bhqk", "bhqk,bhkv->bhqv"],
        [&[2, 4, 6, 16], &[2, 4, 8, 16], &[2, 4, 8, 10]],
        &["attention", "reduce"],
    );
    // Keys are stored transposed, and the result too.
    check(
        ["abqd,abdk->abqk", "abqk,abke->aqbe"],
        [&[2, 4, 6, 16], &[2, 4, 16, 8], &[2, 4, 8, 10]],
        &["transpose", "attention", "transpose", "reduce"],
    );
    // Keys first, grouped queries.
    check(
        ["nkgd,nqgrd->ngrqk", "ngrqk,nkge->nqgre"],
        [&[2, 8, 4, 16], &[2, 6, 4, 3, 16], &[2, 8, 4, 10]],
        &["attention", "reduce"],
    );
}

#[test]
fn masks_become_a_bias_and_a_stored_causal_mask_an_attribute() {
    let specs = ["nqhd,nkhd->nhqk", "nhqk,nkhe->nqhe"];
    let hide = |b: &mut GraphBuilder, x: TensorId, name: &str, number: f64| {
        let cond = source(b, name, DType::Bool, &[6, 8], Role::Constant);
        let ty = TensorType::new(DType::F32, []);
        let hidden = b.emit("hidden", Fill { value: Real(number), ty }, &[]).unwrap();
        b.emit("masked", Select {}, &[cond, x, hidden]).unwrap()
    };
    // Tensor 4 is the first mask: its contents are causal.
    let causal = attention(specs, POSITIONS_FIRST, |b, x| hide(b, x, "visible", f64::NEG_INFINITY));
    assert_eq!(kinds(&causal.graph), ["attention", "reduce"]);
    assert_eq!((fused(&causal.graph).after, fused(&causal.graph).diagonal), (Some(0), 2));
    let both = attention(specs, POSITIONS_FIRST, |b, x| {
        let scaled = affine(b, x);
        let bias = source(b, "bias", DType::F32, &[2, 1, 1, 8], Role::Input);
        let sum = b.emit("biased", Binary { f: BinaryFn::Add }, &[scaled, bias]).unwrap();
        hide(b, sum, "seen", -1e9)
    });
    assert_eq!(kinds(&both.graph), ["fill", "fill", "select", "binary", "attention", "reduce"]);
    assert_eq!(fused(&both.graph).after, None);
    // A small number hides nothing, and a factor behind a mask scales it.
    let weak = attention(specs, POSITIONS_FIRST, |b, x| hide(b, x, "weak", -1.0));
    assert!(weak.fused.is_empty() && kinds(&weak.graph).contains(&"softmax"));
    let late = attention(specs, POSITIONS_FIRST, |b, x| {
        let masked = hide(b, x, "late", f64::NEG_INFINITY);
        affine(b, masked)
    });
    assert!(late.fused.is_empty());
}

#[test]
fn scores_that_are_read_elsewhere_stay() {
    let mut b = GraphBuilder::new("plain");
    let [q, k, v] = ["q", "k", "v"].map(|name| source(&mut b, name, DType::F32, &[2, 6, 4, 16], Role::Input));
    let scores = einsum(&mut b, "scores", "nqhd,nkhd->nhqk", &[q, k]);
    let weights = b.emit("weights", Softmax { axis: 3 }, &[scores]).unwrap();
    let y = einsum(&mut b, "context", "nhqk,nkhd->nqhd", &[weights, v]);
    b.output(y);
    let graph = b.finish();
    assert_eq!(fuse_attention(graph.clone(), &[weights], &|_| None).unwrap().graph, graph);
    let fusion = fuse_attention(graph, &[], &|_| None).unwrap();
    assert_eq!(kinds(&fusion.graph), ["attention"]);
    assert_eq!((fusion.tensors[weights.index()], fusion.tensors[q.index()]), (None, Some(q)));
}
