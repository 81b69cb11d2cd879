//! `plan --refine` with traces of PyTorch's and JAX's profilers.

use crate::{refused, shardwright};
use std::fs;
use std::path::Path;

const TORCH: &[u8] = include_bytes!("../../../trace/tests/traces/torch-cpu.json.gz");
/// The model of the trace: 32 samples, 64 inputs, 128 hidden, 10 classes.
const MODEL: &str = "mlp:batch=32,input=64,hidden=128,layers=1";

fn trace(folder: &Path) -> String {
    let path = folder.join("step.json.gz");
    fs::write(&path, TORCH).unwrap();
    path.to_str().unwrap().into()
}

#[test]
fn a_trace_says_what_was_wrong_and_its_costs_predict_the_measured_time() {
    let folder = tempfile::tempdir().unwrap();
    let (trace, plan) = (trace(folder.path()), folder.path().join("plan.json"));
    let plan = plan.to_str().unwrap();
    let args = ["plan", MODEL, "--machine", "cpu:1", "--refine", &trace, "-o", plan];
    let done = shardwright(&args);
    let said = String::from_utf8(done.stdout).unwrap();
    assert!(done.status.success(), "{said}{}", String::from_utf8_lossy(&done.stderr));
    assert!(said.contains("2 steps of 1 device; 100% of the time matched"), "{said}");
    assert!(said.contains("matrix products") && said.contains("memory-bound ops"), "{said}");
    assert!(said.contains("most wrong: "), "{said}");
    let costs = folder.path().join("step.costs.json");
    assert!(said.contains(&format!("costs written to {}", costs.display())), "{said}");
    // The new plan predicts what the trace measured, so nothing is left to learn.
    let costs = costs.to_str().unwrap();
    let again = shardwright(&["plan", MODEL, "--machine", "cpu:1", "--costs", costs, "--refine", &trace]);
    let again = String::from_utf8(again.stdout).unwrap();
    assert!(again.contains("no assumption was wrong") || again.contains("waited for the host"), "{again}");
    assert!(again.contains(" 1.00x"), "{again}");
    // The plan opens again with its costs, and other models and engines are refused them.
    assert!(shardwright(&["simulate", plan]).status.success());
    let with = |model: &str, more: &[&str]| {
        refused(&[&["plan", model, "--machine", "cpu:1", "--costs", costs], more].concat(), "learn")
    };
    with("mlp:batch=32,input=64,hidden=64,layers=1", &[]);
    with(MODEL, &["--engine", "torch-eager"]);
    let old = fs::read_to_string(costs).unwrap().replace("\"release\":\"", "\"release\":\"0.0.");
    fs::write(costs, old).unwrap();
    with(MODEL, &[]);
}

#[test]
fn a_trace_of_a_gpu_is_matched_by_shapes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("gpu.json.gz");
    fs::write(&path, include_bytes!("../../../trace/tests/traces/torch-gpu.json.gz")).unwrap();
    let model = "gpt:layers=2,hidden=512,heads=8,vocab=8192,seq=512,dtype=bf16,batch=8";
    let more = ["--machine", "1xh200", "--costs", "h200", "--engine", "torch-eager", "--refine"];
    let done = shardwright(&[&["plan", model], &more[..], &[path.to_str().unwrap(), "-q"]].concat());
    let said = String::from_utf8(done.stdout).unwrap();
    assert!(done.status.success(), "{said}{}", String::from_utf8_lossy(&done.stderr));
    assert!(said.contains("2 steps of 1 device; 100% of the time matched"), "{said}");
    let factor = |kind: &str| -> f64 {
        let line = said.lines().find(|line| line.starts_with(kind)).unwrap();
        line.rsplit(' ').next().unwrap().trim_end_matches('x').parse().unwrap()
    };
    assert!((0.6..1.6).contains(&factor("matrix products")), "{said}");
    assert!((0.4..2.5).contains(&factor("attention")), "{said}");
}

#[test]
fn wrong_traces_are_refused_with_place_and_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let good = trace(folder.path());
    let file = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_string()
    };
    let on_one = |model: &str, trace: &str, expected: &str| {
        refused(&["plan", model, "--machine", "cpu:1", "--refine", trace], expected);
    };
    on_one("mlp:batch=32,input=256,hidden=512,layers=1", &good, "trace of another model");
    on_one(MODEL, &file("cut.json.gz", &TORCH[..TORCH.len() / 2]), "cut off");
    on_one(MODEL, &file("old.json", br#"{"schemaVersion": 9, "traceEvents": []}"#), "schema version 9");
    let negative = br#"{"schemaVersion": 1, "traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": -1}]}"#;
    on_one(MODEL, &file("negative.json", negative), "event 0 (`aten::mm`): a duration of -1");
    on_one(MODEL, &file("cut.json", br#"{"format": "shardwright-costs", "version": 1"#), "cut.json");
    refused(&["plan", MODEL, "--machine", "cpu:2", "--refine", &good], "--ran plan.json");
    refused(&["plan", MODEL, "--machine", "cpu:1", "--ran", "p.json"], "--refine");
}
