//! What every solver is given and what it returns.
//!
//! A [`Control`] says when to stop and whom to tell; an [`Outcome`] holds the incumbent, the lower bound,
//! why the search stopped and a log of the improvements. Nothing here searches. Time only ever decides
//! when to stop: with an iteration limit and no deadline, a run is repeatable to the bit on any number of
//! threads.

use crate::network::Network;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A search algorithm.
pub trait Solver {
    /// The name by which users choose it.
    fn name(&self) -> &'static str;

    /// Searches until proved, stopped or out of ideas; always returns what is known.
    fn solve(&self, network: &Network, control: &Control<'_>) -> Outcome;
}

/// Limits and listeners of one search.
#[derive(Clone)]
pub struct Control<'a> {
    /// When the search began; elapsed times in logs count from here.
    pub start: Instant,
    /// When to stop.
    pub deadline: Option<Instant>,
    /// Stop as soon as this turns true (say, on Ctrl-C).
    pub cancel: Option<&'a AtomicBool>,
    /// Stop after this many iterations of the solver's main loop.
    pub iterations: Option<u64>,
    /// Seed of all randomness.
    pub seed: u64,
    /// How many threads to use; zero means all there are. Never changes the result of an iteration.
    pub threads: usize,
    /// About how many bytes of tables a solver may hold at once.
    pub memory_bytes: u64,
    /// Told of every improvement of incumbent or bound.
    pub progress: Option<&'a (dyn Fn(&Progress<'_>) + Sync)>,
    /// Asked after every iteration, with the incumbent's cost and the bound, whether that is enough.
    pub enough: Option<&'a Enough>,
}

/// Says of an incumbent's cost, if there is one, and a lower bound whether a search may end there.
pub type Enough = dyn Fn(Option<i64>, i64) -> bool + Sync;

impl Default for Control<'_> {
    fn default() -> Self {
        Control {
            start: Instant::now(),
            deadline: None,
            cancel: None,
            iterations: None,
            seed: 0,
            threads: 0,
            memory_bytes: 2 << 30,
            progress: None,
            enough: None,
        }
    }
}

impl<'a> Control<'a> {
    /// No limits at all: until proved.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same with other limits, for a part of the search that must not run longer than the whole.
    #[must_use]
    pub fn part(&self, iterations: u64) -> Self {
        Control { iterations: Some(iterations), progress: None, ..self.clone() }
    }

    /// The same with one part in so many of the time that is left.
    #[must_use]
    pub fn share(&self, parts: u32) -> Self {
        let less = self.remaining().map(|left| left - left / parts.max(1));
        self.sooner(less.unwrap_or_default())
    }

    /// The same with all but one part in so many of the time that is left.
    #[must_use]
    pub fn all_but(&self, parts: u32) -> Self {
        self.sooner(self.remaining().unwrap_or_default() / parts.max(1))
    }

    fn sooner(&self, by: Duration) -> Self {
        Control { deadline: self.deadline.map(|d| d.checked_sub(by).unwrap_or(d)), ..self.clone() }
    }

    /// Stops this long after now.
    #[must_use]
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.deadline = self.start.checked_add(limit);
        self
    }

    /// Stops after so many iterations.
    #[must_use]
    pub fn iteration_limit(mut self, iterations: u64) -> Self {
        self.iterations = Some(iterations);
        self
    }

    /// Tells `listener` of every improvement.
    #[must_use]
    pub fn listen(mut self, listener: &'a (dyn Fn(&Progress<'_>) + Sync)) -> Self {
        self.progress = Some(listener);
        self
    }

    /// Why the search must stop now, if it must; `iteration` is the number of iterations done.
    pub fn stop(&self, iteration: u64) -> Option<StopReason> {
        if self.cancel.is_some_and(|c| c.load(Ordering::Relaxed)) {
            Some(StopReason::Cancelled)
        } else if self.iterations.is_some_and(|limit| iteration >= limit) {
            Some(StopReason::IterationLimit)
        } else if self.deadline.is_some_and(|d| Instant::now() >= d) {
            Some(StopReason::Deadline)
        } else {
            None
        }
    }

    /// Time since the start.
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Time left until the deadline; `None` without one.
    pub fn remaining(&self) -> Option<Duration> {
        self.deadline.map(|d| d.saturating_duration_since(Instant::now()))
    }
}

impl fmt::Debug for Control<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Control")
            .field("deadline", &self.deadline)
            .field("iterations", &self.iterations)
            .field("seed", &self.seed)
            .field("threads", &self.threads)
            .finish_non_exhaustive()
    }
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
    /// The caller said that cost and bound are enough.
    Enough,
    /// The solver has nothing left to try, without a proof.
    Exhausted,
    /// The solver does not do this kind or size of network; the text says why and what to use instead.
    Refused(String),
}

/// One improvement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// Time since the start.
    pub elapsed: Duration,
    /// Iterations done by then.
    pub iteration: u64,
    /// The incumbent's cost, if there is one.
    pub best: Option<i64>,
    /// The lower bound.
    pub bound: i64,
}

/// What a listener is told.
#[derive(Clone, Debug)]
pub struct Progress<'a> {
    /// The state after the improvement.
    pub entry: LogEntry,
    /// What found it, in a word or two.
    pub source: &'a str,
}

/// What a search found.
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
    /// Without a feasible assignment: the one with the least overflow found, and that overflow.
    pub least_overflow: Option<(i64, Vec<u32>)>,
    /// Every improvement, in order.
    pub log: Vec<LogEntry>,
}

impl Outcome {
    /// An outcome that knows nothing yet.
    pub fn empty(stop_reason: StopReason) -> Self {
        Outcome { choice: None, cost: None, bound: 0, stop_reason, least_overflow: None, log: Vec::new() }
    }

    /// Whether the incumbent is proved optimal.
    pub fn proved_optimal(&self) -> bool {
        self.cost.is_some_and(|c| c <= self.bound)
    }

    /// How far the incumbent may be above the optimum, relative to the incumbent; zero when proved.
    pub fn gap(&self) -> Option<f64> {
        let cost = self.cost?;
        if cost <= self.bound { Some(0.0) } else { Some((cost - self.bound) as f64 / cost as f64) }
    }
}

/// Keeps the incumbent, the bound and the log, and tells the listener.
#[derive(Debug)]
pub struct Recorder<'c, 'a> {
    control: &'c Control<'a>,
    outcome: Outcome,
}

impl<'c, 'a> Recorder<'c, 'a> {
    /// A fresh record.
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

    /// Whether the caller wants no more than incumbent and bound are.
    pub fn enough(&self) -> bool {
        self.control.enough.is_some_and(|enough| enough(self.cost(), self.bound()))
    }

    /// Whether the incumbent meets the bound.
    pub fn closed(&self) -> bool {
        self.outcome.proved_optimal()
    }

    /// Offers a feasible assignment; kept and told if it is better. Returns whether it was.
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

    /// Offers a lower bound; kept and told if it is higher.
    pub fn raise(&mut self, bound: i64, iteration: u64, source: &str) {
        // A bound above the incumbent says no more than that the incumbent is optimal.
        let bound = self.outcome.cost.map_or(bound, |c| bound.min(c));
        if bound > self.outcome.bound {
            self.outcome.bound = bound;
            self.log(iteration, source);
        }
    }

    /// Offers an assignment that overflows; kept while there is no feasible one.
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

    /// Ends the search. Where the incumbent meets the bound, the reason is that it is optimal.
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
    fn control_stops_on_iterations_cancel_and_deadline() {
        let flag = AtomicBool::new(false);
        let mut c = Control::new().iteration_limit(5);
        c.cancel = Some(&flag);
        assert_eq!(c.stop(4), None);
        assert_eq!(c.stop(5), Some(StopReason::IterationLimit));
        flag.store(true, Ordering::Relaxed);
        assert_eq!(c.stop(0), Some(StopReason::Cancelled));
        let c = Control::new().time_limit(Duration::ZERO);
        assert_eq!(c.stop(0), Some(StopReason::Deadline));
    }
}
