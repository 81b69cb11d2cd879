//! Factor kinds, op by op, on small training steps.

mod common;

use common::{einsum, input, mean, mlp, parameter, relu};
use shardwright_graph::{
    DType, FactorKind, Graph, GraphBuilder, Init, OpId, Optimizer, Real, Role, TensorId, TensorType,
    autodiff::differentiate,
    factor_kinds,
    ops::{Binary, BinaryFn, Cast, Conv, ConvGeometry, Gather, Reduce, Reshape, Slice, Transpose},
    train,
};

/// An op's factors with the initials of their kinds: `m:S n:P k:R`.
fn kinds_of(graph: &Graph, op: OpId) -> String {
    let letter = |k: FactorKind| match k {
        FactorKind::Sample => 'S',
        FactorKind::Attribute => 'A',
        FactorKind::Parameter => 'P',
        FactorKind::Reduction => 'R',
    };
    let rule = graph.rule(op);
    let kinds = &factor_kinds(graph)[op.index()];
    let all: Vec<_> =
        rule.factors.iter().zip(kinds).map(|(f, &k)| format!("{}:{}", f.name, letter(k))).collect();
    all.join(" ")
}

#[track_caller]
fn check(graph: &Graph, op: &str, expected: &str) {
    let id = graph.op_ids().find(|&id| graph.node(id).name == op).expect("no such op");
    assert_eq!(kinds_of(graph, id), expected, "{op}");
}

#[test]
fn a_linear_layer_has_a_sample_a_parameter_and_a_reduction_factor() {
    let graph = mlp();
    check(&graph, "fc0.matmul", "m:S n:P k:R");
    check(&graph, "fc0.add", "d0:S d1:P");
    check(&graph, "fc0.relu", "d0:S d1:A");
    check(&graph, "loss", "d0:S d1:R");
}

#[test]
fn backward_ops_take_the_kinds_of_their_forward_op() {
    let graph = mlp();
    // The weight's gradient sums over the batch, yet the batch stays the batch; likewise in its layer k.
    check(&graph, "fc0.matmul.grad", "k:R n:P m:S");
    check(&graph, "fc1.matmul.grad", "m:S k:R n:P");
    check(&graph, "fc0.add.grad", "d0:S d1:P");
    check(&graph, "fc0.relu.grad", "d0:S d1:A");
    let kinds = factor_kinds(&graph);
    for id in graph.op_ids() {
        assert_eq!(kinds[id.index()].len(), graph.rule(id).factors.len());
    }
}

#[test]
fn attention_scores_have_attribute_factors_and_the_merged_batch_is_followed() {
    let mut b = GraphBuilder::new("attention");
    let x = input(&mut b, "x", &[4, 6, 16]);
    let merged = b.emit("merge", Reshape { shape: [24, 16].into() }, &[x]).unwrap();
    let w = parameter(&mut b, "w", &[16, 16]);
    let q = einsum(&mut b, "project", "mk,kn->mn", &[merged, w]);
    let q = b.emit("heads", Reshape { shape: [4, 6, 2, 8].into() }, &[q]).unwrap();
    let scores = einsum(&mut b, "scores", "bqhd,bkhd->bhqk", &[q, q]);
    let mixed = einsum(&mut b, "mix", "bhqk,bkhd->bqhd", &[scores, q]);
    let loss = mean(&mut b, mixed);
    b.output(loss);
    differentiate(&mut b, loss).unwrap();
    let graph = b.finish();
    check(&graph, "merge", "d0:S d1:A d2:A");
    check(&graph, "project", "m:S n:P k:R");
    check(&graph, "heads", "d0:S d1:A d2:A d3:A");
    check(&graph, "scores", "b:S h:A q:A k:A d:R");
    check(&graph, "mix", "b:S q:A h:A d:A k:R");
    check(&graph, "mix.grad", "b:S h:A q:A k:R d:A");
    check(&graph, "heads.grad", "d0:S d1:A d2:A d3:A");
}

#[test]
fn a_weight_is_one_through_casts_and_reshapes() {
    let mut b = GraphBuilder::new("bias");
    let x = b
        .source("x", TensorType::new(DType::F16, [4, 8, 5, 5]), Role::Input, Init::Normal(Real(1.0)))
        .unwrap();
    let bias = parameter(&mut b, "bias", &[8]);
    let half = b.emit("half", Cast { dtype: DType::F16 }, &[bias]).unwrap();
    let spread = b.emit("spread", Reshape { shape: [8, 1, 1].into() }, &[half]).unwrap();
    b.emit("add", Binary { f: BinaryFn::Add }, &[x, spread]).unwrap();
    let graph = b.finish();
    check(&graph, "half", "d0:P");
    check(&graph, "spread", "d0:P");
    check(&graph, "add", "d0:S d1:P d2:A d3:A");
}

#[test]
fn equal_sizes_do_not_make_a_weight_s_gradient_a_batch() {
    let mut b = GraphBuilder::new("square");
    let x = input(&mut b, "x", &[8, 8]);
    let bias = parameter(&mut b, "bias", &[1, 8]);
    let y = b.emit("add", Binary { f: BinaryFn::Add }, &[x, bias]).unwrap();
    let y = relu(&mut b, y);
    let loss = mean(&mut b, y);
    differentiate(&mut b, loss).unwrap();
    let graph = b.finish();
    check(&graph, "add.grad", "d0:S d1:P");
    // A reshape from [8] to [1,8]: its d0 is not the d0 of the addition.
    check(&graph, "add.grad.1", "d0:P");
}

#[test]
fn a_convolution_s_image_dimensions_are_attributes() {
    let mut b = GraphBuilder::new("conv");
    let x = input(&mut b, "x", &[8, 3, 12, 12]);
    let w = parameter(&mut b, "w", &[6, 3, 3, 3]);
    let v = parameter(&mut b, "v", &[5, 6, 3, 3]);
    let y = b.emit("conv1", Conv { geometry: ConvGeometry::plain(2) }, &[x, w]).unwrap();
    let y = b.emit("conv2", Conv { geometry: ConvGeometry::plain(2) }, &[y, v]).unwrap();
    let y = b.emit("pool", Reduce::mean((2..4).collect(), b.shape(y)), &[y]).unwrap();
    let loss = mean(&mut b, y);
    train(&mut b, loss, &Optimizer::Sgd { lr: Real(0.1) }).unwrap();
    let graph = b.finish();
    check(&graph, "conv2", "n:S o:P c:R h:A w:A kh:R kw:R");
    check(&graph, "pool", "d0:S d1:A d2:R d3:R");
    // The gradient by the image runs over the image's own, larger rows.
    let kinds = |kind: &str| {
        let id = graph.op_ids().find(|&id| graph.node(id).op.kind() == kind).unwrap();
        kinds_of(&graph, id)
    };
    assert_eq!(kinds("conv_grad_weight"), "n:S o:P c:R h:A w:A kh:R kw:R");
    assert_eq!(kinds("conv_grad_input"), "n:S o:P c:R h:A w:A kh:R kw:R");
    assert_eq!(kinds("sgd"), "d0:P d1:P d2:P d3:P");
}

#[test]
fn an_embedding_s_rows_are_summed_away_and_its_columns_are_parameters() {
    let mut b = GraphBuilder::new("embedding");
    let ids = TensorType::new(DType::I32, [4, 6]);
    let ids = b.source("ids", ids, Role::Input, Init::Below(100)).unwrap();
    let table = parameter(&mut b, "table", &[100, 16]);
    let rows = b.emit("embed", Gather { axis: 0, base: 0, extent: 100 }, &[table, ids]).unwrap();
    let turned = b.emit("turn", Transpose { perm: (0..3).rev().collect() }, &[rows]).unwrap();
    let loss = mean(&mut b, turned);
    differentiate(&mut b, loss).unwrap();
    let graph = b.finish();
    check(&graph, "embed", "v:R i0:S i1:A d1:P");
    check(&graph, "turn", "d0:S d1:A d2:A");
    check(&graph, "loss", "d0:R d1:R d2:S");
    check(&graph, "embed.grad", "v:R i0:S i1:A d1:P");
}

/// The sum over micro-batches of `x[i] @ w`, for an operand `x` that a loop takes apart.
fn accumulated(b: &mut GraphBuilder, x: TensorId) {
    let w = parameter(b, "w", &[16, 4]);
    let shape: Vec<u64> = b.shape(x).to_vec();
    for i in 0..shape[0] {
        let part = b.emit("part", Slice::along(0, i, i + 1, &shape), &[x]).unwrap();
        let part = b.emit("row", Reshape { shape: shape[1..].into() }, &[part]).unwrap();
        let y = einsum(b, "product", "mk,kn->mn", &[part, w]);
        let loss = mean(b, y);
        b.output(loss);
    }
}

#[test]
fn the_dimension_that_a_loop_takes_apart_is_not_the_batch() {
    let mut b = GraphBuilder::new("accumulation");
    let x = input(&mut b, "x", &[2, 8, 16]);
    let doubled = b.emit("doubled", Binary { f: BinaryFn::Add }, &[x, x]).unwrap();
    accumulated(&mut b, doubled);
    let graph = b.finish();
    check(&graph, "doubled", "d0:A d1:S d2:A");
    check(&graph, "part", "d1:S d2:A");
    check(&graph, "product", "m:S n:P k:R");
}

#[test]
fn samples_are_followed_into_micro_batches() {
    let mut b = GraphBuilder::new("divided");
    let x = input(&mut b, "x", &[16, 16]);
    let divided = b.emit("divided", Reshape { shape: [2, 8, 16].into() }, &[x]).unwrap();
    accumulated(&mut b, divided);
    let graph = b.finish();
    check(&graph, "divided", "d0:A d1:S d2:A");
    check(&graph, "product", "m:S n:P k:R");
}

#[test]
fn a_single_sample_stays_the_batch() {
    let mut b = GraphBuilder::new("one");
    let x = input(&mut b, "x", &[1, 8, 16]);
    let y = b.emit("relu", Binary { f: BinaryFn::Max }, &[x, x]).unwrap();
    b.output(y);
    check(&b.finish(), "relu", "d0:S d1:A d2:A");
}
