//! Pipelines from the command line: planned, simulated, explained, reported and run.

use crate::{json, refused, shardwright};

fn succeeds(arguments: &[&str]) -> String {
    let done = shardwright(arguments);
    assert!(done.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

const MODELS: [(&str, &str); 3] = [
    ("mlp:batch=16,input=32,hidden=64,layers=5", "1f1b"),
    ("gpt:batch=16,layers=4,hidden=16,heads=4,vocab=32,seq=8", "interleaved"),
    ("lenet5:batch=16,image=12,width=0.5,classes=4", "zb-h1"),
];

#[test]
fn pipelines_are_planned_simulated_explained_reported_and_run() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let (file, page, trace) = (at("plan.json"), at("page.html"), at("trace.json"));
    for (model, schedule) in MODELS {
        let plan = ["plan", model, "--machine", "cpu:4", "--solver", "data", "--micro-batches", "4"];
        let with = ["--pipeline", "2", "--schedule", schedule, "-o", &file];
        let text = succeeds(&[&plan[..], &with].concat());
        // Groups with several stages have one line each.
        let named = if schedule == "interleaved" { "stages 1, 3" } else { "stage 1" };
        assert!(text.contains(named), "{text}");
        let written: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        let pipeline = &written["pipeline"];
        assert_eq!(pipeline["schedule"], schedule);
        let stages = pipeline["stages"].as_array().unwrap();
        assert_eq!(stages.len(), if schedule == "interleaved" { 4 } else { 2 });
        assert!(
            stages.iter().all(|stage| stage["devices"] == 2 && stage["peak_memory_bytes"].as_u64() > Some(0))
        );
        // What is simulated is what was planned, within its memory.
        let simulated = json(&["simulate", &file, "--trace", &trace, "--json"]);
        assert_eq!(simulated["step_seconds"], written["simulated"]["step_seconds"], "{model}");
        assert_eq!(simulated["bubble"], pipeline["bubble"], "{model}");
        for device in simulated["devices"].as_array().unwrap() {
            assert!(device["peak_memory_bytes"].as_u64() <= written["peak_memory_bytes"].as_u64());
        }
        let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(&trace).unwrap()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        assert!(events.iter().any(|event| event["args"]["stage"] == 1 && event["args"]["micro_batch"] == 3));
        let checked = json(&["run", &file, "--steps", "2", "--json"]);
        assert_eq!(checked["agrees"], true, "{model}: {checked}");
        let checked = json(&["run", &file, "--steps", "2", "--processes", "2", "--json"]);
        assert_eq!(checked["agrees"], true, "{model} in processes: {checked}");
        succeeds(&["explain", &file]);
        succeeds(&["report", &file, "-o", &page]);
    }
}

#[test]
fn pipelines_are_compared_with_plans_without_stages() {
    let folder = tempfile::tempdir().unwrap();
    let [whole, staged] =
        ["whole.json", "staged.json"].map(|name| folder.path().join(name).to_str().unwrap().to_string());
    let plan = ["plan", MODELS[0].0, "--machine", "flat:4", "--solver", "data", "--micro-batches", "4", "-o"];
    succeeds(&[&plan[..], &[&whole]].concat());
    succeeds(&[&plan[..], &[&staged, "--pipeline", "2", "--schedule", "gpipe"]].concat());
    let text = succeeds(&["diff", &whole, &staged]);
    assert!(text.contains("none -> 2 stages, gpipe"), "{text}");
}

#[test]
fn recomputed_blocks_stay_on_their_stages() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan.json");
    let file = file.to_str().unwrap();
    let plan = ["plan", MODELS[1].0, "--machine", "cpu:4", "--solver", "megatron", "--recompute", "full"];
    succeeds(&[&plan[..], &["--pipeline", "2", "--micro-batches", "4", "-o", file]].concat());
    let checked = json(&["run", file, "--steps", "2", "--json"]);
    assert_eq!(checked["agrees"], true, "{checked}");
}

/// A change of a plan's pipeline.
type Change = fn(&mut serde_json::Value);

#[test]
fn plans_with_broken_pipelines_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan.json");
    let name = file.to_str().unwrap();
    let plan = ["plan", MODELS[0].0, "--machine", "flat:4", "--solver", "data", "--pipeline", "2"];
    succeeds(&[&plan[..], &["--micro-batches", "4", "-o", name]].concat());
    let good: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let breaks: [(&str, Change); 6] = [
        ("unknown schedule", |p| p["schedule"] = "2f2b".into()),
        ("has 1 chunks per device, not 7", |p| p["chunks"] = 7.into()),
        ("is over axis `rack`", |p| p["axes"] = serde_json::json!(["rack"])),
        ("is not in the model", |p| p["stages"][0]["layers"][0] = "nothing".into()),
        ("has no stage for layer", |p| p["stages"][1]["layers"] = serde_json::json!([])),
        ("is not pinned to the devices of its stage", |p| {
            let moved = p["stages"][0]["layers"].as_array_mut().unwrap().pop().unwrap();
            p["stages"][1]["layers"].as_array_mut().unwrap().push(moved);
        }),
    ];
    for (expected, change) in breaks {
        let mut broken = good.clone();
        change(&mut broken["pipeline"]);
        std::fs::write(&file, broken.to_string()).unwrap();
        refused(&["simulate", name], expected);
    }
}

#[test]
fn pipelines_that_cannot_be_are_refused() {
    let plan = ["plan", MODELS[0].0, "--machine", "flat:4", "--solver", "data"];
    let with = |more: &[&'static str], expected| refused(&[&plan[..], more].concat(), expected);
    with(&["--pipeline", "3", "--micro-batches", "4"], "only for 2, 4");
    with(&["--pipeline", "x"], "no number of groups");
    with(&["--pipeline", "2", "--schedule", "2f2b"], "there is no schedule `2f2b`; choose");
    with(&["--pipeline", "2", "--schedule", "interleved:3"], "did you mean `interleaved`?");
    with(&["--pipeline", "4", "--schedule", "interleaved:2", "--micro-batches", "2"], "multiple of 4");
    with(&["--pipeline", "4", "--schedule", "interleaved:9", "--micro-batches", "4"], "stages at most");
    with(&["--pipeline", "2", "--micro-batches", "4", "--spmd"], "have no stages");
}
