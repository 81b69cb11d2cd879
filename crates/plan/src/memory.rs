//! Memory: what a device holds when, in the evaluation of a plan and in the search problem.
//!
//! Every tensor is held in the layout in which it is made or stored, for as long as it lives. A re-layout makes a copy
//! beside it, which is held as long as it is read: the first reader's in a layer until the layer's last reader
//! (of a weight: in the same pass) is done, since the others take it from there; another reader's only while
//! it runs; where the reader is a view, as long as anybody looks through it. Reading a tensor as it lies makes
//! no copy. Data that is read in several layouts is held in each of them all step long. What a collective or a
//! kernel needs for itself while it runs is not counted. Two layers that need the same copy are both charged for it,
//! as in the objective: an upper bound on what a program that shares it holds.
//!
//! **In the network** a variable has one interval, but its tensors live at different times. So what a variable
//! holds over the same interval forms a group, and each group but one gets a small variable of its own, whose choices
//! are the different sizes that the group can have; a table that forbids all other sizes ties it to its owner.
//! Whether a transfer between two variables makes a copy depends on both. It gets a variable whose choices are
//! "both ends have layout L, no copy" for every L that both can have, and "a copy of S bytes"; tables to both ends
//! forbid what is not so. The network's peak is then exactly the peak that [`crate::evaluate`] reports.

use crate::{
    error::PlanError,
    problem::Problem,
    tables::Distinct,
    transfer::{End, Transfer},
};
use shardwright_cost::{Layout, Lifetimes, Placement};
use shardwright_graph::TensorId;
use shardwright_machine::{Bytes, Mesh};
use shardwright_search::{FORBIDDEN, Interval, Network, NetworkBuilder, VarId};
use shardwright_space::{AxisUse, Config};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Bytes of a tensor that one device holds.
pub fn local_bytes(problem: &Problem<'_>, tensor: TensorId, layout: &Layout) -> u64 {
    let sharded = layout.axes_where(|p| matches!(p, Placement::Shard(_)));
    problem.graph.tensor(tensor).ty.bytes() / u64::from(problem.mesh().group_size(sharded)).max(1)
}

/// What a transfer may have to hold: a copy, where its ends have different layouts.
struct Copied {
    transfer: Transfer,
    held: Range<u32>,
}

/// All copies that there may be.
fn copies(problem: &Problem<'_>, lifetimes: &Lifetimes) -> Vec<Copied> {
    let (graph, transfers) = (problem.graph, &problem.transfers);
    let reading = |transfer: &Transfer| lifetimes.reading(graph, transfer.to.op);
    // Until when the copy at an operand is needed: others may take it from there.
    let mut needed: BTreeMap<End, u32> = BTreeMap::new();
    for transfer in &transfers.all {
        let end = needed.entry(transfer.from).or_default();
        *end = (*end).max(reading(transfer).end);
    }
    let copied = |transfer: &Transfer| {
        let (own, others) = (reading(transfer), needed.get(&transfer.to).copied().unwrap_or(0));
        Copied { transfer: *transfer, held: own.start..own.end.max(others) }
    };
    // An updated weight goes back to its own place.
    let updated: BTreeSet<(TensorId, Option<End>)> =
        graph.carries.iter().map(|carry| (carry.new, transfers.homes[carry.old.index()])).collect();
    let made = transfers.all.iter().filter(|t| !updated.contains(&(t.tensor, Some(t.to)))).map(copied);
    let delivered = transfers.delivered.iter().map(|t| Copied { transfer: *t, held: 0..lifetimes.steps() });
    made.chain(delivered).collect()
}

/// The most bytes that one device holds at once under one config per op. Where ops are pinned, devices hold different
/// things, and the one that holds most counts.
pub fn peak(problem: &Problem<'_>, configs: &[Config]) -> Bytes {
    let (graph, mesh) = (problem.graph, problem.mesh());
    let lifetimes = Lifetimes::of(graph);
    let layout = |end: &End| end.layout(&problem.shapes, &configs[end.op.index()], mesh);
    let mut made: Vec<(Range<u32>, u64, Layout)> = Vec::new();
    for Copied { transfer, held } in copies(problem, &lifetimes) {
        let to = layout(&transfer.to);
        if layout(&transfer.from) != to {
            made.push((held, local_bytes(problem, transfer.tensor, &to), to));
        }
    }
    let home = |t: TensorId| {
        let layout = problem.transfers.homes[t.index()].map(|home| layout(&home));
        let layout = layout.unwrap_or(Layout::replicated(mesh.len()));
        (local_bytes(problem, t, &layout), layout)
    };
    let homes: Vec<(u64, Layout)> = graph.tensor_ids().map(home).collect();
    let of_device = |digits: &Vec<u32>| {
        let here = |layout: &Layout| {
            layout
                .absent()
                .iter()
                .all(|axis| layout.get(axis) == Placement::Absent(digits[axis.index()] as u16))
        };
        // What comes and goes before each op, and so what is there: many copies are held for most of the step.
        let mut changes = vec![0i128; graph.ops.len() + 1];
        for (held, bytes, _) in made.iter().filter(|(.., layout)| here(layout)) {
            changes[held.start as usize] += i128::from(*bytes);
            changes[held.end as usize] -= i128::from(*bytes);
        }
        let sums = changes.iter().scan(0, |sum, change| {
            *sum += change;
            Some(u64::try_from(*sum).unwrap_or(u64::MAX))
        });
        let extra: Vec<u64> = sums.collect();
        let held = |t: TensorId| {
            let (bytes, layout) = &homes[t.index()];
            Bytes(if here(layout) { *bytes } else { 0 })
        };
        let peak = lifetimes.peak(graph, held, |op| Bytes(extra[op.index()]));
        peak.map_or(Bytes(0), |peak| peak.held.total())
    };
    told_apart(mesh, configs).iter().map(of_device).max().unwrap_or(Bytes(0))
}

/// Devices, as digits, that stand for all: every digit that an op is pinned to stands for itself, the others for each other.
fn told_apart(mesh: &Mesh, configs: &[Config]) -> Vec<Vec<u32>> {
    let mut devices = vec![Vec::new()];
    for (at, axis) in mesh.axes().iter().enumerate() {
        let pin = |config: &Config| match config.uses()[at] {
            AxisUse::Pin(digit) => Some(u32::from(digit)),
            _ => None,
        };
        let mut digits: BTreeSet<u32> = configs.iter().filter_map(pin).collect();
        digits.extend((0..axis.size).find(|digit| !digits.contains(digit)));
        let with = |device: &Vec<u32>| -> Vec<Vec<u32>> {
            digits.iter().map(|&digit| device.iter().copied().chain([digit]).collect()).collect()
        };
        devices = devices.iter().flat_map(with).collect();
    }
    devices
}

/// What a variable holds under each of its choices, by when.
type Held = BTreeMap<(u32, u32), Vec<i64>>;

/// The problem's network with a limit on what a device may hold. The problem's variables come first, in order.
pub fn limited(problem: &Problem<'_>, limit: Bytes) -> Result<Network, PlanError> {
    let lifetimes = Lifetimes::of(problem.graph);
    let mut held: Vec<Held> = vec![Held::new(); problem.choices.len()];
    let mut hold = |variable: usize, when: Range<u32>, sizes: &dyn Fn(usize) -> u64| {
        let choices = problem.choices[variable].len();
        let totals = held[variable].entry((when.start, when.end)).or_insert_with(|| vec![0; choices]);
        for (choice, total) in totals.iter_mut().enumerate() {
            *total = total.saturating_add(size(sizes(choice)));
        }
    };
    let mut homeless: BTreeMap<(u32, u32), i64> = BTreeMap::new();
    for t in problem.graph.tensor_ids() {
        let alive = lifetimes.interval(t);
        match problem.transfers.homes[t.index()] {
            _ if alive.is_empty() => {}
            Some(home) => {
                let layouts = layouts(problem, &home);
                let bytes = |choice: usize| local_bytes(problem, t, layouts.value(choice));
                hold(problem.variables.part(home.op), alive, &bytes);
            }
            None => {
                let bytes = local_bytes(problem, t, &Layout::replicated(problem.mesh().len()));
                *homeless.entry((alive.start, alive.end)).or_default() += size(bytes);
            }
        }
    }
    let mut between = Vec::new();
    for copied in copies(problem, &lifetimes) {
        let Transfer { tensor, from, to } = copied.transfer;
        if problem.variables.part(from.op) != problem.variables.part(to.op) {
            between.push(copied);
            continue;
        }
        let (from, layouts) = (layouts(problem, &from), layouts(problem, &to));
        let bytes = |choice: usize| match layouts.value(choice) {
            layout if layout == from.value(choice) => 0,
            layout => local_bytes(problem, tensor, layout),
        };
        hold(problem.variables.part(to.op), copied.held, &bytes);
    }
    let network = &problem.network;
    let mut builder = NetworkBuilder::new();
    let mut others = Vec::new();
    for (variable, held) in held.into_iter().enumerate() {
        let id = VarId(variable as u32);
        let mut held: Vec<(Interval, Vec<i64>)> = held
            .into_iter()
            .map(|((lo, hi), sizes)| (interval(lo..hi), sizes))
            .filter(|(_, sizes)| sizes.iter().any(|&size| size > 0))
            .collect();
        // The group with the most different sizes needs no variable of its own.
        let widest = (0..held.len()).max_by_key(|&g| (distinct(&held[g].1).len(), std::cmp::Reverse(g)));
        let (alive, own) = widest.map_or_else(Default::default, |g| held.swap_remove(g));
        builder.variable(network.unary(id), &own, alive)?;
        others.extend(held.into_iter().map(|(alive, sizes)| (id, alive, sizes)));
    }
    for edge in network.edges() {
        builder.edge(edge.u, edge.v, network.table(edge.table))?;
    }
    for (owner, alive, sizes) in others {
        let values = distinct(&sizes);
        let group = builder.variable(&vec![0; values.len()], &values, alive)?;
        if values.len() > 1 {
            builder.edge(owner, group, &allow(&sizes, &values, |size, value| size == value))?;
        }
    }
    for copied in &between {
        copy_variable(problem, copied, &mut builder)?;
    }
    for ((lo, hi), bytes) in homeless {
        builder.variable(&[0], &[bytes], interval(lo..hi))?;
    }
    builder.usage_limit(size(limit.0))?;
    Ok(builder.build()?)
}

/// What the variable of a copy can be.
#[derive(Clone, Copy, PartialEq)]
enum CopyState {
    /// Both ends have this layout, by its number among the reader's.
    None(u32),
    /// There is a copy of this size.
    Of(i64),
}

/// Adds the variable that says whether a transfer between two variables makes a copy, and of what size.
fn copy_variable(
    problem: &Problem<'_>,
    copied: &Copied,
    builder: &mut NetworkBuilder,
) -> Result<(), PlanError> {
    let Transfer { tensor, from, to } = copied.transfer;
    let (made, read) = (layouts(problem, &from), layouts(problem, &to));
    let sizes: Vec<i64> = read.values.iter().map(|l| size(local_bytes(problem, tensor, l))).collect();
    // The reader's number of each of the maker's layouts, where both have it.
    let common: Vec<Option<u32>> = made
        .values
        .iter()
        .map(|layout| read.values.iter().position(|other| other == layout).map(|at| at as u32))
        .collect();
    let mut states: Vec<CopyState> = common.iter().flatten().map(|&at| CopyState::None(at)).collect();
    states.extend(distinct(&sizes).into_iter().map(CopyState::Of));
    let usage: Vec<i64> =
        states.iter().map(|state| if let CopyState::Of(size) = state { *size } else { 0 }).collect();
    let copy = builder.variable(&vec![0; states.len()], &usage, interval(copied.held.clone()))?;
    let variable = |end: &End| VarId(problem.variables.part(end.op) as u32);
    let makers = allow(&made.of, &states, |&made, state| match state {
        CopyState::None(at) => common[made as usize] == Some(*at),
        CopyState::Of(_) => true,
    });
    builder.edge(variable(&from), copy, &makers)?;
    let readers = allow(&read.of, &states, |&read, state| match state {
        CopyState::None(at) => read == *at,
        CopyState::Of(size) => sizes[read as usize] == *size,
    });
    builder.edge(variable(&to), copy, &readers)?;
    Ok(())
}

/// The layouts at an end under the choices of its variable.
fn layouts(problem: &Problem<'_>, end: &End) -> Distinct<Layout> {
    let (variable, member) = problem.variables.place[end.op.index()];
    let choices = problem.choices[variable as usize].iter();
    Distinct::of(choices.map(|c| end.layout(&problem.shapes, &c.configs[member as usize], problem.mesh())))
}

/// A table that forbids all pairs but some.
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

/// The different sizes, smallest first.
fn distinct(sizes: &[i64]) -> Vec<i64> {
    let mut values = sizes.to_vec();
    values.sort_unstable();
    values.dedup();
    values
}
