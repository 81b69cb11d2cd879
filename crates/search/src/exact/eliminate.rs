//! What is left without memory rows, solved at once by dynamic programming over a tree decomposition, where
//! its tables are small: elimination in min-degree order, the machinery of [`crate::pase`].
//!
//! The reductions eliminate variables of at most two neighbours, which keeps all tables between pairs; this
//! goes on past two where that is affordable. Where it is not, bounds and search take over.

use super::core::Core;
use super::model::INF;
use crate::minsum::INFINITE;
use crate::outcome::Control;
use crate::pairwise::{Pair, Pairwise};
use crate::pase;

/// Most additions worth spending before anything else has been tried: a second or two.
const MOST_WORK: f64 = 2e9;

/// The least cost of a core without rows and an assignment that has it, if the tables are small enough.
/// The cost is [`INF`] or more where everything is forbidden.
pub fn eliminate(core: &Core, control: &Control<'_>) -> Option<(i64, Vec<u32>)> {
    if !core.slack.is_empty() {
        return None;
    }
    let (costs, constant) = costs(core);
    if pase::work(&costs, control)? > MOST_WORK {
        return None;
    }
    let (optimum, x) = pase::minimise(&costs, control).ok()?;
    Some((if optimum >= INFINITE { INF } else { optimum.checked_add(constant)? }, x))
}

/// The core's costs from zero up, and what was taken off to make them so.
fn costs(core: &Core) -> (Pairwise, i64) {
    let mut constant = core.constant;
    let mut lift = |costs: &[i64]| -> Vec<i64> {
        let least = costs.iter().copied().filter(|&c| c < INF).min().unwrap_or(0);
        constant += least;
        costs.iter().map(|&c| if c >= INF { INFINITE } else { c - least }).collect()
    };
    let mut all = Pairwise {
        unary: (0..core.variables()).map(|v| lift(&core.unary[core.values(v)])).collect(),
        ..Pairwise::default()
    };
    for (i, p) in core.pairs.iter().enumerate() {
        all.pairs.push(Pair { u: p.u, v: p.v, cells: lift(core.exact_table(i as u32, p.u)).into() });
    }
    (all, constant)
}
