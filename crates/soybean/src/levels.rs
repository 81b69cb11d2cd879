//! SoyBean's algorithm for one cut: a dynamic program over breadth-first levels.
//!
//! Units and groups form a bipartite graph. Breadth-first search from the unit that computes the first output alternates
//! between levels of units and levels of groups. A unit of level `i` touches only groups of levels `i-1` and `i`, so the
//! least cost of everything up to level `i` depends on the tilings of level `i` alone:
//!
//! ```text
//! least_i(tilings_i) = min over tilings_(i-1) of least_(i-1)(tilings_(i-1)) + Σ units of level i
//! ```
//!
//! The work grows with the product of the tilings of neighbouring levels. That is small for chains and large for wide
//! graphs, which [`crate::eliminate`] solves.

use crate::one_cut::{CutSolution, OneCut, UnitChoice};

/// The most pairs of tilings of two neighbouring levels that are tried.
const MOST_PAIRS: usize = 1 << 16;

/// Units of one level, and the groups that no earlier level touches.
#[derive(Debug, Default, PartialEq, Eq)]
struct Level {
    units: Vec<usize>,
    groups: Vec<u32>,
}

/// Breadth-first levels from the unit `root`. Parts of the graph that it does not reach start from their first unit.
fn levels(cut: &OneCut, root: usize) -> Vec<Level> {
    let mut readers: Vec<Vec<usize>> = vec![Vec::new(); cut.tilings.len()];
    for (at, unit) in cut.units.iter().enumerate() {
        for touched in &unit.group_costs {
            readers[touched.group as usize].push(at);
        }
    }
    let (mut seen, mut reached) = (vec![false; cut.units.len()], vec![false; cut.tilings.len()]);
    let mut all = Vec::new();
    for root in std::iter::once(root).chain(0..cut.units.len()) {
        let mut units = Vec::new();
        if root < seen.len() && !std::mem::replace(&mut seen[root], true) {
            units.push(root);
        }
        while !units.is_empty() {
            let group_costs = units.iter().flat_map(|&unit| &cut.units[unit].group_costs);
            let groups: Vec<u32> = group_costs
                .map(|touched| touched.group)
                .filter(|&g| !std::mem::replace(&mut reached[g as usize], true))
                .collect();
            let beyond = groups.iter().flat_map(|&g| &readers[g as usize]);
            let next = beyond.copied().filter(|&unit| !std::mem::replace(&mut seen[unit], true)).collect();
            all.push(Level { units, groups });
            units = next;
        }
    }
    all
}

/// The number of joint tilings of a level's groups; `None` if there are too many.
fn states(cut: &OneCut, level: &Level) -> Option<usize> {
    let tilings = level.groups.iter().map(|&g| cut.tilings[g as usize].len());
    tilings.into_iter().try_fold(1usize, |n, t| n.checked_mul(t)).filter(|&n| n <= MOST_PAIRS)
}

/// The optimal solution; `None` if a level is too wide.
pub(crate) fn solve(cut: &OneCut, root: usize) -> Option<CutSolution> {
    let levels = levels(cut, root);
    let mut counts = Vec::with_capacity(levels.len());
    for level in &levels {
        let before = counts.last().copied().unwrap_or(1);
        counts.push(states(cut, level).filter(|n| n * before <= MOST_PAIRS)?);
    }
    let none = Level::default();
    // Cost, then rank to break ties.
    let mut least = vec![(0u64, 0u64)];
    let mut from: Vec<Vec<u32>> = Vec::with_capacity(levels.len());
    for (at, level) in levels.iter().enumerate() {
        let before = if at == 0 { &none } else { &levels[at - 1] };
        let units: Vec<Table> =
            level.units.iter().map(|&unit| Table::new(cut, &cut.units[unit], before, level)).collect();
        let (mut next, mut back) = (Vec::with_capacity(counts[at]), Vec::with_capacity(counts[at]));
        debug_assert!(!least.is_empty(), "a level has at least one state: every group has a tiling");
        for state in 0..counts[at] {
            let total = |(prior, &(cost, rank)): (usize, &(u64, u64))| {
                let sum: u64 = units.iter().map(|u| u.costs[u.before[prior] + u.own[state]]).sum();
                (cost + sum, rank, prior as u32)
            };
            let (cost, rank, prior) = least.iter().enumerate().map(total).min().unwrap_or((0, 0, 0));
            next.push((cost, rank + own_rank(cut, level, state)));
            back.push(prior);
        }
        least = next;
        from.push(back);
    }
    let mut state = (0..least.len()).min_by_key(|&s| least[s]).unwrap_or(0);
    let mut tilings: Vec<u32> = vec![0; cut.tilings.len()];
    for (level, back) in levels.iter().zip(&from).rev() {
        let mut rest = state;
        for &g in &level.groups {
            let count = cut.tilings[g as usize].len();
            tilings[g as usize] = (rest % count) as u32;
            rest /= count;
        }
        state = back[state] as usize;
    }
    Some(cut.solution(tilings, true))
}

/// The rank of a level's tilings.
fn own_rank(cut: &OneCut, level: &Level, mut state: usize) -> u64 {
    let mut rank = 0;
    for &g in &level.groups {
        let ranks = &cut.ranks[g as usize];
        rank += ranks[state % ranks.len()];
        state /= ranks.len();
    }
    rank
}

/// A unit's least cost under every tiling of the groups that it touches.
struct Table {
    costs: Vec<u64>,
    /// Per state of the level before: its part of the index into `costs`.
    before: Vec<usize>,
    /// Per state of this level: the rest of the index.
    own: Vec<usize>,
}

impl Table {
    fn new(cut: &OneCut, unit: &UnitChoice, before: &Level, own: &Level) -> Self {
        let count = |g: u32| cut.tilings[g as usize].len();
        // One digit per group, least significant first, as in states.
        let mut strides: Vec<(u32, usize)> = Vec::with_capacity(unit.group_costs.len());
        let mut size = 1;
        for touched in &unit.group_costs {
            strides.push((touched.group, size));
            size *= count(touched.group);
        }
        let digit = |group: u32, index: usize| {
            let stride = strides.iter().find(|(g, _)| *g == group).map_or(1, |(_, stride)| *stride);
            (index / stride % count(group)) as u32
        };
        let costs = (0..size).map(|index| unit.cheapest(|g| digit(g, index)).1).collect();
        let offsets = |level: &Level| {
            let mut offsets = vec![0];
            for &g in &level.groups {
                let stride = strides.iter().find(|(known, _)| *known == g).map_or(0, |(_, stride)| *stride);
                let digits = (0..count(g)).map(|digit| digit * stride);
                offsets = digits.flat_map(|d| offsets.iter().map(move |o| o + d)).collect();
            }
            offsets
        };
        Self { costs, before: offsets(before), own: offsets(own) }
    }
}
