//! Collectives against values computed by hand, and the laws that they obey.

use proptest::prelude::*;
use shardwright_cost::{Algorithm, Collective, Comm, parameter_server_traffic};
use shardwright_machine::{
    AxisId, AxisSet, Bytes, CollectiveKind, CollectiveMeasurement, LevelId, Machine, MeasuredTime, Seconds,
    builtin, builtin_names, parse,
};

const GPU: &[u32] = &[2, 3];
const NODE: &[u32] = &[0, 1];

fn set(axes: &[u32]) -> AxisSet {
    axes.iter().map(|&axis| AxisId(axis)).collect()
}

/// Two nodes-of-four levels with easy numbers: 4 x 4, the node's one port 8 GB/s and 10 us, GPUs on a switch with
/// 40 GB/s and 1 us.
fn easy(ports: u32, inner: &str) -> Machine {
    let text = format!(
        "name = \"easy\"\n[[level]]\nname = \"node\"\ncount = 4\nbandwidth = \"8 GB/s\"\nlatency = \"10 us\"\n\
         ports = {ports}\ntopology = \"switch\"\n[[level]]\nname = \"gpu\"\ncount = 4\nbandwidth = \"40 GB/s\"\n\
         latency = \"1 us\"\n{inner}\n[device]\nname = \"x\"\nmemory = \"1 GiB\"\nmemory_bandwidth = \"1 GB/s\"\n\
         launch_overhead = \"0 s\"\npeak.f32 = \"1 TFLOP/s\"\n"
    );
    parse("easy.toml", text.as_bytes(), &mut |_| Err("none".into())).unwrap()
}

#[track_caller]
fn close(got: f64, expected: f64) {
    assert!((got - expected).abs() <= 1e-9 * expected.abs().max(1e-12), "{got} is not {expected}");
}

/// Checks the time of one algorithm against a value computed by hand.
#[track_caller]
fn by(machine: &Machine, kind: Collective, algorithm: Algorithm, axes: &[u32], bytes: u64, seconds: f64) {
    let comm = Comm::new(machine, machine.mesh());
    close(comm.seconds_by(kind, algorithm, set(axes), Bytes(bytes)).unwrap().0, seconds);
}

#[track_caller]
fn takes(machine: &Machine, kind: Collective, axes: &[u32], bytes: u64, seconds: f64) {
    let comm = Comm::new(machine, machine.mesh());
    close(comm.seconds(kind, set(axes), Bytes(bytes)).0, seconds);
}

const MB: u64 = 1_000_000;
const US: f64 = 1e-6;

/// A ring through nodes with two GPUs each leaves most of NVLink. Where levels are alike, both are busy.
#[test]
fn collectives_occupy_the_levels_that_bind_them() {
    let machine = shardwright_machine::builtin("16xh100").unwrap();
    let comm = Comm::new(&machine, machine.mesh());
    let all = machine.mesh().all();
    let level = |wanted: u32| -> AxisSet {
        all.iter().filter(|axis| machine.mesh().axis(*axis).level.0 == wanted).collect()
    };
    let one_inside = level(1).iter().next().unwrap();
    assert_eq!(comm.occupied_levels(level(0)), 0b01);
    assert_eq!(comm.occupied_levels(level(1)), 0b10);
    let pair: AxisSet = level(0).iter().chain([one_inside]).collect();
    assert_eq!(comm.occupied_levels(pair), 0b01);
    assert_eq!(comm.occupied_levels(AxisSet::EMPTY), 0);
    let alike = shardwright_machine::builtin("flat:4x2").unwrap();
    assert_eq!(Comm::new(&alike, alike.mesh()).occupied_levels(alike.mesh().all()), 0b11);
}

#[test]
fn all_reduce_within_a_node() {
    let m = easy(1, "topology = \"switch\"");
    // Ring of 4: six steps of 1 us, and 2 * 3/4 of 40 MB at 40 GB/s.
    by(&m, Collective::AllReduce, Algorithm::Ring, GPU, 40 * MB, 6.0 * US + 1.5e-3);
    by(&m, Collective::AllReduce, Algorithm::Hierarchical, GPU, 40 * MB, 6.0 * US + 1.5e-3);
    // Tree: two levels up and down, everything twice.
    by(&m, Collective::AllReduce, Algorithm::Tree, GPU, 40 * MB, 4.0 * US + 2e-3);
    takes(&m, Collective::AllReduce, GPU, 40 * MB, 6.0 * US + 1.5e-3);
    // Small messages go by the tree.
    takes(&m, Collective::AllReduce, GPU, 40, 4.0 * US + 2e-9);
}

#[test]
fn all_reduce_between_nodes_shares_the_nodes_port() {
    // Four GPUs of a node run four rings through one port of 8 GB/s: 2 GB/s each.
    by(
        &easy(1, "topology = \"switch\""),
        Collective::AllReduce,
        Algorithm::Ring,
        NODE,
        4 * MB,
        60.0 * US + 3e-3,
    );
    // With a port each they have 8 GB/s.
    by(
        &easy(4, "topology = \"switch\""),
        Collective::AllReduce,
        Algorithm::Ring,
        NODE,
        4 * MB,
        60.0 * US + 0.75e-3,
    );
    // Two ports: two GPUs share one.
    by(
        &easy(2, "topology = \"switch\""),
        Collective::AllReduce,
        Algorithm::Ring,
        NODE,
        4 * MB,
        60.0 * US + 1.5e-3,
    );
}

#[test]
fn all_reduce_over_everything() {
    let m = easy(1, "topology = \"switch\"");
    let all = &[0, 1, 2, 3];
    // One ring through 16 GPUs crosses each port once: 2 * 15/16 at 8 GB/s. Of the 15 steps of a pass 3 leave a node.
    let alpha = 2.0 * (3.0 * 10.0 + 12.0) * US;
    by(&m, Collective::AllReduce, Algorithm::Ring, all, 8 * MB, alpha + 2.0 * 15.0 / 16.0 * 1e-3);
    by(&m, Collective::AllReduce, Algorithm::Tree, all, 8 * MB, 2.0 * (20.0 + 2.0) * US + 2e-3);
    // A GPU each from two halves of a node: 8 members, two groups share the port. Of 7 steps 3 leave a node.
    let alpha = 2.0 * (3.0 * 10.0 + 4.0) * US;
    by(&m, Collective::AllReduce, Algorithm::Ring, &[0, 1, 2], 8 * MB, alpha + 2.0 * 2.0 * 7.0 / 8.0 * 1e-3);
}

#[test]
fn rings_nest_within_a_level_and_on_a_torus_only() {
    let kinds = [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter];
    let nests = |machine: &Machine, axes| {
        let comm = Comm::new(machine, machine.mesh());
        kinds.map(|kind| comm.seconds_by(kind, Algorithm::Hierarchical, axes, Bytes(8 * MB)).is_some())
    };
    let two_levels = easy(1, "topology = \"switch\"");
    assert_eq!(nests(&two_levels, set(GPU)), [true; 3]);
    assert_eq!(nests(&two_levels, set(NODE)), [true; 3]);
    assert_eq!(nests(&two_levels, two_levels.mesh().all()), [false; 3]);
    let torus = builtin("v5p-256").unwrap();
    assert_eq!(nests(&torus, torus.mesh().all()), [true; 3]);
}

#[test]
fn gathers_and_scatters_are_half_an_all_reduce() {
    let m = easy(1, "topology = \"switch\"");
    for kind in [Collective::AllGather, Collective::ReduceScatter] {
        takes(&m, kind, GPU, 40 * MB, 3.0 * US + 0.75e-3);
        takes(&m, kind, NODE, 4 * MB, 30.0 * US + 1.5e-3);
        takes(&m, kind, &[0, 1, 2, 3], 8 * MB, 42.0 * US + 15.0 / 16.0 * 1e-3);
    }
}

#[test]
fn all_to_all_by_hand() {
    let m = easy(1, "topology = \"switch\"");
    // Within a node: three quarters of 40 MB leave each GPU at 40 GB/s.
    takes(&m, Collective::AllToAll, GPU, 40 * MB, 3.0 * US + 0.75e-3);
    // Between nodes: 4 GPUs x 3/4 of 4 MB through 8 GB/s.
    takes(&m, Collective::AllToAll, NODE, 4 * MB, 30.0 * US + 1.5e-3);
    // All 16: 12/16 of each GPU's bytes leave the node, by four GPUs: 3 bytes per byte at 8 GB/s.
    by(&m, Collective::AllToAll, Algorithm::Direct, &[0, 1, 2, 3], 8 * MB, (120.0 + 3.0) * US + 3e-3);
    by(&m, Collective::AllToAll, Algorithm::Hierarchical, &[0, 1, 2, 3], 8 * MB, 33.0 * US + 3e-3);
}

#[test]
fn one_to_all_and_back_by_hand() {
    let m = easy(1, "topology = \"switch\"");
    for kind in [Collective::Broadcast, Collective::Reduce] {
        by(&m, kind, Algorithm::Ring, GPU, 40 * MB, 3.0 * US + 1e-3);
        takes(&m, kind, GPU, 40 * MB, 2.0 * US + 1e-3);
        takes(&m, kind, NODE, 4 * MB, 20.0 * US + 2e-3);
    }
    for kind in [Collective::Scatter, Collective::Gather] {
        takes(&m, kind, GPU, 40 * MB, 2.0 * US + 0.75e-3);
        takes(&m, kind, NODE, 4 * MB, 20.0 * US + 1.5e-3);
        // Over both: 12/16 leave the root's node through its port.
        takes(&m, kind, &[0, 1, 2, 3], 8 * MB, 22.0 * US + 0.75e-3);
    }
    // A GPU of each node sends to one of the next node: one sender per group, four groups per node.
    takes(&m, Collective::Send, NODE, 4 * MB, 10.0 * US + 2e-3);
    // One group only: the whole port.
    takes(&m, Collective::Send, &[0, 1, 2, 3], 8 * MB, 10.0 * US + 1e-3);
    // Every GPU sends all of its data.
    takes(&m, Collective::Permute, &[0, 1, 2, 3], 8 * MB, 10.0 * US + 4e-3);
    takes(&m, Collective::Permute, GPU, 40 * MB, 1.0 * US + 1e-3);
}

#[test]
fn idle_devices_leave_the_port_to_others() {
    let m = easy(1, "topology = \"switch\"");
    let comm = Comm::new(&m, m.mesh());
    // Only one GPU of each node holds the tensor, so it has the whole port.
    let (_, seconds) = comm.choose(Collective::AllGather, set(NODE), set(GPU), Bytes(8 * MB));
    close(seconds.0, 30.0 * US + 0.75e-3);
    let traffic = comm.traffic(Collective::AllGather, set(NODE), set(GPU), Bytes(8 * MB));
    assert_eq!(traffic.total(), Bytes(24 * MB));
}

#[test]
fn a_halo_goes_to_the_neighbours_only() {
    let m = easy(1, "topology = \"switch\"");
    let comm = Comm::new(&m, m.mesh());
    // In both directions out of every GPU at 40 GB/s.
    close(comm.halo_seconds(set(GPU), Bytes(20 * MB), Bytes(20 * MB)).0, 1.0 * US + 1e-3);
    // Across nodes: four groups, both directions, one port.
    close(comm.halo_seconds(set(NODE), Bytes(MB), Bytes(MB)).0, 10.0 * US + 1e-3);
    // Two parts: one neighbour each, full duplex.
    close(comm.halo_seconds(set(&[3]), Bytes(40 * MB), Bytes(20 * MB)).0, 1.0 * US + 1e-3);
    close(comm.halo_seconds(set(GPU), Bytes(0), Bytes(0)).0, 0.0);
}

#[test]
fn fully_connected_pairs_have_one_wire() {
    let m = easy(1, "topology = \"fully-connected\"");
    // All four: all three wires, as with a switch.
    takes(&m, Collective::AllGather, GPU, 40 * MB, 3.0 * US + 0.75e-3);
    // A pair: a third of the bandwidth.
    takes(&m, Collective::AllGather, &[3], 40 * MB, 1.0 * US + 0.5e-3 * 3.0);
    takes(&m, Collective::Permute, &[3], 40 * MB, 1.0 * US + 3e-3);
}

#[test]
fn in_shared_memory_a_devices_own_part_is_copied_too() {
    let m = easy(1, "topology = \"memory\"");
    // The whole result is written, for any number of sources.
    takes(&m, Collective::AllGather, GPU, 40 * MB, 3.0 * US + 1e-3);
    takes(&m, Collective::AllGather, &[3], 40 * MB, 1.0 * US + 1e-3);
    takes(&m, Collective::AllToAll, &[3], 40 * MB, 1.0 * US + 1e-3);
    // So one all-gather among four beats two among two.
    let comm = Comm::new(&m, m.mesh());
    let gather = |axes: &[u32], bytes| comm.seconds(Collective::AllGather, set(axes), Bytes(bytes)).0;
    assert!(gather(GPU, 40 * MB) < gather(&[2], 20 * MB) + gather(&[3], 40 * MB));
}

#[test]
fn a_ring_is_shared_by_the_groups_that_interleave() {
    let m = easy(1, "topology = \"ring\"");
    // Around the ring in both directions: 2 x 20 GB/s.
    takes(&m, Collective::AllGather, GPU, 40 * MB, 3.0 * US + 0.75e-3);
    // Neighbours (0 1) (2 3): one wire between them, 20 GB/s.
    takes(&m, Collective::AllGather, &[3], 40 * MB, 1.0 * US + 1e-3);
    // (0 2) (1 3): both directions, but two groups on every wire: 20 GB/s.
    takes(&m, Collective::AllGather, &[2], 40 * MB, 1.0 * US + 1e-3);
    // All-to-all on a ring of 4: average distance 1 of 4 places (0 1 2 1), half in each direction, 20 GB/s wires.
    takes(&m, Collective::AllToAll, GPU, 40 * MB, 3.0 * US + 0.5 * 40e6 / 20e9);
}

#[test]
fn torus_dimensions_add_up() {
    let m = builtin("v5e-256").unwrap();
    // 200 GB/s * 0.9 over two dimensions in two directions: 45 GB/s a wire.
    let all: Vec<u32> = (0..8).collect();
    let (row, half_row): (&[u32], &[u32]) = (&[4, 5, 6, 7], &[5, 6, 7]);
    by(&m, Collective::AllGather, Algorithm::Hierarchical, row, 90 * MB, 15.0 * US + 15.0 / 16.0 * 1e-3);
    by(&m, Collective::AllGather, Algorithm::Hierarchical, half_row, 45 * MB, 7.0 * US + 7.0 / 8.0 * 1e-3);
    by(&m, Collective::AllGather, Algorithm::Hierarchical, &all, 180 * MB, 30.0 * US + 255.0 / 256.0 * 1e-3);
    // Small messages take the shortest route: 8 + 8 wires to the farthest chip, and back.
    takes(&m, Collective::AllReduce, &all, 0, 2.0 * 16.0 * US);
    // All-to-all along a row of 16: a quarter of the row on average, half in each direction.
    by(&m, Collective::AllToAll, Algorithm::Direct, row, 45 * MB, 15.0 * US + 2.0 * 1e-3);
}

#[test]
fn pcie_switches_share_their_uplinks() {
    let tree = |p2p: bool| {
        let text = "topology = \"pcie-tree\"\nfanout = [2, 1, 2]\nuplinks = [\"10 GB/s\", \"20 GB/s\"]\n";
        easy(1, &format!("{text}peer_to_peer = {p2p}"))
    };
    // Pair below one switch: its own links, 40 GB/s.
    takes(&tree(true), Collective::AllGather, &[3], 40 * MB, 1.0 * US + 0.5e-3);
    // Staged, both GPUs of a pair go up their 20 GB/s uplink: 10 GB/s each.
    takes(&tree(false), Collective::AllGather, &[3], 40 * MB, 1.0 * US + 2e-3);
    // Across the sockets: two groups share 10 GB/s.
    takes(&tree(true), Collective::AllGather, &[2], 40 * MB, 1.0 * US + 20e6 / 5e9);
    takes(&tree(false), Collective::AllGather, &[2], 40 * MB, 1.0 * US + 20e6 / 5e9);
    // All four in one ring: it crosses the socket link once, at 10 GB/s.
    takes(&tree(true), Collective::AllGather, GPU, 40 * MB, 3.0 * US + 30e6 / 10e9);
    // All-to-all: two GPUs send half of theirs to the other socket.
    takes(&tree(true), Collective::AllToAll, GPU, 40 * MB, 3.0 * US + 40e6 / 10e9);
    // Staged, a permutation within the pair still goes up and down.
    takes(&tree(false), Collective::Permute, &[3], 40 * MB, 1.0 * US + 80e6 / 20e9);
}

#[test]
fn data_parallel_gradients_cost_twice_the_weights_less_one_part() {
    for (name, n) in [("p100x16", 16), ("flat:8", 8), ("1080tix64", 64), ("flat:6", 6)] {
        let m = builtin(name).unwrap();
        let comm = Comm::new(&m, m.mesh());
        let weights = 138_357_544 * 4;
        let traffic = comm.traffic(Collective::AllReduce, m.mesh().all(), AxisSet::EMPTY, Bytes(weights));
        // 2 (n-1)/n |W| per device, so 2 (n-1) |W| in total, for any algorithm and rounding of parts.
        assert_eq!(traffic.total(), Bytes(2 * (n - 1) * weights), "{name}");
    }
}

#[test]
fn optcnn_counts_sixteen_and_a_half_gib_for_vgg16_on_16_devices() {
    let gib = parameter_server_traffic(16, Bytes(138_357_544 * 4)).0 as f64 / f64::from(1 << 30);
    // The paper's Fig. 8 shows 16.45.
    assert!((gib - 16.49).abs() < 0.005, "{gib}");
}

#[test]
fn a_ring_leaves_every_node_once() {
    let m = easy(1, "topology = \"switch\"");
    let comm = Comm::new(&m, m.mesh());
    // Each of the 16 links carries 15 of 16 parts twice; four of them leave a node.
    let traffic = comm.traffic(Collective::AllReduce, m.mesh().all(), AxisSet::EMPTY, Bytes(16 * MB));
    assert_eq!(traffic.level(m.mesh(), LevelId(0)), Bytes(2 * 4 * 15 * MB));
    assert_eq!(traffic.level(m.mesh(), LevelId(1)), Bytes(2 * 12 * 15 * MB));
    assert_eq!(traffic.axis(AxisId(0)), Bytes(2 * 2 * 15 * MB));
    assert_eq!(traffic.axis(AxisId(1)), Bytes(2 * 2 * 15 * MB));
    // All-to-all over everything: each of 16 sends 12/16 of its bytes to other nodes.
    let traffic = comm.traffic(Collective::AllToAll, m.mesh().all(), AxisSet::EMPTY, Bytes(16 * MB));
    assert_eq!(traffic.level(m.mesh(), LevelId(0)), Bytes(12 * 16 * MB));
}

#[test]
fn no_axes_cost_nothing() {
    let m = builtin("p100x16").unwrap();
    let comm = Comm::new(&m, m.mesh());
    for kind in Collective::ALL {
        assert_eq!(comm.seconds(kind, AxisSet::EMPTY, Bytes(1 << 30)).0, 0.0);
        assert_eq!(comm.traffic(kind, AxisSet::EMPTY, AxisSet::EMPTY, Bytes(1 << 30)).total(), Bytes(0));
    }
}

fn machines() -> Vec<String> {
    builtin_names().map(String::from).chain(["flat:12", "cpu:2", "k80x64:12"].map(String::from)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn costs_are_finite_and_grow_with_bytes(which in 0usize..13, bits in 1u32.., bytes in 0u64..1 << 40, more in 0u64..1 << 40) {
        let m = builtin(&machines()[which]).unwrap();
        let comm = Comm::new(&m, m.mesh());
        let axes = AxisSet(bits).intersect(m.mesh().all());
        for kind in Collective::ALL {
            let small = comm.seconds(kind, axes, Bytes(bytes)).0;
            let large = comm.seconds(kind, axes, Bytes(bytes + more)).0;
            prop_assert!(small.is_finite() && small >= 0.0, "{:?} {small}", kind);
            prop_assert!(large >= small, "{:?} {small} {large}", kind);
            let few = comm.traffic(kind, axes, AxisSet::EMPTY, Bytes(bytes)).total();
            prop_assert!(few <= comm.traffic(kind, axes, AxisSet::EMPTY, Bytes(bytes + more)).total());
        }
    }

    #[test]
    fn hierarchical_never_loses_to_the_flat_ring(which in 0usize..13, bits in 1u32.., bytes in 0u64..1 << 40) {
        let m = builtin(&machines()[which]).unwrap();
        let comm = Comm::new(&m, m.mesh());
        let axes = AxisSet(bits).intersect(m.mesh().all());
        for kind in [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter] {
            if let (Some(ring), Some(levels)) = (
                comm.seconds_by(kind, Algorithm::Ring, axes, Bytes(bytes)),
                comm.seconds_by(kind, Algorithm::Hierarchical, axes, Bytes(bytes)),
            ) {
                prop_assert!(levels.0 <= ring.0 * (1.0 + 1e-12), "{levels} {ring}");
            }
        }
    }

    /// On a level where all units are equally far apart, neither the choice of an axis nor the order of two axes
    /// matters.
    #[test]
    fn axes_of_one_level_commute(which in 0usize..3, bytes in (0u64..1 << 30).prop_map(|b| b * 64)) {
        let m = builtin(["p100x16", "h100x64", "flat:16"][which]).unwrap();
        let comm = Comm::new(&m, m.mesh());
        for (a, axis) in m.mesh().axes().iter().enumerate() {
            for (b, other) in m.mesh().axes().iter().enumerate() {
                if a == b || axis.level != other.level { continue; }
                let (a, b) = (set(&[a as u32]), set(&[b as u32]));
                for kind in Collective::ALL {
                    prop_assert_eq!(comm.seconds(kind, a, Bytes(bytes)), comm.seconds(kind, b, Bytes(bytes)));
                }
                let one_way = comm.seconds(Collective::ReduceScatter, a, Bytes(bytes)).0
                    + comm.seconds(Collective::ReduceScatter, b, Bytes(bytes / 2)).0;
                let other_way = comm.seconds(Collective::ReduceScatter, b, Bytes(bytes)).0
                    + comm.seconds(Collective::ReduceScatter, a, Bytes(bytes / 2)).0;
                prop_assert_eq!(one_way, other_way);
                // One step over both is no slower either, except for the latency of its longer ring.
                let together = comm.seconds(Collective::ReduceScatter, a.union(b), Bytes(bytes)).0;
                prop_assert!(together <= one_way * (1.0 + 1e-12) + 4e-6, "{together} {one_way}");
            }
        }
    }

    /// Rings, trees and hierarchies send the same number of bytes; only the axes that they cross differ.
    #[test]
    fn totals_do_not_depend_on_the_algorithm(which in 0usize..13, bits in 1u32.., bytes in 0u64..1 << 32) {
        let m = builtin(&machines()[which]).unwrap();
        let comm = Comm::new(&m, m.mesh());
        let axes = AxisSet(bits).intersect(m.mesh().all());
        if axes.is_empty() { return Ok(()); }
        let n = u64::from(m.mesh().group_size(axes));
        let groups = u64::from(m.devices()) / n;
        for (kind, passes) in [(Collective::AllReduce, 2), (Collective::AllGather, 1), (Collective::Broadcast, 1)] {
            let total = comm.traffic(kind, axes, AxisSet::EMPTY, Bytes(bytes)).total();
            prop_assert_eq!(total, Bytes(passes * (n - 1) * bytes * groups));
        }
    }

    /// A merged axis costs as much as its prime axes together.
    #[test]
    fn coarse_axes_cost_the_same(which in 0usize..13, bytes in 0u64..1 << 40) {
        let m = builtin(&machines()[which]).unwrap();
        let coarse = m.mesh().per_level();
        let (fine, merged) = (Comm::new(&m, m.mesh()), Comm::new(&m, &coarse));
        for axis in coarse.all().iter() {
            for kind in Collective::ALL {
                let primes = coarse.primes(AxisSet::of(axis));
                prop_assert_eq!(
                    merged.seconds(kind, AxisSet::of(axis), Bytes(bytes)),
                    fine.seconds(kind, primes, Bytes(bytes))
                );
            }
        }
    }
}

#[test]
fn measured_times_replace_the_model() {
    let mut spec = easy(1, "topology = \"switch\"").spec().clone();
    let point = |bytes, seconds| MeasuredTime { bytes: Bytes(bytes), seconds: Seconds(seconds) };
    let points = vec![point(MB, 100.0 * US), point(4 * MB, 700.0 * US)];
    let level = String::from("gpu");
    spec.measured = vec![
        CollectiveMeasurement {
            level: level.clone(),
            collective: CollectiveKind::AllGather,
            members: 4,
            points: points.clone(),
        },
        CollectiveMeasurement { level, collective: CollectiveKind::Permute, members: 2, points },
    ];
    let m = Machine::new(spec).unwrap();
    takes(&m, Collective::AllGather, GPU, MB, 100.0 * US);
    takes(&m, Collective::AllGather, GPU, 2 * MB, 300.0 * US);
    takes(&m, Collective::AllGather, GPU, 10, 100.0 * US);
    takes(&m, Collective::AllGather, GPU, 40 * MB, 7000.0 * US);
    // Other collectives, other groups and groups across levels keep the model of their links.
    let plain = easy(1, "topology = \"switch\"");
    let (with, without) = (Comm::new(&m, m.mesh()), Comm::new(&plain, plain.mesh()));
    for (kind, axes) in [
        (Collective::ReduceScatter, set(GPU)),
        (Collective::AllGather, set(&[3])),
        (Collective::AllGather, set(NODE)),
        (Collective::AllGather, m.mesh().all()),
    ] {
        assert_eq!(with.seconds(kind, axes, Bytes(MB)), without.seconds(kind, axes, Bytes(MB)));
    }
    // Halo exchanges cost as much as permutations.
    close(with.halo_seconds(set(&[3]), Bytes(MB), Bytes(2 * MB)).0, 300.0 * US);
}
