//! `shardwright machine probe` and `profile`: what they write is what other commands read.

use crate::{json, refused, shardwright};
use serde_json::Value;
use std::path::Path;

/// As much of an op's time as any op of any machine takes: from a nanosecond to a minute.
fn plausible(seconds: f64) -> bool {
    (1e-9..60.0).contains(&seconds)
}

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap_or_else(|| panic!("no {key} in {value}"))
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn a_probed_machine_can_be_planned_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("here.toml");
    let path = path.to_str().unwrap();
    let probed = json(&["machine", "probe", "--workers", "2", "--json", "-o", path]);
    let workers = probed["workers"].as_array().unwrap();
    assert_eq!(workers.iter().map(|w| w["workers"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2]);
    for rates in workers {
        for (key, more, less) in [
            ("f32_flops_per_second", 1e7, 1e14),
            ("f64_flops_per_second", 1e7, 1e14),
            ("memory_bytes_per_second", 1e7, 1e13),
        ] {
            assert!((more..less).contains(&number(rates, key)), "{key}: {rates}");
        }
    }
    let collectives = probed["collectives"].as_array().unwrap();
    for kind in ["all-reduce", "reduce-scatter", "all-gather", "all-to-all"] {
        let of_kind: Vec<&Value> = collectives.iter().filter(|c| c["collective"] == kind).collect();
        assert!(of_kind.len() >= 4, "{kind} in {collectives:?}");
        assert!(of_kind.iter().all(|c| plausible(number(c, "seconds")) && c["members"] == 2), "{of_kind:?}");
        let (first, last) = (of_kind[0], of_kind[of_kind.len() - 1]);
        assert!(number(first, "bytes") < number(last, "bytes"));
        assert!(number(first, "seconds") < number(last, "seconds"), "{kind}: {of_kind:?}");
    }
    let plan = json(&["plan", "mlp:hidden=256,layers=2", "--machine", path, "--json"]);
    assert_eq!(plan["devices"], 2);
    assert!(plausible(number(&plan["simulated"], "step_seconds")));
}

#[test]
fn a_plans_ops_are_measured_on_cores_that_differ() {
    let folder = tempfile::tempdir().unwrap();
    let [before, costs, after] =
        ["before.json", "costs.json", "after.json"].map(|name| folder.path().join(name));
    let [from, to, again] = [&before, &costs, &after].map(|path| path.to_str().unwrap());
    let planned = ["plan", "mlp:batch=16,hidden=64,layers=2", "--machine", "cpu:2", "-q", "-o"];
    assert!(shardwright(&[&planned[..], &[from]].concat()).status.success());
    let said = json(&["profile", "-m", from, "--workers", "2", "--time", "120", "-o", to, "--json"]);
    assert!(
        number(&said, "written") >= 5.0 && number(&said, "written") <= number(&said, "workloads"),
        "{said}"
    );
    assert!(number(&said, "slowest") >= 0.0, "{said}");
    let file = read(&costs);
    assert_eq!(file["device"], "cpu");
    // Microseconds, then what either core took.
    let moments = file["paces"].as_array().unwrap();
    assert!(!moments.is_empty() && moments.iter().all(|moment| moment.as_array().unwrap().len() == 3));
    for table in file["tables"].as_array().unwrap() {
        for row in table["rows"].as_array().unwrap() {
            let nanoseconds = row.as_array().unwrap().last().unwrap().as_f64().unwrap();
            assert!(plausible(nanoseconds * 1e-9), "{row} of {}", table["class"]);
        }
    }
    // A plan with these costs knows how uneven the cores were.
    assert!(shardwright(&[&planned[..], &[again, "--costs", to]].concat()).status.success());
    let uneven = json(&["simulate", again, "--uneven", "--json"]);
    assert!(plausible(number(&uneven, "step_seconds")));
    // One core has nobody to differ from.
    let alone = json(&["profile", "-m", from, "--time", "60", "-o", to, "--json"]);
    assert!(alone["slowest"].is_null() && read(&costs)["paces"].is_null());
}

#[test]
fn what_there_is_to_measure_can_be_listed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("list.json");
    let name = path.to_str().unwrap();
    json(&[
        "profile",
        "-m",
        "mlp:layers=1",
        "--list",
        "--devices",
        "2",
        "--per-class",
        "3",
        "-o",
        name,
        "--json",
    ]);
    let list = read(&path);
    assert_eq!(list["format"], "shardwright-workloads");
    let tables = list["tables"].as_array().unwrap();
    assert!(tables.iter().any(|t| t["class"] == "gemm"), "{tables:?}");
    assert!(tables.iter().all(|t| (1..=3).contains(&t["rows"].as_array().unwrap().len())));
    for (args, why) in [
        (["--workers", "0"], "from 1 to 1024"),
        (["--devices", "5000"], "from 1 to 4096"),
        (["--time", "0"], "must be positive"),
        (["--model", "lenet6"], "lenet6"),
    ] {
        refused(&["profile", "-o", name, args[0], args[1]], why);
    }
    refused(&["machine", "probe", "--workers", "1025"], "from 1 to 1024");
}
