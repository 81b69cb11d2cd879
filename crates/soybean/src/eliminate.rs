//! The optimal cut of a graph that is too wide for levels, as a cost network for the exact solver.
//!
//! Groups choose tilings and units choose requests. The traffic between a request and a group is a pairwise cost, so the
//! minimum equals that of the level program. Ranks are unary costs. Costs are scaled so that all ranks together weigh
//! less than one element; if that overflows the network's numbers, ranks are omitted.

use crate::one_cut::{CutSolution, OneCut};
use shardwright_search::{
    Control, Interval, Network, NetworkBuilder, NetworkError, Solver, StopReason, VarId, exact::Exact,
};

/// One variable per group, then one per unit.
fn network(cut: &OneCut, ranked: bool) -> Result<Network, NetworkError> {
    let most: u64 = cut.ranks.iter().map(|ranks| ranks.iter().max().copied().unwrap_or(0)).sum();
    let scale = if ranked { most + 1 } else { 1 };
    // A cost that saturates makes the network refuse to build, and `solve` retries without ranks.
    let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
    let mut builder = NetworkBuilder::new();
    for ranks in &cut.ranks {
        let costs: Vec<i64> = ranks.iter().map(|&rank| if ranked { number(rank) } else { 0 }).collect();
        builder.variable(&costs, &[], Interval::default())?;
    }
    for unit in &cut.units {
        let v = builder.variable(&vec![0; unit.requests.len()], &[], Interval::default())?;
        for touched in &unit.group_costs {
            let costs: Vec<i64> = touched.costs.iter().map(|&c| number(c.saturating_mul(scale))).collect();
            builder.edge(v, VarId(touched.group), &costs)?;
        }
    }
    builder.build()
}

/// The best solution that the exact solver finds, or why it has none.
pub(crate) fn solve(
    cut: &OneCut,
    control: &Control<'_>,
) -> Result<Result<CutSolution, StopReason>, NetworkError> {
    let network = network(cut, true).or_else(|_| network(cut, false))?;
    let outcome = Exact.solve(&network, control);
    let proved = outcome.proved_optimal();
    let tilings = outcome.choice.map(|choice| choice[..cut.tilings.len()].to_vec());
    Ok(tilings.map(|tilings| cut.solution(tilings, proved)).ok_or(outcome.stop_reason))
}
