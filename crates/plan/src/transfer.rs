//! Which tensors travel: from where they are made or stored to where they are read.
//!
//! A tensor that an op makes starts in the layout which that op's config leaves it in. A weight, or optimizer
//! state, is stored in the layout that its update works in, and its updated value has to get back there; one that is
//! never updated is stored as its first reader needs it. Data and constants are delivered wherever they are needed,
//! at no cost.
//!
//! The first op of a layer that reads a tensor fetches it from there; the layer's other ops take it from
//! the first one's copy, which is free where they need the same layout. Copies of weights are the exception: they are
//! dropped at the end of a pass (forward, backward), so that the backward pass fetches them anew, as FSDP does, and
//! a device never holds more than a few layers' whole weights. What is fetched is shared inside a layer only: two
//! layers that need a tensor in the same layout both pay for it in the objective.

use shardwright_cost::Layout;
use shardwright_graph::{Graph, LayerId, OpId, Phase, Role, TensorId};
use shardwright_machine::Mesh;
use shardwright_space::{Config, OpShapes, input_layout, output_layout};
use std::collections::BTreeMap;

/// A place where a tensor has a layout: a result or an operand of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct End {
    /// The op.
    pub op: OpId,
    /// Which operand or result.
    pub slot: u32,
    /// Whether it is a result.
    pub made: bool,
}

impl End {
    /// The tensor's layout there, under the op's config.
    pub fn layout(&self, shapes: &[OpShapes], config: &Config, mesh: &Mesh) -> Layout {
        let shapes = &shapes[self.op.index()];
        if self.made {
            output_layout(shapes, self.slot as usize, config, mesh)
        } else {
            input_layout(shapes, self.slot as usize, config, mesh)
        }
    }
}

/// A tensor on its way to one op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The tensor.
    pub tensor: TensorId,
    /// Where it is taken from: its home, or the operand of an earlier op of the layer.
    pub from: End,
    /// Where it is needed.
    pub to: End,
}

/// Where every tensor starts, and all transfers.
pub struct Transfers {
    /// Per tensor: where it is made, stored or (data) first needed; none if nobody touches it.
    pub homes: Vec<Option<End>>,
    /// All transfers, by tensor, then reader.
    pub all: Vec<Transfer>,
    /// Data and constants on their way from their first reader's layout to the others': free of charge.
    pub delivered: Vec<Transfer>,
}

impl Transfers {
    /// Those of a graph.
    pub fn of(graph: &Graph) -> Self {
        let consumers = graph.consumers();
        let readers = |t: TensorId| -> Vec<End> {
            let mut ops = consumers.of(t).to_vec();
            ops.dedup();
            let slots = |&op: &OpId| {
                let inputs = graph.node(op).inputs.iter().enumerate();
                inputs.filter(move |(_, input)| **input == t).map(move |(i, _)| End {
                    op,
                    slot: i as u32,
                    made: false,
                })
            };
            ops.iter().flat_map(slots).collect()
        };
        // The op that makes a stored tensor's next value.
        let mut updates: Vec<Option<OpId>> = vec![None; graph.tensors.len()];
        for carry in &graph.carries {
            updates[carry.old.index()] = graph.tensor(carry.new).producer;
        }
        let home = |t: TensorId| match graph.tensor(t).producer {
            Some(op) => {
                let made = graph.node(op).outputs.iter().position(|&output| output == t);
                made.map(|o| End { op, slot: o as u32, made: true })
            }
            None => {
                let readers = readers(t);
                let update = updates[t.index()];
                readers.iter().find(|end| Some(end.op) == update).or(readers.first()).copied()
            }
        };
        let homes: Vec<Option<End>> = graph.tensor_ids().map(home).collect();
        let mut back: Vec<Option<End>> = vec![None; graph.tensors.len()];
        for carry in &graph.carries {
            back[carry.new.index()] = homes[carry.old.index()];
        }
        let (mut all, mut delivered) = (Vec::new(), Vec::new());
        for t in graph.tensor_ids() {
            let tensor = graph.tensor(t);
            let stored = tensor.producer.is_none();
            let Some(home) = homes[t.index()] else { continue };
            if stored && matches!(tensor.role, Role::Input | Role::Constant) {
                let others = readers(t).into_iter().filter(|&to| to != home);
                delivered.extend(others.map(|to| Transfer { tensor: t, from: home, to }));
                continue;
            }
            let mut first: BTreeMap<(LayerId, Option<Phase>), End> = BTreeMap::new();
            for to in readers(t).into_iter().filter(|&to| to != home) {
                let node = graph.node(to.op);
                let from = *first.entry((node.layer, stored.then_some(node.phase))).or_insert(to);
                all.push(Transfer { tensor: t, from: if from == to { home } else { from }, to });
            }
            all.extend(back[t.index()].map(|to| Transfer { tensor: t, from: home, to }));
        }
        Self { homes, all, delivered }
    }
}
