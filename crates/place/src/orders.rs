//! Placements along an order of the items: plain baselines, and optimal cuts of the order.

use crate::{
    items::{Devices, Items},
    totals::PlacementTotals,
};
use std::cmp::Reverse;

/// Most positions where the order may be cut. With more items, only every n-th position is considered.
const MAX_CUTS: usize = 1500;
/// Weight of work over a device's share, relative to transfers.
const OVERLOAD: f64 = 4.0;

/// Item i on device i modulo the number of devices.
pub fn round_robin(items: &Items, devices: &Devices) -> Vec<u32> {
    (0..items.len()).map(|item| (item % devices.len()) as u32).collect()
}

/// All items on the fastest device.
pub fn single(items: &Items, devices: &Devices) -> Vec<u32> {
    let total = |device: &usize| -> u64 {
        (0..items.len()).map(|item| items.time(item, devices.kind(*device))).sum()
    };
    let fastest = (0..devices.len()).min_by_key(total).unwrap_or(0);
    vec![fastest as u32; items.len()]
}

/// The order cut into pieces of equal work.
pub fn chunks(items: &Items, devices: &Devices) -> Vec<u32> {
    let share = devices.balanced(items).max(1);
    let (mut device, mut load) = (0usize, 0u64);
    let place = |item: usize| {
        let time = items.time(item, devices.kind(device));
        // The item goes to the side of the cut where more of it lies.
        if load + time / 2 > share && device + 1 < devices.len() {
            (device, load) = (device + 1, 0);
        }
        load += items.time(item, devices.kind(device));
        device as u32
    };
    (0..items.len()).map(place).collect()
}

/// The cut of an order with the least transfers and overload: of the items' order or of a depth-first order,
/// whichever is better.
pub fn linear(items: &Items, devices: &Devices, balance: f64) -> Vec<u32> {
    let topological: Vec<u32> = (0..items.len() as u32).collect();
    let cut = |order: Vec<u32>| {
        let place = along(items, devices, balance, &order);
        (PlacementTotals::new(items, devices, balance, place.clone()).cost(), place)
    };
    let (first, second) = (cut(topological), cut(depth_first(items)));
    if second.0 < first.0 { second.1 } else { first.1 }
}

/// A depth-first topological order.
fn depth_first(items: &Items) -> Vec<u32> {
    let earlier = |item: usize| items.neighbours(item).iter().filter(move |n| (n.0 as usize) < item).count();
    let mut missing: Vec<usize> = (0..items.len()).map(earlier).collect();
    let mut ready: Vec<u32> = (0..items.len() as u32).rev().filter(|&i| missing[i as usize] == 0).collect();
    let mut order = Vec::with_capacity(items.len());
    while let Some(item) = ready.pop() {
        order.push(item);
        let later = items.neighbours(item as usize).iter().filter(|(other, _)| *other > item);
        let mut later: Vec<(u32, u64)> = later.copied().collect();
        // The item that gets the most bytes comes first, so it is pushed last.
        later.sort_by_key(|&(other, bytes)| (bytes, Reverse(other)));
        for (other, _) in later {
            missing[other as usize] -= 1;
            if missing[other as usize] == 0 {
                ready.push(other);
            }
        }
    }
    order
}

/// The cut of one order with the least transfers and overload, by dynamic programming; devices in their order.
fn along(items: &Items, devices: &Devices, balance: f64, order: &[u32]) -> Vec<u32> {
    let (count, parts) = (items.len(), devices.len());
    if count == 0 || parts < 2 {
        return vec![0; count];
    }
    let mut position = vec![0usize; count];
    for (at, &item) in order.iter().enumerate() {
        position[item as usize] = at;
    }
    // Positions where the order may be cut, counted in items.
    let every = count.div_ceil(MAX_CUTS);
    let cuts: Vec<usize> = (0..count).step_by(every).chain([count]).collect();
    let share = devices.balanced(items) as f64 * (1.0 + balance.max(0.0));
    let mut work = vec![vec![0u64; count + 1]; items.kinds()];
    for (kind, work) in work.iter_mut().enumerate() {
        for (at, &item) in order.iter().enumerate() {
            work[at + 1] = work[at] + items.time(item as usize, kind);
        }
    }
    let mut held = vec![0u64; count + 1];
    for (at, &item) in order.iter().enumerate() {
        held[at + 1] = held[at].saturating_add(items.memory(item as usize));
    }
    // Bytes that flow across each position of the order.
    let mut across = vec![0i128; count + 1];
    for flow in items.flows() {
        across[position[flow.from as usize] + 1] += i128::from(flow.bytes);
        across[position[flow.to as usize] + 1] -= i128::from(flow.bytes);
    }
    for at in 1..=count {
        across[at] += across[at - 1];
    }
    let last = cuts.len() - 1;
    // best[p][i]: the least cost of the first cuts[i] items on the first p devices.
    let mut best = vec![vec![f64::INFINITY; cuts.len()]; parts + 1];
    let mut from = vec![vec![0usize; cuts.len()]; parts + 1];
    best[0][0] = 0.0;
    for part in 0..parts {
        let work = &work[devices.kind(part)];
        for end in 0..=last {
            for begin in 0..=end {
                if best[part][begin] == f64::INFINITY {
                    continue;
                }
                let (first, after) = (cuts[begin], cuts[end]);
                let over = held[after].saturating_sub(held[first]).saturating_sub(devices.memory(part));
                let late = ((work[after] - work[first]) as f64 - share).max(0.0);
                // The bytes that cross the piece's beginning come from the device before.
                let crossing =
                    if part > 0 && first > 0 && first < count { across[first].max(0) as u64 } else { 0 };
                let moved = if part > 0 && crossing > 0 {
                    devices.transfer(crossing, part - 1, part) as f64
                } else {
                    0.0
                };
                let cost = best[part][begin] + moved + OVERLOAD * late + over as f64 * 1e9;
                if cost < best[part + 1][end] {
                    best[part + 1][end] = cost;
                    from[part + 1][end] = begin;
                }
            }
        }
    }
    let mut place = vec![0u32; count];
    let mut end = last;
    for part in (1..=parts).rev() {
        let begin = from[part][end];
        for &item in &order[cuts[begin]..cuts[end]] {
            place[item as usize] = part as u32 - 1;
        }
        end = begin;
    }
    place
}
