//! The smallest memory limit that any assignment keeps, where the one asked for is too tight.
//!
//! Costs do not matter here, so all of them become zero and tables that forbid nothing disappear; what is left mostly
//! falls apart into variables that hold memory and few that are tied. The solver bisects for a limit that can be
//! kept; that one byte less cannot be kept is then proved, or something smaller found.

use crate::error::PlanError;
use shardwright_search::{Control, Network, NetworkBuilder, StopReason, VarId, is_forbidden, registry};

/// The most times that something smaller is looked for.
const TRIES: usize = 16;
/// Rounds of the solver at each.
const ROUNDS: u64 = 50;

/// A limit that can be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Smallest {
    /// In bytes.
    pub bytes: u64,
    /// Whether no smaller one can be kept.
    pub proved: bool,
}

/// The smallest limit that some assignment of the network is known to keep, if any is known.
pub fn smallest_limit(network: &Network, control: &Control<'_>) -> Result<Option<Smallest>, PlanError> {
    let (Some(solver), Some(limit)) = (registry::find("exact"), network.usage_limit()) else {
        return Ok(None);
    };
    let free = without_costs(network)?;
    let rounds = control.part(control.iterations.unwrap_or(ROUNDS).min(ROUNDS));
    let mut limit = limit;
    let mut known: Option<i64> = None;
    for _ in 0..TRIES {
        let outcome = solver.solver().solve(&free.with_usage_limit(Some(limit)), &rounds);
        let overfull =
            || outcome.least_overflow.as_ref().map(|(overflow, _)| limit.saturating_add(*overflow));
        let (kept, proved) = match &outcome.choice {
            Some(choice) => (Some(network.evaluate(choice)?.peak_usage), false),
            None => {
                (overfull(), known == limit.checked_add(1) && outcome.stop_reason == StopReason::Infeasible)
            }
        };
        if !proved && let Some(kept) = kept {
            known = Some(known.map_or(kept, |known| known.min(kept)));
        }
        let Some(bytes) = known else { return Ok(None) };
        let done = proved || limit == bytes.saturating_sub(1) && outcome.choice.is_none();
        if done || control.stop(0).is_some_and(|reason| reason != StopReason::IterationLimit) {
            return Ok(Some(Smallest { bytes: bytes.unsigned_abs(), proved }));
        }
        // One byte less than the best so far: to be proved impossible, or found.
        limit = bytes.saturating_sub(1);
    }
    Ok(known.map(|bytes| Smallest { bytes: bytes.unsigned_abs(), proved: false }))
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
