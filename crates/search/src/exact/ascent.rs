//! Drives the lower bound: how many passes, how large the steps of the multipliers, when to stop.

use super::core::Core;
use super::dual::Dual;
use super::search::Stop;

/// How patient an ascent is.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Passes before the first step of the multipliers: without prices the messages settle quickly, and
    /// where no row binds they may be all that is needed.
    pub warm_up: u64,
    /// Iterations without improvement before the steps shrink.
    pub patience: u32,
    /// Length of the first steps, as a share of Polyak's.
    pub first_scale: f64,
    /// Length at which to stop.
    pub last_scale: f64,
    /// Iterations between steps of the multipliers: the messages follow a change of prices only slowly,
    /// and a subgradient taken too early points elsewhere.
    pub step_every: u64,
    /// How much of the last direction each step keeps.
    pub keep: f64,
    /// A bound that falls below the best by this many times the gap is given up for the best.
    pub crash: f64,
    /// Growth of the steps after each improvement.
    pub grow: f64,
}

impl Pace {
    /// From nothing, to the end.
    pub const FULL: Pace = Pace {
        warm_up: 20,
        patience: 20,
        first_scale: 0.3,
        last_scale: 1e-6,
        step_every: 2,
        keep: 0.5,
        crash: 2.0,
        grow: 1.05,
    };
    /// From a good start, to the end.
    pub const RESUME: Pace = Pace {
        warm_up: 3,
        patience: 15,
        first_scale: 0.05,
        last_scale: 1e-6,
        step_every: 2,
        keep: 0.5,
        crash: 2.0,
        grow: 1.05,
    };
    /// From a good start, briefly.
    pub const BRIEF: Pace = Pace {
        warm_up: 2,
        patience: 3,
        first_scale: 0.1,
        last_scale: 5e-3,
        step_every: 1,
        keep: 0.7,
        crash: 2.0,
        grow: 1.0,
    };
}

/// A lower bound on the rise.
#[derive(Clone, Debug)]
pub struct Ascent {
    dual: Dual,
    best: Dual,
    pace: Pace,
    scale: f64,
    stalled: u32,
    iteration: u64,
    /// Whether further passes are not worth their time.
    pub finished: bool,
    pass_work: u64,
}

impl Ascent {
    /// Starts from given messages.
    pub fn new(core: &Core, dual: Dual, pace: Pace) -> Self {
        let cells: usize = core.pairs.iter().map(|p| core.size(p.u) * core.size(p.v)).sum();
        let pass_work = (cells + core.value_count() * 4 + core.slack.len()) as u64;
        let best = dual.clone();
        let scale = pace.first_scale;
        Ascent { dual, best, pace, scale, stalled: 0, iteration: 0, finished: false, pass_work }
    }

    /// Goes on with the messages of another core, at `pace`; one that was not finished keeps its steps.
    pub fn resume(&self, old_core: &Core, core: &Core, mut pace: Pace) -> Self {
        if !self.finished {
            pace.first_scale = pace.first_scale.max(self.scale);
        }
        Ascent::new(core, Dual::transfer(&self.best, old_core, core), pace)
    }

    /// The best messages and multipliers so far.
    pub fn best(&self) -> &Dual {
        &self.best
    }

    /// The newest ones.
    pub fn newest(&self) -> &Dual {
        &self.dual
    }

    /// About `work` steps of passes; `target` is the cost to aim at, if known. Returns the work done.
    pub fn advance(&mut self, core: &Core, work: u64, target: Option<i64>, stop: Stop<'_>) -> u64 {
        let mut done = 0;
        while !self.finished && (done == 0 || (done < work && !stop())) {
            self.dual.pass(core, true);
            self.dual.pass(core, false);
            done += 2 * self.pass_work;
            self.iteration += 1;
            let before = self.best.bound;
            if self.dual.bound > before {
                self.best.clone_from(&self.dual);
            }
            let best = self.best.bound;
            let gap = target.map_or(0.05 * best.abs() + 1.0, |t| (t as f64 - best).max(0.0));
            // Progress too small to matter counts as none.
            if self.dual.bound > before + 1e-4 * gap + 1e-9 {
                self.stalled = 0;
                self.scale = (self.scale * self.pace.grow).min(self.pace.first_scale);
            } else if self.dual.bound < best - self.pace.crash * gap && self.iteration > self.pace.warm_up {
                self.dual.clone_from(&self.best);
                self.shrink();
            } else {
                self.stalled += 1;
                if self.stalled > self.pace.patience {
                    self.shrink();
                }
            }
            let reached = target.is_some_and(|t| best > t as f64 - 0.5);
            if reached || self.scale < self.pace.last_scale {
                self.finished = true;
            }
            if self.iteration >= self.pace.warm_up && self.iteration.is_multiple_of(self.pace.step_every) {
                let moved = self.dual.step(core, self.scale * gap, self.pace.keep);
                if !moved && self.stalled > self.pace.patience / 2 {
                    // No row binds and the messages have settled.
                    self.finished = true;
                }
            }
        }
        done
    }

    fn shrink(&mut self) {
        self.stalled = 0;
        self.scale *= 0.7;
    }
}
