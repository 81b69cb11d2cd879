//! The limits of a search and its clock.
//!
//! A [`Control`] says when to stop and carries the listener for improvements. The search reads time only through the
//! control's [`Clock`], and time only decides when to stop. With an iteration limit and no deadline, a run therefore
//! repeats to the bit on any number of threads.

use crate::outcome::{Progress, StopReason, gap};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A source of time. The crates of the planner read no clock themselves: the program that calls them provides one.
pub trait Clock: Sync {
    /// Time since the clock's origin. It never decreases.
    fn now(&self) -> Duration;
}

/// A clock that stands still at zero: every elapsed time is zero, and only a deadline of zero ever passes.
#[derive(Clone, Copy, Debug, Default)]
pub struct FrozenClock;

impl Clock for FrozenClock {
    fn now(&self) -> Duration {
        Duration::ZERO
    }
}

/// Limits and listeners of one search.
#[derive(Clone)]
pub struct Control<'a> {
    /// The clock that `start` and `deadline` are readings of.
    pub clock: &'a dyn Clock,
    /// When the search began; elapsed times in logs count from here.
    pub start: Duration,
    /// When to stop.
    pub deadline: Option<Duration>,
    /// Stop as soon as this turns true (say, on Ctrl-C).
    pub cancel: Option<&'a AtomicBool>,
    /// Stop after this number of iterations of the solver's main loop.
    pub iterations: Option<u64>,
    /// Seed of all random numbers.
    pub seed: u64,
    /// Number of threads; zero means one per core. Never changes the result of an iteration.
    pub threads: usize,
    /// Approximate upper limit of the bytes that a solver's tables take at once.
    pub memory_bytes: u64,
    /// Called on every improvement of incumbent or bound.
    pub progress: Option<&'a (dyn Fn(&Progress<'_>) + Sync)>,
    /// The search ends once the incumbent's gap is at most this; at zero it goes on to a proof.
    pub gap: f64,
    /// Called after every iteration with the incumbent's cost and the bound; the search ends when it returns true.
    pub enough: Option<&'a Enough>,
}

/// Decides from the incumbent's cost, if there is one, and the lower bound whether a search may end.
pub type Enough = dyn Fn(Option<i64>, i64) -> bool + Sync;

impl Default for Control<'_> {
    fn default() -> Self {
        Control {
            clock: &FrozenClock,
            start: Duration::ZERO,
            deadline: None,
            cancel: None,
            iterations: None,
            seed: 0,
            threads: 0,
            memory_bytes: 2 << 30,
            progress: None,
            gap: 0.0,
            enough: None,
        }
    }
}

impl<'a> Control<'a> {
    /// No limits and a [`FrozenClock`]: the search ends when it has a proof.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same control with another iteration limit, to a proof and with no listener, for one part of the search. The
    /// deadline of the whole search still holds.
    #[must_use]
    pub fn part(&self, iterations: u64) -> Self {
        Control { iterations: Some(iterations), gap: 0.0, progress: None, ..self.clone() }
    }

    /// The same control with `1 / parts` of the remaining time.
    #[must_use]
    pub fn share(&self, parts: u32) -> Self {
        self.sooner(|left| left - left / parts.max(1))
    }

    /// The same control with `1 - 1 / parts` of the remaining time.
    #[must_use]
    pub fn all_but(&self, parts: u32) -> Self {
        self.sooner(|left| left / parts.max(1))
    }

    /// The same control with a deadline that is sooner by a function of the remaining time.
    fn sooner(&self, by: impl Fn(Duration) -> Duration) -> Self {
        let now = self.clock.now();
        let deadline = self.deadline.map(|deadline| {
            let cut = by(deadline.saturating_sub(now));
            debug_assert!(cut <= deadline, "the remaining time is part of the deadline");
            deadline.saturating_sub(cut)
        });
        Control { deadline, ..self.clone() }
    }

    /// Starts now, by `clock`, and stops `limit` later.
    #[must_use]
    pub fn time_limit(self, clock: &'a dyn Clock, limit: Duration) -> Self {
        let start = clock.now();
        // A sum that does not fit is later than any reading of the clock: no deadline.
        Control { clock, start, deadline: start.checked_add(limit), ..self }
    }

    /// Stops after this number of iterations.
    #[must_use]
    pub fn iteration_limit(mut self, iterations: u64) -> Self {
        self.iterations = Some(iterations);
        self
    }

    /// Calls `listener` on every improvement.
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
        } else if self.deadline.is_some_and(|deadline| self.clock.now() >= deadline) {
            Some(StopReason::Deadline)
        } else {
            None
        }
    }

    /// Why a stage without iterations must stop now, if it must: the time is up, or the user cancelled.
    pub fn stop_by_time(&self) -> Option<StopReason> {
        Control { iterations: None, ..self.clone() }.stop(0)
    }

    /// Whether the time is up, or the user cancelled.
    pub fn is_over(&self) -> bool {
        self.stop_by_time().is_some()
    }

    /// Whether a cost is so near its lower bound that the search may end.
    pub fn is_near(&self, cost: i64, bound: i64) -> bool {
        gap(cost, bound).is_some_and(|gap| gap <= self.gap)
    }

    /// Time since the start.
    pub fn elapsed(&self) -> Duration {
        self.clock.now().saturating_sub(self.start)
    }

    /// Time left until the deadline; `None` without one.
    pub fn remaining(&self) -> Option<Duration> {
        self.deadline.map(|deadline| deadline.saturating_sub(self.clock.now()))
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    /// A clock that a test sets, in seconds.
    struct SetClock(AtomicU64);

    impl Clock for SetClock {
        fn now(&self) -> Duration {
            Duration::from_secs(self.0.load(Ordering::Relaxed))
        }
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
        let c = Control::new().time_limit(&FrozenClock, Duration::ZERO);
        assert_eq!(c.stop(0), Some(StopReason::Deadline));
    }

    #[test]
    fn a_cost_is_near_its_bound_up_to_the_gap_asked_for() {
        let asked = |gap| Control { gap, ..Control::new() };
        assert!(asked(0.25).is_near(5, 4) && !asked(0.25).is_near(6, 4) && !asked(0.2).is_near(5, 4));
        assert!(asked(0.0).is_near(4, 4) && !asked(0.0).is_near(5, 4), "without a gap only a proof counts");
        assert!(!asked(9.0).is_near(5, 0), "a bound of zero says nothing");
        let control = asked(0.25);
        assert_eq!(control.part(3).gap, 0.0, "parts of a search go on to a proof");
        let mut recorder = crate::outcome::Recorder::new(&control);
        recorder.raise(4, 0, "x");
        assert!(!recorder.enough());
        recorder.offer(6, &[0], 1, "x");
        assert!(!recorder.enough());
        recorder.offer(5, &[1], 2, "x");
        assert!(recorder.enough());
    }

    #[test]
    fn deadlines_and_shares_follow_the_clock() {
        let clock = SetClock(AtomicU64::new(100));
        let whole = Control::new().time_limit(&clock, Duration::from_secs(40));
        let seconds = |control: &Control<'_>| control.remaining().map(|left| left.as_secs());
        assert_eq!((seconds(&whole), whole.elapsed().as_secs()), (Some(40), 0));
        clock.0.store(120, Ordering::Relaxed);
        assert_eq!((seconds(&whole), whole.elapsed().as_secs()), (Some(20), 20));
        assert_eq!((seconds(&whole.share(4)), seconds(&whole.all_but(4))), (Some(5), Some(15)));
        assert_eq!(whole.stop(0), None);
        clock.0.store(125, Ordering::Relaxed);
        assert_eq!(whole.share(1).stop(0), None);
        clock.0.store(141, Ordering::Relaxed);
        assert_eq!((whole.stop(0), seconds(&whole)), (Some(StopReason::Deadline), Some(0)));
        assert_eq!(whole.share(4).stop(0), Some(StopReason::Deadline));
        assert_eq!(seconds(&Control::new().share(4)), None);
    }
}
