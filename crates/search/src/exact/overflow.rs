//! Finds an assignment of small overflow if none fits the limit.
//!
//! A bisection over higher limits searches each limit briefly. Every assignment found lowers the upper end to its peak.
//! A proof of infeasibility, or a search without result, raises the lower end.

use super::solve;
use crate::control::Control;
use crate::network::Network;
use crate::outcome::{Recorder, StopReason};

/// Rounds of search at each limit.
const ROUNDS: u64 = 4;
/// The most limits tried.
const TRIES: usize = 24;

/// Reports the least overflow found to `recorder`.
pub fn least_overflow(network: &Network, control: &Control<'_>, recorder: &mut Recorder<'_, '_>) {
    let Some(limit) = network.usage_limit() else { return };
    let part = control.part(ROUNDS);
    let attempt = |limit: Option<i64>| {
        let mut inner = Recorder::new(&part);
        solve(&network.with_usage_limit(limit), &part, &mut inner);
        let choice = inner.finish(StopReason::Exhausted).choice?;
        let e = network.evaluate(&choice).ok()?;
        Some((e, choice))
    };
    let Some((first, choice)) = attempt(None) else { return };
    if let (true, Ok(cost)) = (first.feasible(), i64::try_from(first.cost)) {
        // The limited search was stopped too early; the unlimited result happens to fit.
        recorder.offer(cost, &choice, 0, "without limit");
        return;
    }
    recorder.offer_overflow(first.overflow, &choice);
    let mut high = first.peak_usage;
    let mut low = limit;
    for _ in 0..TRIES {
        if low + 1 >= high || control.stop(0).is_some_and(|r| r != StopReason::IterationLimit) {
            return;
        }
        let middle = low + (high - low) / 2;
        match attempt(Some(middle)) {
            Some((e, choice)) => {
                recorder.offer_overflow(e.overflow, &choice);
                high = e.peak_usage;
            }
            None => low = middle,
        }
    }
}
