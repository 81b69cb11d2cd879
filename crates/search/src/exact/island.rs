//! One chain of the primal search: block moves improve a feasible assignment, and a repair finds one.

use super::block::{BlockMoves, Effort, MoveOutcome};
use super::core::Core;
use super::dual::prefix_sums;
use super::search::Stop;
use super::state::State;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

/// Largest block.
const MAX_BLOCK: usize = 60;
/// Multiplier updates for a block that does not fit.
const TRIES: usize = 5;

/// One move in this number starts at several variables of the fullest row.
const CROWD_ODDS: u32 = 3;

/// A chain of the primal search with its own random generator.
#[derive(Clone, Debug)]
pub struct Island {
    /// The current assignment.
    pub state: State,
    /// The best feasible assignment so far.
    pub best: Option<State>,
    /// Mean noise of its moves.
    pub temperature: f64,
    blocks: BlockMoves,
    rng: Xoshiro256PlusPlus,
}

impl Island {
    /// Starts at `x`, which need not be feasible.
    pub fn new(core: &Core, x: Vec<u32>, seed: u64) -> Self {
        Island {
            state: State::new(core, x),
            best: None,
            temperature: 0.0,
            blocks: BlockMoves::new(core),
            rng: Xoshiro256PlusPlus::seed_from_u64(seed),
        }
    }

    /// Moves to `x`.
    pub fn restart(&mut self, core: &Core, x: Vec<u32>) {
        self.state = State::new(core, x);
    }

    /// Runs about `work` steps: first towards feasibility under rising prices, then towards lower cost.
    pub fn advance(&mut self, core: &Core, work: u64, lambda: &[f64], stop: Stop<'_>) {
        let end = self.blocks.work + work;
        if !self.state.feasible(core) {
            self.repair(core, end, lambda, stop);
        }
        if !self.state.feasible(core) {
            return;
        }
        self.keep_best();
        let n = core.variables();
        let crowd = crowd(core, &self.state);
        let mut seeds = Vec::new();
        while self.blocks.work < end && !stop() {
            let size = self.rng.random_range(1..=MAX_BLOCK);
            seeds.clear();
            if !crowd.is_empty() && self.rng.random_range(0..CROWD_ODDS) == 0 {
                // Variables far apart that share the fullest row: one may make room for another.
                for _ in 0..self.rng.random_range(2..=4) {
                    seeds.push(crowd[self.rng.random_range(0..crowd.len())]);
                }
            } else {
                seeds.push(self.rng.random_range(0..n));
            }
            self.blocks.grow(core, &seeds, size, &mut self.rng);
            let effort = Effort { tries: TRIES, temperature: self.temperature };
            if let MoveOutcome::Changed(delta) =
                self.blocks.improve(core, &mut self.state, lambda, effort, &mut self.rng)
                && delta < 0
            {
                self.keep_best();
            }
        }
    }

    fn keep_best(&mut self) {
        if self.state.forbidden == 0 && self.best.as_ref().is_none_or(|b| self.state.cost < b.cost) {
            match &mut self.best {
                Some(best) => best.clone_from(&self.state),
                None => self.best = Some(self.state.clone()),
            }
        }
    }

    /// Sets blocks to their best values under prices and raises the price of every overfull row.
    fn repair(&mut self, core: &Core, end: u64, lambda: &[f64], stop: Stop<'_>) {
        let n = core.variables();
        let mut price = lambda.to_vec();
        let priced = price.iter().filter(|&&l| l > 0.0).count();
        let peak = core.slack.iter().copied().max().unwrap_or(1).max(1) as f64;
        let typical = if priced > 0 {
            price.iter().sum::<f64>() / priced as f64
        } else {
            self.state.cost.max(1) as f64 / peak * 0.01
        };
        let mut rise = 0.05;
        while self.blocks.work < end && !self.state.feasible(core) && !stop() {
            let prefix = prefix_sums(&price);
            for _ in 0..n / 10 + 10 {
                let seed = self.rng.random_range(0..n);
                let size = self.rng.random_range(1..=MAX_BLOCK);
                self.blocks.grow(core, &[seed], size, &mut self.rng);
                self.blocks.relax(core, &mut self.state, &prefix, 0.0, &mut self.rng);
            }
            self.blocks.work += core.slack.len() as u64;
            for (t, p) in price.iter_mut().enumerate() {
                if self.state.load[t] > core.slack[t] {
                    *p += typical * rise + *p * 0.1;
                }
            }
            rise *= 1.1;
        }
    }
}

/// The variables with usage at the fullest row.
fn crowd(core: &Core, state: &State) -> Vec<u32> {
    let room = |t: &usize| core.slack[*t] - state.load[*t];
    let Some(row) = (0..core.slack.len()).min_by_key(room) else { return Vec::new() };
    let uses = |v: &u32| core.spans(*v).iter().any(|s| (s.lo as usize..s.hi as usize).contains(&row));
    (0..core.variables()).filter(uses).collect()
}
