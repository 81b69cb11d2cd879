//! When ops can be recomputed, and how long their results live.
//!
//! A *moment* is the run of an op or of a clone: clones stand directly before a backward op, in the order of their
//! originals. A clone's slot is that of its first reader, which is a backward op or another clone. So the states of an op
//! follow from those of its readers.
//!
//! A view has the memory of the tensor that it shows: it is recomputed together with that tensor's op, and the tensor lives
//! as long as the view.

use shardwright_graph::{Graph, OpId, Phase, TensorId};
use std::collections::BTreeSet;

/// When an op or a clone runs, in the order of the step with clones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment {
    /// The op that runs next in the graph without clones, or the op itself.
    pub slot: OpId,
    /// The op, or the original of the clone.
    pub op: OpId,
}

impl Moment {
    /// When an op of the graph runs.
    pub fn of(op: OpId) -> Self {
        Self { slot: op, op }
    }
}

/// What becomes of an op's results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeepState {
    /// The first reader of the clone's results; none: there is no clone.
    pub first: Option<Moment>,
    /// The last reader after the forward pass, of the clone's results or else of the op's; none: no reader.
    pub last: Option<Moment>,
}

impl KeepState {
    /// Whether the op is recomputed.
    pub fn is_recomputed(self) -> bool {
        self.first.is_some()
    }

    /// When the op's clone runs.
    pub fn clone_moment(self, op: OpId) -> Option<Moment> {
        self.first.map(|first| Moment { slot: first.slot, op })
    }
}

/// A forward op whose results later readers may need.
#[derive(Clone, Debug)]
pub(crate) struct KeepOp {
    pub op: OpId,
    /// Whether it may be recomputed.
    pub recomputable: bool,
    /// First and last reader that is no forward op.
    pub direct: Option<(Moment, Moment)>,
    /// Positions of the forward ops in the space that read its results, ascending.
    pub consumers: Vec<u32>,
    /// Whether it only shows its operand.
    pub is_view: bool,
    /// The position of the op whose result it shows.
    pub shows: Option<u32>,
}

/// The forward ops of a step that may be recomputed.
#[derive(Clone, Debug)]
pub struct KeepSpace {
    pub(crate) ops: Vec<KeepOp>,
    /// Per op of the graph: its position.
    at: Vec<Option<u32>>,
}

impl KeepSpace {
    /// The space of a graph without clones.
    pub fn of(graph: &Graph) -> Self {
        let consumers = graph.consumers();
        let is_forward = |op: OpId| graph.node(op).phase == Phase::Forward;
        let single = graph.micro_batches.get() == 1;
        // What leaves the step lives to its end.
        let mut leaves: Vec<bool> = vec![false; graph.tensors.len()];
        for t in graph.outputs.iter().copied().chain(graph.carries.iter().map(|carry| carry.new)) {
            leaves[t.index()] = true;
        }
        let mut ops: Vec<KeepOp> = Vec::new();
        let mut at: Vec<Option<u32>> = vec![None; graph.ops.len()];
        for op in graph.op_ids().filter(|&op| is_forward(op)) {
            let node = graph.node(op);
            // What runs once per step is there for all micro-batches, and a sum over them cannot be formed twice.
            let in_pass = single || (node.repeated && !node.op.operator().accumulates());
            if !in_pass || node.outputs.iter().any(|t| leaves[t.index()]) {
                continue;
            }
            let later = node.outputs.iter().flat_map(|&t| consumers.of(t)).filter(|&&r| !is_forward(r));
            let first = later.clone().min().copied();
            let direct = first.zip(later.max().copied()).map(|(a, b)| (Moment::of(a), Moment::of(b)));
            let is_view = node.op.operator().is_view();
            let shown = node.inputs.first().and_then(|&t| graph.tensor(t).producer).filter(|_| is_view);
            let shows = shown.and_then(|made| at[made.index()]);
            let recomputable = !is_view || shows.is_some_and(|made| ops[made as usize].recomputable);
            at[op.index()] = Some(ops.len() as u32);
            ops.push(KeepOp { op, recomputable, direct, consumers: Vec::new(), is_view, shows });
        }
        for own in &mut ops {
            let readers = graph.node(own.op).outputs.iter().flat_map(|&t| consumers.of(t));
            own.consumers = readers.filter_map(|r| at[r.index()]).collect();
            own.consumers.sort_unstable();
            own.consumers.dedup();
        }
        Self { ops, at }
    }

    /// The position of an op.
    pub(crate) fn position(&self, op: OpId) -> Option<usize> {
        self.at[op.index()].map(|at| at as usize)
    }

    /// The ops that may be recomputed and are no views, ascending. A view is recomputed together with what it shows.
    pub fn recomputable(&self) -> Vec<OpId> {
        let free = |own: &&KeepOp| own.recomputable && !own.is_view;
        self.ops.iter().filter(free).map(|own| own.op).collect()
    }

    /// Only these ops may be recomputed, and views of them.
    pub fn restrict(&mut self, allowed: impl Fn(OpId) -> bool) {
        for at in 0..self.ops.len() {
            let shown = self.ops[at].shows.is_none_or(|made| self.ops[made as usize].recomputable);
            let own = &mut self.ops[at];
            own.recomputable &= if own.is_view { shown } else { allowed(own.op) };
        }
    }

    /// The ops with their views.
    pub fn with_views(&self, recomputed: &[OpId]) -> Vec<OpId> {
        let mut chosen = vec![false; self.ops.len()];
        for at in recomputed.iter().filter_map(|&op| self.position(op)) {
            chosen[at] = self.ops[at].recomputable;
        }
        for at in 0..self.ops.len() {
            if let (true, Some(made)) = (self.ops[at].is_view, self.ops[at].shows) {
                chosen[at] = chosen[made as usize];
            }
        }
        self.ops.iter().zip(chosen).filter(|(_, chosen)| *chosen).map(|(own, _)| own.op).collect()
    }

    /// The states of all ops where some are recomputed, as [`shardwright_graph::remat`] does it.
    pub(crate) fn states(&self, recomputed: &[bool]) -> Vec<KeepState> {
        let mut states = vec![KeepState::default(); self.ops.len()];
        for (at, own) in self.ops.iter().enumerate().rev() {
            let mut first = own.direct.map(|(first, _)| first);
            let mut last = own.direct.map(|(_, last)| last);
            for &reader in &own.consumers {
                let (state, reader) = (states[reader as usize], &self.ops[reader as usize]);
                let clone = state.clone_moment(reader.op);
                first = [first, clone].into_iter().flatten().min();
                last = last.max(clone);
                if reader.is_view && state.is_recomputed() == (recomputed[at] && first.is_some()) {
                    last = last.max(state.last);
                }
            }
            states[at] = KeepState { first: first.filter(|_| recomputed[at]), last };
        }
        states
    }

    /// All states of all ops, unless there are more than `most`.
    pub(crate) fn all_states(&self, most: usize) -> Option<Vec<Vec<KeepState>>> {
        let mut all: Vec<Vec<KeepState>> = vec![Vec::new(); self.ops.len()];
        let mut total = 0;
        for (at, own) in self.ops.iter().enumerate().rev() {
            let mut clones: BTreeSet<Moment> = BTreeSet::new();
            let mut ends: BTreeSet<Moment> = BTreeSet::new();
            for &reader in &own.consumers {
                let (states, reader) = (&all[reader as usize], &self.ops[reader as usize]);
                clones.extend(states.iter().filter_map(|state| state.clone_moment(reader.op)));
                ends.extend(states.iter().filter(|_| reader.is_view).filter_map(|state| state.last));
            }
            let (first, last) = (own.direct.map(|(first, _)| first), own.direct.map(|(_, last)| last));
            let early = |moment: &Moment| first.is_none_or(|first| *moment < first);
            let late = |moment: &Moment| last.is_none_or(|last| *moment > last);
            ends.extend(&clones);
            let mut lasts: Vec<Option<Moment>> = vec![last];
            lasts.extend(ends.into_iter().filter(late).map(Some));
            let mut firsts: Vec<Moment> = first.into_iter().collect();
            firsts.extend(clones.into_iter().filter(early));
            let states = &mut all[at];
            states.extend(lasts.iter().map(|&last| KeepState { first: None, last }));
            if own.recomputable {
                for &first in &firsts {
                    let reach = lasts.iter().filter(|last| last.is_some_and(|last| last >= first));
                    states.extend(reach.map(|&last| KeepState { first: Some(first), last }));
                }
            }
            total += states.len();
            if total > most {
                return None;
            }
        }
        Some(all)
    }

    /// Whether the states of an op and of one of its consumers agree.
    pub(crate) fn agree(&self, own: KeepState, reader: usize, its: KeepState) -> bool {
        let reader = &self.ops[reader];
        let clone = its.clone_moment(reader.op);
        // A reader that is stated exists.
        let stated = |moment: Option<Moment>| {
            moment.is_none_or(|moment| moment.op != reader.op || Some(moment) == clone)
        };
        let serves = clone.is_none_or(|clone| {
            own.last.is_some_and(|last| last >= clone) && own.first.is_none_or(|first| first <= clone)
        });
        let shows = !reader.is_view
            || its.last.is_none()
            || (own.is_recomputed() == its.is_recomputed() && own.last >= its.last);
        stated(own.first) && stated(own.last) && serves && shows
    }
}

/// The tensors whose lifetime depends on the states of their op.
pub(crate) fn covered(graph: &Graph, space: &KeepSpace) -> Vec<bool> {
    let mut covered = vec![false; graph.tensors.len()];
    for t in space.ops.iter().flat_map(|own| graph.node(own.op).outputs.iter()) {
        covered[TensorId::index(*t)] = true;
    }
    covered
}
