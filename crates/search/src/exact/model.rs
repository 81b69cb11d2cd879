//! The working network of the exact solver: mutable, compact, with an undo trail.
//!
//! Reductions shrink it. [`Model::lift`] extends an assignment of the remaining variables to the original network.
//! Values keep their original labels, so that domains may shrink without changes to the trail. This module holds the
//! state and the primitive changes; `reduce` decides which changes to make.

use super::memo::{Table, TableIdentity, TableMemo};
use super::profile::Profile;
use rustc_hash::FxHashSet;

/// A cost that means "forbidden" inside the solver. Two of them add without overflow, and every finite
/// total is below it.
pub const INF: i64 = i64::MAX / 2;

/// Adds two costs, forbidden if either is.
pub fn add(a: i64, b: i64) -> i64 {
    (a + b).min(INF)
}

/// A pairwise table between live variables `u` and `v`, row-major in `u`.
#[derive(Clone, Debug)]
pub struct Pair {
    /// Row variable.
    pub u: u32,
    /// Column variable.
    pub v: u32,
    /// Costs; `INF` where forbidden.
    pub cost: Table,
}

impl Pair {
    /// The end that is not `x`.
    pub fn other(&self, x: u32) -> u32 {
        if self.u == x { self.v } else { self.u }
    }
}

/// One variable.
#[derive(Clone, Debug)]
pub struct Variable {
    /// The label of each remaining value.
    pub labels: Vec<u32>,
    /// The original number of labels.
    pub label_count: u32,
    /// The cost of each remaining value.
    pub unary: Vec<i64>,
    /// Usage over time of each remaining value; the least is zero at every time.
    pub profile: Profile,
    /// Incident pairs.
    pub pairs: Vec<u32>,
    /// Whether the variable is still in the network.
    pub alive: bool,
}

/// A variable that a removed one depends on.
#[derive(Clone, Debug)]
struct Parent {
    var: u32,
    /// Its number of values at the removal.
    width: usize,
    /// The row of each of its labels.
    row: Vec<u32>,
}

/// How to recover a removed variable: its label, given those of its parents.
#[derive(Clone, Debug)]
struct RemovedVariable {
    var: u32,
    /// The variables it depends on.
    parents: Vec<Parent>,
    label: LabelRule,
}

/// A removed variable's label, given the rows of its parents.
#[derive(Clone, Debug)]
enum LabelRule {
    /// By the row of the only parent, or a constant.
    Map(Vec<u32>),
    /// The label of the cheapest value: its own cost plus, per parent, a table with the removed variable's values as
    /// rows. Stored instead of all results, since only one is needed.
    Cheapest { labels: Vec<u32>, unary: Vec<i64>, tables: Vec<Table> },
}

/// A network that reductions can change.
#[derive(Clone, Debug, Default)]
pub struct Model {
    /// All variables, dead ones included.
    pub vars: Vec<Variable>,
    /// All pairs; dead ones are `None`.
    pub pairs: Vec<Option<Pair>>,
    /// Cost that every assignment pays.
    pub constant: i64,
    /// The usage available at each row of time, above the least usages of all variables.
    pub slack: Vec<i64>,
    /// The original number of each row, ascending.
    pub row_ids: Vec<u32>,
    trail: Vec<RemovedVariable>,
}

impl Model {
    /// Number of remaining values of `v`.
    pub fn size(&self, v: u32) -> usize {
        self.vars[v as usize].unary.len()
    }

    /// The live variables, ascending.
    pub fn live(&self) -> Vec<u32> {
        (0..self.vars.len() as u32).filter(|&v| self.vars[v as usize].alive).collect()
    }

    /// Cells of all live tables, shared ones once.
    pub fn distinct_cells(&self) -> u64 {
        let mut seen = FxHashSet::default();
        let fresh = self.pairs.iter().flatten().filter(|pair| seen.insert(TableIdentity(pair.cost.clone())));
        fresh.map(|pair| pair.cost.len() as u64).sum()
    }

    /// The table of `pair` with `x` as the row variable.
    pub fn oriented(&self, pair: u32, x: u32, memo: &mut TableMemo) -> Table {
        let Some(p) = &self.pairs[pair as usize] else {
            debug_assert!(false, "a live variable lists live pairs only");
            return Table::default();
        };
        if p.u == x { p.cost.clone() } else { memo.transposed(&p.cost, self.size(p.v)) }
    }

    /// The pair between two variables.
    pub fn between(&self, a: u32, b: u32) -> Option<u32> {
        let (x, y) = if self.vars[a as usize].pairs.len() <= self.vars[b as usize].pairs.len() {
            (a, b)
        } else {
            (b, a)
        };
        self.vars[x as usize]
            .pairs
            .iter()
            .copied()
            .find(|&p| self.pairs[p as usize].as_ref().is_some_and(|p| p.other(x) == y))
    }

    /// Adds a table between `a` (rows) and `b` to the present one, if any.
    pub fn add_pair(&mut self, a: u32, b: u32, cost: Table, memo: &mut TableMemo) {
        if let Some(p) = self.between(a, b) {
            let cols = self.size(b);
            if let Some(pair) = &mut self.pairs[p as usize] {
                let cost = if pair.u == a { cost } else { memo.transposed(&cost, cols) };
                pair.cost = memo.sum(&pair.cost, &cost);
            }
            return;
        }
        let id = self.pairs.len() as u32;
        self.pairs.push(Some(Pair { u: a, v: b, cost }));
        self.vars[a as usize].pairs.push(id);
        self.vars[b as usize].pairs.push(id);
    }

    /// Removes a pair and returns it.
    pub fn take_pair(&mut self, pair: u32) -> Option<Pair> {
        let p = self.pairs[pair as usize].take()?;
        for x in [p.u, p.v] {
            self.vars[x as usize].pairs.retain(|&q| q != pair);
        }
        Some(p)
    }

    /// Keeps only the values of `v` for which `keep` holds.
    pub fn keep(&mut self, v: u32, keep: &[bool], memo: &mut TableMemo) {
        let var = &mut self.vars[v as usize];
        let size = var.unary.len();
        retain(&mut var.labels, keep);
        retain(&mut var.unary, keep);
        var.profile.keep(keep);
        for p in var.pairs.clone() {
            let Some(other) = self.pairs[p as usize].as_ref().map(|p| p.other(v)) else { continue };
            let other_size = self.size(other);
            let Some(pair) = &mut self.pairs[p as usize] else { continue };
            let (rows, columns) = if pair.u == v { (true, other_size) } else { (false, size) };
            pair.cost = memo.restricted(&pair.cost, columns, rows, keep);
        }
    }

    /// Removes a variable without pairs or usage that follows `parent`: `choose` gives its value for each
    /// value there; without a parent, its only entry is the value.
    pub fn remove(&mut self, v: u32, parent: Option<u32>, choose: &[u32]) {
        debug_assert!(self.vars[v as usize].pairs.is_empty());
        let labels = &self.vars[v as usize].labels;
        let label = LabelRule::Map(choose.iter().map(|&c| labels[c as usize]).collect());
        let parents = parent.iter().map(|&p| self.parent(p)).collect();
        self.trail.push(RemovedVariable { var: v, parents, label });
        self.bury(v);
    }

    /// Removes a variable without pairs or usage that takes its cheapest value, given its tables (its own
    /// values major) with each of `parents`.
    pub fn remove_cheapest(&mut self, v: u32, parents: &[u32], tables: Vec<Table>) {
        debug_assert!(self.vars[v as usize].pairs.is_empty());
        let parents = parents.iter().map(|&p| self.parent(p)).collect();
        let var = &mut self.vars[v as usize];
        let labels = std::mem::take(&mut var.labels);
        let unary = std::mem::take(&mut var.unary);
        self.trail.push(RemovedVariable {
            var: v,
            parents,
            label: LabelRule::Cheapest { labels, unary, tables },
        });
        self.bury(v);
    }

    fn parent(&self, p: u32) -> Parent {
        let parent = &self.vars[p as usize];
        let mut row = vec![0; parent.label_count as usize];
        for (r, &l) in parent.labels.iter().enumerate() {
            row[l as usize] = r as u32;
        }
        Parent { var: p, width: parent.labels.len(), row }
    }

    fn bury(&mut self, v: u32) {
        let var = &mut self.vars[v as usize];
        var.alive = false;
        var.unary = Vec::new();
        var.profile = Profile::default();
    }

    /// Removes a variable that was never connected: its label is `map[label of root]`.
    pub fn follow(&mut self, v: u32, root: u32, map: Vec<u32>) {
        let row = (0..map.len() as u32).collect();
        let parents = vec![Parent { var: root, width: map.len(), row }];
        self.trail.push(RemovedVariable { var: v, parents, label: LabelRule::Map(map) });
        self.vars[v as usize].alive = false;
    }

    /// The live part, renumbered in order, with values labelled by position and without trail.
    pub fn compact(&self) -> Self {
        let live = self.live();
        let mut index = vec![u32::MAX; self.vars.len()];
        for (i, &v) in live.iter().enumerate() {
            index[v as usize] = i as u32;
        }
        let mut out = Model {
            constant: self.constant,
            slack: self.slack.clone(),
            row_ids: self.row_ids.clone(),
            ..Model::default()
        };
        for &v in &live {
            let var = &self.vars[v as usize];
            let size = var.unary.len() as u32;
            out.vars.push(Variable {
                labels: (0..size).collect(),
                label_count: size,
                pairs: Vec::new(),
                ..var.clone()
            });
        }
        for p in self.pairs.iter().flatten() {
            let id = out.pairs.len() as u32;
            let (u, v) = (index[p.u as usize], index[p.v as usize]);
            out.pairs.push(Some(Pair { u, v, cost: p.cost.clone() }));
            out.vars[u as usize].pairs.push(id);
            out.vars[v as usize].pairs.push(id);
        }
        out
    }

    /// Extends labels of the live variables to all variables, backwards over the trail.
    pub fn lift(&self, labels: &mut [u32]) {
        for undo in self.trail.iter().rev() {
            let row = |p: &Parent| p.row[labels[p.var as usize] as usize] as usize;
            labels[undo.var as usize] = match &undo.label {
                LabelRule::Map(map) => map[undo.parents.first().map_or(0, row)],
                LabelRule::Cheapest { labels: own, unary, tables } => {
                    let cost = |i: usize| {
                        undo.parents
                            .iter()
                            .zip(tables)
                            .fold(unary[i], |sum, (p, t)| add(sum, t[i * p.width + row(p)]))
                    };
                    (0..unary.len()).min_by_key(|&i| cost(i)).map_or(0, |i| own[i])
                }
            };
        }
    }
}

/// Keeps the entries whose flag is set.
pub fn retain<T: Copy>(items: &mut Vec<T>, keep: &[bool]) {
    let mut i = 0;
    items.retain(|_| {
        i += 1;
        keep[i - 1]
    });
}

/// The transpose of a row-major table.
pub fn transpose(cost: &[i64], rows: usize, cols: usize) -> Vec<i64> {
    let mut out = vec![0; cost.len()];
    for i in 0..rows {
        for j in 0..cols {
            out[j * rows + i] = cost[i * cols + j];
        }
    }
    out
}
