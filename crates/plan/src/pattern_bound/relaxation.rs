//! The problem on prime axes, relaxed to groups of configs.

use super::{
    features::Features,
    held_memory::{HeldMemory, OwnPrices, PairPrices, Priced, SizeId},
    messages::Costs,
};
use crate::context::Context;
use rayon::prelude::*;
use rustc_hash::FxHashMap;
use shardwright_cost::PatternTensor;
use shardwright_search::{Control, FORBIDDEN};
use shardwright_space::{Config, configs};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Memory per cell of the tables between groups, with room for one more round of divisions.
const BYTES_PER_CELL: u64 = 32;

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
    pub times: Vec<Times>,
}

/// Lower bounds of the seconds to every pattern of a tensor.
pub(super) type Times = Arc<[f32]>;

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
    pub features: Vec<Features>,
    /// Per config: picoseconds of computing and halo exchanges.
    pub costs: Vec<i64>,
    pub groups: Vec<Group>,
    /// Transfers inside of the variable.
    pub inside: Vec<u32>,
    /// Whether the configs are not listed: one stands for all, and transfers cost nothing.
    pub is_free: bool,
    /// Whether groups were added or removed since tables were computed.
    pub is_changed: bool,
}

impl ClassConfigs {
    /// A class with these groups of configs.
    pub fn new(features: Vec<Features>, costs: Vec<i64>, groups: Vec<Group>) -> Self {
        Self { features, costs, groups, inside: Vec::new(), is_free: false, is_changed: true }
    }

    /// A class whose configs are not listed.
    pub fn free(cost: i64) -> Self {
        let class = Self::new(vec![Features::new()], vec![cost], vec![Group::of(vec![0])]);
        Self { is_free: true, ..class }
    }
}

/// Some configs of a class.
pub(super) struct Group {
    pub configs: Vec<u32>,
    /// Whether nothing is computed for it yet.
    pub is_new: bool,
    /// Per config: its cost, with the least of the transfers inside of the variable.
    pub costs: Vec<i64>,
}

impl Group {
    pub fn of(configs: Vec<u32>) -> Self {
        Self { configs, is_new: true, costs: Vec::new() }
    }
}

/// The kinds of the transfers between two variables; true: from the lower to the higher one.
pub(super) type Between = Vec<(u32, bool)>;

/// What the table of a pair of variables depends on: their classes, and the transfers between them.
pub(super) struct TableKind {
    pub classes: [u32; 2],
    pub transfers: Between,
    /// The sum of the times of all transfers.
    pub table: Arc<Vec<i64>>,
}

/// A kind of tables, with the sizes and prices of memory in it.
type PricedKey = (u32, Vec<([SizeId; 2], u64)>);

/// The problem on prime axes, relaxed to groups of configs.
pub(super) struct Relaxation {
    pub classes: Vec<ClassConfigs>,
    /// Per variable: its class.
    pub of: Vec<u32>,
    pub ends: Vec<End>,
    /// None where a tensor has too many patterns.
    pub tensors: Vec<Option<PatternTensor>>,
    pub kinds: Vec<TransferKind>,
    pub tables: Vec<TableKind>,
    /// Pairs of variables, with the kind of their table.
    pub pairs: Vec<((u32, u32), u32)>,
    /// Times from sets of patterns of a tensor, which endpoints share.
    pub times: FxHashMap<(u32, Vec<u32>), Times>,
    /// Where memory is limited.
    pub memory: Option<HeldMemory>,
    /// No cost is above this: that only lowers the bound.
    pub most: i64,
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
                        true => least_picoseconds(least_time(&from.times[row], &to.sets[column]), kind.runs),
                    });
                }
            }
            (kind.table, kind.columns) = (table, readers.len());
        });
        self.update_tables();
        for class in &mut self.classes {
            class.groups.iter_mut().for_each(|group| group.is_new = false);
        }
        true
    }

    /// Sums the tables of pairs whose groups have changed.
    pub fn update_tables(&mut self) {
        let (classes, kinds, most) = (&self.classes, &self.kinds, self.most);
        self.tables.par_iter_mut().for_each(|own| {
            let [u, v] = own.classes.map(|class| &classes[class as usize]);
            if u.is_changed || v.is_changed {
                own.table = Arc::new(sum(u.groups.len(), v.groups.len(), &own.transfers, kinds, most));
            }
        });
        self.classes.iter_mut().for_each(|class| class.is_changed = false);
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
                Some(tensor) => tensor.times(&sources).iter().map(|own| rounded_down(own)).collect(),
                None => vec![Arc::from([0.0]); sources.len()],
            })
        };
        let found: Option<Vec<Vec<Times>>> = jobs.par_iter().map(run).collect();
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
        // Without those of groups that are no more.
        self.times.retain(|_, times| Arc::strong_count(times) > 1);
        true
    }

    /// The costs of the network over groups, at the current prices of memory.
    pub fn costs(&self) -> Costs {
        let none = || Priced { own: vec![Vec::new(); self.of.len()], pairs: BTreeMap::new(), constant: 0 };
        let Priced { own, pairs: held, constant } =
            self.memory.as_ref().map_or_else(none, |memory| memory.priced(self.of.len()));
        let mut costs = Costs { constant, ..Costs::default() };
        let mut unary: FxHashMap<(u32, Vec<(SizeId, u64)>), u32> = FxHashMap::default();
        for (&class, own) in self.of.iter().zip(&own) {
            let key = (class, own.iter().map(|(size, price)| (*size, price.to_bits())).collect());
            let at = *unary.entry(key).or_insert_with(|| {
                let groups = self.classes[class as usize].groups.iter();
                costs.unary.push(groups.map(|group| self.least(group, own).1.min(self.most)).collect());
                costs.unary.len() as u32 - 1
            });
            costs.variables.push(at);
        }
        let mut tables: FxHashMap<PricedKey, u32> = FxHashMap::default();
        let mut due: Vec<(u32, &PairPrices)> = Vec::new();
        let nothing = PairPrices::new();
        for ((u, v), kind) in &self.pairs {
            let prices = held.get(&(*u, *v)).unwrap_or(&nothing);
            let key = (*kind, prices.iter().map(|(sizes, price)| (*sizes, price.to_bits())).collect());
            let table = *tables.entry(key).or_insert_with(|| {
                due.push((*kind, prices));
                due.len() as u32 - 1
            });
            costs.pairs.push((*u, *v, table));
        }
        costs.tables = due.par_iter().map(|(kind, prices)| self.priced_table(*kind, prices)).collect();
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

    /// The table of a kind: the sum of the times of all transfers, and of the memory that both variables decide.
    fn priced_table(&self, kind: u32, prices: &PairPrices) -> Arc<Vec<i64>> {
        let TableKind { classes, table, .. } = &self.tables[kind as usize];
        if prices.is_empty() {
            return Arc::clone(table);
        }
        let [u, v] = classes.map(|class| &self.classes[class as usize].groups);
        let mut sum = Vec::clone(table);
        for (sizes, price) in prices {
            let [least_u, least_v] = [(u, sizes[0]), (v, sizes[1])].map(|(groups, size)| {
                let all = self.memory.as_ref().map_or(&[][..], |memory| &memory.sizes[size as usize]);
                let own = |group: &Group| {
                    group.configs.iter().map(|&config| all[config as usize]).min().unwrap_or(0)
                };
                groups.iter().map(own).collect::<Vec<i64>>()
            });
            for (cells, a) in sum.chunks_mut(v.len().max(1)).zip(&least_u) {
                for (cell, b) in cells.iter_mut().zip(&least_v) {
                    *cell = cell.saturating_add(price_of(*a.min(b), *price)).min(self.most);
                }
            }
        }
        Arc::new(sum)
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

    /// Per variable: the configs of its leading op in some rounds and those of its class, ascending. None of a class that is not listed.
    pub fn configs(
        &self,
        context: &Context<'_>,
        rounds: &[Vec<u32>],
        of_class: &[Vec<u32>],
    ) -> Vec<Vec<Config>> {
        let mut per_class: Vec<Option<Vec<Config>>> = vec![None; self.classes.len()];
        let variable = |(v, &class): (usize, &u32)| {
            if self.classes[class as usize].is_free {
                return Vec::new();
            }
            let listed = per_class[class as usize].get_or_insert_with(|| {
                let lead = context.variables.members[v].forward();
                configs(&context.shapes[lead.index()].rule, context.machine.mesh())
            });
            let of_class = of_class.get(class as usize).into_iter().flatten();
            let mut own: Vec<u32> = rounds.iter().map(|round| round[v]).chain(of_class.copied()).collect();
            own.sort_unstable();
            own.dedup();
            own.into_iter().map(|config| listed[config as usize].clone()).collect()
        };
        self.of.iter().enumerate().map(variable).collect()
    }

    /// Bytes of tables and times.
    pub fn bytes(&self) -> u64 {
        let groups = |end: u32| self.classes[self.ends[end as usize].class as usize].groups.len() as u64;
        let cells: u64 = self.kinds.iter().map(|kind| groups(kind.from) * groups(kind.to)).sum();
        let times: u64 = self.times.values().map(|times| 4 * times.len() as u64).sum();
        cells.saturating_mul(BYTES_PER_CELL).saturating_add(times)
    }
}

/// A lower bound of the price of some bytes.
fn price_of(bytes: i64, price: f64) -> i64 {
    (bytes as f64 * price * (1.0 - 1e-12)).floor() as i64
}

/// The least time to one of some patterns.
fn least_time(times: &[f32], patterns: &[u32]) -> f32 {
    let mut least = f32::INFINITY;
    for &pattern in patterns {
        let time = times[pattern as usize];
        least = if time < least { time } else { least };
    }
    least
}

/// Times rounded down, so that they stay lower bounds.
fn rounded_down(times: &[f64]) -> Times {
    times.iter().map(|time| (time * (1.0 - 2.0 * f64::from(f32::EPSILON))) as f32).collect()
}

/// A lower bound of the rounded picoseconds of a time, times the number of runs; forbidden where no path leads.
fn least_picoseconds(seconds: f32, runs: u32) -> i64 {
    if !seconds.is_finite() {
        return FORBIDDEN;
    }
    // Times are rounded to the nearest picosecond.
    let floor = (f64::from(seconds) * 1e12 - 0.6).floor().max(0.0) as i64;
    floor.saturating_mul(i64::from(runs)).min(FORBIDDEN)
}

/// The sum of the tables of transfers between two variables of so many groups. No cell is above `most`.
fn sum(rows: usize, columns: usize, transfers: &Between, kinds: &[TransferKind], most: i64) -> Vec<i64> {
    let mut sum = vec![0i64; rows * columns];
    for &(kind, upwards) in transfers {
        let own = &kinds[kind as usize].table;
        if upwards {
            sum.iter_mut().zip(own).for_each(|(cell, own)| *cell += (*own).min(most));
            continue;
        }
        for (row, cells) in sum.chunks_mut(columns.max(1)).enumerate() {
            let column = own.iter().skip(row).step_by(rows);
            cells.iter_mut().zip(column).for_each(|(cell, own)| *cell += (*own).min(most));
        }
    }
    sum.iter_mut().for_each(|cell| *cell = (*cell).min(most));
    sum
}
