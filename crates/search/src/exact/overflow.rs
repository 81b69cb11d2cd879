//! Where no assignment fits the limit: one that overflows as little as can be found.
//!
//! Bisects over raised limits, each searched briefly; every assignment found lowers the upper end to its
//! own peak. A proof that a limit cannot be kept raises the lower end, and so does failing to find one.

use super::solve;
use crate::network::Network;
use crate::outcome::{Control, Recorder, StopReason};

/// Rounds of search at each limit.
const ROUNDS: u64 = 4;
/// Most limits tried.
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
        // The search was stopped before it found anything, and luck did.
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
