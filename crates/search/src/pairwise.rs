//! A network's costs without its memory, for elimination. Forbidden costs are infinite.
//!
//! The solvers of the papers use it, since none of them models memory over time. They report afterwards whether their
//! result fits. Equal tables stay shared.

use crate::minsum::{self, INFINITE};
use crate::network::{Network, VarId};
use crate::outcome::{Outcome, Recorder, StopReason};
use rustc_hash::FxHashSet;
use std::sync::Arc;

/// A table between two variables; equal tables are shared.
#[derive(Clone, Debug)]
pub(crate) struct Pair {
    pub u: u32,
    pub v: u32,
    /// Row-major, `u`'s choice major.
    pub cells: Arc<[i64]>,
}

/// Unary and pairwise costs; see the [module](self).
#[derive(Clone, Debug, Default)]
pub(crate) struct Pairwise {
    pub unary: Vec<Vec<i64>>,
    pub pairs: Vec<Pair>,
}

impl Pairwise {
    pub fn of(network: &Network) -> Self {
        let costs = |cells: &[i64]| cells.iter().map(|&cell| minsum::cost(cell)).collect::<Vec<i64>>();
        let tables: Vec<Arc<[i64]>> =
            (0..network.tables()).map(|table| costs(network.table(table as u32)).into()).collect();
        Pairwise {
            unary: (0..network.variables()).map(|v| costs(network.unary(VarId(v as u32)))).collect(),
            pairs: network
                .edges()
                .iter()
                .map(|edge| Pair { u: edge.u.0, v: edge.v.0, cells: tables[edge.table as usize].clone() })
                .collect(),
        }
    }

    /// Number of choices of a variable.
    pub fn choices(&self, v: u32) -> usize {
        self.unary[v as usize].len()
    }

    /// Bytes of all tables, shared ones once.
    pub fn table_bytes(&self) -> u64 {
        let mut seen = FxHashSet::default();
        let fresh = self.pairs.iter().filter(|pair| seen.insert(pair.cells.as_ptr()));
        fresh.map(|pair| 8 * pair.cells.len() as u64).sum()
    }
}

/// The transpose of a row-major table.
pub(crate) fn transpose(cells: &[i64], columns: usize) -> Vec<i64> {
    let rows = cells.len() / columns.max(1);
    let mut out = Vec::with_capacity(cells.len());
    for column in 0..columns {
        out.extend((0..rows).map(|row| cells[row * columns + column]));
    }
    out
}

/// Ends a search that minimised costs without memory. Its optimum is a lower bound for the network, and the optimum of
/// the network if it fits the memory.
pub(crate) fn finish_relaxed(
    network: &Network,
    mut recorder: Recorder<'_, '_>,
    optimum: i64,
    choice: &[u32],
    source: &str,
) -> Outcome {
    if optimum >= INFINITE {
        return recorder.finish(StopReason::Infeasible);
    }
    recorder.raise(optimum, 1, source);
    match network.evaluate(choice) {
        Ok(evaluation) if evaluation.feasible() => {
            recorder.offer(optimum, choice, 1, source);
        }
        Ok(evaluation) => recorder.offer_overflow(evaluation.overflow, choice),
        Err(error) => debug_assert!(false, "a relaxed optimum is an assignment: {error}"),
    }
    recorder.finish(StopReason::Exhausted)
}
