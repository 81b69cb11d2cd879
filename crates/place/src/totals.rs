//! A placement with its totals: work and memory per device, and transfers.

use crate::items::{Devices, Items};

/// Weight of work over a device's limit: it makes the step longer, while transfers may overlap.
const OVERLOAD: u64 = 4;

/// The cost of a placement: bytes that do not fit, then weighted picoseconds. Less is better.
pub type Cost = (u64, u64);

/// Communication and balance of a placement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlacementQuality {
    /// Bytes that flow between devices, both directions.
    pub cut_bytes: u64,
    /// The largest work of a device over its share of perfectly divided work; 1 is perfect.
    pub imbalance: f64,
}

/// A placement that can be changed item by item.
pub struct PlacementTotals<'a> {
    items: &'a Items,
    devices: &'a Devices,
    /// Picoseconds that no device's work should exceed.
    limit: u64,
    place: Vec<u32>,
    load: Vec<u64>,
    held: Vec<u64>,
    /// Picoseconds of all transfers.
    cut: u64,
}

impl<'a> PlacementTotals<'a> {
    /// The totals of a placement. `balance` is the relative amount by which a device's work may exceed its share.
    pub fn new(items: &'a Items, devices: &'a Devices, balance: f64, place: Vec<u32>) -> Self {
        let share = devices.balanced(items) as f64 * (1.0 + balance.max(0.0));
        // An item cannot be divided, so the limit is at least the largest one.
        let quickest = |item| (0..items.kinds()).map(|kind| items.time(item, kind)).min();
        let largest = (0..items.len()).filter_map(quickest).max().unwrap_or(0);
        let mut totals = Self {
            items,
            devices,
            limit: largest.max(share as u64),
            load: vec![0; devices.len()],
            held: vec![0; devices.len()],
            cut: 0,
            place,
        };
        for item in 0..items.len() {
            let at = totals.place[item] as usize;
            totals.load[at] += items.time(item, devices.kind(at));
            totals.held[at] = totals.held[at].saturating_add(items.memory(item));
        }
        for flow in items.flows() {
            let ends = [flow.from, flow.to].map(|item| totals.place[item as usize] as usize);
            totals.cut += devices.transfer(flow.bytes, ends[0], ends[1]);
        }
        totals
    }

    /// The device of every item.
    pub fn place(&self) -> &[u32] {
        &self.place
    }

    /// The device of every item.
    pub fn into_place(self) -> Vec<u32> {
        self.place
    }

    /// Communication and balance of the placement.
    pub fn measure(&self) -> PlacementQuality {
        let apart = |f: &&crate::Flow| self.place[f.from as usize] != self.place[f.to as usize];
        let most = self.load.iter().copied().max().unwrap_or(0);
        PlacementQuality {
            cut_bytes: self.items.flows().iter().filter(apart).map(|flow| flow.bytes).sum(),
            imbalance: most as f64 / self.devices.balanced(self.items).max(1) as f64,
        }
    }

    /// The cost of the placement.
    pub fn cost(&self) -> Cost {
        let devices = 0..self.devices.len();
        let (mut over, mut late) = (0u64, 0u64);
        for device in devices {
            over = over.saturating_add(self.held[device].saturating_sub(self.devices.memory(device)));
            late += self.load[device].saturating_sub(self.limit);
        }
        (over, self.cut.saturating_add(OVERLOAD.saturating_mul(late)))
    }

    /// Picoseconds of an item's transfers if it were on a device.
    fn transfers(&self, item: usize, device: usize) -> u64 {
        let neighbours = self.items.neighbours(item).iter();
        let time = |&(other, bytes): &(u32, u64)| {
            self.devices.transfer(bytes, device, self.place[other as usize] as usize)
        };
        neighbours.map(time).sum()
    }

    /// Decrease of the cost if an item moves to another device; negative if the cost rises.
    pub fn gain(&self, item: usize, to: usize) -> (i64, i64) {
        let from = self.place[item] as usize;
        if from == to {
            return (0, 0);
        }
        let (memory, devices) = (self.items.memory(item), self.devices);
        let over = |device: usize, held: u64| held.saturating_sub(devices.memory(device)) as i64;
        let (held, more) = (self.held[from], self.held[to].saturating_add(memory));
        let memory_gain =
            over(from, held) - over(from, held - memory) + over(to, self.held[to]) - over(to, more);
        let late = |load: u64| load.saturating_sub(self.limit) as i64;
        let (leaves, comes) =
            (self.items.time(item, devices.kind(from)), self.items.time(item, devices.kind(to)));
        let late_gain = late(self.load[from]) - late(self.load[from] - leaves) + late(self.load[to])
            - late(self.load[to] + comes);
        let cut_gain = self.transfers(item, from) as i64 - self.transfers(item, to) as i64;
        (memory_gain, cut_gain.saturating_add((OVERLOAD as i64).saturating_mul(late_gain)))
    }

    /// Moves an item to another device.
    pub fn shift(&mut self, item: usize, to: usize) {
        let from = self.place[item] as usize;
        self.cut = self.cut - self.transfers(item, from) + self.transfers(item, to);
        let time = |device: usize| self.items.time(item, self.devices.kind(device));
        self.load[from] -= time(from);
        self.load[to] += time(to);
        self.held[from] -= self.items.memory(item);
        self.held[to] = self.held[to].saturating_add(self.items.memory(item));
        self.place[item] = to as u32;
    }

    /// The device with the least work.
    pub fn idlest(&self) -> usize {
        (0..self.devices.len()).min_by_key(|&device| self.load[device]).unwrap_or(0)
    }
}
