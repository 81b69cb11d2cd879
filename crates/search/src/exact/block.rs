//! Block moves of the primal search. Dynamic programming sets a block of variables that induce a forest to its
//! best values, with all other variables fixed. Rows of time that would overflow get multipliers, moved by
//! subgradients, so that the result fits.
//!
//! With multipliers `mu`, the program's value minus `mu` times the room is a lower bound on the block's cost. A
//! block is abandoned as soon as this bound shows that nothing better fits.

use super::core::Core;
use super::kernel::{argmin, min_plus};
use super::state::{State, local_cost};
use rand::RngExt;
use rand_xoshiro::Xoshiro256PlusPlus;

/// Parameters of a move.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// The most multiplier updates.
    pub tries: usize,
    /// Mean of the noise added to costs, and mean accepted loss.
    pub temperature: f64,
}

/// The result of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoveOutcome {
    /// The assignment is the same.
    Unchanged,
    /// The assignment changed; the difference in cost.
    Changed(i64),
}

/// Block moves on one core, with their buffers.
#[derive(Clone, Debug)]
pub struct BlockMoves {
    /// Position in the block plus one, valid where `stamp` is current.
    position: Vec<u32>,
    touching: Vec<u32>,
    stamp: Vec<u32>,
    now: u32,
    frontier: Vec<(u32, u32, u32)>,
    vars: Vec<u32>,
    /// Position of the parent and the pair to it; `u32::MAX` for roots.
    parent: Vec<(u32, u32)>,
    at: Vec<usize>,
    base: Vec<f64>,
    h: Vec<f64>,
    message: Vec<f64>,
    choice: Vec<u32>,
    best: Vec<u32>,
    room: Vec<i64>,
    used: Vec<i64>,
    mu: Vec<f64>,
    prefix: Vec<f64>,
    /// Elementary steps so far: a measure of work that does not depend on the machine.
    pub work: u64,
}

impl BlockMoves {
    /// Buffers for `core`.
    pub fn new(core: &Core) -> Self {
        let n = core.variables() as usize;
        BlockMoves {
            position: vec![0; n],
            touching: vec![0; n],
            stamp: vec![0; n],
            now: 0,
            frontier: Vec::new(),
            vars: Vec::new(),
            parent: Vec::new(),
            at: Vec::new(),
            base: Vec::new(),
            h: Vec::new(),
            message: Vec::new(),
            choice: Vec::new(),
            best: Vec::new(),
            room: Vec::new(),
            used: Vec::new(),
            mu: Vec::new(),
            prefix: Vec::new(),
            work: 0,
        }
    }

    fn fresh(&mut self, v: u32) {
        if self.stamp[v as usize] != self.now {
            self.stamp[v as usize] = self.now;
            self.position[v as usize] = 0;
            self.touching[v as usize] = 0;
        }
    }

    fn position(&self, v: u32) -> Option<usize> {
        if self.stamp[v as usize] == self.now {
            (self.position[v as usize] as usize).checked_sub(1)
        } else {
            None
        }
    }

    /// Grows a random block of up to `size` variables from `seeds` whose induced graph is a forest.
    pub fn grow(&mut self, core: &Core, seeds: &[u32], size: usize, rng: &mut Xoshiro256PlusPlus) {
        if self.now == u32::MAX {
            self.stamp.fill(0);
            self.now = 0;
        }
        self.now += 1;
        self.vars.clear();
        self.parent.clear();
        self.frontier.clear();
        for &s in seeds {
            self.fresh(s);
            if self.position[s as usize] == 0 && self.touching[s as usize] == 0 {
                self.add(core, s, (u32::MAX, 0));
            }
        }
        while self.vars.len() < size && !self.frontier.is_empty() {
            let k = rng.random_range(0..self.frontier.len());
            let (v, parent, pair) = self.frontier.swap_remove(k);
            if self.position[v as usize] == 0 && self.touching[v as usize] == 1 {
                self.add(core, v, (parent, pair));
            }
        }
    }

    fn add(&mut self, core: &Core, v: u32, parent: (u32, u32)) {
        let at = self.vars.len() as u32;
        self.vars.push(v);
        self.parent.push(parent);
        self.position[v as usize] = at + 1;
        for link in core.links(v) {
            self.fresh(link.to);
            self.touching[link.to as usize] += 1;
            if self.position[link.to as usize] == 0 {
                self.frontier.push((link.to, at, link.pair));
            }
        }
        self.work += core.links(v).len() as u64;
    }

    /// Computes the cost of each value given the neighbours outside the block, with noise.
    fn prepare(&mut self, core: &Core, x: &[u32], temperature: f64, rng: &mut Xoshiro256PlusPlus) {
        self.at.clear();
        self.base.clear();
        for (i, &v) in self.vars.iter().enumerate() {
            let at = self.base.len();
            self.at.push(at);
            let size = core.size(v);
            self.base.extend(core.unary[core.values(v)].iter().map(|&c| c as f64));
            for link in core.links(v) {
                let inside = self.stamp[link.to as usize] == self.now && self.position[link.to as usize] > 0;
                if !inside {
                    let row = x[link.to as usize] as usize * size;
                    let table = &core.table(link.pair, link.to)[row..row + size];
                    for (b, &t) in self.base[at..].iter_mut().zip(table) {
                        *b += t;
                    }
                }
            }
            if temperature > 0.0 {
                for b in &mut self.base[at..] {
                    *b += noise(temperature, rng);
                }
            }
            self.work += (size * (core.links(v).len() + 1)) as u64;
            debug_assert_eq!(self.position[v as usize] as usize, i + 1);
        }
        self.at.push(self.base.len());
    }

    /// Computes the best values of the block under prices, given as prefix sums over rows `lo..` in `prefix` (empty:
    /// no prices). Fills `choice` and returns the value.
    fn solve(&mut self, core: &Core, lo: usize) -> f64 {
        self.h.clear();
        self.h.extend_from_slice(&self.base);
        if !self.prefix.is_empty() {
            for (i, &v) in self.vars.iter().enumerate() {
                for s in core.spans(v) {
                    let price = self.prefix[s.hi as usize - lo] - self.prefix[s.lo as usize - lo];
                    if price > 0.0 {
                        for (h, &u) in self.h[self.at[i]..self.at[i + 1]].iter_mut().zip(core.usage(v, s)) {
                            *h += price * u as f64;
                        }
                    }
                }
            }
        }
        for i in (0..self.vars.len()).rev() {
            let (parent, pair) = self.parent[i];
            if parent == u32::MAX {
                continue;
            }
            let v = self.vars[i];
            let up = self.at[parent as usize]..self.at[parent as usize + 1];
            self.message.clear();
            self.message.resize(up.len(), f64::INFINITY);
            let table = core.table(pair, v);
            min_plus(&mut self.message, &self.h[self.at[i]..self.at[i + 1]], table);
            for (h, m) in self.h[up].iter_mut().zip(&self.message) {
                *h += m;
            }
            self.work += table.len() as u64;
        }
        self.choice.clear();
        let mut value = 0.0;
        for i in 0..self.vars.len() {
            let h = &mut self.h[self.at[i]..self.at[i + 1]];
            let (parent, pair) = self.parent[i];
            if parent == u32::MAX {
                let (best, least) = argmin(h);
                value += least;
                self.choice.push(best as u32);
            } else {
                let row = self.choice[parent as usize] as usize * h.len();
                let table = &core.table(pair, self.vars[parent as usize])[row..row + h.len()];
                for (h, &t) in h.iter_mut().zip(table) {
                    *h += t;
                }
                self.choice.push(argmin(h).0 as u32);
            }
        }
        value
    }

    /// Sets the block to its best values under given prices (prefix sums over all rows). The result may not fit.
    pub fn relax(
        &mut self,
        core: &Core,
        state: &mut State,
        prices: &[f64],
        temperature: f64,
        rng: &mut Xoshiro256PlusPlus,
    ) {
        self.prepare(core, &state.x, temperature, rng);
        self.prefix.clear();
        self.prefix.extend_from_slice(prices);
        self.solve(core, 0);
        std::mem::swap(&mut self.choice, &mut self.best);
        self.apply(core, state);
    }

    /// Improves the block of a feasible state; the result is feasible too. `lambda` are the starting multipliers.
    pub fn improve(
        &mut self,
        core: &Core,
        state: &mut State,
        lambda: &[f64],
        effort: Effort,
        rng: &mut Xoshiro256PlusPlus,
    ) -> MoveOutcome {
        let temperature = effort.temperature;
        self.prepare(core, &state.x, temperature, rng);
        self.prefix.clear();
        self.solve(core, 0);
        if self.same(&state.x) {
            return MoveOutcome::Unchanged;
        }
        let (lo, hi) = self.rows(core);
        let old = local_cost(core, &self.vars, |v| state.x[v as usize], |v| self.position(v));
        let allow = if temperature > 0.0 { noise(temperature, rng) as i64 } else { 0 };
        self.find_room(core, state, lo, hi);
        if self.fits(core, lo, hi) {
            std::mem::swap(&mut self.choice, &mut self.best);
            return self.settle(core, state, old, allow);
        }
        if effort.tries == 0 {
            return MoveOutcome::Unchanged;
        }
        let current = old.0 as f64;
        self.mu.clear();
        self.mu.extend_from_slice(&lambda[lo..hi]);
        let mut found: Option<i64> = None;
        for _ in 0..effort.tries {
            self.price_rows();
            let mut value = self.solve(core, lo);
            for (m, &r) in self.mu.iter().zip(&self.room) {
                value -= m * r as f64;
            }
            let fits = self.fits(core, lo, hi);
            if fits {
                let new = local_cost(
                    core,
                    &self.vars,
                    |v| self.new_value(&state.x, v, false),
                    |v| self.position(v),
                );
                if new.1 <= old.1 && found.is_none_or(|f| new.0 < f) && !self.same(&state.x) {
                    found = Some(new.0);
                    self.best.clear();
                    self.best.extend_from_slice(&self.choice);
                }
            }
            // With noise this bounds the noisy costs only, which suffices to decide when to stop.
            let target = found.map_or(current + allow as f64, |f| (f as f64).min(current + allow as f64));
            if value >= target - 0.5 || !self.step(target - value) {
                break;
            }
        }
        if found.is_none() {
            return MoveOutcome::Unchanged;
        }
        self.settle(core, state, old, allow)
    }

    fn same(&self, x: &[u32]) -> bool {
        self.vars.iter().zip(&self.choice).all(|(&v, &c)| x[v as usize] == c)
    }

    fn new_value(&self, x: &[u32], v: u32, best: bool) -> u32 {
        match self.position(v) {
            Some(i) if best => self.best[i],
            Some(i) => self.choice[i],
            None => x[v as usize],
        }
    }

    /// The rows that the block touches.
    fn rows(&self, core: &Core) -> (usize, usize) {
        let (mut lo, mut hi) = (u32::MAX, 0);
        for &v in &self.vars {
            if let [first, .., last] | [first @ last] = core.spans(v) {
                lo = lo.min(first.lo);
                hi = hi.max(last.hi);
            }
        }
        if lo >= hi { (0, 0) } else { (lo as usize, hi as usize) }
    }

    /// Computes the usage available to the block at each of its rows.
    fn find_room(&mut self, core: &Core, state: &State, lo: usize, hi: usize) {
        self.room.clear();
        self.room.resize(hi - lo + 1, 0);
        for &v in &self.vars {
            for s in core.spans(v) {
                let u = core.usage(v, s)[state.x[v as usize] as usize];
                self.room[s.lo as usize - lo] += u;
                self.room[s.hi as usize - lo] -= u;
            }
        }
        self.room.pop();
        let mut mine = 0;
        for (t, r) in self.room.iter_mut().enumerate() {
            mine += *r;
            *r = core.slack[lo + t] - state.load[lo + t] + mine;
        }
        self.work += (hi - lo) as u64 / 2;
    }

    /// Whether `choice` fits; fills `used`.
    fn fits(&mut self, core: &Core, lo: usize, hi: usize) -> bool {
        self.used.clear();
        self.used.resize(hi - lo + 1, 0);
        for (&v, &c) in self.vars.iter().zip(&self.choice) {
            for s in core.spans(v) {
                let u = core.usage(v, s)[c as usize];
                self.used[s.lo as usize - lo] += u;
                self.used[s.hi as usize - lo] -= u;
            }
        }
        self.used.pop();
        let mut now = 0;
        let mut over = 0;
        for (u, &r) in self.used.iter_mut().zip(&self.room) {
            now += *u;
            *u = now;
            over |= r - now;
        }
        self.work += (hi - lo) as u64 / 2;
        // The sign bit is set if any difference was negative.
        over >= 0
    }

    /// Moves the multipliers by Polyak's step; false if there is no direction.
    fn step(&mut self, gap: f64) -> bool {
        let mut norm = 0.0;
        for ((&m, &u), &r) in self.mu.iter().zip(&self.used).zip(&self.room) {
            let g = (u - r) as f64;
            if m > 0.0 || g > 0.0 {
                norm += g * g;
            }
        }
        if norm <= 0.0 {
            return false;
        }
        let step = gap / norm;
        for ((m, &u), &r) in self.mu.iter_mut().zip(&self.used).zip(&self.room) {
            *m = (*m + step * (u - r) as f64).max(0.0);
        }
        self.work += self.mu.len() as u64;
        true
    }

    fn price_rows(&mut self) {
        self.prefix.clear();
        self.prefix.push(0.0);
        let mut sum = 0.0;
        for &m in &self.mu {
            sum += m;
            self.prefix.push(sum);
        }
    }

    /// Accepts `best` if it costs at most `allow` more than before.
    fn settle(&mut self, core: &Core, state: &mut State, old: (i64, i64), allow: i64) -> MoveOutcome {
        let new = local_cost(core, &self.vars, |v| self.new_value(&state.x, v, true), |v| self.position(v));
        if new.1 > old.1 || (new.1 == old.1 && new.0 > old.0 + allow) {
            return MoveOutcome::Unchanged;
        }
        self.apply(core, state);
        MoveOutcome::Changed(new.0 - old.0)
    }

    /// Sets the block to `best`.
    fn apply(&mut self, core: &Core, state: &mut State) {
        let old = local_cost(core, &self.vars, |v| state.x[v as usize], |v| self.position(v));
        let new = local_cost(core, &self.vars, |v| self.new_value(&state.x, v, true), |v| self.position(v));
        state.cost += new.0 - old.0;
        state.forbidden += new.1 - old.1;
        for i in 0..self.vars.len() {
            let (v, c) = (self.vars[i], self.best[i]);
            let before = state.x[v as usize];
            if before != c {
                core.add_load(&mut state.load, v, before, -1);
                core.add_load(&mut state.load, v, c, 1);
                state.x[v as usize] = c;
            }
        }
    }
}

/// An exponentially distributed number with the given mean.
fn noise(mean: f64, rng: &mut Xoshiro256PlusPlus) -> f64 {
    let u: f64 = rng.random();
    -mean * (1.0 - u).ln()
}
