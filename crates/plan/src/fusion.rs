//! Groups of memory-bound ops that an engine computes in one kernel, and the traffic that remains of each op.
//!
//! A group holds ops of one family of the engine's table, of one phase and of about the same number of elements. An op joins the
//! group of an op that it reads from, or that reads the same tensor. Between two ops of a group there is no op outside: all have
//! the same depth, the number of kernels before them. A reduction over leading dimensions joins readers of the same tensor only,
//! and ends a kernel; one over trailing dimensions does not.
//!
//! A group reads each tensor from outside once, which its first reader pays for, and writes each tensor that is read outside. So
//! costs stay costs of single ops. They assume that the ops of a group have equal layouts. Where they differ, the reshard between
//! them is priced in full, but the op still counts as fused.

use crate::operand_copies::{OperandCopies, weight_gradients};
use shardwright_cost::{Engine, KernelKind, WIDE};
use shardwright_graph::{Graph, Op, OpId, Role, RooflineKind, TensorId, TensorType};
use shardwright_space::OpShapes;
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};

/// What remains of an op in a kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct FusedOp {
    /// Per input: whether the op pays for reading it.
    inputs: SmallVec<[bool; 4]>,
    /// Per output: whether it is written.
    outputs: SmallVec<[bool; 2]>,
    /// Whether the op pays for the kernel's start.
    pub starts: bool,
    /// The share of memory bandwidth that the kernel reaches, in millionths.
    millionths: u32,
    /// Whether it is a library's call of several ops, which reads its largest tensor again.
    pub call: bool,
    /// Per output: whether it stays inside of a compiled kernel and never reaches memory.
    inside: SmallVec<[bool; 2]>,
    /// Copies beside the kernel of an op that is one of its own; nothing else is said of such an op.
    pub copies: Option<OperandCopies>,
}

impl FusedOp {
    /// The share of memory bandwidth that the kernel reaches.
    pub fn share(&self) -> f64 {
        f64::from(self.millionths) * 1e-6
    }

    /// Whether a result never reaches memory.
    pub fn stays_inside(&self, output: usize) -> bool {
        self.inside.get(output).copied().unwrap_or(false)
    }

    /// The bytes of a part of the op that are moved.
    pub fn bytes(&self, op: &Op, inputs: &[TensorType], outputs: &[TensorType]) -> u64 {
        let moved = |types: &[TensorType], pays: &[bool]| {
            let paid = types.iter().zip(pays).filter(|(_, pays)| **pays);
            paid.fold(0u64, |sum, (ty, _)| sum.saturating_add(ty.bytes()))
        };
        let all = moved(inputs, &self.inputs).saturating_add(moved(outputs, &self.outputs));
        // Of a table that is looked up only some rows are read.
        all.min(op.operator().bytes(inputs, outputs))
    }
}

/// The fused ops of a graph; none for ops that are kernels of their own, with no copies beside them. Among `many` devices weights
/// may have to be gathered.
pub(crate) fn fuse(graph: &Graph, shapes: &[OpShapes], engine: &Engine, many: bool) -> Vec<Option<FusedOp>> {
    let ops: Vec<OpFacts> = graph.op_ids().map(|op| OpFacts::of(graph, shapes, engine, op)).collect();
    let roots = roots(graph);
    let (groups, of) = (Vec::new(), vec![None; ops.len()]);
    let mut finder = GroupFinder { graph, ops: &ops, roots: &roots, calls: engine.calls, groups, of };
    finder.find();
    let GroupFinder { groups, of, .. } = finder;
    let mixed = is_mixed(graph);
    let gradients = (many && engine.copies_weights).then(|| weight_gradients(graph));
    let mut parts = traffic(graph, &roots, &groups, &of, engine, &ops);
    for (at, facts) in ops.iter().enumerate() {
        let node = &graph.ops[at];
        let whole = |share: f64, pays: bool| FusedOp {
            inputs: node.inputs.iter().map(|_| pays).collect(),
            outputs: node.outputs.iter().map(|_| pays).collect(),
            starts: false,
            millionths: (share * 1e6) as u32,
            call: false,
            inside: SmallVec::new(),
            copies: None,
        };
        if facts.bias {
            parts[at] = Some(whole(1.0, false));
        } else if let Some(share) = engine.batched_share(facts.class, mixed, facts.narrow) {
            parts[at] = Some(whole(share, true));
        } else if parts[at].is_none() && !facts.view {
            let copies = OperandCopies::of(graph, shapes, engine, OpId::new(at), gradients.as_deref());
            let millionths = (engine.share * 1e6) as u32;
            parts[at] = copies.map(|copies| FusedOp {
                starts: true,
                millionths,
                copies: Some(copies),
                ..FusedOp::default()
            });
        }
    }
    parts
}

/// Whether a step has 16-bit weights with f32 master copies.
pub(crate) fn is_mixed(graph: &Graph) -> bool {
    let has =
        |role: Role, bytes: u64| graph.tensors.iter().any(|t| t.role == role && t.ty.dtype.bytes() == bytes);
    has(Role::Parameter, 2) && has(Role::OptimizerState, 4)
}

/// What grouping needs to know of an op.
struct OpFacts {
    class: &'static str,
    families: u64,
    /// Elements that its loop runs over.
    elements: u64,
    /// Whether it reads 16-bit floats.
    narrow: bool,
    /// Whether it reduces leading dimensions: what reads its result belongs to a later kernel.
    outer: bool,
    /// Whether it reduces wide rows.
    wide: bool,
    view: bool,
    /// Whether it adds a bias inside of a product.
    bias: bool,
}

impl OpFacts {
    fn of(graph: &Graph, shapes: &[OpShapes], engine: &Engine, op: OpId) -> Self {
        let (node, own) = (graph.node(op), &shapes[op.index()]);
        let class = node.op.workload(&own.inputs, &own.outputs).class.name;
        let elements = own.inputs.iter().chain(&own.outputs).map(|ty| ty.shape.elements()).max().unwrap_or(0);
        let rule = &own.rule;
        let reduced = |factor: u8| rule.outputs.iter().all(|map| !map.has(factor));
        let outer = rule.inputs.first().is_some_and(|map| {
            let sized = |factor: &&u8| rule.factors[usize::from(**factor)].size > 1;
            let factors: SmallVec<[u8; 6]> =
                map.dims.iter().flat_map(|dim| &dim.factors).filter(sized).copied().collect();
            factors.iter().any(|&f| reduced(f)) && factors.last().is_some_and(|&last| !reduced(last))
        });
        let wide = rule.inputs.first().is_some_and(|map| {
            let last = map.dims.last().map(|dim| dim.factors.iter().copied());
            let rows = last.into_iter().flatten().filter(|&factor| reduced(factor));
            rows.map(|factor| rule.factors[usize::from(factor)].size).product::<u64>() > WIDE
        });
        let view = node.op.operator().is_view();
        let bias = engine.bias_epilogue && is_bias(graph, shapes, op);
        let families = if bias { 0 } else { engine.families_of(class) };
        let narrow = own.inputs.first().is_some_and(|ty| ty.dtype.bytes() == 2);
        Self { class, families, elements, narrow, outer, wide, view, bias }
    }
}

/// Whether an op adds a stored vector to the result of a product that nothing else reads.
fn is_bias(graph: &Graph, shapes: &[OpShapes], op: OpId) -> bool {
    let node = graph.node(op);
    let (&[product, bias], own) = (&node.inputs[..], &shapes[op.index()]) else { return false };
    let Some(made) = graph.tensor(product).producer else { return false };
    let made_of = &shapes[made.index()];
    let workload = graph.node(made).op.workload(&made_of.inputs, &made_of.outputs);
    let is_product = matches!(workload.roofline, RooflineKind::Product(_) | RooflineKind::EightBitProduct(_));
    let stored = graph.tensor(bias).producer.is_none() && graph.tensor(bias).ty.shape.elements() < 1 << 24;
    let same = own.outputs.len() == 1 && own.outputs[0] == own.inputs[0];
    let smaller = own.inputs[1].shape.rank() < own.inputs[0].shape.rank();
    let readers = graph.ops.iter().skip(made.index()).filter(|n| n.inputs.contains(&product)).take(2).count();
    is_product && stored && same && smaller && readers == 1
}

/// Per tensor: the tensor whose memory it shows.
fn roots(graph: &Graph) -> Vec<TensorId> {
    let mut roots: Vec<TensorId> = graph.tensor_ids().collect();
    for node in graph.ops.iter().filter(|node| node.op.operator().is_view()) {
        if let (Some(input), Some(output)) = (node.inputs.first(), node.outputs.first()) {
            roots[output.index()] = roots[input.index()];
        }
    }
    roots
}

struct Group {
    families: u64,
    depth: u32,
    phase: shardwright_graph::Phase,
    elements: u64,
    members: Vec<usize>,
}

struct GroupFinder<'g> {
    graph: &'g Graph,
    ops: &'g [OpFacts],
    roots: &'g [TensorId],
    /// Whether reductions over leading dimensions are inside of kernels.
    calls: bool,
    groups: Vec<Group>,
    /// Per op: its group.
    of: Vec<Option<u32>>,
}

impl GroupFinder<'_> {
    fn find(&mut self) {
        let graph = self.graph;
        let mut depths = vec![0u32; self.ops.len()];
        // Per tensor: the groups that read it.
        let mut readers: BTreeMap<TensorId, SmallVec<[u32; 2]>> = BTreeMap::new();
        for op in graph.op_ids() {
            let (node, facts) = (graph.node(op), &self.ops[op.index()]);
            let producers =
                || node.inputs.iter().filter_map(|t| graph.tensor(self.roots[t.index()]).producer);
            let first = |node: &shardwright_graph::Node| node.inputs.first().map(|t| self.roots[t.index()]);
            let after = |made: OpId| {
                let before = &self.ops[made.index()];
                // Mean and variance of one tensor are one pass over it.
                let same_pass = facts.outer && before.outer && first(graph.node(made)) == first(node);
                let ends = before.outer && !self.calls && !same_pass;
                let open = (before.families != 0 && !ends) || before.view;
                depths[made.index()] + u32::from(!open)
            };
            let depth = producers().map(after).max().unwrap_or(0);
            depths[op.index()] = depth;
            if facts.families == 0 || facts.view {
                continue;
            }
            let mut joined: Option<u32> = None;
            let made_by = producers().filter(|_| !facts.outer || self.calls);
            let made_by = made_by.filter_map(|made| self.of[made.index()]);
            let beside =
                node.inputs.iter().filter_map(|t| readers.get(&self.roots[t.index()])).flatten().copied();
            for group in made_by.chain(beside) {
                if joined.is_none() && self.accepts(group, facts, depth, node.phase) {
                    joined = Some(group);
                }
            }
            let at = joined.unwrap_or_else(|| {
                let (families, elements) = (facts.families, facts.elements);
                self.groups.push(Group { families, depth, phase: node.phase, elements, members: Vec::new() });
                self.groups.len() as u32 - 1
            });
            let group = &mut self.groups[at as usize];
            group.families &= facts.families;
            group.elements = group.elements.max(facts.elements);
            group.members.push(op.index());
            self.of[op.index()] = Some(at);
            for t in &node.inputs {
                let known = readers.entry(self.roots[t.index()]).or_default();
                if !known.contains(&at) {
                    known.push(at);
                }
            }
        }
    }

    fn accepts(&self, group: u32, facts: &OpFacts, depth: u32, phase: shardwright_graph::Phase) -> bool {
        let group = &self.groups[group as usize];
        let near = |a: u64, b: u64| a <= b.saturating_mul(2);
        group.families & facts.families != 0
            && group.depth == depth
            && group.phase == phase
            && near(group.elements, facts.elements)
            && near(facts.elements, group.elements)
    }
}

/// What the ops of all groups read and write.
fn traffic(
    graph: &Graph,
    roots: &[TensorId],
    groups: &[Group],
    of: &[Option<u32>],
    engine: &Engine,
    ops: &[OpFacts],
) -> Vec<Option<FusedOp>> {
    // Per root: whether an op outside of its group reads it.
    let mut read_outside = vec![false; graph.tensors.len()];
    for t in graph.outputs.iter().chain(graph.carries.iter().map(|carry| &carry.new)) {
        read_outside[roots[t.index()].index()] = true;
    }
    for op in graph.op_ids().filter(|op| !ops[op.index()].view) {
        for t in &graph.node(op).inputs {
            let root = roots[t.index()];
            let made = graph.tensor(root).producer.and_then(|made| of[made.index()]);
            if made.is_none() || made != of[op.index()] {
                read_outside[root.index()] = true;
            }
        }
    }
    let mut parts: Vec<Option<FusedOp>> = vec![None; graph.ops.len()];
    for (at, group) in groups.iter().enumerate() {
        let lone = group.members.len() == 1;
        let outer =
            group.members.iter().any(|&op| (lone && ops[op].outer) || reads_outer(graph, roots, ops, op));
        let classes = || group.members.iter().map(|&op| ops[op].class);
        let narrow = group.members.iter().any(|&op| ops[op].narrow);
        let wide = group.members.iter().any(|&op| ops[op].wide);
        let kind = KernelKind { outer, wide, narrow };
        // Libraries have such calls for f32; in 16 bits batch norm is several kernels.
        let call = engine.calls && !lone && outer && !narrow;
        // A lone op of an engine that fuses few ops is what cost files measure.
        if lone && engine.calls && classes().all(|class| engine.class_share(class, kind).is_none()) {
            continue;
        }
        let share = engine.share_of(classes(), kind);
        let mut read = BTreeSet::new();
        let mut started = false;
        for &op in &group.members {
            let node = &graph.ops[op];
            let inputs: SmallVec<[bool; 4]> = node
                .inputs
                .iter()
                .map(|t| {
                    let root = roots[t.index()];
                    let own =
                        graph.tensor(root).producer.is_some_and(|made| of[made.index()] == Some(at as u32));
                    !own && read.insert(root)
                })
                .collect();
            let outputs: SmallVec<[bool; 2]> = node.outputs.iter().map(|t| read_outside[t.index()]).collect();
            let moves = inputs.iter().chain(&outputs).any(|&pays| pays);
            let starts = moves && !started;
            started |= moves;
            let inside = outputs.iter().map(|written| !written && !engine.calls).collect();
            let millionths = (share * 1e6) as u32;
            parts[op] = Some(FusedOp { inputs, outputs, starts, millionths, call, inside, copies: None });
        }
    }
    parts
}

/// Whether an op reads the result of a reduction over leading dimensions.
fn reads_outer(graph: &Graph, roots: &[TensorId], ops: &[OpFacts], op: usize) -> bool {
    let producers = graph.ops[op].inputs.iter().filter_map(|t| graph.tensor(roots[t.index()]).producer);
    producers.into_iter().any(|made| ops[made.index()].outer)
}
