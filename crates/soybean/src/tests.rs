//! Tests of one cut: requests compared with the paper's table, both solvers compared with brute force.

use crate::{
    eliminate, levels,
    one_cut::{CutSolution, OneCut, OpRegions, Regions},
    tiling_graph::{TilingGraph, Unit},
};
use proptest::prelude::*;
use shardwright_graph::{
    DType, Graph, GraphBuilder, Init, Optimizer, Real, Role, TensorId, TensorType,
    ops::{Binary, BinaryFn, Contract, Reduce, Softmax, Transpose, Unary, UnaryFn},
    train,
};
use shardwright_search::Control;
use shardwright_space::OpShapes;
use shardwright_zoo::{BuildOptions, build};

fn shapes(graph: &Graph) -> Vec<OpShapes> {
    graph.op_ids().map(|op| OpShapes::of(graph, op)).collect()
}

/// A unit's requests in the notation of the paper's table: operands, then results, each tensor once.
fn table(tiling_graph: &TilingGraph<'_>, unit: &Unit, names: &[(TensorId, &str)]) -> Vec<String> {
    let regions = Regions::whole(tiling_graph);
    let request = |l: usize| {
        let (mut reads, mut makes) = (Vec::new(), Vec::new());
        for (member, &op) in unit.ops.iter().enumerate() {
            let op_regions = OpRegions::new(tiling_graph, &regions, op, Some(unit.loops[l][member]));
            let node = tiling_graph.graph.node(op);
            let named = |t: &TensorId, letters: String| {
                names.iter().find(|(known, _)| known == t).map(|(_, name)| format!("{name} {letters}"))
            };
            reads.extend(
                node.inputs.iter().enumerate().filter_map(|(i, t)| named(t, op_regions.input(i).letters())),
            );
            makes.extend(
                node.outputs.iter().enumerate().filter_map(|(o, t)| named(t, op_regions.output(o).letters())),
            );
        }
        for list in [&mut reads, &mut makes] {
            list.sort_unstable();
            list.dedup();
        }
        format!("{} -> {}", reads.join(", "), makes.join(", "))
    };
    (0..unit.loops.len()).map(request).collect()
}

/// The forward unit of a layer and its backward units, by the layer's name.
fn units<'s>(tiling_graph: &'s TilingGraph<'_>, layer: &str) -> Vec<&'s Unit> {
    let of = |unit: &&Unit| {
        tiling_graph.graph.layers[tiling_graph.graph.node(unit.ops[0]).layer.index()].name == layer
    };
    tiling_graph.units.iter().filter(of).collect()
}

fn sorted(mut lines: Vec<String>) -> Vec<String> {
    lines.sort_unstable();
    lines
}

/// Names a layer's tensors as the paper does: `x`, `w`, `y` and their gradients.
fn names<'n>(graph: &Graph, layer: &str, gradients: [TensorId; 2]) -> Vec<(TensorId, &'n str)> {
    let forward = graph.ops.iter().find(|n| n.name == layer).unwrap();
    let weight = graph.gradients.iter().find(|g| g.parameter == forward.inputs[1]).unwrap();
    let [dy, dx] = gradients;
    vec![
        (forward.inputs[0], "x"),
        (forward.inputs[1], "w"),
        (forward.outputs[0], "y"),
        (dy, "dy"),
        (dx, "dx"),
        (weight.gradient, "dw"),
    ]
}

/// The gradients of a layer's result and of its first operand.
fn gradients(graph: &Graph, layer: &str) -> [TensorId; 2] {
    let at = graph.layers.iter().position(|l| l.name == layer).unwrap();
    let backward: Vec<_> =
        graph.ops.iter().filter(|n| n.layer.index() == at && n.name.contains(".grad")).collect();
    let dw = backward.iter().find(|n| graph.gradients.iter().any(|g| g.gradient == n.outputs[0])).unwrap();
    let dx = backward.iter().find(|n| n.outputs != dw.outputs).unwrap();
    let dy = dw.inputs.iter().find(|t| dx.inputs.contains(t)).unwrap();
    [*dy, dx.outputs[0]]
}

#[test]
fn the_papers_table_of_fully_connected_layers_follows_from_the_rules() {
    let graph = build("mlp:batch=8,hidden=16,layers=2,loss=elementwise", &BuildOptions::default()).unwrap();
    let shapes = shapes(&graph);
    let tiling_graph = TilingGraph::new(&graph, &shapes, None);
    let names = names(&graph, "fc2", gradients(&graph, "fc2"));
    let [forward, backward] = units(&tiling_graph, "fc2")[..] else { panic!("one unit each way") };
    // Our weights are inputs by outputs, the paper's are outputs by inputs: R and C of weights are swapped.
    assert_eq!(
        sorted(table(&tiling_graph, forward, &names)),
        ["w C, x r -> y C", "w R, x C -> y red", "w r, x R -> y R"]
    );
    assert_eq!(
        sorted(table(&tiling_graph, backward, &names)),
        ["dy C, w C, x r -> dw C, dx red", "dy R, w r, x R -> dw red, dx R", "dy r, w R, x C -> dw R, dx C"]
    );
}

#[test]
fn the_papers_table_of_convolutions_follows_from_the_rules() {
    let graph = build("lenet5:batch=8", &BuildOptions::default()).unwrap();
    let shapes = shapes(&graph);
    let tiling_graph = TilingGraph::new(&graph, &shapes, None);
    let layer = graph.ops.iter().filter(|n| n.op.kind() == "conv").nth(1).map(|n| n.name.clone()).unwrap();
    let names = names(&graph, &layer, gradients(&graph, &layer));
    let [forward, backward] = units(&tiling_graph, &layer)[..] else { panic!("one unit each way") };
    let plain = |unit| {
        // Cuts of height and width are an addition to the paper: windows reach into the other side.
        sorted(table(&tiling_graph, unit, &names))
            .into_iter()
            .filter(|l| !l.contains(['H', 'W', '?']))
            .collect::<Vec<_>>()
    };
    assert_eq!(plain(forward), ["w C, x C -> y red", "w R, x r -> y C", "w r, x R -> y R"]);
    assert_eq!(
        plain(backward),
        ["dy C, w R, x r -> dw R, dx red", "dy R, w r, x R -> dw red, dx R", "dy r, w C, x C -> dw C, dx C"]
    );
    assert!(table(&tiling_graph, forward, &names).len() > 3, "height and width can be split");
}

#[test]
fn element_wise_ops_are_split_along_any_dimension_and_never_repeated() {
    let graph = build("mlp:batch=8,hidden=16,layers=2,loss=elementwise", &BuildOptions::default()).unwrap();
    let shapes = shapes(&graph);
    let tiling_graph = TilingGraph::new(&graph, &shapes, None);
    let cut = Regions::whole(&tiling_graph).cut(&tiling_graph, |_| None, |_, elements| elements);
    for (unit, choice) in tiling_graph.units.iter().zip(&cut.units) {
        let node = graph.node(unit.ops[0]);
        match node.op.kind() {
            "unary" | "unary_grad" if graph.tensor(node.outputs[0]).ty.rank() == 2 => {
                assert_eq!(choice.requests, [Some(0), Some(1)]);
            }
            "log_softmax" | "log_softmax_grad" => assert_eq!(choice.requests, [Some(0)], "samples only"),
            // A single number cannot be split.
            "fill" => assert_eq!(choice.requests, [None]),
            _ => assert!(!choice.requests.contains(&None) || graph.tensor(node.outputs[0]).ty.rank() == 0),
        }
    }
}

/// The least cost and rank over all tilings.
fn brute(cut: &OneCut) -> (u64, u64) {
    let mut tilings = vec![0u32; cut.tilings.len()];
    let mut least = (u64::MAX, u64::MAX);
    loop {
        let solution = cut.solution(tilings.clone(), false);
        least = least.min((solution.cost, solution.rank));
        let Some(at) = (0..tilings.len()).find(|&g| tilings[g] as usize + 1 < cut.tilings[g].len()) else {
            return least;
        };
        tilings[at] += 1;
        tilings[..at].fill(0);
    }
}

/// One op of a random graph.
#[derive(Clone, Debug)]
enum RandomOp {
    Product(u64),
    Unary,
    Softmax,
    Transpose,
    Add(usize),
}

fn graph(samples: u64, inputs: u64, all: &[RandomOp], trained: bool) -> Graph {
    let mut b = GraphBuilder::new("random");
    let init = Init::Normal(Real(1.0));
    let x = b.source("x", TensorType::new(DType::F32, [samples, inputs]), Role::Input, init).unwrap();
    let mut made = vec![x];
    for (i, next) in all.iter().enumerate() {
        let (last, name) = (made[made.len() - 1], format!("op{i}"));
        let y = match next {
            RandomOp::Product(outputs) => {
                let ty = TensorType::new(DType::F32, [b.shape(last)[1], *outputs]);
                let w = b.source(&format!("w{i}"), ty, Role::Parameter, init).unwrap();
                b.emit(&name, Contract::parse("nc,co->no").unwrap(), &[last, w]).unwrap()
            }
            RandomOp::Unary => b.emit(&name, Unary { f: UnaryFn::Relu }, &[last]).unwrap(),
            RandomOp::Softmax => b.emit(&name, Softmax { axis: 1 }, &[last]).unwrap(),
            RandomOp::Transpose => {
                b.emit(&name, Transpose { perm: [1, 0].into_iter().collect() }, &[last]).unwrap()
            }
            RandomOp::Add(which) => {
                let alike: Vec<_> = made.iter().copied().filter(|&t| b.shape(t) == b.shape(last)).collect();
                b.emit(&name, Binary { f: BinaryFn::Add }, &[last, alike[which % alike.len()]]).unwrap()
            }
        };
        made.push(y);
    }
    let loss = b.emit("loss", Reduce::sum([0, 1].into_iter().collect()), &[made[made.len() - 1]]).unwrap();
    b.output(loss);
    if trained && b.graph().parameters().next().is_some() {
        train(&mut b, loss, &Optimizer::sgd(0.1)).unwrap();
    }
    b.finish()
}

fn random_op() -> impl Strategy<Value = RandomOp> {
    prop_oneof![
        3 => prop::sample::select(vec![1u64, 2, 3, 4, 6, 32]).prop_map(RandomOp::Product),
        1 => Just(RandomOp::Unary),
        1 => Just(RandomOp::Softmax),
        1 => Just(RandomOp::Transpose),
        1 => (0usize..8).prop_map(RandomOp::Add),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Levels, elimination and brute force find the same cost at every cut of the recursion.
    #[test]
    fn one_cut_equals_brute_force_over_all_tilings(
        samples in prop::sample::select(vec![2u64, 4, 6, 8, 40]),
        inputs in prop::sample::select(vec![2u64, 3, 4, 24]),
        all in prop::collection::vec(random_op(), 1..5),
        trained in any::<bool>(),
    ) {
        let graph = graph(samples, inputs, &all, trained);
        let shapes = shapes(&graph);
        let tiling_graph = TilingGraph::new(&graph, &shapes, None);
        let mut regions = Regions::whole(&tiling_graph);
        for _ in 0..3 {
            let cut = regions.cut(&tiling_graph, |_| None, |_, elements| elements);
            let both = |a: &CutSolution| (a.cost, a.rank);
            let by_levels = levels::solve(&cut, 0).expect("narrow");
            let eliminated = eliminate::solve(&cut, &Control::new()).unwrap().expect("found");
            prop_assert_eq!(both(&by_levels), both(&eliminated));
            prop_assert!(eliminated.proved);
            if cut.tilings.iter().map(|t| t.len() as f64).product::<f64>() < 2e4 {
                prop_assert_eq!(both(&by_levels), brute(&cut));
            }
            // The root of the breadth-first search does not matter.
            prop_assert_eq!(levels::solve(&cut, tiling_graph.units.len() - 1).map(|a| both(&a)), Some(both(&by_levels)));
            regions.narrow(&tiling_graph, &cut, &by_levels);
        }
    }
}

#[test]
fn whole_models_cut_alike_by_levels_and_by_elimination() {
    for model in ["mlp:batch=64,layers=4", "lenet5:batch=16", "alexnet:batch=32"] {
        let graph = build(model, &BuildOptions::default()).unwrap();
        let shapes = shapes(&graph);
        let tiling_graph = TilingGraph::new(&graph, &shapes, None);
        let mut regions = Regions::whole(&tiling_graph);
        for _ in 0..3 {
            let cut = regions.cut(&tiling_graph, |_| None, |_, elements| elements);
            let eliminated = eliminate::solve(&cut, &Control::new()).unwrap().expect("found");
            let Some(solution) = levels::solve(&cut, 0) else { panic!("{model} is too wide") };
            assert_eq!((solution.cost, solution.rank), (eliminated.cost, eliminated.rank), "{model}");
            regions.narrow(&tiling_graph, &cut, &solution);
        }
    }
}
