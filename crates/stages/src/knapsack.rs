//! One choice per item, at least total time, under a memory limit: the multiple-choice knapsack inside a stage.
//!
//! The linear relaxation bounds the time from below, and a greedy completion from above. Where these leave a question open, a
//! list of undominated partial choices decides it, cut by the relaxation's price of memory.

/// A choice of an item.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Choice {
    pub seconds: f64,
    pub bytes: f64,
    /// The caller's number of this choice.
    pub index: u32,
}

/// Items with their choices.
#[derive(Clone, Debug, Default)]
pub(crate) struct Items {
    choices: Vec<Choice>,
    ends: Vec<usize>,
}

/// The least time, bounded from both sides, and the choices behind the upper bound.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Selection {
    pub lower_bound_seconds: f64,
    pub seconds: f64,
    /// One caller's number per item; empty where nothing fits.
    pub chosen: Vec<u32>,
}

/// More partial choices than this are not kept; the answer is then bounded, not exact.
const MOST_PARTIAL_CHOICES: usize = 100_000;

impl Items {
    pub fn clear(&mut self) {
        self.choices.clear();
        self.ends.clear();
    }

    /// Adds an item. Dominated choices are dropped; the rest is sorted by rising memory and falling time.
    pub fn push(&mut self, choices: impl Iterator<Item = Choice>) {
        let start = self.choices.len();
        self.choices.extend(choices);
        let item = &mut self.choices[start..];
        item.sort_by(|a, b| a.bytes.total_cmp(&b.bytes).then(a.seconds.total_cmp(&b.seconds)));
        let mut kept = start;
        for next in start..self.choices.len() {
            if next == start || self.choices[next].seconds < self.choices[kept - 1].seconds {
                self.choices[kept] = self.choices[next];
                kept += 1;
            }
        }
        self.choices.truncate(kept);
        self.ends.push(kept);
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    fn item(&self, item: usize) -> &[Choice] {
        let start = if item == 0 { 0 } else { self.ends[item - 1] };
        &self.choices[start..self.ends[item]]
    }

    /// The least total time within `limit_bytes`. Unless `tight`, the search ends once it knows on which side of `at_most` it is.
    pub fn select(&self, limit_bytes: f64, at_most: f64, tight: bool) -> Selection {
        let none =
            Selection { lower_bound_seconds: f64::INFINITY, seconds: f64::INFINITY, chosen: Vec::new() };
        if (0..self.len()).any(|item| self.item(item).is_empty()) {
            return none;
        }
        let mut chosen: Vec<usize> = vec![0; self.len()];
        let (base_seconds, base_bytes) = self.total(&chosen);
        if base_bytes > limit_bytes {
            return none;
        }
        let fastest: Vec<usize> = (0..self.len()).map(|item| self.item(item).len() - 1).collect();
        let (seconds, bytes) = self.total(&fastest);
        if bytes <= limit_bytes {
            return self.selection(seconds, &fastest);
        }
        let increments = self.increments();
        let (mut seconds, mut bytes) = (base_seconds, base_bytes);
        let mut blocked = vec![false; self.len()];
        // The relaxation's bound, and its price of memory in seconds per byte.
        let (mut lower, mut price) = (f64::NEG_INFINITY, 0.0);
        for step in &increments {
            if blocked[step.item] {
                continue;
            }
            if bytes + step.bytes <= limit_bytes {
                seconds -= step.seconds;
                bytes += step.bytes;
                chosen[step.item] = step.to;
            } else {
                if lower == f64::NEG_INFINITY {
                    price = step.seconds / step.bytes;
                    lower = seconds - price * (limit_bytes - bytes);
                }
                blocked[step.item] = true;
            }
        }
        let (upper, _) = self.total(&chosen);
        let lower = if lower == f64::NEG_INFINITY { upper } else { lower };
        // The bound is a difference of sums: a margin keeps it valid under rounding.
        let lower = (lower - 1e-12 * base_seconds).min(upper);
        let mut greedy = self.selection(upper, &chosen);
        greedy.lower_bound_seconds = lower;
        let is_decided = !tight && (lower > at_most || upper <= at_most);
        if is_decided || lower > at_most || upper - lower <= 1e-11 * upper {
            return greedy;
        }
        self.exact(limit_bytes, at_most, price, greedy)
    }

    fn total(&self, chosen: &[usize]) -> (f64, f64) {
        chosen.iter().enumerate().fold((0.0, 0.0), |(seconds, bytes), (item, &choice)| {
            let choice = self.item(item)[choice];
            (seconds + choice.seconds, bytes + choice.bytes)
        })
    }

    fn selection(&self, seconds: f64, chosen: &[usize]) -> Selection {
        let chosen = chosen.iter().enumerate().map(|(item, &choice)| self.item(item)[choice].index).collect();
        Selection { lower_bound_seconds: seconds, seconds, chosen }
    }

    /// Steps along the convex hulls of all items, the most time saved per byte first.
    fn increments(&self) -> Vec<Increment> {
        let mut increments = Vec::new();
        let mut hull: Vec<usize> = Vec::new();
        for item in 0..self.len() {
            let choices = self.item(item);
            hull.clear();
            for next in 0..choices.len() {
                // The middle point is above the line between its neighbours: the relaxation never stops there.
                let above = |a: &Choice, b: &Choice, c: &Choice| {
                    (a.seconds - b.seconds) * (c.bytes - a.bytes)
                        <= (a.seconds - c.seconds) * (b.bytes - a.bytes)
                };
                while let [.., a, b] = hull[..] {
                    if !above(&choices[a], &choices[b], &choices[next]) {
                        break;
                    }
                    hull.pop();
                }
                hull.push(next);
            }
            increments.extend(hull.windows(2).map(|pair| {
                let (from, to) = (choices[pair[0]], choices[pair[1]]);
                Increment {
                    item,
                    to: pair[1],
                    seconds: from.seconds - to.seconds,
                    bytes: to.bytes - from.bytes,
                }
            }));
        }
        // Bytes are positive: equal bytes would have been dominated.
        increments.sort_by(|a, b| {
            (b.seconds / b.bytes)
                .total_cmp(&(a.seconds / a.bytes))
                .then(a.item.cmp(&b.item))
                .then(a.to.cmp(&b.to))
        });
        increments
    }

    /// Decides by a list of undominated partial choices whether a selection beats the greedy one.
    fn exact(&self, limit_bytes: f64, at_most: f64, price: f64, greedy: Selection) -> Selection {
        // Only selections that are at most this good matter.
        let target = greedy.seconds.min(at_most);
        let (mut fixed, mut excess_limit) =
            (Partial::default(), target * (1.0 + 1e-12) + price * limit_bytes);
        let priced = |choice: &Choice| choice.seconds + price * choice.bytes;
        let mut free: Vec<(usize, Vec<usize>)> = Vec::new();
        for item in 0..self.len() {
            excess_limit -= self.item(item).iter().map(priced).fold(f64::INFINITY, f64::min);
        }
        let mut chosen = vec![0; self.len()];
        for (item, chosen) in chosen.iter_mut().enumerate() {
            let choices = self.item(item);
            let least = choices.iter().map(priced).fold(f64::INFINITY, f64::min);
            let margin = 1e-11 * least.abs();
            let left: Vec<usize> = (0..choices.len())
                .filter(|&choice| priced(&choices[choice]) - least <= excess_limit + margin)
                .collect();
            match left[..] {
                [] => {
                    let lower_bound_seconds = greedy.seconds.min(at_most.next_up());
                    return Selection { lower_bound_seconds, ..greedy };
                }
                [only] => {
                    *chosen = only;
                    fixed = fixed.with(&choices[only], priced(&choices[only]) - least);
                }
                _ => free.push((item, left)),
            }
        }
        // Equal items follow each other, so that their permutations meet in the same partial choice.
        let spread = |item: usize, left: &[usize]| {
            let (first, last) = (self.item(item)[left[0]], self.item(item)[left[left.len() - 1]]);
            (last.bytes - first.bytes, first.seconds - last.seconds)
        };
        free.sort_by(|(a, left), (b, right)| {
            let (a_spread, b_spread) = (spread(*a, left), spread(*b, right));
            b_spread.0.total_cmp(&a_spread.0).then(b_spread.1.total_cmp(&a_spread.1)).then(a.cmp(b))
        });
        let mut least_after = vec![0.0; free.len() + 1];
        for (at, (item, left)) in free.iter().enumerate().rev() {
            least_after[at] = least_after[at + 1] + self.item(*item)[left[0]].bytes;
        }
        let margin = 1e-11 * (target.abs() + price * limit_bytes);
        let mut levels: Vec<Vec<Partial>> = vec![vec![fixed]];
        for (at, (item, left)) in free.iter().enumerate() {
            let choices = self.item(*item);
            let least = choices.iter().map(priced).fold(f64::INFINITY, f64::min);
            let mut next = Vec::new();
            for (parent, partial) in levels[at].iter().enumerate() {
                for &choice in left {
                    let excess = priced(&choices[choice]) - least;
                    let more = partial.with(&choices[choice], excess).from(parent, choice);
                    if more.excess <= excess_limit + margin && more.bytes + least_after[at + 1] <= limit_bytes
                    {
                        next.push(more);
                    }
                }
            }
            next.sort_by(|a, b| a.bytes.total_cmp(&b.bytes).then(a.seconds.total_cmp(&b.seconds)));
            let mut fastest = f64::INFINITY;
            next.retain(|partial| {
                let is_kept = partial.seconds < fastest;
                fastest = fastest.min(partial.seconds);
                is_kept
            });
            if next.len() > MOST_PARTIAL_CHOICES {
                return greedy;
            }
            levels.push(next);
        }
        // The last undominated partial choice is the fastest.
        let Some(mut at) = levels[free.len()].len().checked_sub(1) else {
            return Selection { lower_bound_seconds: greedy.seconds.min(at_most.next_up()), ..greedy };
        };
        for (level, (item, _)) in free.iter().enumerate().rev() {
            let partial = levels[level + 1][at];
            chosen[*item] = partial.choice;
            at = partial.parent;
        }
        let (seconds, _) = self.total(&chosen);
        if seconds >= greedy.seconds {
            return Selection { lower_bound_seconds: greedy.seconds, ..greedy };
        }
        self.selection(seconds, &chosen)
    }
}

struct Increment {
    item: usize,
    to: usize,
    seconds: f64,
    bytes: f64,
}

/// A choice for some of the items.
#[derive(Clone, Copy, Debug, Default)]
struct Partial {
    seconds: f64,
    bytes: f64,
    /// How far its priced sum is above the relaxation's.
    excess: f64,
    parent: usize,
    choice: usize,
}

impl Partial {
    fn with(&self, choice: &Choice, excess: f64) -> Partial {
        Partial {
            seconds: self.seconds + choice.seconds,
            bytes: self.bytes + choice.bytes,
            excess: self.excess + excess,
            ..*self
        }
    }

    fn from(self, parent: usize, choice: usize) -> Partial {
        Partial { parent, choice, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn brute(items: &[Vec<(u32, u32)>], limit: u32) -> Option<u32> {
        let mut best = vec![None; limit as usize + 1];
        best[0] = Some(0);
        for item in items {
            let mut next: Vec<Option<u32>> = vec![None; limit as usize + 1];
            for (used, seconds) in best.iter().enumerate().filter_map(|(used, s)| s.map(|s| (used, s))) {
                for &(more, bytes) in item {
                    if let Some(slot) = next.get_mut(used + bytes as usize) {
                        *slot = Some(slot.map_or(seconds + more, |known: u32| known.min(seconds + more)));
                    }
                }
            }
            best = next;
        }
        best.into_iter().flatten().min()
    }

    proptest! {
        #[test]
        fn selections_equal_a_table_over_all_bytes(
            items in prop::collection::vec(prop::collection::vec((0u32..40, 0u32..40), 1..4), 0..12),
            limit in 0u32..300,
            at_most in 0u32..200,
        ) {
            let mut packed = Items::default();
            for item in &items {
                packed.push(item.iter().enumerate().map(|(index, &(seconds, bytes))| Choice {
                    seconds: f64::from(seconds), bytes: f64::from(bytes), index: index as u32,
                }));
            }
            let best = brute(&items, limit);
            let tight = packed.select(f64::from(limit), f64::INFINITY, true);
            prop_assert_eq!(best.map_or(f64::INFINITY, f64::from), tight.seconds);
            prop_assert!(tight.lower_bound_seconds >= tight.seconds * (1.0 - 1e-9) - 1e-9);
            if best.is_some() {
                let total = items.iter().zip(&tight.chosen).fold((0, 0), |sum, (item, &index)| {
                    (sum.0 + item[index as usize].0, sum.1 + item[index as usize].1)
                });
                prop_assert!(f64::from(total.0) == tight.seconds && total.1 <= limit);
            }
            let decision = packed.select(f64::from(limit), f64::from(at_most), false);
            prop_assert_eq!(best.is_some_and(|best| best <= at_most), decision.seconds <= f64::from(at_most));
            prop_assert!(decision.seconds <= f64::from(at_most) || decision.lower_bound_seconds > f64::from(at_most));
        }
    }
}
