//! The search problem's network with a limit on memory.
//!
//! A variable has one interval, but its tensors live at different times. So the tensors that a variable
//! holds over the same interval form a group. Each group but one gets an auxiliary variable, whose choices are the distinct
//! sizes of the group; a table of forbidden pairs ties it to its owner. Whether a transfer between two variables makes a
//! copy depends on both. It gets an auxiliary variable whose choices are "both endpoints have layout L, no copy" for every
//! common L, and "a copy of S bytes"; tables to both endpoints forbid all other pairs. The smaller of two layouts gets an
//! auxiliary variable whose choices are pairs of sizes.
//!
//! Variables of a class share their choices. So sizes and tables are computed once per class.

use crate::{
    error::PlanError,
    memory::{NetworkCharge, local_bytes, network_charges, slices},
    search_problem::SearchProblem,
    transfer_times::Distinct,
};
use rustc_hash::FxHashMap;
use shardwright_cost::Layout;
use shardwright_graph::TensorId;
use shardwright_machine::Bytes;
use shardwright_search::{Control, FORBIDDEN, Interval, Network, NetworkBuilder, SharedTable, VarId};
use shardwright_space::{Endpoint, Transfer};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Bytes that a variable holds under each of its choices, by interval.
type UsageByInterval = BTreeMap<(u32, u32), Vec<i64>>;

/// Bytes per choice of a variable.
type Sizes = Arc<[i64]>;

/// The problem's network with a limit on the bytes that a device holds, unless `control` stops the building. The problem's
/// variables come first, in order.
///
/// # Errors
/// Where the network is too large, or `control` stops.
pub fn limited(
    problem: &SearchProblem<'_>,
    limit: Bytes,
    control: &Control<'_>,
) -> Result<Network, PlanError> {
    let context = &*problem.context;
    let go_on = || control.stop_by_time().map_or(Ok(()), |reason| Err(PlanError::Stopped(reason)));
    let variable_of = |end: &Endpoint| context.variables.variable_of(end.op);
    let mut limited = LimitedNetwork::new(problem);
    let ends = &mut limited.ends;
    let mut held: Vec<UsageByInterval> = vec![UsageByInterval::new(); problem.choices.len()];
    let mut hold = |variable: usize, when: &Range<u32>, sizes: &mut dyn Iterator<Item = i64>| {
        let choices = problem.choices[variable].len();
        let totals = held[variable].entry((when.start, when.end)).or_insert_with(|| vec![0; choices]);
        for (total, size) in totals.iter_mut().zip(sizes) {
            *total = total.saturating_add(size);
        }
    };
    let mut untouched: BTreeMap<(u32, u32), i64> = BTreeMap::new();
    let mut between = Vec::new();
    for &(charge, ref when) in network_charges(context) {
        go_on()?;
        match &charge {
            NetworkCharge::Stored { tensor, at: Some(at) } => {
                hold(variable_of(at), when, &mut ends.sizes(*tensor, at).iter().copied());
            }
            NetworkCharge::Stored { tensor, at: None } => {
                let bytes = local_bytes(context, *tensor, &Layout::replicated(context.mesh().len()));
                *untouched.entry((when.start, when.end)).or_default() += size(bytes);
            }
            NetworkCharge::Smaller { tensor, ends: [a, b] } if variable_of(a) == variable_of(b) => {
                let (one, other) = (ends.sizes(*tensor, a), ends.sizes(*tensor, b));
                let smaller = one.iter().zip(&*other).map(|(one, other)| *one.min(other));
                hold(variable_of(a), when, &mut { smaller });
            }
            NetworkCharge::Copy(Transfer { tensor, from, to }) if variable_of(from) == variable_of(to) => {
                let (made, read) = (ends.layouts(from), ends.layouts(to));
                let sizes = ends.sizes(*tensor, to);
                let copies = sizes
                    .iter()
                    .enumerate()
                    .map(|(choice, &size)| if made.value(choice) == read.value(choice) { 0 } else { size });
                hold(variable_of(to), when, &mut { copies });
            }
            NetworkCharge::Smaller { .. } | NetworkCharge::Copy(_) => between.push((charge, when.clone())),
        }
    }
    let network = &problem.network;
    let mut others = Vec::new();
    for (variable, held) in held.into_iter().enumerate() {
        let id = VarId(variable as u32);
        let mut held: Vec<(Interval, Vec<i64>)> = held
            .into_iter()
            .map(|((lo, hi), sizes)| (interval(lo..hi), sizes))
            .filter(|(_, sizes)| sizes.iter().any(|&size| size > 0))
            .collect();
        // The group with the most distinct sizes uses its owner's variable.
        let widest = (0..held.len()).max_by_key(|&g| (distinct(&held[g].1).len(), std::cmp::Reverse(g)));
        let (alive, own) = widest.map_or_else(Default::default, |g| held.swap_remove(g));
        limited.builder.variable(network.unary(id), &own, alive)?;
        others.extend(held.into_iter().map(|(alive, sizes)| (id, alive, sizes)));
    }
    let tables = (0..network.tables() as u32).map(|table| limited.builder.table(network.table(table)));
    let tables = tables.collect::<Result<Vec<SharedTable>, _>>()?;
    for edge in network.edges() {
        limited.builder.join(edge.u, edge.v, tables[edge.table as usize])?;
    }
    for (owner, alive, sizes) in others {
        go_on()?;
        limited.group(owner, alive, sizes)?;
    }
    for (charge, when) in between {
        go_on()?;
        match charge {
            NetworkCharge::Copy(transfer) => limited.copy(&transfer, when)?,
            NetworkCharge::Smaller { tensor, ends } => limited.smaller(tensor, ends, when)?,
            NetworkCharge::Stored { .. } => {}
        }
    }
    let mut builder = limited.builder;
    for ((lo, hi), bytes) in untouched {
        builder.variable(&[0], &[bytes], interval(lo..hi))?;
    }
    builder.usage_limit(size(limit.0))?;
    Ok(builder.build()?)
}

/// An endpoint up to its variable's class: the class's choices by address, the member, the port, and whether partial results
/// are reduced. Only equality counts, so results do not depend on addresses.
type EndClass = (usize, u32, u32, bool);

/// The layouts at endpoints and the sizes of tensors there, per choice.
struct EndSizes<'p, 'a> {
    problem: &'p SearchProblem<'a>,
    layouts: FxHashMap<EndClass, Arc<Distinct<Layout>>>,
    /// By class, and bytes and slices of the tensor.
    sizes: FxHashMap<(EndClass, u64, u64), Sizes>,
}

impl EndSizes<'_, '_> {
    fn class(&self, end: &Endpoint) -> EndClass {
        let (variable, member) = self.problem.context.variables.index[end.op.index()];
        (self.problem.choices[variable as usize].as_ptr().addr(), member, end.port, end.reduced)
    }

    /// The layouts at an end under the choices of its variable.
    fn layouts(&mut self, end: &Endpoint) -> Arc<Distinct<Layout>> {
        let (problem, context) = (self.problem, &*self.problem.context);
        let (variable, member) = context.variables.index[end.op.index()];
        let found = || {
            let choices = problem.choices[variable as usize].iter();
            let layout =
                |configs: &[_]| end.layout(&context.shapes, &configs[member as usize], context.mesh());
            Arc::new(Distinct::of(choices.map(|choice| layout(&choice.configs))))
        };
        Arc::clone(self.layouts.entry(self.class(end)).or_insert_with(found))
    }

    /// The bytes of a tensor at an end under the choices of its variable. Equal ones are one allocation.
    fn sizes(&mut self, tensor: TensorId, end: &Endpoint) -> Sizes {
        let context = &*self.problem.context;
        let key = (self.class(end), context.graph.tensor(tensor).ty.bytes(), slices(context, tensor));
        if let Some(known) = self.sizes.get(&key) {
            return Arc::clone(known);
        }
        let layouts = self.layouts(end);
        let bytes: Vec<i64> = layouts.values.iter().map(|l| size(local_bytes(context, tensor, l))).collect();
        let sizes: Sizes = layouts.of.iter().map(|&at| bytes[at as usize]).collect();
        self.sizes.insert(key, Arc::clone(&sizes));
        sizes
    }
}

/// The choices of an auxiliary variable: bytes of each, and its tables to two owners; none where the owner decides nothing.
struct Auxiliary {
    usage: Vec<i64>,
    tables: [Option<SharedTable>; 2],
}

/// A network under construction. Equal auxiliary variables share their tables.
struct LimitedNetwork<'p, 'a> {
    ends: EndSizes<'p, 'a>,
    builder: NetworkBuilder,
    /// By the owner's sizes.
    groups: FxHashMap<Vec<i64>, Option<SharedTable>>,
    /// By the addresses of the owners' sizes.
    smallest: FxHashMap<[usize; 2], Auxiliary>,
    /// By both endpoints and the addresses of the reader's sizes.
    copies: FxHashMap<(EndClass, EndClass, usize), Auxiliary>,
}

impl<'p, 'a> LimitedNetwork<'p, 'a> {
    fn new(problem: &'p SearchProblem<'a>) -> Self {
        Self {
            ends: EndSizes { problem, layouts: FxHashMap::default(), sizes: FxHashMap::default() },
            builder: NetworkBuilder::new(),
            groups: FxHashMap::default(),
            smallest: FxHashMap::default(),
            copies: FxHashMap::default(),
        }
    }

    fn owner(&self, end: &Endpoint) -> VarId {
        VarId(self.ends.problem.context.variables.variable_of(end.op) as u32)
    }

    /// Adds the auxiliary variable of tensors that a variable holds over another interval than its own.
    fn group(&mut self, owner: VarId, alive: Interval, sizes: Vec<i64>) -> Result<(), PlanError> {
        let values = distinct(&sizes);
        let group = self.builder.variable(&vec![0; values.len()], &values, alive)?;
        let table = match self.groups.get(&sizes) {
            Some(known) => *known,
            None => {
                let table = allow(&sizes, &values, |size, value| size == value);
                let table = if values.len() > 1 { Some(self.builder.table(&table)?) } else { None };
                self.groups.insert(sizes, table);
                table
            }
        };
        if let Some(table) = table {
            self.builder.join(owner, group, table)?;
        }
        Ok(())
    }

    /// Adds the auxiliary variable of a tensor that is held in the smaller of two variables' layouts.
    fn smaller(&mut self, tensor: TensorId, ends: [Endpoint; 2], held: Range<u32>) -> Result<(), PlanError> {
        let sizes = ends.each_ref().map(|end| self.ends.sizes(tensor, end));
        let key = sizes.each_ref().map(|sizes| sizes.as_ptr().addr());
        if !self.smallest.contains_key(&key) {
            let [rows, columns] = sizes.each_ref().map(|sizes| distinct(sizes));
            let states: Vec<[i64; 2]> =
                rows.iter().flat_map(|&a| columns.iter().map(move |&b| [a, b])).collect();
            let mut tables = [None; 2];
            let decides = [rows.len() > 1, columns.len() > 1];
            for side in [0, 1].into_iter().filter(|&side| decides[side]) {
                let table = allow(&sizes[side], &states, |size, state| *size == state[side]);
                tables[side] = Some(self.builder.table(&table)?);
            }
            let usage = states.iter().map(|[a, b]| *a.min(b)).collect();
            self.smallest.insert(key, Auxiliary { usage, tables });
        }
        let owners = ends.each_ref().map(|end| self.owner(end));
        add(&mut self.builder, &self.smallest[&key], owners, held)
    }

    /// Adds the auxiliary variable of a transfer between two variables: whether it makes a copy, and of what size.
    fn copy(&mut self, transfer: &Transfer, held: Range<u32>) -> Result<(), PlanError> {
        let Transfer { tensor, from, to } = transfer;
        let sizes = self.ends.sizes(*tensor, to);
        let key = (self.ends.class(from), self.ends.class(to), sizes.as_ptr().addr());
        if !self.copies.contains_key(&key) {
            let (made, read) = (self.ends.layouts(from), self.ends.layouts(to));
            // Per layout of the producer: its number among the reader's layouts, if the reader has it too.
            let common: Vec<Option<u32>> = made
                .values
                .iter()
                .map(|layout| read.values.iter().position(|other| other == layout).map(|at| at as u32))
                .collect();
            let mut states: Vec<CopyState> = common.iter().flatten().map(|&at| CopyState::None(at)).collect();
            states.extend(distinct(&sizes).into_iter().map(CopyState::Of));
            let usage =
                states.iter().map(|state| if let CopyState::Of(size) = state { *size } else { 0 }).collect();
            let producers = allow(&made.of, &states, |&made, state| match state {
                CopyState::None(at) => common[made as usize] == Some(*at),
                CopyState::Of(_) => true,
            });
            let choices: Vec<usize> = (0..read.of.len()).collect();
            let readers = allow(&choices, &states, |&choice, state| match state {
                CopyState::None(at) => read.of[choice] == *at,
                CopyState::Of(size) => sizes[choice] == *size,
            });
            let tables = [Some(self.builder.table(&producers)?), Some(self.builder.table(&readers)?)];
            self.copies.insert(key, Auxiliary { usage, tables });
        }
        let owners = [self.owner(from), self.owner(to)];
        add(&mut self.builder, &self.copies[&key], owners, held)
    }
}

/// Adds an auxiliary variable with its tables to two owners.
fn add(
    builder: &mut NetworkBuilder,
    Auxiliary { usage, tables }: &Auxiliary,
    owners: [VarId; 2],
    held: Range<u32>,
) -> Result<(), PlanError> {
    let variable = builder.variable(&vec![0; usage.len()], usage, interval(held))?;
    for (owner, table) in owners.into_iter().zip(tables) {
        if let Some(table) = table {
            builder.join(owner, variable, *table)?;
        }
    }
    Ok(())
}

/// The states of a copy's auxiliary variable.
#[derive(Clone, Copy, PartialEq)]
enum CopyState {
    /// Both endpoints have this layout; the number indexes the reader's layouts.
    None(u32),
    /// There is a copy of this size.
    Of(i64),
}

/// A table that forbids all pairs except the allowed ones.
fn allow<A, B>(rows: &[A], columns: &[B], allowed: impl Fn(&A, &B) -> bool) -> Vec<i64> {
    let cells = rows.iter().flat_map(|row| columns.iter().map(move |column| (row, column)));
    cells.map(|(row, column)| if allowed(row, column) { 0 } else { FORBIDDEN }).collect()
}

fn interval(range: Range<u32>) -> Interval {
    Interval { lo: u64::from(range.start), hi: u64::from(range.end) }
}

fn size(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// The distinct sizes, ascending.
fn distinct(sizes: &[i64]) -> Vec<i64> {
    let mut values = sizes.to_vec();
    values.sort_unstable();
    values.dedup();
    values
}
