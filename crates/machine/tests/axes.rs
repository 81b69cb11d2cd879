//! Axes, device ids, groups, merging and restriction.

use proptest::prelude::*;
use shardwright_machine::{AxisId, AxisSet, DeviceId, Topology, builtin, prime_factors};

fn axes(name: &str) -> String {
    let machine = builtin(name).unwrap();
    let axes: Vec<String> = machine.mesh().axes().iter().map(|a| format!("{}:{}", a.name, a.size)).collect();
    axes.join(" ")
}

fn set(axes: &[u32]) -> AxisSet {
    axes.iter().map(|&axis| AxisId(axis)).collect()
}

#[test]
fn each_level_gives_one_axis_per_prime() {
    assert_eq!(axes("p100x16"), "node.0:2 node.1:2 gpu.0:2 gpu.1:2");
    assert_eq!(axes("flat:12"), "gpu.0:2 gpu.1:2 gpu.2:3");
    assert_eq!(axes("flat:1"), "");
    assert_eq!(axes("flat:7"), "gpu.0:7");
    assert_eq!(axes("a100x64:16"), "node.0:2 gpu.0:2 gpu.1:2 gpu.2:2");
    assert_eq!(axes("v5e-256").split(' ').count(), 8);
}

#[test]
fn the_papers_sizes_are_restrictions() {
    for (name, levels) in [
        ("1080tix64:4", "gpu 4"),
        ("1080tix64:8", "gpu 8"),
        ("1080tix64:16", "node 2, gpu 8"),
        ("1080tix64:32", "node 4, gpu 8"),
        ("1080tix64:64", "node 8, gpu 8"),
        ("p100x16:4", "gpu 4"),
        ("p100x16:1", "gpu 1"),
        ("p100x16:12", "node 3, gpu 4"),
        ("flat:8:2", "gpu 2"),
    ] {
        let machine = builtin(name).unwrap();
        let got: Vec<String> = machine.levels().iter().map(|l| format!("{} {}", l.name, l.count)).collect();
        assert_eq!(got.join(", "), levels, "{name}");
    }
    // Four GPUs of a server with two sockets sit below one of them.
    let Topology::PcieTree { fanout, .. } =
        &builtin("1080tix64:4").unwrap().levels()[0].link.topology.clone()
    else {
        panic!("still a tree")
    };
    assert_eq!(fanout, &[1, 2, 2]);
    // A part of a torus row is a line; a whole row is a ring.
    let torus = |name: &str| builtin(name).unwrap().levels()[0].link.topology.clone();
    assert_eq!(torus("v5e-256:16"), Topology::ring(16));
    assert_eq!(torus("v5e-256:8"), Topology::Torus { dims: vec![8], wrap: vec![false] });
    assert_eq!(torus("v5e-256:64"), Topology::Torus { dims: vec![4, 16], wrap: vec![false, true] });
    assert_eq!(builtin("v5e-256:16").unwrap().levels()[0].link.bandwidth.0, 100e9);
    // Two of four fully connected P100s keep one of the three wires.
    assert_eq!(builtin("p100x16:2").unwrap().levels()[0].link.bandwidth.0, 20e9);
}

#[test]
fn a_number_that_does_not_fit_the_levels_is_refused_with_those_that_do() {
    let message = |name: &str| builtin(name).unwrap_err().to_string();
    assert_eq!(
        message("p100x16:6"),
        "`p100x16:6`: a node has 4 devices, so 6 devices are not a whole number of nodes; try 4 or 8"
    );
    assert_eq!(message("p100x16:17"), "`p100x16:17`: the machine has 16 devices; ask for 1 to 16");
    assert_eq!(message("p100x16:0"), "`p100x16:0`: the machine has 16 devices; ask for 1 to 16");
    assert!(message("1080tix64:3").contains("are not a block"), "{}", message("1080tix64:3"));
    assert!(message("p100x16:99999999999999999999999").contains("ask for 1 to 16"));
    assert!(message("flat:0").contains("`level[0].count`: must be at least 1"));
    assert!(message("flat:1000000000").contains("at most 1048576"));
    for unknown in ["p100y16", "p100y16:4", "", ":", "flat", "flat:", "flat:-1", "flat:x"] {
        assert!(
            message(unknown).starts_with(&format!("there is no machine `{unknown}`")),
            "{}",
            message(unknown)
        );
    }
}

#[test]
fn merged_axes_address_the_same_devices() {
    let machine = builtin("1080tix64").unwrap();
    let prime = machine.mesh();
    let coarse = prime.per_level();
    let names: Vec<&str> = coarse.axes().iter().map(|axis| axis.name.as_str()).collect();
    assert_eq!(names, ["node", "gpu"]);
    assert_eq!(coarse.device_of(&[3, 5]), prime.device_of(&[0, 1, 1, 1, 0, 1]));
    assert_eq!(coarse.primes(set(&[1])), set(&[3, 4, 5]));
    assert_eq!(coarse.groups(set(&[1])), prime.groups(set(&[3, 4, 5])));
    let half = prime.merge_axes(&[set(&[0, 1]), set(&[2]), set(&[3]), set(&[4, 5])]).unwrap();
    let names: Vec<&str> = half.axes().iter().map(|axis| axis.name.as_str()).collect();
    assert_eq!(names, ["node.0-1", "node.2", "gpu.0", "gpu.1-2"]);
    assert!(
        prime.merge_axes(&[set(&[0, 1, 2, 3]), set(&[4, 5])]).is_err(),
        "node and gpu are different links"
    );
    assert!(
        prime.merge_axes(&[set(&[0, 2]), set(&[1]), set(&[3]), set(&[4]), set(&[5])]).is_err(),
        "not neighbours"
    );
    assert!(prime.merge_axes(&[set(&[0])]).is_err(), "axes left out");
}

#[test]
fn the_levels_that_a_set_crosses_are_those_of_its_axes() {
    let machine = builtin("p100x16").unwrap();
    let mesh = machine.mesh();
    assert_eq!(mesh.levels_crossed(set(&[0])), 0b01);
    assert_eq!(mesh.levels_crossed(set(&[3])), 0b10);
    assert_eq!(mesh.levels_crossed(set(&[1, 2])), 0b11);
}

#[test]
fn digits_that_do_not_exist_are_refused() {
    let machine = builtin("p100x16").unwrap();
    assert!(machine.mesh().device_of(&[0, 0, 0]).is_err());
    assert!(machine.mesh().device_of(&[0, 0, 2, 0]).is_err());
    assert!(machine.mesh().digits_of(DeviceId(16)).is_err());
}

proptest! {
    #[test]
    fn prime_factors_multiply_back(n in 1u32..2_000_000) {
        let factors = prime_factors(n);
        prop_assert_eq!(factors.iter().product::<u32>(), n);
        prop_assert!(factors.iter().all(|&p| (2..p).take_while(|d| d * d <= p).all(|d| p % d != 0)));
    }

    #[test]
    fn devices_and_digits_are_inverse(count in 1u32..500) {
        let machine = builtin(&format!("flat:{count}")).unwrap();
        let mesh = machine.mesh();
        for device in (0..count).map(DeviceId) {
            let digits = mesh.digits_of(device).unwrap();
            prop_assert_eq!(mesh.device_of(&digits).unwrap(), device);
        }
    }

    #[test]
    fn groups_partition_the_devices(count in 1u32..300, bits in any::<u32>()) {
        let machine = builtin(&format!("flat:{count}")).unwrap();
        let mesh = machine.mesh();
        let axes = AxisSet(bits).intersect(mesh.all());
        let groups = mesh.groups(axes);
        let mut seen = vec![0; count as usize];
        for group in &groups {
            prop_assert_eq!(group.len() as u32, mesh.group_size(axes));
            for device in group {
                seen[device.index()] += 1;
                for other in mesh.all().minus(axes).iter() {
                    prop_assert_eq!(mesh.digit(*device, other), mesh.digit(group[0], other));
                }
            }
        }
        prop_assert!(seen.iter().all(|&n| n == 1));
    }
}
