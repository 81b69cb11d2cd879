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
//! [`limited`](crate::limited) adds the network's memory to the search problem.

use crate::context::Context;
use shardwright_cost::{Engine, Layout, Lifetimes, Placement};
use shardwright_graph::{Gemm, OpId, Phase, RooflineKind, TensorId};
use shardwright_lower::{ParallelGraph, lower};
use shardwright_machine::{Bytes, Mesh};
use shardwright_space::{Assignment, AxisUse, Config, Endpoint, Transfer};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Bytes of a tensor that one device holds.
pub fn local_bytes(context: &Context<'_>, tensor: TensorId, layout: &Layout) -> u64 {
    let sharded = layout.axes_where(|p| matches!(p, Placement::Shard(_)));
    let bytes =
        context.graph.tensor(tensor).ty.bytes() / u64::from(context.mesh().group_size(sharded)).max(1);
    bytes.saturating_mul(slices(context, tensor))
}

/// Of data that micro-batches slice, all slices are held.
pub(crate) fn slices(context: &Context<'_>, tensor: TensorId) -> u64 {
    let sliced = context.graph.sliced_dim(tensor).is_some();
    if sliced { u64::from(context.graph.micro_batches.get()) } else { 1 }
}

/// The most bytes that one device holds at once under an assignment. An assignment that cannot be lowered fits nowhere.
pub fn peak(context: &Context<'_>, assignment: &Assignment) -> Bytes {
    peak_of(context, assignment, lower(context.graph, &context.resharder, assignment).ok().as_ref())
}

/// The same for an assignment whose program is known.
pub(crate) fn peak_of(
    context: &Context<'_>,
    assignment: &Assignment,
    program: Option<&ParallelGraph>,
) -> Bytes {
    let stored = |tensor| !context.stays_inside(tensor);
    let held = program.map_or(u64::MAX, |program| program.peak_memory_of(&stored));
    let program = held.max(network_peak(context, assignment).0);
    match context.engine() {
        None => Bytes(program),
        Some(engine) => Bytes(engine_peak(context, assignment, engine, program)),
    }
}

/// The peak with what the engine does to it: workspaces of its libraries, and the most that it copies of one op's results. The
/// copy is taken to happen at the peak, as for the logits of language models.
fn engine_peak(context: &Context<'_>, assignment: &Assignment, engine: &Engine, program: u64) -> u64 {
    let mut more = 0;
    for op in context.graph.op_ids() {
        let shapes = &context.shapes[op.index()];
        let class = context.graph.node(op).op.workload(&shapes.inputs, &shapes.outputs).class.name;
        let copies = engine.copies_of(class);
        let last = || shapes.outputs[0].shape.last().copied().unwrap_or(1);
        if copies > 0 && !(engine.pads_products && last().is_multiple_of(Gemm::ALIGNED)) {
            let bytes = result_bytes(context, assignment, stored_result(context, op));
            more = more.max(bytes.saturating_mul(copies));
        }
    }
    let saved = if engine.saves.is_empty() { 0 } else { saved(context, assignment, engine) };
    program.saturating_add(engine.workspace_mib << 20).saturating_add(more).saturating_add(saved)
}

/// The op whose result reaches memory, of those that one kernel computes from an op on: a gradient in f32 that is rounded at once is
/// held in 16 bits.
fn stored_result(context: &Context<'_>, op: OpId) -> OpId {
    let (mut op, graph) = (op, context.graph);
    while context.stays_inside(graph.node(op).outputs[0]) {
        let made = graph.node(op).outputs[0];
        let mut later = graph.op_ids().skip(op.index() + 1);
        match later.find(|&reader| graph.node(reader).inputs.contains(&made)) {
            Some(reader) => op = reader,
            None => break,
        }
    }
    op
}

/// Bytes of an op's first result that one device holds.
fn result_bytes(context: &Context<'_>, assignment: &Assignment, op: OpId) -> u64 {
    let end = Endpoint::result(context.graph, op, 0);
    let layout = end.layout(&context.shapes, assignment.config(op), context.mesh());
    local_bytes(context, context.graph.node(op).outputs[0], &layout)
}

/// Bytes that an engine's backward pass keeps beyond what it needs: an intermediate of functions between products whose derivative
/// needs the operand, and the operand of functions that follow a convolution.
fn saved(context: &Context<'_>, assignment: &Assignment, engine: &Engine) -> u64 {
    let graph = context.graph;
    let workload = |op: OpId| {
        let shapes = &context.shapes[op.index()];
        graph.node(op).op.workload(&shapes.inputs, &shapes.outputs)
    };
    let is_product = |op: OpId| matches!(workload(op).roofline, RooflineKind::Product(_));
    let is_convolution = |op: OpId| matches!(workload(op).roofline, RooflineKind::Convolution { .. });
    // The op that made a tensor, or what was added to before it.
    let made = |t: TensorId| {
        let op = graph.tensor(t).producer?;
        let before = graph.node(op).inputs.first().filter(|_| workload(op).class.name == "binary");
        Some(before.and_then(|t| graph.tensor(*t).producer).unwrap_or(op))
    };
    // Tensors that derivatives of element-wise functions read, and tensors that products of the forward pass read.
    let (mut by_derivative, mut by_product) =
        (vec![false; graph.tensors.len()], vec![false; graph.tensors.len()]);
    for op in graph.op_ids() {
        let inputs = &graph.node(op).inputs;
        if workload(op).class.name == "unary_grad" {
            inputs.first().into_iter().for_each(|t| by_derivative[t.index()] = true);
        } else if graph.node(op).phase == Phase::Forward && is_product(op) {
            inputs.iter().for_each(|t| by_product[t.index()] = true);
        }
    }
    let mut bytes = 0u64;
    for op in graph.op_ids().filter(|&op| graph.node(op).phase == Phase::Forward) {
        let node = graph.node(op);
        let (&[x], &[y]) = (&node.inputs[..], &node.outputs[..]) else { continue };
        if workload(op).class.name != "unary" {
            continue;
        }
        let between_products = by_derivative[x.index()] && by_product[y.index()];
        let after_convolution = by_derivative[y.index()] && made(x).is_some_and(is_convolution);
        let counts = |rule: &str, holds: bool| holds && engine.saves.contains(rule);
        if counts("products", between_products) || counts("convolutions", after_convolution) {
            bytes = bytes.saturating_add(result_bytes(context, assignment, op));
        }
    }
    bytes
}

/// Memory that the network counts.
#[derive(Clone, Copy)]
pub(crate) enum NetworkCharge {
    /// A tensor in the layout of one endpoint; replicated where no op touches it.
    Stored { tensor: TensorId, at: Option<Endpoint> },
    /// A tensor in the smaller of two endpoints' layouts.
    Smaller { tensor: TensorId, ends: [Endpoint; 2] },
    /// A copy where a transfer's endpoints have different layouts.
    Copy(Transfer),
}

/// All memory that the network counts, and the ops during which it is held.
pub(crate) fn network_charges<'c>(context: &'c Context<'_>) -> &'c [(NetworkCharge, Range<u32>)] {
    context.facts.charges.get_or_init(|| charges(context))
}

fn charges(context: &Context<'_>) -> Vec<(NetworkCharge, Range<u32>)> {
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
        if alive.is_empty() || context.stays_inside(tensor) {
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
    for &(charge, ref held) in network_charges(context) {
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
                made.push((held.clone(), *tensor, [layout; 2]));
            }
            NetworkCharge::Smaller { tensor, ends } => {
                made.push((held.clone(), *tensor, ends.map(|end| layout(&end))))
            }
            NetworkCharge::Copy(Transfer { tensor, from, to }) => {
                let to = layout(to);
                if layout(from) != to {
                    made.push((held.clone(), *tensor, [to; 2]));
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
