//! A lower bound of a network by messages between neighbours, and how far every choice is from it.
//!
//! A message moves costs from a pair of variables to one of the two, without changing the cost of any assignment. For all
//! messages, the least costs of all variables and of all pairs therefore add up to a lower bound. Sweeps over the variables in
//! their order, and back, raise it (sequential tree-reweighted message passing, Kolmogorov 2006). Costs are whole
//! picoseconds, so the bound is exact.
//!
//! A choice's *slack* is how much the bound rises where the choice is made. Choices of little slack are those that good
//! assignments are made of.
//!
//! Deep models repeat: pairs with equal tables whose variables have equal surroundings share their messages, and are computed
//! once. Any messages give a bound, so this needs no symmetry. A model of a hundred equal blocks takes the time of a few.

use rustc_hash::{FxHashMap, FxHashSet};
use shardwright_search::{Interval, Network, NetworkBuilder, NetworkError, SharedTable, VarId};
use shardwright_simd::vectorised_fn;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Surroundings are compared over so many pairs.
const HOPS: usize = 2;

/// Costs of a network: variables, and tables between pairs of them. Both may be shared.
#[derive(Debug, Default)]
pub(super) struct Costs {
    /// Per variable: where its choices' costs are.
    pub variables: Vec<u32>,
    /// The costs of choices.
    pub unary: Vec<Vec<i64>>,
    /// Pairs of variables, the lower one first, with their table.
    pub pairs: Vec<(u32, u32, u32)>,
    /// Tables, the lower variable's choices major.
    pub tables: Vec<Arc<Vec<i64>>>,
    /// What every assignment costs.
    pub constant: i64,
}

impl Costs {
    /// The costs of a variable's choices.
    fn own(&self, variable: u32) -> &[i64] {
        &self.unary[self.variables[variable as usize] as usize]
    }
}

impl Costs {
    /// The same as a network, without the constant.
    pub fn network(&self) -> Result<Network, NetworkError> {
        let mut builder = NetworkBuilder::new();
        for variable in 0..self.variables.len() as u32 {
            builder.variable(self.own(variable), &[], Interval::default())?;
        }
        let tables: Vec<SharedTable> =
            self.tables.iter().map(|table| builder.table(table)).collect::<Result<_, _>>()?;
        for &(u, v, table) in &self.pairs {
            builder.join(VarId(u), VarId(v), tables[table as usize])?;
        }
        builder.build()
    }

    /// Slacks by which the choices of an assignment come first: zero for these, and as large as can be for all others.
    pub fn slack_of(&self, choice: &[u32]) -> Vec<(u32, Vec<i64>)> {
        let own = |(variable, &chosen): (usize, &u32)| {
            let mut slack = vec![i64::MAX; self.own(variable as u32).len()];
            slack[chosen as usize] = 0;
            (variable as u32, slack)
        };
        choice.iter().enumerate().map(own).collect()
    }
}

/// A variable's kind, and for each of its pairs: the table, whether it is the first of the two, and the other's kind.
type Surroundings = (u32, Vec<(u32, bool, u32)>);

/// What a variable's slacks depend on: its kind, and for each of its pairs the kind, that of the later variable, and whether the variable is
/// the first of the two.
type SlackKey = (u32, Vec<(u32, u32, bool)>);

/// Messages to the two variables of a pair.
#[derive(Clone, Debug, Default)]
struct PairMessages {
    to_first: Vec<i64>,
    to_second: Vec<i64>,
}

/// The messages of a network's pairs.
#[derive(Debug)]
pub(super) struct Messages {
    /// Per kind of pairs: the messages that all of them share, and one of them.
    kinds: Vec<(PairMessages, u32)>,
    /// Per pair: its kind.
    kind_of: Vec<u32>,
    /// Per variable: its pairs, and whether it is the first of the two.
    of: Vec<Vec<(u32, bool)>>,
    /// Per variable: its kind. Variables of a kind receive the same messages.
    variable_kinds: Vec<u32>,
    /// Per kind of variables: one of them, and their number.
    examples: Vec<(u32, i64)>,
}

/// A lower bound, and slacks.
#[derive(Debug)]
pub(super) struct Bounded {
    pub bound: i64,
    /// Variables with the slack of every choice. Each variable left out has the slacks of one of these of equal costs.
    pub slack: Vec<(u32, Vec<i64>)>,
}

impl Messages {
    /// No costs are moved.
    pub fn new(costs: &Costs) -> Self {
        let mut of = vec![Vec::new(); costs.variables.len()];
        for (pair, &(u, v, _)) in costs.pairs.iter().enumerate() {
            of[u as usize].push((pair as u32, true));
            of[v as usize].push((pair as u32, false));
        }
        let (kinds, kind_of) = (Vec::new(), Vec::new());
        let mut made = Self { kinds, kind_of, of, variable_kinds: Vec::new(), examples: Vec::new() };
        made.classify(costs);
        made
    }

    /// Finds the kinds of pairs and variables, by costs and surroundings. Messages stay.
    pub fn classify(&mut self, costs: &Costs) {
        let mut colours = costs.variables.clone();
        let mut before = colours.clone();
        for _ in 0..=HOPS {
            let mut known: FxHashMap<Surroundings, u32> = FxHashMap::default();
            before.clone_from(&colours);
            colours = (0..self.of.len())
                .map(|v| {
                    let around = |&(pair, is_first): &(u32, bool)| {
                        let (a, b, table) = costs.pairs[pair as usize];
                        (table, is_first, before[if is_first { b } else { a } as usize])
                    };
                    let mut around: Vec<_> = self.of[v].iter().map(around).collect();
                    around.sort_unstable();
                    let next = known.len() as u32;
                    *known.entry((before[v], around)).or_insert(next)
                })
                .collect();
        }
        // A pair's kind depends on one hop less than a variable's, which so determines the kinds of all its pairs.
        let mut known: FxHashMap<(u32, u32, u32), u32> = FxHashMap::default();
        let mut kinds: Vec<(PairMessages, u32)> = Vec::new();
        let mut kind_of = Vec::with_capacity(costs.pairs.len());
        for (pair, &(u, v, table)) in costs.pairs.iter().enumerate() {
            let key = (table, before[u as usize], before[v as usize]);
            kind_of.push(*known.entry(key).or_insert_with(|| {
                let messages = match self.kind_of.get(pair) {
                    Some(&kind) => self.kinds[kind as usize].0.clone(),
                    None => {
                        let zero = |variable: u32| vec![0; costs.own(variable).len()];
                        PairMessages { to_first: zero(u), to_second: zero(v) }
                    }
                };
                kinds.push((messages, pair as u32));
                kinds.len() as u32 - 1
            }));
        }
        self.examples.clear();
        for (v, &colour) in colours.iter().enumerate() {
            match self.examples.get_mut(colour as usize) {
                Some((_, count)) => *count += 1,
                None => self.examples.push((v as u32, 1)),
            }
        }
        (self.kinds, self.kind_of, self.variable_kinds) = (kinds, kind_of, colours);
    }

    /// Adds choices at the end of variables' lists: per new one, the choice whose messages it gets.
    pub fn extend<'p, T>(&mut self, pairs: &[((u32, u32), T)], parents: impl Fn(u32) -> &'p Vec<u32>) {
        for (PairMessages { to_first, to_second }, pair) in &mut self.kinds {
            let (u, v) = pairs[*pair as usize].0;
            for (own, variable) in [(to_first, u), (to_second, v)] {
                for &parent in parents(variable) {
                    own.push(own[parent as usize]);
                }
            }
        }
    }

    /// Keeps only some choices of every variable, in their order.
    pub fn retain<'k, T>(&mut self, pairs: &[((u32, u32), T)], kept: impl Fn(u32) -> &'k [u32]) {
        for (PairMessages { to_first, to_second }, pair) in &mut self.kinds {
            let (u, v) = pairs[*pair as usize].0;
            for (own, variable) in [(to_first, u), (to_second, v)] {
                *own = kept(variable).iter().map(|&at| own[at as usize]).collect();
            }
        }
    }

    /// Sweeps forwards and back.
    pub fn sweep(&mut self, costs: &Costs) {
        for at in 0..self.examples.len() {
            self.send(costs, self.examples[at].0, true);
        }
        for at in (0..self.examples.len()).rev() {
            self.send(costs, self.examples[at].0, false);
        }
    }

    /// The bound after so many sweeps, or up to four times as many while it is below that of other messages: messages of new choices
    /// are rough.
    pub fn raised(&mut self, costs: &Costs, sweeps: usize, before: i64) -> Bounded {
        let mut best: Option<Bounded> = None;
        for _ in 0..4 {
            (0..sweeps).for_each(|_| self.sweep(costs));
            let own = self.bounded(costs);
            if best.as_ref().is_none_or(|best| own.bound > best.bound) {
                best = Some(own);
            }
            if best.as_ref().is_some_and(|best| best.bound >= before) {
                break;
            }
        }
        best.unwrap_or_else(|| self.bounded(costs))
    }

    /// The costs of a variable's choices with all messages to it.
    fn received(&self, costs: &Costs, variable: u32) -> Vec<i64> {
        let mut total = costs.own(variable).to_vec();
        for &(pair, is_first) in &self.of[variable as usize] {
            let messages = &self.kinds[self.kind_of[pair as usize] as usize].0;
            let own = if is_first { &messages.to_first } else { &messages.to_second };
            total.iter_mut().zip(own).for_each(|(total, own)| *total += own);
        }
        total
    }

    /// The number of a variable's pairs with later variables, and with earlier ones.
    fn degrees(&self, variable: u32) -> (i64, i64) {
        let all = &self.of[variable as usize];
        let later = all.iter().filter(|(_, is_first)| *is_first).count();
        (later as i64, (all.len() - later) as i64)
    }

    /// Sends the messages from a variable to those after it, or before it.
    fn send(&mut self, costs: &Costs, variable: u32, forwards: bool) {
        let (later, earlier) = self.degrees(variable);
        if (if forwards { later } else { earlier }) == 0 {
            return;
        }
        let mut share = self.received(costs, variable);
        share.iter_mut().for_each(|cost| *cost = cost.div_euclid(later.max(earlier)));
        let pairs = self.of[variable as usize].iter().filter(|(_, is_first)| *is_first == forwards);
        let mut due: Vec<u32> = pairs.map(|(pair, _)| self.kind_of[*pair as usize]).collect();
        due.sort_unstable();
        due.dedup();
        for kind in due {
            let (PairMessages { to_first, to_second }, pair) = &mut self.kinds[kind as usize];
            let table = &costs.tables[costs.pairs[*pair as usize].2 as usize];
            let (own, other) = if forwards { (to_first, to_second) } else { (to_second, to_first) };
            let left: Vec<i64> = share.iter().zip(own).map(|(share, own)| share - *own).collect();
            if forwards {
                least_of_rows(table, &left, other);
            } else {
                least_of_columns(table, &left, other);
            }
            let least = other.iter().copied().min().unwrap_or(0);
            other.iter_mut().for_each(|cost| *cost -= least);
        }
    }

    /// The bound of the messages after a sweep, and slacks. A variable leaves its pairs with earlier ones the shares that it sent.
    pub fn bounded(&self, costs: &Costs) -> Bounded {
        let mut bound = i128::from(costs.constant);
        let mut left_own: Vec<Vec<i64>> = Vec::with_capacity(self.examples.len());
        let mut shares: Vec<Vec<i64>> = Vec::with_capacity(self.examples.len());
        for &(v, count) in &self.examples {
            let mut own = self.received(costs, v);
            let (later, earlier) = self.degrees(v);
            let most = later.max(earlier).max(1);
            let share: Vec<i64> = own.iter().map(|cost| cost.div_euclid(most)).collect();
            own.iter_mut().zip(&share).for_each(|(cost, share)| *cost -= earlier * share);
            shares.push(share);
            let least = own.iter().copied().min().unwrap_or(0);
            own.iter_mut().for_each(|cost| *cost -= least);
            bound += i128::from(count) * i128::from(least);
            left_own.push(own);
        }
        // Pairs differ by their kind, and by what the later variable leaves them.
        let key = |pair: u32| {
            let (_, v, _) = costs.pairs[pair as usize];
            (self.kind_of[pair as usize], self.variable_kinds[v as usize])
        };
        let mut numbers: BTreeMap<(u32, u32), i64> = BTreeMap::new();
        (0..costs.pairs.len() as u32).for_each(|pair| *numbers.entry(key(pair)).or_default() += 1);
        let mut left: FxHashMap<(u32, u32), (Vec<i64>, Vec<i64>)> = FxHashMap::default();
        for ((kind, v), count) in numbers {
            let (messages, pair) = &self.kinds[kind as usize];
            let table = &costs.tables[costs.pairs[*pair as usize].2 as usize];
            let (least, rows, columns) = left_of_pair(table, messages, &shares[v as usize]);
            bound += i128::from(count) * i128::from(least);
            left.insert((kind, v), (rows, columns));
        }
        // Variables of a kind may differ in what others leave their pairs.
        let mut known: FxHashSet<SlackKey> = FxHashSet::default();
        let mut slack: Vec<(u32, Vec<i64>)> = Vec::new();
        for (v, (of, &kind)) in self.of.iter().zip(&self.variable_kinds).enumerate() {
            let own = |&(pair, is_first): &(u32, bool)| (key(pair).0, key(pair).1, is_first);
            let mut pairs: Vec<(u32, u32, bool)> = of.iter().map(own).collect();
            pairs.sort_unstable();
            if !known.insert((kind, pairs)) {
                continue;
            }
            let mut own_slack = left_own[kind as usize].clone();
            for &(pair, is_first) in of {
                let Some((rows, columns)) = left.get(&key(pair)) else { continue };
                let own = if is_first { rows } else { columns };
                own_slack.iter_mut().zip(own).for_each(|(slack, own)| *slack += own);
            }
            slack.push((v as u32, own_slack));
        }
        let bound = bound.clamp(i128::from(i64::MIN), i128::from(i64::MAX)) as i64;
        Bounded { bound, slack }
    }

    /// An assignment that follows the messages: every variable takes its cheapest choice, given those before it.
    pub fn decode(&self, costs: &Costs) -> Vec<u32> {
        let mut choice: Vec<u32> = Vec::with_capacity(self.of.len());
        for variable in 0..self.of.len() {
            let mut total = costs.own(variable as u32).to_vec();
            let width = total.len();
            for &(pair, is_first) in &self.of[variable] {
                let (u, _, table) = costs.pairs[pair as usize];
                if is_first {
                    let own = &self.kinds[self.kind_of[pair as usize] as usize].0.to_first;
                    total.iter_mut().zip(own).for_each(|(total, own)| *total += own);
                } else {
                    let cells = &costs.tables[table as usize][choice[u as usize] as usize * width..][..width];
                    total.iter_mut().zip(cells).for_each(|(total, cell)| *total += cell);
                }
            }
            choice.push((0..width).min_by_key(|&i| total[i]).unwrap_or(0) as u32);
        }
        choice
    }
}

/// What messages leave of a pair's costs: the least, and how far every choice of either variable is above it.
fn left_of_pair(table: &[i64], messages: &PairMessages, share: &[i64]) -> (i64, Vec<i64>, Vec<i64>) {
    let PairMessages { to_first, to_second } = messages;
    let to_second: Vec<i64> = to_second.iter().zip(share).map(|(moved, share)| share - moved).collect();
    let (mut rows, mut columns) = (vec![i64::MAX; to_first.len()], vec![i64::MAX; to_second.len()]);
    left_of_cells(table, to_first, &to_second, &mut rows, &mut columns);
    let least = rows.iter().copied().min().unwrap_or(0);
    rows.iter_mut().chain(&mut columns).for_each(|left| *left -= least);
    (least, rows, columns)
}

vectorised_fn! {
    /// Per column: the least of its cells, each plus its row's number.
    fn least_of_rows[][](table: &[i64], rows: &[i64], least: &mut [i64]) {
        least.fill(i64::MAX);
        for (cells, &row) in table.chunks_exact(least.len().max(1)).zip(rows) {
            for (least, &cell) in least.iter_mut().zip(cells) {
                let sum = cell + row;
                *least = if sum < *least { sum } else { *least };
            }
        }
    }
}

vectorised_fn! {
    /// Per row: the least of its cells, each plus its column's number.
    fn least_of_columns[][](table: &[i64], columns: &[i64], least: &mut [i64]) {
        for (least, cells) in least.iter_mut().zip(table.chunks_exact(columns.len().max(1))) {
            *least = least_sum(cells, columns);
        }
    }
}

vectorised_fn! {
    /// Per row and column: the least of its cells, each minus its row's number and plus its column's.
    fn left_of_cells[][](table: &[i64], to_first: &[i64], more: &[i64], rows: &mut [i64], columns: &mut [i64]) {
        for ((cells, &moved), row) in table.chunks_exact(more.len().max(1)).zip(to_first).zip(rows) {
            for ((&cell, &more), column) in cells.iter().zip(more).zip(columns.iter_mut()) {
                let left = cell - moved + more;
                *column = if left < *column { left } else { *column };
            }
            *row = least_sum(cells, more) - moved;
        }
    }
}

/// Sums that are compared at once.
const LANES: usize = 8;

/// The least sum of two rows.
#[inline(always)]
fn least_sum(cells: &[i64], other: &[i64]) -> i64 {
    let mut least = [i64::MAX; LANES];
    let (cells, rest) = cells.as_chunks::<LANES>();
    let (other, other_rest) = other.as_chunks::<LANES>();
    for (cells, other) in cells.iter().zip(other) {
        for lane in 0..LANES {
            let sum = cells[lane] + other[lane];
            least[lane] = if sum < least[lane] { sum } else { least[lane] };
        }
    }
    let rest = rest.iter().zip(other_rest).map(|(cell, other)| cell + other);
    rest.chain(least).min().unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cost(costs: &Costs, choice: &[usize]) -> i64 {
        let own: i64 = choice.iter().enumerate().map(|(v, &at)| costs.own(v as u32)[at]).sum();
        let pairs = costs.pairs.iter().map(|&(u, v, table)| {
            let width = costs.own(v).len();
            costs.tables[table as usize][choice[u as usize] * width + choice[v as usize]]
        });
        costs.constant + own + pairs.sum::<i64>()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// No assignment costs less than the bound, nor less than bound and slack of any of its choices.
        #[test]
        fn no_assignment_costs_less(
            sizes in prop::collection::vec(1usize..4, 2..6),
            numbers in prop::collection::vec(0i64..100, 256),
            skipped in any::<u16>(),
            sweeps in 0usize..40,
        ) {
            let mut numbers = numbers.into_iter().cycle();
            let mut next = |count: usize| -> Vec<i64> { (0..count).map(|_| numbers.next().unwrap()).collect() };
            let mut costs = Costs { constant: -7, ..Costs::default() };
            // Variables of a size have equal costs, so that some pairs share messages.
            costs.variables = sizes.iter().map(|&size| size as u32 - 1).collect();
            costs.unary = (1..4).map(&mut next).collect();
            let tables: Vec<Vec<i64>> = (0..9).map(|at| next((at / 3 + 1) * (at % 3 + 1))).collect();
            costs.tables = tables.into_iter().map(Arc::new).collect();
            for u in 0..sizes.len() {
                for v in u + 1..sizes.len() {
                    if skipped >> ((u * 5 + v) % 16) & 1 == 0 {
                        costs.pairs.push((u as u32, v as u32, ((sizes[u] - 1) * 3 + sizes[v] - 1) as u32));
                    }
                }
            }
            let mut messages = Messages::new(&costs);
            (0..sweeps).for_each(|_| messages.sweep(&costs));
            let Bounded { bound, slack } = messages.bounded(&costs);
            let mut least = i64::MAX;
            for at in 0..sizes.iter().product::<usize>() {
                let mut rest = at;
                let choice: Vec<usize> = sizes.iter().map(|&size| { let own = rest % size; rest /= size; own }).collect();
                let cost = cost(&costs, &choice);
                least = least.min(cost);
                for (v, slack) in &slack {
                    prop_assert!(bound + slack[choice[*v as usize]] <= cost);
                }
                // A choice is ruled out by the least slack of all variables of its costs.
                for (v, &at) in choice.iter().enumerate() {
                    let equal = slack.iter().filter(|(own, _)| costs.variables[*own as usize] == costs.variables[v]);
                    prop_assert!(equal.map(|(_, slack)| bound + slack[at]).min().unwrap() <= cost);
                }
            }
            prop_assert!(bound <= least);
            let found: Vec<usize> = messages.decode(&costs).iter().map(|&at| at as usize).collect();
            prop_assert!(cost(&costs, &found) >= least);
            // On chains, enough sweeps are exact, up to the rounding of shares.
            if costs.pairs.iter().all(|&(u, v, _)| v == u + 1) && sweeps > 30 {
                prop_assert!(least - bound <= 2 * sizes.len() as i64, "{bound} of {least}");
            }
        }
    }
}
