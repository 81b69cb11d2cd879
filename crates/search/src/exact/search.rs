//! The rounds of the search: in each, the lower bound rises and several islands search, side by side and
//! for a fixed amount of work; then what they found is put together in a fixed order. What happens in a
//! round never depends on time or on the number of threads.
//!
//! Whenever bound and incumbent prove enough values useless, the model is narrowed and the search goes on
//! in what is left. When the bound no longer rises, branch and bound takes its place, if the rest is small.

use super::ascent::Pace;
use super::branch::Branch;
use super::cross::cross;
use super::eliminate::Elimination;
use super::island::Island;
use super::model::{INF, Model};
use super::stage::Stage;
use super::state::State;
use crate::outcome::{Control, Recorder, StopReason};
use rayon::prelude::*;

/// How many islands search.
const ISLANDS: usize = 3;
/// Most work of a round, in elementary steps.
const MOST_WORK: u64 = 60_000_000;
/// Rounds over which an island cools down.
const CYCLE: u64 = 12;
/// How warm an island begins each of its cycles, relative to the gap per variable. As the gap closes, a
/// step out of a local optimum costs ever more of it, so some cycles begin much warmer.
const HEAT: [f64; 5] = [1.0, 3.0, 10.0, 30.0, 100.0];
/// Rounds between attempts to narrow.
const NARROW_EVERY: u64 = 8;
/// Share of values that must go for the model to be narrowed.
const NARROW_SHARE: f64 = 0.05;
/// Largest rest, in values, on which branch and bound is tried.
const BRANCH_VALUES: usize = 5000;

/// Turns labels of the model into a published assignment.
pub type Publish<'p> = dyn Fn(&[u32], &mut Recorder<'_, '_>, u64, &str) + 'p;

/// Reports labels of the model that avoid what is forbidden but do not fit.
pub type Overfull<'p> = dyn Fn(&[u32], &mut Recorder<'_, '_>) + 'p;

/// Asked often whether time is up or the caller wants to stop.
pub type Stop<'s> = &'s (dyn Fn() -> bool + Sync);

/// The search over one model.
pub struct Search {
    stage: Stage,
    islands: Vec<Island>,
    best: Option<State>,
    /// The tree, once begun, and the live variables that it is about.
    tree: Option<(Branch, Vec<u32>)>,
    /// Whether the stage was narrowed with its final bound already.
    settled: bool,
    round: u64,
    seed: u64,
    /// Elimination of the stage, if it can be, and how many values the stage had when it was prepared.
    elimination: Option<(usize, Option<Elimination>)>,
}

impl Search {
    /// Prepares a search over a reduced model.
    pub fn new(model: Model, seed: u64) -> Self {
        let stage = Stage::new(model);
        let islands = islands(&stage, seed);
        Search { stage, islands, best: None, tree: None, settled: false, round: 0, seed, elimination: None }
    }

    /// Runs rounds until proved or stopped.
    pub fn run(
        &mut self,
        control: &Control<'_>,
        recorder: &mut Recorder<'_, '_>,
        publish: &Publish<'_>,
        overfull: &Overfull<'_>,
    ) -> StopReason {
        loop {
            if self.stage.core.variables() == 0 {
                publish(&self.stage.lift(&[]), recorder, self.round, "reductions");
                recorder.raise(self.stage.core.constant, self.round, "reductions");
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
                publish(&self.stage.lift(&best.x), recorder, self.round, "search");
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

    /// Solves what is left by elimination, if that is possible and its turn.
    fn eliminate(
        &mut self,
        control: &Control<'_>,
        recorder: &mut Recorder<'_, '_>,
        publish: &Publish<'_>,
    ) -> Option<StopReason> {
        let values = self.stage.core.value_count();
        if self.elimination.as_ref().is_none_or(|e| e.0 != values) {
            self.elimination = Some((values, Elimination::of(&self.stage.core, control)));
        }
        let due = self.elimination.as_ref()?.1.as_ref().filter(|e| e.due(self.round))?;
        let (cost, x) = due.run(control)?;
        if cost < INF {
            publish(&self.stage.lift(&x), recorder, self.round, "elimination");
            // The network itself has the last word; if it disagrees, nothing is proved.
            recorder.cost().filter(|&found| found <= cost)?;
        }
        // What narrowing took away costs more than the incumbent, so the incumbent is the least of all.
        Some(self.proved(recorder))
    }

    /// Work of this round: little at first, so that easy networks are done at once.
    fn budget(&self) -> u64 {
        let core = &self.stage.core;
        let cells: usize = core.pairs.iter().map(|p| core.size(p.u) * core.size(p.v)).sum();
        let pass = (cells + core.value_count() + core.slack.len()) as u64;
        (pass * 20).saturating_mul(1 << self.round.min(20)).min(MOST_WORK)
    }

    /// One round of everybody's work.
    fn work(&mut self, target: Option<i64>, control: &Control<'_>) {
        let stop = || control.stop(0).is_some_and(|r| r != StopReason::IterationLimit);
        let work = self.budget();
        let lambda = self.stage.ascent.best().lambda.clone();
        let Stage { core, ascent, .. } = &mut self.stage;
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

    /// Sets where each island begins the round and how warm it is.
    fn prepare(&mut self, bound: i64) {
        let core = &self.stage.core;
        let n = f64::from(core.variables().max(1));
        let decoding = !self.stage.ascent.finished;
        for (k, island) in self.islands.iter_mut().enumerate() {
            let clock = self.round + k as u64 * CYCLE / ISLANDS as u64;
            let phase = clock % CYCLE;
            match &self.best {
                // The last island follows the messages as long as they change.
                Some(best) if !decoding || k + 1 < ISLANDS => {
                    if phase == 0 {
                        island.state.clone_from(best);
                    }
                    // Before the bound says much, one part in a hundred is a fair guess of the gap.
                    let gap = (best.cost - bound).max(0).min(best.cost / 100) as f64 / n;
                    let cool = 1.0 - (phase + 1) as f64 / CYCLE as f64;
                    island.temperature = gap * HEAT[(clock / CYCLE) as usize % HEAT.len()] * cool;
                }
                _ => {
                    let ascent = &self.stage.ascent;
                    let dual = if k % 2 == 1 { ascent.best() } else { ascent.newest() };
                    island.temperature = 0.0;
                    island.best = None;
                    island.restart(core, dual.decode(core));
                }
            }
        }
    }

    /// Puts together what the islands found.
    fn collect(&mut self) {
        let core = &self.stage.core;
        for island in &self.islands {
            let Some(found) = &island.best else { continue };
            match &mut self.best {
                None => self.best = Some(found.clone()),
                Some(best) => {
                    if found.cost < best.cost {
                        let old = std::mem::replace(best, found.clone());
                        cross(core, best, &old);
                    } else {
                        cross(core, best, found);
                    }
                }
            }
        }
    }

    /// While nothing fits: how far the islands are from it.
    fn report_overflow(&self, recorder: &mut Recorder<'_, '_>, overfull: &Overfull<'_>) {
        for island in self.islands.iter().filter(|i| i.state.forbidden == 0) {
            overfull(&self.stage.lift(&island.state.x), recorder);
        }
    }

    /// Raises the bound, narrows the model, begins and follows the tree. A reason if that ends the search.
    fn prove(&mut self, recorder: &mut Recorder<'_, '_>, publish: &Publish<'_>) -> Option<StopReason> {
        if let Some((tree, live)) = &mut self.tree {
            if let Some((_, labels)) = tree.found.take() {
                let all = self.stage.lift_compact(live, &labels);
                publish(&all, recorder, self.round, "branching");
                let state = State::new(&self.stage.core, self.stage.core.with_labels(&all));
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
        let finished = self.stage.ascent.finished;
        let due = (finished && !self.settled) || self.round.is_multiple_of(NARROW_EVERY);
        if !due {
            if self.stage.ascent.best().bound > recorder.bound() as f64 + 0.01 {
                recorder.raise(self.stage.ascent.best().certify(&self.stage.core), self.round, "messages");
            }
            return None;
        }
        let (bound, values) = self.stage.ascent.best().certify_values(&self.stage.core);
        recorder.raise(bound, self.round, "messages");
        let limit = recorder.cost().unwrap_or(INF - 1);
        let share = if finished { NARROW_SHARE / 3.0 } else { NARROW_SHARE };
        match self.stage.narrow(&values, limit, share, Pace::RESUME) {
            Err(_) => return Some(self.proved(recorder)),
            Ok(true) => {
                self.settled = false;
                self.move_in(recorder);
            }
            Ok(false) if finished => self.settled = true,
            Ok(false) => {}
        }
        if self.settled && self.stage.core.value_count() <= BRANCH_VALUES {
            let tree = Branch::new(self.stage.model.compact(), limit, recorder.bound(), self.seed);
            self.tree = Some((tree, self.stage.model.live()));
        }
        None
    }

    /// What follows when nothing better than the incumbent is left.
    fn proved(&self, recorder: &mut Recorder<'_, '_>) -> StopReason {
        match recorder.cost() {
            Some(cost) => {
                recorder.raise(cost, self.round, "proof");
                StopReason::Optimal
            }
            None => StopReason::Infeasible,
        }
    }

    /// Puts islands and incumbent into a stage that was narrowed.
    fn move_in(&mut self, recorder: &Recorder<'_, '_>) {
        let core = &self.stage.core;
        self.best = None;
        self.islands = islands(&self.stage, self.seed ^ (self.round << 16));
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

fn islands(stage: &Stage, seed: u64) -> Vec<Island> {
    let start = vec![0; stage.core.variables() as usize];
    (0..ISLANDS as u64).map(|k| Island::new(&stage.core, start.clone(), seed ^ (k << 32))).collect()
}
