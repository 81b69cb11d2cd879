//! `shardwright simulate`, as a user or a script meets it.

use crate::{json, refused, shardwright};
use serde_json::Value;
use shardwright_request::show_seconds;
use std::path::Path;

const MODEL: &str = "mlp:hidden=512,layers=3";

/// A plan of a model whose batch and optimizer are not in its name.
fn plan(path: &Path) -> Value {
    let path = path.to_str().unwrap();
    let args =
        ["plan", MODEL, "--machine", "flat:4", "--batch", "64", "--optimizer", "adam", "-o", path, "--json"];
    json(&args)
}

#[test]
fn a_plan_is_simulated_from_its_file_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.json");
    let made = plan(&path);
    let path = path.to_str().unwrap();
    let trace = folder.path().join("trace.json");
    let answer = json(&["simulate", path, "--json", "--trace", trace.to_str().unwrap()]);
    let step = answer["step_seconds"].as_f64().unwrap();
    assert!(step > 0.0 && step <= made["objective"].as_f64().unwrap() / 1e12);
    assert!(answer["tasks"].as_u64().unwrap() >= made["ops"].as_array().unwrap().len() as u64);
    assert!(
        answer["full_seconds"].as_f64().unwrap() > 0.0 && answer["delta_seconds"].as_f64().unwrap() > 0.0
    );
    assert_eq!(
        answer["step_seconds"], made["simulated"]["step_seconds"],
        "the plan has what the simulator says"
    );
    let devices = answer["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 4);
    for device in devices {
        let of = |key: &str| device[key].as_f64().unwrap();
        assert!((of("busy") + of("idle") - step).abs() < 1e-12);
        assert!(of("exposed_comm") <= of("idle") && of("peak_memory_bytes") > 0.0);
    }
    let trace: Value = serde_json::from_slice(&std::fs::read(trace).unwrap()).unwrap();
    assert!(trace["traceEvents"].as_array().unwrap().len() > 10);
    let text = String::from_utf8(shardwright(&["simulate", path]).stdout).unwrap();
    assert!(text.contains("critical path") && text.contains("0 (and 3 equal)"), "{text}");
}

#[test]
fn a_slow_device_makes_the_step_longer_and_assistants_never_much_longer_still() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.json");
    plan(&path);
    let path = path.to_str().unwrap();
    let step = |answer: &Value| answer["step_seconds"].as_f64().unwrap();
    let even = json(&["simulate", path, "--full", "--json"]);
    assert!(even.get("assisted").is_none());
    let slow = json(&["simulate", path, "--full", "--slow", "2:3", "--assist", "--json"]);
    assert!(step(&slow) > step(&even));
    assert!(step(&slow["assisted"]) <= 1.02 * step(&slow));
    let calm = json(&["simulate", path, "--full", "--assist", "--json"]);
    assert!(step(&calm) == step(&even) && step(&calm["assisted"]) <= 1.02 * step(&even));
    let off = ["simulate", path, "--full", "--slow", "1:2", "--assist", "--assist-window", "0", "--json"];
    let off = json(&off);
    assert_eq!(off["assisted"]["step_seconds"], off["step_seconds"]);
    let text = String::from_utf8(shardwright(&["simulate", path, "--assist"]).stdout).unwrap();
    assert!(text.contains("with assistants"), "{text}");
    // Whole layers may move for good.
    let placed = folder.path().join("placed.json");
    let placed = placed.to_str().unwrap();
    json(&["plan", MODEL, "--machine", "flat:4", "--solver", "place", "--time", "1", "-o", placed, "--json"]);
    let busiest = json(&["simulate", placed, "--full", "--json"])["devices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|d| d["busy"].as_f64().unwrap())
        .enumerate()
        .max_by(|a, b| a.1.total_cmp(&b.1))
        .unwrap()
        .0;
    let slow = format!("{busiest}:3");
    let helped = json(&["simulate", placed, "--full", "--slow", &slow, "--assist", "--json"]);
    assert!(
        helped["assisted"]["layers"].as_u64() > Some(0)
            && helped["assisted"]["layer_bytes"].as_u64() > Some(0)
    );
    assert!(step(&helped["assisted"]) < step(&helped));
    let stay = json(&[
        "simulate",
        placed,
        "--full",
        "--slow",
        &slow,
        "--assist",
        "--assist-migrations",
        "0",
        "--json",
    ]);
    assert_eq!(
        (&stay["assisted"]["layers"], &stay["assisted"]["layer_steps"]),
        (&Value::from(0), &Value::from(0))
    );
    for (slow, why) in
        [("4:2", "there is no device 4"), ("1:0", "is not DEVICE:FACTOR"), ("x", "is not DEVICE:FACTOR")]
    {
        refused(&["simulate", path, "--slow", slow], why);
    }
}

#[test]
fn delta_simulation_knows_micro_batches_and_leaves_engines_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.json");
    let path = path.to_str().unwrap();
    for options in [["--micro-batches", "8"], ["--engine", "torch-eager"]] {
        let model = ["plan", "mlp:batch=64,hidden=256,layers=3", "--machine", "flat:4", "-q", "-o", path];
        assert_eq!(shardwright(&[&model[..], &options[..]].concat()).status.code(), Some(0));
        // Fails if the two ways do not agree.
        assert!(json(&["simulate", path, "--delta", "--json"])["delta_seconds"].is_f64(), "{options:?}");
    }
}

#[test]
fn the_step_can_be_simulated_in_full_by_changes_and_on_shared_links() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.json");
    plan(&path);
    let path = path.to_str().unwrap();
    assert!(json(&["simulate", path, "--full", "--json"])["delta_seconds"].is_null());
    // Fails if the two ways do not agree.
    let delta = json(&["simulate", path, "--delta", "--json"]);
    assert!(delta["step_seconds"].as_f64().unwrap() > 0.0 && delta["delta_seconds"].is_f64());
    let shared = json(&["simulate", path, "--links", "shared", "--json"]);
    assert!(shared["step_seconds"].as_f64().unwrap() > 0.0);
    // Nothing overlaps on one core: computing and communicating add up.
    let core = json(&["simulate", path, "--links", "core", "--json"]);
    let of = |key: &str| core["devices"][0][key].as_f64().unwrap();
    let step = core["step_seconds"].as_f64().unwrap();
    assert!((of("busy") + of("exposed_comm") - step).abs() < 1e-12 && step >= of("busy"), "{core}");
    assert_eq!(shardwright(&["simulate", path, "--full", "--delta"]).status.code(), Some(2));
}

#[test]
fn without_overlap_the_step_is_the_plans_objective() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.json");
    let path = path.to_str().unwrap();
    let cases = [
        ("mlp:batch=64,hidden=512,layers=3", "p100x16", "auto"),
        ("lenet5:batch=32", "flat:4", "exact"),
        ("mlp:batch=64,hidden=512,layers=3", "p100x16:8", "megatron"),
        ("rnnlm:batch=64", "flat:2", "soybean"),
    ];
    for (model, machine, solver) in cases {
        let args = ["plan", model, "--machine", machine, "--solver", solver, "-o", path, "--json"];
        let made = json(&args);
        let answer = json(&["simulate", path, "--no-overlap", "--json"]);
        let objective = made["objective"].as_f64().unwrap() / 1e12;
        assert_eq!(answer["step_seconds"].as_f64(), Some(objective), "{model} on {machine} by {solver}");
        assert_eq!(answer["sum_seconds"], answer["step_seconds"]);
        assert!(answer["delta_seconds"].is_null());
        let step = show_seconds(objective);
        let text = String::from_utf8(shardwright(&["simulate", path, "--no-overlap"]).stdout).unwrap();
        assert!(text.contains(&format!("{step} per step\n  without overlap  {step}\n")), "{text}");
    }
    for other in [&["--delta"][..], &["--links", "fifo"], &["--assist"], &["--slow", "0:2"]] {
        refused(&[&["simulate", path, "--no-overlap"], other].concat(), "cannot be used with");
    }
}

#[test]
fn noise_is_repeatable() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.json");
    plan(&path);
    let path = path.to_str().unwrap();
    let step = |seed: &str| {
        json(&["simulate", path, "--perturb", "0.2", "--seed", seed, "--json"])["step_seconds"].clone()
    };
    assert_eq!(step("1"), step("1"));
    assert_ne!(step("1"), step("2"));
}

#[test]
fn plans_that_cannot_be_simulated_are_explained() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.json");
    let made = plan(&path);
    let check = |args: &[&str], part: &str| {
        let output = shardwright(args);
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {text}");
        assert!(output.stdout.is_empty() && text.contains(part), "{args:?}: {text}");
    };
    let changed = folder.path().join("changed.json");
    let changed_path = changed.to_str().unwrap();
    let write = |change: &dyn Fn(&mut Value)| {
        let mut plan = made.clone();
        change(&mut plan);
        std::fs::write(&changed, plan.to_string()).unwrap();
    };
    write(&|plan| plan["request"]["batch"] = Value::from(32));
    check(&["simulate", changed_path], "name the same model with the same options");
    write(&|plan| plan["request"]["machine"] = Value::from("flat:8"));
    check(&["simulate", changed_path], "it was made for machine flat:4");
    write(&|plan| plan["request"] = Value::Null);
    check(&["simulate", changed_path], "plan again");
    check(&["simulate", "missing.json"], "missing.json");
    check(&["simulate", "mlp"], "cannot read mlp: ");
    let folder = path.parent().unwrap().to_str().unwrap();
    check(&["simulate", folder], "is not a plan: `plan -o` writes them");
    check(&["simulate", path.to_str().unwrap(), "--perturb", "2"], "between 0 and 1");
    check(&["simulate", path.to_str().unwrap(), "--uneven"], "profile --workers N");
}

#[test]
fn uneven_devices_wait_for_the_slowest() {
    let folder = tempfile::tempdir().unwrap();
    let (path, costs) = (folder.path().join("plan.json"), folder.path().join("costs.json"));
    let mut made = plan(&path);
    // One of four took twice as long as the others.
    let text = r#"{"format":"shardwright-costs","version":1,"device":"flat","date":"2026-01-01","source":"s","method":"m",
        "paces":[[1000,1600,800,800,800]],"tables":[]}"#;
    std::fs::write(&costs, text).unwrap();
    made["request"]["costs"] = Value::from(costs.to_str().unwrap());
    std::fs::write(&path, made.to_string()).unwrap();
    let path = path.to_str().unwrap();
    let (even, uneven) =
        (json(&["simulate", path, "--json"]), json(&["simulate", path, "--uneven", "--json"]));
    let busy = |answer: &Value| -> Vec<f64> {
        answer["devices"].as_array().unwrap().iter().map(|device| device["busy"].as_f64().unwrap()).collect()
    };
    let usual = busy(&even)[0];
    let mut shares: Vec<f64> = busy(&uneven).iter().map(|busy| busy / usual).collect();
    shares.sort_by(f64::total_cmp);
    for (share, expected) in shares.iter().zip([0.8, 0.8, 0.8, 1.6]) {
        assert!((share - expected).abs() < 1e-3, "{shares:?}");
    }
    let step = |answer: &Value| answer["step_seconds"].as_f64().unwrap();
    assert!(step(&uneven) > 1.2 * step(&even), "{} and {}", step(&uneven), step(&even));
}
