//! Pricing: the choices of every variable, and the network over them.
//!
//! Everything is worked out once for variables that are alike ([`crate::alike`]): choices with their costs, the layouts
//! at both ends of a transfer, the times between those layouts, and the table of a pair of variables. What is left to do
//! per variable is to look it up.

use crate::{
    alike::Alike,
    error::PlanError,
    groups::Groups,
    problem::{Choice, Choices},
    tables::{Distinct, Tables},
    times::OpTimes,
    transfer::{End, Transfer, Transfers},
};
use rayon::prelude::*;
use rustc_hash::FxHashMap;
use shardwright_cost::{Layout, Relayouts, TensorShape};
use shardwright_graph::Graph;
use shardwright_machine::Mesh;
use shardwright_search::{Control, Interval, Network, NetworkBuilder, SharedTable, VarId};
use shardwright_space::{Config, LayerSplit, OpShapes, configs};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// How many times the tables of a problem it takes to search it: themselves, and what `exact` makes of them.
const COPIES: u64 = 4;
/// Pairwise tables that are spread out at once.
const BATCH: usize = 64;

/// What choices and tables are made from.
pub(crate) struct Maker<'p> {
    pub graph: &'p Graph,
    pub variables: &'p Groups,
    pub transfers: &'p Transfers,
    pub shapes: &'p [OpShapes],
    pub mesh: &'p Mesh,
    pub relayouts: &'p Relayouts,
    pub times: OpTimes<'p>,
    /// May stop the work, which is then lost.
    pub control: &'p Control<'p>,
}

/// An end of transfers by class of variable: class, member, operand or result, which of the two.
type EndKind = (u32, u32, u32, bool);

/// A transfer between two variables, by what it has in common with others: the layouts at its ends and the times between
/// them, by number, and whether it leads from the variable of the lower number to the other.
type TransferKind = (u32, bool);

/// The times of a transfer between all layouts at its ends.
struct Priced {
    from: u32,
    to: u32,
    times: Arc<[i64]>,
}

/// Numbers for things as they come up.
struct Numbers<K> {
    known: FxHashMap<K, u32>,
    all: Vec<K>,
}

impl<K: std::hash::Hash + Eq + Clone> Numbers<K> {
    fn new() -> Self {
        Self { known: FxHashMap::default(), all: Vec::new() }
    }

    fn of(&mut self, key: K) -> u32 {
        *self.known.entry(key).or_insert_with_key(|key| {
            self.all.push(key.clone());
            self.all.len() as u32 - 1
        })
    }
}

impl Maker<'_> {
    /// The choices of every variable, and which variables are alike: the candidates, or all configs of its leading op
    /// and `more`.
    pub fn choices(
        &self,
        tables: &Tables<'_>,
        candidates: Option<&[Vec<Config>]>,
        more: &[Arc<BTreeSet<Config>>],
    ) -> Result<(Vec<Choices>, Alike), PlanError> {
        let mut inside: Vec<Vec<&Transfer>> = vec![Vec::new(); self.variables.splits.len()];
        for transfer in &self.transfers.all {
            let (maker, reader) = self.ends(transfer);
            if maker == reader {
                inside[reader as usize].push(transfer);
            }
        }
        let lead = |variable: usize| self.variables.splits[variable].forward().index();
        let also = |variable: usize| more.get(lead(variable)).map(|more| &**more);
        let listed = |variable: usize| candidates.map(|candidates| &candidates[variable]);
        let alike =
            Alike::new(self.graph, self.variables, self.times.kinds(), &inside, |v| (listed(v), also(v)));
        let class = |&variable: &u32| -> Result<Choices, PlanError> {
            self.go_on()?;
            let (variable, inside) = (variable as usize, &inside[variable as usize]);
            let split = &self.variables.splits[variable];
            let all = match listed(variable) {
                Some(listed) => listed.clone(),
                None => configs(&self.shapes[lead(variable)].rule, self.mesh),
            };
            let all = all.iter().chain(also(variable).into_iter().flatten());
            let all: Vec<Vec<Config>> = all.map(|lead| split.configs(self.shapes, self.mesh, lead)).collect();
            for transfer in inside {
                let (_, member) = self.variables.place[transfer.from.op.index()];
                let from = |configs: &Vec<Config>| {
                    transfer.from.layout(self.shapes, &configs[member as usize], self.mesh)
                };
                tables.prepare(transfer.tensor, &Distinct::of(all.iter().map(from)).values)?;
            }
            all.into_iter().map(|configs| self.choice(variable, configs, inside, tables)).collect()
        };
        let choices: Vec<Choices> = alike.first.par_iter().map(class).collect::<Result<_, _>>()?;
        Ok((alike.share(&choices), alike))
    }

    fn go_on(&self) -> Result<(), PlanError> {
        self.control.stop(0).map_or(Ok(()), |reason| Err(PlanError::Stopped(reason)))
    }

    fn choice(
        &self,
        variable: usize,
        configs: Vec<Config>,
        inside: &[&Transfer],
        tables: &Tables<'_>,
    ) -> Result<Choice, PlanError> {
        let (mut compute, mut comm) = (0, 0);
        for (&op, config) in self.variables.splits[variable].ops.iter().zip(&configs) {
            compute += self.times.compute(op, config);
            comm += self.times.halo(self.relayouts.comm(), op, config);
        }
        for transfer in inside {
            let layout = |end: &End| {
                let (_, member) = self.variables.place[end.op.index()];
                end.layout(self.shapes, &configs[member as usize], self.mesh)
            };
            comm += tables.time(transfer.tensor, &layout(&transfer.from), &layout(&transfer.to))?;
        }
        Ok(Choice { configs, compute, comm })
    }

    /// The network over the choices.
    pub fn network(
        &self,
        tables: &Tables<'_>,
        choices: &[Choices],
        alike: &Alike,
    ) -> Result<Network, PlanError> {
        // What every transfer between variables has in common with others.
        let mut ends: Numbers<EndKind> = Numbers::new();
        let mut transfers: Numbers<(TensorShape, u32, u32)> = Numbers::new();
        let mut examples: Vec<&Transfer> = Vec::new();
        let mut pairs: BTreeMap<(u32, u32), Vec<TransferKind>> = BTreeMap::new();
        for transfer in &self.transfers.all {
            let (maker, reader) = self.ends(transfer);
            if maker == reader {
                continue;
            }
            let mut end = |end: &End| {
                let (variable, member) = self.variables.place[end.op.index()];
                ends.of((alike.of[variable as usize], member, end.slot, end.made))
            };
            let (from, to) = (end(&transfer.from), end(&transfer.to));
            let kind = transfers.of((tables.shape(transfer.tensor)?, from, to));
            if kind as usize == examples.len() {
                examples.push(transfer);
            }
            pairs.entry((maker.min(reader), maker.max(reader))).or_default().push((kind, maker < reader));
        }
        let layouts: Vec<Distinct<Layout>> =
            ends.all.par_iter().map(|end| self.layouts(end, choices, alike)).collect();
        let price = |(&(_, from, to), transfer): (&(TensorShape, u32, u32), &&Transfer)| {
            self.go_on()?;
            let times = tables.table(transfer.tensor, &layouts[from as usize], &layouts[to as usize])?;
            Ok(Priced { from, to, times })
        };
        let priced: Vec<Priced> =
            transfers.all.par_iter().zip(&examples).map(price).collect::<Result<_, PlanError>>()?;
        // Pairs whose transfers are alike share a table.
        let mut kinds: Numbers<Vec<TransferKind>> = Numbers::new();
        let pairs: Vec<((u32, u32), u32)> = pairs
            .into_iter()
            .map(|(pair, mut transfers)| {
                transfers.sort_unstable();
                (pair, kinds.of(transfers))
            })
            .collect();
        self.check_size(&kinds.all, &priced, &layouts)?;
        let mut builder = NetworkBuilder::new();
        for choices in choices {
            let costs: Vec<i64> = choices.iter().map(|c| c.compute.saturating_add(c.comm)).collect();
            builder.variable(&costs, &[], Interval::default())?;
        }
        let mut shared: Vec<SharedTable> = Vec::with_capacity(kinds.all.len());
        let spread = |kind: &Vec<TransferKind>| sum(kind, &priced, &layouts);
        for batch in kinds.all.chunks(BATCH) {
            self.go_on()?;
            for table in batch.par_iter().map(spread).collect::<Vec<_>>() {
                shared.push(builder.table(&table)?);
            }
        }
        for ((u, v), kind) in pairs {
            builder.join(VarId(u), VarId(v), shared[kind as usize])?;
        }
        Ok(builder.build()?)
    }

    /// Refuses tables that take more memory than is allowed, before any of them is made.
    fn check_size(
        &self,
        kinds: &[Vec<TransferKind>],
        priced: &[Priced],
        layouts: &[Distinct<Layout>],
    ) -> Result<(), PlanError> {
        let cells = |kind: &Vec<TransferKind>| {
            let Priced { from, to, .. } = kind.first().map(|(transfer, _)| &priced[*transfer as usize])?;
            Some(layouts[*from as usize].of.len() as u64 * layouts[*to as usize].of.len() as u64)
        };
        let bytes: u64 = kinds.iter().filter_map(cells).sum::<u64>() * 8 * COPIES;
        if bytes <= self.control.memory_bytes {
            return Ok(());
        }
        Err(PlanError::TooLarge { needed: bytes.div_ceil(1 << 20), allowed: self.control.memory_bytes >> 20 })
    }

    /// The layouts at an end under the choices of the variables of its class.
    fn layouts(
        &self,
        &(class, member, slot, made): &EndKind,
        choices: &[Choices],
        alike: &Alike,
    ) -> Distinct<Layout> {
        let variable = alike.first[class as usize] as usize;
        let end = End { op: self.variables.splits[variable].ops[member as usize], slot, made };
        let choices = choices[variable].iter();
        Distinct::of(choices.map(|c| end.layout(self.shapes, &c.configs[member as usize], self.mesh)))
    }

    /// The variables that a transfer leads from and to.
    fn ends(&self, transfer: &Transfer) -> (u32, u32) {
        let variable = |end: &End| self.variables.place[end.op.index()].0;
        (variable(&transfer.from), variable(&transfer.to))
    }
}

/// The table of a pair of variables, the lower one's choices major: the times of all transfers between them.
fn sum(transfers: &[TransferKind], priced: &[Priced], layouts: &[Distinct<Layout>]) -> Vec<i64> {
    let ends = |&(kind, upwards): &TransferKind| {
        let Priced { from, to, times } = &priced[kind as usize];
        let (from, to) = (&layouts[*from as usize], &layouts[*to as usize]);
        (if upwards { (from, to) } else { (to, from) }, to.values.len(), times)
    };
    let Some(((rows, columns), ..)) = transfers.first().map(ends) else { return Vec::new() };
    let (rows, columns) = (rows.of.len(), columns.of.len());
    let mut table = vec![0i64; rows * columns];
    for transfer in transfers {
        let ((lower, upper), width, times) = ends(transfer);
        for (row, &at) in table.chunks_mut(columns).zip(&lower.of) {
            if transfer.1 {
                let times = &times[at as usize * width..][..width];
                for (cell, &to) in row.iter_mut().zip(&upper.of) {
                    *cell += times[to as usize];
                }
            } else {
                for (cell, &from) in row.iter_mut().zip(&upper.of) {
                    *cell += times[from as usize * width + at as usize];
                }
            }
        }
    }
    table
}

/// Per op: the configs that it has in a tied layer and that are not on its own list, ascending.
pub(crate) fn tied_configs(
    graph: &Graph,
    layers: &Groups,
    shapes: &[OpShapes],
    kinds: &[u32],
    mesh: &Mesh,
) -> Vec<Arc<BTreeSet<Config>>> {
    let alike = Alike::new(graph, layers, kinds, &vec![Vec::new(); layers.splits.len()], |_| ());
    let layer = |split: &LayerSplit| -> Vec<Arc<BTreeSet<Config>>> {
        let mut found = vec![BTreeSet::new(); split.ops.len()];
        for forward in configs(&shapes[split.forward().index()].rule, mesh) {
            for (found, config) in found.iter_mut().zip(split.configs(shapes, mesh, &forward)) {
                found.insert(config);
            }
        }
        for (&op, found) in split.ops.iter().zip(&mut found) {
            for listed in configs(&shapes[op.index()].rule, mesh) {
                found.remove(&listed);
            }
        }
        found.into_iter().map(Arc::new).collect()
    };
    let per_class: Vec<_> =
        alike.first.par_iter().map(|&first| layer(&layers.splits[first as usize])).collect();
    let found =
        |&(layer, member): &(u32, u32)| per_class[alike.of[layer as usize] as usize][member as usize].clone();
    layers.place.iter().map(found).collect()
}
