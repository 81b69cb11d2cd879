//! Steps between the nodes of a graph of layouts, and shortest paths over them from several sources at once.
//!
//! Dijkstra's algorithm visits every node once, but for one source at a time and with scattered memory access. [`StepLists::settle`]
//! instead sweeps over all nodes in a good order, forwards and backwards, until nothing changes, which takes about four sweeps.
//! Later sweeps visit only nodes that the last change can still improve. Each sweep handles eight sources in vector registers,
//! which is several times faster than a queue. A source's times do not depend on the other sources of its batch.
//!
//! The sweep is compiled for several vector widths and chosen at run time. All widths give the same numbers, since a
//! minimum of sums does not depend on the order of its terms.

use shardwright_simd::vectorised_fn;

/// Index of a node.
pub(crate) type NodeId = u32;

/// Sources per sweep.
pub(crate) const SIMD_WIDTH: usize = 8;
/// The times from every source of a sweep.
pub(crate) type SimdVector = [f64; SIMD_WIDTH];

/// A step into a node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub from: NodeId,
    /// Index of the step's price.
    pub price: u32,
}

/// All steps of a graph, by the nodes that they lead to and from.
pub(crate) struct StepLists {
    /// The first step into every node, and the end.
    starts: Vec<u32>,
    steps: Vec<Step>,
    /// The first of `successors` of every node, and the end.
    successor_starts: Vec<u32>,
    successors: Vec<NodeId>,
}

vectorised_fn! {
    /// [`StepLists::settle_body`], compiled for the widest vectors of the processor.
    fn settle[][](lists: &StepLists, prices: &[f64], nodes: &[usize], seconds: &mut [SimdVector]) {
        lists.settle_body(prices, nodes, seconds);
    }
}

impl StepLists {
    /// The lists of steps, each with the node that it leads to.
    pub(crate) fn new(nodes: usize, leads: &[(NodeId, Step)]) -> Self {
        let none = Step { from: 0, price: 0 };
        let (starts, mut steps) = grouped(nodes, leads.iter().copied(), none);
        for ends in starts.windows(2) {
            let own = &mut steps[ends[0] as usize..ends[1] as usize];
            own.sort_unstable_by_key(|step| (step.price, step.from));
        }
        let (successor_starts, successors) =
            grouped(nodes, leads.iter().map(|&(to, step)| (step.from, to)), 0);
        Self { starts, steps, successor_starts, successors }
    }

    /// Number of steps.
    pub(crate) fn len(&self) -> usize {
        self.steps.len()
    }

    /// The steps into a node, sorted by price.
    pub(crate) fn leading_to(&self, node: usize) -> &[Step] {
        &self.steps[self.starts[node] as usize..self.starts[node + 1] as usize]
    }

    /// Sweeps over some nodes, in their order and back, until each of them has its least time.
    pub(crate) fn settle(&self, prices: &[f64], nodes: &[usize], seconds: &mut [SimdVector]) {
        settle(self, prices, nodes, seconds);
    }

    #[inline(always)]
    fn settle_body(&self, prices: &[f64], nodes: &[usize], seconds: &mut [SimdVector]) {
        // Nodes with a predecessor that improved since their last visit.
        let mut due = vec![false; seconds.len()];
        nodes.iter().for_each(|&node| due[node] = true);
        loop {
            let forwards = self.sweep(prices, nodes.iter().copied(), &mut due, seconds);
            if !forwards || !self.sweep(prices, nodes.iter().rev().copied(), &mut due, seconds) {
                return;
            }
        }
    }

    /// Relaxes the steps into every node that is due. Returns whether any node improved.
    #[inline(always)]
    fn sweep(
        &self,
        prices: &[f64],
        nodes: impl Iterator<Item = usize>,
        due: &mut [bool],
        seconds: &mut [SimdVector],
    ) -> bool {
        let mut changed = false;
        for node in nodes {
            if !std::mem::replace(&mut due[node], false) {
                continue;
            }
            let mut best = seconds[node];
            for step in self.leading_to(node) {
                let price = prices[step.price as usize];
                let before = &seconds[step.from as usize];
                for lane in 0..SIMD_WIDTH {
                    let reached = before[lane] + price;
                    best[lane] = if reached < best[lane] { reached } else { best[lane] };
                }
            }
            if best != seconds[node] {
                seconds[node] = best;
                changed = true;
                let (start, end) = (self.successor_starts[node], self.successor_starts[node + 1]);
                let next = &self.successors[start as usize..end as usize];
                next.iter().for_each(|&next| due[next as usize] = true);
            }
        }
        changed
    }
}

/// Values grouped by a key below `count`: the position of the first of every key and the end, and the values.
fn grouped<T: Copy>(
    count: usize,
    all: impl ExactSizeIterator<Item = (u32, T)> + Clone,
    none: T,
) -> (Vec<u32>, Vec<T>) {
    let mut starts = vec![0u32; count + 1];
    all.clone().for_each(|(key, _)| starts[key as usize + 1] += 1);
    (0..count).for_each(|at| starts[at + 1] += starts[at]);
    let mut next = starts.clone();
    let mut values = vec![none; all.len()];
    for (key, value) in all {
        values[next[key as usize] as usize] = value;
        next[key as usize] += 1;
    }
    (starts, values)
}
