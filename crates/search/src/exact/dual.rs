//! Lower bounds: sequential reweighted message passing on the pairs (Kolmogorov, "A new look at reweighted message
//! passing", 2015, which is TRW-S for pairwise costs), with one Lagrange multiplier per row of time, moved along
//! averaged subgradients.
//!
//! Any messages and any non-negative multipliers give a valid bound, so floating-point errors affect only its quality.
//! The reported bound is recomputed from them in exact integers, see [`Dual::certify`].

use super::core::Core;
use super::kernel::{argmin, min_plus};
use super::model::INF;
use super::reduced_costs::{FRACTION, PairReducedCosts};

/// Messages and multipliers.
#[derive(Clone, Debug)]
pub struct Dual {
    /// The messages from each pair to its `u`, then to its `v`.
    messages: Vec<f64>,
    first: Vec<usize>,
    /// Multiplier of each row.
    pub lambda: Vec<f64>,
    /// Unary costs plus the price of their usage.
    priced: Vec<f64>,
    /// Average of the subgradients.
    direction: Vec<f64>,
    /// Whether the last step moved each multiplier.
    active: Vec<bool>,
    /// The best value of each variable in the last pass.
    pub preferred: Vec<u32>,
    /// Recent frequency of each value in `preferred`, between zero and one.
    pub occupancy: Vec<f64>,
    /// The bound after the last pass, up to rounding.
    pub bound: f64,
    scratch: Vec<f64>,
    left: Vec<f64>,
}

impl Dual {
    /// Zero messages and prices.
    pub fn new(core: &Core) -> Self {
        let mut first = Vec::with_capacity(core.pairs.len());
        let mut len = 0;
        for p in &core.pairs {
            first.push(len);
            len += core.size(p.u) + core.size(p.v);
        }
        let mut dual = Dual {
            messages: vec![0.0; len],
            first,
            lambda: vec![0.0; core.slack.len()],
            priced: Vec::new(),
            direction: vec![0.0; core.slack.len()],
            active: vec![false; core.slack.len()],
            preferred: vec![0; core.variables() as usize],
            occupancy: vec![0.0; core.value_count()],
            bound: f64::NEG_INFINITY,
            scratch: Vec::new(),
            left: Vec::new(),
        };
        dual.price(core);
        dual
    }

    /// Messages and prices for `core`, copied from `old` for variables, pairs, values and rows that remain. Any start is
    /// valid; this one is close to converged.
    pub fn transfer(old: &Dual, old_core: &Core, core: &Core) -> Self {
        let mut dual = Dual::new(core);
        let most = old_core.ids.iter().chain(&core.ids).copied().max().map_or(0, |m| m as usize + 1);
        let mut was = vec![u32::MAX; most];
        for (i, &id) in old_core.ids.iter().enumerate() {
            was[id as usize] = i as u32;
        }
        // The old position of each value; both label lists ascend.
        let old_value = |v: u32| {
            let w = was[core.ids[v as usize] as usize];
            let old_labels = if w == u32::MAX { &[][..] } else { &old_core.labels[old_core.values(w)] };
            let position = |l: &u32| old_labels.iter().position(|o| o == l);
            core.labels[core.values(v)].iter().map(position).collect::<Vec<_>>()
        };
        let places: Vec<Vec<Option<usize>>> = (0..core.variables()).map(old_value).collect();
        for (k, p) in core.pairs.iter().enumerate() {
            let (u, v) = (was[core.ids[p.u as usize] as usize], was[core.ids[p.v as usize] as usize]);
            if u == u32::MAX || v == u32::MAX {
                continue;
            }
            let Ok(at) = old_core.links(u).binary_search_by_key(&v, |l| l.to) else { continue };
            let old_pair = old_core.links(u)[at].pair;
            for (end, old_end) in [(p.u, u), (p.v, v)] {
                let from = old.message(old_core, old_pair, old_end);
                let to = dual.message(core, k as u32, end);
                for (m, place) in dual.messages[to].iter_mut().zip(&places[end as usize]) {
                    *m = place.map_or(0.0, |i| old.messages[from.start + i]);
                }
            }
        }
        // A removed row is implied by one nearby, which inherits its price.
        for (t, &id) in old_core.row_ids.iter().enumerate() {
            if core.row_ids.is_empty() || old.lambda[t] <= 0.0 {
                continue;
            }
            let at = core.row_ids.partition_point(|&r| r < id).min(core.row_ids.len() - 1);
            dual.lambda[at] += old.lambda[t];
        }
        dual.price(core);
        dual
    }

    fn message(&self, core: &Core, pair: u32, end: u32) -> std::ops::Range<usize> {
        let p = &core.pairs[pair as usize];
        let at = self.first[pair as usize];
        let middle = at + core.size(p.u);
        if p.u == end { at..middle } else { middle..middle + core.size(p.v) }
    }

    /// Recomputes the priced unary costs from the multipliers.
    pub fn price(&mut self, core: &Core) {
        let prefix = prefix_sums(&self.lambda);
        self.priced.clear();
        self.priced.extend(core.unary.iter().map(|&c| if c >= INF { core.big } else { c as f64 }));
        for v in 0..core.variables() {
            let values = core.values(v);
            for s in core.spans(v) {
                let price = prefix[s.hi as usize] - prefix[s.lo as usize];
                if price > 0.0 {
                    for (p, &u) in self.priced[values.clone()].iter_mut().zip(core.usage(v, s)) {
                        *p += price * u as f64;
                    }
                }
            }
        }
    }

    /// One sweep over all variables, ascending or descending. Never lowers the bound (up to rounding).
    pub fn pass(&mut self, core: &Core, ascending: bool) {
        let n = core.variables();
        let mut bound = 0.0;
        let mut theta = std::mem::take(&mut self.scratch);
        let mut left = std::mem::take(&mut self.left);
        for k in 0..n {
            let v = if ascending { k } else { n - 1 - k };
            let values = core.values(v);
            let behind = |to: u32| (to < v) == ascending;
            theta.clear();
            theta.extend_from_slice(&self.priced[values.clone()]);
            let (mut before, mut after) = (0usize, 0usize);
            for link in core.links(v) {
                let mine = self.message(core, link.pair, v);
                if behind(link.to) {
                    before += 1;
                    let theirs = self.message(core, link.pair, link.to);
                    left.clear();
                    left.extend(self.messages[theirs].iter().map(|m| -m));
                    let out = &mut self.messages[mine.clone()];
                    out.fill(f64::INFINITY);
                    min_plus(out, &left, core.table(link.pair, link.to));
                } else {
                    after += 1;
                }
                for (t, &m) in theta.iter_mut().zip(&self.messages[mine]) {
                    *t += m;
                }
            }
            let (best, least) = argmin(&theta);
            self.preferred[v as usize] = best as u32;
            let most = before.max(after).max(1);
            // The share that stays at the variable; the rest goes to the pairs ahead.
            bound += least * ((most - after) as f64 / most as f64);
            if after > 0 {
                let weight = 1.0 / most as f64;
                for link in core.links(v).iter().filter(|l| !behind(l.to)) {
                    let mine = self.message(core, link.pair, v);
                    for (m, &t) in self.messages[mine].iter_mut().zip(&theta) {
                        *m -= weight * t;
                    }
                }
            }
        }
        self.scratch = theta;
        self.left = left;
        let paid: f64 = self.lambda.iter().zip(&core.slack).map(|(l, &s)| l * s as f64).sum();
        self.bound = bound - paid + core.constant as f64;
    }

    /// Moves the multipliers along the averaged subgradient at the preferred assignment, by Polyak's step for a rise of
    /// `rise`. False if no row is active.
    pub fn step(&mut self, core: &Core, rise: f64, keep: f64) -> bool {
        let load = core.load(&self.preferred);
        for (t, d) in self.direction.iter_mut().enumerate() {
            let g = (load[t] - core.slack[t]) as f64;
            *d = keep * *d + (1.0 - keep) * g;
        }
        self.mark_peaks();
        let norm: f64 = self.direction.iter().zip(&self.active).filter(|a| *a.1).map(|(d, _)| d * d).sum();
        for v in 0..core.variables() {
            let values = core.values(v);
            let chosen = values.start + self.preferred[v as usize] as usize;
            for o in &mut self.occupancy[values] {
                *o *= 0.9;
            }
            self.occupancy[chosen] += 0.1;
        }
        if norm <= 0.0 {
            return false;
        }
        let step = rise / norm;
        for ((l, &d), &active) in self.lambda.iter_mut().zip(&self.direction).zip(&self.active) {
            if active {
                *l = (*l + step * d).max(0.0);
            }
        }
        self.price(core);
        true
    }

    /// Marks the rows whose price moves: those with a price, and the worst of each run of overfull rows. At the optimal
    /// prices few rows have one, and a step over a whole run would hide which.
    fn mark_peaks(&mut self) {
        for (a, &l) in self.active.iter_mut().zip(&self.lambda) {
            *a = l > 0.0;
        }
        let mut peak: Option<usize> = None;
        for t in 0..=self.direction.len() {
            let over = self.direction.get(t).copied().filter(|&d| d > 0.0);
            match (over, peak) {
                (Some(d), Some(p)) if d <= self.direction[p] => {}
                (Some(_), _) => peak = Some(t),
                (None, Some(p)) => {
                    self.active[p] = true;
                    peak = None;
                }
                (None, None) => {}
            }
        }
    }

    /// Decodes an assignment: each variable in order, given those before it and the messages from those after. Best
    /// after a descending pass.
    pub fn decode(&self, core: &Core) -> Vec<u32> {
        let mut x = vec![0u32; core.variables() as usize];
        let mut theta = Vec::new();
        for v in 0..core.variables() {
            theta.clear();
            theta.extend_from_slice(&self.priced[core.values(v)]);
            for link in core.links(v) {
                let size = core.size(v);
                let row = if link.to < v {
                    &core.table(link.pair, link.to)[x[link.to as usize] as usize * size..][..size]
                } else {
                    &self.messages[self.message(core, link.pair, v)]
                };
                for (t, &c) in theta.iter_mut().zip(row) {
                    *t += c;
                }
            }
            x[v as usize] = argmin(&theta).0 as u32;
        }
        x
    }

    /// The bound that these messages and multipliers prove, in exact integers, rounded up.
    pub fn certify(&self, core: &Core) -> i64 {
        if self.in_range(core) { self.exact(core, false).bound() } else { 0 }
    }

    /// Whether all numbers are small enough that exact sums cannot overflow. Only hostile networks exceed the range, and
    /// they get the trivial bound zero.
    fn in_range(&self, core: &Core) -> bool {
        const MOST: f64 = (1u128 << 80) as f64;
        let paid: f64 = self.lambda.iter().zip(&core.slack).map(|(l, &s)| l * s as f64).sum();
        let small = |x: &f64| x.abs() < MOST;
        small(&paid) && self.priced.iter().all(small) && self.messages.iter().all(small)
    }

    /// The certified bound, and for each value of each variable a bound on the assignments with it.
    pub fn certify_values(&self, core: &Core) -> (i64, Vec<i64>) {
        if !self.in_range(core) {
            return (0, vec![0; core.value_count()]);
        }
        let exact = self.exact(core, true);
        (exact.bound(), exact.value_bounds(core))
    }

    /// The terms of the bound as exact numbers; by value only if `by_value`.
    fn exact(&self, core: &Core, by_value: bool) -> Certificate<'_> {
        let one = f64::from(1u32 << FRACTION);
        let fixed = |x: f64| (x * one) as i128;
        let lambda: Vec<i128> = self.lambda.iter().map(|&l| fixed(l)).collect();
        let mut prefix = vec![0i128];
        for &l in &lambda {
            prefix.push(prefix[prefix.len() - 1] + l);
        }
        let messages: Vec<i128> = self.messages.iter().map(|&m| fixed(m)).collect();
        let mut total = i128::from(core.constant) << FRACTION;
        for (l, &s) in lambda.iter().zip(&core.slack) {
            total -= l * i128::from(s);
        }
        let mut theta: Vec<i128> = core.unary.iter().map(|&c| i128::from(c) << FRACTION).collect();
        let mut least_unary = Vec::with_capacity(core.variables() as usize);
        for v in 0..core.variables() {
            let theta = &mut theta[core.values(v)];
            for s in core.spans(v) {
                let price = prefix[s.hi as usize] - prefix[s.lo as usize];
                for (t, &u) in theta.iter_mut().zip(core.usage(v, s)) {
                    *t += price * i128::from(u);
                }
            }
            for link in core.links(v) {
                for (t, &m) in theta.iter_mut().zip(&messages[self.message(core, link.pair, v)]) {
                    *t += m;
                }
            }
            let least = theta.iter().copied().min().unwrap_or(0);
            total += least;
            least_unary.push(least);
        }
        let mut least_pair = Vec::with_capacity(core.pairs.len());
        let mut along = vec![i128::MAX; if by_value { messages.len() } else { 0 }];
        let mut reduced = PairReducedCosts::default();
        for (k, p) in core.pairs.iter().enumerate() {
            let (mu, mv) = (self.message(core, k as u32, p.u), self.message(core, k as u32, p.v));
            let table = core.exact_table(k as u32, p.u);
            let (rows, columns) = (&messages[mu.clone()], &messages[mv.clone()]);
            let least = reduced.least(table, p.largest, rows, columns);
            if by_value {
                along[mu].copy_from_slice(&reduced.rows);
                along[mv].copy_from_slice(&reduced.columns);
            }
            debug_assert!(least != i128::MAX, "arc consistency leaves every pair a finite cost");
            // A pair without finite costs makes the core infeasible, so any term is valid.
            let least = if least == i128::MAX { 0 } else { least };
            total += least;
            least_pair.push(least);
        }
        Certificate { dual: self, total, theta, least_unary, least_pair, along }
    }
}

/// The terms of a bound, as exact numbers with [`FRACTION`] binary digits after the point.
struct Certificate<'d> {
    dual: &'d Dual,
    total: i128,
    theta: Vec<i128>,
    least_unary: Vec<i128>,
    least_pair: Vec<i128>,
    /// Least reduced cost of each pair, by value of either end; indexed like the messages. Empty unless by value.
    along: Vec<i128>,
}

impl Certificate<'_> {
    fn bound(&self) -> i64 {
        round_up(self.total)
    }

    /// Bounds by value: the variable and its pairs at the given value, all other terms at their least.
    fn value_bounds(&self, core: &Core) -> Vec<i64> {
        let mut out = Vec::with_capacity(core.value_count());
        for v in 0..core.variables() {
            let values = core.values(v);
            let around: i128 = core.links(v).iter().map(|l| self.least_pair[l.pair as usize]).sum();
            let rest = self.total - self.least_unary[v as usize] - around;
            for i in 0..values.len() {
                let mut sum = rest + self.theta[values.start + i];
                for link in core.links(v) {
                    let at = self.dual.message(core, link.pair, v).start + i;
                    sum = sum.saturating_add(self.along[at]);
                }
                out.push(round_up(sum));
            }
        }
        out
    }
}

/// Rounds up to an integer within the range of costs.
fn round_up(fixed: i128) -> i64 {
    let up = (fixed.saturating_add((1i128 << FRACTION) - 1)) >> FRACTION;
    up.clamp(0, i128::from(INF)) as i64
}

/// All prefix sums; one more entry than values.
pub fn prefix_sums(values: &[f64]) -> Vec<f64> {
    let mut out = Vec::with_capacity(values.len() + 1);
    let mut sum = 0.0;
    out.push(sum);
    for v in values {
        sum += v;
        out.push(sum);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exact::contract::contract;
    use crate::exact::memo::TableMemo;
    use crate::exact::state::State;
    use crate::network::{FORBIDDEN, Interval, NetworkBuilder, VarId};
    use rand::{RngExt, SeedableRng};
    use rand_xoshiro::Xoshiro256PlusPlus;

    fn core(rng: &mut Xoshiro256PlusPlus) -> Option<Core> {
        let mut b = NetworkBuilder::new();
        let sizes: Vec<usize> = (0..5).map(|_| rng.random_range(2..4)).collect();
        for &k in &sizes {
            let costs: Vec<i64> = (0..k).map(|_| rng.random_range(0..50)).collect();
            let usages: Vec<i64> = (0..k).map(|_| rng.random_range(0..9)).collect();
            let lo = rng.random_range(0..4u64);
            b.variable(&costs, &usages, Interval { lo, hi: lo + 3 }).ok()?;
        }
        for _ in 0..7 {
            let (u, v) = (rng.random_range(0..5usize), rng.random_range(0..5usize));
            let cell = |r: &mut Xoshiro256PlusPlus| {
                if r.random_range(0..9) == 0 { FORBIDDEN } else { r.random_range(0..50) }
            };
            let table: Vec<i64> = (0..sizes[u] * sizes[v]).map(|_| cell(rng)).collect();
            b.edge(VarId(u as u32), VarId(v as u32), &table).ok()?;
        }
        b.usage_limit(rng.random_range(8..25)).ok()?;
        Some(Core::new(&contract(&b.build().ok()?, &mut TableMemo::new()).ok()?))
    }

    #[test]
    fn no_feasible_assignment_costs_less_than_the_bounds_of_its_values() {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(3);
        let mut checked = 0;
        for _ in 0..300 {
            let Some(core) = core(&mut rng) else { continue };
            let mut dual = Dual::new(&core);
            for _ in 0..6 {
                dual.pass(&core, true);
                dual.pass(&core, false);
                dual.step(&core, 30.0, 0.5);
            }
            let (bound, values) = dual.certify_values(&core);
            assert_eq!(bound, dual.certify(&core));
            let n = core.variables();
            let mut x = vec![0u32; n as usize];
            'all: loop {
                let state = State::new(&core, x.clone());
                if state.feasible(&core) {
                    checked += 1;
                    for v in 0..n {
                        let at = core.values(v).start + x[v as usize] as usize;
                        assert!(bound <= values[at] && values[at] <= state.cost);
                    }
                }
                for v in 0..n {
                    x[v as usize] += 1;
                    if (x[v as usize] as usize) < core.size(v) {
                        continue 'all;
                    }
                    x[v as usize] = 0;
                }
                break;
            }
        }
        assert!(checked > 1000);
    }

    #[test]
    fn passes_never_lower_the_bound() {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(4);
        for _ in 0..100 {
            let Some(core) = core(&mut rng) else { continue };
            let mut dual = Dual::new(&core);
            let mut last = f64::NEG_INFINITY;
            for k in 0..20 {
                dual.pass(&core, k % 2 == 0);
                assert!(dual.bound >= last - 1e-6);
                last = dual.bound;
            }
        }
    }
}
