//! The layouts of every tensor under a plan, and the engine's steps on its reshard paths to its readers.
//!
//! Partial results are reduced once for each loop that was split, as XLA does. Where all readers agree on how the sum is
//! split along these axes, every device keeps its part. From there tensors take the cost model's reshard paths. Neighbouring
//! steps of a path that an engine runs as one are joined.

use crate::shardings::ExportError;
use shardwright_cost::{
    Action, Arrangement, Layout, MAX_DIMS, Placement, ReshardBranch, ReshardStep, Resharder, TensorShape,
};
use shardwright_graph::{Graph, OpId, TensorType};
use shardwright_machine::{AxisId, AxisSet, Mesh};
use shardwright_space::{
    Assignment, AxisUse, Config, OpShapes, Sharing, TensorLayout, TensorLayouts, Transfers, assign_layouts,
};

/// A step of a reshard path, as an engine runs it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineStep {
    /// The collective; none for a local step.
    pub kind: Option<&'static str>,
    /// Along which axes.
    pub axes: AxisSet,
    /// Bytes of the larger side on one device.
    pub bytes: u64,
    /// The tensor's arrangement afterwards.
    pub after: Arrangement,
    /// The dimension that a gather puts together.
    pub gathered: Option<u8>,
}

/// A layout that a reader needs.
#[derive(Clone, Debug)]
pub(crate) struct ReaderLayout {
    pub layout: Layout,
    /// The reader layout that it is made from; none: the settled layout.
    pub from: Option<usize>,
    pub steps: Vec<EngineStep>,
}

/// A tensor's layouts, and the paths between them.
#[derive(Clone, Debug, Default)]
pub(crate) struct TensorPaths {
    /// Its layout once partial results are reduced; none if readers take partial results.
    pub settled: Option<Layout>,
    /// Its layout after the reduction, before it is split; only for partial results.
    pub summed: Option<Layout>,
    /// The reductions of partial results: kind, axes, bytes.
    pub reduced: Vec<(&'static str, AxisSet, u64)>,
    pub wanted: Vec<ReaderLayout>,
}

impl TensorPaths {
    /// The layouts after its producer: reduced first, then split. With both in one constraint, XLA may gather the operands
    /// of a product instead.
    pub fn made(&self) -> Option<impl Iterator<Item = Layout>> {
        let settled = self.settled?;
        Some(self.summed.filter(|summed| *summed != settled).into_iter().chain([settled]))
    }

    /// The arrangements on the path to a layout, ending with the layout.
    pub fn to(&self, layout: &Layout) -> Vec<Arrangement> {
        let mut chain = Vec::new();
        let mut at = self.wanted.iter().position(|wanted| wanted.layout == *layout);
        while let Some(wanted) = at.map(|at| &self.wanted[at]) {
            chain.extend(wanted.steps.iter().rev().map(|step| step.after));
            at = wanted.from;
        }
        chain.reverse();
        if chain.last().is_none_or(|last| *last != Arrangement::canonical(layout)) {
            chain.push(Arrangement::canonical(layout));
        }
        chain
    }
}

/// The layouts and paths of all tensors under a plan's assignment.
pub(crate) struct PlanLayouts<'r> {
    pub mesh: &'r Mesh,
    pub shapes: Vec<OpShapes>,
    pub layouts: TensorLayouts,
    /// Per tensor.
    pub paths: Vec<TensorPaths>,
}

impl<'r> PlanLayouts<'r> {
    pub fn of(graph: &Graph, resharder: &'r Resharder, assignment: &Assignment) -> Result<Self, ExportError> {
        let mesh = resharder.comm().mesh();
        let shapes: Vec<OpShapes> = graph.op_ids().map(|op| OpShapes::of(graph, op)).collect();
        let transfers = Transfers::of(graph);
        let layouts = assign_layouts(graph, &shapes, &transfers, assignment, mesh, Sharing::AcrossLayers);
        let mut settled: Vec<Option<Layout>> = layouts.tensors.iter().map(settled).collect();
        // XLA cannot put off what sums of partial results put off: operands are reduced to where the sum goes.
        let at_once = |op: OpId| layouts.sums[op.index()].is_some() && !graph.op_by_op;
        for op in graph.op_ids().collect::<Vec<_>>().into_iter().rev() {
            if at_once(op) {
                let node = graph.node(op);
                let sum = settled[node.outputs[0].index()];
                node.inputs.iter().for_each(|t| settled[t.index()] = sum);
            }
        }
        let mut paths = Vec::with_capacity(graph.tensors.len());
        for ((tensor, placed), settled) in graph.tensors.iter().zip(&layouts.tensors).zip(settled) {
            if placed.stored.is_some_and(|stored| !stored.absent().is_empty()) {
                return Err(ExportError::Pinned { tensor: tensor.name.clone() });
            }
            let fail = |source| ExportError::Layout { tensor: tensor.name.clone(), source };
            let maker = tensor.producer.map(|op| &layouts.configs[op.index()]);
            let mut found = paths_of(placed, settled, maker, &tensor.ty, resharder).map_err(fail)?;
            if tensor.producer.is_some_and(at_once) {
                (found.reduced, found.summed) = (Vec::new(), None);
            }
            paths.push(found);
        }
        Ok(Self { mesh, shapes, layouts, paths })
    }
}

pub(crate) fn partial(layout: &Layout) -> bool {
    !layout.axes_where(|p| matches!(p, Placement::Partial(_))).is_empty()
}

fn paths_of(
    placed: &TensorLayout,
    settled: Option<Layout>,
    maker: Option<&Config>,
    ty: &TensorType,
    resharder: &Resharder,
) -> Result<TensorPaths, shardwright_cost::LayoutError> {
    let (Some(home), Some(settled)) = (placed.stored, settled) else { return Ok(TensorPaths::default()) };
    let mesh = resharder.comm().mesh();
    let summed = home.axes_where(|p| matches!(p, Placement::Partial(_)));
    let sharded = home.axes_where(|p| matches!(p, Placement::Shard(_)));
    let local = ty.bytes() / u64::from(mesh.group_size(sharded)).max(1);
    let layouts = placed.fetches.iter().flat_map(|fetch| &fetch.layouts).copied();
    let layouts: Vec<Layout> = layouts.filter(|layout| !partial(layout)).collect();
    let shape = TensorShape::new(&ty.shape, ty.dtype.bytes() as u32)?;
    let tree = resharder.reshard_many(&resharder.tensor(shape), &settled, &layouts)?;
    let branches = tree.branches();
    let wanted = branches.iter().map(|branch| {
        let from = branch.from.map_or(settled, |at| branches[at].to);
        ReaderLayout { layout: branch.to, from: branch.from, steps: steps(branch, &from, mesh) }
    });
    let kind = |axes: AxisSet| {
        let scattered = axes.iter().any(|axis| matches!(settled.get(axis), Placement::Shard(_)));
        if scattered { "reduce-scatter" } else { "all-reduce" }
    };
    let whole = summed.iter().fold(home, |layout, axis| layout.with(axis, Placement::Replicated));
    Ok(TensorPaths {
        settled: Some(settled),
        summed: (!summed.is_empty()).then_some(whole),
        reduced: reductions(summed, maker).map(|axes| (kind(axes), axes, local)).collect(),
        wanted: wanted.collect(),
    })
}

/// The axes of partial results, grouped by the loop of the producer that they split: XLA reduces along one dimension of an
/// operand after the other.
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

/// The layout of a tensor once partial results are reduced: its stored layout, and along the partial axes the layout that all
/// readers need, if that is a part of the reduced tensor. None where readers take partial results, or no op touches it.
fn settled(placed: &TensorLayout) -> Option<Layout> {
    let home = placed.stored?;
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

/// The engine's steps of a branch. Neighbouring steps that an engine runs as one are joined. A gather along several dimensions
/// is split by dimension, the smallest groups first.
fn steps(branch: &ReshardBranch, from: &Layout, mesh: &Mesh) -> Vec<EngineStep> {
    let mut steps: Vec<(EngineStep, Vec<AxisChange>)> = Vec::new();
    let mut before = Arrangement::canonical(from);
    for step in &branch.path.steps {
        let kind = match step.action {
            Action::Slice => None,
            Action::Permute => Some("collective-permute"),
            action => Some(action.name()),
        };
        let taken = match step.action {
            Action::AllGather => gathers(step, &before, mesh),
            _ => {
                let (axes, bytes) = (step.axes, step.message.0);
                vec![EngineStep { kind, axes, bytes, after: step.after, gathered: None }]
            }
        };
        let joins_any = step.action == Action::Slice;
        let joins_equal = matches!(step.action, Action::AllGather | Action::AllToAll);
        for step in taken {
            let changes = axis_changes(&before, &step.after, mesh);
            before = step.after;
            match steps.last_mut() {
                Some((last, across))
                    if last.kind == kind && (joins_any || (joins_equal && *across == changes)) =>
                {
                    *last = EngineStep {
                        axes: last.axes.union(step.axes),
                        bytes: last.bytes.max(step.bytes),
                        ..step
                    };
                }
                _ => steps.push((step, changes)),
            }
        }
    }
    steps.into_iter().map(|(step, _)| step).collect()
}

/// A gather, dimension by dimension.
fn gathers(step: &ReshardStep, before: &Arrangement, mesh: &Mesh) -> Vec<EngineStep> {
    let of = |dim: u8| before.layout().shards(dim).intersect(step.axes);
    let mut dims: Vec<u8> = (0..MAX_DIMS as u8).filter(|&dim| !of(dim).is_empty()).collect();
    dims.sort_by_key(|&dim| (mesh.group_size(of(dim)), dim));
    let mut at = *before;
    let mut left = step.axes;
    let mut steps: Vec<EngineStep> = Vec::with_capacity(dims.len());
    for dim in dims {
        let axes = of(dim);
        left = left.minus(axes);
        at = at.gathered(axes);
        let bytes = step.message.0 / u64::from(mesh.group_size(left)).max(1);
        steps.push(EngineStep {
            kind: Some(step.action.name()),
            axes,
            bytes,
            after: at,
            gathered: Some(dim),
        });
    }
    // The last step ends in the layout that the reshard step states.
    if let Some(last) = steps.last_mut() {
        last.after = step.after;
    }
    steps
}

/// An axis' placement before and after.
type AxisChange = (Placement, Placement);

fn axis_changes(before: &Arrangement, after: &Arrangement, mesh: &Mesh) -> Vec<AxisChange> {
    let axes = (0..mesh.len() as u32).map(AxisId);
    let mut changes: Vec<AxisChange> = axes
        .map(|axis| (before.layout().get(axis), after.layout().get(axis)))
        .filter(|(a, b)| a != b)
        .collect();
    changes.sort_unstable();
    changes.dedup();
    changes
}
