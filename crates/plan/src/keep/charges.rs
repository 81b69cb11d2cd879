//! Memory that the results of an op take under a keep state, by the rules of [`crate::memory`]: as stored up to the first
//! reader, then in the smaller of two layouts, and in the last reader's layout while that runs.

use super::space::{KeepSpace, KeepState, Moment, covered};
use crate::{
    context::Context,
    memory::{NetworkCharge, network_charges},
};
use rustc_hash::FxHashSet;
use shardwright_graph::{Consumers, Graph, OpId, Phase, TensorId};
use shardwright_space::Endpoint;
use std::ops::Range;

/// The layout in which a tensor is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum HeldAs {
    /// That of an endpoint.
    Stored(Endpoint),
    /// The smaller of two endpoints'.
    Smaller([Endpoint; 2]),
    /// The smallest of three endpoints'. A sum may run on partial results where clones leave it the only reader.
    Smallest([Endpoint; 3]),
}

impl HeldAs {
    /// The endpoints, the smallest of whose layouts counts.
    pub fn ends(&self) -> &[Endpoint] {
        match self {
            Self::Stored(end) => std::slice::from_ref(end),
            Self::Smaller(ends) => ends,
            Self::Smallest(ends) => ends,
        }
    }
}

/// From one moment up to another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Span {
    pub from: Moment,
    pub to: Moment,
    /// Whether `to` is part of it.
    pub inclusive: bool,
}

/// A tensor that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct KeepCharge {
    pub tensor: TensorId,
    pub held: HeldAs,
    pub span: Span,
}

/// The charges that no keep state changes.
pub(crate) fn other_charges(context: &Context<'_>, space: &KeepSpace) -> Vec<(NetworkCharge, Span)> {
    let all = network_charges(context);
    let own = |charge: &NetworkCharge| match charge {
        NetworkCharge::Stored { tensor, .. } | NetworkCharge::Smaller { tensor, .. } => Some(*tensor),
        NetworkCharge::Copy(_) => None,
    };
    let covered = covered(context.graph, space);
    // Where a tensor stays in another layout, it is held while clones run in between.
    let starts: FxHashSet<(TensorId, u32)> =
        all.iter().filter_map(|(charge, when)| Some((own(charge)?, when.start))).collect();
    let others = all.iter().filter(|(charge, _)| own(charge).is_none_or(|t| !covered[t.index()]));
    let span = |(charge, when): &(NetworkCharge, Range<u32>)| {
        let stays = own(charge).is_some_and(|t| starts.contains(&(t, when.end)));
        let to = OpId(if stays { when.end } else { when.end - 1 });
        (*charge, Span { from: Moment::of(OpId(when.start)), to: Moment::of(to), inclusive: !stays })
    };
    others.map(span).collect()
}

/// Charges of a space's ops.
pub(crate) struct KeepCharges<'s, 'a> {
    context: &'s Context<'a>,
    space: &'s KeepSpace,
    consumers: Consumers,
    /// Per op: the last moment of the forward pass at which its results are read, directly or through views.
    forward_ends: Vec<Moment>,
}

impl<'s, 'a> KeepCharges<'s, 'a> {
    pub fn new(context: &'s Context<'a>, space: &'s KeepSpace) -> Self {
        let graph = context.graph;
        let consumers = graph.consumers();
        let mut forward_ends: Vec<Moment> = graph.op_ids().map(Moment::of).collect();
        for op in graph.op_ids().rev().filter(|&op| graph.node(op).phase == Phase::Forward) {
            for &reader in graph.node(op).outputs.iter().flat_map(|&t| consumers.of(t)) {
                let node = graph.node(reader);
                if node.phase == Phase::Forward {
                    let through = if node.op.operator().is_view() {
                        forward_ends[reader.index()]
                    } else {
                        Moment::of(reader)
                    };
                    forward_ends[op.index()] = forward_ends[op.index()].max(through);
                }
            }
        }
        Self { context, space, consumers, forward_ends }
    }

    /// Adds the charges of an op's results.
    pub fn of(&self, at: usize, state: KeepState, charges: &mut Vec<KeepCharge>) {
        let (graph, own) = (self.context.graph, &self.space.ops[at]);
        if own.is_view {
            return;
        }
        let node = graph.node(own.op);
        for &tensor in &node.outputs {
            if graph.tensor(tensor).ty.bytes() == 0 {
                continue;
            }
            let later = self.readers(tensor, |phase| phase != Phase::Forward);
            let single = node.outputs.len() == 1;
            // Of several results, a reader that is stated reads only some.
            let read_by = |moment: Option<Moment>, direct: Option<OpId>| {
                let stated = moment.filter(|m| single || reads(graph, m.op, tensor).is_some());
                if single { stated } else { stated.or(direct.map(Moment::of)) }
            };
            let last = read_by(state.last, later.last().copied());
            let forward = self.readers(tensor, |phase| phase == Phase::Forward);
            let forward_end = self.forward_ends[own.op.index()];
            let forward_first = forward.first().copied().map(Moment::of);
            match state.clone_moment(own.op) {
                None => {
                    let first = forward_first.or(later.first().copied().map(Moment::of));
                    let end = last.unwrap_or(forward_end).max(forward_end);
                    self.pieces(tensor, Moment::of(own.op), first, end, charges);
                }
                Some(clone) => {
                    self.pieces(tensor, Moment::of(own.op), forward_first, forward_end, charges);
                    let first = read_by(state.first, later.first().copied());
                    let end = last.unwrap_or(clone).max(clone);
                    self.pieces(tensor, clone, first.filter(|first| *first <= end), end, charges);
                }
            }
        }
    }

    /// The ops of a phase that read a tensor, in order.
    fn readers(&self, tensor: TensorId, phase: impl Fn(Phase) -> bool) -> Vec<OpId> {
        let graph = self.context.graph;
        let readers = self.consumers.of(tensor).iter();
        readers.copied().filter(|&op| phase(graph.node(op).phase)).collect()
    }

    fn pieces(
        &self,
        tensor: TensorId,
        start: Moment,
        first: Option<Moment>,
        end: Moment,
        charges: &mut Vec<KeepCharge>,
    ) {
        let (graph, transfers) = (self.context.graph, &self.context.transfers);
        let Some(source) = transfers.sources[tensor.index()] else { return };
        let mut hold = |held, from, to, inclusive| {
            charges.push(KeepCharge { tensor, held, span: Span { from, to, inclusive } });
        };
        let entry = |moment: Moment| reads(graph, moment.op, tensor);
        let Some((first, first_end)) = first.and_then(|first| Some((first, entry(first)?))) else {
            hold(HeldAs::Stored(source), start, end, true);
            return;
        };
        if start < first {
            hold(HeldAs::Stored(source), start, first, false);
        }
        let last = entry(end).filter(|end| !graph.node(end.op).op.operator().is_view());
        if first < end || last.is_none() {
            hold(HeldAs::Smaller([source, first_end]), first, end, last.is_none());
        }
        if let Some(last) = last {
            let sums = graph.node(last.op).op.operator().is_sum();
            let held = if sums { HeldAs::Smallest([source, first_end, last]) } else { HeldAs::Stored(last) };
            hold(held, end, end, true);
        }
    }
}

/// The first operand of an op that is a tensor.
fn reads(graph: &Graph, op: OpId, tensor: TensorId) -> Option<Endpoint> {
    let input = graph.node(op).inputs.iter().position(|&t| t == tensor)?;
    Some(Endpoint::operand(op, input))
}
