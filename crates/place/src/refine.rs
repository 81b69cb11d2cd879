//! Fiduccia and Mattheyses' refinement, for any number of devices and any links between them.
//!
//! In a pass every item moves at most once, the one whose move gains most (or loses least) first; the best placement on the
//! way is kept. Passes follow each other until one brings nothing. Losing moves are what lets a pass leave a local optimum.

use crate::{
    items::{Devices, Items},
    tally::{Cost, Tally},
};
use std::{cmp::Reverse, collections::BinaryHeap};

/// Passes at most; two or three are the rule.
const MOST_PASSES: usize = 12;
/// A pass ends after so many moves without a new best.
const PATIENCE: usize = 400;

/// A move that waits: its gain when it was found, the item and the device.
type Waiting = ((i64, i64), Reverse<u32>, u32);

/// Moves items between devices for less communication and overload.
pub fn refine(items: &Items, devices: &Devices, balance: f64, place: Vec<u32>) -> Vec<u32> {
    let mut tally = Tally::new(items, devices, balance, place);
    if devices.len() < 2 {
        return tally.into_place();
    }
    for _ in 0..MOST_PASSES {
        if !pass(&mut tally, items.len(), devices.len(), items) {
            break;
        }
    }
    tally.into_place()
}

/// The best move of an item.
fn best_move(tally: &Tally<'_>, item: usize, devices: usize) -> Waiting {
    let own = tally.place()[item] as usize;
    let others = (0..devices).filter(|&device| device != own);
    let moves = others.map(|device| (tally.gain(item, device), Reverse(device as u32)));
    // Of equal gains the first device.
    let (gain, Reverse(device)) = moves.max().unwrap_or(((i64::MIN, i64::MIN), Reverse(own as u32)));
    (gain, Reverse(item as u32), device)
}

/// One pass; whether it brought anything.
fn pass(tally: &mut Tally<'_>, count: usize, devices: usize, items: &Items) -> bool {
    let mut waiting: BinaryHeap<Waiting> = (0..count).map(|item| best_move(tally, item, devices)).collect();
    let mut moved = vec![false; count];
    let mut trail: Vec<(usize, usize)> = Vec::new();
    let first: Cost = tally.cost();
    let (mut best, mut kept) = (first, 0);
    while let Some((gain, Reverse(item), device)) = waiting.pop() {
        let item = item as usize;
        if moved[item] {
            continue;
        }
        // Other moves may have changed what this one gains.
        let now = best_move(tally, item, devices);
        if (now.0, now.2) != (gain, device) && now.0 < gain {
            waiting.push(now);
            continue;
        }
        moved[item] = true;
        trail.push((item, tally.place()[item] as usize));
        tally.shift(item, now.2 as usize);
        if tally.cost() < best {
            (best, kept) = (tally.cost(), trail.len());
        } else if trail.len() - kept > PATIENCE {
            break;
        }
        for &(other, _) in items.neighbours(item) {
            if !moved[other as usize] {
                waiting.push(best_move(tally, other as usize, devices));
            }
        }
    }
    for &(item, from) in trail[kept..].iter().rev() {
        tally.shift(item, from);
    }
    best < first
}
