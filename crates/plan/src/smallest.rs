//! The smallest memory limit that any assignment keeps, where the one asked for is too tight.
//!
//! Costs do not matter here, so all of them become zero and tables that forbid nothing disappear; what is left mostly
//! falls apart into variables that hold memory and few that are tied. From the leanest assignment known, the solver
//! is asked for something that holds a byte less; that it cannot be is then proved, or something smaller found.

use crate::{error::PlanError, leanest::Leanest};
use shardwright_search::{Control, Network, NetworkBuilder, StopReason, VarId, is_forbidden, registry};

/// The most times that something smaller is looked for.
const TRIES: usize = 16;
/// Rounds of the solver at each.
const ROUNDS: u64 = 50;

/// Makes what is known about the smallest limit more precise: a leaner assignment, a higher bound.
pub fn smallest_limit(
    network: &Network,
    known: Leanest,
    control: &Control<'_>,
) -> Result<Leanest, PlanError> {
    let mut known = known;
    let Some(solver) = registry::find("exact") else { return Ok(known) };
    let free = without_costs(network)?;
    let rounds = control.part(control.iterations.unwrap_or(ROUNDS).min(ROUNDS));
    for _ in 0..TRIES {
        let Some(less) = known.found.as_ref().and_then(|(bytes, _)| bytes.checked_sub(1)) else { break };
        let stop = control.stop(0).is_some_and(|reason| reason != StopReason::IterationLimit);
        if stop || known.floor > less {
            break;
        }
        let limit = i64::try_from(less).unwrap_or(i64::MAX);
        let outcome = solver.solver().solve(&free.with_usage_limit(Some(limit)), &rounds);
        match outcome.choice {
            Some(choice) => {
                known.found = Some((network.evaluate(&choice)?.peak_usage.unsigned_abs(), choice));
            }
            None if outcome.stop_reason == StopReason::Infeasible => known.floor = less.saturating_add(1),
            None => break,
        }
    }
    Ok(known)
}

/// The network with all costs zero, but what is forbidden.
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
