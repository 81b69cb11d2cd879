//! The assignment that needs the least memory, as nearly as can be told in a few rounds, and a bound on it.
//!
//! Every time at which memory is held gets a price, all prices together being one. What an assignment pays for its
//! memory is then at most its peak, whatever the prices; so the least that any assignment pays, which a search without
//! limits finds, is a bound below which no limit can be kept. And an assignment that pays little has a low peak once
//! the prices are high where memory is short: each round raises them where the last assignment held most.

use crate::error::PlanError;
use shardwright_search::{
    Control, Interval, Network, NetworkBuilder, StopReason, VarId, is_forbidden, registry,
};

/// Rounds of prices.
const ROUNDS: usize = 24;
/// Rounds of the solver at each.
const SOLVER_ROUNDS: u64 = 20;
/// How sharply prices follow what is held: from nothing to the peak they grow by e to this, per round.
const STEP: f64 = 6.0;
/// What all costs of a priced network add up to at most: far enough from overflow, fine enough for a byte.
const MOST_PAID: f64 = 1e17;
/// Bounds are taken down by this part, more than floating point can be off.
const SLACK: f64 = 1e-9;

/// What is known about the least memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leanest {
    /// No limit below this many bytes can be kept.
    pub floor: u64,
    /// The leanest assignment found, and its peak in bytes.
    pub found: Option<(u64, Vec<u32>)>,
}

/// Looks for the assignment of a network that needs the least memory, until one keeps `limit`, none can, or the
/// rounds or the time are over.
pub fn leanest(network: &Network, limit: u64, control: &Control<'_>) -> Result<Leanest, PlanError> {
    let mut leanest = Leanest::default();
    let Some(solver) = registry::find("exact") else { return Ok(leanest) };
    let times = Times::of(network);
    let mut prices = vec![1.0 / times.starts.len().max(1) as f64; times.starts.len()];
    let rounds = control.part(control.iterations.unwrap_or(SOLVER_ROUNDS).min(SOLVER_ROUNDS));
    for _ in 0..ROUNDS {
        let (priced, unit) = times.priced(network, &prices)?;
        let outcome = solver.solver().solve(&priced, &rounds);
        if outcome.stop_reason == StopReason::Infeasible {
            leanest.floor = u64::MAX;
            return Ok(leanest);
        }
        let paid = outcome.bound as f64 / unit * (1.0 - SLACK);
        leanest.floor = leanest.floor.max(paid as u64);
        let Some(choice) = outcome.choice else { break };
        let held = times.held(network, &choice);
        let peak = held.iter().copied().max().unwrap_or(0).unsigned_abs();
        if leanest.found.as_ref().is_none_or(|(least, _)| peak < *least) {
            leanest.found = Some((peak, choice));
        }
        let least = leanest.found.as_ref().map_or(u64::MAX, |(least, _)| *least);
        // Bytes are whole: nothing lies between a bound and the next byte.
        let settled = least <= limit || leanest.floor > limit || leanest.floor.saturating_add(1) >= least;
        if settled || control.stop(0).is_some_and(|reason| reason != StopReason::IterationLimit) {
            break;
        }
        for (price, &held) in prices.iter_mut().zip(&held) {
            *price *= (STEP * (held as f64 / peak.max(1) as f64 - 1.0)).exp();
        }
        let total: f64 = prices.iter().sum();
        prices.iter_mut().for_each(|price| *price /= total);
    }
    Ok(leanest)
}

/// The times at which a network's usage can be largest: where some interval starts.
struct Times {
    starts: Vec<u64>,
}

impl Times {
    fn of(network: &Network) -> Self {
        let variables = (0..network.variables() as u32).map(VarId);
        let held = variables.filter(|&v| network.usage(v).iter().any(|&bytes| bytes > 0));
        let alive = held.map(|v| network.interval(v)).filter(|interval| !interval.is_empty());
        let mut starts: Vec<u64> = alive.map(|interval| interval.lo).collect();
        starts.sort_unstable();
        starts.dedup();
        Self { starts }
    }

    fn range(&self, interval: Interval) -> std::ops::Range<usize> {
        let at = |time: u64| self.starts.partition_point(|&start| start < time);
        at(interval.lo)..at(interval.hi).max(at(interval.lo))
    }

    /// What an assignment holds at each time.
    fn held(&self, network: &Network, choice: &[u32]) -> Vec<i64> {
        let mut held = vec![0i64; self.starts.len()];
        for (v, &choice) in (0..).map(VarId).zip(choice) {
            let bytes = network.usage(v)[choice as usize];
            for held in &mut held[self.range(network.interval(v))] {
                *held = held.saturating_add(bytes);
            }
        }
        held
    }

    /// The network whose costs are what its memory costs at these prices, without a limit, and what a byte at a price
    /// of one costs there.
    fn priced(&self, network: &Network, prices: &[f64]) -> Result<(Network, f64), PlanError> {
        let variables = || (0..network.variables() as u32).map(VarId);
        let price = |v: VarId| prices[self.range(network.interval(v))].iter().sum::<f64>();
        let most = |v: VarId| network.usage(v).iter().copied().max().unwrap_or(0) as f64 * price(v);
        let unit = MOST_PAID / variables().map(most).sum::<f64>().max(1.0);
        let mut builder = NetworkBuilder::new();
        for v in variables() {
            let own = price(v) * unit;
            let pay = |(&bytes, &cost): (&i64, &i64)| {
                if is_forbidden(cost) { cost } else { (bytes as f64 * own) as i64 }
            };
            let costs: Vec<i64> = network.usage(v).iter().zip(network.unary(v)).map(pay).collect();
            builder.variable(&costs, &[], Interval::default())?;
        }
        for edge in network.edges() {
            let table = network.table(edge.table);
            if table.iter().any(|&cost| is_forbidden(cost)) {
                let only = |&cost: &i64| if is_forbidden(cost) { cost } else { 0 };
                builder.edge(edge.u, edge.v, &table.iter().map(only).collect::<Vec<i64>>())?;
            }
        }
        Ok((builder.build()?, unit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// The least peak of all assignments lies between the floor and the peak of what is found.
        #[test]
        fn the_least_peak_lies_between_the_floor_and_what_is_found(
            variables in prop::collection::vec(
                (prop::collection::vec(0i64..50, 3), 0u64..6, 1u64..4), 1..6,
            ),
            forbidden in prop::collection::vec(any::<bool>(), 9),
        ) {
            let mut builder = NetworkBuilder::new();
            for (usages, lo, length) in &variables {
                builder.variable(&[1, 2, 3], usages, Interval { lo: *lo, hi: lo + length }).unwrap();
            }
            for v in 1..variables.len() as u32 {
                let table: Vec<i64> =
                    forbidden.iter().map(|&f| if f { shardwright_search::FORBIDDEN } else { 7 }).collect();
                builder.edge(VarId(v - 1), VarId(v), &table).unwrap();
            }
            builder.usage_limit(0).unwrap();
            let network = builder.build().unwrap();
            let count = 3u32.pow(variables.len() as u32);
            let choice = |k: u32| (0..variables.len() as u32).map(|v| k / 3u32.pow(v) % 3).collect::<Vec<_>>();
            let all = (0..count).map(|k| network.evaluate(&choice(k)).unwrap());
            let least = all.filter(|e| e.forbidden == 0).map(|e| e.peak_usage.unsigned_abs()).min();
            let leanest = leanest(&network, 0, &Control::new().iteration_limit(100)).unwrap();
            match least {
                None => prop_assert_eq!(leanest.floor, u64::MAX),
                Some(least) => {
                    prop_assert!(leanest.floor <= least, "{} {}", leanest.floor, least);
                    let (peak, choice) = leanest.found.unwrap();
                    prop_assert!(peak >= least);
                    prop_assert_eq!(network.evaluate(&choice).unwrap().peak_usage.unsigned_abs(), peak);
                }
            }
        }
    }
}
