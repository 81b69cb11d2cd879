//! Shortest paths over a space of arrangements from several layouts at once.
//!
//! A queue would visit every arrangement once, but one source at a time and by hops through memory. Sweeping over all
//! arrangements in a good order, forwards and backwards, needs about four sweeps until nothing changes, the later ones
//! over few that a change can still reach, and each takes eight sources along in vector registers: several times faster, without a queue, and the same to the bit
//! in whatever company a source is swept. Compiled for several widths of vectors and chosen at run time; all give the
//! same numbers, since a minimum of sums does not depend on the order of its terms.

use crate::collective::Comm;
use crate::layout::Layout;
use crate::space::{NodeId, Space};
use shardwright_machine::{AxisSet, Seconds};

/// Sources swept together.
const LANES: usize = 8;
type Lanes = [f64; LANES];

/// The times from one layout to all others.
pub(crate) struct Row {
    /// By layout code; infinite where the tensor cannot lie like that.
    seconds: Vec<f64>,
}

impl Row {
    /// Knows nothing: every question goes to the other search.
    pub(crate) fn empty() -> Row {
        Row { seconds: Vec::new() }
    }

    /// The time to the layout of a code; `None` if the tensor cannot lie like that.
    pub(crate) fn get(&self, code: usize) -> Option<Seconds> {
        self.seconds.get(code).filter(|seconds| seconds.is_finite()).map(|&seconds| Seconds(seconds))
    }
}

impl std::fmt::Debug for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Row({})", self.seconds.len())
    }
}

impl Space {
    /// The times from each layout to all others, for a tensor of so many bytes; empty rows for layouts that are not
    /// in this space.
    pub(crate) fn rows(&self, comm: &Comm, bytes: u64, from: &[Layout]) -> Vec<Row> {
        let prices = self.prices(comm, bytes);
        let mut rows: Vec<Row> = from.iter().map(|_| Row::empty()).collect();
        let sources = from.iter().enumerate().filter_map(|(at, from)| Some((self.node(from)?, at)));
        let mut sources: Vec<(NodeId, usize)> = sources.collect();
        // Nodes are ordered by their partial sums: neighbours have much in common.
        sources.sort_unstable();
        let mut seconds = vec![[f64::INFINITY; LANES]; self.len()];
        for batch in sources.chunks(LANES) {
            seconds.fill([f64::INFINITY; LANES]);
            for (lane, &(node, _)) in batch.iter().enumerate() {
                seconds[node as usize][lane] = 0.0;
            }
            let sums = batch.iter().map(|&(node, _)| self.sums[node as usize]);
            self.settle(&prices, sums.fold(AxisSet::EMPTY, AxisSet::union), &mut seconds);
            for (lane, &(_, at)) in batch.iter().enumerate() {
                let of = |&node: &NodeId| seconds.get(node as usize).map_or(f64::INFINITY, |all| all[lane]);
                rows[at] = Row { seconds: self.canonical.iter().map(of).collect() };
            }
        }
        rows
    }

    /// Sweeps until every arrangement has its least time; those with partial sums along other axes than
    /// `sums` cannot be reached.
    fn settle(&self, prices: &[f64], sums: AxisSet, seconds: &mut [Lanes]) {
        let reachable: Vec<usize> =
            (0..self.len()).filter(|&node| self.sums[node].minus(sums).is_empty()).collect();
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has just been asked whether it has these instructions.
            return unsafe { self.settle_avx512(prices, &reachable, seconds) };
        } else if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
            return unsafe { self.settle_avx2(prices, &reachable, seconds) };
        }
        self.settle_body(prices, &reachable, seconds);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    fn settle_avx512(&self, prices: &[f64], reachable: &[usize], seconds: &mut [Lanes]) {
        self.settle_body(prices, reachable, seconds);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn settle_avx2(&self, prices: &[f64], reachable: &[usize], seconds: &mut [Lanes]) {
        self.settle_body(prices, reachable, seconds);
    }

    #[inline(always)]
    fn settle_body(&self, prices: &[f64], reachable: &[usize], seconds: &mut [Lanes]) {
        // Nodes that a step leads to from a node which got better since they were looked at.
        let mut due = vec![false; self.len()];
        reachable.iter().for_each(|&node| due[node] = true);
        loop {
            let forwards = self.sweep(prices, reachable.iter().copied(), &mut due, seconds);
            if !forwards || !self.sweep(prices, reachable.iter().rev().copied(), &mut due, seconds) {
                return;
            }
        }
    }

    /// Lets every node that is due take the best of the steps that lead to it; whether any got better.
    #[inline(always)]
    fn sweep(
        &self,
        prices: &[f64],
        nodes: impl Iterator<Item = usize>,
        due: &mut [bool],
        seconds: &mut [Lanes],
    ) -> bool {
        let mut changed = false;
        for node in nodes {
            if !std::mem::replace(&mut due[node], false) {
                continue;
            }
            let mut best = seconds[node];
            for step in self.leading_to(node) {
                let price = prices[step.price as usize];
                for (best, before) in best.iter_mut().zip(&seconds[step.from as usize]) {
                    let reached = before + price;
                    *best = if reached < *best { reached } else { *best };
                }
            }
            if best != seconds[node] {
                seconds[node] = best;
                changed = true;
                self.led_to(node).iter().for_each(|&next| due[next as usize] = true);
            }
        }
        changed
    }
}
