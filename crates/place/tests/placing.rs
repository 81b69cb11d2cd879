//! Placements of random items on random devices: valid, no worse than their start, and near the optimum where it is known.

use proptest::prelude::*;
use shardwright_place::{Axis, Devices, Flow, Items, Link, PlacementTotals, candidates, measure, refine};

/// Items in topological order, each reading from a few of those before it.
fn any_items(most: usize) -> impl Strategy<Value = Items> {
    let item = (1u64..1000, 1u64..1000, 1u64..100, prop::collection::vec((1u32..8, 1u64..1000), 0..3));
    prop::collection::vec(item, 1..most).prop_map(|all| {
        let items: Vec<_> =
            all.iter().map(|&(fast, more, memory, _)| (vec![fast, fast + more], memory)).collect();
        let flows = (0u32..).zip(&all).flat_map(|(to, (.., back))| {
            back.iter()
                .filter_map(move |&(back, bytes)| Some(Flow { from: to.checked_sub(back)?, to, bytes }))
        });
        Items::new(&items, flows.collect::<Vec<_>>())
    })
}

fn any_devices() -> impl Strategy<Value = Devices> {
    let axis = (2u32..4, 0u64..50, 1u32..20);
    (prop::collection::vec(axis, 1..4), any::<u8>(), 100u64..5000).prop_map(|(axes, mixed, memory)| {
        let link = |latency, rate| Link { latency, per_byte: f64::from(rate) / 10.0 };
        let axes: Vec<Axis> =
            axes.iter().map(|&(size, latency, rate)| Axis { size, link: link(latency, rate) }).collect();
        Devices::new(&axes, |device| (u32::from(mixed >> (device % 8) & 1), memory))
    })
}

proptest! {
    #[test]
    fn every_item_gets_a_device_that_exists(items in any_items(60), devices in any_devices(), balance in 0.0f64..1.0) {
        let all = candidates(&items, &devices, balance);
        prop_assert!(all.len() >= 9);
        for candidate in all {
            prop_assert_eq!(candidate.place.len(), items.len(), "{}", candidate.name);
            prop_assert!(candidate.place.iter().all(|&d| (d as usize) < devices.len()), "{}", candidate.name);
        }
    }

    #[test]
    fn clusters_hang_together_and_lie_within_each_other(items in any_items(40)) {
        let clusters = items.clusters();
        for (at, one) in clusters.iter().enumerate() {
            prop_assert!((2..=items.len() / 2).contains(&one.len()));
            // The weakest flow that connects it; every flow out of it is weaker.
            let inside = |item: &u32| one.contains(item);
            let out = items.flows().iter().filter(|f| inside(&f.from) != inside(&f.to)).map(|f| f.bytes).max();
            let mut reached = vec![one[0]];
            let mut next = 0;
            while next < reached.len() {
                for &(other, bytes) in items.neighbours(reached[next] as usize) {
                    if bytes > out.unwrap_or(0) && inside(&other) && !reached.contains(&other) {
                        reached.push(other);
                    }
                }
                next += 1;
            }
            prop_assert_eq!(reached.len(), one.len());
            for other in &clusters[..at] {
                let common = other.iter().filter(|item| one.contains(item)).count();
                prop_assert!(common == 0 || (common == other.len() && common < one.len()));
            }
        }
    }

    #[test]
    fn refinement_never_makes_it_worse_and_sums_stay_true(
        items in any_items(40), devices in any_devices(), seed in any::<u64>(), balance in 0.0f64..0.5
    ) {
        let start: Vec<u32> =
            (0..items.len() as u64).map(|i| (seed.rotate_left(i as u32 * 7) % devices.len() as u64) as u32).collect();
        let before = PlacementTotals::new(&items, &devices, balance, start.clone()).cost();
        let refined = refine(&items, &devices, balance, start.clone());
        let after = PlacementTotals::new(&items, &devices, balance, refined.clone()).cost();
        prop_assert!(after <= before, "{after:?} {before:?}");
        // Moving item by item gives the totals of the final placement, and each gain is the decrease of the cost.
        let mut moving = PlacementTotals::new(&items, &devices, balance, start);
        for (item, &to) in refined.iter().enumerate() {
            let (old, gain) = (moving.cost(), moving.gain(item, to as usize));
            moving.shift(item, to as usize);
            let new = moving.cost();
            prop_assert_eq!(gain, (old.0 as i64 - new.0 as i64, old.1 as i64 - new.1 as i64));
        }
        prop_assert_eq!(moving.cost(), after);
    }
}

/// The least cost of any placement.
fn exhaustive(items: &Items, devices: &Devices, balance: f64) -> (u64, u64) {
    let (count, parts) = (items.len() as u32, devices.len());
    let place = |code: usize| (0..count).map(|i| (code / parts.pow(i) % parts) as u32).collect();
    (0..parts.pow(count))
        .map(|code| PlacementTotals::new(items, devices, balance, place(code)).cost())
        .min()
        .unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn small_graphs_are_placed_nearly_as_well_as_can_be(items in any_items(9)) {
        let link = Link { latency: 5, per_byte: 0.5 };
        let devices = Devices::new(&[Axis { size: 2, link }], |_| (0, u64::MAX));
        let best = exhaustive(&items, &devices, 0.3);
        let ours = candidates(&items, &devices, 0.3);
        let found = ours.iter().map(|c| PlacementTotals::new(&items, &devices, 0.3, c.place.clone()).cost()).min().unwrap();
        prop_assert!(found >= best);
        prop_assert!(found.1 <= best.1 + best.1 / 2 + 500, "{found:?} {best:?}");
    }
}

#[test]
fn two_towers_go_to_two_devices_and_the_slow_link_is_crossed_least() {
    // Four towers of ten; the first two exchange much, the last two as well.
    let items: Vec<_> = (0..40).map(|_| (vec![1000u64], 1u64)).collect();
    let tower = |t: u32, i: u32| i * 4 + t;
    let along = (0..4).flat_map(|t| (1..10).map(move |i| (tower(t, i - 1), tower(t, i), 1000)));
    let across = (0..10).flat_map(|i| [(tower(0, i), tower(1, i), 50), (tower(2, i), tower(3, i), 50)]);
    let once = [(tower(1, 9), tower(2, 9), 1)];
    let flows = along.chain(across).chain(once).map(|(from, to, bytes)| Flow { from, to, bytes });
    let items = Items::new(&items, flows);
    let slow = Link { latency: 10, per_byte: 10.0 };
    let fast = Link { latency: 1, per_byte: 0.1 };
    let devices =
        Devices::new(&[Axis { size: 2, link: slow }, Axis { size: 2, link: fast }], |_| (0, u64::MAX));
    let all = candidates(&items, &devices, 0.1);
    let bisection = all.iter().find(|c| c.name == "bisection").unwrap();
    let measured = measure(&items, &devices, &bisection.place);
    assert_eq!((measured.cut_bytes, measured.imbalance), (1001, 1.0));
    let half = |t: u32| bisection.place[tower(t, 0) as usize] / 2;
    assert!(half(0) == half(1) && half(2) == half(3) && half(0) != half(2));
}

#[test]
fn memory_decides_before_time() {
    let items: Vec<_> = (0..8).map(|_| (vec![100u64], 10u64)).collect();
    let flows = (1..8).map(|to| Flow { from: to - 1, to, bytes: 1000 });
    let items = Items::new(&items, flows);
    let link = Link { latency: 1, per_byte: 100.0 };
    // On two of the devices it would not fit.
    for axes in [&[Axis { size: 4, link }][..], &[Axis { size: 2, link }; 2]] {
        let devices = Devices::new(axes, |_| (0, 20));
        for candidate in candidates(&items, &devices, 10.0).iter().filter(|c| !c.baseline) {
            let over = PlacementTotals::new(&items, &devices, 10.0, candidate.place.clone()).cost().0;
            assert_eq!(over, 0, "{}: {:?}", candidate.name, candidate.place);
        }
    }
}
