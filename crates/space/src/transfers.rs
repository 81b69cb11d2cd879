//! Transfers: which tensors move between ops, and which of their readers share a copy. They depend on the graph alone.
//!
//! - The *source* of a tensor fixes the layout in which it is stored. A tensor that an op produces has the layout in which
//!   the op leaves it. A weight, or optimizer state, has the layout in which its update reads it; its updated value returns
//!   there. A weight that is never updated has its first reader's layout. An argument whose layout is constrained is read by
//!   a view of equal shape first ([`constrained_view`]), and has the layout of that view.
//! - Data and constants are *delivered*: every reader gets its own layout at no cost.
//! - Copies of weights live for one pass (forward, backward, update), as in FSDP: each pass fetches them again. So do
//!   copies that a micro-batch makes of a tensor from outside: every micro-batch fetches them again.
//!
//! [`Sharing`] says which readers share a fetch. Within layers, every transfer depends on two ops only, so the sum over
//! transfers is the objective of a pairwise network. Across layers, all readers of a pass take a tensor from one reshard
//! tree, as the lowered program does.

use crate::{
    config::Config,
    layout::{OpShapes, input_layout, output_layout},
};
use shardwright_cost::{Layout, Placement};
use shardwright_graph::{Consumers, Graph, LayerId, OpId, Phase, Role, TensorId};
use shardwright_machine::Mesh;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::ops::Range;

/// Which readers of a tensor share a fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// The first reader in a layer fetches; the layer's other readers take the tensor from its copy. Sums of partial
    /// results are computed as configured. This is the search's objective.
    WithinLayers,
    /// All readers of a pass share one reshard tree, and sums of partial results stay partial. Lowered programs run
    /// this way.
    AcrossLayers,
}

/// A port of an op, where a tensor has a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Endpoint {
    /// The op.
    pub op: OpId,
    /// Operands first, then results.
    pub port: u32,
    /// Whether partial results are reduced first. A weight that no op reads is stored this way.
    pub reduced: bool,
}

impl Endpoint {
    /// The `i`-th operand of an op.
    pub fn operand(op: OpId, i: usize) -> Self {
        Self { op, port: i as u32, reduced: false }
    }

    /// The `o`-th result of an op.
    pub fn result(graph: &Graph, op: OpId, o: usize) -> Self {
        Self { op, port: (graph.node(op).inputs.len() + o) as u32, reduced: false }
    }

    /// The tensor's layout at this endpoint, under the op's config.
    pub fn layout(&self, shapes: &[OpShapes], config: &Config, mesh: &Mesh) -> Layout {
        let shapes = &shapes[self.op.index()];
        let port = self.port as usize;
        let layout = match port.checked_sub(shapes.inputs.len()) {
            None => input_layout(shapes, port, config, mesh),
            Some(o) => output_layout(shapes, o, config, mesh),
        };
        if self.reduced { reduce_partials(layout) } else { layout }
    }
}

/// A layout with partial results reduced onto every device.
pub fn reduce_partials(layout: Layout) -> Layout {
    let partial = layout.axes_where(|p| matches!(p, Placement::Partial(_)));
    partial.iter().fold(layout, |layout, axis| layout.with(axis, Placement::Replicated))
}

/// A tensor that moves from one endpoint to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The tensor.
    pub tensor: TensorId,
    /// Its source, or the operand of an earlier reader in the same layer.
    pub from: Endpoint,
    /// The operand that reads it, or the source of the weight that it updates.
    pub to: Endpoint,
}

/// A pass of the step, for which copies of a tensor live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pass {
    /// The phase of the readers.
    pub phase: Phase,
    /// Whether they run once per micro-batch.
    pub repeated: bool,
}

/// The pass for which an op's copy of a tensor lives; none where all readers of the tensor share their copies.
pub fn pass_of(graph: &Graph, tensor: TensorId, reader: OpId) -> Option<Pass> {
    let node = graph.node(reader);
    let outside = match graph.tensor(tensor).producer {
        None => true,
        Some(producer) if constrained_view(graph, producer) || converted_weight(graph, producer) => true,
        Some(producer) => graph.micro_batches.get() > 1 && !graph.node(producer).repeated,
    };
    outside.then_some(Pass { phase: node.phase, repeated: node.repeated })
}

/// Whether an op constrains the layout of an argument: it is a view of an argument, of equal shape. Importers write one for each
/// argument whose sharding the user gives, and everything else reads its result.
pub fn constrained_view(graph: &Graph, op: OpId) -> bool {
    let node = graph.node(op);
    let ([input], [output]) = (&node.inputs[..], &node.outputs[..]) else { return false };
    let (from, to) = (graph.tensor(*input), graph.tensor(*output));
    from.producer.is_none() && from.ty == to.ty && node.op.operator().is_view()
}

/// Whether an op converts a weight to the element type of computing, as mixed precision of captured PyTorch modules does. Its
/// copies are copies of the weight.
fn converted_weight(graph: &Graph, op: OpId) -> bool {
    let node = graph.node(op);
    let ([input], [output]) = (&node.inputs[..], &node.outputs[..]) else { return false };
    let (from, to) = (graph.tensor(*input), graph.tensor(*output));
    let converts = from.ty.dtype != to.ty.dtype && from.ty.shape == to.ty.shape && from.ty.dtype.is_float();
    graph.op_by_op && from.role == Role::Parameter && converts && to.ty.dtype.is_float()
}

/// The readers of a tensor that share a reshard tree under [`Sharing::AcrossLayers`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchGroup {
    /// The tensor.
    pub tensor: TensorId,
    /// The pass of the readers ([`pass_of`]); none: all readers.
    pub pass: Option<Pass>,
    /// Positions of the readers in [`Transfers::readers`].
    readers: Range<u32>,
    /// The sources of the weights that this tensor updates.
    pub returns: SmallVec<[Endpoint; 1]>,
}

/// All transfers of a graph.
#[derive(Clone, Debug)]
pub struct Transfers {
    /// Per tensor: its source; none if no op touches it.
    pub sources: Vec<Option<Endpoint>>,
    /// Per tensor: whether it is delivered to every reader at no cost.
    pub is_delivered: Vec<bool>,
    /// Transfers under [`Sharing::WithinLayers`], by tensor, then reader.
    pub pairs: Vec<Transfer>,
    /// Delivered tensors, from their first reader to the others: free, but each layout takes memory.
    pub deliveries: Vec<Transfer>,
    /// Fetch groups under [`Sharing::AcrossLayers`], by tensor, then pass.
    pub groups: Vec<FetchGroup>,
    readers: Vec<Endpoint>,
    /// Per op: the results that it sums, if it may run on partial results. Such an op sums tensors of its result's type
    /// that no other op reads. Whether it runs on partial results depends on their layouts.
    pub partial_sums: Vec<Option<Box<[Endpoint]>>>,
}

impl Transfers {
    /// The transfers of a graph.
    pub fn of(graph: &Graph) -> Self {
        let consumers = graph.consumers();
        let readers: Vec<Vec<Endpoint>> =
            graph.tensor_ids().map(|t| read_endpoints(graph, &consumers, t)).collect();
        let sources = sources(graph, &readers);
        let mut transfers = Self {
            is_delivered: graph.tensor_ids().map(|t| is_delivered(graph, t)).collect(),
            pairs: Vec::new(),
            deliveries: Vec::new(),
            groups: Vec::new(),
            readers: Vec::new(),
            partial_sums: graph.op_ids().map(|op| partial_sum(graph, &consumers, op)).collect(),
            sources,
        };
        let mut returns: Vec<SmallVec<[Endpoint; 1]>> = vec![SmallVec::new(); graph.tensors.len()];
        for carry in &graph.carries {
            returns[carry.new.index()].extend(transfers.sources[carry.old.index()]);
        }
        for t in graph.tensor_ids() {
            let Some(source) = transfers.sources[t.index()] else { continue };
            let (readers, returns) = (&readers[t.index()], &returns[t.index()]);
            transfers.add_pairs(graph, t, source, readers, returns);
            transfers.add_groups(graph, t, readers, returns);
        }
        transfers
    }

    /// The operands that a fetch group serves, in the order of their ops.
    pub fn readers(&self, group: &FetchGroup) -> &[Endpoint] {
        &self.readers[group.readers.start as usize..group.readers.end as usize]
    }

    fn add_pairs(
        &mut self,
        graph: &Graph,
        tensor: TensorId,
        source: Endpoint,
        readers: &[Endpoint],
        returns: &[Endpoint],
    ) {
        let others = readers.iter().copied().filter(|&to| to != source);
        if self.is_delivered[tensor.index()] {
            self.deliveries.extend(others.map(|to| Transfer { tensor, from: source, to }));
            return;
        }
        let mut first: BTreeMap<(LayerId, Option<Pass>), Endpoint> = BTreeMap::new();
        for to in others {
            let layer = graph.node(to.op).layer;
            let from = *first.entry((layer, pass_of(graph, tensor, to.op))).or_insert(to);
            self.pairs.push(Transfer { tensor, from: if from == to { source } else { from }, to });
        }
        self.pairs.extend(returns.iter().map(|&to| Transfer { tensor, from: source, to }));
    }

    fn add_groups(&mut self, graph: &Graph, tensor: TensorId, readers: &[Endpoint], returns: &[Endpoint]) {
        let mut passes: Vec<Option<Pass>> = readers.iter().map(|r| pass_of(graph, tensor, r.op)).collect();
        let produced = graph.tensor(tensor).producer;
        // What an op updates returns with the update's pass.
        let returning = produced.map_or(Some(UPDATE), |producer| pass_of(graph, tensor, producer));
        if !returns.is_empty() {
            passes.push(returning);
        }
        passes.sort_unstable();
        passes.dedup();
        for pass in passes {
            let first = self.readers.len() as u32;
            let of_pass = |reader: &&Endpoint| pass_of(graph, tensor, reader.op) == pass;
            self.readers.extend(readers.iter().filter(of_pass));
            let range = first..self.readers.len() as u32;
            let returns = if pass == returning { returns.iter().copied().collect() } else { SmallVec::new() };
            self.groups.push(FetchGroup { tensor, pass, readers: range, returns });
        }
    }
}

/// The pass of updates.
pub const UPDATE: Pass = Pass { phase: Phase::Update, repeated: false };

fn is_delivered(graph: &Graph, t: TensorId) -> bool {
    let tensor = graph.tensor(t);
    tensor.producer.is_none() && matches!(tensor.role, Role::Input | Role::Constant)
}

/// The operands that read a tensor, in the order of their ops.
fn read_endpoints(graph: &Graph, consumers: &Consumers, t: TensorId) -> Vec<Endpoint> {
    let mut ops = consumers.of(t).to_vec();
    ops.dedup();
    let operands = |&op: &OpId| {
        let inputs = graph.node(op).inputs.iter().enumerate();
        inputs.filter(move |(_, input)| **input == t).map(move |(i, _)| Endpoint::operand(op, i))
    };
    ops.iter().flat_map(operands).collect()
}

/// The result of the op that produces a tensor.
fn produced_at(graph: &Graph, t: TensorId) -> Option<Endpoint> {
    let op = graph.tensor(t).producer?;
    let o = graph.node(op).outputs.iter().position(|&output| output == t)?;
    Some(Endpoint::result(graph, op, o))
}

fn sources(graph: &Graph, readers: &[Vec<Endpoint>]) -> Vec<Option<Endpoint>> {
    // Per stored tensor: the op that produces its next value.
    let mut updates: Vec<Option<OpId>> = vec![None; graph.tensors.len()];
    for carry in &graph.carries {
        updates[carry.old.index()] = graph.tensor(carry.new).producer;
    }
    let source = |t: TensorId| {
        produced_at(graph, t).or_else(|| {
            let (readers, update) = (&readers[t.index()], updates[t.index()]);
            if let Some(&view) = readers.iter().find(|end| constrained_view(graph, end.op)) {
                return Some(view);
            }
            // An update that does not read the old value (it rounds a master copy) decides by the layout that it leaves.
            let rewritten = update.is_some_and(|op| graph.node(op).phase == Phase::Update);
            let first = readers.first().filter(|_| !rewritten);
            readers.iter().find(|end| Some(end.op) == update).or(first).copied()
        })
    };
    let mut sources: Vec<Option<Endpoint>> = graph.tensor_ids().map(source).collect();
    for carry in &graph.carries {
        if sources[carry.old.index()].is_none() {
            sources[carry.old.index()] =
                sources[carry.new.index()].map(|end| Endpoint { reduced: true, ..end });
        }
    }
    sources
}

fn partial_sum(graph: &Graph, consumers: &Consumers, op: OpId) -> Option<Box<[Endpoint]>> {
    let node = graph.node(op);
    if !node.op.operator().is_sum() || node.inputs.is_empty() {
        return None;
    }
    let ty = &graph.tensor(*node.outputs.first()?).ty;
    let summand = |&t: &TensorId| {
        let only_reader = consumers.of(t).iter().all(|&reader| reader == op);
        produced_at(graph, t).filter(|_| only_reader && graph.tensor(t).ty == *ty)
    };
    node.inputs.iter().map(summand).collect()
}
