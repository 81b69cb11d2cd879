//! List scheduling (HEFT: Topcuoglu, Hariri and Wu 2002): items by their longest path to the end, each on the device that
//! finishes it first.
//!
//! Items are scheduled as if the step were a forward pass with all the work of each layer: the backward pass mirrors it.

use crate::items::{Devices, Items};

/// Places items one after the other on the device that finishes them first, as far as memory allows.
pub fn earliest_finish(items: &Items, devices: &Devices) -> Vec<u32> {
    let (count, kinds) = (items.len(), items.kinds() as u64);
    let mean =
        |item: usize| (0..items.kinds()).map(|kind| items.time(item, kind)).sum::<u64>() / kinds.max(1);
    // A transfer over the slowest link, weighted by the probability that it is needed.
    let farthest = devices.len() - 1;
    let apart = (devices.len() - 1) as f64 / devices.len() as f64;
    let transfer = |bytes: u64| (devices.transfer(bytes, 0, farthest) as f64 * apart) as u64;
    // The longest path from each item to the end; flows lead from earlier items to later ones.
    let mut rank = vec![0u64; count];
    for item in (0..count).rev() {
        let later = items.neighbours(item).iter().filter(|(other, _)| *other as usize > item);
        let longest = later.map(|&(other, bytes)| transfer(bytes) + rank[other as usize]).max().unwrap_or(0);
        rank[item] = mean(item) + longest;
    }
    let mut order: Vec<usize> = (0..count).collect();
    // An item's rank is at least that of its readers, so sorting by rank keeps the topological order; ties go by number.
    order.sort_by_key(|&item| (std::cmp::Reverse(rank[item]), item));
    let mut place = vec![0u32; count];
    let mut end = vec![0u64; count];
    let mut free = vec![0u64; devices.len()];
    let mut held = vec![0u64; devices.len()];
    for item in order {
        let done = |device: usize| {
            let earlier = items.neighbours(item).iter().filter(|(other, _)| (*other as usize) < item);
            let arrival = |&(other, bytes): &(u32, u64)| {
                end[other as usize] + devices.transfer(bytes, place[other as usize] as usize, device)
            };
            let ready = earlier.map(arrival).max().unwrap_or(0);
            ready.max(free[device]) + items.time(item, devices.kind(device))
        };
        let over = |device: usize| {
            held[device].saturating_add(items.memory(item)).saturating_sub(devices.memory(device))
        };
        let best = (0..devices.len()).min_by_key(|&device| (over(device), done(device))).unwrap_or(0);
        let finish = done(best);
        (place[item], end[item], free[best]) = (best as u32, finish, finish);
        held[best] = held[best].saturating_add(items.memory(item));
    }
    place
}
