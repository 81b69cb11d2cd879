//! Layers that can share a stage without loss, and orders between branches that are equal: both shrink the lattice of suffixes.
//!
//! A free layer takes no time and no memory, and moves no bytes on all but one of its edges. It can follow the layer on that edge
//! into its stage. Exchangeable branches are equal in all numbers; exchanging them changes nothing, so the first layers of such
//! branches may be put in one order.

use crate::lattice::Order;
use crate::problem::{Edge, LayerOption, LayerProblem};
use std::collections::BTreeSet;

/// Layers in groups. The layers of a group share a stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Groups {
    of: Vec<u32>,
    layers: Vec<Vec<u32>>,
}

impl Groups {
    /// Every layer alone.
    pub fn single(layers: usize) -> Groups {
        Groups {
            of: (0..layers as u32).collect(),
            layers: (0..layers as u32).map(|layer| vec![layer]).collect(),
        }
    }

    /// The number of groups.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Whether there are no groups.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// The group of a layer.
    pub fn of(&self, layer: u32) -> u32 {
        self.of[layer as usize]
    }

    /// The layers of a group, in ascending order.
    pub fn layers(&self, group: usize) -> &[u32] {
        &self.layers[group]
    }
}

/// Larger problems are not reduced: the search for reductions is quadratic.
const MOST_LAYERS: usize = 3000;
const MOST_EDGES: usize = 20_000;
/// No more free layers are grouped.
const MOST_FREE_LAYERS: usize = 500;

/// Groups free layers with a neighbour, and orders exchangeable branches. The order is one of groups.
pub fn reduce(problem: &LayerProblem) -> (Groups, Order) {
    let layers = problem.layers.len();
    let precedences = || problem.edges.iter().map(|edge| (edge.from, edge.to));
    if layers > MOST_LAYERS || problem.edges.len() > MOST_EDGES {
        return (Groups::single(layers), problem.order());
    }
    // `leader[v]` is the layer whose stage v follows.
    let mut leader: Vec<u32> = (0..layers as u32).collect();
    let degrees: BTreeSet<u32> =
        problem.layers.iter().flat_map(|layer| layer.options.keys().copied()).collect();
    let weightless = (0..layers as u32).filter(|&layer| is_weightless(problem, &degrees, layer));
    let mut free: Vec<u32> = weightless.take(MOST_FREE_LAYERS).collect();
    let mut changed = true;
    while changed {
        changed = false;
        free.retain(|&layer| {
            let quotient =
                Order::new(layers, precedences().map(|(a, b)| (leader[a as usize], leader[b as usize])));
            let target = follow(problem, &leader, &quotient, layer);
            if let Some(target) = target {
                leader[layer as usize] = target;
                changed = true;
            }
            target.is_none()
        });
    }
    let mut groups = Groups { of: vec![0; layers], layers: Vec::new() };
    let mut number = vec![u32::MAX; layers];
    for layer in 0..layers as u32 {
        let slot = &mut number[leader[layer as usize] as usize];
        if *slot == u32::MAX {
            *slot = groups.layers.len() as u32;
            groups.layers.push(Vec::new());
        }
        groups.of[layer as usize] = *slot;
        groups.layers[*slot as usize].push(layer);
    }
    let between: Vec<(u32, u32)> = precedences().map(|(a, b)| (groups.of(a), groups.of(b))).collect();
    // A branch with a layer that follows another layer is no longer equal to its siblings.
    let is_alone = |layer: &u32| groups.layers(groups.of(*layer) as usize).len() == 1;
    let exchanges = exchangeable(problem).into_iter().filter(|(a, b)| a.iter().chain(b).all(is_alone));
    let exchanges = exchanges.map(|(a, b)| (groups.of(a[0]), groups.of(b[0])));
    let order = Order::new(groups.len(), between.into_iter().chain(exchanges));
    (groups, order)
}

/// Whether every degree has an option without time, memory and parameters that moves no further bytes.
fn is_weightless(problem: &LayerProblem, degrees: &BTreeSet<u32>, layer: u32) -> bool {
    let is_nothing = |option: &LayerOption| {
        option.seconds == 0.0
            && option.parameter_bytes == 0.0
            && option.bytes_per_micro_batch == 0.0
            && option.fixed_bytes == 0.0
            && option.receive_bytes.values().chain(option.send_bytes.values()).all(|&bytes| bytes == 0.0)
    };
    let options = &problem.layers[layer as usize].options;
    degrees.iter().all(|degree| options.get(degree).is_some_and(|list| list.iter().any(is_nothing)))
}

/// The group that a weightless layer can follow: a successor before all its other successors, if only the edge to it costs, or
/// a predecessor behind all its other predecessors.
fn follow(problem: &LayerProblem, leader: &[u32], order: &Order, layer: u32) -> Option<u32> {
    // Only single layers move: the edges of a group would have to be judged together.
    if leader.iter().filter(|&&other| other == layer).count() != 1 {
        return None;
    }
    let is_free = |edge: &Edge| {
        let (from, to) = (edge.from, edge.to);
        edge.bytes == 0.0
            && all_options(problem, from, &|option| option.send_bytes.get(&to).copied().unwrap_or(0.0) == 0.0)
            && all_options(problem, to, &|option| {
                option.receive_bytes.get(&from).copied().unwrap_or(0.0) == 0.0
            })
    };
    // The groups of neighbours over edges that cost.
    let (mut paid_before, mut paid_after) = (BTreeSet::new(), BTreeSet::new());
    for edge in &problem.edges {
        if edge.to == layer && !is_free(edge) {
            paid_before.insert(leader[edge.from as usize]);
        } else if edge.from == layer && !is_free(edge) {
            paid_after.insert(leader[edge.to as usize]);
        }
    }
    let (before, after) = (order.predecessors(layer), order.successors(layer));
    let later = after.iter().copied().find(|&target| {
        paid_before.is_empty()
            && paid_after.iter().all(|&paid| paid == target)
            && after.iter().all(|&other| other == target || reaches(order, target, other))
    });
    later.or_else(|| {
        before.iter().copied().find(|&target| {
            paid_after.is_empty()
                && paid_before.iter().all(|&paid| paid == target)
                && before.iter().all(|&other| other == target || reaches(order, other, target))
        })
    })
}

fn all_options(problem: &LayerProblem, layer: u32, test: &dyn Fn(&LayerOption) -> bool) -> bool {
    problem.layers[layer as usize].options.values().flatten().all(test)
}

fn reaches(order: &Order, from: u32, to: u32) -> bool {
    let mut seen = BTreeSet::from([from]);
    let mut stack = vec![from];
    while let Some(group) = stack.pop() {
        for &next in order.successors(group) {
            if next == to {
                return true;
            }
            if seen.insert(next) {
                stack.push(next);
            }
        }
    }
    false
}

/// Pairs of exchangeable branches. A branch is a chain of layers between the same two borders.
fn exchangeable(problem: &LayerProblem) -> Vec<(Vec<u32>, Vec<u32>)> {
    let order = problem.order();
    let mut pairs = Vec::new();
    let mut used = BTreeSet::new();
    for first in 0..problem.layers.len() as u32 {
        if used.contains(&first) {
            continue;
        }
        let mut last: Option<Vec<u32>> = None;
        let siblings = order.predecessors(first).first().map_or_else(
            || {
                (0..problem.layers.len() as u32)
                    .filter(|&other| order.predecessors(other).is_empty())
                    .collect()
            },
            |&before| order.successors(before).to_vec(),
        );
        for other in siblings.into_iter().filter(|&other| other > first) {
            if used.contains(&other) {
                continue;
            }
            if let Some((mine, theirs)) = equal_branches(problem, &order, first, other) {
                used.extend([first, other]);
                pairs.push((last.unwrap_or(mine), theirs.clone()));
                last = Some(theirs);
            }
        }
    }
    pairs
}

/// The layers of two chains from these first layers to a common end, if the chains are equal in all numbers.
fn equal_branches(problem: &LayerProblem, order: &Order, a: u32, b: u32) -> Option<(Vec<u32>, Vec<u32>)> {
    let (mut mine, mut theirs) = (vec![a], vec![b]);
    let (mut a, mut b) = (a, b);
    let mut above: Option<(u32, u32)> = None;
    loop {
        // Layers of a chain have one predecessor; the first ones share all theirs.
        let is_chain = match above {
            None => order.predecessors(a) == order.predecessors(b),
            Some((a_above, b_above)) => {
                order.predecessors(a) == [a_above] && order.predecessors(b) == [b_above]
            }
        };
        let next = match (order.successors(a), order.successors(b)) {
            (a_next, b_next) if a_next == b_next => None,
            (&[a_next], &[b_next]) => Some((a_next, b_next)),
            _ => return None,
        };
        let rename = |layer: u32| match (above, next) {
            (Some((a_above, b_above)), _) if layer == a_above => b_above,
            (_, Some((a_next, b_next))) if layer == a_next => b_next,
            _ => layer,
        };
        if !is_chain || a == b || !equal_layers(problem, a, b, &rename) {
            return None;
        }
        let Some((a_next, b_next)) = next else { return Some((mine, theirs)) };
        above = Some((a, b));
        (a, b) = (a_next, b_next);
        mine.push(a);
        theirs.push(b);
    }
}

/// Whether two layers are equal in options, edges and their neighbours' bytes for them, under a renaming of neighbours.
fn equal_layers(problem: &LayerProblem, a: u32, b: u32, rename: &dyn Fn(u32) -> u32) -> bool {
    let renamed = |bytes: &std::collections::BTreeMap<u32, f64>| -> Vec<(u32, f64)> {
        let mut list: Vec<_> = bytes.iter().map(|(&layer, &bytes)| (rename(layer), bytes)).collect();
        list.sort_by_key(|&(layer, _)| layer);
        list
    };
    let plain = |bytes: &std::collections::BTreeMap<u32, f64>| -> Vec<(u32, f64)> {
        bytes.iter().map(|(&layer, &bytes)| (layer, bytes)).collect()
    };
    let (mine, theirs) = (&problem.layers[a as usize].options, &problem.layers[b as usize].options);
    let equal_options = mine.len() == theirs.len()
        && mine.iter().zip(theirs).all(|((degree, mine), (other, theirs))| {
            degree == other
                && mine.len() == theirs.len()
                && mine.iter().zip(theirs).all(|(mine, theirs)| {
                    mine.seconds == theirs.seconds
                        && mine.parameter_bytes == theirs.parameter_bytes
                        && mine.bytes_per_micro_batch == theirs.bytes_per_micro_batch
                        && mine.fixed_bytes == theirs.fixed_bytes
                        && renamed(&mine.receive_bytes) == plain(&theirs.receive_bytes)
                        && renamed(&mine.send_bytes) == plain(&theirs.send_bytes)
                })
        });
    // What the neighbours outside of the branch say about the two layers.
    let side = |layer: u32, rename: &dyn Fn(u32) -> u32| {
        let mut list: Vec<(bool, u32, f64, Vec<f64>)> = Vec::new();
        for edge in problem.edges.iter().filter(|edge| edge.from == layer || edge.to == layer) {
            let out = edge.from == layer;
            let other = if out { edge.to } else { edge.from };
            let options = problem.layers[other as usize].options.values().flatten();
            let said = options
                .map(
                    |option| {
                        if out { option.receive_bytes.get(&layer) } else { option.send_bytes.get(&layer) }
                    },
                )
                .map(|bytes| bytes.copied().unwrap_or(0.0))
                .collect();
            list.push((out, rename(other), edge.bytes, said));
        }
        list.sort_by_key(|&(out, other, ..)| (out, other));
        list
    };
    equal_options && side(a, rename) == side(b, &|layer| layer)
}
