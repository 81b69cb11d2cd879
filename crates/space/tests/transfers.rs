//! Which readers share copies of converted weights.

use shardwright_graph::{
    DType, Graph, GraphBuilder, Init, Optimizer, Phase, Real, Role, TensorType,
    ops::{Cast, Contract, Reduce},
    train,
};
use shardwright_space::{Pass, Transfers};

/// Two products with weights of f32 that are converted to bf16, trained.
fn step(op_by_op: bool) -> Graph {
    let empty = Graph { name: "mixed".into(), op_by_op, ..Graph::default() };
    let mut b = GraphBuilder::resume(empty);
    let init = Init::Normal(Real(1.0));
    let mut x = b.source("x", TensorType::new(DType::Bf16, [4, 4]), Role::Input, init).unwrap();
    for i in 0..2 {
        let w =
            b.source(&format!("w{i}"), TensorType::new(DType::F32, [4, 4]), Role::Parameter, init).unwrap();
        let narrow = b.emit(&format!("w{i}.bf16"), Cast { dtype: DType::Bf16 }, &[w]).unwrap();
        x = b.emit(&format!("y{i}"), Contract::parse("mk,kn->mn").unwrap(), &[x, narrow]).unwrap();
    }
    let loss = b.emit("loss", Reduce::sum([0, 1].into_iter().collect()), &[x]).unwrap();
    b.output(loss);
    train(&mut b, loss, &Optimizer::sgd(0.1)).unwrap();
    b.finish()
}

#[test]
fn copies_of_a_converted_weight_live_for_one_pass_where_autograd_runs_op_by_op() {
    let passes = |op_by_op: bool| {
        let graph = step(op_by_op);
        let narrow = graph.tensor_ids().find(|&t| graph.tensor(t).name == "w1.bf16").unwrap();
        let transfers = Transfers::of(&graph);
        let groups = transfers.groups.iter().filter(|group| group.tensor == narrow);
        groups.map(|group| (group.pass, transfers.readers(group).len())).collect::<Vec<_>>()
    };
    let of = |phase: Phase| Some(Pass { phase, repeated: false });
    assert_eq!(passes(true), [(of(Phase::Forward), 1), (of(Phase::Backward), 1)]);
    assert_eq!(passes(false), [(None, 2)]);
}
