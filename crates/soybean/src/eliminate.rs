//! The best cut of a graph that is too wide for levels: a cost network, solved exactly.
//!
//! Groups choose tilings, units choose requests, and what a request needs or leaves of a group is a pairwise cost.
//! The minimum over requests and tilings of the sum is the same as the level program's. Ranks are unary costs, and
//! costs are scaled so that all ranks together are less than one element; where that does not fit into the
//! network's numbers, ranks are left out.

use crate::one_cut::{Answer, OneCut};
use shardwright_search::{
    Control, Interval, Network, NetworkBuilder, NetworkError, Solver, StopReason, VarId, exact::Exact,
};

/// One variable per group, then one per unit.
fn network(cut: &OneCut, ranked: bool) -> Result<Network, NetworkError> {
    let most: u64 = cut.ranks.iter().map(|ranks| ranks.iter().max().copied().unwrap_or(0)).sum();
    let scale = if ranked { most + 1 } else { 1 };
    let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
    let mut builder = NetworkBuilder::new();
    for ranks in &cut.ranks {
        let costs: Vec<i64> = ranks.iter().map(|&rank| if ranked { number(rank) } else { 0 }).collect();
        builder.variable(&costs, &[], Interval::default())?;
    }
    for unit in &cut.units {
        let v = builder.variable(&vec![0; unit.requests.len()], &[], Interval::default())?;
        for end in &unit.ends {
            let costs: Vec<i64> = end.costs.iter().map(|&c| number(c.saturating_mul(scale))).collect();
            builder.edge(v, VarId(end.group), &costs)?;
        }
    }
    builder.build()
}

/// The best answer that the exact solver finds, or why it has none.
pub(crate) fn solve(cut: &OneCut, control: &Control<'_>) -> Result<Result<Answer, StopReason>, NetworkError> {
    let network = network(cut, true).or_else(|_| network(cut, false))?;
    let outcome = Exact.solve(&network, control);
    let proved = outcome.proved_optimal();
    let tilings = outcome.choice.map(|choice| choice[..cut.tilings.len()].to_vec());
    Ok(tilings.map(|tilings| cut.answer(tilings, proved)).ok_or(outcome.stop_reason))
}
