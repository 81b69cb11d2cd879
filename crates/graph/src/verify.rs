//! The verifier: the invariants of every graph, checked after reading one and around every rewrite.
//!
//! Ids and order
//! 1. Every id points into its vector.
//! 2. Ops are in topological order: each reads only tensors that no op makes or that an earlier op made.
//!    An op may read a tensor twice.
//! 3. A tensor is made by exactly the op that it names as its producer, and once.
//!
//! Types
//!
//! 4. Shapes are legal ([`crate::Shape::check`]), all tensors together have at most
//!    [`MAX_TOTAL_ELEMENTS`] elements, and outputs have the types that the op infers.
//! 5. The op's sharding rule keeps its own invariants ([`crate::Rule::check`]).
//! 6. A tensor without a producer has an initial value that its element type can hold ([`check_init`]);
//!    others have none.
//!
//! Names
//!
//! 7. Names are unique among tensors, and among ops; a layer has its forward op's name.
//!
//! Layers, phases, roles
//!
//! 8. A layer's forward op is a forward op of that layer; layers are in the order of their forward ops; an
//!    op does not come before its layer's forward op.
//! 9. Data never flow back to an earlier phase: a forward op reads no gradient.
//! 10. Inputs and constants are made by no op, activations by a forward op or by one that recomputes it, gradients by a
//!     backward op;
//!     weights and optimizer state by no op, by an update op, or by an op whose result is carried over.
//!
//! The step as a whole
//!
//! 11. Gradients and carries join tensors of equal type. A gradient belongs to a weight that no op makes;
//!     a carry leads from a weight or optimizer state that no op makes to a tensor of that role. No tensor has two
//!     gradients or two carries.
//!
//! Micro-batches
//!
//! 12. In a step of one micro-batch no op is repeated and no data are sliced. In other steps repeated ops are neighbours,
//!     only data and constants are sliced, and only repeated ops read slices.
//! 13. Results leave the repeated ops through ops that [accumulate](crate::Operator::accumulates). Then only repeated ops
//!     accumulate, and none reads a sum over micro-batches.
//!
//! Recomputation
//!
//! 14. An op that recomputes another is a backward op; the other is a forward op before it, of its layer and with its
//!     attributes. Its operands are the original's, or results of ops that recompute their producers. No op is
//!     recomputed twice.

use crate::{
    graph::{Graph, Init, Node, Phase, Role, Tensor},
    ids::{OpId, TensorId},
    types::{DType, TensorType},
};
use std::collections::HashSet;

/// The most elements that all tensors of a graph may have together; keeps sums of sizes within `u64`.
pub const MAX_TOTAL_ELEMENTS: u64 = 1 << 56;

/// Where and how a graph breaks an invariant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {reason}")]
pub struct VerifyError {
    /// The op, tensor or layer.
    pub place: String,
    /// The broken invariant.
    pub reason: String,
}

/// Checks every invariant in the module's documentation.
pub fn verify(graph: &Graph) -> Result<(), VerifyError> {
    // Each pass may rely on the ones before it: ids first, then order, then everything that follows them.
    check_ids(graph)?;
    check_names(graph)?;
    check_sources(graph)?;
    for id in graph.op_ids() {
        let node = graph.node(id);
        check_order(graph, id, node).or_else(|reason| fail_op(id, node, reason))?;
        check_types(graph, id, node).or_else(|reason| fail_op(id, node, reason))?;
    }
    check_layers(graph)?;
    check_recomputation(graph)?;
    let carried = check_step(graph)?;
    check_micro_batches(graph)?;
    for id in graph.tensor_ids() {
        let tensor = graph.tensor(id);
        check_role(graph, tensor, carried[id.index()]).or_else(|reason| fail_tensor(id, tensor, reason))?;
    }
    Ok(())
}

fn fail_op(id: OpId, node: &Node, reason: String) -> Result<(), VerifyError> {
    Err(VerifyError { place: format!("op {id} `{}` ({})", node.name.escape_debug(), node.op.kind()), reason })
}

fn fail_tensor(id: TensorId, tensor: &Tensor, reason: String) -> Result<(), VerifyError> {
    Err(VerifyError { place: format!("tensor {id} `{}`", tensor.name.escape_debug()), reason })
}

fn fail_graph<T>(reason: String) -> Result<T, VerifyError> {
    Err(VerifyError { place: "graph".into(), reason })
}

fn check_ids(graph: &Graph) -> Result<(), VerifyError> {
    let counts = [graph.tensors.len(), graph.ops.len(), graph.layers.len()];
    if counts.iter().any(|&n| n >= u32::MAX as usize) {
        return fail_graph("more tensors, ops or layers than 32-bit ids can name".into());
    }
    let [tensors, ops, layers] = counts.map(|n| n as u32);
    for (i, node) in graph.ops.iter().enumerate() {
        if let Some(t) = node.inputs.iter().chain(&node.outputs).find(|t| t.0 >= tensors) {
            return fail_op(OpId::new(i), node, format!("there is no tensor {t}"));
        }
        if node.layer.0 >= layers {
            return fail_op(OpId::new(i), node, format!("there is no layer {}", node.layer));
        }
    }
    for (i, tensor) in graph.tensors.iter().enumerate() {
        if let Some(producer) = tensor.producer.filter(|p| p.0 >= ops) {
            return fail_tensor(TensorId::new(i), tensor, format!("its producer {producer} does not exist"));
        }
    }
    if let Some(layer) = graph.layers.iter().find(|l| l.forward.0 >= ops) {
        return fail_graph(format!(
            "layer `{}`: there is no op {}",
            layer.name.escape_debug(),
            layer.forward
        ));
    }
    let gradients = graph.gradients.iter().flat_map(|g| [g.parameter, g.gradient]);
    let carries = graph.carries.iter().flat_map(|c| [c.old, c.new]);
    match graph.outputs.iter().copied().chain(gradients).chain(carries).find(|t| t.0 >= tensors) {
        Some(t) => fail_graph(format!("an output, gradient or carry names tensor {t}, which does not exist")),
        None => Ok(()),
    }
}

/// Uses the standard library's seeded hash: names come from files, and must not be able to collide at will.
fn check_names(graph: &Graph) -> Result<(), VerifyError> {
    let mut seen = HashSet::with_capacity(graph.tensors.len());
    for (i, tensor) in graph.tensors.iter().enumerate() {
        if !seen.insert(tensor.name.as_str()) {
            return fail_tensor(TensorId::new(i), tensor, "another tensor has this name".into());
        }
    }
    seen.clear();
    for (i, node) in graph.ops.iter().enumerate() {
        if !seen.insert(node.name.as_str()) {
            return fail_op(OpId::new(i), node, "another op has this name".into());
        }
    }
    Ok(())
}

/// Shapes, their sum, and initial values.
fn check_sources(graph: &Graph) -> Result<(), VerifyError> {
    let mut total = 0u64;
    for (i, tensor) in graph.tensors.iter().enumerate() {
        let fail = |reason| fail_tensor(TensorId::new(i), tensor, reason);
        tensor.ty.shape.check().or_else(fail)?;
        total = total.saturating_add(tensor.ty.shape.elements());
        match (tensor.producer, tensor.init) {
            (None, Some(init)) => check_init(&tensor.ty, init).or_else(fail)?,
            (Some(_), None) => {}
            (None, None) => return fail("no op makes it and it has no initial value".into()),
            (Some(op), Some(_)) => return fail(format!("op {op} makes it, yet it has an initial value")),
        }
    }
    if total > MAX_TOTAL_ELEMENTS {
        return fail_graph(format!("its tensors have {total} elements together; at most 2^56 are supported"));
    }
    Ok(())
}

/// Refuses initial values that a tensor cannot hold.
pub fn check_init(ty: &TensorType, init: Init) -> Result<(), String> {
    let holds = match (init, ty.dtype) {
        (Init::Constant(x), DType::Bool) => x.0 == 0.0 || x.0 == 1.0,
        (Init::Constant(x), DType::I32) => x.0.fract() == 0.0 && x.0.abs() <= i32::MAX as f64,
        (Init::Constant(x), DType::I64) => x.0.fract() == 0.0 && x.0.abs() <= (1u64 << 53) as f64,
        (Init::Constant(x), _) => !x.0.is_nan(),
        (Init::Normal(x) | Init::Uniform(x), dtype) => dtype.is_float() && x.0.is_finite() && x.0 >= 0.0,
        (Init::Below(n), DType::Bool) => (1..=2).contains(&n),
        (Init::Below(n), DType::I32) => (1..=1 << 31).contains(&n),
        (Init::Below(n), _) => (1..=1 << 53).contains(&n),
    };
    if holds { Ok(()) } else { Err(format!("initial value {init:?} does not suit {ty}")) }
}

/// The op reads only tensors that exist by now, and its outputs name it as their producer. Producers are unique, so that
/// each tensor with a producer is made exactly once if every op's outputs are distinct and none is missing.
fn check_order(graph: &Graph, id: OpId, node: &Node) -> Result<(), String> {
    for &t in &node.inputs {
        let tensor = graph.tensor(t);
        let Some(producer) = tensor.producer else { continue };
        let name = tensor.name.escape_debug();
        if producer >= id {
            return Err(format!(
                "reads {t} `{name}`, which op {producer} has not made yet (a cycle, or wrong order)"
            ));
        }
        if graph.node(producer).phase > node.phase {
            let phases = [node.phase, graph.node(producer).phase];
            return Err(format!(
                "a {:?} op cannot read {t} `{name}`, made by a {:?} op",
                phases[0], phases[1]
            ));
        }
        if !graph.node(producer).outputs.contains(&t) {
            return Err(format!(
                "reads {t} `{name}`, which names {producer} as its producer, but that does not make it"
            ));
        }
    }
    for &t in &node.outputs {
        if graph.tensor(t).producer != Some(id) {
            return Err(format!(
                "makes {t} `{}`, which another op makes, or none",
                graph.tensor(t).name.escape_debug()
            ));
        }
    }
    Ok(())
}

fn check_types(graph: &Graph, id: OpId, node: &Node) -> Result<(), String> {
    let inputs = graph.input_types(id);
    let inferred = node.op.operator().infer(&inputs).map_err(|e| e.to_string())?;
    if inferred.len() != node.outputs.len() {
        return Err(format!("makes {} tensors, but {} are listed", inferred.len(), node.outputs.len()));
    }
    // No op makes more than a few tensors, so from here on looking through them is cheap.
    for (ty, &t) in inferred.iter().zip(&node.outputs) {
        let declared = graph.tensor(t);
        if *ty != declared.ty {
            return Err(format!("makes {ty}, but {t} `{}` is {}", declared.name.escape_debug(), declared.ty));
        }
        if node.outputs.iter().filter(|&&other| other == t).count() > 1 {
            return Err(format!("makes {t} twice"));
        }
    }
    node.op.rule(&inputs, &inferred).check(&inputs, &inferred).map_err(|e| format!("sharding rule: {e}"))
}

fn check_layers(graph: &Graph) -> Result<(), VerifyError> {
    for (i, layer) in graph.layers.iter().enumerate() {
        let forward = graph.node(layer.forward);
        let fail = |reason| {
            Err(VerifyError { place: format!("layer @{i} `{}`", layer.name.escape_debug()), reason })
        };
        if layer.name != forward.name {
            return fail(format!("its forward op has another name: `{}`", forward.name.escape_debug()));
        }
        if forward.layer.index() != i || forward.phase != Phase::Forward {
            return fail(format!("its op {} is not a forward op of it", layer.forward));
        }
        if i > 0 && graph.layers[i - 1].forward >= layer.forward {
            return fail("layers must be in the order of their forward ops".into());
        }
    }
    for (i, node) in graph.ops.iter().enumerate() {
        let forward = graph.layers[node.layer.index()].forward;
        if forward.index() > i {
            return fail_op(OpId::new(i), node, format!("comes before its layer's forward op {forward}"));
        }
    }
    Ok(())
}

/// Every clone computes what its original computes.
fn check_recomputation(graph: &Graph) -> Result<(), VerifyError> {
    let mut seen = vec![false; graph.ops.len()];
    for (i, node) in graph.ops.iter().enumerate() {
        let Some(original) = node.recomputes else { continue };
        let fail = |reason| fail_op(OpId::new(i), node, reason);
        // Originals come first, so that dangling ids are found here too.
        if original.index() >= i {
            return fail(format!("recomputes {original}, which does not come before it"));
        }
        let other = graph.node(original);
        let name = other.name.escape_debug();
        if node.phase != Phase::Backward || other.phase != Phase::Forward {
            return fail(format!("recomputes `{name}`: only backward ops recompute, and only forward ops"));
        }
        if node.layer != other.layer || node.op != other.op || node.inputs.len() != other.inputs.len() {
            return fail(format!("recomputes `{name}`, but is of another layer or computes something else"));
        }
        let same = |(own, its): (&TensorId, &TensorId)| own == its || recomputes_tensor(graph, *own, *its);
        if !node.inputs.iter().zip(&other.inputs).all(same) {
            return fail(format!("recomputes `{name}` from operands that are not that op's"));
        }
        if std::mem::replace(&mut seen[original.index()], true) {
            return fail(format!("recomputes `{name}`, which another op recomputes"));
        }
    }
    Ok(())
}

/// Whether one tensor is the recomputed other.
fn recomputes_tensor(graph: &Graph, clone: TensorId, tensor: TensorId) -> bool {
    let (Some(own), Some(other)) = (graph.tensor(clone).producer, graph.tensor(tensor).producer) else {
        return false;
    };
    let position = |op: OpId, t: TensorId| graph.node(op).outputs.iter().position(|&o| o == t);
    graph.node(own).recomputes == Some(other) && position(own, clone) == position(other, tensor)
}

/// Gradients and carries; returns which tensors are carried over.
fn check_step(graph: &Graph) -> Result<Vec<bool>, VerifyError> {
    let mut seen = vec![false; graph.tensors.len()];
    for g in &graph.gradients {
        let (parameter, gradient) = (graph.tensor(g.parameter), graph.tensor(g.gradient));
        let name = parameter.name.escape_debug();
        if parameter.role != Role::Parameter || parameter.producer.is_some() {
            return fail_graph(format!("{} `{name}` has a gradient but is not a weight", g.parameter));
        }
        // Gradients of 16-bit weights may be stored in f32.
        let widened =
            gradient.ty.dtype == DType::F32 && matches!(parameter.ty.dtype, DType::Bf16 | DType::F16);
        if parameter.ty.shape != gradient.ty.shape || (parameter.ty.dtype != gradient.ty.dtype && !widened) {
            return fail_graph(format!("gradient of `{name}` is {}, not {}", gradient.ty, parameter.ty));
        }
        if std::mem::replace(&mut seen[g.parameter.index()], true) {
            return fail_graph(format!("`{name}` has two gradients"));
        }
    }
    seen.fill(false);
    let mut carried = vec![false; graph.tensors.len()];
    let lasting = |t: &Tensor| matches!(t.role, Role::Parameter | Role::OptimizerState);
    for c in &graph.carries {
        let (old, new) = (graph.tensor(c.old), graph.tensor(c.new));
        let name = old.name.escape_debug();
        if !lasting(old) || old.producer.is_some() || !lasting(new) {
            return fail_graph(format!(
                "`{name}` to `{}`: only weights and optimizer state are carried over to the next step",
                new.name.escape_debug()
            ));
        }
        if old.ty != new.ty {
            return fail_graph(format!("`{name}` is {} but is carried over as {}", old.ty, new.ty));
        }
        if std::mem::replace(&mut seen[c.old.index()], true) {
            return fail_graph(format!("`{name}` is carried over twice"));
        }
        carried[c.new.index()] = true;
    }
    Ok(carried)
}

fn check_micro_batches(graph: &Graph) -> Result<(), VerifyError> {
    let single = graph.micro_batches.get() == 1;
    let body = graph.body();
    let accumulates = |op: OpId| graph.node(op).op.operator().accumulates();
    let mut sliced = vec![false; graph.tensors.len()];
    for slice in &graph.sliced {
        let Some(tensor) = graph.tensors.get(slice.tensor.index()) else {
            return fail_graph(format!("tensor {} is sliced but does not exist", slice.tensor));
        };
        let fail = |reason: &str| fail_tensor(slice.tensor, tensor, reason.into());
        if single {
            return fail("is sliced, but the step has one micro-batch");
        }
        if !matches!(tensor.role, Role::Input | Role::Constant) || usize::from(slice.dim) >= tensor.ty.rank()
        {
            return fail("cannot be sliced: only dimensions of data and constants can");
        }
        if std::mem::replace(&mut sliced[slice.tensor.index()], true) {
            return fail("is sliced twice");
        }
        graph.whole_tensor(slice.tensor).ty.shape.check().or_else(|reason| fail(&reason))?;
    }
    let leaves = |t: TensorId| {
        let producer = graph.tensor(t).producer;
        producer.is_some_and(|op| graph.node(op).repeated && !accumulates(op))
    };
    for (i, node) in graph.ops.iter().enumerate() {
        let id = OpId::new(i);
        let fail = |reason: &str| fail_op(id, node, reason.into());
        if node.repeated && (single || !body.contains(&i)) {
            return fail("is repeated, apart from the other repeated ops or in a step of one micro-batch");
        }
        if !single && accumulates(id) && (!node.repeated || node.inputs.len() != 1) {
            return fail("accumulates, but is not repeated or does not read exactly one tensor");
        }
        for &t in &node.inputs {
            let sum = graph.tensor(t).producer.is_some_and(accumulates);
            if node.repeated && sum {
                return fail("is repeated but reads a sum over micro-batches");
            }
            if !node.repeated && (leaves(t) || sliced[t.index()]) {
                return fail("runs once per step but reads a tensor of one micro-batch");
            }
        }
    }
    let results = graph.outputs.iter().copied().chain(graph.carries.iter().map(|c| c.new));
    match results.into_iter().find(|&t| leaves(t)) {
        Some(t) => fail_tensor(t, graph.tensor(t), "leaves the step but is of one micro-batch".into()),
        None => Ok(()),
    }
}

fn check_role(graph: &Graph, tensor: &Tensor, carried: bool) -> Result<(), String> {
    let phase = tensor.producer.map(|p| graph.node(p).phase);
    let recomputed = tensor.producer.is_some_and(|p| graph.node(p).recomputes.is_some());
    let fits = match tensor.role {
        Role::Input | Role::Constant => phase.is_none(),
        Role::Activation => phase == Some(Phase::Forward) || recomputed,
        Role::Gradient => phase == Some(Phase::Backward) && !recomputed,
        Role::Parameter | Role::OptimizerState => phase.is_none() || phase == Some(Phase::Update) || carried,
    };
    let missing = |p: OpId| !graph.node(p).outputs.iter().any(|&t| std::ptr::eq(graph.tensor(t), tensor));
    match (fits, tensor.producer) {
        (true, Some(producer)) if missing(producer) => {
            Err(format!("names {producer} as its producer, but that does not make it"))
        }
        (true, _) => Ok(()),
        (false, None) => Err(format!("is {:?} but no op makes it", tensor.role)),
        (false, Some(producer)) => {
            Err(format!("is {:?} but made by {producer}, a {:?} op", tensor.role, graph.node(producer).phase))
        }
    }
}
