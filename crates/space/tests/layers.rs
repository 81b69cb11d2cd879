//! What the ops of a layer do under the forward op's config.

use shardwright_graph::{
    DType, Graph, GraphBuilder, Init, OpId, Optimizer, Real, Role, TensorType,
    ops::{Binary, BinaryFn, Contract, Reduce},
    train,
};
use shardwright_machine::builtin;
use shardwright_space::{AxisUse, Config, LayerSplit, OpShapes};

/// A product with a bias whose result is used twice.
fn graph() -> Graph {
    let mut b = GraphBuilder::new("g");
    let init = Init::Normal(Real(1.0));
    let source = |b: &mut GraphBuilder, name: &str, shape: &[u64], role| {
        b.source(name, TensorType::new(DType::F32, shape), role, init).unwrap()
    };
    let x = source(&mut b, "x", &[8, 4], Role::Input);
    let w = source(&mut b, "w", &[4, 8], Role::Parameter);
    let bias = source(&mut b, "bias", &[8], Role::Parameter);
    let y = b.emit("fc", Contract::parse("nc,co->no").unwrap(), &[x, w]).unwrap();
    let z = b.emit("add", Binary { f: BinaryFn::Add }, &[y, bias]).unwrap();
    let twice = b.emit("twice", Binary { f: BinaryFn::Mul }, &[z, y]).unwrap();
    let loss = b.emit("loss", Reduce::sum([0, 1].into_iter().collect()), &[twice]).unwrap();
    b.output(loss);
    train(&mut b, loss, &Optimizer::sgd(0.1)).unwrap();
    b.finish()
}

/// The configs of a layer's ops when its forward op is split along `factor` over two devices.
fn check(layer: &str, factor: &str, expected: &[(&str, &str)]) {
    let (graph, machine) = (graph(), builtin("flat:2").unwrap());
    let shapes: Vec<OpShapes> = graph.op_ids().map(|op| OpShapes::of(&graph, op)).collect();
    let at = graph.layers.iter().position(|l| l.name == layer).unwrap();
    let ops: Vec<OpId> = graph.op_ids().filter(|&op| graph.node(op).layer.index() == at).collect();
    let forward = graph.layers[at].forward;
    let split = LayerSplit::new(&graph, &shapes, ops, forward);
    let config = Config::new([AxisUse::Split(shapes[forward.index()].rule.find(factor).unwrap())]);
    let configs = split.configs(&shapes, machine.mesh(), &config);
    let found: Vec<(String, String)> = split
        .ops
        .iter()
        .zip(&configs)
        .map(|(&op, c)| {
            let node = graph.node(op);
            (format!("{} {}", node.op.kind(), node.name), c.show(&shapes[op.index()].rule, machine.mesh()))
        })
        .collect();
    let expected: Vec<_> = expected.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect();
    assert_eq!(found, expected, "{layer} by {factor}");
}

#[test]
fn backward_ops_follow_by_name_and_updates_follow_their_weight() {
    // The sum of the two gradients of `fc` has dimensions only: it follows what the products need.
    check(
        "fc",
        "o",
        &[
            ("contract fc", "o2"),
            ("binary fc.grad_sum", "d1=2"),
            ("contract fc.grad", "o2"),
            ("sgd w.update", "d1=2"),
        ],
    );
    // Split by samples the weight is whole everywhere, so its update is repeated.
    check(
        "fc",
        "n",
        &[
            ("contract fc", "n2"),
            ("binary fc.grad_sum", "d0=2"),
            ("contract fc.grad", "n2"),
            ("sgd w.update", "whole"),
        ],
    );
}

#[test]
fn dimensions_that_agree_in_name_only_are_not_mistaken_for_each_other() {
    // `d0` of the sum is the samples; `d0` of the bias is its only dimension, of the same size.
    check("add", "d0", &[("binary add", "d0=2"), ("reduce add.grad", "d0=2"), ("sgd bias.update", "whole")]);
    check("add", "d1", &[("binary add", "d1=2"), ("reduce add.grad", "d1=2"), ("sgd bias.update", "d0=2")]);
}
