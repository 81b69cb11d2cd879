//! Solves a core without memory rows by dynamic programming over a tree decomposition, if its tables are small:
//! elimination in min-degree order with the tables of [`crate::pase`].
//!
//! The reductions eliminate only variables of at most two neighbours, which keeps all tables pairwise. This module
//! eliminates variables of more neighbours if that is affordable. Otherwise bounds and search solve the core.

use super::core::Core;
use super::model::INF;
use crate::control::Control;
use crate::minsum::INFINITE;
use crate::pairwise::{Pair, Pairwise};
use crate::pase;
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// Additions allowed per round of the search: a few hundredths of a second. Cheap eliminations run first; expensive
/// ones wait for later rounds, in case bounds and search finish before.
const WORK_PER_ROUND: f64 = 1e7;

/// A core without rows, and the additions that its elimination takes.
#[derive(Clone, Debug)]
pub struct Elimination {
    costs: Pairwise,
    constant: i64,
    work: f64,
}

impl Elimination {
    /// Prepares the elimination of a core, if it has no rows and the tables fit the memory.
    pub fn of(core: &Core, control: &Control<'_>) -> Option<Self> {
        if !core.slack.is_empty() {
            return None;
        }
        let (costs, constant) = costs(core);
        if costs.table_bytes() > control.memory_bytes {
            return None;
        }
        let work = pase::work(&costs, control)?;
        Some(Elimination { costs, constant, work })
    }

    /// Whether the elimination is affordable in this round.
    pub fn due(&self, round: u64) -> bool {
        self.work <= WORK_PER_ROUND * (round + 1) as f64
    }

    /// The least cost and its assignment, unless the search must stop first. The cost is [`INF`] if every assignment is
    /// forbidden.
    pub fn run(&self, control: &Control<'_>) -> Option<(i64, Vec<u32>)> {
        let (optimum, x) = pase::minimise(&self.costs, control).ok()?;
        Some((if optimum >= INFINITE { INF } else { optimum.checked_add(self.constant)? }, x))
    }
}

/// The core's costs shifted to be non-negative, and the shift.
fn costs(core: &Core) -> (Pairwise, i64) {
    let mut constant = core.constant;
    let lift = |costs: &[i64]| -> (Vec<i64>, i64) {
        let least = costs.iter().copied().filter(|&c| c < INF).min().unwrap_or(0);
        (costs.iter().map(|&c| if c >= INF { INFINITE } else { c - least }).collect(), least)
    };
    let mut all = Pairwise::default();
    for v in 0..core.variables() {
        let (unary, least) = lift(&core.unary[core.values(v)]);
        constant += least;
        all.unary.push(unary);
    }
    // Pairs that share a table share it here too.
    let mut known: FxHashMap<*const i64, (Arc<[i64]>, i64)> = FxHashMap::default();
    for (i, p) in core.pairs.iter().enumerate() {
        let table = core.exact_table(i as u32, p.u);
        let (cells, least) = known.entry(table.as_ptr()).or_insert_with(|| {
            let (lifted, least) = lift(table);
            (lifted.into(), least)
        });
        constant += *least;
        all.pairs.push(Pair { u: p.u, v: p.v, cells: cells.clone() });
    }
    (all, constant)
}
