//! Local search over sets of recomputed ops, with fixed configs: the cheapest set whose memory keeps a limit.
//!
//! Ops are chosen in groups, one op each or all ops at one position of equal blocks. Every start is a set: none, all, those of
//! policies, and all but the ops between segments of equal length. From there:
//!
//! 1. while the limit is exceeded, recompute the group that takes most off the excess for its time;
//! 2. keep a group again where the limit allows it, the one that saves most time first;
//! 3. exchange a recomputed group for a kept one where that is cheaper.

use shardwright_graph::OpId;
use shardwright_plan::{KeepPrice, KeepPricer};
use shardwright_search::Control;

/// The most groups for which exchanges of two are tried.
const MOST_EXCHANGED: usize = 160;

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
    let mut best: Option<(Vec<bool>, KeepPrice)> = None;
    for start in search.starts(policies) {
        if best.is_some() && control.is_over() {
            break;
        }
        let Some(found) = search.descend(start) else { continue };
        if best.as_ref().is_none_or(|(_, price)| found.1.time < price.time) {
            best = Some(found);
        }
    }
    let (mut set, mut price) = best?;
    search.exchange(&mut set, &mut price);
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
        let mut starts = vec![vec![false; count], vec![true; count]];
        starts.extend(policies.iter().map(|policy| {
            let has = |group: &Vec<OpId>| group.iter().all(|op| policy.binary_search(op).is_ok());
            self.groups.iter().map(has).collect()
        }));
        let mut length = 2;
        while length < count {
            starts.push((0..count).map(|at| at % length != length - 1).collect());
            length += (length / 2).max(1);
        }
        starts.dedup();
        starts
    }

    /// Steps 1 and 2 from a start. None where the limit is not reached.
    fn descend(&mut self, mut set: Vec<bool>) -> Option<(Vec<bool>, KeepPrice)> {
        let mut price = self.price(&set);
        while price.excess > 0 {
            let mut best: Option<(f64, usize, KeepPrice)> = None;
            for at in 0..set.len() {
                if set[at] || self.control.is_over() {
                    continue;
                }
                set[at] = true;
                let own = self.price(&set);
                set[at] = false;
                let Some(gained) = price.excess.checked_sub(own.excess).filter(|gained| *gained > 0) else {
                    continue;
                };
                let rate = gained as f64 / (own.time - price.time).max(1) as f64;
                if best.as_ref().is_none_or(|(known, ..)| rate > *known) {
                    best = Some((rate, at, own));
                }
            }
            let (_, at, own) = best?;
            set[at] = true;
            price = own;
        }
        loop {
            let mut best: Option<(usize, KeepPrice)> = None;
            for at in 0..set.len() {
                if !set[at] || self.control.is_over() {
                    continue;
                }
                set[at] = false;
                let own = self.price(&set);
                set[at] = true;
                let saves = own.excess == 0 && own.time < price.time;
                if saves && best.is_none_or(|(_, known)| own.time < known.time) {
                    best = Some((at, own));
                }
            }
            let Some((at, own)) = best else { break };
            set[at] = false;
            price = own;
        }
        Some((set, price))
    }

    /// Step 3, until no exchange of two groups is cheaper.
    fn exchange(&mut self, set: &mut [bool], price: &mut KeepPrice) {
        if set.len() > MOST_EXCHANGED {
            return;
        }
        let mut improved = true;
        while std::mem::take(&mut improved) {
            for a in 0..set.len() {
                for b in a + 1..set.len() {
                    if self.control.is_over() {
                        return;
                    }
                    // At least one is recomputed now, and kept afterwards.
                    for flips in [[true, false], [false, true], [true, true]] {
                        let before = [set[a], set[b]];
                        let after = [set[a] ^ flips[0], set[b] ^ flips[1]];
                        let frees = (before[0] && !after[0]) || (before[1] && !after[1]);
                        if !frees || (flips != [true, true] && b != a + 1) {
                            continue;
                        }
                        (set[a], set[b]) = (after[0], after[1]);
                        let own = self.price(set);
                        if own.excess == 0 && own.time < price.time {
                            (*price, improved) = (own, true);
                        } else {
                            (set[a], set[b]) = (before[0], before[1]);
                        }
                    }
                }
            }
        }
    }
}
