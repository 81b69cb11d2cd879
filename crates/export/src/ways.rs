//! Where every tensor lies under a plan, and the legs of its ways to its readers, as an engine takes them.
//!
//! Partial results are reduced once for each loop that was split, as XLA does, and where readers agree on how the sum is to be split along these
//! axes, everybody keeps his part; from there tensors go the ways that the cost model found. These go along one axis after the other where that is the same: engines take
//! such steps together.

use crate::shardings::ExportError;
use shardwright_cost::{
    Action, Arrangement, Branch, Layout, MAX_DIMS, Placement, Relayouts, Step, TensorShape,
};
use shardwright_graph::{Graph, OpId, TensorType};
use shardwright_machine::{AxisId, AxisSet, Mesh};
use shardwright_space::{AxisUse, Config, OpShapes, Placed, Places, place};

/// A part of a way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leg {
    /// What is exchanged; none for what every device does alone.
    pub kind: Option<&'static str>,
    /// Along which axes.
    pub axes: AxisSet,
    /// Bytes of the larger side on one device.
    pub bytes: u64,
    /// How the tensor lies then.
    pub after: Arrangement,
    /// The dimension that is put together, where one is.
    pub gathered: Option<u8>,
}

/// A layout that some reader wants.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub layout: Layout,
    /// Another one that it is made from; none: the tensor as it lies.
    pub from: Option<usize>,
    pub legs: Vec<Leg>,
}

/// A tensor's layouts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ways {
    /// How it lies once it is no partial result; none where nobody can say.
    pub settled: Option<Layout>,
    /// How it lies in between, where it is one: summed up, not yet split.
    pub summed: Option<Layout>,
    /// How it got there from partial results: kind, axes, bytes of every reduction.
    pub reduced: Vec<(&'static str, AxisSet, u64)>,
    pub wanted: Vec<Wanted>,
}

impl Ways {
    /// How it comes to lie when it is made: summed up first. Told to do both at once, XLA may gather the operands of a
    /// product instead.
    pub fn made(&self) -> Option<impl Iterator<Item = Layout>> {
        let settled = self.settled?;
        Some(self.summed.filter(|summed| *summed != settled).into_iter().chain([settled]))
    }

    /// The arrangements on the way to a layout, that itself last.
    pub fn to(&self, layout: &Layout) -> Vec<Arrangement> {
        let mut chain = Vec::new();
        let mut at = self.wanted.iter().position(|wanted| wanted.layout == *layout);
        while let Some(wanted) = at.map(|at| &self.wanted[at]) {
            chain.extend(wanted.legs.iter().rev().map(|leg| leg.after));
            at = wanted.from;
        }
        chain.reverse();
        if chain.last().is_none_or(|last| *last != Arrangement::canonical(layout)) {
            chain.push(Arrangement::canonical(layout));
        }
        chain
    }
}

/// Everything that is known of a graph under a plan's configs.
pub(crate) struct Known<'r> {
    pub mesh: &'r Mesh,
    pub shapes: Vec<OpShapes>,
    pub places: Places,
    /// Per tensor.
    pub ways: Vec<Ways>,
}

impl<'r> Known<'r> {
    pub fn of(graph: &Graph, relayouts: &'r Relayouts, configs: &[Config]) -> Result<Self, ExportError> {
        let mesh = relayouts.comm().mesh();
        let shapes: Vec<OpShapes> = graph.op_ids().map(|op| OpShapes::of(graph, op)).collect();
        let places = place(graph, &shapes, configs, mesh);
        let mut settled: Vec<Option<Layout>> = places.tensors.iter().map(settled).collect();
        // XLA cannot put off what sums of partial results put off: operands are reduced to where the sum goes.
        let at_once = |op: OpId| places.sums[op.index()].is_some() && !graph.op_by_op;
        for op in graph.op_ids().collect::<Vec<_>>().into_iter().rev() {
            if at_once(op) {
                let node = graph.node(op);
                let sum = settled[node.outputs[0].index()];
                node.inputs.iter().for_each(|t| settled[t.index()] = sum);
            }
        }
        let mut ways = Vec::with_capacity(graph.tensors.len());
        for ((tensor, placed), settled) in graph.tensors.iter().zip(&places.tensors).zip(settled) {
            if placed.home.is_some_and(|home| !home.absent().is_empty()) {
                return Err(ExportError::Pinned { tensor: tensor.name.clone() });
            }
            let fail = |source| ExportError::Layout { tensor: tensor.name.clone(), source };
            let maker = tensor.producer.map(|op| &places.configs[op.index()]);
            let mut found = ways_of(placed, settled, maker, &tensor.ty, relayouts).map_err(fail)?;
            if tensor.producer.is_some_and(at_once) {
                (found.reduced, found.summed) = (Vec::new(), None);
            }
            ways.push(found);
        }
        Ok(Self { mesh, shapes, places, ways })
    }
}

pub(crate) fn partial(layout: &Layout) -> bool {
    !layout.axes_where(|p| matches!(p, Placement::Partial(_))).is_empty()
}

fn ways_of(
    placed: &Placed,
    settled: Option<Layout>,
    maker: Option<&Config>,
    ty: &TensorType,
    relayouts: &Relayouts,
) -> Result<Ways, shardwright_cost::LayoutError> {
    let (Some(home), Some(settled)) = (placed.home, settled) else { return Ok(Ways::default()) };
    let mesh = relayouts.comm().mesh();
    let summed = home.axes_where(|p| matches!(p, Placement::Partial(_)));
    let sharded = home.axes_where(|p| matches!(p, Placement::Shard(_)));
    let local = ty.bytes() / u64::from(mesh.group_size(sharded)).max(1);
    let layouts = placed.fetches.iter().flat_map(|fetch| &fetch.layouts).copied();
    let layouts: Vec<Layout> = layouts.filter(|layout| !partial(layout)).collect();
    let shape = TensorShape::new(&ty.shape, ty.dtype.bytes() as u32)?;
    let branches = relayouts.spread(&relayouts.tensor(shape), &settled, &layouts)?;
    let wanted = branches.iter().map(|branch| {
        let from = branch.from.map_or(settled, |at| branches[at].to);
        Wanted { layout: branch.to, from: branch.from, legs: legs(branch, &from, mesh) }
    });
    let kind = |axes: AxisSet| {
        let scattered = axes.iter().any(|axis| matches!(settled.get(axis), Placement::Shard(_)));
        if scattered { "reduce-scatter" } else { "all-reduce" }
    };
    let whole = summed.iter().fold(home, |layout, axis| layout.with(axis, Placement::Replicated));
    Ok(Ways {
        settled: Some(settled),
        summed: (!summed.is_empty()).then_some(whole),
        reduced: reductions(summed, maker).map(|axes| (kind(axes), axes, local)).collect(),
        wanted: wanted.collect(),
    })
}

/// The axes of partial results, those together that split one loop of the op that makes them: XLA adds up along one
/// dimension of an operand after the other.
fn reductions(summed: AxisSet, maker: Option<&Config>) -> impl Iterator<Item = AxisSet> {
    let mut loops: Vec<(Option<AxisUse>, AxisSet)> = Vec::new();
    for axis in summed.iter() {
        let use_ = maker.map(|config| config.get(axis));
        match loops.iter_mut().find(|(other, _)| *other == use_) {
            Some((_, axes)) => *axes = axes.with(axis),
            None => loops.push((use_, AxisSet::default().with(axis))),
        }
    }
    loops.into_iter().map(|(_, axes)| axes)
}

/// How a tensor lies once it is no partial result any more: as it is made, and along the axes of partial results as all
/// its readers want it, where that is a part of what everybody then has. None where readers take partial results, or nobody
/// touches it.
fn settled(placed: &Placed) -> Option<Layout> {
    let home = placed.home?;
    let readers: Vec<&Layout> = placed.fetches.iter().flat_map(|fetch| &fetch.layouts).collect();
    if partial(&home) && readers.iter().any(|layout| partial(layout)) {
        return None;
    }
    let mut settled = home;
    for axis in home.axes_where(|p| matches!(p, Placement::Partial(_))).iter() {
        let wanted = readers.first().map_or(Placement::Replicated, |layout| layout.get(axis));
        let agreed = readers.iter().all(|layout| layout.get(axis) == wanted);
        // Axes split a dimension from the outermost to the innermost: one outside those that do already would move blocks.
        let inside = |dim| home.shards(dim).iter().all(|other| other < axis);
        let part = match wanted {
            Placement::Shard(dim) => agreed && inside(dim),
            _ => false,
        };
        settled = settled.with(axis, if part { wanted } else { Placement::Replicated });
    }
    Some(settled)
}

/// A branch's steps, neighbours that an engine takes as one joined, and gathers along several dimensions taken one
/// dimension after the other: those that make least of the tensor first.
fn legs(branch: &Branch, from: &Layout, mesh: &Mesh) -> Vec<Leg> {
    let mut legs: Vec<(Leg, Vec<Moved>)> = Vec::new();
    let mut before = Arrangement::canonical(from);
    for step in &branch.way.steps {
        let kind = match step.action {
            Action::Slice => None,
            Action::Permute => Some("collective-permute"),
            action => Some(action.name()),
        };
        let taken = match step.action {
            Action::AllGather => gathers(step, &before, mesh),
            _ => {
                let (axes, bytes) = (step.axes, step.message.0);
                vec![Leg { kind, axes, bytes, after: step.after, gathered: None }]
            }
        };
        for leg in taken {
            let moved = moved(&before, &leg.after, mesh);
            before = leg.after;
            match legs.last_mut() {
                Some((last, across))
                    if last.kind == kind
                        && (step.action == Action::Slice
                            || (matches!(step.action, Action::AllGather | Action::AllToAll)
                                && *across == moved)) =>
                {
                    *last = Leg { axes: last.axes.union(leg.axes), bytes: last.bytes.max(leg.bytes), ..leg };
                }
                _ => legs.push((leg, moved)),
            }
        }
    }
    legs.into_iter().map(|(leg, _)| leg).collect()
}

/// A gather, dimension by dimension.
fn gathers(step: &Step, before: &Arrangement, mesh: &Mesh) -> Vec<Leg> {
    let of = |dim: u8| before.layout().shards(dim).intersect(step.axes);
    let mut dims: Vec<u8> = (0..MAX_DIMS as u8).filter(|&dim| !of(dim).is_empty()).collect();
    dims.sort_by_key(|&dim| (mesh.group_size(of(dim)), dim));
    let mut at = *before;
    let mut left = step.axes;
    let mut legs: Vec<Leg> = Vec::with_capacity(dims.len());
    for dim in dims {
        let axes = of(dim);
        left = left.minus(axes);
        at = at.gathered(axes);
        let bytes = step.message.0 / u64::from(mesh.group_size(left)).max(1);
        legs.push(Leg { kind: Some(step.action.name()), axes, bytes, after: at, gathered: Some(dim) });
    }
    // What it comes to is the step's own word.
    if let Some(last) = legs.last_mut() {
        last.after = step.after;
    }
    legs
}

/// From what to what axes change.
type Moved = (Placement, Placement);

fn moved(before: &Arrangement, after: &Arrangement, mesh: &Mesh) -> Vec<Moved> {
    let axes = (0..mesh.len() as u32).map(AxisId);
    let mut moved: Vec<Moved> = axes
        .map(|axis| (before.layout().get(axis), after.layout().get(axis)))
        .filter(|(a, b)| a != b)
        .collect();
    moved.sort_unstable();
    moved.dedup();
    moved
}
