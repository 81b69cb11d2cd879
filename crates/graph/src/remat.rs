//! Recomputation as a graph transformation: named forward ops are cloned before their first backward reader.
//!
//! The result is an ordinary graph. A clone stands directly before the first backward op that needs it, reads clones of
//! recomputed producers and the originals of all others, and belongs to its original's layer. Backward readers read the
//! clones, so the originals' results are free after their last forward reader. Each value is recomputed at most once: a
//! clone's result lives until its last reader.
//!
//! Ops are pure functions of operands, attributes and the step (dropout's mask is a function of seed, step and position),
//! so a clone computes its original's bits.

use crate::{
    graph::{Graph, Node, Phase, Role, Tensor},
    ids::{OpId, TensorId},
    verify::MAX_TOTAL_ELEMENTS,
};
use std::collections::HashSet;

/// Why ops of a graph cannot be recomputed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RematError {
    /// An op that the graph does not have.
    #[error("there is no op {op} to recompute: the graph has {ops} ops")]
    Missing {
        /// The op.
        op: OpId,
        /// Ops of the graph.
        ops: usize,
    },
    /// A backward or update op.
    #[error("op `{op}` cannot be recomputed: it is a {phase:?} op, and only forward ops can")]
    NotForward {
        /// The op's name.
        op: String,
        /// Its phase.
        phase: Phase,
    },
    /// A graph with clones.
    #[error("the graph recomputes `{op}` already: start from the graph without recomputation")]
    Again {
        /// The op's name.
        op: String,
    },
    /// More tensors than a graph may hold.
    #[error(
        "the recomputed tensors and the graph's have more than 2^56 elements together: recompute fewer ops"
    )]
    TooLarge,
}

/// The graph with these forward ops recomputed before their backward readers.
///
/// An op whose results no backward op needs, directly or through other recomputed ops, gets no clone. Ids of tensors do
/// not change. In a step of several micro-batches, only ops that run for each of them are recomputed.
///
/// # Errors
/// Where an op is no forward op of the graph, or the graph recomputes ops already.
pub fn remat(graph: &Graph, recompute: &[OpId]) -> Result<Graph, RematError> {
    rewritten(graph, recompute, false)
}

/// The same, and ops that no backward op needs get clones too, directly after those of their operands: trainers that run a
/// whole block again compute them.
///
/// # Errors
/// As [`remat`].
pub fn remat_whole(graph: &Graph, recompute: &[OpId]) -> Result<Graph, RematError> {
    rewritten(graph, recompute, true)
}

fn rewritten(graph: &Graph, recompute: &[OpId], whole: bool) -> Result<Graph, RematError> {
    if let Some(clone) = graph.ops.iter().find(|node| node.recomputes.is_some()) {
        return Err(RematError::Again { op: clone.name.clone() });
    }
    let mut recomputed = vec![false; graph.ops.len()];
    for &op in recompute {
        let Some(node) = graph.ops.get(op.index()) else {
            return Err(RematError::Missing { op, ops: graph.ops.len() });
        };
        if node.phase != Phase::Forward {
            return Err(RematError::NotForward { op: node.name.clone(), phase: node.phase });
        }
        // What runs once per step is there for all micro-batches, and a sum over them cannot be formed twice.
        let single = graph.micro_batches.get() == 1;
        recomputed[op.index()] = single || (node.repeated && !node.op.operator().accumulates());
    }
    let unneeded = if whole { unneeded(graph, &recomputed) } else { Vec::new() };
    let mut rewrite = Rewrite::new(graph, recomputed, unneeded);
    for op in graph.op_ids() {
        let mut node = graph.node(op).clone();
        if node.phase != Phase::Forward {
            rewrite.clone_producers(&node)?;
            rewrite.read_clones(&mut node);
        }
        rewrite.push(op, node);
    }
    Ok(rewrite.finish())
}

/// The forward ops that a graph recomputes, as ids of the graph without recomputation, ascending.
pub fn recomputed_ops(graph: &Graph) -> Vec<OpId> {
    let mut clones_before = Vec::with_capacity(graph.ops.len());
    let mut clones = 0u32;
    let mut found = Vec::new();
    for node in &graph.ops {
        clones_before.push(clones);
        if let Some(original) = node.recomputes {
            found.push(OpId(original.0 - clones_before[original.index()]));
            clones += 1;
        }
    }
    found.sort_unstable();
    found
}

/// The recomputed ops whose results no backward op needs, ascending.
fn unneeded(graph: &Graph, recomputed: &[bool]) -> Vec<OpId> {
    let mut needed = vec![false; graph.ops.len()];
    for op in graph.op_ids().rev() {
        let node = graph.node(op);
        if node.phase == Phase::Forward && !needed[op.index()] {
            continue;
        }
        for made in node.inputs.iter().filter_map(|t| graph.tensor(*t).producer) {
            needed[made.index()] |= recomputed[made.index()];
        }
    }
    graph.op_ids().filter(|op| recomputed[op.index()] && !needed[op.index()]).collect()
}

/// The new graph while it is built.
struct Rewrite<'g> {
    old: &'g Graph,
    recomputed: Vec<bool>,
    /// Recomputed ops that are cloned after their operands' clones, ascending.
    unneeded: Vec<OpId>,
    /// The new graph; its tensors are the old ones, then the clones' results.
    new: Graph,
    /// Per old op: its new id, once it has one.
    moved: Vec<OpId>,
    /// Per old op: whether its clone exists.
    cloned: Vec<bool>,
    /// Per old tensor: the clone's tensor, if there is one.
    clone_of: Vec<Option<TensorId>>,
    names: HashSet<String>,
    total_elements: u64,
}

impl<'g> Rewrite<'g> {
    fn new(old: &'g Graph, recomputed: Vec<bool>, unneeded: Vec<OpId>) -> Self {
        let mut new = old.clone();
        new.ops = Vec::with_capacity(old.ops.len());
        let names = old.tensors.iter().map(|t| &t.name).chain(old.ops.iter().map(|n| &n.name));
        Self {
            old,
            recomputed,
            unneeded,
            new,
            moved: vec![OpId(0); old.ops.len()],
            cloned: vec![false; old.ops.len()],
            clone_of: vec![None; old.tensors.len()],
            names: names.cloned().collect(),
            total_elements: old.tensors.iter().map(|t| t.ty.shape.elements()).sum(),
        }
    }

    /// Adds an op of the old graph.
    fn push(&mut self, old: OpId, node: Node) {
        let id = OpId::new(self.new.ops.len());
        self.moved[old.index()] = id;
        for t in &node.outputs {
            self.new.tensors[t.index()].producer = Some(id);
        }
        self.new.ops.push(node);
    }

    /// The recomputed op without a clone that produces a tensor.
    fn pending(&self, tensor: TensorId) -> Option<OpId> {
        let op = self.old.tensor(tensor).producer?;
        (self.recomputed[op.index()] && !self.cloned[op.index()]).then_some(op)
    }

    /// Clones everything that an op needs recomputed, in the graph's order.
    fn clone_producers(&mut self, reader: &Node) -> Result<(), RematError> {
        let mut open: Vec<OpId> = reader.inputs.iter().filter_map(|&t| self.pending(t)).collect();
        let mut needed = Vec::new();
        while let Some(op) = open.pop() {
            if std::mem::replace(&mut self.cloned[op.index()], true) {
                continue;
            }
            needed.push(op);
            open.extend(self.old.node(op).inputs.iter().filter_map(|&t| self.pending(t)));
        }
        if !needed.is_empty() {
            needed.extend(self.companions());
        }
        needed.sort_unstable();
        needed.into_iter().try_for_each(|op| self.clone_op(op))
    }

    /// The ops without a clone that nothing needs, and whose recomputed operands all have clones.
    fn companions(&mut self) -> Vec<OpId> {
        let mut found = Vec::new();
        for op in std::mem::take(&mut self.unneeded) {
            let producers = || self.old.node(op).inputs.iter().filter_map(|&t| self.old.tensor(t).producer);
            let again = || producers().filter(|made| self.recomputed[made.index()]);
            if again().next().is_some() && again().all(|made| self.cloned[made.index()]) {
                self.cloned[op.index()] = true;
                found.push(op);
            } else {
                self.unneeded.push(op);
            }
        }
        found
    }

    fn clone_op(&mut self, op: OpId) -> Result<(), RematError> {
        let mut node = self.old.node(op).clone();
        let id = OpId::new(self.new.ops.len());
        let original = std::mem::take(&mut node.name);
        node.name = self.unique(&original);
        self.read_clones(&mut node);
        for t in &mut node.outputs {
            let old = self.old.tensor(*t);
            self.total_elements = self.total_elements.saturating_add(old.ty.shape.elements());
            if self.total_elements > MAX_TOTAL_ELEMENTS || self.new.tensors.len() >= u32::MAX as usize - 1 {
                return Err(RematError::TooLarge);
            }
            let name = if old.name == original { node.name.clone() } else { self.unique(&old.name) };
            let ty = old.ty.clone();
            let clone = TensorId::new(self.new.tensors.len());
            self.new.tensors.push(Tensor {
                name,
                ty,
                role: Role::Activation,
                producer: Some(id),
                init: None,
            });
            self.clone_of[t.index()] = Some(clone);
            *t = clone;
        }
        node.phase = Phase::Backward;
        node.recomputes = Some(self.moved[op.index()]);
        self.new.ops.push(node);
        Ok(())
    }

    /// Replaces operands by their clones, where there are any.
    fn read_clones(&self, node: &mut Node) {
        for t in &mut node.inputs {
            *t = self.clone_of[t.index()].unwrap_or(*t);
        }
    }

    /// A name that no op and no tensor has.
    fn unique(&mut self, name: &str) -> String {
        let mut wanted = format!("{name}.recompute");
        let mut number = 0u32;
        while self.names.contains(&wanted) {
            number += 1;
            wanted = format!("{name}.recompute.{number}");
        }
        self.names.insert(wanted.clone());
        wanted
    }

    fn finish(mut self) -> Graph {
        for layer in &mut self.new.layers {
            layer.forward = self.moved[layer.forward.index()];
        }
        debug_assert_eq!(crate::verify::verify(&self.new), Ok(()));
        self.new
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        DType, GraphBuilder, Init, Optimizer, Real, TensorType,
        ops::{Contract, Reduce, Unary, UnaryFn},
        train,
    };

    /// Three layers of product and sigmoid, trained.
    fn step() -> Graph {
        let mut b = GraphBuilder::new("step");
        let init = Init::Normal(Real(1.0));
        let mut x = b.source("x", TensorType::new(DType::F32, [4, 8]), Role::Input, init).unwrap();
        for i in 0..3 {
            let ty = TensorType::new(DType::F32, [8, 8]);
            let w = b.source(&format!("w{i}"), ty, Role::Parameter, init).unwrap();
            x = b.emit(&format!("fc{i}"), Contract::parse("mk,kn->mn").unwrap(), &[x, w]).unwrap();
            x = b.emit(&format!("act{i}"), Unary { f: UnaryFn::Gelu }, &[x]).unwrap();
        }
        let loss = b.emit("loss", Reduce::sum([0, 1].into_iter().collect()), &[x]).unwrap();
        b.output(loss);
        train(&mut b, loss, &Optimizer::momentum(0.1, 0.9)).unwrap();
        b.finish()
    }

    fn op(graph: &Graph, name: &str) -> OpId {
        graph.op_ids().find(|&op| graph.node(op).name == name).unwrap()
    }

    #[test]
    fn clones_stand_before_their_first_backward_reader_and_read_clones() {
        let base = step();
        let named = ["fc1", "act1"].map(|name| op(&base, name));
        let graph = remat(&base, &named).unwrap();
        assert_eq!(graph.ops.len(), base.ops.len() + 2);
        assert_eq!(recomputed_ops(&graph), named);
        let clones = ["fc1.recompute", "act1.recompute"].map(|name| op(&graph, name));
        for (clone, name) in clones.iter().zip(["fc1", "act1"]) {
            let (own, original) = (graph.node(*clone), graph.node(op(&graph, name)));
            assert_eq!((own.phase, own.layer, &own.op), (Phase::Backward, original.layer, &original.op));
            assert_eq!(own.recomputes, Some(op(&graph, name)));
        }
        // The chain is recomputed for the first reader: the gradient of fc2's weight, which reads act1.
        assert_eq!(clones[0].0 + 1, clones[1].0);
        assert_eq!(graph.node(clones[1]).inputs[0], graph.node(clones[0]).outputs[0]);
        assert_eq!(graph.node(clones[0]).inputs, graph.node(op(&graph, "fc1")).inputs);
        let reader = graph.node(OpId(clones[1].0 + 1));
        assert!(reader.inputs.contains(&graph.node(clones[1]).outputs[0]), "{}", reader.name);
        // No backward op reads the originals.
        for t in named.iter().flat_map(|&op| &base.node(op).outputs) {
            assert!(graph.consumers().of(*t).iter().all(|&r| graph.node(r).phase == Phase::Forward));
        }
    }

    #[test]
    fn what_nobody_needs_gets_no_clone() {
        let base = step();
        assert_eq!(remat(&base, &[]).unwrap(), base);
        assert_eq!(
            remat(&base, &[op(&base, "loss")]).unwrap(),
            base,
            "the gradient of a sum reads no operand"
        );
    }

    #[test]
    fn only_forward_ops_and_only_once() {
        let base = step();
        let missing = remat(&base, &[OpId(10_000)]).unwrap_err().to_string();
        assert!(missing.contains("there is no op #10000"), "{missing}");
        let wrong = remat(&base, &[OpId::new(base.ops.len() - 1)]).unwrap_err().to_string();
        assert!(wrong.contains("only forward ops"), "{wrong}");
        let once = remat(&base, &[op(&base, "act0")]).unwrap();
        assert!(matches!(remat(&once, &[op(&base, "act1")]), Err(RematError::Again { .. })));
    }
}
