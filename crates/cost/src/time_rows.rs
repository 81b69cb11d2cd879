//! Shortest paths over an arrangement graph from several layouts at once.
//!
//! Dijkstra's algorithm visits every arrangement once, but for one source at a time and with scattered memory access.
//! This module instead sweeps over all arrangements in a good order, forwards and backwards, until nothing changes,
//! which takes about four sweeps. Later sweeps visit only arrangements that the last change can still improve. Each sweep
//! handles eight sources in vector registers, which is several times faster than a queue. A source's times do not depend on
//! the other sources of its batch.
//!
//! The sweep is compiled for several vector widths and chosen at run time. All widths give the same numbers, since a
//! minimum of sums does not depend on the order of its terms.

use crate::arrangement_graph::{ArrangementGraph, NodeId};
use crate::collective::Comm;
use crate::layout::Layout;
use shardwright_machine::{AxisSet, Seconds};
use shardwright_simd::vectorised_fn;

/// Sources per sweep.
const SIMD_WIDTH: usize = 8;
type SimdVector = [f64; SIMD_WIDTH];

/// The times from one layout to all others.
pub(crate) struct TimeRow {
    /// By layout code; infinite where the tensor cannot have that layout.
    seconds: Vec<f64>,
}

impl TimeRow {
    /// A row without times: every query goes to the directed search.
    pub(crate) fn empty() -> TimeRow {
        TimeRow { seconds: Vec::new() }
    }

    /// The time to the layout with this code; `None` if the tensor cannot have it.
    pub(crate) fn get(&self, code: usize) -> Option<Seconds> {
        self.seconds.get(code).filter(|seconds| seconds.is_finite()).map(|&seconds| Seconds(seconds))
    }
}

impl std::fmt::Debug for TimeRow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TimeRow({})", self.seconds.len())
    }
}

vectorised_fn! {
    /// [`ArrangementGraph::settle_body`], compiled for the widest vectors of the processor.
    fn settle[][](graph: &ArrangementGraph, prices: &[f64], reachable: &[usize], seconds: &mut [SimdVector]) {
        graph.settle_body(prices, reachable, seconds);
    }
}

impl ArrangementGraph {
    /// The times from each layout to all others for a tensor of `bytes` bytes. Layouts that are not in this graph get
    /// empty rows.
    pub(crate) fn rows(&self, comm: &Comm, bytes: u64, from: &[Layout]) -> Vec<TimeRow> {
        let prices = self.prices(comm, bytes);
        let mut rows: Vec<TimeRow> = from.iter().map(|_| TimeRow::empty()).collect();
        let sources = from.iter().enumerate().filter_map(|(at, from)| Some((self.node(from)?, at)));
        let mut sources: Vec<(NodeId, usize)> = sources.collect();
        // Nodes are sorted by their partial axes, so neighbouring sources reach the same arrangements.
        sources.sort_unstable();
        let mut seconds = vec![[f64::INFINITY; SIMD_WIDTH]; self.len()];
        for batch in sources.chunks(SIMD_WIDTH) {
            seconds.fill([f64::INFINITY; SIMD_WIDTH]);
            for (at, &(node, _)) in batch.iter().enumerate() {
                seconds[node as usize][at] = 0.0;
            }
            let sums = batch.iter().map(|&(node, _)| self.sums[node as usize]);
            self.settle(&prices, sums.fold(AxisSet::EMPTY, AxisSet::union), &mut seconds);
            for (source, &(_, at)) in batch.iter().enumerate() {
                let of = |&node: &NodeId| seconds.get(node as usize).map_or(f64::INFINITY, |all| all[source]);
                rows[at] = TimeRow { seconds: self.canonical.iter().map(of).collect() };
            }
        }
        rows
    }

    /// Sweeps until every arrangement has its least time. Arrangements that are partial along axes outside `sums` are
    /// unreachable.
    fn settle(&self, prices: &[f64], sums: AxisSet, seconds: &mut [SimdVector]) {
        let reachable: Vec<usize> =
            (0..self.len()).filter(|&node| self.sums[node].minus(sums).is_empty()).collect();
        settle(self, prices, &reachable, seconds);
    }

    #[inline(always)]
    fn settle_body(&self, prices: &[f64], reachable: &[usize], seconds: &mut [SimdVector]) {
        // Nodes with a predecessor that improved since their last visit.
        let mut due = vec![false; self.len()];
        reachable.iter().for_each(|&node| due[node] = true);
        loop {
            let forwards = self.sweep(prices, reachable.iter().copied(), &mut due, seconds);
            if !forwards || !self.sweep(prices, reachable.iter().rev().copied(), &mut due, seconds) {
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
            for step in self.steps_into(node) {
                let price = prices[step.price as usize];
                for (best, before) in best.iter_mut().zip(&seconds[step.from as usize]) {
                    let reached = before + price;
                    *best = if reached < *best { reached } else { *best };
                }
            }
            if best != seconds[node] {
                seconds[node] = best;
                changed = true;
                self.successors_of(node).iter().for_each(|&next| due[next as usize] = true);
            }
        }
        changed
    }
}
