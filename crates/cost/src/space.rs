//! All arrangements of a tensor on a small mesh, with every step between them: the exact answer, row by row.
//!
//! On a mesh of a few axes there are a few thousand arrangements. Their graph does not depend on the tensor: a
//! step's price does, but steps of the same kind over the same axes at the same number of blocks cost the same, so
//! there are only a few hundred prices. One shortest-path search from a layout gives the time to every other one, a
//! row of a cost table, in well under a millisecond. Since any step may follow any other, times obey the triangle
//! inequality by construction.
//!
//! Not in here: absent axes and mixtures of sums and maxima, whose arrangements would be too many, and meshes of
//! many axes. Those are left to the goal-directed search of `relayout`.

use crate::collective::Comm;
use crate::layout::{Arrangement, Layout, MAX_DIMS, Placement, Reduction, TensorShape};
use crate::step::{Action, local_bytes, permuted};
use rustc_hash::FxHashMap;
use shardwright_machine::{AxisId, AxisSet, Bytes, Mesh, Seconds};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

/// Larger meshes have too many arrangements to be worth it.
pub(crate) const MAX_ARRANGEMENTS: usize = 6000;

/// Index of a node.
type NodeId = u32;

/// A way to pay for a step: the same for all edges that share it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Price {
    action: Action,
    axes: AxisSet,
    /// Message = tensor bytes / parts.
    parts: u64,
}

struct Edge {
    to: NodeId,
    price: u32,
}

/// The graph of arrangements of tensors of one rank, with or without partial sums.
pub(crate) struct Space {
    nodes: Vec<Arrangement>,
    /// Blocks per dimension of every node: whether a shape allows it.
    grids: Vec<[u32; MAX_DIMS]>,
    /// First edge of every node, and one more.
    starts: Vec<u32>,
    edges: Vec<Edge>,
    prices: Vec<Price>,
    /// The node of each canonical layout, by its code.
    canonical: Vec<NodeId>,
    choices: usize,
}

/// The times from one layout to all others.
pub(crate) struct Row {
    /// By layout code; infinite where the shape does not allow the layout.
    seconds: Vec<f64>,
}

impl Row {
    /// Knows nothing: every question goes to the other search.
    pub(crate) fn empty() -> Row {
        Row { seconds: Vec::new() }
    }
}

impl std::fmt::Debug for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Row({})", self.seconds.len())
    }
}

/// What a search leaves behind.
struct Tree {
    seconds: Vec<f64>,
    /// The edge that a node is best reached by.
    reached: Vec<Option<(NodeId, u32)>>,
}

impl std::fmt::Debug for Space {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Space({} arrangements, {} steps)", self.nodes.len(), self.edges.len())
    }
}

/// The reduction that stands for all: sums and maxima are never mixed in here and cost the same.
const PARTIAL: Placement = Placement::Partial(Reduction::Sum);

/// Every way to add axes to the minor ends of some dimensions, in every order.
fn insertions(at: &Arrangement, axes: AxisSet, dims: Range<u8>) -> Vec<Arrangement> {
    let fixed: [usize; MAX_DIMS] = std::array::from_fn(|dim| at.list(dim as u8).len());
    let mut all = vec![*at];
    for axis in axes.iter() {
        let mut more = Vec::new();
        for base in &all {
            for dim in dims.clone() {
                let list: Vec<AxisId> = base.axes_of(dim);
                for position in fixed[usize::from(dim)]..=list.len() {
                    let mut order = list.clone();
                    order.insert(position, axis);
                    let mut next = *base;
                    next.append(dim, std::iter::once(axis));
                    next.reorder(&order.into_iter().collect());
                    more.push(next);
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

impl Space {
    /// Builds the graph, or `None` if it would be too large.
    pub(crate) fn new(mesh: &Mesh, rank: u8, partial: bool) -> Option<Space> {
        let mut nodes = vec![Arrangement::canonical(&Layout::replicated(mesh.len()))];
        for axis in mesh.all().iter() {
            let mut more = Vec::new();
            for base in &nodes {
                more.push(*base);
                if partial {
                    let mut next = *base;
                    next.set(axis, PARTIAL);
                    more.push(next);
                }
                // Into every place of every dimension, also before what is there.
                for dim in 0..rank {
                    let list = base.axes_of(dim);
                    for position in 0..=list.len() {
                        let mut order = list.clone();
                        order.insert(position, axis);
                        let mut next = *base;
                        next.append(dim, std::iter::once(axis));
                        next.reorder(&order.into_iter().collect());
                        more.push(next);
                    }
                }
            }
            if more.len() > MAX_ARRANGEMENTS {
                return None;
            }
            nodes = more;
        }
        let index: FxHashMap<Arrangement, NodeId> =
            nodes.iter().zip(0..).map(|(&node, id)| (node, id)).collect();
        let grids: Vec<[u32; MAX_DIMS]> =
            nodes.iter().map(|node| std::array::from_fn(|dim| node.parts(mesh, dim as u8) as u32)).collect();
        let choices = usize::from(rank) + 2;
        // Rows have an entry per code: a scalar on a mesh of very many axes has few arrangements but many codes.
        let codes = choices.checked_pow(mesh.len() as u32).filter(|&codes| codes <= 2 * MAX_ARRANGEMENTS)?;
        let mut space = Space {
            grids,
            starts: vec![0],
            edges: Vec::new(),
            prices: Vec::new(),
            canonical: vec![NodeId::MAX; codes],
            choices,
            nodes,
        };
        // Arrangements that differ only in who owns which block.
        let mut owners: FxHashMap<([u32; MAX_DIMS], AxisSet), Vec<NodeId>> = FxHashMap::default();
        let partial_axes = |node: &Arrangement| node.layout().axes_where(|p| p == PARTIAL);
        for id in 0..space.nodes.len() {
            let key = (space.grids[id], partial_axes(&space.nodes[id]));
            owners.entry(key).or_default().push(id as NodeId);
        }
        let mut price_ids: FxHashMap<Price, u32> = FxHashMap::default();
        for id in 0..space.nodes.len() {
            let node = space.nodes[id];
            if node == Arrangement::canonical(node.layout())
                && let Some(code) = space.code(node.layout())
            {
                space.canonical[code] = id as NodeId;
            }
            let mut connect = |action: Action, axes: AxisSet, after: &Arrangement| {
                let side = if action == Action::AllGather { after } else { &node };
                // With one byte per device, the tensor has as many bytes as there are blocks.
                let parts = blocks(mesh, side);
                let price = Price { action, axes, parts };
                let next = space.prices.len() as u32;
                let price = *price_ids.entry(price).or_insert_with(|| {
                    space.prices.push(price);
                    next
                });
                if let Some(&to) = index.get(after) {
                    space.edges.push(Edge { to, price });
                }
            };
            steps(&node, rank, &mut connect);
            if let Some(others) = owners.get(&(space.grids[id], partial_axes(&node))) {
                for &other in others.iter().filter(|&&other| other as usize != id) {
                    let after = space.nodes[other as usize];
                    connect(Action::Permute, permuted(&node, &after), &after);
                }
            }
            space.starts.push(space.edges.len() as u32);
        }
        Some(space)
    }

    /// A layout as a number, if this space has it.
    fn code(&self, layout: &Layout) -> Option<usize> {
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

    fn node(&self, layout: &Layout) -> Option<NodeId> {
        self.code(layout).map(|code| self.canonical[code]).filter(|&node| node != NodeId::MAX)
    }

    fn allows(&self, shape: &TensorShape, node: NodeId) -> bool {
        let grid = &self.grids[node as usize];
        (0..shape.rank()).all(|dim| shape.dim(dim).is_multiple_of(u64::from(grid[usize::from(dim)])))
    }

    /// Shortest paths from one node to all, or until the goal is reached.
    fn search(&self, comm: &Comm, shape: &TensorShape, start: NodeId, goal: Option<NodeId>) -> Tree {
        let prices: Vec<(f64, u32)> = self
            .prices
            .iter()
            .map(|price| match price.action.collective() {
                None => (0.0, 0),
                Some(kind) => {
                    let bytes = Bytes(shape.bytes() / price.parts);
                    (comm.seconds(kind, price.axes, bytes).0, 1)
                }
            })
            .collect();
        let mut seconds = vec![f64::INFINITY; self.nodes.len()];
        let mut sends = vec![u32::MAX; self.nodes.len()];
        let mut reached = vec![None; self.nodes.len()];
        let mut done = vec![false; self.nodes.len()];
        let mut queue = BinaryHeap::new();
        (seconds[start as usize], sends[start as usize]) = (0.0, 0);
        queue.push(Reverse((0u64, 0u32, start)));
        while let Some(Reverse((_, _, id))) = queue.pop() {
            let at = id as usize;
            if std::mem::replace(&mut done[at], true) {
                continue;
            }
            if goal == Some(id) {
                break;
            }
            for edge in self.starts[at]..self.starts[at + 1] {
                let Edge { to, price } = self.edges[edge as usize];
                let (took, sent) = prices[price as usize];
                let reach = (seconds[at] + took, sends[at] + sent);
                let next = to as usize;
                // Of equally fast ways the one with fewer messages.
                if reach < (seconds[next], sends[next]) && self.allows(shape, to) {
                    (seconds[next], sends[next]) = reach;
                    reached[next] = Some((id, edge));
                    queue.push(Reverse((reach.0.to_bits(), reach.1, to)));
                }
            }
        }
        Tree { seconds, reached }
    }

    /// The times from one layout to all others; `None` if the layout is not in this space.
    pub(crate) fn row(&self, comm: &Comm, shape: &TensorShape, from: &Layout) -> Option<Row> {
        let tree = self.search(comm, shape, self.node(from)?, None);
        let at = |&node: &NodeId| tree.seconds.get(node as usize).copied().unwrap_or(f64::INFINITY);
        Some(Row { seconds: self.canonical.iter().map(at).collect() })
    }

    /// The time from a row's layout to another; `None` if this space does not have it.
    pub(crate) fn lookup(&self, row: &Row, to: &Layout) -> Option<Seconds> {
        row.seconds
            .get(self.code(to)?)
            .map(|&seconds| Seconds(seconds))
            .filter(|seconds| seconds.0.is_finite())
    }

    /// The steps from one layout to another; `None` if this space does not have a way.
    pub(crate) fn path(
        &self,
        comm: &Comm,
        shape: &TensorShape,
        from: &Layout,
        to: &Layout,
    ) -> Option<Vec<(Action, AxisSet, Arrangement)>> {
        let goal = self.node(to)?;
        let tree = self.search(comm, shape, self.node(from)?, Some(goal));
        if tree.seconds[goal as usize].is_infinite() {
            return None;
        }
        let mut steps = Vec::new();
        let mut at = goal;
        while let Some((before, edge)) = tree.reached[at as usize] {
            let price = &self.prices[self.edges[edge as usize].price as usize];
            steps.push((price.action, price.axes, self.nodes[at as usize]));
            at = before;
        }
        steps.reverse();
        Some(steps)
    }
}

/// Number of blocks that a tensor is cut into.
fn blocks(mesh: &Mesh, at: &Arrangement) -> u64 {
    const WHOLE: u64 = 1 << 40;
    // Exact: the number of blocks divides the number of devices, which need not be a power of two.
    let devices = u64::from(mesh.devices());
    WHOLE * devices / local_bytes(mesh, WHOLE * devices, at)
}

/// Every step but permutations. Slices go one axis at a time, since several are as free as one.
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
    // Minor ends of several dimensions may be gathered at once.
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
            // Moved to another dimension in every order.
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
