//! The interface of solvers and their results.
//!
//! An [`Outcome`] holds the incumbent, the lower bound, the reason for stopping and a log of the improvements. A
//! [`Recorder`] keeps them during a search. Nothing here searches; limits are in [`crate::control`].

use crate::control::Control;
use crate::network::Network;
use std::time::Duration;

/// A search algorithm.
pub trait Solver {
    /// The name by which users choose it.
    fn name(&self) -> &'static str;

    /// Searches until it has a proof, must stop or has nothing left to try. Always returns the best result so far.
    fn solve(&self, network: &Network, control: &Control<'_>) -> Outcome;
}

/// Why a search stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The incumbent is proved optimal: its cost equals the bound.
    Optimal,
    /// It is proved that no assignment is feasible.
    Infeasible,
    /// The deadline passed.
    Deadline,
    /// The caller cancelled.
    Cancelled,
    /// The iteration limit was reached.
    IterationLimit,
    /// The gap is at most [`Control::gap`], or [`Control::enough`] accepted cost and bound.
    Enough,
    /// The solver has nothing left to try, without a proof.
    Exhausted,
    /// The solver does not accept this kind or size of network. The text gives the reason and an alternative.
    Refused(String),
}

/// One improvement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// Time since the start.
    pub elapsed: Duration,
    /// Iterations done before it.
    pub iteration: u64,
    /// The incumbent's cost, if there is one.
    pub best: Option<i64>,
    /// The lower bound.
    pub bound: i64,
}

/// The message to a listener: one improvement and its source.
#[derive(Clone, Debug)]
pub struct Progress<'a> {
    /// The state after the improvement.
    pub entry: LogEntry,
    /// The part of the solver that found it, in a word or two.
    pub source: &'a str,
}

/// The result of a search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The best feasible assignment.
    pub choice: Option<Vec<u32>>,
    /// Its cost.
    pub cost: Option<i64>,
    /// No feasible assignment costs less than this.
    pub bound: i64,
    /// Why the search stopped.
    pub stop_reason: StopReason,
    /// Without a feasible assignment: the smallest overflow found, and its assignment.
    pub least_overflow: Option<(i64, Vec<u32>)>,
    /// Every improvement, in order.
    pub log: Vec<LogEntry>,
}

impl Outcome {
    /// An outcome with no incumbent and the trivial bound zero.
    pub fn empty(stop_reason: StopReason) -> Self {
        Outcome { choice: None, cost: None, bound: 0, stop_reason, least_overflow: None, log: Vec::new() }
    }

    /// Whether the incumbent is proved optimal.
    pub fn proved_optimal(&self) -> bool {
        self.cost.is_some_and(|c| c <= self.bound)
    }

    /// The incumbent's [`gap`]; `None` without an incumbent.
    pub fn gap(&self) -> Option<f64> {
        gap(self.cost?, self.bound)
    }
}

/// (cost - bound) / bound: how far the cost is above the optimum at most, relative to the bound. This is the only
/// meaning of gap. Zero where the bound proves the cost optimal; `None` where it is not above zero and says nothing.
pub fn gap(cost: i64, bound: i64) -> Option<f64> {
    match cost <= bound {
        true => Some(0.0),
        false => (bound > 0).then(|| (i128::from(cost) - i128::from(bound)) as f64 / bound as f64),
    }
}

/// Keeps the incumbent, the bound and the log, and calls the listener.
#[derive(Debug)]
pub struct Recorder<'c, 'a> {
    control: &'c Control<'a>,
    outcome: Outcome,
}

impl<'c, 'a> Recorder<'c, 'a> {
    /// An empty record.
    pub fn new(control: &'c Control<'a>) -> Self {
        Recorder { control, outcome: Outcome::empty(StopReason::Exhausted) }
    }

    /// The incumbent's cost.
    pub const fn cost(&self) -> Option<i64> {
        self.outcome.cost
    }

    /// The incumbent.
    pub fn choice(&self) -> Option<&[u32]> {
        self.outcome.choice.as_deref()
    }

    /// The lower bound.
    pub const fn bound(&self) -> i64 {
        self.outcome.bound
    }

    /// Whether the gap is small enough, or [`Control::enough`] accepts incumbent and bound.
    pub fn enough(&self) -> bool {
        let near = self.cost().is_some_and(|cost| self.control.is_near(cost, self.bound()));
        near || self.control.enough.is_some_and(|enough| enough(self.cost(), self.bound()))
    }

    /// Whether the incumbent meets the bound.
    pub fn closed(&self) -> bool {
        self.outcome.proved_optimal()
    }

    /// Offers a feasible assignment, which is kept and logged if it is better. Returns whether it was.
    pub fn offer(&mut self, cost: i64, choice: &[u32], iteration: u64, source: &str) -> bool {
        if self.outcome.cost.is_some_and(|c| c <= cost) {
            return false;
        }
        self.outcome.cost = Some(cost);
        self.outcome.choice = Some(choice.to_vec());
        self.outcome.least_overflow = None;
        self.log(iteration, source);
        true
    }

    /// Offers a lower bound, which is kept and logged if it is higher.
    pub fn raise(&mut self, bound: i64, iteration: u64, source: &str) {
        // A bound above the incumbent only proves that the incumbent is optimal.
        let bound = self.outcome.cost.map_or(bound, |c| bound.min(c));
        if bound > self.outcome.bound {
            self.outcome.bound = bound;
            self.log(iteration, source);
        }
    }

    /// Offers an assignment that exceeds the limits. The one with the least overflow is kept until a feasible one
    /// is found.
    pub fn offer_overflow(&mut self, overflow: i64, choice: &[u32]) {
        let better = self.outcome.least_overflow.as_ref().is_none_or(|(o, _)| overflow < *o);
        if self.outcome.choice.is_none() && better {
            self.outcome.least_overflow = Some((overflow, choice.to_vec()));
        }
    }

    fn log(&mut self, iteration: u64, source: &str) {
        let entry = LogEntry {
            elapsed: self.control.elapsed(),
            iteration,
            best: self.outcome.cost,
            bound: self.outcome.bound,
        };
        if let Some(listener) = self.control.progress {
            listener(&Progress { entry: entry.clone(), source });
        }
        self.outcome.log.push(entry);
    }

    /// Ends the search. If the incumbent meets the bound, the stop reason is `Optimal`.
    pub fn finish(mut self, reason: StopReason) -> Outcome {
        self.outcome.stop_reason = if self.closed() { StopReason::Optimal } else { reason };
        self.outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recorder_keeps_the_best_and_never_lets_the_bound_pass_it() {
        let control = Control::new();
        let mut r = Recorder::new(&control);
        r.raise(3, 0, "x");
        assert!(r.offer(9, &[0], 1, "x"));
        assert!(!r.offer(9, &[1], 2, "x"));
        assert!(r.offer(7, &[2], 3, "x"));
        r.raise(50, 4, "x");
        let out = r.finish(StopReason::Deadline);
        assert_eq!((out.cost, out.bound, &out.stop_reason), (Some(7), 7, &StopReason::Optimal));
        assert_eq!((out.log.len(), out.gap()), (4, Some(0.0)));
    }

    #[test]
    fn a_gap_is_relative_to_the_bound() {
        assert_eq!([gap(5, 4), gap(4, 4), gap(3, 4)], [Some(0.25), Some(0.0), Some(0.0)]);
        assert_eq!(
            [gap(5, 0), gap(0, 0), gap(5, -1)],
            [None, Some(0.0), None],
            "a bound of zero says nothing"
        );
        assert!(gap(i64::MAX, 1).is_some_and(f64::is_finite) && gap(i64::MAX, i64::MIN).is_none());
    }
}
