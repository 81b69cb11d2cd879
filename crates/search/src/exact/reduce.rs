//! Reductions that keep at least one optimal assignment: forbidden and dominated values, fixed
//! variables, functional and separable pairs, and elimination of variables with at most two neighbours.
//!
//! A variable with usage at some row is never eliminated, only fixed or merged. A value is dominated only by one with no
//! more usage at any row. The reductions run to a fixpoint, over a queue of variables whose neighbourhood changed.

use super::contract::Infeasible;
use super::memo::{Table, TableMemo};
use super::model::{INF, Model, add};
use super::profile::Profile;
use super::rows;
use std::collections::VecDeque;

/// Largest table, in cells, that an elimination may create.
const MAX_ELIMINATION: usize = 1 << 22;
/// The most cells that a merge may add.
const MAX_GROWTH: usize = 1 << 16;
/// The most elementary steps of the dominance check of one variable: first at the most telling entries, then over whole
/// tables.
const MAX_PROBES: usize = 100_000_000;
const MAX_COMPARISONS: usize = 2_000_000_000;

/// Variables that are visited before the first look at the clock: small models are always reduced.
const UNTIMED_VISITS: usize = 256;

/// Reduces to a fixpoint, with a memo of the model's tables. False where `stop` ended that before the fixpoint.
pub fn reduce(model: &mut Model, memo: TableMemo, stop: &dyn Fn() -> bool) -> Result<bool, Infeasible> {
    let start = model.live();
    run(model, &start, memo, stop)
}

/// Reduces a model in which only the values of `v` changed since the last fixpoint.
pub fn reduce_around(model: &mut Model, v: u32) -> Result<(), Infeasible> {
    let mut start = vec![v];
    start.extend(
        model.vars[v as usize].pairs.iter().filter_map(|&p| Some(model.pairs[p as usize].as_ref()?.other(v))),
    );
    run(model, &start, TableMemo::off(), &|| false).map(drop)
}

fn run(
    model: &mut Model,
    start: &[u32],
    memo: TableMemo,
    stop: &dyn Fn() -> bool,
) -> Result<bool, Infeasible> {
    let mut visits = 0;
    let mut reducer = Reducer { queued: vec![false; model.vars.len()], queue: VecDeque::new(), memo };
    for &v in start {
        reducer.push(v);
    }
    loop {
        for (v, keep) in rows::tighten(model)? {
            reducer.keep(model, v, &keep)?;
        }
        if reducer.queue.is_empty() {
            return Ok(true);
        }
        while let Some(v) = reducer.queue.pop_front() {
            reducer.queued[v as usize] = false;
            visits += 1;
            if visits > UNTIMED_VISITS && stop() {
                return Ok(false);
            }
            if model.vars[v as usize].alive {
                reducer.visit(model, v)?;
            }
        }
    }
}

struct Reducer {
    queued: Vec<bool>,
    queue: VecDeque<u32>,
    memo: TableMemo,
}

impl Reducer {
    fn push(&mut self, v: u32) {
        if !self.queued[v as usize] {
            self.queued[v as usize] = true;
            self.queue.push_back(v);
        }
    }

    fn push_around(&mut self, model: &Model, v: u32) {
        self.push(v);
        for &p in &model.vars[v as usize].pairs {
            if let Some(p) = &model.pairs[p as usize] {
                self.push(p.other(v));
            }
        }
    }

    fn keep(&mut self, model: &mut Model, v: u32, keep: &[bool]) -> Result<(), Infeasible> {
        if !keep.contains(&true) {
            return Err(Infeasible);
        }
        if keep.contains(&false) {
            model.keep(v, keep, &mut self.memo);
            self.push_around(model, v);
        }
        Ok(())
    }

    fn visit(&mut self, model: &mut Model, v: u32) -> Result<(), Infeasible> {
        let keep = supported_values(model, v, &mut self.memo);
        self.keep(model, v, &keep)?;
        self.split_separable(model, v);
        if model.size(v) > 1
            && let Some(keep) = undominated_values(model, v, &mut self.memo)
        {
            self.keep(model, v, &keep)?;
        }
        if model.size(v) == 1 {
            self.fix(model, v);
        } else if !self.contract_functional(model, v) && model.vars[v as usize].profile.is_empty() {
            self.eliminate(model, v);
        }
        Ok(())
    }

    /// Folds a variable with one value into its neighbours. `rows` subtracts its usage from the slack, since all of a
    /// single value's usage is its least usage.
    fn fix(&mut self, model: &mut Model, v: u32) {
        for s in std::mem::take(&mut model.vars[v as usize].profile.spans) {
            for slack in &mut model.slack[s.lo as usize..s.hi as usize] {
                *slack -= s.usage[0];
            }
        }
        self.push_around(model, v);
        for p in model.vars[v as usize].pairs.clone() {
            let Some(pair) = model.take_pair(p) else { continue };
            let other = &mut model.vars[pair.other(v) as usize];
            for (u, &c) in other.unary.iter_mut().zip(&*pair.cost) {
                *u = add(*u, c);
            }
        }
        model.constant = add(model.constant, model.vars[v as usize].unary[0]);
        model.remove(v, None, &[0]);
    }

    /// Removes pairs whose cost is a sum of a term of either side.
    fn split_separable(&mut self, model: &mut Model, v: u32) {
        for p in model.vars[v as usize].pairs.clone() {
            let Some(pair) = &model.pairs[p as usize] else { continue };
            let cols = model.size(pair.v);
            if !self.memo.properties(&pair.cost, cols).separable {
                continue;
            }
            let Some(pair) = model.take_pair(p) else { continue };
            let base = pair.cost[0];
            // The first column carries the row's term, which stays non-negative. The column's term may be negative, so
            // its least value moves to the constant first.
            let shift = pair.cost[..cols].iter().map(|&c| c - base).min().unwrap_or(0);
            for (i, u) in model.vars[pair.u as usize].unary.iter_mut().enumerate() {
                *u = add(*u, pair.cost[i * cols] + shift);
            }
            for (j, u) in model.vars[pair.v as usize].unary.iter_mut().enumerate() {
                *u = add(*u, pair.cost[j] - base - shift);
            }
            self.push(pair.u);
            self.push(pair.v);
        }
    }

    /// Merges `v` into a neighbour that determines it, or a neighbour into `v`. True if `v` was removed or changed.
    fn contract_functional(&mut self, model: &mut Model, v: u32) -> bool {
        for p in model.vars[v as usize].pairs.clone() {
            let Some(other) = model.pairs[p as usize].as_ref().map(|p| p.other(v)) else { continue };
            for (leader, follower) in [(other, v), (v, other)] {
                if let Some(map) = function(model, p, leader, follower, &mut self.memo)
                    && growth(model, leader, follower) <= MAX_GROWTH
                {
                    self.merge(model, p, leader, follower, &map);
                    return true;
                }
            }
        }
        false
    }

    fn merge(&mut self, model: &mut Model, pair: u32, leader: u32, follower: u32, map: &[u32]) {
        self.push_around(model, follower);
        let table = model.oriented(pair, leader, &mut self.memo);
        let width = model.size(follower);
        model.take_pair(pair);
        for (i, &m) in map.iter().enumerate() {
            let c = add(table[i * width + m as usize], model.vars[follower as usize].unary[m as usize]);
            let u = &mut model.vars[leader as usize].unary[i];
            *u = add(*u, c);
        }
        let mut spans = model.vars[follower as usize].profile.mapped(map);
        if !spans.is_empty() {
            spans.append(&mut model.vars[leader as usize].profile.spans);
            model.vars[leader as usize].profile = Profile::from_overlapping(spans);
        }
        for q in model.vars[follower as usize].pairs.clone() {
            let table = model.oriented(q, follower, &mut self.memo);
            let Some(pair) = model.take_pair(q) else { continue };
            let other = pair.other(follower);
            let width = model.size(other);
            let moved =
                map.iter().flat_map(|&m| table[m as usize * width..][..width].iter().copied()).collect();
            let moved = self.memo.table(moved);
            model.add_pair(leader, other, moved, &mut self.memo);
        }
        model.remove(follower, Some(leader), map);
        self.push_around(model, leader);
    }

    /// Eliminates a variable without usage that has at most two neighbours.
    fn eliminate(&mut self, model: &mut Model, v: u32) {
        let pairs = model.vars[v as usize].pairs.clone();
        match pairs[..] {
            [] => {
                let unary = &model.vars[v as usize].unary;
                let best = (0..unary.len()).min_by_key(|&i| unary[i]).unwrap_or(0);
                model.constant = add(model.constant, unary[best]);
                model.remove(v, None, &[best as u32]);
            }
            [p] => {
                let table = model.oriented(p, v, &mut self.memo);
                let Some(pair) = model.take_pair(p) else { return };
                let other = pair.other(v);
                let cols = model.size(other);
                // For every value of the neighbour: the first cheapest value of `v`, and its cost.
                let (mut choose, mut least) = (vec![0; cols], vec![i64::MAX; cols]);
                for (i, (row, &own)) in
                    table.chunks_exact(cols).zip(&model.vars[v as usize].unary).enumerate()
                {
                    for ((&c, choose), least) in row.iter().zip(&mut choose).zip(&mut least) {
                        let cost = add(own, c);
                        if cost < *least {
                            (*choose, *least) = (i as u32, cost);
                        }
                    }
                }
                for (u, least) in model.vars[other as usize].unary.iter_mut().zip(least) {
                    *u = add(*u, least.min(INF));
                }
                model.remove(v, Some(other), &choose);
                self.push_around(model, other);
            }
            [p, q] => {
                let (Some(a), Some(b)) = (
                    model.pairs[p as usize].as_ref().map(|p| p.other(v)),
                    model.pairs[q as usize].as_ref().map(|q| q.other(v)),
                ) else {
                    return;
                };
                if model.size(a).saturating_mul(model.size(b)) > MAX_ELIMINATION {
                    return;
                }
                let (ta, tb) = (model.oriented(p, v, &mut self.memo), model.oriented(q, v, &mut self.memo));
                let best = self.memo.eliminated(&model.vars[v as usize].unary, &ta, &tb);
                model.take_pair(p);
                model.take_pair(q);
                model.remove_cheapest(v, &[a, b], vec![ta, tb]);
                model.add_pair(a, b, best, &mut self.memo);
                self.push_around(model, a);
                self.push_around(model, b);
            }
            _ => {}
        }
    }
}

/// Which values of `v` have a finite cost and a partner in every pair.
fn supported_values(model: &Model, v: u32, memo: &mut TableMemo) -> Vec<bool> {
    let var = &model.vars[v as usize];
    let mut keep: Vec<bool> = var.unary.iter().map(|&c| c < INF).collect();
    for &p in &var.pairs {
        let Some(pair) = &model.pairs[p as usize] else { continue };
        let cols = model.size(pair.v);
        if memo.properties(&pair.cost, cols).finite {
            continue;
        }
        if pair.u == v {
            for (k, row) in keep.iter_mut().zip(pair.cost.chunks_exact(cols)) {
                *k &= row.iter().any(|&c| c < INF);
            }
        } else {
            let mut any = vec![false; cols];
            for row in pair.cost.chunks_exact(cols) {
                for (a, &c) in any.iter_mut().zip(row) {
                    *a |= c < INF;
                }
            }
            for (k, a) in keep.iter_mut().zip(any) {
                *k &= a;
            }
        }
    }
    keep
}

/// Which values of `v` are not dominated: no other value costs at most as much for every choice of the neighbours and
/// uses no more at any row. `None` if all stay.
fn undominated_values(model: &Model, v: u32, memo: &mut TableMemo) -> Option<Vec<bool>> {
    let var = &model.vars[v as usize];
    let size = var.unary.len();
    let cells: usize = var
        .pairs
        .iter()
        .filter_map(|&p| model.pairs[p as usize].as_ref())
        .map(|p| model.size(p.other(v)))
        .sum();
    let squares = size.saturating_mul(size);
    if squares.saturating_mul(var.pairs.len() + 1) > MAX_PROBES
        || squares.saturating_mul(cells + var.profile.spans.len() + 1) > MAX_COMPARISONS
    {
        return None;
    }
    let tables: Vec<Table> = var.pairs.iter().map(|&p| model.oriented(p, v, memo)).collect();
    if var.profile.is_empty() {
        return memo.undominated(&var.unary, &tables, || compare_values(&var.unary, &tables, &var.profile));
    }
    compare_values(&var.unary, &tables, &var.profile)
}

/// Which values, given their costs, tables (their own major) and usages, are not dominated. `None` if all stay.
fn compare_values(unary: &[i64], tables: &[Table], profile: &Profile) -> Option<Vec<bool>> {
    let size = unary.len();
    let tables: Vec<(&[i64], usize)> = tables.iter().map(|t| (&t[..], t.len() / size)).collect();
    // The neighbours' cheapest values for value `i`. A value that costs more there does not dominate `i`.
    let suits: Vec<Vec<usize>> = (0..size)
        .map(|i| {
            tables
                .iter()
                .map(|(t, w)| {
                    let row = &t[i * w..(i + 1) * w];
                    (0..*w).min_by_key(|&x| row[x]).unwrap_or(0)
                })
                .collect()
        })
        .collect();
    let mut keep = vec![true; size];
    for i in 0..size {
        for j in 0..size {
            if i == j || !keep[j] {
                continue;
            }
            let at = |k: usize| {
                tables
                    .iter()
                    .zip(&suits[i])
                    .try_fold(unary[k], |sum, ((t, w), &x)| {
                        let c = t[k * w + x];
                        if c >= INF { None } else { Some(sum + c) }
                    })
                    .unwrap_or(INF)
            };
            if at(j) <= at(i) && profile.no_more(j, i) && dominates(unary[j], unary[i], &tables, j, i) {
                keep[i] = false;
                break;
            }
        }
    }
    keep.contains(&false).then_some(keep)
}

/// Whether value `j` costs at most as much as value `i` for every choice of the neighbours.
fn dominates(unary_j: i64, unary_i: i64, tables: &[(&[i64], usize)], j: usize, i: usize) -> bool {
    let mut worst = i128::from(unary_j) - i128::from(unary_i);
    for (t, w) in tables {
        let mut most = i64::MIN;
        for (&cj, &ci) in t[j * w..(j + 1) * w].iter().zip(&t[i * w..(i + 1) * w]) {
            if ci >= INF {
                continue;
            }
            if cj >= INF {
                return false;
            }
            most = most.max(cj - ci);
        }
        if most == i64::MIN {
            // Value `i` has no partner here; arc consistency will remove it.
            return false;
        }
        worst += i128::from(most);
    }
    worst <= 0
}

/// The value of `follower` for each value of `leader`, if each allows exactly one.
fn function(model: &Model, pair: u32, leader: u32, follower: u32, memo: &mut TableMemo) -> Option<Vec<u32>> {
    let p = model.pairs[pair as usize].as_ref()?;
    let (rows, cols) = (model.size(leader), model.size(follower));
    if rows < cols || (cols > 1 && memo.properties(&p.cost, model.size(p.v)).finite) {
        return None;
    }
    let cost = model.oriented(pair, leader, memo);
    let mut map = Vec::with_capacity(rows);
    for row in cost.chunks_exact(cols) {
        let mut partners = (0..cols).filter(|&j| row[j] < INF);
        let j = partners.next()?;
        if partners.next().is_some() {
            return None;
        }
        map.push(j as u32);
    }
    Some(map)
}

/// Table cells added by merging `follower` into `leader`.
fn growth(model: &Model, leader: u32, follower: u32) -> usize {
    let more = model.size(leader) - model.size(follower);
    let around: usize = model.vars[follower as usize]
        .pairs
        .iter()
        .filter_map(|&p| model.pairs[p as usize].as_ref())
        .map(|p| p.other(follower))
        .filter(|&w| w != leader)
        .map(|w| model.size(w))
        .sum();
    more * around
}
