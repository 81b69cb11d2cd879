//! The assignment that needs the least memory, approximated in a few rounds, with a lower bound.
//!
//! Every time at which memory is held gets a price; the prices add up to one. So the price of an assignment's memory is
//! at most its peak, for any prices. The least price over all assignments, which a search without limits finds, is
//! therefore a lower bound on every feasible limit. An assignment with a low price has a low peak if prices are high
//! where memory is short. Each round raises the prices at the times where the last assignment held the most.

mod tighten;

pub use tighten::tighten;

use crate::error::PlanError;
use shardwright_search::{
    Control, Interval, Network, NetworkBuilder, Solver, StopReason, VarId, exact::Exact, is_forbidden,
};

/// Rounds of price updates.
const ROUNDS: usize = 24;
/// Rounds of the solver per price update.
const SOLVER_ROUNDS: u64 = 20;
/// Sharpness of the price update: per round, the price at the peak grows by e to this relative to a time without usage.
const STEP: f64 = 6.0;
/// Upper limit on the sum of all costs of a priced network: far enough from overflow, fine enough for a byte.
const MOST_PAID: f64 = 1e17;
/// Bounds are lowered by this share, which exceeds the floating-point error.
const SLACK: f64 = 1e-9;

/// Bounds on the least memory that any assignment needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MinMemory {
    /// No assignment fits into fewer bytes.
    pub lower_bound: u64,
    /// The peak in bytes and the choices of the best assignment found.
    pub best: Option<(u64, Vec<u32>)>,
}

/// Searches for the assignment of a network that needs the least memory. Ends when one keeps `limit`, when none can, or
/// when the rounds or the time are used up.
pub fn min_memory(network: &Network, limit: u64, control: &Control<'_>) -> Result<MinMemory, PlanError> {
    let mut found = MinMemory::default();
    let times = Times::of(network);
    if let Some(choice) = leanest(network) {
        let held = times.held(network, &choice);
        let peak = held.iter().copied().max().unwrap_or(0).unsigned_abs();
        found.best = Some((peak, choice));
        if peak <= limit {
            return Ok(found);
        }
    }
    let mut prices = vec![1.0 / times.starts.len().max(1) as f64; times.starts.len()];
    let rounds = control.part(control.iterations.unwrap_or(SOLVER_ROUNDS).min(SOLVER_ROUNDS));
    let stopped = || control.stop(0).is_some_and(|reason| reason != StopReason::IterationLimit);
    for _ in 0..ROUNDS {
        if stopped() {
            break;
        }
        let (priced, unit) = times.priced(network, &prices)?;
        let outcome = Exact.solve(&priced, &rounds);
        if outcome.stop_reason == StopReason::Infeasible {
            found.lower_bound = u64::MAX;
            return Ok(found);
        }
        let paid = outcome.bound as f64 / unit * (1.0 - SLACK);
        found.lower_bound = found.lower_bound.max(paid as u64);
        let Some(choice) = outcome.choice else { break };
        let held = times.held(network, &choice);
        let peak = held.iter().copied().max().unwrap_or(0).unsigned_abs();
        if found.best.as_ref().is_none_or(|(least, _)| peak < *least) {
            found.best = Some((peak, choice));
        }
        let least = found.best.as_ref().map_or(u64::MAX, |(least, _)| *least);
        // Bytes are whole numbers: no value lies between a bound and the next byte.
        let settled =
            least <= limit || found.lower_bound > limit || found.lower_bound.saturating_add(1) >= least;
        if settled {
            break;
        }
        for (price, &held) in prices.iter_mut().zip(&held) {
            *price *= (STEP * (held as f64 / peak.max(1) as f64 - 1.0)).exp();
        }
        let total: f64 = prices.iter().sum();
        prices.iter_mut().for_each(|price| *price /= total);
    }
    Ok(found)
}

/// One variable after the other with the choice that holds the least, times how long, together with the least of the
/// variables that depend on it; none where that leads to forbidden costs.
fn leanest(network: &Network) -> Option<Vec<u32>> {
    let all = || (0..network.variables() as u32).map(VarId);
    let hard: Vec<bool> = (0..network.tables() as u32)
        .map(|table| network.table(table).iter().any(|&cost| is_forbidden(cost)))
        .collect();
    let edges = |v: VarId| {
        let edges = network.neighbours(v).iter().map(|&(_, e)| &network.edges()[e as usize]);
        edges.filter(|edge| hard[edge.table as usize])
    };
    let held = |v: VarId, choice: u32| {
        let interval = network.interval(v);
        let length = interval.hi.saturating_sub(interval.lo);
        i128::from(network.usage(v)[choice as usize]) * i128::from(length)
    };
    let choices = |v: VarId| {
        (0..network.choices(v) as u32).filter(move |&c| !is_forbidden(network.unary(v)[c as usize]))
    };
    let mut chosen: Vec<Option<u32>> = vec![None; network.variables()];
    for v in all() {
        let total = |own: u32| {
            let mut total = held(v, own);
            for edge in edges(v) {
                let (table, width) = (network.table(edge.table), network.choices(edge.v));
                let other = if edge.u == v { edge.v } else { edge.u };
                let allowed = |&choice: &u32| {
                    let (row, column) = if edge.u == v { (own, choice) } else { (choice, own) };
                    !is_forbidden(table[row as usize * width + column as usize])
                };
                match chosen[other.index()] {
                    Some(choice) => allowed(&choice).then_some(())?,
                    None => {
                        total += choices(other).filter(allowed).map(|choice| held(other, choice)).min()?;
                    }
                }
            }
            Some(total)
        };
        let best = choices(v).filter_map(|choice| Some((total(choice)?, choice))).min();
        chosen[v.index()] = Some(best?.1);
    }
    chosen.into_iter().collect()
}

/// The times at which a network's usage can peak: the starts of intervals.
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

    /// The bytes that an assignment holds at each time.
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

    /// The network whose costs are the prices of its memory, without a limit. Also returns the cost of one byte at
    /// price one.
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

        /// The least peak of all assignments lies between the lower bound and the best peak found.
        #[test]
        fn the_least_peak_lies_between_bound_and_best(
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
            let found = min_memory(&network, 0, &Control::new().iteration_limit(100)).unwrap();
            match least {
                None => prop_assert_eq!(found.lower_bound, u64::MAX),
                Some(least) => {
                    prop_assert!(found.lower_bound <= least, "{} {}", found.lower_bound, least);
                    let (peak, choice) = found.best.unwrap();
                    prop_assert!(peak >= least);
                    prop_assert_eq!(network.evaluate(&choice).unwrap().peak_usage.unsigned_abs(), peak);
                }
            }
        }
    }
}
