//! The order of updates: each right after its gradient, as built, or all after the backward pass, as trainers with a separate
//! optimizer run them. In the second order all gradients are held at once.

use crate::{
    graph::{Graph, Phase},
    ids::OpId,
};

/// The same step with all updates at its end.
pub fn updates_last(graph: &Graph) -> Graph {
    let is_update = |op: &OpId| graph.node(*op).phase == Phase::Update;
    let order: Vec<OpId> =
        graph.op_ids().filter(|op| !is_update(op)).chain(graph.op_ids().filter(is_update)).collect();
    // An op of the other phases that reads an update's result would come too early: such a step stays as it is.
    let reads_update = |op: &OpId| {
        let producers = graph.node(*op).inputs.iter().filter_map(|t| graph.tensor(*t).producer);
        producers.into_iter().any(|made| is_update(&made))
    };
    if graph.op_ids().any(|op| !is_update(&op) && reads_update(&op)) {
        return graph.clone();
    }
    let mut moved = vec![OpId(0); graph.ops.len()];
    for (at, op) in order.iter().enumerate() {
        moved[op.index()] = OpId::new(at);
    }
    let mut new = graph.clone();
    new.ops = order.iter().map(|&op| graph.node(op).clone()).collect();
    for node in &mut new.ops {
        node.recomputes = node.recomputes.map(|op| moved[op.index()]);
    }
    for tensor in &mut new.tensors {
        tensor.producer = tensor.producer.map(|op| moved[op.index()]);
    }
    for layer in &mut new.layers {
        layer.forward = moved[layer.forward.index()];
    }
    new
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        DType, GraphBuilder, Init, Optimizer, Real, Role, TensorType, ops::Contract, ops::Reduce, train,
    };
    use smallvec::smallvec;

    #[test]
    fn updates_move_behind_the_backward_pass_and_nothing_else_changes() {
        let mut b = GraphBuilder::new("m");
        let source = |b: &mut GraphBuilder, name: &str, shape: [u64; 2], role| {
            b.source(name, TensorType::new(DType::F32, shape), role, Init::Normal(Real(1.0))).unwrap()
        };
        let mut x = source(&mut b, "x", [4, 4], Role::Input);
        for i in 0..3 {
            let w = source(&mut b, &format!("w{i}"), [4, 4], Role::Parameter);
            x = b.emit(&format!("y{i}"), Contract::parse("mk,kn->mn").unwrap(), &[x, w]).unwrap();
        }
        let loss = b.emit("loss", Reduce::sum(smallvec![0, 1]), &[x]).unwrap();
        train(&mut b, loss, &Optimizer::sgd(0.1)).unwrap();
        let step = b.finish();
        let phases = |graph: &Graph| graph.ops.iter().map(|node| node.phase).collect::<Vec<_>>();
        let first_update = phases(&step).iter().position(|&phase| phase == Phase::Update).unwrap();
        assert!(phases(&step)[first_update..].contains(&Phase::Backward), "updates come early as built");
        let later = updates_last(&step);
        crate::verify::verify(&later).unwrap();
        let first_update = phases(&later).iter().position(|&phase| phase == Phase::Update).unwrap();
        assert_eq!(later.ops.len() - first_update, 3);
        let sorted = |graph: &Graph| {
            let mut names: Vec<String> = graph.ops.iter().map(|node| node.name.clone()).collect();
            names.sort();
            names
        };
        assert_eq!(sorted(&later), sorted(&step));
        assert_eq!(updates_last(&later), later);
    }
}
