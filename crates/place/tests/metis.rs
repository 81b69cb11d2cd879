//! Our partitions compared with those of METIS, on graphs like training steps: cut bytes and balance.

use shardwright_place::{Axis, Devices, Flow, Items, Link, candidates, measure};

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// Layers in branches that split and meet again, some with shortcuts: work and flows.
fn layered(random: &mut Random, blocks: usize) -> (Vec<u64>, Vec<Flow>) {
    let (mut work, mut flows) = (vec![1 + random.below(50)], Vec::new());
    let mut last = 0;
    for _ in 0..blocks {
        let mut ends = Vec::new();
        for _ in 0..1 + random.below(4) {
            let mut at = last;
            for _ in 0..1 + random.below(3) {
                let next = work.len() as u32;
                work.push(1 + random.below(50));
                flows.push(Flow { from: at, to: next, bytes: 1 + random.below(100) });
                at = next;
            }
            ends.push(at);
        }
        let join = work.len() as u32;
        work.push(1 + random.below(20));
        flows.extend(ends.iter().map(|&from| Flow { from, to: join, bytes: 1 + random.below(100) }));
        last = join;
    }
    (work, flows)
}

/// METIS's recursive bisection.
fn metis(work: &[u64], flows: &[Flow], parts: usize) -> Vec<u32> {
    let mut near: Vec<Vec<(i32, i32)>> = vec![Vec::new(); work.len()];
    for flow in flows {
        near[flow.from as usize].push((flow.to as i32, flow.bytes as i32));
        near[flow.to as usize].push((flow.from as i32, flow.bytes as i32));
    }
    let (mut starts, mut others, mut weights) = (vec![0], Vec::new(), Vec::new());
    for list in &near {
        others.extend(list.iter().map(|(other, _)| *other));
        weights.extend(list.iter().map(|(_, bytes)| *bytes));
        starts.push(others.len() as i32);
    }
    let work: Vec<i32> = work.iter().map(|&w| w as i32).collect();
    let mut part = vec![0; work.len()];
    let graph = metis::Graph::new(1, parts as i32, &starts, &others).unwrap();
    graph.set_vwgt(&work).set_adjwgt(&weights).part_recursive(&mut part).unwrap();
    part.into_iter().map(|p| p as u32).collect()
}

#[test]
fn as_little_is_cut_as_metis_cuts() {
    let mut random = Random(7);
    let (mut ours, mut theirs) = (0.0, 0.0);
    for case in 0..40 {
        let (work, flows) = layered(&mut random, 5 + case % 20);
        let parts = [2, 4, 8][case % 3];
        let items: Vec<(Vec<u64>, u64)> = work.iter().map(|&w| (vec![w * 1000], 1)).collect();
        let items = Items::new(&items, flows.iter().copied());
        let link = Link { latency: 0, per_byte: 1.0 };
        let devices = Devices::new(&[Axis { size: parts as u32, link }], |_| (0, u64::MAX));
        let all = candidates(&items, &devices, 0.1);
        let best = all.iter().filter(|candidate| !candidate.baseline && candidate.name != "heft");
        let measured = best.map(|candidate| measure(&items, &devices, &candidate.place));
        // METIS has another tolerance; a graph of few items cannot always be cut evenly.
        let peer = measure(&items, &devices, &metis(&work, &flows, parts));
        let even = measured.filter(|m| m.imbalance <= peer.imbalance.max(1.15));
        let cut = even.map(|m| m.cut_bytes).min().unwrap_or(u64::MAX);
        println!(
            "{} items on {parts}: {cut} cut, METIS {} ({:.2})",
            work.len(),
            peer.cut_bytes,
            peer.imbalance
        );
        if cut < u64::MAX {
            ours += cut as f64;
            theirs += peer.cut_bytes as f64;
        }
    }
    println!("{ours} cut in all, METIS {theirs}");
    assert!(theirs > 0.0 && ours <= 1.1 * theirs, "{ours} {theirs}");
}
