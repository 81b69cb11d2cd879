//! Where every tensor of a graph lies and where it is needed, once all ops have configs.
//!
//! A tensor that an op makes starts in the layout which that op leaves it in. A weight, or optimizer state, is stored
//! in the layout that its update works in, and its updated value has to get back there; one that is never updated is
//! stored as its first reader needs it. Copies of them live for one pass (forward, backward), as in FSDP. Data and
//! constants are delivered wherever they are needed.
//!
//! A sum of partial results is run before they are reduced, whatever its config says: the gradients of a weight that
//! is used twice are added up first and reduced once.

use crate::{
    config::{AxisUse, Config},
    layout::{OpShapes, input_layout, output_layout},
};
use shardwright_cost::{Layout, Placement, Reduction};
use shardwright_graph::{Consumers, Graph, OpId, Phase, Role, Rule};
use shardwright_machine::Mesh;

/// A tensor's layouts under the configs of all ops.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// How it is made or stored; for data and constants, how the first reader needs it. None if nobody touches it.
    pub home: Option<Layout>,
    /// What is fetched from there.
    pub fetches: Vec<Fetch>,
    /// Whether it is delivered in every layout at no cost.
    pub delivered: bool,
}

/// The layouts that a tensor is needed in by readers who share their copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetch {
    /// The pass whose readers these are, for what no op makes; none: all readers.
    pub pass: Option<Phase>,
    /// The different layouts, by first reader; the home may be among them.
    pub layouts: Vec<Layout>,
}

impl Placed {
    fn need(&mut self, pass: Option<Phase>, layout: Layout) {
        let at = self.fetches.iter().position(|fetch| fetch.pass == pass).unwrap_or_else(|| {
            self.fetches.push(Fetch { pass, layouts: Vec::new() });
            self.fetches.len() - 1
        });
        let layouts = &mut self.fetches[at].layouts;
        if !layouts.contains(&layout) {
            layouts.push(layout);
        }
    }
}

/// Where everything lies, and how every op is run.
#[derive(Clone, Debug)]
pub struct Places {
    /// Per tensor.
    pub tensors: Vec<Placed>,
    /// Per op: its config, but for sums of partial results the one that leaves those where they are.
    pub configs: Vec<Config>,
    /// Per op: the layout of operands and result of such a sum.
    pub sums: Vec<Option<Layout>>,
}

impl Places {
    /// The layout that an op needs its `i`-th input in.
    pub fn input(&self, op: OpId, i: usize, shapes: &OpShapes, mesh: &Mesh) -> Layout {
        self.sums[op.index()].unwrap_or_else(|| input_layout(shapes, i, &self.configs[op.index()], mesh))
    }

    /// The layout that an op leaves its `o`-th output in.
    pub fn output(&self, op: OpId, o: usize, shapes: &OpShapes, mesh: &Mesh) -> Layout {
        self.sums[op.index()].unwrap_or_else(|| output_layout(shapes, o, &self.configs[op.index()], mesh))
    }

    /// The layout that all operands of a sum have as partial results, if nobody else reads them.
    fn partial_operands(&self, graph: &Graph, consumers: &Consumers, op: OpId) -> Option<Layout> {
        let node = graph.node(op);
        let ty = &graph.tensor(node.outputs[0]).ty;
        let home = self.tensors[node.inputs.first()?.index()].home?;
        let alike = node.inputs.iter().all(|&t| {
            let alone = consumers.of(t).iter().all(|&reader| reader == op);
            let made = graph.tensor(t).producer.is_some();
            alone && made && graph.tensor(t).ty == *ty && self.tensors[t.index()].home == Some(home)
        });
        let partial = home.axes_where(|p| p == Placement::Partial(Reduction::Sum));
        (node.op.operator().is_sum() && alike && !partial.is_empty()).then_some(home)
    }
}

/// The config under which an op that works element by element has its tensors in a layout, up to partial sums.
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

/// Finds the layouts of all tensors; one config per op, in the graph's order.
pub fn place(graph: &Graph, shapes: &[OpShapes], configs: &[Config], mesh: &Mesh) -> Places {
    let tensors = graph
        .tensors
        .iter()
        .map(|t| {
            let delivered = t.producer.is_none() && matches!(t.role, Role::Input | Role::Constant);
            Placed { home: None, fetches: Vec::new(), delivered }
        })
        .collect();
    let mut places = Places { tensors, configs: configs.to_vec(), sums: vec![None; graph.ops.len()] };
    let consumers = graph.consumers();
    // The op that makes a stored tensor's next value.
    let mut updates: Vec<Option<OpId>> = vec![None; graph.tensors.len()];
    for carry in &graph.carries {
        updates[carry.old.index()] = graph.tensor(carry.new).producer;
    }
    let mut updated = vec![false; graph.tensors.len()];
    for op in graph.op_ids() {
        let (node, shapes) = (graph.node(op), &shapes[op.index()]);
        if let Some(layout) = places.partial_operands(graph, &consumers, op) {
            places.sums[op.index()] = Some(layout);
            places.configs[op.index()] = elementwise_config(&layout, &shapes.rule, mesh);
        }
        for (i, &t) in node.inputs.iter().enumerate() {
            let layout = places.input(op, i, shapes, mesh);
            let (made, placed) = (graph.tensor(t).producer.is_some(), &mut places.tensors[t.index()]);
            placed.need((!made).then_some(node.phase), layout);
            let updates = updates[t.index()] == Some(op) && !std::mem::replace(&mut updated[t.index()], true);
            if !made && (placed.home.is_none() || updates) {
                placed.home = Some(layout);
            }
        }
        for (o, &t) in node.outputs.iter().enumerate() {
            places.tensors[t.index()].home = Some(places.output(op, o, shapes, mesh));
        }
    }
    let placed = &mut places.tensors;
    for carry in &graph.carries {
        let Some(new) = placed[carry.new.index()].home else { continue };
        // A weight that nobody reads is stored as it is made.
        let back = *placed[carry.old.index()].home.get_or_insert_with(|| reduced(new));
        let pass = graph.tensor(carry.new).producer.is_none().then_some(Phase::Update);
        placed[carry.new.index()].need(pass, back);
    }
    places
}

/// A layout without partial results.
fn reduced(layout: Layout) -> Layout {
    let partial = layout.axes_where(|p| matches!(p, Placement::Partial(_)));
    partial.iter().fold(layout, |layout, axis| layout.with(axis, Placement::Replicated))
}
