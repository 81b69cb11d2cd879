//! Lower bounds: sequential reweighted message passing on the pairs (Kolmogorov, "A new look at
//! reweighted message passing", 2015, which is TRW-S for pairwise costs), with one Lagrange multiplier per
//! row of time, moved along averaged subgradients.
//!
//! Any messages and any non-negative multipliers give a valid bound; floating point only decides which
//! ones. The bound that is reported is recomputed from them in exact integers, see [`Dual::certify`].

use super::core::Core;
use super::kernel::{argmin, min_plus};
use super::model::INF;

/// Binary digits after the point in the exact evaluation of a bound.
const FRACTION: u32 = 24;

/// Messages and multipliers.
#[derive(Clone, Debug)]
pub struct Dual {
    /// What was moved from each pair to its `u`, then to its `v`.
    messages: Vec<f64>,
    first: Vec<usize>,
    /// Multiplier of each row.
    pub lambda: Vec<f64>,
    /// Unary costs with the price of their usage.
    priced: Vec<f64>,
    /// Average of the subgradients.
    direction: Vec<f64>,
    /// The assignment that the last pass preferred, variable by variable.
    pub preferred: Vec<u32>,
    /// Reparametrised unary costs as the last pass saw them.
    pub marginal: Vec<f64>,
    /// The bound after the last pass, up to rounding.
    pub bound: f64,
    scratch: Vec<f64>,
    left: Vec<f64>,
}

impl Dual {
    /// No messages, no prices.
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
            preferred: vec![0; core.variables() as usize],
            marginal: vec![0.0; core.value_count()],
            bound: f64::NEG_INFINITY,
            scratch: Vec::new(),
            left: Vec::new(),
        };
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
            self.marginal[values].copy_from_slice(&theta);
            let most = before.max(after).max(1);
            // What stays at the variable; the rest is spread over the pairs ahead.
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

    /// Moves the multipliers along the averaged subgradient at the preferred assignment, aiming at
    /// `target` with a step of `scale` times Polyak's.
    pub fn step(&mut self, core: &Core, target: f64, scale: f64, keep: f64) {
        let load = core.load(&self.preferred);
        let mut norm = 0.0;
        for (t, d) in self.direction.iter_mut().enumerate() {
            let g = (load[t] - core.slack[t]) as f64;
            *d = keep * *d + (1.0 - keep) * g;
            if self.lambda[t] > 0.0 || *d > 0.0 {
                norm += *d * *d;
            }
        }
        if norm <= 0.0 {
            return;
        }
        let step = scale * (target - self.bound).max(0.0) / norm;
        for (l, &d) in self.lambda.iter_mut().zip(&self.direction) {
            *l = (*l + step * d).max(0.0);
        }
        self.price(core);
    }

    /// An assignment: variables in order, each given those before it and the messages from those after.
    /// Best called after a descending pass.
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
        let mut theta: Vec<i128> = Vec::new();
        for v in 0..core.variables() {
            theta.clear();
            theta.extend(core.unary[core.values(v)].iter().map(|&c| i128::from(c) << FRACTION));
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
            total += theta.iter().copied().min().unwrap_or(0);
        }
        for (k, p) in core.pairs.iter().enumerate() {
            let (mu, mv) = (self.message(core, k as u32, p.u), self.message(core, k as u32, p.v));
            let cols = core.size(p.v);
            let table = core.exact_table(k as u32, p.u);
            let mut least = i128::MAX;
            for (row, &a) in table.chunks_exact(cols).zip(&messages[mu]) {
                for (&c, &b) in row.iter().zip(&messages[mv.clone()]) {
                    if c < INF {
                        least = least.min((i128::from(c) << FRACTION) - a - b);
                    }
                }
            }
            if least < i128::MAX {
                total += least;
            }
        }
        let up = (total + (1i128 << FRACTION) - 1) >> FRACTION;
        up.clamp(0, i128::from(INF)) as i64
    }
}

/// Sums of all prefixes; one more entry than values.
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
