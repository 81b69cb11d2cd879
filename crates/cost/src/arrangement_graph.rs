//! The graph of all arrangements of a tensor on a small mesh and of all steps between them.
//!
//! A mesh of a few axes has at most a few thousand arrangements. Their graph depends on the tensor only by the divisors
//! of its dimensions. A step's price also depends on the tensor's bytes, but steps of the same kind over the same axes
//! at the same number of blocks cost the same, so there are only a few hundred prices. Shortest paths from a layout
//! give the time to every other layout: a row of a cost table. `time_rows` computes several rows at a time. Since any step
//! may follow any other, times obey the triangle inequality by construction.
//!
//! The graph excludes absent axes and mixtures of sums and maxima, which have too many arrangements, and meshes of many
//! axes. The goal-directed search of `directed_search` handles those.

use crate::canonical_dims::DivisorClass;
use crate::collective::Comm;
use crate::layout::{Arrangement, AxisList, Layout, MAX_DIMS, Placement, Reduction};
use crate::reshard_step::{Action, lists, local_bytes, permuted_between};
use crate::step_lists::{NodeId, Step, StepLists};
use rustc_hash::FxHashMap;
use shardwright_machine::{AxisId, AxisSet, Bytes, Mesh};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

/// Graphs with more arrangements are not built: they would cost more than they save.
pub(crate) const MAX_ARRANGEMENTS: usize = 10_000;

/// What a step's price depends on, besides the tensor's bytes. Many edges share one key.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct PriceKey {
    action: Action,
    axes: AxisSet,
    /// Message = tensor bytes / parts.
    parts: u64,
}

/// The graph of arrangements of all tensors of one divisor class.
pub(crate) struct ArrangementGraph {
    /// Most partial axes first, then fewest shards: the direction of free steps.
    nodes: Vec<Arrangement>,
    /// The partial axes of every node.
    pub(crate) sums: Vec<AxisSet>,
    pub(crate) steps: StepLists,
    prices: Vec<PriceKey>,
    /// The node of each canonical layout, by its code.
    pub(crate) canonical: Vec<NodeId>,
    choices: usize,
    /// Whether arrangements with partial axes are included. They are left out where they would be too many.
    pub(crate) partial: bool,
}

impl std::fmt::Debug for ArrangementGraph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ArrangementGraph({} arrangements, {} steps)", self.nodes.len(), self.steps.len())
    }
}

/// The reduction that stands for all: sums and maxima cost the same, and no graph mixes them.
const PARTIAL: Placement = Placement::Partial(Reduction::Sum);

/// The arrangement with one more axis on a dimension, at this position among its axes.
fn inserted(at: &Arrangement, dim: u8, axis: AxisId, position: usize) -> Arrangement {
    let mut order: Vec<AxisId> = at.axes_of(dim);
    order.insert(position, axis);
    let mut next = *at;
    next.append(dim, std::iter::once(axis));
    next.reorder(&order.into_iter().collect());
    next
}

/// All arrangements with the axes added to the minor ends of the dimensions, in every order.
fn insertions(at: &Arrangement, axes: AxisSet, dims: Range<u8>) -> Vec<Arrangement> {
    let fixed: [usize; MAX_DIMS] = std::array::from_fn(|dim| at.list(dim as u8).len());
    let mut all = vec![*at];
    for axis in axes.iter() {
        let mut more = Vec::new();
        for base in &all {
            for dim in dims.clone() {
                for position in fixed[usize::from(dim)]..=base.list(dim).len() {
                    more.push(inserted(base, dim, axis, position));
                }
            }
        }
        all = more;
    }
    all
}

fn subsets(of: AxisSet) -> impl Iterator<Item = AxisSet> {
    let axes: Vec<AxisId> = of.iter().collect();
    (1u32..1 << axes.len()).map(move |bits| {
        axes.iter().enumerate().filter(|(at, _)| bits >> at & 1 == 1).map(|(_, &axis)| axis).collect()
    })
}

/// All arrangements of a divisor class; `None` if there are too many.
fn arrangements(mesh: &Mesh, class: &DivisorClass, partial: bool) -> Option<Vec<Arrangement>> {
    let mut nodes = vec![Arrangement::canonical(&Layout::replicated(mesh.len()))];
    for axis in mesh.all().iter() {
        let mut more = Vec::new();
        let size = u64::from(mesh.axis(axis).size);
        for base in &nodes {
            more.push(*base);
            if partial {
                let mut next = *base;
                next.set(axis, PARTIAL);
                more.push(next);
            }
            for dim in 0..class.rank() {
                let parts = base.parts(mesh, dim) * size;
                if !u64::from(class.0[usize::from(dim)]).is_multiple_of(parts) {
                    continue;
                }
                // At every position of the dimension, also before its present axes.
                for position in 0..=base.list(dim).len() {
                    more.push(inserted(base, dim, axis, position));
                }
            }
        }
        if more.len() > MAX_ARRANGEMENTS {
            return None;
        }
        nodes = more;
    }
    let count = |node: &Arrangement, holds: fn(Placement) -> bool| node.layout().axes_where(holds).len();
    nodes.sort_by_key(|node| {
        (Reverse(count(node, |p| p == PARTIAL)), count(node, |p| matches!(p, Placement::Shard(_))))
    });
    Some(nodes)
}

impl ArrangementGraph {
    /// Builds the graph; `None` if it would be too large.
    pub(crate) fn new(mesh: &Mesh, class: &DivisorClass) -> Option<ArrangementGraph> {
        let choices = usize::from(class.rank()) + 2;
        // Rows have one entry per code. A scalar on a mesh of very many axes has few arrangements but many codes.
        let codes = choices.checked_pow(mesh.len() as u32).filter(|&codes| codes <= 2 * MAX_ARRANGEMENTS)?;
        let with_sums = arrangements(mesh, class, true);
        let partial = with_sums.is_some();
        let nodes = with_sums.or_else(|| arrangements(mesh, class, false))?;
        let index: FxHashMap<Arrangement, NodeId> =
            nodes.iter().zip(0..).map(|(&node, id)| (node, id)).collect();
        let sums: Vec<AxisSet> =
            nodes.iter().map(|node| node.layout().axes_where(|p| p == PARTIAL)).collect();
        // Arrangements that differ only in the owners of blocks.
        let grid = |node: &Arrangement| -> [u32; MAX_DIMS] {
            std::array::from_fn(|dim| node.parts(mesh, dim as u8) as u32)
        };
        let mut grids: FxHashMap<([u32; MAX_DIMS], AxisSet), usize> = FxHashMap::default();
        let mut owners: Vec<Vec<NodeId>> = Vec::new();
        let mut owner_of = Vec::with_capacity(nodes.len());
        for (id, node) in nodes.iter().enumerate() {
            let group = *grids.entry((grid(node), sums[id])).or_insert(owners.len());
            owners.resize(owners.len().max(group + 1), Vec::new());
            owners[group].push(id as NodeId);
            owner_of.push(group);
        }
        let lists: Vec<[AxisList; MAX_DIMS]> = nodes.iter().map(lists).collect();
        let block_counts: Vec<u64> = nodes.iter().map(|node| blocks(mesh, node)).collect();
        let mut prices: Vec<PriceKey> = Vec::new();
        let mut price_ids: FxHashMap<PriceKey, u32> = FxHashMap::default();
        let mut leads: Vec<(NodeId, Step)> = Vec::new();
        for (id, node) in nodes.iter().enumerate() {
            let from = id as NodeId;
            let mut connect = |action: Action, axes: AxisSet, to: NodeId| {
                let parts = block_counts[if action == Action::AllGather { to as usize } else { id }];
                let price = PriceKey { action, axes, parts };
                let next = prices.len() as u32;
                let price = *price_ids.entry(price).or_insert_with(|| {
                    prices.push(price);
                    next
                });
                leads.push((to, Step { from, price }));
            };
            steps(node, class.rank(), &mut |action, axes, after| {
                if let Some(&to) = index.get(after) {
                    connect(action, axes, to);
                }
            });
            for &other in owners[owner_of[id]].iter().filter(|&&other| other != from) {
                connect(Action::Permute, permuted_between(&lists[id], &lists[other as usize]), other);
            }
        }
        let steps = StepLists::new(nodes.len(), &leads);
        let canonical = vec![NodeId::MAX; codes];
        let mut graph = ArrangementGraph { sums, steps, prices, canonical, choices, partial, nodes };
        for id in 0..graph.nodes.len() {
            let layout = graph.nodes[id].layout();
            if graph.nodes[id] == Arrangement::canonical(layout)
                && let Some(code) = graph.code(layout)
            {
                graph.canonical[code] = id as NodeId;
            }
        }
        Some(graph)
    }

    /// The code of a layout, if this graph has it.
    pub(crate) fn code(&self, layout: &Layout) -> Option<usize> {
        (0..layout.len() as u32).try_fold(0, |code, axis| {
            let placement = match layout.get(AxisId(axis)) {
                Placement::Replicated => 0,
                Placement::Partial(_) => 1,
                Placement::Shard(dim) => 2 + usize::from(dim),
                Placement::Absent(_) => return None,
            };
            (placement < self.choices).then_some(code * self.choices + placement)
        })
    }

    pub(crate) fn node(&self, layout: &Layout) -> Option<NodeId> {
        self.code(layout).map(|code| self.canonical[code]).filter(|&node| node != NodeId::MAX)
    }

    /// Number of arrangements.
    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// The seconds of every price key for a tensor of `bytes` bytes.
    pub(crate) fn prices(&self, comm: &Comm, bytes: u64) -> Vec<f64> {
        let cost = |price: &PriceKey| match price.action.collective() {
            None => 0.0,
            Some(kind) => comm.seconds(kind, price.axes, Bytes(bytes / price.parts)).0,
        };
        self.prices.iter().map(cost).collect()
    }

    /// The steps from one layout to another; `None` if this graph has no path.
    pub(crate) fn path(
        &self,
        comm: &Comm,
        bytes: u64,
        from: &Layout,
        to: &Layout,
    ) -> Option<Vec<(Action, AxisSet, Arrangement)>> {
        let (start, goal) = (self.node(from)?, self.node(to)?);
        let prices = self.prices(comm, bytes);
        // Backwards from the goal, since steps are sorted by target.
        let mut best = vec![(f64::INFINITY, u32::MAX); self.nodes.len()];
        let mut successors: Vec<Option<(NodeId, u32)>> = vec![None; self.nodes.len()];
        let mut done = vec![false; self.nodes.len()];
        let mut queue = BinaryHeap::new();
        best[goal as usize] = (0.0, 0);
        queue.push(Reverse((0u64, 0u32, goal)));
        while let Some(Reverse((_, _, id))) = queue.pop() {
            if id == start {
                break;
            }
            if std::mem::replace(&mut done[id as usize], true) {
                continue;
            }
            let (seconds, sends) = best[id as usize];
            for edge in self.steps.leading_to(id as usize) {
                let sent = self.prices[edge.price as usize].action.collective().is_some();
                let reach = (seconds + prices[edge.price as usize], sends + u32::from(sent));
                // Of equally fast paths the one with fewer messages.
                if reach < best[edge.from as usize] {
                    best[edge.from as usize] = reach;
                    successors[edge.from as usize] = Some((id, edge.price));
                    queue.push(Reverse((reach.0.to_bits(), reach.1, edge.from)));
                }
            }
        }
        let mut steps = Vec::new();
        let mut at = start;
        while at != goal {
            let (next, price) = successors[at as usize]?;
            let price = &self.prices[price as usize];
            steps.push((price.action, price.axes, self.nodes[next as usize]));
            at = next;
        }
        Some(steps)
    }
}

/// Number of blocks of a tensor.
fn blocks(mesh: &Mesh, at: &Arrangement) -> u64 {
    const WHOLE: u64 = 1 << 40;
    // Exact: the number of blocks divides the number of devices, which need not be a power of two.
    let devices = u64::from(mesh.devices());
    WHOLE * devices / local_bytes(mesh, WHOLE * devices, at)
}

/// All steps except permutations. Slices take one axis at a time, since a sequence of slices is free too.
fn steps(at: &Arrangement, rank: u8, connect: &mut dyn FnMut(Action, AxisSet, &Arrangement)) {
    let layout = at.layout();
    for axis in layout.axes_where(|p| p == Placement::Replicated).iter() {
        for dim in 0..rank {
            let mut after = *at;
            after.append(dim, std::iter::once(axis));
            connect(Action::Slice, AxisSet::of(axis), &after);
        }
    }
    for axes in subsets(layout.axes_where(|p| p == PARTIAL)) {
        let mut after = *at;
        axes.iter().for_each(|axis| after.set(axis, Placement::Replicated));
        connect(Action::AllReduce, axes, &after);
        for after in insertions(at, axes, 0..rank) {
            connect(Action::ReduceScatter, axes, &after);
        }
    }
    // The minor ends of several dimensions may be gathered at once.
    let mut gathered = vec![AxisSet::EMPTY];
    for dim in 0..rank {
        let list = at.axes_of(dim);
        let mut suffix = AxisSet::EMPTY;
        let so_far = gathered.len();
        for &axis in list.iter().rev() {
            suffix = suffix.with(axis);
            for set in 0..so_far {
                gathered.push(gathered[set].union(suffix));
            }
            // To another dimension, in every order.
            let mut without = *at;
            suffix.iter().for_each(|axis| without.set(axis, Placement::Replicated));
            for other in (0..rank).filter(|&other| other != dim) {
                for after in insertions(&without, suffix, other..other + 1) {
                    connect(Action::AllToAll, suffix, &after);
                }
            }
        }
    }
    for &axes in &gathered[1..] {
        let mut after = *at;
        axes.iter().for_each(|axis| after.set(axis, Placement::Replicated));
        connect(Action::AllGather, axes, &after);
    }
}
