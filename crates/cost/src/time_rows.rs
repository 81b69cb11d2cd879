//! Times from several layouts to all others, over an arrangement graph.

use crate::arrangement_graph::ArrangementGraph;
use crate::collective::Comm;
use crate::layout::Layout;
use crate::step_lists::{NodeId, SIMD_WIDTH};
use shardwright_machine::{AxisSet, Seconds};

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
            // Arrangements that are partial along other axes than the sources are unreachable.
            let sums = batch.iter().map(|&(node, _)| self.sums[node as usize]);
            let sums = sums.fold(AxisSet::EMPTY, AxisSet::union);
            let reachable: Vec<usize> =
                (0..self.len()).filter(|&node| self.sums[node].minus(sums).is_empty()).collect();
            self.steps.settle(&prices, &reachable, &mut seconds);
            for (source, &(_, at)) in batch.iter().enumerate() {
                let of = |&node: &NodeId| seconds.get(node as usize).map_or(f64::INFINITY, |all| all[source]);
                rows[at] = TimeRow { seconds: self.canonical.iter().map(of).collect() };
            }
        }
        rows
    }
}
