//! Graphs for the tests of this crate.
#![allow(dead_code)] // Each test file uses some of it.

use proptest::prelude::*;
use shardwright_graph::{
    DType, Graph, GraphBuilder, Init, Op, OpId, Phase, Real, Role, TensorId, TensorType,
    autodiff::differentiate,
    ops::{
        Binary, BinaryFn, Broadcast, Cast, Compare, CompareFn, Contract, Fill, Reduce, Reshape, Select,
        Unary, UnaryFn,
    },
    remat,
};

/// The golden example of an op kind.
pub struct Example {
    pub op: Op,
    pub inputs: Vec<TensorType>,
    pub rule: &'static str,
}

/// The golden examples of all op kinds.
pub fn examples() -> Vec<Example> {
    let goldens = Op::EXAMPLES.iter().map(|examples| (examples.golden)());
    goldens
        .map(|golden| Example {
            inputs: golden.inputs.iter().map(|t| t.parse().unwrap()).collect(),
            op: golden.op,
            rule: golden.rule,
        })
        .collect()
}

pub fn f32(shape: &[u64]) -> TensorType {
    TensorType::new(DType::F32, shape)
}

pub fn parameter(b: &mut GraphBuilder, name: &str, shape: &[u64]) -> TensorId {
    b.source(name, f32(shape), Role::Parameter, Init::Normal(Real(0.1))).unwrap()
}

pub fn input(b: &mut GraphBuilder, name: &str, shape: &[u64]) -> TensorId {
    b.source(name, f32(shape), Role::Input, Init::Normal(Real(1.0))).unwrap()
}

pub fn relu(b: &mut GraphBuilder, x: TensorId) -> TensorId {
    b.emit("relu", Unary { f: UnaryFn::Relu }, &[x]).unwrap()
}

pub fn einsum(b: &mut GraphBuilder, name: &str, spec: &str, inputs: &[TensorId]) -> TensorId {
    b.emit(name, Contract::parse(spec).unwrap(), inputs).unwrap()
}

/// Mean of everything.
pub fn mean(b: &mut GraphBuilder, x: TensorId) -> TensorId {
    let axes = (0..b.shape(x).len()).collect();
    let op = Reduce::mean(axes, b.shape(x));
    b.emit("loss", op, &[x]).unwrap()
}

/// Two linear layers with biases, ReLU between them, mean of squares, gradients.
pub fn mlp() -> Graph {
    let mut b = GraphBuilder::new("mlp");
    let mut x = input(&mut b, "x", &[64, 100]);
    for (i, (from, to)) in [(100, 300), (300, 10)].into_iter().enumerate() {
        x = b.scoped(&format!("fc{i}"), |b| {
            let w = parameter(b, "w", &[from, to]);
            let bias = parameter(b, "b", &[to]);
            let y = einsum(b, "matmul", "mk,kn->mn", &[x, w]);
            let y = b.emit("add", Binary { f: BinaryFn::Add }, &[y, bias]).unwrap();
            if i == 0 { relu(b, y) } else { y }
        });
    }
    let square = b.emit("square", Unary { f: UnaryFn::Square }, &[x]).unwrap();
    let loss = mean(&mut b, square);
    b.output(loss);
    differentiate(&mut b, loss).unwrap();
    b.finish()
}

/// Random graphs: each step picks an op and operands among what there is; what does not fit is left out.
pub fn any_graph() -> impl Strategy<Value = Graph> {
    let sizes = prop::collection::vec(prop::sample::select(vec![1u64, 2, 3, 4, 6, 8]), 0..4);
    let names = prop::sample::select(vec![
        "x",
        "a b",
        "line\nbreak",
        "q\"uote\\",
        "日本",
        "pool:0",
        "",
        "a:",
        "%1",
        "\u{202e}x",
        "🙂",
    ]);
    let sources = prop::collection::vec((sizes, 0..6usize, names.clone()), 1..5);
    let steps = prop::collection::vec(
        (0..12usize, any::<prop::sample::Index>(), any::<prop::sample::Index>(), names),
        0..20,
    );
    (sources, steps, any::<bool>(), any::<bool>(), any::<u32>()).prop_map(
        |(sources, steps, train, op_by_op, recompute)| {
            let empty = Graph { name: "random graph".into(), op_by_op, ..Graph::default() };
            let mut b = GraphBuilder::resume(empty);
            let mut tensors = Vec::new();
            for (shape, kind, name) in sources {
                let (dtype, role, init) = [
                    (DType::F32, Role::Parameter, Init::Normal(Real(0.1))),
                    (DType::F32, Role::Parameter, Init::Uniform(Real(1e-300))),
                    (DType::F32, Role::Input, Init::Constant(Real(f64::NEG_INFINITY))),
                    (DType::F64, Role::Constant, Init::Constant(Real(-0.0))),
                    (DType::I32, Role::Input, Init::Below(10)),
                    (DType::F32, Role::OptimizerState, Init::Constant(Real(0.1 + 0.2))),
                ][kind];
                tensors.push(b.source(name, TensorType::new(dtype, &shape[..]), role, init).unwrap());
            }
            for (kind, i, j, name) in steps {
                let (x, y) = (*i.get(&tensors), *j.get(&tensors));
                let shape = b.ty(x).shape.clone();
                let made = match kind {
                    0 => b.add(
                        name,
                        Unary { f: UnaryFn::Affine { scale: Real(0.1), shift: Real(f64::INFINITY) } },
                        &[x],
                    ),
                    1 => b.add(name, Unary { f: UnaryFn::LeakyRelu(Real(1.0 / 3.0)) }, &[x]),
                    2 | 3 => b.add(name, Binary { f: BinaryFn::Mul }, &[x, y]),
                    4 => b.add(name, Reduce::sum((0..shape.rank()).step_by(2).collect()), &[x]),
                    5 => b.add(name, Reshape { shape: [shape.elements()].into() }, &[x]),
                    6 => b.add(name, Cast { dtype: DType::F32 }, &[x]),
                    7 => b.add(name, Contract::parse("ab,ac->cb").unwrap(), &[x, y]),
                    8 => b.add(
                        name,
                        Broadcast {
                            shape: shape.iter().copied().chain([5]).collect(),
                            dims: (0..shape.rank()).collect(),
                        },
                        &[x],
                    ),
                    9 => b.add(name, Fill { value: Real(f64::NEG_INFINITY), ty: b.ty(x).clone() }, &[]),
                    10 => b.add(name, Compare { f: CompareFn::Lt }, &[x, y]),
                    _ => b.add(name, Select {}, &[*tensors.first().unwrap(), x, y]),
                };
                tensors.extend(made.into_iter().flatten());
            }
            if train {
                let last =
                    *tensors.iter().rev().find(|&&t| b.ty(t).dtype == DType::F32).unwrap_or(&tensors[0]);
                let loss = b.emit("loss", Reduce::sum((0..b.shape(last).len()).collect()), &[last]);
                if let Ok(loss) = loss {
                    b.output(loss);
                    // Second derivatives and integer losses are refused; the graph stays whole.
                    let _ = differentiate(&mut b, loss);
                }
            }
            let graph = b.finish();
            // Bit `i` says whether op `i` is recomputed.
            let named =
                |op: &OpId| recompute >> (op.0 % 32) & 1 == 1 && graph.node(*op).phase == Phase::Forward;
            remat(&graph, &graph.op_ids().filter(named).collect::<Vec<_>>()).unwrap()
        },
    )
}
