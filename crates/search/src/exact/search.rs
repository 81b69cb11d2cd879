//! The rounds of the search: in each, the lower bound rises and several islands search, side by side and
//! for a fixed amount of work; then what they found is put together in a fixed order. What happens in a
//! round never depends on time or on the number of threads.

use super::ascent::Ascent;
use super::core::Core;
use super::cross::cross;
use super::island::Island;
use super::state::State;
use crate::outcome::{Control, Recorder, StopReason};
use rayon::prelude::*;

/// How many islands search.
const ISLANDS: usize = 3;
/// Work of the first round and of later ones, in elementary steps.
const FIRST_WORK: u64 = 1_000_000;
const MOST_WORK: u64 = 60_000_000;
/// Rounds over which an island cools down.
const CYCLE: u64 = 12;

/// The search over one core.
pub struct Search<'s> {
    core: &'s Core,
    ascent: Ascent,
    islands: Vec<Island>,
    best: Option<State>,
    round: u64,
}

impl<'s> Search<'s> {
    /// Prepares a search.
    pub fn new(core: &'s Core, control: &Control<'_>) -> Self {
        let ascent = Ascent::new(core);
        let start = vec![0; core.variables() as usize];
        let islands =
            (0..ISLANDS as u64).map(|k| Island::new(core, start.clone(), control.seed ^ (k << 32))).collect();
        Search { core, ascent, islands, best: None, round: 0 }
    }

    /// Runs rounds until proved or stopped. `publish` turns an assignment of the core into an outcome.
    pub fn run(
        &mut self,
        control: &Control<'_>,
        recorder: &mut Recorder<'_, '_>,
        publish: &dyn Fn(&State, &mut Recorder<'_, '_>, u64, &str),
    ) -> StopReason {
        // Messages first: they give every island its start.
        self.ascent.advance(self.core, 0, None);
        loop {
            self.round += 1;
            let work = (FIRST_WORK << self.round.min(20)).min(MOST_WORK);
            self.prepare(recorder.bound());
            let (core, target) = (self.core, recorder.cost());
            let lambda = self.ascent.best().lambda.clone();
            let (ascent, islands) = (&mut self.ascent, &mut self.islands);
            rayon::join(
                || ascent.advance(core, work, target),
                || islands.par_iter_mut().for_each(|i| i.advance(core, work, &lambda)),
            );
            self.collect();
            if let Some(best) = &self.best
                && recorder.cost().is_none_or(|c| best.cost < c)
            {
                publish(best, recorder, self.round, "search");
            }
            if self.ascent.best().bound > recorder.bound() as f64 + 0.01 {
                recorder.raise(self.ascent.best().certify(self.core), self.round, "messages");
            }
            if recorder.closed() {
                return StopReason::Optimal;
            }
            if let Some(reason) = control.stop(self.round) {
                return reason;
            }
        }
    }

    /// Sets where each island begins the round and how warm it is.
    fn prepare(&mut self, bound: i64) {
        let n = f64::from(self.core.variables().max(1));
        let decoding = !self.ascent.finished;
        for (k, island) in self.islands.iter_mut().enumerate() {
            let phase = (self.round + k as u64 * CYCLE / ISLANDS as u64) % CYCLE;
            match &self.best {
                // The last island follows the messages as long as they change.
                _ if (decoding && k + 1 == ISLANDS) || self.best.is_none() => {
                    island.temperature = 0.0;
                    island.best = None;
                    let dual = if k % 2 == 1 { self.ascent.best() } else { self.ascent.newest() };
                    island.restart(self.core, dual.decode(self.core));
                }
                Some(best) => {
                    if phase == 0 {
                        island.state.clone_from(best);
                    }
                    let gap = (best.cost - bound).max(0) as f64 / n;
                    let cool = 1.0 - (phase + 1) as f64 / CYCLE as f64;
                    island.temperature = gap * [0.3, 1.0, 3.0][k % 3] * cool;
                }
                None => {}
            }
        }
    }

    /// Puts together what the islands found.
    fn collect(&mut self) {
        for island in &self.islands {
            let Some(found) = &island.best else { continue };
            match &mut self.best {
                None => self.best = Some(found.clone()),
                Some(best) => {
                    if found.cost < best.cost {
                        let old = std::mem::replace(best, found.clone());
                        cross(self.core, best, &old);
                    } else {
                        cross(self.core, best, found);
                    }
                }
            }
        }
    }
}
