//! The goal-directed search for reshard paths, over few candidate steps chosen by the target.
//!
//! It is used where `arrangement_graph` cannot list all arrangements. On small meshes it is Dijkstra's algorithm, exact
//! over the steps that `candidate_steps` proposes. On large meshes an inadmissible estimate of the remaining time guides
//! it, so its path is good but not proved optimal.

use crate::candidate_steps::{CandidateStep, ReshardGoal};
use crate::collective::Collective;
use crate::layout::{Arrangement, Placement, Reduction};
use crate::reshard_step::{Action, ReshardStep, local_bytes};
use rustc_hash::FxHashMap;
use shardwright_machine::{AxisId, AxisSet, Bytes, Seconds};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Arrangements visited before the search returns the fallback path: a limit for hostile meshes.
const MAX_VISITED: usize = 20_000;
/// Up to this number of axes the search is unguided, and so exact over its candidate steps.
pub(crate) const UNGUIDED_AXES: usize = 4;

/// An arrangement that the search has reached.
struct Node {
    at: Arrangement,
    seconds: f64,
    /// Steps that send data. Of equally fast paths the one with fewer is taken.
    sends: u32,
    done: bool,
    /// The predecessor and the step from it.
    from: Option<(u32, ReshardStep)>,
}

struct DirectedSearch<'a> {
    goal: &'a ReshardGoal<'a>,
    nodes: Vec<Node>,
    index: FxHashMap<Arrangement, u32>,
    queue: BinaryHeap<Reverse<(u64, u32, u32)>>,
    /// Time of the fallback path; slower paths are pruned.
    limit: f64,
    /// Whether the queue adds the estimate of the remaining time.
    guided: bool,
}

/// Orders non-negative times as integers.
fn order(seconds: f64) -> u64 {
    seconds.to_bits()
}

/// The best path found from an arrangement to the goal, and `false` if the search was cut off and it is the fallback.
pub(crate) fn search(goal: &ReshardGoal<'_>, start: Arrangement) -> (Vec<ReshardStep>, bool) {
    if start == goal.target {
        return (Vec::new(), true);
    }
    let fallback = gather_then_slice(goal, start);
    let limit = fallback.iter().map(|step| step.seconds.0).sum::<f64>();
    let guided = goal.comm.mesh().len() > UNGUIDED_AXES;
    let mut search = DirectedSearch {
        goal,
        nodes: Vec::new(),
        index: FxHashMap::default(),
        queue: BinaryHeap::new(),
        limit,
        guided,
    };
    search.reach(start, 0.0, 0, None);
    while let Some(Reverse((_, _, id))) = search.queue.pop() {
        let node = &mut search.nodes[id as usize];
        if std::mem::replace(&mut node.done, true) {
            continue;
        }
        if node.at == goal.target {
            return (search.path(id), true);
        }
        if search.nodes.len() > MAX_VISITED {
            return (fallback, false);
        }
        search.expand(id);
    }
    (fallback, true)
}

impl DirectedSearch<'_> {
    /// An estimate of the remaining time: the sum over axes of the collective that each needs by itself, at the present
    /// size.
    fn remaining(&self, at: &Arrangement) -> f64 {
        let mesh = self.goal.comm.mesh();
        let layout = at.layout();
        let local = local_bytes(mesh, self.goal.shape.bytes(), at);
        let mut seconds = 0.0;
        for axis in mesh.all().iter() {
            use Placement::{Absent, Partial, Replicated, Shard};
            let whole = local.saturating_mul(u64::from(mesh.axis(axis).size));
            let (kind, bytes) = match (layout.get(axis), self.goal.target.layout().get(axis)) {
                (is, wanted) if is == wanted => continue,
                (Replicated, _) | (_, Partial(_)) => continue,
                (Shard(_), Replicated) => (Collective::AllGather, whole),
                (Shard(_), Shard(_)) => (Collective::AllToAll, local),
                (Shard(_), Absent(_)) => (Collective::Gather, whole),
                (Partial(_), Replicated) => (Collective::AllReduce, local),
                (Partial(_), Shard(_)) => (Collective::ReduceScatter, local),
                (Partial(_), Absent(_)) => (Collective::Reduce, local),
                (Absent(_), Replicated) => (Collective::Broadcast, local),
                (Absent(_), Shard(_)) => (Collective::Scatter, local),
                (Absent(_), Absent(_)) => (Collective::Send, local),
            };
            seconds += self.goal.comm.seconds(kind, AxisSet::of(axis), Bytes(bytes)).0;
        }
        seconds
    }

    fn expand(&mut self, id: u32) {
        let Node { at, seconds, sends, .. } = self.nodes[id as usize];
        let goal = self.goal;
        let absent = at.layout().absent();
        goal.candidates(&at, sends == 0, &mut |CandidateStep { action, axes, message, after }| {
            let step_seconds = match action.collective() {
                None => 0.0,
                Some(kind) => goal.comm.choose(kind, axes, absent, Bytes(message)).1.0,
            };
            let sends = sends + u32::from(action.collective().is_some());
            if seconds + step_seconds <= self.limit {
                let step = ReshardStep {
                    action,
                    axes,
                    message: Bytes(message),
                    seconds: Seconds(step_seconds),
                    after,
                };
                self.reach(after, seconds + step_seconds, sends, Some((id, step)));
            }
        });
    }

    fn reach(&mut self, at: Arrangement, seconds: f64, sends: u32, from: Option<(u32, ReshardStep)>) {
        let next = self.nodes.len() as u32;
        let id = *self.index.entry(at).or_insert(next);
        if id == next {
            self.nodes.push(Node { at, seconds, sends, done: false, from });
        } else {
            let node = &mut self.nodes[id as usize];
            if node.done || (seconds, sends) >= (node.seconds, node.sends) {
                return;
            }
            (node.seconds, node.sends, node.from) = (seconds, sends, from);
        }
        let ahead = if self.guided { self.remaining(&at) } else { 0.0 };
        self.queue.push(Reverse((order(seconds + ahead), sends, id)));
    }

    fn path(&self, mut id: u32) -> Vec<ReshardStep> {
        let mut steps = Vec::new();
        while let Some((from, step)) = &self.nodes[id as usize].from {
            steps.push(*step);
            id = *from;
        }
        steps.reverse();
        steps
    }
}

/// A path that always works: reduce, send, broadcast and gather until the tensor is whole, then slice it.
fn gather_then_slice(goal: &ReshardGoal<'_>, start: Arrangement) -> Vec<ReshardStep> {
    let mesh = goal.comm.mesh();
    let target = goal.target.layout();
    let mut steps: Vec<ReshardStep> = Vec::new();
    let mut at = start;
    let mut push = |at: &mut Arrangement, action: Action, axes, after: Arrangement| {
        let side = if matches!(action, Action::AllGather) { &after } else { &*at };
        let message = Bytes(local_bytes(mesh, goal.shape.bytes(), side));
        let seconds = match action.collective() {
            None => Seconds::ZERO,
            Some(kind) => goal.comm.choose(kind, axes, at.layout().absent(), message).1,
        };
        steps.push(ReshardStep { action, axes, message, seconds, after });
        *at = after;
    };
    let replicate = |at: &Arrangement, axes: AxisSet| {
        let mut after = *at;
        axes.iter().for_each(|axis| after.set(axis, Placement::Replicated));
        after
    };
    for kind in Reduction::ALL {
        let axes = at.layout().axes_where(|p| p == Placement::Partial(kind)).iter();
        let axes: AxisSet = axes.filter(|&axis| target.get(axis) != Placement::Partial(kind)).collect();
        if !axes.is_empty() {
            let after = replicate(&at, axes);
            push(&mut at, Action::AllReduce, axes, after);
        }
    }
    let elsewhere = |axis: &AxisId| matches!((at.layout().get(*axis), target.get(*axis)), (Placement::Absent(is), Placement::Absent(to)) if is != to);
    let sent: AxisSet = mesh.all().iter().filter(elsewhere).collect();
    if !sent.is_empty() {
        let mut after = at;
        sent.iter().for_each(|axis| after.set(axis, target.get(axis)));
        push(&mut at, Action::Send, sent, after);
    }
    let there = |axis: &AxisId| at.layout().get(*axis) == target.get(*axis);
    let axes: AxisSet = at.layout().absent().iter().filter(|axis| !there(axis)).collect();
    if !axes.is_empty() {
        let after = replicate(&at, axes);
        push(&mut at, Action::Broadcast, axes, after);
    }
    for dim in 0..goal.shape.rank() {
        let axes = at.layout().shards(dim);
        if !axes.is_empty() {
            let after = replicate(&at, axes);
            push(&mut at, Action::AllGather, axes, after);
        }
    }
    for dim in 0..goal.shape.rank() {
        let axes = target.shards(dim);
        if !axes.is_empty() {
            let mut after = at;
            after.append(dim, axes.iter());
            push(&mut at, Action::Slice, axes, after);
        }
    }
    let axes = target.absent().minus(at.layout().absent());
    if !axes.is_empty() {
        let mut after = at;
        axes.iter().for_each(|axis| after.set(axis, target.get(axis)));
        push(&mut at, Action::Drop, axes, after);
    }
    steps
}
