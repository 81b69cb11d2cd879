//! Fiduccia and Mattheyses' refinement, for any number of devices and any links between them.
//!
//! In a pass every item moves at most once, the move with the largest gain first, even if that is negative. The best placement of the
//! pass is kept. Passes repeat until one improves nothing. Moves with negative gain let a pass leave a local optimum.

use crate::{
    items::{Devices, Items},
    totals::{Cost, PlacementTotals},
};
use std::{cmp::Reverse, collections::BinaryHeap};

/// Most passes; two or three are common.
const MAX_PASSES: usize = 12;
/// A pass ends after this many moves without a new best.
const PATIENCE: usize = 400;

/// A queued move: its gain when it was queued, the item and the target device.
type QueuedMove = ((i64, i64), Reverse<u32>, u32);

/// Moves items between devices for less communication and overload.
pub fn refine(items: &Items, devices: &Devices, balance: f64, place: Vec<u32>) -> Vec<u32> {
    let mut totals = PlacementTotals::new(items, devices, balance, place);
    if devices.len() < 2 {
        return totals.into_place();
    }
    for _ in 0..MAX_PASSES {
        if !pass(&mut totals, items.len(), devices.len(), items) {
            break;
        }
    }
    totals.into_place()
}

/// The best move of an item.
fn best_move(totals: &PlacementTotals<'_>, item: usize, devices: usize) -> QueuedMove {
    let own = totals.place()[item] as usize;
    let others = (0..devices).filter(|&device| device != own);
    let moves = others.map(|device| (totals.gain(item, device), Reverse(device as u32)));
    // Ties go to the first device.
    let (gain, Reverse(device)) = moves.max().unwrap_or(((i64::MIN, i64::MIN), Reverse(own as u32)));
    (gain, Reverse(item as u32), device)
}

/// Runs one pass; returns whether it improved the placement.
fn pass(totals: &mut PlacementTotals<'_>, count: usize, devices: usize, items: &Items) -> bool {
    let mut queue: BinaryHeap<QueuedMove> = (0..count).map(|item| best_move(totals, item, devices)).collect();
    let mut moved = vec![false; count];
    let mut trail: Vec<(usize, usize)> = Vec::new();
    let first: Cost = totals.cost();
    let (mut best, mut kept) = (first, 0);
    while let Some((gain, Reverse(item), device)) = queue.pop() {
        let item = item as usize;
        if moved[item] {
            continue;
        }
        // Other moves may have changed this one's gain.
        let now = best_move(totals, item, devices);
        if (now.0, now.2) != (gain, device) && now.0 < gain {
            queue.push(now);
            continue;
        }
        moved[item] = true;
        trail.push((item, totals.place()[item] as usize));
        totals.shift(item, now.2 as usize);
        if totals.cost() < best {
            (best, kept) = (totals.cost(), trail.len());
        } else if trail.len() - kept > PATIENCE {
            break;
        }
        for &(other, _) in items.neighbours(item) {
            if !moved[other as usize] {
                queue.push(best_move(totals, other as usize, devices));
            }
        }
    }
    for &(item, from) in trail[kept..].iter().rev() {
        totals.shift(item, from);
    }
    best < first
}
