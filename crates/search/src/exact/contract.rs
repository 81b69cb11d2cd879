//! Builds the working model of a network: removes forbidden values by arc consistency, merges variables that
//! determine one another and reduces time to the binding rows.
//!
//! Compilers' networks are full of hard equalities: an elementwise operator must be split like its input.
//! Where a table allows exactly one partner for each value of either side, the two variables are one.
//! Merging works on the network's shared tables before anything is copied, which keeps memory small.

use super::memo::{Table, TableMemo};
use super::model::{INF, Model, Variable, add};
use super::profile::{Profile, Span};
use crate::network::{FORBIDDEN, Network, VarId};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;

/// Proof that no assignment avoids the forbidden costs and the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Infeasible;

/// Marks a label that is not allowed.
const NONE: u32 = u32::MAX;

/// Builds the working model. Model variable `i` is network variable `i`; labels are choices.
pub fn contract(network: &Network, memo: &mut TableMemo) -> Result<Model, Infeasible> {
    let allowed = arc_consistent(network)?;
    let merged = merge_followers(network, &allowed);
    build(network, &allowed, &merged, memo)
}

/// Per variable and choice: whether it is arc consistent.
fn arc_consistent(network: &Network) -> Result<Vec<Vec<bool>>, Infeasible> {
    let count = network.variables();
    let mut allowed: Vec<Vec<bool>> =
        (0..count as u32).map(|v| network.unary(VarId(v)).iter().map(|&c| c < FORBIDDEN).collect()).collect();
    if allowed.iter().any(|a| !a.contains(&true)) {
        return Err(Infeasible);
    }
    // In a table without forbidden costs every choice has a partner while any choice is left.
    let free: Vec<bool> =
        (0..network.tables() as u32).map(|t| network.table(t).iter().all(|&c| c < FORBIDDEN)).collect();
    let hard = |e: &u32| !free[network.edges()[*e as usize].table as usize];
    let mut queue: VecDeque<u32> = (0..network.edges().len() as u32).filter(hard).collect();
    let mut queued: Vec<bool> = (0..network.edges().len() as u32).map(|e| hard(&e)).collect();
    let mut columns = Vec::new();
    while let Some(e) = queue.pop_front() {
        queued[e as usize] = false;
        let edge = network.edges()[e as usize];
        let (table, width) = (network.table(edge.table), network.choices(edge.v));
        let (u, v) = (edge.u.index(), edge.v.index());
        columns.clear();
        columns.resize(width, false);
        let mut changed = [false; 2];
        for i in 0..allowed[u].len() {
            if !allowed[u][i] {
                continue;
            }
            let mut supported = false;
            for (j, &c) in table[i * width..(i + 1) * width].iter().enumerate() {
                if c < FORBIDDEN && allowed[v][j] {
                    supported = true;
                    columns[j] = true;
                }
            }
            if !supported {
                allowed[u][i] = false;
                changed[0] = true;
            }
        }
        for j in 0..width {
            if allowed[v][j] && !columns[j] {
                allowed[v][j] = false;
                changed[1] = true;
            }
        }
        for (x, changed) in [(edge.u, changed[0]), (edge.v, changed[1])] {
            if changed {
                if !allowed[x.index()].contains(&true) {
                    return Err(Infeasible);
                }
                for &(_, f) in network.neighbours(x) {
                    if f != e && !queued[f as usize] && hard(&f) {
                        queued[f as usize] = true;
                        queue.push_back(f);
                    }
                }
            }
        }
    }
    Ok(allowed)
}

/// For each variable its leader (itself, if it leads), and its choice as a function of the leader's.
struct MergeMap {
    root: Vec<u32>,
    map: Vec<Vec<u32>>,
}

/// Merges variables joined by tables that allow exactly one partner for each choice of either side.
fn merge_followers(network: &Network, allowed: &[Vec<bool>]) -> MergeMap {
    let count = network.variables();
    let size: Vec<usize> = allowed.iter().map(|a| a.iter().filter(|&&x| x).count()).collect();
    // partner[e][choice of u] = choice of v, where the edge is a bijection.
    let partner: Vec<Option<Vec<u32>>> = network
        .edges()
        .iter()
        .map(|edge| {
            let (u, v) = (edge.u.index(), edge.v.index());
            if size[u] != size[v] || size[u] < 2 {
                return None;
            }
            let (table, width) = (network.table(edge.table), network.choices(edge.v));
            let mut map = vec![NONE; allowed[u].len()];
            let mut taken = vec![false; width];
            for i in 0..map.len() {
                if !allowed[u][i] {
                    continue;
                }
                let row = &table[i * width..(i + 1) * width];
                let mut partners = (0..width).filter(|&j| row[j] < FORBIDDEN && allowed[v][j]);
                let j = partners.next()?;
                if partners.next().is_some() || taken[j] {
                    return None;
                }
                taken[j] = true;
                map[i] = j as u32;
            }
            Some(map)
        })
        .collect();
    let mut root = vec![NONE; count];
    let mut map = vec![Vec::new(); count];
    let mut stack = Vec::new();
    for r in 0..count {
        if root[r] != NONE {
            continue;
        }
        root[r] = r as u32;
        map[r] = (0..allowed[r].len()).map(|i| if allowed[r][i] { i as u32 } else { NONE }).collect();
        stack.push(r);
        while let Some(x) = stack.pop() {
            for &(y, e) in network.neighbours(VarId(x as u32)) {
                let Some(bijection) = &partner[e as usize] else { continue };
                if root[y.index()] != NONE {
                    continue;
                }
                root[y.index()] = r as u32;
                let step: Vec<u32> = if network.edges()[e as usize].u.index() == x {
                    bijection.clone()
                } else {
                    let mut inverse = vec![NONE; allowed[x].len()];
                    for (i, &j) in bijection.iter().enumerate().filter(|(_, j)| **j != NONE) {
                        inverse[j as usize] = i as u32;
                    }
                    inverse
                };
                map[y.index()] =
                    map[x].iter().map(|&m| if m == NONE { NONE } else { step[m as usize] }).collect();
                stack.push(y.index());
            }
        }
    }
    MergeMap { root, map }
}

fn build(
    network: &Network,
    allowed: &[Vec<bool>],
    merged: &MergeMap,
    memo: &mut TableMemo,
) -> Result<Model, Infeasible> {
    let count = network.variables();
    let mut model = Model::default();
    let (rows, row_of) = time_rows(network, allowed);
    debug_assert!(rows == 0 || network.usage_limit().is_some(), "rows follow from a limit");
    model.slack = vec![network.usage_limit().unwrap_or(0); rows];
    model.row_ids = (0..rows as u32).collect();
    let mut spans: Vec<Vec<Span>> = vec![Vec::new(); count];
    let labels: Vec<Vec<u32>> = (0..count)
        .map(|v| (0..allowed[v].len() as u32).filter(|&i| allowed[v][i as usize]).collect())
        .collect();
    for v in 0..count {
        let own = merged.root[v] as usize == v;
        model.vars.push(Variable {
            labels: if own { labels[v].clone() } else { Vec::new() },
            label_count: allowed[v].len() as u32,
            unary: if own { vec![0; labels[v].len()] } else { Vec::new() },
            profile: Profile::default(),
            pairs: Vec::new(),
            alive: own,
        });
    }
    for v in 0..count {
        let (root, map) = (merged.root[v] as usize, &merged.map[v]);
        let (unary, usage) = (network.unary(VarId(v as u32)), network.usage(VarId(v as u32)));
        for (k, &l) in labels[root].iter().enumerate() {
            let cost = &mut model.vars[root].unary[k];
            *cost = add(*cost, unary[map[l as usize] as usize]);
        }
        if let Some((lo, hi)) = row_of(v) {
            let usage = labels[root].iter().map(|&l| usage[map[l as usize] as usize]).collect();
            spans[root].push(Span { lo, hi, usage });
        }
        if root != v {
            let map = map.iter().map(|&m| if m == NONE { 0 } else { m }).collect();
            model.follow(v as u32, root as u32, map);
        }
    }
    for (v, spans) in spans.into_iter().enumerate() {
        model.vars[v].profile = Profile::from_overlapping(spans);
    }
    add_edges(network, merged, &labels, &mut model, memo);
    Ok(model)
}

fn add_edges(
    network: &Network,
    merged: &MergeMap,
    labels: &[Vec<u32>],
    model: &mut Model,
    memo: &mut TableMemo,
) {
    let root = |v: VarId| merged.root[v.index()];
    let mut order: Vec<(u32, u32, u32)> = Vec::with_capacity(network.edges().len());
    for (e, edge) in network.edges().iter().enumerate() {
        let (a, b) = (root(edge.u), root(edge.v));
        order.push((a.min(b), a.max(b), e as u32));
    }
    order.sort_unstable();
    let cell = |e: u32, i: u32, j: u32| {
        // `i` and `j` are labels of the roots of the edge's `u` and `v`.
        let edge = &network.edges()[e as usize];
        let (cu, cv) = (merged.map[edge.u.index()][i as usize], merged.map[edge.v.index()][j as usize]);
        let cost = network.pair(edge, cu, cv);
        if cost >= FORBIDDEN { INF } else { cost }
    };
    // Model tables by network table.
    let mut copies: FxHashMap<u32, Table> = FxHashMap::default();
    let mut k = 0;
    while k < order.len() {
        let (a, b, _) = order[k];
        let end = k + order[k..].partition_point(|&(x, y, _)| (x, y) == (a, b));
        let group = &order[k..end];
        k = end;
        let (la, lb) = (&labels[a as usize], &labels[b as usize]);
        if a == b {
            for &(_, _, e) in group {
                for (cost, &l) in model.vars[a as usize].unary.iter_mut().zip(la) {
                    *cost = add(*cost, cell(e, l, l));
                }
            }
            continue;
        }
        let whole = |v: VarId| root(v) == v.0 && labels[v.index()].len() == network.choices(v);
        let plain = match group {
            // The network's table, unchanged.
            &[(_, _, e)] => Some(network.edges()[e as usize]).filter(|edge| whole(edge.u) && whole(edge.v)),
            _ => None,
        };
        let table = match plain {
            Some(edge) => copies
                .entry(edge.table)
                .or_insert_with(|| {
                    let cells = network.table(edge.table).iter();
                    memo.table(cells.map(|&c| if c >= FORBIDDEN { INF } else { c }).collect())
                })
                .clone(),
            None => {
                let mut table = vec![0i64; la.len() * lb.len()];
                for &(_, _, e) in group {
                    let straight = root(network.edges()[e as usize].u) == a;
                    for (i, &li) in la.iter().enumerate() {
                        for (j, &lj) in lb.iter().enumerate() {
                            let c = if straight { cell(e, li, lj) } else { cell(e, lj, li) };
                            let at = &mut table[i * lb.len() + j];
                            *at = add(*at, c);
                        }
                    }
                }
                memo.table(table)
            }
        };
        let id = model.pairs.len() as u32;
        model.pairs.push(Some(super::model::Pair { u: a, v: b, cost: table }));
        model.vars[a as usize].pairs.push(id);
        model.vars[b as usize].pairs.push(id);
    }
}

/// The binding times, numbered: those after a start and before the next end. At every other time a subset of the
/// usages of a binding time counts. Also returns each variable's rows.
fn time_rows(network: &Network, allowed: &[Vec<bool>]) -> (usize, impl Fn(usize) -> Option<(u32, u32)>) {
    let uses = |v: usize| {
        let id = VarId(v as u32);
        let span = network.interval(id);
        let any = network.usage(id).iter().zip(&allowed[v]).any(|(&u, &ok)| ok && u > 0);
        if network.usage_limit().is_some() && !span.is_empty() && any { Some(span) } else { None }
    };
    let spans: Vec<_> = (0..network.variables()).map(uses).collect();
    let mut events: Vec<(u64, bool)> = Vec::new();
    for s in spans.iter().flatten() {
        events.push((s.lo, true));
        events.push((s.hi, false));
    }
    // Ends before starts at the same time, since intervals are half-open.
    events.sort_unstable();
    events.dedup();
    let mut rows: Vec<u64> = Vec::new();
    for w in events.windows(2) {
        if w[0].1 && !w[1].1 {
            rows.push(w[0].0);
        }
    }
    let count = rows.len();
    let row_of = move |v: usize| {
        let s = spans[v]?;
        let lo = rows.partition_point(|&r| r < s.lo);
        let hi = rows.partition_point(|&r| r < s.hi);
        Some((lo as u32, hi as u32))
    };
    (count, row_of)
}
