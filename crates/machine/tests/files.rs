//! Machine files: valid ones are read, and every kind of mistake is reported.

use proptest::prelude::*;
use shardwright_machine::{
    BytesPerSecond, DeviceId, Machine, MachineError, Topology, builtin, builtin_file, builtin_names, open,
    parse,
};

const GOOD: &str = r#"name = "test"

[[level]]
name = "node"
count = 2
bandwidth = "100 Gb/s"
latency = "4 us"
topology = "switch"

[[level]]
name = "gpu"
count = 6
bandwidth = "12 GB/s"
latency = "2.5 us"
topology = "pcie-tree"
fanout = [1, 3, 2]
uplinks = ["6 GB/s", "12 GB/s"]
peer_to_peer = false

[device]
name = "X"
memory = "16 GiB"
memory_bandwidth = "732 GB/s"
launch_overhead = "5 us"
peak.f32 = "10 TFLOP/s"
"#;

fn read(text: &str) -> Result<Machine, MachineError> {
    parse("m.toml", text.as_bytes(), &mut |_| Err("no files here".into()))
}

/// The error message after a change to the valid file.
fn message(from: &str, to: &str) -> String {
    let text = GOOD.replacen(from, to, 1);
    assert_ne!(text, GOOD, "the test replaces something");
    read(&text).expect_err("must be refused").to_string()
}

#[test]
fn the_good_file_is_read() {
    let machine = read(GOOD).unwrap();
    assert_eq!(machine.devices(), 12);
    let sizes: Vec<u32> = machine.mesh().axes().iter().map(|axis| axis.size).collect();
    // Six GPUs as 3 x 2: the axes follow the tree, not the sorted factors of six.
    assert_eq!(sizes, [2, 3, 2]);
    assert_eq!(machine.levels()[0].link.bandwidth, BytesPerSecond(12.5e9));
}

#[test]
fn the_documented_example_is_read_and_every_builtin_documented() {
    // Read at run time: the page is not part of the crate's package.
    let page = std::fs::read_to_string("../../docs/machines.md").unwrap();
    let example = page.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let machine = read(example).unwrap();
    assert_eq!((machine.name(), machine.devices()), ("example", 16));
    assert_eq!(machine.device(DeviceId(15)).name, "K80");
    for name in builtin_names() {
        assert!(page.contains(&format!("`{name}`")), "{name} is missing in docs/machines.md");
    }
}

#[test]
fn every_mistake_names_file_line_and_key() {
    let cases = [
        ("count = 6", "count = 0", "m.toml:12: `level[1].count`: must be at least 1"),
        ("count = 6", "count = -6", "m.toml:12: `level[1].count`: -6 is out of range: 0 to 4294967295"),
        (
            "count = 6",
            "count = 1000000000",
            "m.toml:12: `level[1].count`: makes 2000000000 devices; at most 1048576",
        ),
        (
            "count = 6",
            "count = 99999999999999999999",
            "m.toml:12: `level[1].count`: 99999999999999999999 is too large",
        ),
        ("count = 6", "count = \"6\"", "m.toml:12: `level[1].count`: must be an integer, not a string"),
        ("count = 6\n", "", "m.toml:10: `level[1].count` is missing: write count = 8"),
        ("count = 6", "cuont = 6", "m.toml:12: unknown key `level[1].cuont`; known here: name, count,"),
        ("\"100 Gb/s\"", "\"-100 Gb/s\"", "m.toml:6: `level[0].bandwidth`: -12500000000 B/s is not possible"),
        ("\"100 Gb/s\"", "\"0 Gb/s\"", "m.toml:6: `level[0].bandwidth`: 0 B/s is not possible"),
        (
            "\"100 Gb/s\"",
            "\"100 Gbps\"",
            "m.toml:6: `level[0].bandwidth`: `100 Gbps` has unit `Gbps`; use one of TB/s",
        ),
        ("\"100 Gb/s\"", "100", "m.toml:6: `level[0].bandwidth`: must be a string with its unit, such as"),
        ("\"4 us\"", "\"-4 us\"", "m.toml:7: `level[0].latency`: -0.000004 s is not possible"),
        ("\"switch\"", "\"mesh\"", "m.toml:8: `level[0].topology`: `mesh` is not one of switch, memory"),
        (
            "[1, 3, 2]",
            "[1, 2, 2]",
            "m.toml:16: `level[1].fanout`: [1, 2, 2] must be at most 8 numbers with product 6",
        ),
        (
            "[\"6 GB/s\", \"12 GB/s\"]",
            "[\"6 GB/s\"]",
            "m.toml:17: `level[1].uplinks`: 1 values; one less than fanout",
        ),
        ("[\"6 GB/s\", ", "[\"-6 GB/s\", ", "m.toml:17: `level[1].uplinks`: -6000000000 B/s is not possible"),
        (
            "topology = \"switch\"",
            "topology = \"switch\"\ndims = [2]",
            "m.toml:9: `level[0].dims`: is not used by",
        ),
        (
            "topology = \"switch\"",
            "topology = \"switch\"\nports = 4",
            "m.toml:9: `level[0].ports`: 4 ports cannot be",
        ),
        (
            "topology = \"switch\"",
            "topology = \"switch\"\nefficiency = 1.5",
            "m.toml:9: `level[0].efficiency`: 1.5 must",
        ),
        (
            "topology = \"switch\"",
            "topology = \"switch\"\nefficiency = nan",
            "m.toml:9: `level[0].efficiency`: NaN must",
        ),
        (
            "name = \"gpu\"",
            "name = \"node\"",
            "m.toml:11: `level[1].name`: `node` is also the name of level[0]",
        ),
        ("\"16 GiB\"", "\"0 GiB\"", "m.toml:22: `device.memory`: must be from 1 byte"),
        ("peak.f32", "peak.f31", "m.toml:25: unknown key `device.peak.f31`; known here: f64, f32"),
        ("peak.f32 = \"10 TFLOP/s\"", "", "m.toml:20: `device.peak.f32`: is missing"),
        ("name = \"test\"", "name = \"te\\u0000st\"", "m.toml:1: `name`: `te\\0st` is not a name"),
        ("name = \"test\"\n", "", "m.toml: `name` is missing"),
        ("[device]", "[devise]", "m.toml:20: unknown key `devise`; known here: name, description"),
        ("name = \"X\"", "name = \"X\"\nname = \"Y\"", "m.toml:22: duplicate key"),
        ("count = 6", "count = ", "m.toml:12: "),
        ("count = 6", "count = 2026-01-01", "m.toml:12: `level[1].count`: a datetime is not allowed here"),
        ("[[level]]", "level = 3\n[[levels]]", "m.toml:"),
    ];
    for (from, to, expected) in cases {
        let got = message(from, to);
        assert!(got.starts_with(expected), "{from:?} -> {to:?}\n  says {got}\n  not  {expected}");
    }
}

#[test]
fn text_that_is_not_utf8_is_named_with_its_line() {
    let mut bytes = b"name = \"x\"\n# ".to_vec();
    bytes.push(0xff);
    let error = parse("m.toml", &bytes, &mut |_| Err("none".into())).unwrap_err();
    assert_eq!(error.to_string(), "m.toml:2: not UTF-8 text (byte 13); machine files are plain TOML");
}

#[test]
fn endless_nesting_is_refused() {
    for open in ["[", "{a=", "a.", "[["] {
        let error = read(&format!("name = {}", open.repeat(50_000))).unwrap_err().to_string();
        assert!(error.starts_with("m.toml:1: "), "{error}");
    }
}

#[test]
fn a_huge_file_is_refused() {
    let error = parse("m.toml", &vec![b'#'; 2 << 20], &mut |_| Err("none".into())).unwrap_err();
    assert!(error.to_string().contains("too large"), "{error}");
}

/// Opens `first` where the named files exist.
fn open_among(first: &str, files: &[(&str, &str)]) -> Result<Machine, MachineError> {
    open(first, &mut |path| {
        let found = files.iter().find(|(name, _)| *name == path);
        found.map(|(_, text)| text.as_bytes().to_vec()).ok_or_else(|| "no such file".to_string())
    })
}

#[test]
fn a_file_can_extend_a_builtin_or_another_file() {
    let files = [
        ("a/top.toml", "extends = \"base.toml\"\nname = \"top\"\n[device]\nmemory = \"32 GiB\""),
        ("a/base.toml", "extends = \"p100x16\"\nname = \"base\"\n[[level]]\nname = \"node\"\ncount = 8"),
    ];
    let machine = open_among("a/top.toml", &files).unwrap();
    assert_eq!((machine.name(), machine.devices()), ("top", 32));
    assert_eq!(machine.spec().device.memory.0, 32 << 30);
    assert_eq!(machine.spec().device.peak, builtin("p100x16").unwrap().spec().device.peak);
    assert_eq!(open_among("a/top.toml:8", &files).unwrap().devices(), 8);
}

#[test]
fn a_cycle_of_files_is_named() {
    let files = [
        ("a.toml", "extends = \"b.toml\""),
        ("b.toml", "name = \"b\"\nextends = \"c.toml\""),
        ("c.toml", "extends = \"a.toml\""),
    ];
    let error = open_among("a.toml", &files).unwrap_err();
    assert_eq!(error.to_string(), "c.toml:1: `extends` forms a cycle: a.toml -> b.toml -> c.toml -> a.toml");
    let error = open_among("s.toml", &[("s.toml", "extends = \"s.toml\"")]).unwrap_err();
    assert!(error.to_string().contains("s.toml -> s.toml"), "{error}");
}

#[test]
fn a_chain_without_end_is_cut() {
    // Each file extends one in a deeper folder, so that no name repeats.
    let error = open("a.toml", &mut |path| {
        Ok(format!("extends = \"x/{}\"", path.rsplit('/').next().unwrap_or("")).into_bytes())
    })
    .unwrap_err();
    assert!(matches!(error, MachineError::TooDeep { .. }), "{error}");
}

#[test]
fn a_missing_base_is_reported() {
    let bad = |text: &str| open_among("a.toml", &[("a.toml", text)]).unwrap_err().to_string();
    assert!(bad("extends = \"p100\"").starts_with("a.toml:1: `extends`: there is no machine `p100`"));
    assert!(bad("extends = \"gone.toml\"").starts_with("cannot read gone.toml: no such file"));
    let no_level = bad("extends = \"p100x16\"\n[[level]]\nname = \"rack\"\ncount = 2");
    assert!(
        no_level
            .starts_with("a.toml:3: `level[0].name`: the machine that this file extends has no level `rack`")
    );
    let too_many = bad("extends = \"p100x16\"\n[[level]]\nname = \"node\"\ncount = 10000000");
    assert!(too_many.starts_with("a.toml:4: `level[0].count`: makes 10000000 devices"), "{too_many}");
}

#[test]
fn a_new_topology_replaces_the_old_ones_keys() {
    let text = "extends = \"v5e-256\"\n[[level]]\nname = \"chip\"\ntopology = \"ring\"";
    let machine = open_among("a.toml", &[("a.toml", text)]).unwrap();
    assert_eq!(machine.levels()[0].link.topology, Topology::ring(256));
}

#[test]
fn mixed_nodes_have_their_own_device_and_a_split_waits_for_the_slowest() {
    let text = "extends = \"p100x16\"\nname = \"two kinds\"\n[[mixed]]\nunits = [2, 3]\nname = \"K80\"\n\
                memory = \"12 GiB\"\nmemory_bandwidth = \"240 GB/s\"\npeak.f32 = \"4.365 TFLOP/s\"";
    let machine = open_among("a.toml", &[("a.toml", text)]).unwrap();
    assert_eq!(machine.device(DeviceId(7)).name, "P100");
    assert_eq!(machine.device(DeviceId(8)).name, "K80");
    let slowest = machine.slowest();
    assert_eq!(slowest.memory.0, 12 << 30);
    assert_eq!(slowest.peak.f32.unwrap().0, 4.365e12);
    assert_eq!(machine.slowest_of([DeviceId(0), DeviceId(5)]).name, "P100");
    assert_eq!(machine.slowest_of([DeviceId(0), DeviceId(9), DeviceId(1), DeviceId(10)]).name, "P100+K80");
    // The first two nodes have only P100s, and so does one node.
    assert!(machine.restrict(8).unwrap().is_homogeneous());
    assert_eq!(machine.restrict(12).unwrap().device(DeviceId(8)).name, "K80");
    let twice = format!("{text}\n[[mixed]]\nunits = [3]");
    let error = open_among("a.toml", &[("a.toml", &twice)]).unwrap_err().to_string();
    assert!(error.contains("`mixed[1].units`: unit 3 is named twice"), "{error}");
    let beyond = text.replace("[2, 3]", "[2, 4]");
    let error = open_among("a.toml", &[("a.toml", &beyond)]).unwrap_err().to_string();
    assert!(error.contains("a.toml:4: `mixed[0].units`: there is no node 4: units are 0 to 3"), "{error}");
}

#[test]
fn every_builtin_reads_prints_and_reads_back_the_same() {
    let names: Vec<String> =
        builtin_names().map(String::from).chain(["flat:12".into(), "cpu:2".into()]).collect();
    for name in names {
        let machine = builtin(&name).unwrap();
        assert_eq!(machine.name(), name);
        let printed = machine.to_toml();
        let again = parse("printed.toml", printed.as_bytes(), &mut |_| Err("none".into())).unwrap();
        assert_eq!(again, machine, "{printed}");
        let json = serde_json::to_string(&machine).unwrap();
        let embedded: Machine = serde_json::from_str(&json).unwrap();
        assert_eq!(embedded, machine, "{json}");
        assert_eq!(embedded.fingerprint(), machine.fingerprint());
        // Every constant has its source next to it: each table has comments.
        let text = builtin_file(&name).unwrap();
        assert!(text.starts_with('#') && text.matches("\n#").count() >= 2, "{name} cites its sources");
    }
}

#[test]
fn an_embedded_machine_is_checked_again() {
    let mut spec = builtin("p100x16").unwrap().spec().clone();
    spec.levels[0].count = 0;
    let json = serde_json::to_string(&spec).unwrap();
    let error = serde_json::from_str::<Machine>(&json).unwrap_err().to_string();
    assert!(error.contains("machine description: `level[0].count`: must be at least 1"), "{error}");
}

#[test]
fn fingerprints_distinguish_hardware_and_ignore_names() {
    let mut prints: Vec<_> = builtin_names().map(|name| builtin(name).unwrap().fingerprint()).collect();
    prints.sort();
    prints.dedup();
    assert_eq!(prints.len(), builtin_names().count());
    let mut spec = builtin("p100x16").unwrap().spec().clone();
    spec.name = "ours".into();
    spec.description = "in the cellar".into();
    let renamed = Machine::try_from(spec).unwrap();
    assert_eq!(renamed.fingerprint(), builtin("p100x16").unwrap().fingerprint());
    // Stable across versions: plans store it.
    assert_eq!(builtin("flat:4").unwrap().fingerprint().to_string(), "d8b70891c5e797d8");
}

#[test]
fn a_value_that_contradicts_an_inherited_one_is_named_with_both_files() {
    let text = "name = \"small\"\nextends = \"h100x64\"\n[device]\nmemory = \"186 B\"\n";
    let error =
        parse("small.toml", text.as_bytes(), &mut |_| Err("no files".into())).unwrap_err().to_string();
    assert!(
        error.starts_with("small.toml: `device.reserve`: ") && error.contains("from h100x64:"),
        "{error}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Reading a mutated file gives a machine or a message with the file's name, and never panics.
    #[test]
    fn a_mutated_file_is_read_or_refused_with_its_name(
        which in 0usize..12,
        edits in prop::collection::vec((any::<u16>(), 0u8..6, any::<u8>(), any::<u16>()), 1..6),
    ) {
        let mut names: Vec<String> = builtin_names().map(String::from).collect();
        names.extend(["flat:8".to_string(), "cpu:3".to_string()]);
        let mut bytes = builtin_file(&names[which]).unwrap().into_bytes();
        for (at, kind, byte, other) in edits {
            let at = at as usize % bytes.len().max(1);
            let other = other as usize % bytes.len().max(1);
            match kind {
                0 => bytes[at] = byte,
                1 => { bytes.remove(at); }
                2 => bytes.insert(at, byte),
                3 => bytes.swap(at, other),
                4 => { let digits = b"9".repeat(1 + other % 30); bytes.splice(at..at, digits); }
                _ => { let (a, b) = (at.min(other), at.max(other)); bytes.drain(a..b.min(a + 40)); }
            }
            if bytes.is_empty() { bytes.push(b'#'); }
        }
        let read = parse("mutated.toml", &bytes, &mut |_| Err("no files".into()));
        match read {
            Ok(machine) => {
                prop_assert!(machine.devices() >= 1);
                let again = parse("again.toml", machine.to_toml().as_bytes(), &mut |_| Err("none".into()));
                prop_assert_eq!(again.unwrap(), machine);
            }
            Err(error) => {
                let message = error.to_string();
                prop_assert!(message.contains("mutated.toml") || message.contains("cannot read"), "{}", message);
            }
        }
    }
}

const MEASURED: &str = r#"
[[measured]]
level = "node"
collective = "all-gather"
members = 2
bytes = ["64 KiB", "1 MiB"]
times = ["50 us", "1.25 ms"]
"#;

#[test]
fn measured_collectives_are_read_printed_and_checked() {
    let text = format!("{GOOD}{MEASURED}");
    let machine = read(&text).unwrap();
    assert_eq!(read(&machine.to_toml()).unwrap(), machine);
    assert_ne!(machine.fingerprint(), read(GOOD).unwrap().fingerprint());
    let json = serde_json::to_string(&machine).unwrap();
    assert_eq!(serde_json::from_str::<Machine>(&json).unwrap(), machine);
    // Measurements of two nodes do not apply to one.
    assert!(machine.restrict(6).unwrap().spec().measured.is_empty());
    let cases = [
        ("level = \"node\"", "level = \"rack\"", "`measured[0].level`: there is no level `rack`"),
        ("all-gather", "gossip", "`measured[0].collective`: `gossip` is not one of all-reduce,"),
        ("members = 2", "members = 3", "`measured[0].members`: groups of 3 among 2 units"),
        ("\"1 MiB\"]", "\"1 KiB\"]", "`measured[0].bytes`: must be above zero and ascending"),
        ("\"1.25 ms\"]", "\"1 us\"]", "`measured[0].times`: larger messages cannot take less time"),
        ("\"1.25 ms\"]", "]", "`measured[0].times`: 1 times for 2 sizes"),
        ("\"1.25 ms\"]", "3]", "`measured[0].times`: must be strings with their units"),
    ];
    for (from, to, expected) in cases {
        let changed = MEASURED.replacen(from, to, 1);
        assert_ne!(changed, MEASURED);
        let message = read(&format!("{GOOD}{changed}")).expect_err(to).to_string();
        assert!(message.contains(expected) && message.starts_with("m.toml:"), "{message}");
    }
    let twice = read(&format!("{text}{MEASURED}")).expect_err("stated twice").to_string();
    assert!(twice.contains("all-gather among 2 is stated twice"), "{twice}");
}

#[test]
fn a_flat_machine_can_be_grouped() {
    let machine = builtin("flat:4x2").unwrap();
    let names: Vec<&str> = machine.mesh().axes().iter().map(|axis| axis.name.as_str()).collect();
    assert_eq!((machine.name(), machine.devices()), ("flat:8:4x2", 8));
    assert_eq!(names, ["group.0", "group.1", "gpu.0"]);
    assert_eq!(builtin("flat:8:4x2").unwrap(), machine);
    assert_eq!(builtin("flat:8").unwrap().grouped(4, 2).unwrap(), machine);
    let from_file = open_among("my.toml:3x2", &[("my.toml", &builtin_file("flat:12").unwrap())]).unwrap();
    assert_eq!(from_file.levels().iter().map(|level| level.count).collect::<Vec<_>>(), [3, 2]);
    assert_eq!(builtin("cpu:8:4x2").unwrap().levels().len(), 2, "cores share a memory");
    let refused = |name: &str| builtin(name).unwrap_err().to_string();
    assert!(refused("p100x16:4x4").contains("only a machine of one level"), "{}", refused("p100x16:4x4"));
    assert!(refused("flat:8:3x3").contains("ask for 1 to 8"), "{}", refused("flat:8:3x3"));
    assert!(refused("flat:0x2").contains("must be at least 1"), "{}", refused("flat:0x2"));
    assert!(refused("flat:4x").contains("flat:4x"), "{}", refused("flat:4x"));
    assert!(refused("flat:99999999999x99999999999").contains("flat:"), "no overflow");
}

#[test]
fn the_hosts_time_per_kernel_is_read_printed_and_checked() {
    let with = |value: &str| GOOD.replace("[device]", &format!("[device]\nhost_launch = {value}"));
    let machine = read(&with("\"23.5 us\"")).unwrap();
    assert_eq!(machine.spec().device.host_launch.unwrap().0, 23.5e-6);
    assert_eq!(read(&machine.to_toml()).unwrap(), machine);
    let json = serde_json::to_string(&machine).unwrap();
    assert_eq!(serde_json::from_str::<Machine>(&json).unwrap(), machine);
    assert_ne!(machine.fingerprint(), read(GOOD).unwrap().fingerprint());
    for wrong in ["23.5", "\"-1 us\"", "\"fast\""] {
        let error = read(&with(wrong)).unwrap_err().to_string();
        assert!(error.contains("host_launch"), "{error}");
    }
}
