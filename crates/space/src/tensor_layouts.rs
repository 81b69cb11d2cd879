//! The layouts of all tensors under an assignment: how each is stored, and in which layouts its readers need it.
//!
//! [`crate::Transfers`] says which readers share a fetch; this module fills in the layouts. Under
//! [`Sharing::AcrossLayers`] a sum of partial results runs before they are reduced, whatever its config says: the gradients
//! of a weight that is used twice are summed first and reduced once.

use crate::{
    assignment::Assignment,
    config::{AxisUse, Config},
    layout::{OpShapes, input_layout, output_layout},
    transfers::{Endpoint, Pass, Sharing, Transfers, reduce_partials},
};
use shardwright_cost::{Layout, Placement, Reduction};
use shardwright_graph::{Graph, OpId, Rule};
use shardwright_machine::Mesh;

/// A tensor's layouts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorLayout {
    /// The layout in which it is produced or stored. A delivered tensor has the layout of its first reader. None if no
    /// op touches it.
    pub stored: Option<Layout>,
    /// The layouts in which it is fetched.
    pub fetches: Vec<Fetch>,
    /// Whether it is delivered in every layout at no cost.
    pub delivered: bool,
}

/// The layouts in which the readers of one fetch group need a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetch {
    /// The readers' pass ([`crate::pass_of`]); none: all readers.
    pub pass: Option<Pass>,
    /// The distinct layouts, by first reader. The stored layout may be among them.
    pub layouts: Vec<Layout>,
}

/// The layouts of all tensors, and the configs that ops run with.
#[derive(Clone, Debug)]
pub struct TensorLayouts {
    /// Per tensor.
    pub tensors: Vec<TensorLayout>,
    /// Per op: its config. A sum of partial results has the config that leaves those in place.
    pub configs: Vec<Config>,
    /// Per op: the layout of operands and result, if it is a sum of partial results.
    pub sums: Vec<Option<Layout>>,
}

impl TensorLayouts {
    /// The layout in which an op needs its `i`-th input.
    pub fn input(&self, op: OpId, i: usize, shapes: &OpShapes, mesh: &Mesh) -> Layout {
        self.sums[op.index()].unwrap_or_else(|| input_layout(shapes, i, &self.configs[op.index()], mesh))
    }

    /// The layout in which an op leaves its `o`-th output.
    pub fn output(&self, op: OpId, o: usize, shapes: &OpShapes, mesh: &Mesh) -> Layout {
        self.sums[op.index()].unwrap_or_else(|| output_layout(shapes, o, &self.configs[op.index()], mesh))
    }

    fn at(&self, end: Endpoint, shapes: &[OpShapes], mesh: &Mesh) -> Layout {
        match self.sums[end.op.index()] {
            Some(layout) if end.reduced => reduce_partials(layout),
            Some(layout) => layout,
            None => end.layout(shapes, &self.configs[end.op.index()], mesh),
        }
    }

    /// The layout in which all summands of an op are stored, if it is a layout of partial sums.
    fn common_partials(&self, graph: &Graph, op: OpId) -> Option<Layout> {
        let mut summands = graph.node(op).inputs.iter().map(|t| self.tensors[t.index()].stored);
        let stored = summands.next()??;
        let partial = stored.axes_where(|p| p == Placement::Partial(Reduction::Sum));
        (!partial.is_empty() && summands.all(|other| other == Some(stored))).then_some(stored)
    }
}

/// The config under which an elementwise op has its tensors in a layout, up to partial sums.
pub fn elementwise_config(layout: &Layout, rule: &Rule, mesh: &Mesh) -> Config {
    let used = |axis| match layout.get(axis) {
        Placement::Shard(dim) => rule
            .outputs
            .first()
            .and_then(|map| rule.leading(map.dims.get(usize::from(dim))?))
            .map_or(AxisUse::Replicate, AxisUse::Split),
        Placement::Absent(digit) => AxisUse::Pin(digit),
        Placement::Replicated | Placement::Partial(_) => AxisUse::Replicate,
    };
    Config::new(mesh.all().iter().map(used))
}

/// Whether an op that has its tensors in a layout runs on its stage, if there are stages.
fn stays_on_stage(assignment: &Assignment, op: OpId, layout: &Layout) -> bool {
    let config = assignment.config(op);
    let same = |axis| match (layout.get(axis), config.get(axis)) {
        (Placement::Absent(digit), AxisUse::Pin(own)) => digit == own,
        _ => false,
    };
    assignment.pipeline.as_ref().is_none_or(|pipeline| pipeline.axes.iter().all(same))
}

/// Finds the layouts of all tensors under an assignment. `sharing` decides whether sums of partial results stay
/// partial.
pub fn assign_layouts(
    graph: &Graph,
    shapes: &[OpShapes],
    transfers: &Transfers,
    assignment: &Assignment,
    mesh: &Mesh,
    sharing: Sharing,
) -> TensorLayouts {
    let untouched = |&delivered: &bool| TensorLayout { stored: None, fetches: Vec::new(), delivered };
    let mut layouts = TensorLayouts {
        tensors: transfers.is_delivered.iter().map(untouched).collect(),
        configs: assignment.configs.clone(),
        sums: vec![None; graph.ops.len()],
    };
    for op in graph.op_ids() {
        let shapes = &shapes[op.index()];
        if sharing == Sharing::AcrossLayers
            && transfers.partial_sums[op.index()].is_some()
            && let Some(layout) = layouts.common_partials(graph, op)
            && stays_on_stage(assignment, op, &layout)
        {
            layouts.sums[op.index()] = Some(layout);
            layouts.configs[op.index()] = elementwise_config(&layout, &shapes.rule, mesh);
        }
        for (o, &t) in graph.node(op).outputs.iter().enumerate() {
            layouts.tensors[t.index()].stored = Some(layouts.output(op, o, shapes, mesh));
        }
    }
    for t in graph.tensor_ids().filter(|&t| graph.tensor(t).producer.is_none()) {
        layouts.tensors[t.index()].stored =
            transfers.sources[t.index()].map(|source| layouts.at(source, shapes, mesh));
    }
    for group in &transfers.groups {
        let mut needed: Vec<Layout> = Vec::new();
        for &end in transfers.readers(group).iter().chain(&group.returns) {
            let layout = layouts.at(end, shapes, mesh);
            if !needed.contains(&layout) {
                needed.push(layout);
            }
        }
        layouts.tensors[group.tensor.index()].fetches.push(Fetch { pass: group.pass, layouts: needed });
    }
    layouts
}
