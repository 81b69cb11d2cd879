//! Forward ops that compilers of training steps compute again in the backward pass, because that keeps fewer bytes: PyTorch's
//! partitioner does so for results that never reach memory in the forward pass, and whose inputs the backward pass needs anyway.

use crate::{
    graph::{Graph, Phase},
    ids::OpId,
};

/// The forward ops of some workload classes whose recomputation keeps fewer bytes between the passes, ascending.
///
/// An op is recomputed if the inputs that would have to be kept for it are smaller than its results that would not. Inputs that
/// are kept for other readers, stored tensors and results of recomputed ops cost nothing. A result that a forward op of another
/// class reads is in memory anyway, and is kept.
pub fn compiler_recompute(graph: &Graph, recomputes: impl Fn(&str) -> bool) -> Vec<OpId> {
    let class =
        |op: OpId| graph.node(op).op.workload(&graph.input_types(op), &graph.output_types(op)).class.name;
    let mut stored = vec![false; graph.tensors.len()];
    for op in graph.op_ids().filter(|&op| graph.node(op).phase == Phase::Forward && !recomputes(class(op))) {
        for t in &graph.node(op).inputs {
            stored[t.index()] = true;
        }
    }
    let mut kept = vec![false; graph.tensors.len()];
    for node in graph.ops.iter().filter(|node| node.phase != Phase::Forward) {
        for t in &node.inputs {
            kept[t.index()] = true;
        }
    }
    let mut again = vec![false; graph.tensors.len()];
    let mut found = Vec::new();
    for op in graph.op_ids().filter(|&op| graph.node(op).phase == Phase::Forward) {
        let node = graph.node(op);
        let inside = node.outputs.iter().all(|t| !stored[t.index()]);
        if !recomputes(class(op)) || !inside || node.op.operator().is_random() {
            continue;
        }
        let bytes = |t: &crate::TensorId| graph.tensor(*t).ty.bytes();
        let freed: u64 = node.outputs.iter().filter(|t| kept[t.index()]).map(bytes).sum();
        let held = |t: &&crate::TensorId| {
            graph.tensor(**t).producer.is_some() && !kept[t.index()] && !again[t.index()]
        };
        let needed: u64 = node.inputs.iter().filter(held).map(bytes).sum();
        if needed >= freed {
            continue;
        }
        for t in &node.inputs {
            kept[t.index()] |= graph.tensor(*t).producer.is_some() && !again[t.index()];
        }
        for t in &node.outputs {
            kept[t.index()] = false;
            again[t.index()] = true;
        }
        found.push(op);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        DType, GraphBuilder, Init, Optimizer, Real, Role, TensorType,
        ops::{Binary, BinaryFn, Contract, Reduce, Unary, UnaryFn},
        train,
    };
    use smallvec::smallvec;

    fn recomputed(f: UnaryFn, gated: bool) -> Vec<String> {
        let mut b = GraphBuilder::new("m");
        let source = |b: &mut GraphBuilder, name: &str, role| {
            b.source(name, TensorType::new(DType::F32, [8, 8]), role, Init::Normal(Real(1.0))).unwrap()
        };
        let product = Contract::parse("mk,kn->mn").unwrap();
        let (x, v, w) = (
            source(&mut b, "x", Role::Input),
            source(&mut b, "v", Role::Parameter),
            source(&mut b, "w", Role::Parameter),
        );
        let y = b.emit("first", product.clone(), &[x, v]).unwrap();
        let mut y = b.emit("f", Unary { f }, &[y]).unwrap();
        if gated {
            let up = b.emit("up", product.clone(), &[x, w]).unwrap();
            y = b.emit("gated", Binary { f: BinaryFn::Mul }, &[y, up]).unwrap();
        }
        let y = b.emit("second", product, &[y, w]).unwrap();
        let loss = b.emit("loss", Reduce::sum(smallvec![0, 1]), &[y]).unwrap();
        train(&mut b, loss, &Optimizer::sgd(0.1)).unwrap();
        let graph = b.finish();
        let ops = compiler_recompute(&graph, |class| ["unary", "binary"].contains(&class));
        ops.into_iter().map(|op| graph.node(op).name.clone()).collect()
    }

    #[test]
    fn results_that_never_reach_memory_are_computed_again() {
        assert_eq!(recomputed(UnaryFn::Silu, true), ["f"]);
        // The gradient of ReLU reads its result: keeping its input instead saves nothing.
        assert_eq!(recomputed(UnaryFn::Relu, true), [""; 0]);
        // The product reads the activation from memory.
        assert_eq!(recomputed(UnaryFn::Silu, false), [""; 0]);
    }
}
