//! One cut, from inside: requests against the paper's table, and both ways to solve it against brute force.

use crate::{
    eliminate, levels,
    one_cut::{Answer, Form, OneCut, Regions},
    step::{Step, Unit},
};
use proptest::prelude::*;
use shardwright_frontend::zoo::{BuildOptions, build};
use shardwright_graph::{
    DType, Graph, GraphBuilder, Init, Optimizer, Real, Role, TensorId, TensorType,
    ops::{Binary, BinaryFn, Contract, Reduce, Softmax, Transpose, Unary, UnaryFn},
    train,
};
use shardwright_search::Control;
use shardwright_space::OpShapes;

fn shapes(graph: &Graph) -> Vec<OpShapes> {
    graph.op_ids().map(|op| OpShapes::of(graph, op)).collect()
}

/// A unit's requests as the paper's table writes them: operands, then results, each tensor once.
fn table(step: &Step<'_>, unit: &Unit, names: &[(TensorId, &str)]) -> Vec<String> {
    let regions = Regions::whole(step);
    let request = |l: usize| {
        let (mut reads, mut makes) = (Vec::new(), Vec::new());
        for (member, &op) in unit.ops.iter().enumerate() {
            let form = Form::new(step, &regions, op, Some(unit.loops[l][member]));
            let node = step.graph.node(op);
            let named = |t: &TensorId, letters: String| {
                names.iter().find(|(known, _)| known == t).map(|(_, name)| format!("{name} {letters}"))
            };
            reads.extend(
                node.inputs.iter().enumerate().filter_map(|(i, t)| named(t, form.input(i).letters())),
            );
            makes.extend(
                node.outputs.iter().enumerate().filter_map(|(o, t)| named(t, form.output(o).letters())),
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
fn units<'s>(step: &'s Step<'_>, layer: &str) -> Vec<&'s Unit> {
    let of = |unit: &&Unit| step.graph.layers[step.graph.node(unit.ops[0]).layer.index()].name == layer;
    step.units.iter().filter(of).collect()
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
    let step = Step::new(&graph, &shapes, None);
    let names = names(&graph, "fc2", gradients(&graph, "fc2"));
    let [forward, backward] = units(&step, "fc2")[..] else { panic!("one unit each way") };
    // Our weights are inputs by outputs, the paper's outputs by inputs: R and C of weights change places.
    assert_eq!(
        sorted(table(&step, forward, &names)),
        ["w C, x r -> y C", "w R, x C -> y red", "w r, x R -> y R"]
    );
    assert_eq!(
        sorted(table(&step, backward, &names)),
        ["dy C, w C, x r -> dw C, dx red", "dy R, w r, x R -> dw red, dx R", "dy r, w R, x C -> dw R, dx C"]
    );
}

#[test]
fn the_papers_table_of_convolutions_follows_from_the_rules() {
    let graph = build("lenet5:batch=8", &BuildOptions::default()).unwrap();
    let shapes = shapes(&graph);
    let step = Step::new(&graph, &shapes, None);
    let layer = graph.ops.iter().filter(|n| n.op.kind() == "conv").nth(1).map(|n| n.name.clone()).unwrap();
    let names = names(&graph, &layer, gradients(&graph, &layer));
    let [forward, backward] = units(&step, &layer)[..] else { panic!("one unit each way") };
    let plain = |unit| {
        // Cuts of height and width are ours: windows reach into the other side.
        sorted(table(&step, unit, &names))
            .into_iter()
            .filter(|l| !l.contains(['H', 'W', '?']))
            .collect::<Vec<_>>()
    };
    assert_eq!(plain(forward), ["w C, x C -> y red", "w R, x r -> y C", "w r, x R -> y R"]);
    assert_eq!(
        plain(backward),
        ["dy C, w R, x r -> dw R, dx red", "dy R, w r, x R -> dw red, dx R", "dy r, w C, x C -> dw C, dx C"]
    );
    assert!(table(&step, forward, &names).len() > 3, "height and width can be split");
}

#[test]
fn element_wise_ops_are_split_along_any_dimension_and_never_repeated() {
    let graph = build("mlp:batch=8,hidden=16,layers=2,loss=elementwise", &BuildOptions::default()).unwrap();
    let shapes = shapes(&graph);
    let step = Step::new(&graph, &shapes, None);
    let cut = Regions::whole(&step).cut(&step, |_| None, |_, elements| elements);
    for (unit, choice) in step.units.iter().zip(&cut.units) {
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
        let answer = cut.answer(tilings.clone(), false);
        least = least.min((answer.cost, answer.rank));
        let Some(at) = (0..tilings.len()).find(|&g| tilings[g] as usize + 1 < cut.tilings[g].len()) else {
            return least;
        };
        tilings[at] += 1;
        tilings[..at].fill(0);
    }
}

/// What a random graph does next.
#[derive(Clone, Debug)]
enum Next {
    Product(u64),
    Unary,
    Softmax,
    Transpose,
    Add(usize),
}

fn graph(samples: u64, inputs: u64, all: &[Next], trained: bool) -> Graph {
    let mut b = GraphBuilder::new("random");
    let init = Init::Normal(Real(1.0));
    let x = b.source("x", TensorType::new(DType::F32, [samples, inputs]), Role::Input, init).unwrap();
    let mut made = vec![x];
    for (i, next) in all.iter().enumerate() {
        let (last, name) = (made[made.len() - 1], format!("op{i}"));
        let y = match next {
            Next::Product(outputs) => {
                let ty = TensorType::new(DType::F32, [b.shape(last)[1], *outputs]);
                let w = b.source(&format!("w{i}"), ty, Role::Parameter, init).unwrap();
                b.emit(&name, Contract::parse("nc,co->no").unwrap(), &[last, w]).unwrap()
            }
            Next::Unary => b.emit(&name, Unary { f: UnaryFn::Relu }, &[last]).unwrap(),
            Next::Softmax => b.emit(&name, Softmax { axis: 1 }, &[last]).unwrap(),
            Next::Transpose => {
                b.emit(&name, Transpose { perm: [1, 0].into_iter().collect() }, &[last]).unwrap()
            }
            Next::Add(which) => {
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

fn next() -> impl Strategy<Value = Next> {
    prop_oneof![
        3 => prop::sample::select(vec![1u64, 2, 3, 4, 6, 32]).prop_map(Next::Product),
        1 => Just(Next::Unary),
        1 => Just(Next::Softmax),
        1 => Just(Next::Transpose),
        1 => (0usize..8).prop_map(Next::Add),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Levels, elimination and brute force find the same cost, at every cut of the recursion.
    #[test]
    fn one_cut_equals_brute_force_over_all_tilings(
        samples in prop::sample::select(vec![2u64, 4, 6, 8, 40]),
        inputs in prop::sample::select(vec![2u64, 3, 4, 24]),
        all in prop::collection::vec(next(), 1..5),
        trained in any::<bool>(),
    ) {
        let graph = graph(samples, inputs, &all, trained);
        let shapes = shapes(&graph);
        let step = Step::new(&graph, &shapes, None);
        let mut regions = Regions::whole(&step);
        for _ in 0..3 {
            let cut = regions.cut(&step, |_| None, |_, elements| elements);
            let both = |a: &Answer| (a.cost, a.rank);
            let by_levels = levels::solve(&cut, 0).expect("narrow");
            let eliminated = eliminate::solve(&cut, &Control::new()).unwrap().expect("found");
            prop_assert_eq!(both(&by_levels), both(&eliminated));
            prop_assert!(eliminated.proved);
            if cut.tilings.iter().map(|t| t.len() as f64).product::<f64>() < 2e4 {
                prop_assert_eq!(both(&by_levels), brute(&cut));
            }
            // Where the search starts does not matter.
            prop_assert_eq!(levels::solve(&cut, step.units.len() - 1).map(|a| both(&a)), Some(both(&by_levels)));
            regions.narrow(&step, &cut, &by_levels);
        }
    }
}

#[test]
fn whole_models_cut_alike_by_levels_and_by_elimination() {
    for model in ["mlp:batch=64,layers=4", "lenet5:batch=16", "alexnet:batch=32"] {
        let graph = build(model, &BuildOptions::default()).unwrap();
        let shapes = shapes(&graph);
        let step = Step::new(&graph, &shapes, None);
        let mut regions = Regions::whole(&step);
        for _ in 0..3 {
            let cut = regions.cut(&step, |_| None, |_, elements| elements);
            let eliminated = eliminate::solve(&cut, &Control::new()).unwrap().expect("found");
            let Some(answer) = levels::solve(&cut, 0) else { panic!("{model} is too wide") };
            assert_eq!((answer.cost, answer.rank), (eliminated.cost, eliminated.rank), "{model}");
            regions.narrow(&step, &cut, &answer);
        }
    }
}
