//! Which tensors travel: from where they are made or stored to where they are read.
//!
//! A tensor that an op makes starts in the layout which that op's config leaves it in. A weight, or optimizer
//! state, is stored in the layout that its first reader needs, and its updated value has to get back there. Data
//! and constants are delivered wherever they are needed, at no cost. Every layer that reads a tensor
//! fetches it once per layout that it needs; layers do not share what they fetched.

use crate::layers::Layers;
use shardwright_cost::Layout;
use shardwright_graph::{Graph, OpId, Role, TensorId};
use shardwright_machine::Mesh;
use shardwright_space::{Config, OpShapes, input_layout, output_layout};
use std::collections::BTreeMap;

/// A place where a tensor has a layout: a result or an operand of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct End {
    /// The op's layer.
    pub layer: u32,
    /// Which of the layer's ops.
    pub member: u32,
    /// Which operand or result.
    pub slot: u32,
    /// Whether it is a result.
    pub made: bool,
}

impl End {
    /// The tensor's layout there, under the configs of the layer's ops.
    pub fn layout(&self, layers: &Layers, shapes: &[OpShapes], configs: &[Config], mesh: &Mesh) -> Layout {
        let member = self.member as usize;
        let op = layers.splits[self.layer as usize].ops[member];
        let (shapes, config) = (&shapes[op.index()], &configs[member]);
        if self.made {
            output_layout(shapes, self.slot as usize, config, mesh)
        } else {
            input_layout(shapes, self.slot as usize, config, mesh)
        }
    }
}

/// A tensor on its way to one layer.
#[derive(Clone, Debug)]
pub struct Transfer {
    /// The tensor.
    pub tensor: TensorId,
    /// Where it comes from.
    pub from: End,
    /// Where it is needed; all in one layer.
    pub to: Vec<End>,
}

impl Transfer {
    /// The layer that reads.
    pub fn reader(&self) -> u32 {
        self.to[0].layer
    }

    /// Whether maker and reader are one layer.
    pub fn is_internal(&self) -> bool {
        self.from.layer == self.reader()
    }
}

/// Where every tensor starts, and all transfers.
pub struct Transfers {
    /// Per tensor: where it is made, stored or (data) first needed; none if nobody touches it.
    pub homes: Vec<Option<End>>,
    /// All transfers, by tensor, then reader.
    pub all: Vec<Transfer>,
}

impl Transfers {
    /// Those of a graph.
    pub fn of(graph: &Graph, layers: &Layers) -> Self {
        let consumers = graph.consumers();
        let end = |op: OpId, slot: usize, made: bool| {
            let (layer, member) = layers.place[op.index()];
            End { layer, member, slot: slot as u32, made }
        };
        let readers = |t: TensorId| -> Vec<End> {
            let mut ops = consumers.of(t).to_vec();
            ops.dedup();
            let slots = |op: &OpId| {
                let inputs = graph.node(*op).inputs.iter().enumerate();
                let op = *op;
                inputs.filter(move |(_, input)| **input == t).map(move |(i, _)| end(op, i, false))
            };
            ops.iter().flat_map(slots).collect()
        };
        let home = |t: TensorId| match graph.tensor(t).producer {
            Some(op) => {
                graph.node(op).outputs.iter().position(|&output| output == t).map(|o| end(op, o, true))
            }
            None => readers(t).first().copied(),
        };
        let homes: Vec<Option<End>> = graph.tensor_ids().map(home).collect();
        let mut all = Vec::new();
        let mut back: Vec<Option<End>> = vec![None; graph.tensors.len()];
        for carry in &graph.carries {
            back[carry.new.index()] = homes[carry.old.index()];
        }
        for t in graph.tensor_ids() {
            let tensor = graph.tensor(t);
            let free = tensor.producer.is_none() && matches!(tensor.role, Role::Input | Role::Constant);
            let Some(from) = homes[t.index()].filter(|_| !free) else { continue };
            let mut by_layer: BTreeMap<u32, Vec<End>> = BTreeMap::new();
            for to in readers(t).into_iter().chain(back[t.index()]).filter(|&to| to != from) {
                by_layer.entry(to.layer).or_default().push(to);
            }
            all.extend(by_layer.into_values().map(|to| Transfer { tensor: t, from, to }));
        }
        Self { homes, all }
    }
}
