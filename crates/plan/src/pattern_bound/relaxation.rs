//! The problem on prime axes, relaxed to groups of configs.

use super::{
    held_memory::{HeldMemory, OwnPrices, PairPrices, Priced, SizeId},
    messages::{Costs, Messages},
};
use crate::context::Context;
use rayon::prelude::*;
use rustc_hash::FxHashMap;
use shardwright_cost::PatternTensor;
use shardwright_search::{Control, FORBIDDEN};
use shardwright_space::{Config, configs};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The most groups of a class: the size of tables is the square of it.
const MOST_GROUPS: usize = 400;
/// Each round divides one in so many groups, and at least a given number.
const DIVIDED_SHARE: usize = 8;

/// An endpoint up to its variable's class: class, member, port, whether partial results are reduced.
pub(super) type EndKind = (u32, u32, u32, bool);

/// A tensor at an endpoint of a class of variables.
pub(super) struct End {
    pub class: u32,
    pub tensor: u32,
    /// Per config of the class: the pattern.
    pub patterns: Vec<u32>,
    /// Per group of the class: its patterns, ascending.
    pub sets: Vec<Vec<u32>>,
    /// Whether transfers start here.
    pub is_source: bool,
    /// Where transfers start, per group: the least seconds from its patterns to each pattern of the tensor.
    pub times: Vec<Arc<[f64]>>,
}

/// Transfers of one kind: between two endpoints, so many times.
pub(super) struct TransferKind {
    pub from: u32,
    pub to: u32,
    pub runs: u32,
    /// The least picoseconds between groups of the source (rows) and of the reader (columns).
    pub table: Vec<i64>,
    pub columns: usize,
}

/// A class of variables: its configs, in groups.
pub(super) struct ClassConfigs {
    /// Per config of the leading op: the number of axes of each class with each use, by which groups are formed.
    pub features: Vec<Vec<Vec<u8>>>,
    /// Per config: picoseconds of computing and halo exchanges.
    pub costs: Vec<i64>,
    pub groups: Vec<Group>,
    /// Transfers inside of the variable.
    pub inside: Vec<u32>,
    /// Whether the configs are not listed: one stands for all, and transfers cost nothing.
    pub is_free: bool,
}

impl ClassConfigs {
    /// A class whose configs are not listed.
    pub fn free(cost: i64) -> Self {
        let groups = vec![Group::of(vec![0])];
        Self { features: vec![Vec::new()], costs: vec![cost], groups, inside: Vec::new(), is_free: true }
    }
}

/// Some configs of a class.
pub(super) struct Group {
    configs: Vec<u32>,
    /// Whether nothing is computed for it yet.
    is_new: bool,
    /// Per config: its cost, with the least of the transfers inside of the variable.
    costs: Vec<i64>,
}

impl Group {
    pub fn of(configs: Vec<u32>) -> Self {
        Self { configs, is_new: true, costs: Vec::new() }
    }
}

/// The kinds of the transfers between two variables; true: from the lower to the higher one.
pub(super) type Between = Vec<(u32, bool)>;

/// What the table of a pair of variables depends on, besides their classes.
type TableKey<'k> = (u32, u32, &'k [(u32, bool)], Vec<([SizeId; 2], u64)>);

/// The problem on prime axes, relaxed to groups of configs.
pub(super) struct Relaxation {
    pub classes: Vec<ClassConfigs>,
    /// Per variable: its class.
    pub of: Vec<u32>,
    pub ends: Vec<End>,
    /// None where a tensor has too many patterns.
    pub tensors: Vec<Option<PatternTensor>>,
    pub kinds: Vec<TransferKind>,
    /// Pairs of variables, with the transfers between them.
    pub pairs: Vec<((u32, u32), Between)>,
    /// Times from sets of patterns of a tensor, which endpoints share.
    pub times: FxHashMap<(u32, Vec<u32>), Arc<[f64]>>,
    /// Where memory is limited.
    pub memory: Option<HeldMemory>,
}

impl Relaxation {
    /// Computes what new groups need: patterns, times, costs and tables. False where the control stops.
    pub fn update(&mut self, control: &Control<'_>) -> bool {
        let classes = &self.classes;
        self.ends.par_iter_mut().for_each(|end| {
            let groups = &classes[end.class as usize].groups;
            end.sets.resize(groups.len(), Vec::new());
            for (set, group) in end.sets.iter_mut().zip(groups).filter(|(_, group)| group.is_new) {
                *set = group.configs.iter().map(|&config| end.patterns[config as usize]).collect();
                set.sort_unstable();
                set.dedup();
            }
        });
        if !self.update_times(control) {
            return false;
        }
        let (ends, kinds) = (&self.ends, &self.kinds);
        self.classes.par_iter_mut().for_each(|class| {
            let (costs, inside) = (&class.costs, &class.inside);
            for (at, group) in class.groups.iter_mut().enumerate().filter(|(_, group)| group.is_new) {
                let cost = |&config: &u32| {
                    inside.iter().fold(costs[config as usize], |cost, &kind| {
                        let TransferKind { from, to, runs, .. } = kinds[kind as usize];
                        let to = ends[to as usize].patterns[config as usize];
                        let time = ends[from as usize].times[at][to as usize];
                        cost.saturating_add(least_picoseconds(time, runs)).min(FORBIDDEN)
                    })
                };
                group.costs = group.configs.iter().map(cost).collect();
            }
        });
        let classes = &self.classes;
        self.kinds.par_iter_mut().for_each(|kind| {
            let (from, to) = (&ends[kind.from as usize], &ends[kind.to as usize]);
            let is_free = classes[from.class as usize].is_free || classes[to.class as usize].is_free;
            let (sources, readers) =
                (&classes[from.class as usize].groups, &classes[to.class as usize].groups);
            let mut table = Vec::with_capacity(sources.len() * readers.len());
            for (row, source) in sources.iter().enumerate() {
                for (column, reader) in readers.iter().enumerate() {
                    table.push(match source.is_new || reader.is_new {
                        _ if is_free => 0,
                        false => kind.table[row * kind.columns + column],
                        true => {
                            let times = to.sets[column].iter().map(|&at| from.times[row][at as usize]);
                            least_picoseconds(times.fold(f64::INFINITY, f64::min), kind.runs)
                        }
                    });
                }
            }
            (kind.table, kind.columns) = (table, readers.len());
        });
        for class in &mut self.classes {
            class.groups.iter_mut().for_each(|group| group.is_new = false);
        }
        true
    }

    /// Computes the times from new groups' patterns. False where the control stops.
    fn update_times(&mut self, control: &Control<'_>) -> bool {
        let mut missing: Vec<(u32, Vec<u32>)> = Vec::new();
        for end in self.ends.iter().filter(|end| end.is_source) {
            let groups = &self.classes[end.class as usize].groups;
            for (set, _) in end.sets.iter().zip(groups).filter(|(_, group)| group.is_new) {
                let key = (end.tensor, set.clone());
                if !self.times.contains_key(&key) {
                    missing.push(key);
                }
            }
        }
        missing.sort_unstable();
        missing.dedup();
        let jobs: Vec<&[(u32, Vec<u32>)]> =
            missing.chunk_by(|a, b| a.0 == b.0).flat_map(|own| own.chunks(8)).collect();
        let run = |job: &&[(u32, Vec<u32>)]| {
            if control.stop_by_time().is_some() {
                return None;
            }
            let sources: Vec<&[u32]> = job.iter().map(|(_, set)| &**set).collect();
            Some(match &self.tensors[job[0].0 as usize] {
                Some(tensor) => tensor.times(&sources),
                None => vec![Arc::from([0.0]); sources.len()],
            })
        };
        let found: Option<Vec<Vec<Arc<[f64]>>>> = jobs.par_iter().map(run).collect();
        let Some(found) = found else { return false };
        self.times.extend(missing.into_iter().zip(found.into_iter().flatten()));
        let (classes, times) = (&self.classes, &self.times);
        self.ends.par_iter_mut().filter(|end| end.is_source).for_each(|end| {
            let groups = &classes[end.class as usize].groups;
            end.times.resize_with(groups.len(), || Arc::from([]));
            for (at, _) in groups.iter().enumerate().filter(|(_, group)| group.is_new) {
                if let Some(known) = times.get(&(end.tensor, end.sets[at].clone())) {
                    end.times[at] = Arc::clone(known);
                }
            }
        });
        true
    }

    /// The costs of the network over groups, at the current prices of memory. No cost is above `most`: that only lowers the bound.
    pub fn costs(&self, most: i64) -> Costs {
        let none = || Priced { own: vec![Vec::new(); self.of.len()], pairs: BTreeMap::new(), constant: 0 };
        let Priced { own, pairs: held, constant } =
            self.memory.as_ref().map_or_else(none, |memory| memory.priced(self.of.len()));
        let mut costs = Costs { constant, ..Costs::default() };
        let mut unary: FxHashMap<(u32, Vec<(SizeId, u64)>), u32> = FxHashMap::default();
        for (&class, own) in self.of.iter().zip(&own) {
            let key = (class, own.iter().map(|(size, price)| (*size, price.to_bits())).collect());
            let at = *unary.entry(key).or_insert_with(|| {
                let groups = self.classes[class as usize].groups.iter();
                costs.unary.push(groups.map(|group| self.least(group, own).1.min(most)).collect());
                costs.unary.len() as u32 - 1
            });
            costs.variables.push(at);
        }
        let mut tables: FxHashMap<TableKey<'_>, u32> = FxHashMap::default();
        let nothing = PairPrices::new();
        for ((u, v), transfers) in &self.pairs {
            let prices = held.get(&(*u, *v)).unwrap_or(&nothing);
            let key = (
                self.of[*u as usize],
                self.of[*v as usize],
                &transfers[..],
                prices.iter().map(|(sizes, price)| (*sizes, price.to_bits())).collect(),
            );
            let table = *tables.entry(key).or_insert_with(|| {
                costs.tables.push(self.sum(*u, *v, transfers, prices, most));
                costs.tables.len() as u32 - 1
            });
            costs.pairs.push((*u, *v, table));
        }
        costs
    }

    /// The config of a group with the least cost, memory at these prices included, and that cost.
    fn least(&self, group: &Group, prices: &OwnPrices) -> (u32, i64) {
        let held = |config: u32| -> i64 {
            let memory = self.memory.as_ref();
            let priced = |(size, price): &(SizeId, f64)| {
                let bytes = memory.map_or(0, |memory| memory.sizes[*size as usize][config as usize]);
                price_of(bytes, *price)
            };
            prices.iter().map(priced).fold(0, i64::saturating_add)
        };
        let costs = group.configs.iter().zip(&group.costs);
        let all = costs.map(|(&config, cost)| (config, cost.saturating_add(held(config))));
        all.min_by_key(|(_, cost)| *cost).unwrap_or((0, FORBIDDEN))
    }

    /// The table of a pair of variables: the sum of the times of all transfers between them, and of the memory that both decide.
    fn sum(&self, u: u32, v: u32, transfers: &[(u32, bool)], prices: &PairPrices, most: i64) -> Vec<i64> {
        let class = |variable: u32| &self.classes[self.of[variable as usize] as usize];
        let (rows, columns) = (class(u).groups.len(), class(v).groups.len());
        let mut sum = vec![0i64; rows * columns];
        for &(kind, upwards) in transfers {
            let own = &self.kinds[kind as usize].table;
            for (row, cells) in sum.chunks_mut(columns).enumerate() {
                for (column, cell) in cells.iter_mut().enumerate() {
                    let at = if upwards { row * columns + column } else { column * rows + row };
                    *cell = cell.saturating_add(own[at]).min(most);
                }
            }
        }
        for (sizes, price) in prices {
            let [least_u, least_v] = [(u, sizes[0]), (v, sizes[1])].map(|(variable, size)| {
                let all = self.memory.as_ref().map_or(&[][..], |memory| &memory.sizes[size as usize]);
                let own = |group: &Group| {
                    group.configs.iter().map(|&config| all[config as usize]).min().unwrap_or(0)
                };
                class(variable).groups.iter().map(own).collect::<Vec<i64>>()
            });
            for (cells, a) in sum.chunks_mut(columns).zip(&least_u) {
                for (cell, b) in cells.iter_mut().zip(&least_v) {
                    *cell = cell.saturating_add(price_of(*a.min(b), *price)).min(most);
                }
            }
        }
        sum
    }

    /// Per variable: the cheapest config of the group that it chooses, at the current prices of memory.
    pub fn cheapest(&self, choice: &[u32]) -> Vec<u32> {
        let priced = self.memory.as_ref().map(|memory| memory.priced(self.of.len()).own);
        let nothing = OwnPrices::new();
        let config = |(v, &group): (usize, &u32)| {
            let group = &self.classes[self.of[v] as usize].groups[group as usize];
            self.least(group, priced.as_ref().map_or(&nothing, |own| &own[v])).0
        };
        choice.iter().enumerate().map(config).collect()
    }

    /// Per variable: the configs of its leading op in some rounds, ascending. None of a class that is not listed.
    pub fn configs(&self, context: &Context<'_>, rounds: &[Vec<u32>]) -> Vec<Vec<Config>> {
        let mut per_class: Vec<Option<Vec<Config>>> = vec![None; self.classes.len()];
        let variable = |(v, &class): (usize, &u32)| {
            if self.classes[class as usize].is_free {
                return Vec::new();
            }
            let listed = per_class[class as usize].get_or_insert_with(|| {
                let lead = context.variables.members[v].forward();
                configs(&context.shapes[lead.index()].rule, context.machine.mesh())
            });
            let mut own: Vec<u32> = rounds.iter().map(|round| round[v]).collect();
            own.sort_unstable();
            own.dedup();
            own.into_iter().map(|config| listed[config as usize].clone()).collect()
        };
        self.of.iter().enumerate().map(variable).collect()
    }

    /// Cells of the tables of all kinds of transfers.
    pub fn cells(&self) -> u64 {
        let groups = |end: u32| self.classes[self.ends[end as usize].class as usize].groups.len() as u64;
        self.kinds.iter().map(|kind| groups(kind.from) * groups(kind.to)).sum()
    }

    /// Divides the groups of least slack, and gives their messages to the parts. False where none of more than one config has a slack of at
    /// most `most`.
    pub fn divide(
        &mut self,
        slack: &[(u32, Vec<i64>)],
        most: i64,
        number: usize,
        messages: &mut Messages,
    ) -> bool {
        let mut least: Vec<Vec<i64>> =
            self.classes.iter().map(|class| vec![i64::MAX; class.groups.len()]).collect();
        for (variable, own) in slack {
            let class = self.of[*variable as usize];
            least[class as usize].iter_mut().zip(own).for_each(|(least, own)| *least = (*least).min(*own));
        }
        let mut all = 0;
        let mut due: Vec<(i64, u32, u32)> = Vec::new();
        for (at, (class, least)) in self.classes.iter().zip(&least).enumerate() {
            all += class.groups.len();
            for (own, (group, &slack)) in class.groups.iter().zip(least).enumerate() {
                if group.configs.len() > 1 && slack <= most {
                    due.push((slack, at as u32, own as u32));
                }
            }
        }
        due.sort_unstable();
        due.truncate(number.max(all / DIVIDED_SHARE));
        let mut parents: Vec<Vec<u32>> = vec![Vec::new(); self.classes.len()];
        let mut divided = false;
        for (_, at, group) in due {
            let class = &mut self.classes[at as usize];
            let members = &class.groups[group as usize].configs;
            if class.groups.len() >= MOST_GROUPS {
                continue;
            }
            // By the uses of the first class of axes in which the configs differ.
            let differ = |at: &usize| {
                let first = &class.features[members[0] as usize][*at];
                members.iter().any(|&m| class.features[m as usize][*at] != *first)
            };
            let axes = class.features[members[0] as usize].len();
            let Some(axis) = (0..axes).find(differ) else { continue };
            let parts = group_by(members, |config| class.features[config as usize][axis].clone());
            divided = true;
            // The first part takes the group's place: all other groups keep their numbers.
            let mut parts = parts.into_iter().map(Group::of);
            if let Some(first) = parts.next() {
                class.groups[group as usize] = first;
            }
            let before = class.groups.len();
            class.groups.extend(parts);
            parents[at as usize].extend(vec![group; class.groups.len() - before]);
        }
        messages.extend(&self.pairs, |variable| &parents[self.of[variable as usize] as usize]);
        divided
    }
}

/// A lower bound of the price of some bytes.
fn price_of(bytes: i64, price: f64) -> i64 {
    (bytes as f64 * price * (1.0 - 1e-12)).floor() as i64
}

/// A lower bound of the rounded picoseconds of a time, times the number of runs; forbidden where no path leads.
fn least_picoseconds(seconds: f64, runs: u32) -> i64 {
    if !seconds.is_finite() {
        return FORBIDDEN;
    }
    // Times of equal paths may differ in their last bits, and are rounded to the nearest picosecond.
    let floor = (seconds * 1e12 * (1.0 - 1e-12) - 0.6).floor().max(0.0) as i64;
    floor.saturating_mul(i64::from(runs)).min(FORBIDDEN)
}

/// Configs in groups of equal keys, in order of first appearance.
pub(super) fn group_by<K: std::hash::Hash + Eq>(all: &[u32], key: impl Fn(u32) -> K) -> Vec<Vec<u32>> {
    let mut numbers: FxHashMap<K, usize> = FxHashMap::default();
    let mut groups: Vec<Vec<u32>> = Vec::new();
    for &config in all {
        let next = groups.len();
        let number = *numbers.entry(key(config)).or_insert(next);
        if number == next {
            groups.push(Vec::new());
        }
        groups[number].push(config);
    }
    groups
}
