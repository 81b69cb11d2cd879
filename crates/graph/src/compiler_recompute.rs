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
/// class reads is in memory anyway, and is kept; but not one that only ops of the same kernel read. `fuses` names the classes that
/// a kernel joins.
pub fn compiler_recompute(
    graph: &Graph,
    recomputes: impl Fn(&str) -> bool,
    fuses: impl Fn(&str) -> bool,
) -> Vec<OpId> {
    let class =
        |op: OpId| graph.node(op).op.workload(&graph.input_types(op), &graph.output_types(op)).class.name;
    let kernels = kernels_before(graph, |op| fuses(class(op)));
    let mut stored = vec![false; graph.tensors.len()];
    for op in graph.op_ids().filter(|&op| graph.node(op).phase == Phase::Forward && !recomputes(class(op))) {
        let reader = fuses(class(op)).then_some(kernels[op.index()]);
        for t in &graph.node(op).inputs {
            let made = graph.tensor(*t).producer.filter(|&made| fuses(class(made)));
            let maker = made.map(|made| kernels[made.index()]);
            stored[t.index()] |= reader.is_none() || maker != reader;
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

/// Per op: the most kernels that end before it. Ops that a kernel joins, and views, end none.
fn kernels_before(graph: &Graph, joins: impl Fn(OpId) -> bool) -> Vec<u32> {
    let mut before = vec![0u32; graph.ops.len()];
    for op in graph.op_ids() {
        let made = graph.node(op).inputs.iter().filter_map(|t| graph.tensor(*t).producer);
        let after = |made: OpId| {
            let open = joins(made) || graph.node(made).op.operator().is_view();
            before[made.index()] + u32::from(!open)
        };
        before[op.index()] = made.map(after).max().unwrap_or(0);
    }
    before
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        DType, GraphBuilder, Init, Optimizer, Real, Role, TensorType,
        ops::{Binary, BinaryFn, Cast, Contract, Reduce, Unary, UnaryFn},
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
        let ops = compiler_recompute(&graph, |class| ["unary", "binary"].contains(&class), |_| false);
        ops.into_iter().map(|op| graph.node(op).name.clone()).collect()
    }

    /// A product whose result is widened, squared and summed; sums of its rows are an output.
    #[test]
    fn results_that_only_their_kernel_reads_are_computed_again() {
        let mut b = GraphBuilder::new("m");
        let ty = TensorType::new(DType::Bf16, [8, 8]);
        let init = Init::Normal(Real(1.0));
        let x = b.source("x", ty.clone(), Role::Input, init).unwrap();
        let w = b.source("w", ty, Role::Parameter, init).unwrap();
        let logits = b.emit("logits", Contract::parse("mk,kn->mn").unwrap(), &[x, w]).unwrap();
        let wide = b.emit("widen", Cast { dtype: DType::F32 }, &[logits]).unwrap();
        let squares = b.emit("squares", Binary { f: BinaryFn::Mul }, &[wide, wide]).unwrap();
        let loss = b.emit("loss", Reduce::sum(smallvec![0, 1]), &[squares]).unwrap();
        let rows = b.emit("rows", Reduce::sum(smallvec![1]), &[wide]).unwrap();
        b.output(rows);
        train(&mut b, loss, &Optimizer::sgd(0.1)).unwrap();
        let graph = b.finish();
        let named = |fuses: &[&str]| -> Vec<String> {
            let cheap = |class: &str| ["cast", "binary"].contains(&class);
            let ops = compiler_recompute(&graph, cheap, |class| fuses.contains(&class));
            ops.into_iter().map(|op| graph.node(op).name.clone()).collect()
        };
        // Kernels of their own read the widened numbers from memory; one kernel with them does not.
        assert_eq!(named(&[]), [""; 0]);
        assert_eq!(named(&["cast", "binary", "reduce"]), ["widen"]);
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
