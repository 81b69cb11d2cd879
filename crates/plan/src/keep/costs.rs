//! Costs that depend on keep states: a clone's own time, and transfers.
//!
//! Readers of a layer share a fetch ([`shardwright_space::Transfers`]). Where a tensor's op is recomputed, later readers fetch
//! the clone's result; where the layer's forward op is recomputed, its clone is the first of them. So the transfers of a
//! tensor to a layer depend on two states alone, and the network stays one of pairs.

use super::space::KeepSpace;
use crate::context::Context;
use shardwright_graph::{LayerId, OpId, Phase, TensorId};
use shardwright_space::{Endpoint, Pass, Transfer, pass_of};
use std::collections::{BTreeMap, BTreeSet};

/// The transfers of a tensor to the readers of a layer.
pub(crate) struct FetchCase {
    /// The position of the op that makes the tensor, if it may be recomputed.
    pub producer: Option<usize>,
    /// The position of the layer's forward op that reads it, if that may be recomputed.
    pub reader: Option<usize>,
    /// By whether the producer is recomputed (2) and the reader is (1).
    pub transfers: [Vec<Transfer>; 4],
}

impl FetchCase {
    /// The transfers under two states.
    pub fn index(producer_recomputed: bool, reader_recomputed: bool) -> usize {
        usize::from(producer_recomputed) * 2 + usize::from(reader_recomputed)
    }
}

/// The transfers of a step: those that no keep state changes, and all others.
pub(crate) struct FetchCases {
    pub plain: Vec<Transfer>,
    pub cases: Vec<FetchCase>,
}

impl FetchCases {
    /// None where a layer has several forward ops that read a tensor and may be recomputed.
    pub fn of(context: &Context<'_>, space: &KeepSpace) -> Option<Self> {
        let graph = context.graph;
        let recomputable = |op: OpId| space.position(op).filter(|&at| space.ops[at].recomputable);
        let producer = |t: TensorId| graph.tensor(t).producer.and_then(recomputable);
        let mut readers: BTreeMap<(TensorId, LayerId), Vec<Endpoint>> = BTreeMap::new();
        for op in graph.op_ids() {
            for (i, &t) in graph.node(op).inputs.iter().enumerate() {
                readers.entry((t, graph.node(op).layer)).or_default().push(Endpoint::operand(op, i));
            }
        }
        let (mut plain, mut changed) = (Vec::new(), BTreeSet::new());
        for transfer in &context.transfers.pairs {
            let node = graph.node(transfer.to.op);
            let reads = node.inputs.get(transfer.to.port as usize) == Some(&transfer.tensor);
            let key = (transfer.tensor, node.layer);
            let again = |end: &Endpoint| recomputable(end.op).is_some();
            let depends = producer(transfer.tensor).is_some()
                || readers.get(&key).is_some_and(|ends| ends.iter().any(again));
            if reads && depends {
                changed.insert(key);
            } else {
                plain.push(*transfer);
            }
        }
        let mut cases = Vec::new();
        for key in changed {
            let ends = &readers[&key];
            let mut forward: Vec<usize> = ends.iter().filter_map(|end| recomputable(end.op)).collect();
            forward.dedup();
            if forward.len() > 1 {
                return None;
            }
            let own =
                Readers { context, tensor: key.0, ends, clone: forward.first().map(|&at| space.ops[at].op) };
            let case = |index: usize| own.transfers(index & 2 != 0, index & 1 != 0);
            let transfers = [case(0)?, case(1)?, case(2)?, case(3)?];
            cases.push(FetchCase { producer: producer(key.0), reader: forward.first().copied(), transfers });
        }
        Some(Self { plain, cases })
    }
}

/// The readers of a tensor in a layer.
struct Readers<'r, 'a> {
    context: &'r Context<'a>,
    tensor: TensorId,
    ends: &'r [Endpoint],
    clone: Option<OpId>,
}

impl Readers<'_, '_> {
    /// The transfers; none where the tensor has no source.
    fn transfers(&self, producer_recomputed: bool, reader_recomputed: bool) -> Option<Vec<Transfer>> {
        let graph = self.context.graph;
        let source = self.context.transfers.sources[self.tensor.index()]?;
        let phase = |end: &Endpoint| graph.node(end.op).phase;
        let forward = self.ends.iter().filter(|end| phase(end) == Phase::Forward).copied();
        let clones = self.ends.iter().filter(|end| reader_recomputed && Some(end.op) == self.clone).copied();
        let later = self.ends.iter().filter(|end| phase(end) != Phase::Forward).copied();
        // Readers that share a fetch: by the pass, where the tensor comes from outside, and by which of two tensors they read.
        let mut first: BTreeMap<(bool, Option<Pass>), Endpoint> = BTreeMap::new();
        let mut transfers = Vec::new();
        let ordered = forward.map(|end| (end, false)).chain(clones.map(|end| (end, true)));
        for (to, is_clone) in ordered.chain(later.map(|end| (end, false))) {
            if to == source && !is_clone {
                continue;
            }
            let after = is_clone || phase(&to) != Phase::Forward;
            let pass = pass_of(graph, self.tensor, to.op);
            let pass = pass.map(|pass| if is_clone { Pass { phase: Phase::Backward, ..pass } } else { pass });
            let key = (producer_recomputed && after, pass);
            let from = first.get(&key).copied().unwrap_or(source);
            first.entry(key).or_insert(to);
            transfers.push(Transfer { tensor: self.tensor, from, to });
        }
        Some(transfers)
    }
}
