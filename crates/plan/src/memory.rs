//! Memory in the search problem: what every choice holds, and when.
//!
//! A variable of the network has one interval, but a layer's tensors live at different times: weights all step
//! long, activations until their last reader, gradients shortly. So the tensors of a layer that live at the same
//! time form a group, and each group but the first gets a small variable of its own, whose choices are the
//! different sizes that the group can have; a table that forbids all other sizes ties it to the layer's variable.
//! The network's peak is then exactly the peak that [`crate::evaluate`] reports. What re-layouts hold while they
//! run is not counted.

use crate::{error::PlanError, evaluate::local_bytes, problem::Problem};
use shardwright_cost::{Layout, Lifetimes};
use shardwright_graph::TensorId;
use shardwright_machine::Bytes;
use shardwright_search::{FORBIDDEN, Interval, Network, NetworkBuilder, VarId};
use std::collections::BTreeMap;

/// Tensors by when they live.
type Groups = BTreeMap<(u32, u32), Vec<TensorId>>;

/// The problem's network with a limit on what a device may hold. The layers' variables come first, in order.
pub fn limited(problem: &Problem<'_>, limit: Bytes) -> Result<Network, PlanError> {
    let lifetimes = Lifetimes::of(problem.graph);
    let mut groups: Vec<Groups> = vec![Groups::new(); problem.choices.len()];
    let mut homeless: Groups = Groups::new();
    for t in problem.graph.tensor_ids() {
        let alive = lifetimes.interval(t);
        if !alive.is_empty() {
            let home = problem.transfers.homes[t.index()];
            let group = home
                .map_or(&mut homeless, |home| &mut groups[problem.layers.place[home.op.index()].0 as usize]);
            group.entry((alive.start, alive.end)).or_default().push(t);
        }
    }
    let network = &problem.network;
    let mut builder = NetworkBuilder::new();
    let mut sizes: Vec<Vec<(Interval, Vec<i64>)>> = Vec::with_capacity(groups.len());
    for (layer, groups) in groups.iter().enumerate() {
        let mut held: Vec<(Interval, Vec<i64>)> = groups
            .iter()
            .map(|(&(lo, hi), tensors)| (interval(lo, hi), group_sizes(problem, layer, tensors)))
            .collect();
        // The group with the most different sizes needs no variable of its own.
        let widest = (0..held.len()).max_by_key(|&g| (distinct(&held[g].1).len(), std::cmp::Reverse(g)));
        let (alive, own) = widest.map_or_else(Default::default, |g| held.swap_remove(g));
        builder.variable(network.unary(VarId(layer as u32)), &own, alive)?;
        sizes.push(held);
    }
    for edge in network.edges() {
        builder.edge(edge.u, edge.v, network.table(edge.table))?;
    }
    for (layer, held) in sizes.iter().enumerate() {
        for (alive, sizes) in held {
            let values = distinct(sizes);
            let group = builder.variable(&vec![0; values.len()], &values, *alive)?;
            if values.len() > 1 {
                let cells = sizes.iter().flat_map(|size| values.iter().map(move |value| (size, value)));
                let table: Vec<i64> = cells.map(|(a, b)| if a == b { 0 } else { FORBIDDEN }).collect();
                builder.edge(VarId(layer as u32), group, &table)?;
            }
        }
    }
    for (&(lo, hi), tensors) in &homeless {
        let replicated = Layout::replicated(problem.mesh().len());
        let bytes = tensors.iter().map(|&t| size(local_bytes(problem, t, &replicated))).sum();
        builder.variable(&[0], &[bytes], interval(lo, hi))?;
    }
    builder.usage_limit(size(limit.0))?;
    Ok(builder.build()?)
}

fn interval(lo: u32, hi: u32) -> Interval {
    Interval { lo: u64::from(lo), hi: u64::from(hi) }
}

fn size(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// Bytes of a group of a layer's tensors under each of its choices.
fn group_sizes(problem: &Problem<'_>, layer: usize, tensors: &[TensorId]) -> Vec<i64> {
    let mut sizes = vec![0i64; problem.choices[layer].len()];
    for &t in tensors {
        let Some(home) = problem.transfers.homes[t.index()] else { continue };
        let (_, member) = problem.layers.place[home.op.index()];
        for (total, choice) in sizes.iter_mut().zip(&problem.choices[layer]) {
            let layout = home.layout(&problem.shapes, &choice.configs[member as usize], problem.mesh());
            *total = total.saturating_add(size(local_bytes(problem, t, &layout)));
        }
    }
    sizes
}

/// The different sizes, smallest first.
fn distinct(sizes: &[i64]) -> Vec<i64> {
    let mut values = sizes.to_vec();
    values.sort_unstable();
    values.dedup();
    values
}
