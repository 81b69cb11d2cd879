//! Multilevel recursive bisection along the machine's levels: the slowest links first, so that the fewest bytes cross them.
//!
//! Items are merged repeatedly (chains first, then the neighbours that exchange most bytes). The few merged items are cut along
//! their order, and the cut is refined while the merging is undone. Each side is then cut along the next axis.

use crate::{
    items::{Axis, Devices, Items},
    orders::linear,
    refine::refine,
};

/// At most this many items are cut without further merging.
const FEW: usize = 48;
/// A merged item has at most 1/`LARGEST` of a device's share of the work.
const LARGEST: u64 = 3;

/// Places items by cutting them along each axis in turn.
pub fn bisection(items: &Items, devices: &Devices, balance: f64) -> Vec<u32> {
    let mut place = vec![0u32; items.len()];
    let all: Vec<u32> = (0..items.len() as u32).collect();
    cut(items, devices, balance, &all, 0, 0..devices.len() as u32, &mut place);
    place
}

/// Places some items on a range of devices, which differ on the axes from `axis` on.
fn cut(
    items: &Items,
    devices: &Devices,
    balance: f64,
    some: &[u32],
    axis: usize,
    range: std::ops::Range<u32>,
    place: &mut [u32],
) {
    let Some(&Axis { size, link }) = devices.axes().get(axis) else {
        some.iter().for_each(|&item| place[item as usize] = range.start);
        return;
    };
    if some.is_empty() {
        return;
    }
    let width = (range.end - range.start) / size;
    let side = |side: u32| range.start + side * width..range.start + (side + 1) * width;
    // Each side of the axis as one device with the combined speed and memory of its devices.
    let sides = Devices::new(&[Axis { size, link }], |s| {
        let memory = side(s).map(|device| devices.memory(device as usize)).fold(0u64, u64::saturating_add);
        (s, memory)
    });
    let together = |item: u32, s: u32| {
        let speed =
            |device: u32| 1.0 / items.time(item as usize, devices.kind(device as usize)).max(1) as f64;
        (1.0 / side(s).map(speed).sum::<f64>().max(f64::MIN_POSITIVE)) as u64
    };
    let own: Vec<(Vec<u64>, u64)> = some
        .iter()
        .map(|&item| ((0..size).map(|s| together(item, s)).collect(), items.memory(item as usize)))
        .collect();
    let mut number = vec![u32::MAX; items.len()];
    for (at, &item) in (0u32..).zip(some) {
        number[item as usize] = at;
    }
    let inside = items.flows().iter().filter_map(|flow| {
        let (from, to) = (number[flow.from as usize], number[flow.to as usize]);
        (from != u32::MAX && to != u32::MAX).then_some(crate::Flow { from, to, ..*flow })
    });
    let part = Items::new(&own, inside);
    let split = multilevel(&part, &sides, balance);
    for s in 0..size {
        let here: Vec<u32> =
            some.iter().zip(&split).filter(|(_, at)| **at == s).map(|(&item, _)| item).collect();
        cut(items, devices, balance, &here, axis + 1, side(s), place);
    }
}

/// Cuts items between the devices of one axis: merges them, cuts the merged order, and refines while undoing the merges.
fn multilevel(items: &Items, devices: &Devices, balance: f64) -> Vec<u32> {
    let Some((group, groups)) = (items.len() > FEW).then(|| merge(items, devices)).flatten() else {
        return refine(items, devices, balance, linear(items, devices, balance));
    };
    let few = multilevel(&items.grouped(&group, groups), devices, balance);
    refine(items, devices, balance, group.iter().map(|&group| few[group as usize]).collect())
}

/// Merges items in pairs: an item with its only reader if that reads nothing else, otherwise with the item that it
/// exchanges most bytes with. None if fewer than a tenth of the items merge.
fn merge(items: &Items, devices: &Devices) -> Option<(Vec<u32>, usize)> {
    let count = items.len();
    let most = devices.balanced(items) / LARGEST;
    let room = (0..devices.len()).map(|device| devices.memory(device)).min().unwrap_or(0) / LARGEST;
    let mut partner: Vec<Option<usize>> = vec![None; count];
    let may = |a: usize, b: usize| {
        items.time(a, 0).saturating_add(items.time(b, 0)) <= most
            && items.memory(a).saturating_add(items.memory(b)) <= room
    };
    let later = |item: usize| items.neighbours(item).iter().filter(move |(other, _)| *other as usize > item);
    let earlier =
        |item: usize| items.neighbours(item).iter().filter(move |(other, _)| (*other as usize) < item);
    for item in 0..count {
        if let (Some(&(next, _)), 1) = (later(item).next(), later(item).count())
            && earlier(next as usize).count() == 1
            && partner[item].is_none()
            && partner[next as usize].is_none()
            && may(item, next as usize)
        {
            (partner[item], partner[next as usize]) = (Some(next as usize), Some(item));
        }
    }
    let mut heaviest: Vec<&crate::Flow> = items.flows().iter().collect();
    heaviest.sort_by_key(|flow| (std::cmp::Reverse(flow.bytes), flow.from, flow.to));
    for flow in heaviest {
        let (a, b) = (flow.from as usize, flow.to as usize);
        if partner[a].is_none() && partner[b].is_none() && may(a, b) {
            (partner[a], partner[b]) = (Some(b), Some(a));
        }
    }
    let mut group = vec![u32::MAX; count];
    let mut groups = 0u32;
    for item in 0..count {
        if group[item] == u32::MAX {
            group[item] = groups;
            if let Some(other) = partner[item] {
                group[other] = groups;
            }
            groups += 1;
        }
    }
    let groups = groups as usize;
    (groups * 10 <= count * 9).then_some((group, groups))
}
