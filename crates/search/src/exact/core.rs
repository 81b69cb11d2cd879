//! The network after the reductions, in a dense layout for the inner loops of search and bounds.
//!
//! A core is immutable. Variables are `0..n`, and values are numbered across all variables. Tables are floating-point
//! numbers in both orientations, equal ones stored once; exact integers are kept for evaluation. Forbidden costs are
//! a number `big` that exceeds every finite total.

use super::memo::TableIdentity;
use super::model::{INF, Model, Pair};
use rustc_hash::FxHashMap;
use std::ops::Range;

/// A pair of variables, `u < v`.
#[derive(Clone, Copy, Debug)]
pub struct CorePair {
    /// Row variable.
    pub u: u32,
    /// Column variable.
    pub v: u32,
    /// Offset of its table with `u` major.
    at: usize,
    /// Offset of its table with `v` major.
    at_transposed: usize,
    /// The largest absolute value of its finite costs.
    pub largest: i64,
}

/// A neighbour of a variable.
#[derive(Clone, Copy, Debug)]
pub struct Link {
    /// The other variable.
    pub to: u32,
    /// The pair that joins them.
    pub pair: u32,
}

/// Usage of a variable over the rows `lo..hi`.
#[derive(Clone, Copy, Debug)]
pub struct CoreSpan {
    /// First row.
    pub lo: u32,
    /// The row after the last.
    pub hi: u32,
    at: usize,
}

/// The dense network.
#[derive(Clone, Debug)]
pub struct Core {
    first: Vec<u32>,
    /// Unary cost of every value.
    pub unary: Vec<i64>,
    /// All pairs, by `(u, v)`.
    pub pairs: Vec<CorePair>,
    exact: Vec<i64>,
    float: Vec<f64>,
    first_link: Vec<u32>,
    links: Vec<Link>,
    first_span: Vec<u32>,
    spans: Vec<CoreSpan>,
    usage: Vec<i64>,
    /// The usage available at each row.
    pub slack: Vec<i64>,
    /// Cost paid by every assignment.
    pub constant: i64,
    /// The floating-point number that stands for "forbidden".
    pub big: f64,
    /// The model's variable behind each variable.
    pub ids: Vec<u32>,
    /// The model's label of each value.
    pub labels: Vec<u32>,
    /// The model's number of each row.
    pub row_ids: Vec<u32>,
}

impl Core {
    /// Lays out the live part of a model.
    pub fn new(model: &Model) -> Self {
        let ids = order(model);
        let mut index = vec![u32::MAX; model.vars.len()];
        for (i, &v) in ids.iter().enumerate() {
            index[v as usize] = i as u32;
        }
        let mut core = Core {
            first: vec![0],
            unary: Vec::new(),
            pairs: Vec::new(),
            exact: Vec::new(),
            float: Vec::new(),
            first_link: Vec::new(),
            links: Vec::new(),
            first_span: vec![0],
            spans: Vec::new(),
            usage: Vec::new(),
            slack: model.slack.clone(),
            constant: model.constant,
            big: 0.0,
            ids,
            labels: Vec::new(),
            row_ids: model.row_ids.clone(),
        };
        for &v in &core.ids {
            let var = &model.vars[v as usize];
            core.unary.extend_from_slice(&var.unary);
            core.labels.extend_from_slice(&var.labels);
            core.first.push(core.unary.len() as u32);
            for s in &var.profile.spans {
                core.spans.push(CoreSpan { lo: s.lo, hi: s.hi, at: core.usage.len() });
                core.usage.extend_from_slice(&s.usage);
            }
            core.first_span.push(core.spans.len() as u32);
        }
        core.add_pairs(model, &index);
        core
    }

    fn add_pairs(&mut self, model: &Model, index: &[u32]) {
        // Model pairs, sorted by core variables.
        let mut pairs: Vec<(u32, u32, &Pair)> = model
            .pairs
            .iter()
            .flatten()
            .map(|p| {
                let (u, v) = (index[p.u as usize], index[p.v as usize]);
                (u.min(v), u.max(v), p)
            })
            .collect();
        pairs.sort_unstable_by_key(|p| (p.0, p.1));
        let most =
            |costs: &[i64]| costs.iter().copied().filter(|&c| c < INF).max().unwrap_or(0).max(0) as f64;
        let mut total: f64 = (0..self.variables()).map(|v| most(&self.unary[self.values(v)])).sum();
        // By model table: its offset, the transposed table's offset, its largest cost and largest absolute cost.
        let mut known: FxHashMap<(TableIdentity, usize), (usize, usize, f64, i64)> = FxHashMap::default();
        let largest_of =
            |costs: &[i64]| costs.iter().filter(|&&c| c < INF).map(|c| c.abs()).max().unwrap_or(0);
        let mut pool: FxHashMap<Vec<i64>, usize> = FxHashMap::default();
        for (u, v, pair) in pairs {
            let columns = model.size(pair.v);
            let (straight, transposed, most_here, largest) =
                *known.entry((TableIdentity(pair.cost.clone()), columns)).or_insert_with(|| {
                    let transposed = super::model::transpose(&pair.cost, model.size(pair.u), columns);
                    let straight = self.intern(&mut pool, pair.cost.to_vec());
                    (straight, self.intern(&mut pool, transposed), most(&pair.cost), largest_of(&pair.cost))
                });
            total += most_here;
            let in_order = index[pair.u as usize] == u;
            let (at, at_transposed) = if in_order { (straight, transposed) } else { (transposed, straight) };
            self.pairs.push(CorePair { u, v, at, at_transposed, largest });
        }
        self.big = 2.0 * total + 1.0;
        let big = self.big;
        self.float = self.exact.iter().map(|&c| if c >= INF { big } else { c as f64 }).collect();
        let mut links = vec![Vec::new(); self.variables() as usize];
        for (i, p) in self.pairs.iter().enumerate() {
            links[p.u as usize].push(Link { to: p.v, pair: i as u32 });
            links[p.v as usize].push(Link { to: p.u, pair: i as u32 });
        }
        self.first_link.push(0);
        for mut l in links {
            l.sort_unstable_by_key(|l| l.to);
            self.links.append(&mut l);
            self.first_link.push(self.links.len() as u32);
        }
    }

    fn intern(&mut self, pool: &mut FxHashMap<Vec<i64>, usize>, table: Vec<i64>) -> usize {
        let next = self.exact.len();
        *pool.entry(table).or_insert_with_key(|t| {
            self.exact.extend_from_slice(t);
            next
        })
    }

    /// Number of variables.
    pub fn variables(&self) -> u32 {
        self.ids.len() as u32
    }

    /// The numbers of the values of `v` among all values.
    pub fn values(&self, v: u32) -> Range<usize> {
        self.first[v as usize] as usize..self.first[v as usize + 1] as usize
    }

    /// Number of values of `v`.
    pub fn size(&self, v: u32) -> usize {
        (self.first[v as usize + 1] - self.first[v as usize]) as usize
    }

    /// Number of values of all variables.
    pub fn value_count(&self) -> usize {
        self.unary.len()
    }

    /// The neighbours of `v`, ascending.
    pub fn links(&self, v: u32) -> &[Link] {
        &self.links[self.first_link[v as usize] as usize..self.first_link[v as usize + 1] as usize]
    }

    /// The table of a pair with `row` as its row variable.
    pub fn table(&self, pair: u32, row: u32) -> &[f64] {
        let p = &self.pairs[pair as usize];
        let at = if p.u == row { p.at } else { p.at_transposed };
        &self.float[at..at + self.size(p.u) * self.size(p.v)]
    }

    /// The exact costs of a pair with `row` as its row variable.
    pub fn exact_table(&self, pair: u32, row: u32) -> &[i64] {
        let p = &self.pairs[pair as usize];
        let at = if p.u == row { p.at } else { p.at_transposed };
        &self.exact[at..at + self.size(p.u) * self.size(p.v)]
    }

    /// The usage of `v` over time.
    pub fn spans(&self, v: u32) -> &[CoreSpan] {
        &self.spans[self.first_span[v as usize] as usize..self.first_span[v as usize + 1] as usize]
    }

    /// The usages of all values of `v` in one of its spans.
    pub fn usage(&self, v: u32, span: &CoreSpan) -> &[i64] {
        &self.usage[span.at..span.at + self.size(v)]
    }

    /// The assignment with these labels of the model's variables. The cheapest value replaces a removed label.
    pub fn with_labels(&self, labels: &[u32]) -> Vec<u32> {
        let value = |v: u32| {
            let label = labels[self.ids[v as usize] as usize];
            let values = self.values(v);
            let cheapest = || {
                let unary = &self.unary[values.clone()];
                (0..unary.len()).min_by_key(|&i| unary[i]).unwrap_or(0)
            };
            self.labels[values.clone()].iter().position(|&l| l == label).unwrap_or_else(cheapest) as u32
        };
        (0..self.variables()).map(value).collect()
    }

    /// Adds (`sign` = 1) or subtracts (-1) the usage of one choice at every row.
    pub fn add_load(&self, load: &mut [i64], v: u32, value: u32, sign: i64) {
        for s in self.spans(v) {
            let u = sign * self.usage[s.at + value as usize];
            if u != 0 {
                for l in &mut load[s.lo as usize..s.hi as usize] {
                    *l += u;
                }
            }
        }
    }

    /// The usage of an assignment at every row.
    pub fn load(&self, x: &[u32]) -> Vec<i64> {
        let mut delta = vec![0i64; self.slack.len() + 1];
        for v in 0..self.variables() {
            for s in self.spans(v) {
                let u = self.usage[s.at + x[v as usize] as usize];
                delta[s.lo as usize] += u;
                delta[s.hi as usize] -= u;
            }
        }
        delta.pop();
        let mut now = 0;
        for d in &mut delta {
            now += *d;
            *d = now;
        }
        delta
    }

    /// The largest excess over all rows; zero or less if the assignment fits.
    pub fn overflow(&self, load: &[i64]) -> i64 {
        load.iter().zip(&self.slack).map(|(l, s)| l - s).max().unwrap_or(0)
    }
}

/// The order of variables: by time of use, which is the order of creation. Messages that sweep along it travel far.
fn order(model: &Model) -> Vec<u32> {
    model.live()
}
