//! The rounds of the search. In each round the lower bound rises and several islands search in parallel, each for a
//! fixed amount of work. Then their results are combined in a fixed order. The results of a round never depend on time
//! or on the number of threads.
//!
//! When bound and incumbent prove enough values useless, these are removed and the search continues. When the bound no
//! longer rises and the remaining model is small, branch and bound replaces it.

use super::ascent::AscentSchedule;
use super::branch::Branch;
use super::crossover::crossover;
use super::eliminate::Elimination;
use super::island::Island;
use super::model::{INF, Model};
use super::state::State;
use super::subproblem::Subproblem;
use crate::control::Control;
use crate::outcome::{Recorder, StopReason};
use rayon::prelude::*;

/// Number of islands.
const ISLANDS: usize = 3;
/// The most work of a round, in elementary steps.
const MOST_WORK: u64 = 60_000_000;
/// Rounds over which an island cools down.
const CYCLE: u64 = 12;
/// Initial temperatures of an island's cycles, relative to the gap per variable. As the gap closes, a step out of a
/// local optimum costs a larger share of it, so some cycles begin much warmer.
const HEAT: [f64; 5] = [1.0, 3.0, 10.0, 30.0, 100.0];
/// Rounds between attempts to narrow.
const NARROW_EVERY: u64 = 8;
/// The least share of useless values for which the model is narrowed.
const NARROW_SHARE: f64 = 0.05;
/// The largest model, in values, on which branch and bound is tried.
const BRANCH_VALUES: usize = 5000;

/// Publishes an assignment given as labels of the model.
pub type Publish<'p> = dyn Fn(&[u32], &mut Recorder<'_, '_>, u64, &str) + 'p;

/// Reports an assignment, as labels of the model, that is not forbidden but does not fit.
pub type Overfull<'p> = dyn Fn(&[u32], &mut Recorder<'_, '_>) + 'p;

/// Called often: whether the deadline passed or the caller cancelled.
pub type Stop<'s> = &'s (dyn Fn() -> bool + Sync);

/// The search over one model.
pub struct Search {
    subproblem: Subproblem,
    islands: Vec<Island>,
    best: Option<State>,
    /// The tree, once begun, and the live variables at its start.
    tree: Option<(Branch, Vec<u32>)>,
    /// Whether the subproblem was already narrowed with its final bound.
    settled: bool,
    round: u64,
    seed: u64,
    /// The number of values for which the elimination was prepared, and the elimination, if possible.
    elimination: Option<(usize, Option<Elimination>)>,
}

impl Search {
    /// Prepares a search over a reduced model.
    pub fn new(model: Model, seed: u64) -> Self {
        let subproblem = Subproblem::new(model);
        let islands = islands(&subproblem, seed);
        Search {
            subproblem,
            islands,
            best: None,
            tree: None,
            settled: false,
            round: 0,
            seed,
            elimination: None,
        }
    }

    /// Runs rounds until a proof or a stop.
    pub fn run(
        &mut self,
        control: &Control<'_>,
        recorder: &mut Recorder<'_, '_>,
        publish: &Publish<'_>,
        overfull: &Overfull<'_>,
    ) -> StopReason {
        loop {
            if self.subproblem.core.variables() == 0 {
                publish(&self.subproblem.lift(&[]), recorder, self.round, "reductions");
                recorder.raise(self.subproblem.core.constant, self.round, "reductions");
                return StopReason::Optimal;
            }
            if let Some(reason) = control.stop(self.round) {
                return reason;
            }
            if let Some(reason) = self.eliminate(control, recorder, publish) {
                return reason;
            }
            self.round += 1;
            self.prepare(recorder.bound());
            self.work(recorder.cost(), control);
            self.collect();
            if let Some(best) = &self.best
                && recorder.cost().is_none_or(|c| best.cost < c)
            {
                publish(&self.subproblem.lift(&best.x), recorder, self.round, "search");
            }
            if recorder.cost().is_none() {
                self.report_overflow(recorder, overfull);
            }
            if let Some(reason) = self.prove(recorder, publish) {
                return reason;
            }
            if recorder.closed() {
                return StopReason::Optimal;
            }
            if recorder.enough() {
                return StopReason::Enough;
            }
        }
    }

    /// Solves the subproblem by elimination, if that is possible and affordable in this round.
    fn eliminate(
        &mut self,
        control: &Control<'_>,
        recorder: &mut Recorder<'_, '_>,
        publish: &Publish<'_>,
    ) -> Option<StopReason> {
        let values = self.subproblem.core.value_count();
        if self.elimination.as_ref().is_none_or(|e| e.0 != values) {
            self.elimination = Some((values, Elimination::of(&self.subproblem.core, control)));
        }
        let due = self.elimination.as_ref()?.1.as_ref().filter(|e| e.due(self.round))?;
        let (cost, x) = due.run(control)?;
        if cost < INF {
            publish(&self.subproblem.lift(&x), recorder, self.round, "elimination");
            // The network evaluates the assignment again; if it disagrees, nothing is proved.
            recorder.cost().filter(|&found| found <= cost)?;
        }
        // Removed values cost more than the incumbent, so the incumbent is optimal.
        Some(self.proved(recorder))
    }

    /// Work of this round: little at first, so that easy networks finish quickly.
    fn budget(&self) -> u64 {
        let core = &self.subproblem.core;
        let cells: usize = core.pairs.iter().map(|p| core.size(p.u) * core.size(p.v)).sum();
        let pass = (cells + core.value_count() + core.slack.len()) as u64;
        (pass * 20).saturating_mul(1 << self.round.min(20)).min(MOST_WORK)
    }

    /// Runs one round of bound and islands.
    fn work(&mut self, target: Option<i64>, control: &Control<'_>) {
        let stop = || control.stop(0).is_some_and(|r| r != StopReason::IterationLimit);
        let work = self.budget();
        let lambda = self.subproblem.ascent.best().lambda.clone();
        let Subproblem { core, ascent, .. } = &mut self.subproblem;
        let (core, islands, tree) = (&*core, &mut self.islands, &mut self.tree);
        rayon::join(
            || match tree {
                Some((tree, _)) => {
                    tree.limit = target.map_or(tree.limit, |t| tree.limit.min(t));
                    tree.advance(work, &stop);
                }
                None => {
                    ascent.advance(core, work, target, &stop);
                }
            },
            || islands.par_iter_mut().for_each(|i| i.advance(core, work, &lambda, &stop)),
        );
    }

    /// Sets the start and temperature of each island for the round.
    fn prepare(&mut self, bound: i64) {
        let core = &self.subproblem.core;
        let n = f64::from(core.variables().max(1));
        let decoding = !self.subproblem.ascent.finished;
        for (k, island) in self.islands.iter_mut().enumerate() {
            let clock = self.round + k as u64 * CYCLE / ISLANDS as u64;
            let phase = clock % CYCLE;
            match &self.best {
                // The last island follows the messages as long as they change.
                Some(best) if !decoding || k + 1 < ISLANDS => {
                    if phase == 0 {
                        island.state.clone_from(best);
                    }
                    // While the bound is weak, one percent is a fair estimate of the gap.
                    let gap = (best.cost - bound).max(0).min(best.cost / 100) as f64 / n;
                    let cool = 1.0 - (phase + 1) as f64 / CYCLE as f64;
                    island.temperature = gap * HEAT[(clock / CYCLE) as usize % HEAT.len()] * cool;
                }
                _ => {
                    let ascent = &self.subproblem.ascent;
                    let dual = if k % 2 == 1 { ascent.best() } else { ascent.newest() };
                    island.temperature = 0.0;
                    island.best = None;
                    island.restart(core, dual.decode(core));
                }
            }
        }
    }

    /// Combines the islands' results.
    fn collect(&mut self) {
        let core = &self.subproblem.core;
        for island in &self.islands {
            let Some(found) = &island.best else { continue };
            match &mut self.best {
                None => self.best = Some(found.clone()),
                Some(best) => {
                    if found.cost < best.cost {
                        let old = std::mem::replace(best, found.clone());
                        crossover(core, best, &old);
                    } else {
                        crossover(core, best, found);
                    }
                }
            }
        }
    }

    /// Reports the islands' overflows while no assignment fits.
    fn report_overflow(&self, recorder: &mut Recorder<'_, '_>, overfull: &Overfull<'_>) {
        for island in self.islands.iter().filter(|i| i.state.forbidden == 0) {
            overfull(&self.subproblem.lift(&island.state.x), recorder);
        }
    }

    /// Raises the bound, narrows the model, starts and continues the tree. Returns the reason if the search ends.
    fn prove(&mut self, recorder: &mut Recorder<'_, '_>, publish: &Publish<'_>) -> Option<StopReason> {
        if let Some((tree, live)) = &mut self.tree {
            if let Some((_, labels)) = tree.found.take() {
                let all = self.subproblem.lift_compact(live, &labels);
                publish(&all, recorder, self.round, "branching");
                let state = State::new(&self.subproblem.core, self.subproblem.core.with_labels(&all));
                if self.best.as_ref().is_none_or(|b| state.cost < b.cost) {
                    self.best = Some(state);
                }
            }
            if tree.done() {
                return Some(self.proved(recorder));
            }
            recorder.raise(tree.bound(), self.round, "branching");
            return None;
        }
        let finished = self.subproblem.ascent.finished;
        let due = (finished && !self.settled) || self.round.is_multiple_of(NARROW_EVERY);
        if !due {
            if self.subproblem.ascent.best().bound > recorder.bound() as f64 + 0.01 {
                recorder.raise(
                    self.subproblem.ascent.best().certify(&self.subproblem.core),
                    self.round,
                    "messages",
                );
            }
            return None;
        }
        let (bound, values) = self.subproblem.ascent.best().certify_values(&self.subproblem.core);
        recorder.raise(bound, self.round, "messages");
        let limit = recorder.cost().unwrap_or(INF - 1);
        let share = if finished { NARROW_SHARE / 3.0 } else { NARROW_SHARE };
        match self.subproblem.narrow(&values, limit, share, AscentSchedule::RESUME) {
            Err(_) => return Some(self.proved(recorder)),
            Ok(true) => {
                self.settled = false;
                self.restart_islands(recorder);
            }
            Ok(false) if finished => self.settled = true,
            Ok(false) => {}
        }
        if self.settled && self.subproblem.core.value_count() <= BRANCH_VALUES {
            let tree = Branch::new(self.subproblem.model.compact(), limit, recorder.bound(), self.seed);
            self.tree = Some((tree, self.subproblem.model.live()));
        }
        None
    }

    /// The outcome when no better assignment is left.
    fn proved(&self, recorder: &mut Recorder<'_, '_>) -> StopReason {
        match recorder.cost() {
            Some(cost) => {
                recorder.raise(cost, self.round, "proof");
                StopReason::Optimal
            }
            None => StopReason::Infeasible,
        }
    }

    /// Restarts the islands and the incumbent on a narrowed subproblem.
    fn restart_islands(&mut self, recorder: &Recorder<'_, '_>) {
        let core = &self.subproblem.core;
        self.best = None;
        self.islands = islands(&self.subproblem, self.seed ^ (self.round << 16));
        if let Some(choice) = recorder.choice() {
            let state = State::new(core, core.with_labels(choice));
            for island in &mut self.islands {
                island.state.clone_from(&state);
            }
            if state.feasible(core) {
                self.best = Some(state);
            }
        }
    }
}

fn islands(subproblem: &Subproblem, seed: u64) -> Vec<Island> {
    let start = vec![0; subproblem.core.variables() as usize];
    (0..ISLANDS as u64).map(|k| Island::new(&subproblem.core, start.clone(), seed ^ (k << 32))).collect()
}
