//! A training step as SoyBean sees it: groups of tensors that share a tiling, and units of ops that are split together.
//!
//! - A weight, its gradient, its optimizer state and their next values are one *group* with one tiling, so the update
//!   needs no communication. Updates therefore cost nothing and are not units.
//! - The backward ops of a layer that read the same gradient and have the same loops are one *unit*, split along one
//!   loop at every cut. This is the paper's backward op of a fully connected or convolution layer, which computes the
//!   gradients of input, weight and bias together. Every other op is its own unit.

use shardwright_graph::{FactorIndex, Graph, OpId, Phase, Role, Rule, TensorId};
use shardwright_space::{AxisUse, Config, OpShapes};
use smallvec::SmallVec;

/// A loop of a unit: the matching factor of each of its ops.
pub(crate) type Loop = SmallVec<[FactorIndex; 2]>;

/// Ops that are split together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unit {
    /// In topological order.
    pub ops: SmallVec<[OpId; 2]>,
    /// The loops that may be split if their sizes are even.
    pub loops: Vec<Loop>,
}

/// An update op, and the group whose tiling it follows.
pub(crate) struct Update {
    pub op: OpId,
    pub group: u32,
}

/// A training step as groups and units.
pub(crate) struct TilingGraph<'a> {
    pub graph: &'a Graph,
    /// Rule and types of every op.
    pub shapes: &'a [OpShapes],
    /// Per tensor: its group.
    pub group: Vec<u32>,
    /// Per group: its first tensor.
    pub members: Vec<TensorId>,
    pub units: Vec<Unit>,
    pub updates: Vec<Update>,
}

impl<'a> TilingGraph<'a> {
    /// Groups tensors and ops. Ops that `given` configs split differently do not share a unit.
    pub fn new(graph: &'a Graph, shapes: &'a [OpShapes], given: Option<&[Config]>) -> Self {
        let (group, members) = groups(graph);
        let mut updates = Vec::new();
        let mut units: Vec<Unit> = Vec::new();
        // Units that a later op may join, by layer.
        let mut open: Vec<SmallVec<[usize; 2]>> = vec![SmallVec::new(); graph.layers.len()];
        for op in graph.op_ids() {
            let node = graph.node(op);
            let mut touched = node.inputs.iter().chain(&node.outputs).map(|t| group[t.index()]);
            if node.phase == Phase::Update
                && let Some(first) = touched.next()
                && touched.all(|g| g == first)
            {
                updates.push(Update { op, group: first });
                continue;
            }
            let own = splittable(&shapes[op.index()].rule);
            if node.phase == Phase::Backward {
                let joined = open[node.layer.index()].iter().copied().find_map(|at| {
                    let unit = &units[at];
                    let fits = unit.ops.iter().all(|&other| share_gradient(graph, other, op));
                    let loops = fits.then(|| join(unit, shapes, op, &own)).flatten()?;
                    agree(given, &loops, &unit.ops, op).then_some((at, loops))
                });
                if let Some((at, loops)) = joined {
                    units[at].loops = loops;
                    units[at].ops.push(op);
                    continue;
                }
                open[node.layer.index()].push(units.len());
            }
            let loops = own.into_iter().map(|f| Loop::from_slice(&[f])).collect();
            units.push(Unit { ops: SmallVec::from_slice(&[op]), loops });
        }
        Self { graph, shapes, group, members, units, updates }
    }
}

/// The factors of a rule that may be split.
fn splittable(rule: &Rule) -> SmallVec<[FactorIndex; 6]> {
    let split = |f: &usize| !rule.factors[*f].whole && rule.factors[*f].size > 1;
    (0..rule.factors.len()).filter(split).map(|f| f as FactorIndex).collect()
}

/// Whether two ops read the same gradient and neither reads a result of the other.
fn share_gradient(graph: &Graph, a: OpId, b: OpId) -> bool {
    let (a, b) = (graph.node(a), graph.node(b));
    let gradient = |t: &&TensorId| graph.tensor(**t).role == Role::Gradient;
    let common = a.inputs.iter().filter(gradient).any(|t| b.inputs.contains(t));
    let feeds = |from: &[TensorId], to: &[TensorId]| from.iter().any(|t| to.contains(t));
    common && !feeds(&a.outputs, &b.inputs) && !feeds(&b.outputs, &a.inputs)
}

/// The unit's loops extended by those of another op, matched by name; `None` if they do not match one to one.
fn join(unit: &Unit, shapes: &[OpShapes], op: OpId, own: &[FactorIndex]) -> Option<Vec<Loop>> {
    let rule = &shapes[op.index()].rule;
    let first = &shapes[unit.ops[0].index()].rule;
    if unit.loops.len() != own.len() {
        return None;
    }
    let with = |known: &Loop| {
        let factor = rule.find(first.factors[usize::from(known[0])].name).filter(|f| own.contains(f))?;
        let mut known = known.clone();
        known.push(factor);
        Some(known)
    };
    unit.loops.iter().map(with).collect()
}

/// Whether given configs split a unit's ops and the op `more` along the same loop on every axis.
fn agree(given: Option<&[Config]>, loops: &[Loop], ops: &[OpId], more: OpId) -> bool {
    let Some(given) = given else { return true };
    let which = |member: usize, used: &AxisUse| match used {
        AxisUse::Split(f) => loops.iter().position(|l| l[member] == *f),
        AxisUse::Replicate | AxisUse::Pin(_) => None,
    };
    let uses = |member: usize, op: OpId| -> Vec<Option<usize>> {
        given[op.index()].uses().iter().map(|used| which(member, used)).collect()
    };
    uses(0, ops[0]) == uses(ops.len(), more)
}

/// The group of each tensor, and the first tensor of each group.
fn groups(graph: &Graph) -> (Vec<u32>, Vec<TensorId>) {
    let mut leader: Vec<usize> = (0..graph.tensors.len()).collect();
    fn find(leader: &mut [usize], mut t: usize) -> usize {
        while leader[t] != t {
            leader[t] = leader[leader[t]];
            t = leader[t];
        }
        t
    }
    let mut tie = |a: TensorId, b: TensorId| {
        // Equal shapes are an invariant of training steps, but a graph read from a file may break it.
        if graph.tensor(a).ty.shape == graph.tensor(b).ty.shape {
            let (a, b) = (find(&mut leader, a.index()), find(&mut leader, b.index()));
            leader[a.max(b)] = a.min(b);
        }
    };
    for pair in &graph.gradients {
        tie(pair.parameter, pair.gradient);
    }
    for carry in &graph.carries {
        tie(carry.old, carry.new);
    }
    for node in graph.ops.iter().filter(|n| n.phase == Phase::Update) {
        let Some(&first) = node.inputs.first() else { continue };
        for &t in node.inputs.iter().chain(&node.outputs) {
            tie(first, t);
        }
    }
    let mut number = vec![u32::MAX; graph.tensors.len()];
    let mut members = Vec::new();
    let group = graph.tensor_ids().map(|t| {
        let leader = find(&mut leader, t.index());
        if number[leader] == u32::MAX {
            number[leader] = members.len() as u32;
            members.push(t);
        }
        number[leader]
    });
    (group.collect(), members)
}
