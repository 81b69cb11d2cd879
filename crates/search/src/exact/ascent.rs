//! Drives the lower bound: the number of passes, the step sizes of the multipliers, and when to stop.

use super::core::Core;
use super::dual::Dual;
use super::search::Stop;

/// Step sizes and stopping rules of an ascent.
#[derive(Clone, Copy, Debug)]
pub struct AscentSchedule {
    /// Passes before the first step of the multipliers. Without prices the messages converge quickly, and if no row
    /// binds they suffice.
    pub warm_up: u64,
    /// Iterations without improvement before the steps shrink.
    pub patience: u32,
    /// Initial step size, as a share of Polyak's.
    pub first_scale: f64,
    /// Step size at which to stop.
    pub last_scale: f64,
    /// Iterations between steps of the multipliers. The messages follow a change of prices slowly, and a subgradient
    /// taken too early points in a wrong direction.
    pub step_every: u64,
    /// Weight of the previous direction in each step.
    pub keep: f64,
    /// If the bound falls below the best by this multiple of the gap, the ascent restarts from the best.
    pub crash: f64,
    /// Growth of the steps after each improvement.
    pub grow: f64,
}

impl AscentSchedule {
    /// From scratch, to convergence.
    pub const FULL: AscentSchedule = AscentSchedule {
        warm_up: 20,
        patience: 20,
        first_scale: 0.3,
        last_scale: 1e-6,
        step_every: 2,
        keep: 0.5,
        crash: 2.0,
        grow: 1.05,
    };
    /// From a good start, to convergence.
    pub const RESUME: AscentSchedule = AscentSchedule {
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
    pub const BRIEF: AscentSchedule = AscentSchedule {
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

/// The ascent of a lower bound.
#[derive(Clone, Debug)]
pub struct Ascent {
    dual: Dual,
    best: Dual,
    schedule: AscentSchedule,
    scale: f64,
    stalled: u32,
    iteration: u64,
    /// Whether further passes would gain too little.
    pub finished: bool,
    pass_work: u64,
}

impl Ascent {
    /// Starts from given messages.
    pub fn new(core: &Core, dual: Dual, schedule: AscentSchedule) -> Self {
        let cells: usize = core.pairs.iter().map(|p| core.size(p.u) * core.size(p.v)).sum();
        let pass_work = (cells + core.value_count() * 4 + core.slack.len()) as u64;
        let best = dual.clone();
        let scale = schedule.first_scale;
        Ascent { dual, best, schedule, scale, stalled: 0, iteration: 0, finished: false, pass_work }
    }

    /// Continues on another core with these messages. An unfinished ascent keeps its step size.
    pub fn resume(&self, old_core: &Core, core: &Core, mut schedule: AscentSchedule) -> Self {
        if !self.finished {
            schedule.first_scale = schedule.first_scale.max(self.scale);
        }
        Ascent::new(core, Dual::transfer(&self.best, old_core, core), schedule)
    }

    /// The best messages and multipliers so far.
    pub fn best(&self) -> &Dual {
        &self.best
    }

    /// The latest messages and multipliers.
    pub fn newest(&self) -> &Dual {
        &self.dual
    }

    /// Runs passes for about `work` steps. `target` is the incumbent's cost, if known. Returns the work done.
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
            // Negligible progress counts as none.
            if self.dual.bound > before + 1e-4 * gap + 1e-9 {
                self.stalled = 0;
                self.scale = (self.scale * self.schedule.grow).min(self.schedule.first_scale);
            } else if self.dual.bound < best - self.schedule.crash * gap
                && self.iteration > self.schedule.warm_up
            {
                self.dual.clone_from(&self.best);
                self.shrink();
            } else {
                self.stalled += 1;
                if self.stalled > self.schedule.patience {
                    self.shrink();
                }
            }
            let reached = target.is_some_and(|t| best > t as f64 - 0.5);
            if reached || self.scale < self.schedule.last_scale {
                self.finished = true;
            }
            if self.iteration >= self.schedule.warm_up
                && self.iteration.is_multiple_of(self.schedule.step_every)
            {
                let moved = self.dual.step(core, self.scale * gap, self.schedule.keep);
                if !moved && self.stalled > self.schedule.patience / 2 {
                    // No row binds and the messages have converged.
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
