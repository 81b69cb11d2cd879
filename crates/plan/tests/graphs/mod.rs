//! Small training graphs: built by hand, or from random steps.

use proptest::prelude::*;
use shardwright_graph::{
    DType, Graph, GraphBuilder, Init, OpId, Optimizer, Phase, Real, Role, TensorId, TensorType,
    ops::{Binary, BinaryFn, Contract, Reduce, Softmax, Transpose, Unary, UnaryFn},
    remat, train,
};

const INIT: Init = Init::Normal(Real(1.0));

pub fn source(b: &mut GraphBuilder, name: &str, shape: &[u64], role: Role) -> TensorId {
    b.source(name, TensorType::new(DType::F32, shape), role, INIT).unwrap()
}

pub fn product(b: &mut GraphBuilder, name: &str, x: TensorId, outputs: u64) -> TensorId {
    let inputs = b.shape(x)[1];
    let w = source(b, &format!("{name}.w"), &[inputs, outputs], Role::Parameter);
    b.emit(name, Contract::parse("nc,co->no").unwrap(), &[x, w]).unwrap()
}

pub fn finish(mut b: GraphBuilder, y: TensorId) -> Graph {
    let loss = b.emit("loss", Reduce::sum([0, 1].into_iter().collect()), &[y]).unwrap();
    b.output(loss);
    train(&mut b, loss, &Optimizer::sgd(0.1)).unwrap();
    b.finish()
}

/// The graph with some forward ops recomputed: bit `i` is for op `i`.
#[allow(dead_code, reason = "not all test files that share this module recompute")]
pub fn recomputed(graph: Graph, bits: u16) -> Graph {
    let named = |op: &OpId| graph.node(*op).phase == Phase::Forward && bits >> (op.0 % 16) & 1 == 1;
    remat(&graph, &graph.op_ids().filter(named).collect::<Vec<_>>()).unwrap()
}

/// Two products: 8 samples, 16 inputs, 32 hidden, 4 outputs.
#[allow(dead_code, reason = "some of the test files that share this module use random graphs only")]
pub fn mlp() -> Graph {
    let mut b = GraphBuilder::new("mlp");
    let x = source(&mut b, "x", &[8, 16], Role::Input);
    let y = product(&mut b, "fc1", x, 32);
    let z = product(&mut b, "fc2", y, 4);
    finish(b, z)
}

/// What a random graph does next.
#[derive(Clone, Debug)]
pub enum Step {
    Product(u64),
    /// So many ops that work element by element, one after the other.
    Chain(usize),
    Softmax,
    /// There and back: ops that only hand a layout on.
    Transposes,
    AddEarlier(usize),
}

pub fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        prop::sample::select(vec![2u64, 3, 4, 8, 64]).prop_map(Step::Product),
        (1usize..4).prop_map(Step::Chain),
        Just(Step::Softmax),
        Just(Step::Transposes),
        (0usize..8).prop_map(Step::AddEarlier),
    ];
    prop::collection::vec(step, 1..6)
}

pub fn random_graph(samples: u64, inputs: u64, steps: &[Step]) -> Graph {
    let mut b = GraphBuilder::new("random");
    let x = source(&mut b, "x", &[samples, inputs], Role::Input);
    let mut made = vec![product(&mut b, "first", x, inputs)];
    for (i, step) in steps.iter().enumerate() {
        let last = made[made.len() - 1];
        let name = format!("op{i}");
        let next = match step {
            Step::Product(outputs) => product(&mut b, &name, last, *outputs),
            Step::Chain(length) => (0..*length).fold(last, |last, at| {
                b.emit(&format!("{name}.{at}"), Unary { f: UnaryFn::Relu }, &[last]).unwrap()
            }),
            Step::Softmax => b.emit(&name, Softmax { axis: 1 }, &[last]).unwrap(),
            Step::Transposes => ["there", "back"].into_iter().fold(last, |last, way| {
                let turn = Transpose { perm: [1, 0].into_iter().collect() };
                b.emit(&format!("{name}.{way}"), turn, &[last]).unwrap()
            }),
            Step::AddEarlier(which) => {
                let alike: Vec<_> = made.iter().copied().filter(|&t| b.shape(t) == b.shape(last)).collect();
                let earlier = alike[which % alike.len()];
                b.emit(&name, Binary { f: BinaryFn::Add }, &[last, earlier]).unwrap()
            }
        };
        made.push(next);
    }
    let last = made[made.len() - 1];
    finish(b, last)
}
