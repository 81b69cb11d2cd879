//! The pricer: computes the choices of every variable, and the network over them.
//!
//! Variables of a class ([`crate::variable_classes`]) share the results. These are choices with their costs, layouts at
//! both ends of a transfer, times between these layouts, and tables of pairs of variables. The work per variable is a
//! lookup.

use crate::{
    context::Context,
    error::PlanError,
    op_times::OpTimes,
    search_problem::{Choice, Choices},
    transfer_times::{Distinct, TransferTimes},
    variable_classes::VariableClasses,
};
use rayon::prelude::*;
use rustc_hash::FxHashMap;
use shardwright_cost::{Layout, TensorShape};
use shardwright_graph::{OpId, Rule};
use shardwright_machine::Mesh;
use shardwright_search::{Control, Interval, Network, NetworkBuilder, SharedTable, VarId, is_forbidden};
use shardwright_space::{
    Config, Endpoint, LayerSplit, Transfer, configs, configs_in_any_order, constrained_view,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Memory of a search in multiples of the problem's tables: the tables themselves, and the copies of `exact`.
const COPIES: u64 = 4;
/// Number of pairwise tables that are expanded at once.
const BATCH: usize = 64;

/// Prices choices and tables.
pub(crate) struct Pricer<'p> {
    pub context: &'p Context<'p>,
    pub times: OpTimes<'p>,
    /// May stop the pricing; the results are then lost.
    pub control: &'p Control<'p>,
}

/// An endpoint up to its variable's class: class, member, port, whether partial results are reduced.
type EndpointKind = (u32, u32, u32, bool);

/// A transfer between two variables, up to their classes. The number identifies the layouts at its ends and the times
/// between them. The flag says whether it leads from the lower variable to the higher one.
type TransferKind = (u32, bool);

/// The times of a transfer between all layouts at its ends.
struct TransferTable {
    from: u32,
    to: u32,
    times: Arc<[i64]>,
}

/// Numbers keys in order of first appearance.
struct Numbers<K> {
    numbers: FxHashMap<K, u32>,
    all: Vec<K>,
}

impl<K: std::hash::Hash + Eq + Clone> Numbers<K> {
    fn new() -> Self {
        Self { numbers: FxHashMap::default(), all: Vec::new() }
    }

    fn of(&mut self, key: K) -> u32 {
        *self.numbers.entry(key).or_insert_with_key(|key| {
            self.all.push(key.clone());
            self.all.len() as u32 - 1
        })
    }
}

impl Pricer<'_> {
    /// The choices and classes of all variables. The choices are the candidates, or all configs of the leading op and
    /// `more`.
    pub fn choices(
        &self,
        tables: &TransferTimes<'_>,
        candidates: Option<&[Vec<Config>]>,
        more: &[Arc<BTreeSet<Config>>],
    ) -> Result<(Vec<Choices>, VariableClasses), PlanError> {
        let mut inside: Vec<Vec<&Transfer>> = vec![Vec::new(); self.context.variables.members.len()];
        for transfer in &self.context.transfers.pairs {
            let (producer, reader) = self.ends(transfer);
            if producer == reader {
                inside[reader as usize].push(transfer);
            }
        }
        let lead = |variable: usize| self.context.variables.members[variable].forward().index();
        let also = |variable: usize| more.get(lead(variable)).map(|more| &**more);
        let listed = |variable: usize| candidates.map(|candidates| &candidates[variable]);
        let classes = VariableClasses::new(
            self.context.graph,
            &self.context.variables,
            self.times.kinds(),
            &inside,
            |v| (listed(v), also(v)),
        );
        let class = |&variable: &u32| -> Result<Choices, PlanError> {
            self.go_on()?;
            let (variable, inside) = (variable as usize, &inside[variable as usize]);
            let split = &self.context.variables.members[variable];
            let all = match listed(variable) {
                Some(listed) => listed.clone(),
                None => configs(&self.context.shapes[lead(variable)].rule, self.context.mesh()),
            };
            let all = all.iter().chain(also(variable).into_iter().flatten());
            let all: Vec<Vec<Config>> =
                all.map(|lead| split.configs(&self.context.shapes, self.context.mesh(), lead)).collect();
            for transfer in inside {
                let (_, member) = self.context.variables.index[transfer.from.op.index()];
                let from = |configs: &Vec<Config>| {
                    transfer.from.layout(&self.context.shapes, &configs[member as usize], self.context.mesh())
                };
                tables.prepare(transfer.tensor, &Distinct::of(all.iter().map(from)).values)?;
            }
            all.into_iter().map(|configs| self.choice(variable, configs, inside, tables)).collect()
        };
        let choices: Vec<Choices> = classes.first.par_iter().map(class).collect::<Result<_, _>>()?;
        Ok((classes.share(&choices), classes))
    }

    fn go_on(&self) -> Result<(), PlanError> {
        self.control.stop(0).map_or(Ok(()), |reason| Err(PlanError::Stopped(reason)))
    }

    fn choice(
        &self,
        variable: usize,
        configs: Vec<Config>,
        inside: &[&Transfer],
        tables: &TransferTimes<'_>,
    ) -> Result<Choice, PlanError> {
        let (mut compute, mut comm) = (0, 0);
        for (&op, config) in self.context.variables.members[variable].ops.iter().zip(&configs) {
            let runs = i64::from(self.context.graph.runs(op));
            compute += runs * self.times.compute(op, config);
            comm += runs * self.times.exchange(&self.context.resharder, op, config);
        }
        for transfer in inside {
            let layout = |end: &Endpoint| {
                let (_, member) = self.context.variables.index[end.op.index()];
                end.layout(&self.context.shapes, &configs[member as usize], self.context.mesh())
            };
            let time = tables.time(transfer.tensor, &layout(&transfer.from), &layout(&transfer.to))?;
            comm = repeated(time, self.context.graph.runs(transfer.to.op)).saturating_add(comm);
        }
        Ok(Choice { configs, compute, comm })
    }

    /// The network over the choices.
    pub fn network(
        &self,
        tables: &TransferTimes<'_>,
        choices: &[Choices],
        classes: &VariableClasses,
    ) -> Result<Network, PlanError> {
        // The kind of every transfer between variables.
        let mut ends: Numbers<EndpointKind> = Numbers::new();
        let mut transfers: Numbers<(TensorShape, u32, u32)> = Numbers::new();
        let mut examples: Vec<&Transfer> = Vec::new();
        let mut pairs: BTreeMap<(u32, u32), Vec<TransferKind>> = BTreeMap::new();
        for transfer in &self.context.transfers.pairs {
            let (producer, reader) = self.ends(transfer);
            if producer == reader {
                continue;
            }
            let mut end = |end: &Endpoint| {
                let (variable, member) = self.context.variables.index[end.op.index()];
                ends.of((classes.of[variable as usize], member, end.port, end.reduced))
            };
            let (from, to) = (end(&transfer.from), end(&transfer.to));
            let kind = transfers.of((tables.shape(transfer.tensor)?, from, to));
            if kind as usize == examples.len() {
                examples.push(transfer);
            }
            pairs
                .entry((producer.min(reader), producer.max(reader)))
                .or_default()
                .push((kind, producer < reader));
        }
        let layouts: Vec<Distinct<Layout>> =
            ends.all.par_iter().map(|end| self.layouts(end, choices, classes)).collect();
        let price = |(&(_, from, to), transfer): (&(TensorShape, u32, u32), &&Transfer)| {
            self.go_on()?;
            let mut times = tables.table(transfer.tensor, &layouts[from as usize], &layouts[to as usize])?;
            // Variables of a class run equally often.
            let runs = self.context.graph.runs(transfer.to.op);
            if runs > 1 {
                times = times.iter().map(|&time| repeated(time, runs)).collect();
            }
            Ok(TransferTable { from, to, times })
        };
        let transfer_tables: Vec<TransferTable> =
            transfers.all.par_iter().zip(&examples).map(price).collect::<Result<_, PlanError>>()?;
        // Pairs with equal transfers share a table.
        let mut kinds: Numbers<Vec<TransferKind>> = Numbers::new();
        let pairs: Vec<((u32, u32), u32)> = pairs
            .into_iter()
            .map(|(pair, mut transfers)| {
                transfers.sort_unstable();
                (pair, kinds.of(transfers))
            })
            .collect();
        self.check_size(&kinds.all, &transfer_tables, &layouts)?;
        let mut builder = NetworkBuilder::new();
        for choices in choices {
            let costs: Vec<i64> = choices.iter().map(|c| c.compute.saturating_add(c.comm)).collect();
            builder.variable(&costs, &[], Interval::default())?;
        }
        let mut shared: Vec<SharedTable> = Vec::with_capacity(kinds.all.len());
        let expand = |kind: &Vec<TransferKind>| sum(kind, &transfer_tables, &layouts);
        for batch in kinds.all.chunks(BATCH) {
            self.go_on()?;
            for table in batch.par_iter().map(expand).collect::<Vec<_>>() {
                shared.push(builder.table(&table)?);
            }
        }
        for ((u, v), kind) in pairs {
            builder.join(VarId(u), VarId(v), shared[kind as usize])?;
        }
        Ok(builder.build()?)
    }

    /// Refuses tables that exceed the memory limit, before any of them is built.
    fn check_size(
        &self,
        kinds: &[Vec<TransferKind>],
        transfer_tables: &[TransferTable],
        layouts: &[Distinct<Layout>],
    ) -> Result<(), PlanError> {
        let cells = |kind: &Vec<TransferKind>| {
            let TransferTable { from, to, .. } =
                kind.first().map(|(transfer, _)| &transfer_tables[*transfer as usize])?;
            Some(layouts[*from as usize].of.len() as u64 * layouts[*to as usize].of.len() as u64)
        };
        let bytes: u64 = kinds.iter().filter_map(cells).sum::<u64>() * 8 * COPIES;
        if bytes <= self.control.memory_bytes {
            return Ok(());
        }
        Err(PlanError::TooLarge { needed: bytes.div_ceil(1 << 20), allowed: self.control.memory_bytes >> 20 })
    }

    /// The layouts at an endpoint under the choices of its class.
    fn layouts(
        &self,
        &(class, member, port, reduced): &EndpointKind,
        choices: &[Choices],
        classes: &VariableClasses,
    ) -> Distinct<Layout> {
        let variable = classes.first[class as usize] as usize;
        let end =
            Endpoint { op: self.context.variables.members[variable].ops[member as usize], port, reduced };
        let choices = choices[variable].iter();
        Distinct::of(
            choices
                .map(|c| end.layout(&self.context.shapes, &c.configs[member as usize], self.context.mesh())),
        )
    }

    /// The variables at both ends of a transfer.
    fn ends(&self, transfer: &Transfer) -> (u32, u32) {
        let variable = |end: &Endpoint| self.context.variables.index[end.op.index()].0;
        (variable(&transfer.from), variable(&transfer.to))
    }
}

/// The time of something that runs this often; forbidden stays forbidden.
fn repeated(time: i64, runs: u32) -> i64 {
    if is_forbidden(time) { time } else { time.saturating_mul(i64::from(runs)) }
}

/// The table of a pair of variables: the sums of all transfer times between them. The lower variable's choices are the
/// rows.
fn sum(
    transfers: &[TransferKind],
    transfer_tables: &[TransferTable],
    layouts: &[Distinct<Layout>],
) -> Vec<i64> {
    let ends = |&(kind, upwards): &TransferKind| {
        let TransferTable { from, to, times } = &transfer_tables[kind as usize];
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
                    *cell = cell.saturating_add(times[to as usize]);
                }
            } else {
                for (cell, &from) in row.iter_mut().zip(&upper.of) {
                    *cell = cell.saturating_add(times[from as usize * width + at as usize]);
                }
            }
        }
    }
    table
}

/// Per op: the configs that views of constrained arguments have beside their list, ascending. A user's sharding may have its axes
/// in any order. Empty where no argument is constrained.
pub(crate) fn constrained_configs(context: &Context<'_>) -> Vec<Arc<BTreeSet<Config>>> {
    let (graph, mesh) = (context.graph, context.mesh());
    let more = |op: OpId| -> BTreeSet<Config> {
        let rule = &context.shapes[op.index()].rule;
        if !constrained_view(graph, op) || count_in_any_order(rule, mesh) > MOST_IN_ANY_ORDER {
            return BTreeSet::new();
        }
        let unlisted = |config: &Config| !config.is_listed(rule, mesh);
        configs_in_any_order(rule, mesh).into_iter().filter(unlisted).collect()
    };
    if !graph.op_ids().any(|op| constrained_view(graph, op)) {
        return Vec::new();
    }
    graph.op_ids().map(|op| Arc::new(more(op))).collect()
}

/// The most configs of a constrained argument; beyond, only those of [`configs`] can be asked for.
const MOST_IN_ANY_ORDER: usize = 4096;

fn count_in_any_order(rule: &Rule, mesh: &Mesh) -> usize {
    (rule.factors.len() + 1).saturating_pow(mesh.len() as u32)
}

/// Per op: the configs that it has in a tied layer and that its own list lacks, ascending.
pub(crate) fn tied_configs(context: &Context<'_>, kinds: &[u32]) -> Vec<Arc<BTreeSet<Config>>> {
    let (layers, shapes, mesh) = (&context.layers, &context.shapes[..], context.mesh());
    let none = vec![Vec::new(); layers.members.len()];
    let classes = VariableClasses::new(context.graph, layers, kinds, &none, |_| ());
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
        classes.first.par_iter().map(|&first| layer(&layers.members[first as usize])).collect();
    let found = |&(layer, member): &(u32, u32)| {
        per_class[classes.of[layer as usize] as usize][member as usize].clone()
    };
    layers.index.iter().map(found).collect()
}
