//! Where every tensor of a graph lies and where it is needed, once all ops have configs.
//!
//! A tensor that an op makes starts in the layout which that op leaves it in. A weight, or optimizer state, is stored
//! in the layout that its update works in, and its updated value has to get back there; one that is never updated is
//! stored as its first reader needs it. Copies of them live for one pass (forward, backward), as in FSDP. Data and
//! constants are delivered wherever they are needed.

use crate::{
    config::Config,
    layout::{OpShapes, input_layout, output_layout},
};
use shardwright_cost::{Layout, Placement};
use shardwright_graph::{Graph, OpId, Phase, Role};
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

/// Finds the layouts of all tensors; one config per op, in the graph's order.
pub fn place(graph: &Graph, shapes: &[OpShapes], configs: &[Config], mesh: &Mesh) -> Vec<Placed> {
    let mut placed: Vec<Placed> = graph
        .tensors
        .iter()
        .map(|t| {
            let delivered = t.producer.is_none() && matches!(t.role, Role::Input | Role::Constant);
            Placed { home: None, fetches: Vec::new(), delivered }
        })
        .collect();
    // The op that makes a stored tensor's next value.
    let mut updates: Vec<Option<OpId>> = vec![None; graph.tensors.len()];
    for carry in &graph.carries {
        updates[carry.old.index()] = graph.tensor(carry.new).producer;
    }
    let mut updated = vec![false; graph.tensors.len()];
    for op in graph.op_ids() {
        let (node, shapes, config) = (graph.node(op), &shapes[op.index()], &configs[op.index()]);
        for (i, &t) in node.inputs.iter().enumerate() {
            let layout = input_layout(shapes, i, config, mesh);
            let (made, placed) = (graph.tensor(t).producer.is_some(), &mut placed[t.index()]);
            placed.need((!made).then_some(node.phase), layout);
            let updates = updates[t.index()] == Some(op) && !std::mem::replace(&mut updated[t.index()], true);
            if !made && (placed.home.is_none() || updates) {
                placed.home = Some(layout);
            }
        }
        for (o, &t) in node.outputs.iter().enumerate() {
            placed[t.index()].home = Some(output_layout(shapes, o, config, mesh));
        }
    }
    for carry in &graph.carries {
        let Some(new) = placed[carry.new.index()].home else { continue };
        // A weight that nobody reads is stored as it is made.
        let back = *placed[carry.old.index()].home.get_or_insert_with(|| reduced(new));
        let pass = graph.tensor(carry.new).producer.is_none().then_some(Phase::Update);
        placed[carry.new.index()].need(pass, back);
    }
    placed
}

/// A layout without partial results.
fn reduced(layout: Layout) -> Layout {
    let partial = layout.axes_where(|p| matches!(p, Placement::Partial(_)));
    partial.iter().fold(layout, |layout, axis| layout.with(axis, Placement::Replicated))
}
