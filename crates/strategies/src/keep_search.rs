//! Local search over sets of recomputed ops, with fixed configs: the cheapest set whose memory keeps a limit.
//!
//! Ops are chosen in groups, one op each or all ops at one position of equal blocks.
//!
//! 1. Starts are priced: no group, all, those of policies, all but every n-th (Chen et al. 2016, "√n", with every n), and all but the
//!    ends of segments of equal bytes (Chen's "greedy"). So no answer is above these heuristics.
//! 2. The best starts descend. While the limit is exceeded, the group is recomputed that takes most off the excess for its time.
//!    Then groups are kept again where the limit allows it, the one that saves most time first.
//! 3. From the best set, a random walk flips and exchanges groups within the limit. It accepts times above the best one by at
//!    most a threshold, which falls to zero.

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use shardwright_graph::OpId;
use shardwright_plan::{KeepPrice, KeepPricer};
use shardwright_search::Control;
use std::collections::BTreeSet;

/// Chen's greedy segments have one part in so many of all bytes, at least.
const MOST_SEGMENTS: u64 = 64;
/// Starts that descend.
const DESCENTS: usize = 6;
/// Moves of the walk per group, and at most.
const MOVES_PER_GROUP: usize = 300;
const MOST_MOVES: usize = 60_000;

/// A set of recomputed ops that keeps a limit.
#[derive(Clone, Debug)]
pub struct KeepAnswer {
    /// The ops, ascending.
    pub recomputed: Vec<OpId>,
    /// Their price.
    pub price: KeepPrice,
}

/// The cheapest set of recomputed ops that was found within a limit of memory. None where no start leads to one.
pub fn cheapest_set(
    pricer: &mut KeepPricer<'_, '_>,
    groups: &[Vec<OpId>],
    policies: &[Vec<OpId>],
    limit: u64,
    control: &Control<'_>,
) -> Option<KeepAnswer> {
    let mut search = Search { pricer, groups, limit, control };
    let mut starts: Vec<(Vec<bool>, KeepPrice)> = Vec::new();
    for set in search.starts(policies) {
        let price = search.price(&set);
        starts.push((set, price));
    }
    // Those that fit first, the cheapest of them first; of the others those that miss the limit by least.
    starts.sort_by_key(|(_, price)| (price.excess, price.time));
    let mut best = starts.first().filter(|(_, price)| price.excess == 0).cloned();
    let fitting = starts.iter().filter(|(_, price)| price.excess == 0).take(DESCENTS / 2);
    // Those that exceed the limit and take least time lead to other sets.
    let mut over: Vec<_> = starts.iter().filter(|(_, price)| price.excess > 0).collect();
    over.sort_by_key(|(_, price)| price.time);
    let chosen: Vec<_> = fitting.chain(over.into_iter().take(DESCENTS / 2)).cloned().collect();
    for start in chosen {
        if best.is_some() && control.is_over() {
            break;
        }
        let Some(found) = search.descend(start) else { continue };
        if best.as_ref().is_none_or(|(_, price)| found.1.time < price.time) {
            best = Some(found);
        }
    }
    let best = search.walk(best?);
    let (set, price) = search.keep_again(best);
    Some(KeepAnswer { recomputed: search.ops(&set), price })
}

struct Search<'s, 'p, 'a, 'c> {
    pricer: &'s mut KeepPricer<'p, 'a>,
    groups: &'s [Vec<OpId>],
    limit: u64,
    control: &'s Control<'c>,
}

impl Search<'_, '_, '_, '_> {
    fn ops(&self, set: &[bool]) -> Vec<OpId> {
        let chosen = self.groups.iter().zip(set).filter(|(_, chosen)| **chosen);
        let mut ops: Vec<OpId> = chosen.flat_map(|(group, _)| group.iter().copied()).collect();
        ops.sort_unstable();
        ops
    }

    fn price(&mut self, set: &[bool]) -> KeepPrice {
        let ops = self.ops(set);
        self.pricer.price(&ops, self.limit)
    }

    /// The sets that searches start from.
    fn starts(&self, policies: &[Vec<OpId>]) -> Vec<Vec<bool>> {
        let count = self.groups.len();
        let mut starts = BTreeSet::from([vec![false; count], vec![true; count]]);
        starts.extend(policies.iter().map(|policy| {
            let has = |group: &Vec<OpId>| group.iter().all(|op| policy.binary_search(op).is_ok());
            self.groups.iter().map(has).collect::<Vec<bool>>()
        }));
        for length in 2..count {
            for first in [0, length - 1] {
                starts.insert((0..count).map(|at| at % length != first).collect());
            }
        }
        let bytes: Vec<u64> = self
            .groups
            .iter()
            .map(|group| group.iter().map(|&op| self.pricer.result_bytes(op)).sum())
            .collect();
        let all: u64 = bytes.iter().sum();
        for parts in 1..=MOST_SEGMENTS {
            let mut segment = 0;
            let ends_segment = |&own: &u64| {
                segment += own;
                let ends = segment > all / parts;
                segment = if ends { 0 } else { segment };
                !ends
            };
            starts.insert(bytes.iter().map(ends_segment).collect());
        }
        starts.into_iter().collect()
    }

    /// Recomputes groups until the limit is kept, then keeps groups again. None where the limit is not reached.
    fn descend(&mut self, (mut set, mut price): (Vec<bool>, KeepPrice)) -> Option<(Vec<bool>, KeepPrice)> {
        // The excess that a group takes off per picosecond hardly grows while others are recomputed. So groups are priced again
        // in the order of the last rates, until no other one promises more.
        let mut rates: Vec<(f64, usize)> =
            (0..set.len()).filter(|at| !set[*at]).map(|at| (f64::INFINITY, at)).collect();
        while price.excess > 0 {
            let mut best: Option<(f64, usize, KeepPrice)> = None;
            rates.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            for (rate, at) in &mut rates {
                if best.as_ref().is_some_and(|(known, ..)| known >= rate) || self.control.is_over() {
                    break;
                }
                set[*at] = true;
                let own = self.price(&set);
                set[*at] = false;
                let gained = price.excess.saturating_sub(own.excess);
                *rate = gained as f64 / (own.time - price.time).max(1) as f64;
                if gained > 0 && best.as_ref().is_none_or(|(known, ..)| *rate > *known) {
                    best = Some((*rate, *at, own));
                }
            }
            let (_, at, own) = best?;
            set[at] = true;
            price = own;
            rates.retain(|(_, other)| *other != at);
            // A rate of zero may rise when what stands in its way is gone.
            rates.iter_mut().filter(|own| own.0 == 0.0).for_each(|own| own.0 = f64::MIN_POSITIVE);
        }
        Some(self.keep_again((set, price)))
    }

    /// Keeps groups again where the limit allows it, the one that saves most time first.
    fn keep_again(&mut self, (mut set, mut price): (Vec<bool>, KeepPrice)) -> (Vec<bool>, KeepPrice) {
        let mut improved = true;
        while std::mem::take(&mut improved) {
            let mut saved: Vec<(i64, usize)> = Vec::new();
            for at in 0..set.len() {
                if set[at] && !self.control.is_over() {
                    set[at] = false;
                    let own = self.price(&set);
                    set[at] = true;
                    if own.excess == 0 && own.time < price.time {
                        saved.push((own.time - price.time, at));
                    }
                }
            }
            saved.sort_unstable();
            for (_, at) in saved {
                set[at] = false;
                let own = self.price(&set);
                if own.excess == 0 && own.time < price.time {
                    (price, improved) = (own, true);
                } else {
                    set[at] = true;
                }
            }
        }
        (set, price)
    }

    /// The best set of a random walk within the limit.
    fn walk(&mut self, best: (Vec<bool>, KeepPrice)) -> (Vec<bool>, KeepPrice) {
        let count = self.groups.len();
        // The threshold begins at half of the time that a recomputed group takes on average.
        let recomputed = best.0.iter().filter(|set| **set).count();
        if recomputed == 0 || count < 2 {
            return best;
        }
        let all = (best.1.time - self.price(&vec![false; count]).time).max(0);
        let threshold = all / recomputed as i64 / 2;
        let moves = (MOVES_PER_GROUP * count).min(MOST_MOVES);
        let mut random = Xoshiro256PlusPlus::seed_from_u64(self.control.seed);
        let (mut best, mut set) = (best.clone(), best.0);
        for at in 0..moves {
            if self.control.is_over() {
                break;
            }
            let mut changed: Vec<usize> = vec![random.random_range(0..count)];
            let first = changed[0];
            match random.random_range(0..4u32) {
                // A neighbour: the end of a segment moves.
                0 | 1 => changed.push(if first + 1 < count { first + 1 } else { first - 1 }),
                2 => changed.extend([random.random_range(0..count), random.random_range(0..count)]),
                _ => {}
            }
            changed.sort_unstable();
            changed.dedup();
            changed.iter().for_each(|&own| set[own] = !set[own]);
            let price = self.price(&set);
            let slack = (i128::from(threshold) * (moves - at) as i128 / moves as i128) as i64;
            if price.excess == 0 && price.time <= best.1.time + slack {
                if price.time < best.1.time {
                    best = (set.clone(), price);
                }
            } else {
                changed.iter().for_each(|&own| set[own] = !set[own]);
            }
        }
        best
    }
}
