//! The exhaustive solver: evaluates every assignment by [`Network::evaluate`].
//!
//! It is simple enough to be obviously right, and other solvers are tested against it. It shares no code with them and
//! refuses networks with more than [`MOST_ASSIGNMENTS`] assignments.

use crate::control::Control;
use crate::network::{Network, VarId};
use crate::outcome::{Outcome, Recorder, Solver, StopReason};

/// Networks with more assignments are refused: they would take minutes.
pub const MOST_ASSIGNMENTS: u64 = 50_000_000;

/// Tries every assignment; see the [module](self).
#[derive(Clone, Copy, Debug, Default)]
pub struct Brute;

impl Solver for Brute {
    fn name(&self) -> &'static str {
        "brute"
    }

    fn solve(&self, network: &Network, control: &Control<'_>) -> Outcome {
        let mut recorder = Recorder::new(control);
        let sizes: Vec<usize> = (0..network.variables()).map(|v| network.choices(VarId(v as u32))).collect();
        let count = sizes.iter().try_fold(1u64, |count, &size| count.checked_mul(size as u64));
        if count.is_none_or(|count| count > MOST_ASSIGNMENTS) {
            let reason = format!(
                "the network has {} assignments and brute tries every one, at most {MOST_ASSIGNMENTS}; use exact",
                count.map_or("more than 2^64".to_string(), |count| count.to_string())
            );
            return recorder.finish(StopReason::Refused(reason));
        }
        let mut choice = vec![0u32; sizes.len()];
        let mut tried = 0u64;
        loop {
            // Reading the clock costs more than one assignment of a small network.
            if tried.is_multiple_of(1024)
                && let Some(reason) = control.stop(tried)
            {
                return recorder.finish(reason);
            }
            tried += 1;
            if let Ok(evaluation) = network.evaluate(&choice) {
                match i64::try_from(evaluation.cost) {
                    Ok(cost) if evaluation.feasible() => {
                        recorder.offer(cost, &choice, tried, "enumeration");
                    }
                    _ if evaluation.forbidden == 0 => recorder.offer_overflow(evaluation.overflow, &choice),
                    _ => {}
                }
            }
            if !advance(&mut choice, &sizes) {
                break;
            }
        }
        match recorder.cost() {
            Some(cost) => {
                recorder.raise(cost, tried, "all assignments tried");
                recorder.finish(StopReason::Optimal)
            }
            None => recorder.finish(StopReason::Infeasible),
        }
    }
}

/// The next assignment, the last variable fastest; false after the last one.
fn advance(choice: &mut [u32], sizes: &[usize]) -> bool {
    for (digit, &size) in choice.iter_mut().zip(sizes).rev() {
        *digit += 1;
        if (*digit as usize) < size {
            return true;
        }
        *digit = 0;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::{FORBIDDEN, Interval, NetworkBuilder};

    fn pair(limit: i64) -> Network {
        let mut builder = NetworkBuilder::new();
        let always = Interval { lo: 0, hi: 1 };
        let a = builder.variable(&[1, 5], &[8, 2], always).unwrap();
        let b = builder.variable(&[1, 7], &[8, 3], always).unwrap();
        builder.edge(a, b, &[0, 0, 0, FORBIDDEN]).unwrap();
        builder.usage_limit(limit).unwrap();
        builder.build().unwrap()
    }

    #[test]
    fn the_cheapest_assignment_that_fits_is_found() {
        let solve = |limit| Brute.solve(&pair(limit), &Control::new());
        assert_eq!((solve(16).cost, solve(16).choice), (Some(2), Some(vec![0, 0])));
        assert_eq!((solve(10).cost, solve(10).choice), (Some(6), Some(vec![1, 0])));
        assert!(solve(10).proved_optimal());
    }

    #[test]
    fn infeasibility_is_proved_and_the_least_overflow_reported() {
        let outcome = Brute.solve(&pair(9), &Control::new());
        assert_eq!(outcome.stop_reason, StopReason::Infeasible);
        assert_eq!(outcome.least_overflow, Some((1, vec![1, 0])));
    }

    #[test]
    fn too_many_assignments_are_refused() {
        let mut builder = NetworkBuilder::new();
        for _ in 0..100 {
            builder.variable(&[0; 1000], &[], Interval::default()).unwrap();
        }
        let outcome = Brute.solve(&builder.build().unwrap(), &Control::new());
        assert!(matches!(outcome.stop_reason, StopReason::Refused(_)));
    }

    #[test]
    fn the_empty_network_costs_nothing() {
        let outcome = Brute.solve(&NetworkBuilder::new().build().unwrap(), &Control::new());
        assert_eq!((outcome.cost, outcome.choice), (Some(0), Some(vec![])));
    }
}
