//! The network over configs and keep states, with a limit on memory.
//!
//! A variable's choices are its configs, each with each state of its forward op. States of neighbours that contradict each
//! other are forbidden pairs. Memory of a state counts in auxiliary variables, one per interval, as in [`crate::limited`].
//! Copies of weights and data that only clones read are left out, so the network counts at most what the step holds.

use super::{
    charges::{KeepCharge, KeepCharges, Span, other_charges},
    costs::{FetchCase, FetchCases},
    space::{KeepSpace, KeepState, Moment},
};
use crate::{
    error::PlanError,
    memory::{NetworkCharge, local_bytes},
    search_problem::SearchProblem,
    transfer_times::{Distinct, TransferTimes},
};
use rustc_hash::FxHashMap;
use shardwright_cost::Layout;
use shardwright_graph::{OpId, TensorId};
use shardwright_machine::Bytes;
use shardwright_search::{Control, FORBIDDEN, Interval, Network, NetworkBuilder, VarId, is_forbidden};
use shardwright_space::{Endpoint, Transfer};
use std::collections::BTreeMap;

/// The most keep states of all ops together.
const MOST_STATES: usize = 20_000;
/// The most cells of all tables together.
const MOST_CELLS: usize = 40_000_000;
/// More bytes than any tensor has.
const ALL: i64 = i64::MAX;

/// The network, and what its choices mean.
pub struct KeepNetwork {
    /// The problem's variables come first, in order.
    pub network: Network,
    /// Per variable: the forward op with states, and they.
    states: Vec<Option<(OpId, Vec<KeepState>)>>,
}

/// A solution of the network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeepSolution {
    /// Per variable of the problem: its choice.
    pub choices: Vec<u32>,
    /// The ops that are recomputed, ascending.
    pub recomputed: Vec<OpId>,
}

impl KeepNetwork {
    /// What a choice per variable of the network means.
    pub fn solution(&self, choice: &[u32]) -> KeepSolution {
        let mut solution = KeepSolution { choices: Vec::new(), recomputed: Vec::new() };
        for (states, &choice) in self.states.iter().zip(choice) {
            let count = states.as_ref().map_or(1, |(_, states)| states.len() as u32);
            solution.choices.push(choice / count);
            if let Some((op, states)) = states
                && states[(choice % count) as usize].is_recomputed()
            {
                solution.recomputed.push(*op);
            }
        }
        solution.recomputed.sort_unstable();
        solution
    }
}

/// The network of a problem and the states of its forward ops. The problem's graph has no clones.
///
/// None where states or tables are too many, or a transfer depends on more than two variables: where single ops choose among
/// several configs.
///
/// # Errors
/// Where a tensor cannot be laid out, or `control` stops the building.
pub fn keep_network(
    problem: &SearchProblem<'_>,
    space: &KeepSpace,
    limit: Option<Bytes>,
    control: &Control<'_>,
) -> Result<Option<KeepNetwork>, PlanError> {
    let context = &*problem.context;
    let Some(all) = space.all_states(MOST_STATES) else { return Ok(None) };
    let Some(fetches) = FetchCases::of(context, space) else { return Ok(None) };
    let mut owners: Vec<Option<usize>> = vec![None; problem.choices.len()];
    for (at, own) in space.ops.iter().enumerate().filter(|(at, _)| all[*at].len() > 1) {
        if owners[context.variables.variable_of(own.op)].replace(at).is_some() {
            return Ok(None);
        }
    }
    let builder = Builder { problem, space, all: &all, owners: &owners, control };
    let Some(costs) = builder.costs(&fetches)? else { return Ok(None) };
    let network = builder.finish(costs, limit)?;
    let states = owners.iter().map(|at| at.map(|at| (space.ops[at].op, all[at].clone())));
    Ok(Some(KeepNetwork { network, states: states.collect() }))
}

/// Unary costs, and tables by pair of variables.
struct CostTables {
    unary: Vec<Vec<i64>>,
    pairs: BTreeMap<(usize, usize), Vec<i64>>,
}

struct Builder<'b, 'a> {
    problem: &'b SearchProblem<'a>,
    space: &'b KeepSpace,
    /// Per op of the space: its states.
    all: &'b [Vec<KeepState>],
    /// Per variable: the op with several states.
    owners: &'b [Option<usize>],
    control: &'b Control<'b>,
}

impl Builder<'_, '_> {
    fn configs(&self, variable: usize) -> usize {
        self.problem.choices[variable].len()
    }

    fn states(&self, variable: usize) -> usize {
        self.owners[variable].map_or(1, |at| self.all[at].len())
    }

    fn choices(&self, variable: usize) -> usize {
        self.configs(variable) * self.states(variable)
    }

    fn variable(&self, op: OpId) -> usize {
        self.problem.context.variables.variable_of(op)
    }

    fn layout(&self, end: &Endpoint, config: usize) -> Layout {
        let context = &*self.problem.context;
        let (variable, member) = context.variables.index[end.op.index()];
        let choice = &self.problem.choices[variable as usize][config];
        end.layout(&context.shapes, &choice.configs[member as usize], context.mesh())
    }

    /// Whether an op is recomputed under a choice of its variable.
    fn recomputes(&self, at: Option<usize>, choice: usize) -> bool {
        let Some(at) = at else { return false };
        let states = &self.all[at];
        states.len() > 1 && states[choice % states.len()].is_recomputed()
    }

    fn costs(&self, fetches: &FetchCases) -> Result<Option<CostTables>, PlanError> {
        let context = &*self.problem.context;
        let times = context.times_on_slowest(context.mesh())?;
        let transfer_times = TransferTimes::new(context.graph, &context.resharder);
        let time = |transfers: &[Transfer], config: &dyn Fn(usize) -> usize| -> Result<i64, PlanError> {
            transfers.iter().try_fold(0i64, |sum, Transfer { tensor, from, to }| {
                let layout = |end: &Endpoint| self.layout(end, config(self.variable(end.op)));
                let time = transfer_times.time(*tensor, &layout(from), &layout(to))?;
                let runs = i64::from(context.graph.runs(to.op));
                let time = if is_forbidden(time) { time } else { time.saturating_mul(runs) };
                Ok(sum.saturating_add(time))
            })
        };
        let mut tables = CostTables { unary: Vec::new(), pairs: BTreeMap::new() };
        for (variable, split) in context.variables.members.iter().enumerate() {
            let own = self.owners[variable];
            let mut costs = Vec::with_capacity(self.choices(variable));
            for choice in self.problem.choices[variable].iter() {
                let of = |op: OpId, config| {
                    let time = times.compute(op, config) + times.exchange(&context.resharder, op, config);
                    i64::from(context.graph.runs(op)) * time
                };
                let all: i64 =
                    split.ops.iter().zip(&choice.configs).map(|(&op, config)| of(op, config)).sum();
                let again = own.map_or(0, |at| {
                    let op = self.space.ops[at].op;
                    of(op, &choice.configs[context.variables.index[op.index()].1 as usize])
                });
                let state = |state: usize| all + if self.recomputes(own, state) { again } else { 0 };
                costs.extend((0..self.states(variable)).map(state));
            }
            tables.unary.push(costs);
        }
        let plain = fetches.plain.iter().map(|&transfer| FetchCase {
            producer: None,
            reader: None,
            transfers: [vec![transfer], vec![transfer], vec![transfer], vec![transfer]],
        });
        let mut cells = 0;
        for case in plain.collect::<Vec<_>>().iter().chain(&fetches.cases) {
            if let Some(reason) = self.control.stop(0) {
                return Err(PlanError::Stopped(reason));
            }
            // The variables that decide.
            let ends =
                case.transfers.iter().flatten().flat_map(|transfer| [transfer.from.op, transfer.to.op]);
            let ends = ends.map(|op| self.variable(op)).filter(|&variable| self.configs(variable) > 1);
            let stated = [case.producer, case.reader].into_iter().flatten();
            let stated =
                stated.filter(|&at| self.all[at].len() > 1).map(|at| self.variable(self.space.ops[at].op));
            let mut variables: Vec<usize> = ends.chain(stated).collect();
            variables.sort_unstable();
            variables.dedup();
            let (u, v) = match variables[..] {
                [] => (0, 0),
                [only] => (only, only),
                [u, v] => (u, v),
                _ => return Ok(None),
            };
            let (rows, columns) = (self.choices(u), if u == v { 1 } else { self.choices(v) });
            let mut known: FxHashMap<(usize, usize, usize), i64> = FxHashMap::default();
            let mut table = vec![0i64; rows * columns];
            for (cell, cost) in table.iter_mut().enumerate() {
                let (row, column) = (cell / columns, if u == v { cell } else { cell % columns });
                let choice = |variable: usize| if variable == u { row } else { column };
                let config = |variable: usize| match variable {
                    _ if self.configs(variable) == 1 => 0,
                    _ => choice(variable) / self.states(variable),
                };
                let again = |at: Option<usize>| {
                    let at = at.filter(|&at| self.all[at].len() > 1);
                    at.is_some_and(|at| {
                        self.recomputes(Some(at), choice(self.variable(self.space.ops[at].op)))
                    })
                };
                let index = FetchCase::index(again(case.producer), again(case.reader));
                let key = (index, row / self.states(u), if u == v { 0 } else { column / self.states(v) });
                *cost = match known.get(&key) {
                    Some(&known) => known,
                    None => {
                        let found = time(&case.transfers[index], &config)?;
                        known.insert(key, found);
                        found
                    }
                };
            }
            if u == v {
                add(&mut tables.unary[u], &table);
            } else {
                cells += add_pair(&mut tables.pairs, (u, v), &table);
            }
            if cells > MOST_CELLS {
                return Ok(None);
            }
        }
        Ok(if self.rules(&mut tables, cells) { Some(tables) } else { None })
    }

    /// Forbids states of neighbours that contradict each other. False where two neighbours share a variable, or tables are too
    /// large.
    fn rules(&self, tables: &mut CostTables, mut cells: usize) -> bool {
        for (at, own) in self.space.ops.iter().enumerate() {
            for &reader in &own.consumers {
                let reader = reader as usize;
                if self.all[at].len() == 1 && self.all[reader].len() == 1 {
                    continue;
                }
                let (from, to) = (self.variable(own.op), self.variable(self.space.ops[reader].op));
                if from == to {
                    return false;
                }
                let (u, v) = (from.min(to), from.max(to));
                let (rows, columns) = (self.choices(u), self.choices(v));
                let mut table = vec![0i64; rows * columns];
                for (cell, cost) in table.iter_mut().enumerate() {
                    let (row, column) = (cell / columns, cell % columns);
                    let (ours, its) = if from == u { (row, column) } else { (column, row) };
                    let state = |at: usize, choice: usize| self.all[at][choice % self.all[at].len()];
                    if !self.space.agree(state(at, ours), reader, state(reader, its)) {
                        *cost = FORBIDDEN;
                    }
                }
                cells += add_pair(&mut tables.pairs, (u, v), &table);
                if cells > MOST_CELLS {
                    return false;
                }
            }
        }
        true
    }

    fn finish(&self, costs: CostTables, limit: Option<Bytes>) -> Result<Network, PlanError> {
        let mut builder = NetworkBuilder::new();
        let Some(limit) = limit else {
            for unary in &costs.unary {
                builder.variable(unary, &[], Interval::default())?;
            }
            join(&mut builder, &costs.pairs)?;
            return Ok(builder.build()?);
        };
        let memory = self.memory();
        let mut others = Vec::new();
        for (variable, (unary, held)) in costs.unary.iter().zip(memory.held).enumerate() {
            let mut held: Vec<(Interval, Vec<i64>)> = held
                .into_iter()
                .filter(|(_, sizes)| sizes.iter().any(|&size| size > 0))
                .map(|((lo, hi), sizes)| (Interval { lo, hi }, sizes))
                .collect();
            let widest = (0..held.len()).max_by_key(|&g| (distinct(&held[g].1).len(), std::cmp::Reverse(g)));
            let (alive, own) = widest.map_or_else(Default::default, |g| held.swap_remove(g));
            builder.variable(unary, &own, alive)?;
            others.extend(held.into_iter().map(|(alive, sizes)| (VarId(variable as u32), alive, sizes)));
        }
        join(&mut builder, &costs.pairs)?;
        for (owner, alive, sizes) in others {
            let values = distinct(&sizes);
            let group = builder.variable(&vec![0; values.len()], &values, alive)?;
            if values.len() > 1 {
                builder.edge(owner, group, &only(&sizes, &values, |size, value| size == value))?;
            }
        }
        for Between { variables, classes, usage, interval } in memory.between {
            let columns = classes[1].values.len();
            let both = builder.variable(&vec![0; usage.len()], &usage, interval)?;
            let states: Vec<[usize; 2]> =
                (0..usage.len()).map(|state| [state / columns, state % columns]).collect();
            for side in [0, 1] {
                let table = only(&classes[side].of, &states, |class, state| *class as usize == state[side]);
                builder.edge(VarId(variables[side] as u32), both, &table)?;
            }
        }
        for ((lo, hi), bytes) in memory.fixed {
            builder.variable(&[0], &[bytes], Interval { lo, hi })?;
        }
        builder.usage_limit(i64::try_from(limit.0).unwrap_or(ALL))?;
        Ok(builder.build()?)
    }

    /// The memory of all states.
    fn memory(&self) -> Memory {
        let context = &*self.problem.context;
        let graph = context.graph;
        let mut moments: Vec<Moment> = graph.op_ids().map(Moment::of).collect();
        for (own, states) in self.space.ops.iter().zip(self.all) {
            moments.extend(states.iter().filter_map(|state| state.clone_moment(own.op)));
        }
        moments.sort_unstable();
        moments.dedup();
        let mut memory = Memory {
            held: vec![BTreeMap::new(); self.problem.choices.len()],
            fixed: BTreeMap::new(),
            between: Vec::new(),
        };
        let interval = |span: &Span| Interval {
            lo: index(&moments, span.from),
            hi: index(&moments, span.to) + u64::from(span.inclusive),
        };
        let charges = KeepCharges::new(context, self.space);
        for (at, states) in self.all.iter().enumerate() {
            // By charge: the states that have it.
            let mut by_charge: BTreeMap<KeepCharge, Vec<usize>> = BTreeMap::new();
            let mut own = Vec::new();
            for (index, &state) in states.iter().enumerate() {
                charges.of(at, state, &mut own);
                for charge in own.drain(..) {
                    by_charge.entry(charge).or_default().push(index);
                }
            }
            for (KeepCharge { tensor, held, span }, having) in by_charge {
                let gate = Gate { at, having: &having };
                self.hold(&mut memory, Some(gate), tensor, held.ends(), interval(&span));
            }
        }
        let whole = Layout::replicated(context.mesh().len());
        for (charge, span) in other_charges(context, self.space) {
            let interval = interval(&span);
            match charge {
                NetworkCharge::Stored { tensor, at: None } => {
                    let bytes = bytes(local_bytes(context, tensor, &whole));
                    *memory.fixed.entry((interval.lo, interval.hi)).or_default() += bytes;
                }
                NetworkCharge::Stored { tensor, at: Some(end) } => {
                    self.hold(&mut memory, None, tensor, &[end], interval);
                }
                NetworkCharge::Smaller { tensor, ends } => {
                    self.hold(&mut memory, None, tensor, &ends, interval)
                }
                NetworkCharge::Copy(transfer) => self.hold_copy(&mut memory, &transfer, interval),
            }
        }
        memory
    }

    /// The bytes of a tensor at an end, per choice of the end's variable.
    fn sizes(&self, tensor: TensorId, end: &Endpoint) -> Vec<i64> {
        let (variable, context) = (self.variable(end.op), &*self.problem.context);
        let states = self.states(variable);
        let size = |config: usize| bytes(local_bytes(context, tensor, &self.layout(end, config)));
        (0..self.configs(variable)).flat_map(|config| std::iter::repeat_n(size(config), states)).collect()
    }

    /// Counts the smallest of a tensor's sizes at some ends, under some states of an op.
    fn hold(
        &self,
        memory: &mut Memory,
        gate: Option<Gate<'_>>,
        tensor: TensorId,
        ends: &[Endpoint],
        interval: Interval,
    ) {
        // Per variable: the smallest size of all ends there.
        let mut sizes: BTreeMap<usize, Vec<i64>> = BTreeMap::new();
        for end in ends {
            let variable = self.variable(end.op);
            let own = sizes.entry(variable).or_insert_with(|| vec![ALL; self.choices(variable)]);
            own.iter_mut().zip(self.sizes(tensor, end)).for_each(|(own, size)| *own = size.min(*own));
        }
        // Sizes that do not depend on a choice limit all others.
        let constant = sizes.values().filter(|own| is_constant(own)).map(|own| own[0]).min();
        sizes.retain(|_, own| !is_constant(own));
        if let Some(Gate { at, having }) = gate.filter(|gate| gate.having.len() < self.all[gate.at].len()) {
            let variable = self.variable(self.space.ops[at].op);
            let states = self.states(variable);
            let own = sizes.entry(variable).or_insert_with(|| vec![ALL; self.choices(variable)]);
            own.iter_mut()
                .enumerate()
                .filter(|(choice, _)| !having.contains(&(choice % states)))
                .for_each(|(_, size)| *size = 0);
        }
        if let Some(constant) = constant {
            sizes.values_mut().flatten().for_each(|size| *size = constant.min(*size));
        }
        let mut sizes = sizes.into_iter();
        match (sizes.next(), sizes.next(), sizes.next()) {
            (None, ..) => {
                *memory.fixed.entry((interval.lo, interval.hi)).or_default() += constant.unwrap_or(0);
            }
            (Some((variable, own)), None, _) => memory.add(variable, own, interval),
            (Some((u, first)), Some((v, second)), None) => {
                let (first, second) = (Distinct::of(first.into_iter()), Distinct::of(second.into_iter()));
                let usage = pairs(&first.values, &second.values, |a, b| *a.min(b));
                memory.between.push(Between {
                    variables: [u, v],
                    classes: [first.kinds(), second.kinds()],
                    usage,
                    interval,
                });
            }
            // Three variables decide: left out, as the network may count less.
            _ => {}
        }
    }

    /// Counts a copy where a transfer's ends have different layouts.
    fn hold_copy(&self, memory: &mut Memory, transfer: &Transfer, interval: Interval) {
        let Transfer { tensor, from, to } = transfer;
        let variables = [from, to].map(|end| self.variable(end.op));
        let layouts = [from, to].map(|end| {
            let variable = self.variable(end.op);
            let layout = |choice: usize| self.layout(end, choice / self.states(variable));
            Distinct::of((0..self.choices(variable)).map(layout))
        });
        let [made, read] = &layouts;
        let copy = |from: &Layout, to: &Layout| match from == to {
            true => 0,
            false => bytes(local_bytes(&self.problem.context, *tensor, to)),
        };
        let one_decides = variables[0] == variables[1] || made.values.len() == 1;
        if one_decides || read.values.len() == 1 {
            let by = usize::from(one_decides);
            let size = |choice: usize| match by {
                0 => copy(made.value(choice), read.value(0)),
                _ if variables[0] == variables[1] => copy(made.value(choice), read.value(choice)),
                _ => copy(made.value(0), read.value(choice)),
            };
            memory.add(variables[by], (0..self.choices(variables[by])).map(size).collect(), interval);
            return;
        }
        let usage = pairs(&made.values, &read.values, copy);
        memory.between.push(Between { variables, classes: [made.kinds(), read.kinds()], usage, interval });
    }
}

/// The states of an op under which something is held.
#[derive(Clone, Copy)]
struct Gate<'g> {
    at: usize,
    having: &'g [usize],
}

/// Bytes that depend on the classes of two variables' choices.
struct Between {
    variables: [usize; 2],
    classes: [Distinct<()>; 2],
    /// By the first variable's class, then the second's.
    usage: Vec<i64>,
    interval: Interval,
}

fn pairs<T>(rows: &[T], columns: &[T], value: impl Fn(&T, &T) -> i64) -> Vec<i64> {
    rows.iter().flat_map(|row| columns.iter().map(|column| value(row, column)).collect::<Vec<_>>()).collect()
}

/// Bytes by variable and interval.
struct Memory {
    held: Vec<BTreeMap<(u64, u64), Vec<i64>>>,
    fixed: BTreeMap<(u64, u64), i64>,
    between: Vec<Between>,
}

impl Memory {
    fn add(&mut self, variable: usize, sizes: Vec<i64>, interval: Interval) {
        if is_constant(&sizes) {
            *self.fixed.entry((interval.lo, interval.hi)).or_default() += sizes[0];
            return;
        }
        match self.held[variable].entry((interval.lo, interval.hi)) {
            std::collections::btree_map::Entry::Vacant(free) => {
                free.insert(sizes);
            }
            std::collections::btree_map::Entry::Occupied(mut known) => add(known.get_mut(), &sizes),
        }
    }
}

fn is_constant(sizes: &[i64]) -> bool {
    sizes.iter().all(|size| *size == sizes[0])
}

fn index(moments: &[Moment], moment: Moment) -> u64 {
    moments.partition_point(|known| *known < moment) as u64
}

fn bytes(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(ALL)
}

fn add(into: &mut [i64], more: &[i64]) {
    into.iter_mut().zip(more).for_each(|(own, more)| *own = own.saturating_add(*more));
}

/// Adds to a table; returns the cells of a new one.
fn add_pair(pairs: &mut BTreeMap<(usize, usize), Vec<i64>>, pair: (usize, usize), table: &[i64]) -> usize {
    match pairs.get_mut(&pair) {
        Some(known) => {
            add(known, table);
            0
        }
        None => {
            pairs.insert(pair, table.to_vec());
            table.len()
        }
    }
}

fn join(builder: &mut NetworkBuilder, pairs: &BTreeMap<(usize, usize), Vec<i64>>) -> Result<(), PlanError> {
    for (&(u, v), table) in pairs {
        let costs: Vec<i64> = table.iter().map(|&cost| cost.min(FORBIDDEN)).collect();
        builder.edge(VarId(u as u32), VarId(v as u32), &costs)?;
    }
    Ok(())
}

fn distinct(sizes: &[i64]) -> Vec<i64> {
    let mut values = sizes.to_vec();
    values.sort_unstable();
    values.dedup();
    values
}

/// A table that forbids all pairs except the allowed ones.
fn only<A, B>(rows: &[A], columns: &[B], allowed: impl Fn(&A, &B) -> bool) -> Vec<i64> {
    let cells = rows.iter().flat_map(|row| columns.iter().map(move |column| (row, column)));
    cells.map(|(row, column)| if allowed(row, column) { 0 } else { FORBIDDEN }).collect()
}
