//! The smallest memory limit that any assignment keeps, for messages about limits that are too tight.
//!
//! Costs do not matter here: all costs become zero, and tables without forbidden pairs disappear. The remaining network
//! mostly falls apart into independent variables and a few tied ones. The solver starts from the assignment of least
//! known memory and looks for one with a byte less. It finds one, or proves that none exists.

use super::MinMemory;
use crate::error::PlanError;
use shardwright_search::{
    Control, Network, NetworkBuilder, Solver, StopReason, VarId, exact::Exact, is_forbidden,
};

/// The most searches for a smaller assignment.
const TRIES: usize = 16;
/// Rounds of the solver per search.
const ROUNDS: u64 = 50;

/// Tightens the bounds on the least memory: a smaller assignment, or a higher lower bound.
pub fn tighten(network: &Network, known: MinMemory, control: &Control<'_>) -> Result<MinMemory, PlanError> {
    let mut known = known;
    let stopped = || control.stop(0).is_some_and(|reason| reason != StopReason::IterationLimit);
    if stopped() {
        return Ok(known);
    }
    let free = without_costs(network)?;
    let rounds = control.part(control.iterations.unwrap_or(ROUNDS).min(ROUNDS));
    for _ in 0..TRIES {
        let Some(less) = known.best.as_ref().and_then(|(bytes, _)| bytes.checked_sub(1)) else { break };
        if stopped() || known.lower_bound > less {
            break;
        }
        let limit = i64::try_from(less).unwrap_or(i64::MAX);
        let outcome = Exact.solve(&free.with_usage_limit(Some(limit)), &rounds);
        match outcome.choice {
            Some(choice) => {
                known.best = Some((network.evaluate(&choice)?.peak_usage.unsigned_abs(), choice));
            }
            None if outcome.stop_reason == StopReason::Infeasible => {
                known.lower_bound = less.saturating_add(1)
            }
            None => break,
        }
    }
    Ok(known)
}

/// The network with all costs zero, except forbidden ones.
fn without_costs(network: &Network) -> Result<Network, PlanError> {
    let mut builder = NetworkBuilder::new();
    let free = |&cost: &i64| if is_forbidden(cost) { cost } else { 0 };
    for v in (0..network.variables()).map(|v| VarId(v as u32)) {
        let costs: Vec<i64> = network.unary(v).iter().map(free).collect();
        builder.variable(&costs, network.usage(v), network.interval(v))?;
    }
    for edge in network.edges() {
        let table = network.table(edge.table);
        if table.iter().any(|&cost| is_forbidden(cost)) {
            builder.edge(edge.u, edge.v, &table.iter().map(free).collect::<Vec<i64>>())?;
        }
    }
    Ok(builder.build()?)
}
