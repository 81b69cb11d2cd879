//! Machines as people name them: a GPU and a number, or a TPU slice.

use shardwright_machine::{Bytes, DeviceId, Topology, builtin, builtin_file, builtin_names, parse};

fn shape(name: &str) -> (u32, Vec<u32>) {
    let machine = builtin(name).unwrap_or_else(|error| panic!("{error}"));
    (machine.devices(), machine.levels().iter().map(|level| level.count).collect())
}

#[test]
fn a_gpu_and_a_number_are_whole_nodes_or_a_part_of_one() {
    for (name, devices, levels) in [
        ("8xh100", 8, &[8][..]),
        ("64xh100", 64, &[8, 8]),
        ("h100x64", 64, &[8, 8]),
        ("h100x4096", 4096, &[512, 8]),
        ("1024xa100", 1024, &[128, 8]),
        ("16xv100", 16, &[2, 8]),
        ("8xb200", 8, &[8]),
        ("8xMI300X", 8, &[8]),
        ("8xl4", 8, &[8]),
        ("4xL40S", 4, &[4]),
        ("1xh200", 1, &[1]),
        ("144xgb200", 144, &[2, 72]),
        ("16xa100-80gb", 16, &[2, 8]),
        ("64x1080ti", 64, &[8, 8]),
        ("8xp100", 8, &[2, 4]),
        ("16xh100:4", 4, &[4]),
        ("8 x H100", 8, &[8]),
        ("16*v100", 16, &[2, 8]),
        ("8h100", 8, &[8]),
    ] {
        assert_eq!(shape(name), (devices, levels.to_vec()), "{name}");
    }
    // The same machine by either name, and a file of the same size wins.
    assert_eq!(builtin("64xh100").unwrap(), builtin("h100x64").unwrap());
    assert_eq!(builtin("8xk80").unwrap(), builtin("k80x8").unwrap());
    assert_eq!(builtin("8xh100").unwrap().levels(), builtin("h100x64:8").unwrap().levels());
    let big = builtin("1024xh100").unwrap();
    assert_eq!(big.name(), "1024xh100");
    assert_eq!(big.description(), "128 nodes x 8 H100 SXM, NVSwitch, 400 Gb/s InfiniBand per GPU");
    assert_eq!(
        builtin("4xh100").unwrap().description(),
        "one node: 4 H100 SXM, NVSwitch, 400 Gb/s InfiniBand per GPU"
    );
}

#[test]
fn tpu_slices_are_tori_in_googles_names() {
    let torus = |name: &str| {
        let machine = builtin(name).unwrap_or_else(|error| panic!("{error}"));
        match &machine.levels()[0].link.topology {
            Topology::Torus { dims, wrap } => (machine.devices(), dims.clone(), wrap.clone()),
            other => panic!("{name}: {other:?}"),
        }
    };
    // v4 and v5p count TensorCores, two per chip.
    assert_eq!(torus("tpu-v5p-256"), (128, vec![4, 4, 8], vec![true; 3]));
    assert_eq!(torus("tpu-v5p-8"), (4, vec![2, 2], vec![false; 2]));
    assert_eq!(torus("v4-1024"), (512, vec![8, 8, 8], vec![true; 3]));
    assert_eq!(torus("tpu-v5e-256"), (256, vec![16, 16], vec![true; 2]));
    assert_eq!(torus("tpu-v6e-8"), (8, vec![2, 4], vec![false; 2]));
    assert_eq!(torus("v5e-128"), (128, vec![8, 16], vec![false, true]));
    for (name, part) in
        [("tpu-v5p-7", "TensorCores, 2 per chip"), ("v5e-512", "at most 256"), ("v6e-12", "power of two")]
    {
        let message = builtin(name).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn sizes_that_do_not_exist_and_typos_are_refused_with_the_remedy() {
    for (name, part) in [
        ("12xh100", "try 8 or 16"),
        ("0xh100", "at least one device"),
        ("9999999999999999999999xh100", "not a whole number of nodes"),
        ("99999999992xh100", "at most 1048576"),
        ("8xh10", "did you mean `8xh100`?"),
        ("8xh1000", "did you mean `8xh100`?"),
        ("16xmi300", "did you mean `16xmi300x`?"),
        ("h100", "did you mean `8xh100`?"),
        ("p100x61", "try 60 or 64"),
        ("tpu-v5q-256", "did you mean `tpu-v5p-256`?"),
        ("flta:4", "there is no machine `flta:4`; `shardwright machines` lists them; did you mean `flat:4`?"),
        ("fat:6:2", "did you mean `flat:6:2`?"),
        ("dgx-h100", "did you mean `8xh100`?"),
        ("toaster", "built in are p100x16, "),
    ] {
        let message = builtin(name).unwrap_err().to_string();
        assert!(message.contains(part), "{name}: {message}");
    }
}

#[test]
fn the_file_of_a_sized_machine_reads_back() {
    for name in ["8xh100", "1024xa100", "tpu-v5p-512", "24xmi325x"] {
        let text = builtin_file(name).unwrap();
        let again = parse("printed.toml", text.as_bytes(), &mut |_| Err("none".into())).unwrap();
        assert_eq!(again, builtin(name).unwrap(), "{text}");
    }
}

#[test]
fn every_real_device_keeps_a_reserve_and_idealised_ones_have_no_limit() {
    for name in builtin_names() {
        let machine = builtin(name).unwrap();
        let device = machine.device(DeviceId(0));
        let limit = machine.memory_limit().unwrap_or_else(|| panic!("{name} has no limit"));
        assert!(
            limit < device.memory && limit.0 > device.memory.0 * 9 / 10,
            "{name}: {limit} of {}",
            device.memory
        );
    }
    assert_eq!(builtin("8xh100").unwrap().memory_limit(), Some(Bytes(78 << 30)));
    assert_eq!(builtin("flat:8").unwrap().memory_limit(), None);
    assert_eq!(builtin("cpu:2").unwrap().memory_limit(), None);
    // A file that states no reserve offers all of its memory; one that keeps everything is refused.
    let text = |device: &str| {
        format!("extends = \"flat:4\"\nname = \"ours\"\n[device]\nmemory_limit = true\n{device}")
    };
    let read = |text: &str| parse("m.toml", text.as_bytes(), &mut |_| Err("none".into()));
    assert_eq!(read(&text("memory = \"8 GiB\"\n")).unwrap().memory_limit(), Some(Bytes(8 << 30)));
    let error = read(&text("memory = \"8 GiB\"\nreserve = \"8 GiB\"\n")).unwrap_err().to_string();
    assert!(error.contains("m.toml:6: `device.reserve`: 8 GiB of 8 GiB leaves no memory"), "{error}");
}
