//! Peak memory: of an assignment, and in the search problem.
//!
//! The peak of an assignment is that of its lowered program, by the one account of memory
//! ([`shardwright_lower::memory`]). Simulator and engine have the same account, so a plan that keeps a limit keeps it there
//! too.
//!
//! **The network** cannot know the whole program: the usage of a variable depends on its own choice alone. It counts less
//! ([`NetworkCharge`]), tensor by tensor in the graph's order:
//!
//! - the result of an op as stored, up to its first reader;
//! - then the smaller of that and of the first reader's layout, up to its last reader, which has it in its own layout;
//! - weights, optimizer state and data as stored, all step long; beside them copies for readers with another layout, per
//!   layer and pass, from the first reader to the last; data in each of its layouts all step long.
//!
//! The peak of an assignment is at least the network's. So a limit that no assignment keeps in the network is kept by no
//! plan, and the network's bounds on time hold under limits. An assignment that keeps a limit in the network may still
//! exceed it: transient copies, shares of all-reduces, buckets and workspaces count in the program only.
//!
//! A variable has one interval, but its tensors live at different times. So the tensors that a variable
//! holds over the same interval form a group. Each group but one gets an auxiliary variable, whose choices are the distinct
//! sizes of the group; a table of forbidden pairs ties it to its owner. Whether a transfer between two variables makes a
//! copy depends on both. It gets an auxiliary variable whose choices are "both endpoints have layout L, no copy" for every
//! common L, and "a copy of S bytes"; tables to both endpoints forbid all other pairs. The smaller of two layouts gets an
//! auxiliary variable whose choices are pairs of sizes.

use crate::{context::Context, error::PlanError, search_problem::SearchProblem, transfer_times::Distinct};
use shardwright_cost::{Layout, Lifetimes, Placement};
use shardwright_graph::TensorId;
use shardwright_lower::lower;
use shardwright_machine::{Bytes, Mesh};
use shardwright_search::{FORBIDDEN, Interval, Network, NetworkBuilder, VarId};
use shardwright_space::{Assignment, AxisUse, Config, Endpoint, Transfer};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Bytes of a tensor that one device holds.
pub fn local_bytes(context: &Context<'_>, tensor: TensorId, layout: &Layout) -> u64 {
    let sharded = layout.axes_where(|p| matches!(p, Placement::Shard(_)));
    // Of data that micro-batches slice, all slices are held.
    let sliced = context.graph.sliced_dim(tensor).is_some();
    let slices = if sliced { u64::from(context.graph.micro_batches.get()) } else { 1 };
    let bytes =
        context.graph.tensor(tensor).ty.bytes() / u64::from(context.mesh().group_size(sharded)).max(1);
    bytes.saturating_mul(slices)
}

/// The most bytes that one device holds at once under an assignment. An assignment that cannot be lowered fits nowhere.
pub fn peak(context: &Context<'_>, assignment: &Assignment) -> Bytes {
    let program = lower(context.graph, &context.resharder, assignment);
    let held = program.map_or(u64::MAX, |program| program.peak_memory());
    Bytes(held.max(network_peak(context, assignment).0))
}

/// Memory that the network counts.
enum NetworkCharge {
    /// A tensor in the layout of one endpoint; replicated where no op touches it.
    Stored { tensor: TensorId, at: Option<Endpoint> },
    /// A tensor in the smaller of two endpoints' layouts.
    Smaller { tensor: TensorId, ends: [Endpoint; 2] },
    /// A copy where a transfer's endpoints have different layouts.
    Copy(Transfer),
}

/// All memory that the network counts, and the ops during which it is held.
fn network_charges(context: &Context<'_>) -> Vec<(NetworkCharge, Range<u32>)> {
    let (graph, transfers) = (context.graph, &context.transfers);
    let lifetimes = Lifetimes::of(graph);
    let mut charges = Vec::new();
    let mut readers: Vec<Vec<Endpoint>> = vec![Vec::new(); graph.tensors.len()];
    for op in graph.op_ids() {
        for (i, t) in graph.node(op).inputs.iter().enumerate() {
            readers[t.index()].push(Endpoint::operand(op, i));
        }
    }
    // A tensor that every micro-batch reads again is held as stored, and copies live for one pass.
    let read_again = |t: TensorId| {
        let outside = graph.tensor(t).producer.is_none_or(|op| !graph.node(op).repeated);
        outside && readers[t.index()].iter().any(|end| graph.node(end.op).repeated)
    };
    for tensor in graph.tensor_ids() {
        let alive = lifetimes.interval(tensor);
        let at = transfers.sources[tensor.index()];
        if alive.is_empty() {
            continue;
        }
        let stored = |when: Range<u32>| (NetworkCharge::Stored { tensor, at }, when);
        let producer = graph.tensor(tensor).producer.filter(|_| !read_again(tensor));
        let (Some(producer), Some(source), Some(&first)) = (producer, at, readers[tensor.index()].first())
        else {
            charges.push(stored(alive));
            continue;
        };
        // A sum over micro-batches is held as stored from the body's start.
        if alive.start < producer.0 {
            charges.push(stored(alive.clone()));
            continue;
        }
        charges.push(stored(alive.start..first.op.0));
        // A view's readers need what the view read; a sum of partial results runs on those.
        let own_layout = |end: &&Endpoint| {
            end.op.0 + 1 == alive.end
                && !graph.node(end.op).op.operator().is_view()
                && transfers.partial_sums[end.op.index()].is_none()
        };
        let last = readers[tensor.index()].iter().find(own_layout);
        let until = alive.end - u32::from(last.is_some());
        if first.op.0 < until {
            let smaller = NetworkCharge::Smaller { tensor, ends: [source, first] };
            charges.push((smaller, first.op.0..until));
        }
        if let Some(&last) = last {
            charges.push((NetworkCharge::Stored { tensor, at: Some(last) }, until..alive.end));
        }
    }
    // Per endpoint: the last step that needs its copy. Other readers of the layer take the tensor from there.
    let mut needed: BTreeMap<Endpoint, u32> = BTreeMap::new();
    let reading = |transfer: &Transfer| lifetimes.reading(graph, transfer.to.op);
    let fetched = || {
        let pairs = transfers.pairs.iter();
        pairs.filter(|t| graph.tensor(t.tensor).producer.is_none() || read_again(t.tensor))
    };
    for transfer in fetched() {
        let end = needed.entry(transfer.from).or_default();
        *end = (*end).max(reading(transfer).end);
    }
    for transfer in fetched() {
        let (own, others) = (reading(transfer), needed.get(&transfer.to).copied().unwrap_or(0));
        charges.push((NetworkCharge::Copy(*transfer), own.start..own.end.max(others)));
    }
    let all_step = 0..lifetimes.steps();
    charges.extend(transfers.deliveries.iter().map(|t| (NetworkCharge::Copy(*t), all_step.clone())));
    charges.retain(|(_, held)| !held.is_empty());
    charges
}

/// Bytes that some device holds under every assignment on every mesh, pinned or not.
///
/// Somewhere each tensor that the network counts exists at least once. So the devices together hold its bytes, and the
/// device that holds most has the average or more. Copies do not count.
pub fn memory_lower_bound(context: &Context<'_>) -> Bytes {
    let graph = context.graph;
    let devices = u64::from(context.machine.devices()).max(1);
    let whole = Layout::replicated(context.mesh().len());
    let mut changes = vec![0i128; graph.ops.len() + 1];
    for (charge, held) in network_charges(context) {
        let bytes = match charge {
            NetworkCharge::Stored { tensor, at: None } => local_bytes(context, tensor, &whole),
            NetworkCharge::Stored { tensor, .. } | NetworkCharge::Smaller { tensor, .. } => {
                // Every layout's number of shards divides the number of devices.
                let bytes = graph.tensor(tensor).ty.bytes();
                let slices = local_bytes(context, tensor, &whole).checked_div(bytes).unwrap_or(1);
                (bytes / devices).saturating_mul(slices)
            }
            NetworkCharge::Copy(_) => continue,
        };
        changes[held.start as usize] += i128::from(bytes);
        changes[held.end as usize] -= i128::from(bytes);
    }
    let mut sum = 0i128;
    let held = changes.into_iter().map(|change| {
        sum += change;
        sum
    });
    Bytes(u64::try_from(held.max().unwrap_or(0)).unwrap_or(u64::MAX))
}

/// The network's peak of an assignment. Where ops are pinned, devices hold different tensors, and the device that holds
/// most counts.
pub fn network_peak(context: &Context<'_>, assignment: &Assignment) -> Bytes {
    let (graph, mesh) = (context.graph, context.mesh());
    let layout = |end: &Endpoint| end.layout(&context.shapes, assignment.config(end.op), mesh);
    // Bytes in one layout, or the smaller of two.
    let mut made: Vec<(Range<u32>, TensorId, [Layout; 2])> = Vec::new();
    for (charge, held) in network_charges(context) {
        match charge {
            NetworkCharge::Stored { tensor, at } => {
                let layout = at.map_or(Layout::replicated(mesh.len()), |at| layout(&at));
                made.push((held, tensor, [layout; 2]));
            }
            NetworkCharge::Smaller { tensor, ends } => {
                made.push((held, tensor, ends.map(|end| layout(&end))))
            }
            NetworkCharge::Copy(Transfer { tensor, from, to }) => {
                let to = layout(&to);
                if layout(&from) != to {
                    made.push((held, tensor, [to; 2]));
                }
            }
        }
    }
    let of_device = |digits: &Vec<u32>| {
        let here = |layout: &Layout| {
            layout
                .absent()
                .iter()
                .all(|axis| layout.get(axis) == Placement::Absent(digits[axis.index()] as u16))
        };
        // Changes of held bytes before each op, then their running sums: many copies are held for most of the step.
        let mut changes = vec![0i128; graph.ops.len() + 1];
        for (held, tensor, layouts) in &made {
            let bytes =
                |layout: &Layout| if here(layout) { local_bytes(context, *tensor, layout) } else { 0 };
            let bytes = i128::from(layouts.iter().map(bytes).min().unwrap_or(0));
            changes[held.start as usize] += bytes;
            changes[held.end as usize] -= bytes;
        }
        let sums = changes.iter().scan(0i128, |sum, change| {
            *sum += change;
            Some(*sum)
        });
        // Saturates above 2^64 bytes.
        Bytes(u64::try_from(sums.max().unwrap_or(0)).unwrap_or(u64::MAX))
    };
    device_classes(mesh, &assignment.configs).iter().map(of_device).max().unwrap_or(Bytes(0))
}

/// One device, as digits, of every device class. Digits that ops are pinned to differ; all other digits are equal.
fn device_classes(mesh: &Mesh, configs: &[Config]) -> Vec<Vec<u32>> {
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

/// Bytes that a variable holds under each of its choices, by interval.
type UsageByInterval = BTreeMap<(u32, u32), Vec<i64>>;

/// The problem's network with a limit on the bytes that a device holds. The problem's variables come first, in order.
pub fn limited(problem: &SearchProblem<'_>, limit: Bytes) -> Result<Network, PlanError> {
    let context = &*problem.context;
    let variable_of = |end: &Endpoint| context.variables.variable_of(end.op);
    let mut held: Vec<UsageByInterval> = vec![UsageByInterval::new(); problem.choices.len()];
    let mut hold = |variable: usize, when: &Range<u32>, sizes: &dyn Fn(usize) -> u64| {
        let choices = problem.choices[variable].len();
        let totals = held[variable].entry((when.start, when.end)).or_insert_with(|| vec![0; choices]);
        for (choice, total) in totals.iter_mut().enumerate() {
            *total = total.saturating_add(size(sizes(choice)));
        }
    };
    let mut untouched: BTreeMap<(u32, u32), i64> = BTreeMap::new();
    let mut between = Vec::new();
    for (charge, when) in network_charges(context) {
        match &charge {
            NetworkCharge::Stored { tensor, at: Some(at) } => {
                let layouts = layouts(problem, at);
                hold(variable_of(at), &when, &|choice| local_bytes(context, *tensor, layouts.value(choice)));
            }
            NetworkCharge::Stored { tensor, at: None } => {
                let bytes = local_bytes(context, *tensor, &Layout::replicated(context.mesh().len()));
                *untouched.entry((when.start, when.end)).or_default() += size(bytes);
            }
            NetworkCharge::Smaller { tensor, ends: [a, b] } if variable_of(a) == variable_of(b) => {
                let ends = [layouts(problem, a), layouts(problem, b)];
                let bytes = |choice: usize| {
                    let of = |end: &Distinct<Layout>| local_bytes(context, *tensor, end.value(choice));
                    of(&ends[0]).min(of(&ends[1]))
                };
                hold(variable_of(a), &when, &bytes);
            }
            NetworkCharge::Copy(Transfer { tensor, from, to }) if variable_of(from) == variable_of(to) => {
                let (from, layouts) = (layouts(problem, from), layouts(problem, to));
                let bytes = |choice: usize| match layouts.value(choice) {
                    layout if layout == from.value(choice) => 0,
                    layout => local_bytes(context, *tensor, layout),
                };
                hold(variable_of(to), &when, &bytes);
            }
            NetworkCharge::Smaller { .. } | NetworkCharge::Copy(_) => between.push((charge, when)),
        }
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
        // The group with the most distinct sizes uses its owner's variable.
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
    for (charge, when) in between {
        match charge {
            NetworkCharge::Copy(transfer) => copy_variable(problem, &transfer, when, &mut builder)?,
            NetworkCharge::Smaller { tensor, ends } => {
                smaller_variable(problem, tensor, ends, when, &mut builder)?;
            }
            NetworkCharge::Stored { .. } => {}
        }
    }
    for ((lo, hi), bytes) in untouched {
        builder.variable(&[0], &[bytes], interval(lo..hi))?;
    }
    builder.usage_limit(size(limit.0))?;
    Ok(builder.build()?)
}

/// Adds the auxiliary variable of a tensor that is held in the smaller of two variables' layouts.
fn smaller_variable(
    problem: &SearchProblem<'_>,
    tensor: TensorId,
    ends: [Endpoint; 2],
    held: Range<u32>,
    builder: &mut NetworkBuilder,
) -> Result<(), PlanError> {
    let context = &*problem.context;
    let sizes = ends.map(|end| {
        let layouts = layouts(problem, &end);
        let choices = 0..layouts.of.len();
        choices.map(|c| size(local_bytes(context, tensor, layouts.value(c)))).collect::<Vec<i64>>()
    });
    let [rows, columns] = sizes.each_ref().map(|sizes| distinct(sizes));
    let states: Vec<[i64; 2]> = rows.iter().flat_map(|&a| columns.iter().map(move |&b| [a, b])).collect();
    let usage: Vec<i64> = states.iter().map(|[a, b]| *a.min(b)).collect();
    let smaller = builder.variable(&vec![0; states.len()], &usage, interval(held))?;
    for (side, end) in ends.iter().enumerate() {
        let owner = VarId(context.variables.variable_of(end.op) as u32);
        if distinct(&sizes[side]).len() > 1 {
            builder.edge(
                owner,
                smaller,
                &allow(&sizes[side], &states, |size, state| *size == state[side]),
            )?;
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

/// Adds the auxiliary variable of a transfer between two variables: whether it makes a copy, and of what size.
fn copy_variable(
    problem: &SearchProblem<'_>,
    &Transfer { tensor, from, to }: &Transfer,
    held: Range<u32>,
    builder: &mut NetworkBuilder,
) -> Result<(), PlanError> {
    let context = &*problem.context;
    let (made, read) = (layouts(problem, &from), layouts(problem, &to));
    let sizes: Vec<i64> = read.values.iter().map(|l| size(local_bytes(context, tensor, l))).collect();
    // Per layout of the producer: its number among the reader's layouts, if the reader has it too.
    let common: Vec<Option<u32>> = made
        .values
        .iter()
        .map(|layout| read.values.iter().position(|other| other == layout).map(|at| at as u32))
        .collect();
    let mut states: Vec<CopyState> = common.iter().flatten().map(|&at| CopyState::None(at)).collect();
    states.extend(distinct(&sizes).into_iter().map(CopyState::Of));
    let usage: Vec<i64> =
        states.iter().map(|state| if let CopyState::Of(size) = state { *size } else { 0 }).collect();
    let variable_of_copy = builder.variable(&vec![0; states.len()], &usage, interval(held))?;
    let variable = |end: &Endpoint| VarId(context.variables.variable_of(end.op) as u32);
    let producers = allow(&made.of, &states, |&made, state| match state {
        CopyState::None(at) => common[made as usize] == Some(*at),
        CopyState::Of(_) => true,
    });
    builder.edge(variable(&from), variable_of_copy, &producers)?;
    let readers = allow(&read.of, &states, |&read, state| match state {
        CopyState::None(at) => read == *at,
        CopyState::Of(size) => sizes[read as usize] == *size,
    });
    builder.edge(variable(&to), variable_of_copy, &readers)?;
    Ok(())
}

/// The layouts at an end under the choices of its variable.
fn layouts(problem: &SearchProblem<'_>, end: &Endpoint) -> Distinct<Layout> {
    let context = &*problem.context;
    let (variable, member) = context.variables.index[end.op.index()];
    let choices = problem.choices[variable as usize].iter();
    Distinct::of(choices.map(|c| end.layout(&context.shapes, &c.configs[member as usize], context.mesh())))
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
