//! `shardwright run`, as a user or a script meets it.

use crate::{json, refused, shardwright};
use serde_json::Value;

const MODEL: &str = "mlp:batch=16,hidden=32,layers=3";

#[test]
fn a_run_has_everything_that_scripts_rely_on() {
    let run = json(&["run", MODEL, "--machine", "cpu:4", "--solver", "model", "--steps", "3", "--json"]);
    assert_eq!((&run["devices"], &run["steps"]), (&Value::from(4), &Value::from(3)));
    assert!(run["max_relative_error"].as_f64().unwrap() < 1e-4);
    for key in ["measured_step_seconds", "predicted_step_seconds", "serial_step_seconds", "tolerance"] {
        assert!(run[key].as_f64().unwrap() > 0.0, "{key}");
    }
    assert!(run["prediction_error"].is_f64() && run["bitwise_steps"].as_u64().unwrap() <= 3);
    let losses: Vec<f64> = run["loss"].as_array().unwrap().iter().map(|l| l.as_f64().unwrap()).collect();
    assert!(losses.len() == 3 && losses[2] < losses[0], "{losses:?}");
    assert_eq!(run["device_times"].as_array().unwrap().len(), 4);
}

#[test]
fn a_written_plan_runs_as_the_model_that_it_was_made_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let (plan, trace) = (path("plan.json"), path("trace.json"));
    let options = ["--machine", "flat:2", "--batch", "8", "--optimizer", "adam"];
    let planned = shardwright(&[&["plan", MODEL, "-o", &plan], &options[..]].concat());
    assert!(planned.status.success());
    let run = json(&["run", &plan, "--steps", "2", "--trace", &trace, "--json"]);
    let direct = json(&[&["run", MODEL, "--steps", "2", "--json"], &options[..]].concat());
    assert_eq!(run["loss"], direct["loss"]);
    assert_eq!(run["devices"], 2);

    let trace: Value = serde_json::from_slice(&std::fs::read(&trace).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let ran = |pid: u64| {
        let mine = events.iter().filter(move |e| e["pid"] == pid && e["ph"] == "X");
        mine.filter(|e| e["args"]["kind"] == "contract" && e["dur"].as_f64().unwrap() > 0.0).count()
    };
    assert!(ran(0) > 0 && ran(0) == ran(1), "both devices compute every product");

    // A plan that was changed, or is of something else, is refused with the remedy.
    let mut changed: Value = serde_json::from_slice(&std::fs::read(&plan).unwrap()).unwrap();
    changed["request"]["batch"] = Value::from(4);
    std::fs::write(&plan, changed.to_string()).unwrap();
    let refused = shardwright(&["run", &plan]);
    assert_eq!(refused.status.code(), Some(2));
    let message = String::from_utf8(refused.stderr).unwrap();
    assert!(message.contains("plan again"), "{message}");
}

/// A limit below the memory of the fastest plan: 110 MB of about 118.
#[test]
fn a_memory_limit_is_kept_by_plan_simulation_and_run() {
    let folder = tempfile::tempdir().unwrap();
    let plan = folder.path().join("plan.json").to_str().unwrap().to_string();
    let model = "mlp:batch=2048,input=1024,hidden=1024,layers=6,classes=1000";
    let options = ["--machine", "cpu:2", "--optimizer", "adam", "--solver", "exact", "--memory", "110MB"];
    let planned = shardwright(&[&["plan", model, "-o", &plan], &options[..]].concat());
    assert!(planned.status.success(), "{planned:?}");
    let written: Value = serde_json::from_slice(&std::fs::read(&plan).unwrap()).unwrap();
    let peak = written["peak_memory_bytes"].as_u64().unwrap();
    assert!(peak <= 110_000_000);
    let simulated = json(&["simulate", &plan, "--json"]);
    let run = json(&["run", &plan, "--steps", "2", "--no-verify", "--json"]);
    let devices = simulated["devices"].as_array().unwrap().iter();
    for (simulated, run) in devices.zip(run["device_times"].as_array().unwrap()) {
        let simulated = simulated["peak_memory_bytes"].as_u64().unwrap();
        let measured = run["memory_bytes"].as_u64().unwrap();
        assert!(peak >= simulated && simulated >= measured, "{peak} {simulated} {measured}");
        assert!(measured * 11 / 10 >= peak, "{peak} {measured}");
    }
}

#[test]
fn a_slow_device_is_helped_and_the_numbers_stay() {
    let options = ["run", MODEL, "--machine", "cpu:2", "--solver", "data", "--steps", "10", "--json"];
    let alone = json(&options);
    let helped = json(&[&options[..], &["--slow", "1:40", "--assist"]].concat());
    assert_eq!(helped["loss"], alone["loss"]);
    assert!(alone["moved_tasks_per_step"].is_null());
    assert!(helped["moved_tasks_per_step"].as_f64().unwrap() > 0.0, "{helped}");
    refused(&[&options[..], &["--slow", "2:1.5"]].concat(), "there is no device 2");
    refused(&[&options[..], &["--slow", "1:0.5"]].concat(), "the factor must be at least 1");
    refused(&[&options[..], &["--slow", "1"]].concat(), "such as 2:1.5");
    refused(&[&options[..], &["--assist", "--processes", "2"]].concat(), "--processes");
}

#[test]
fn what_a_run_measured_is_what_the_next_plan_goes_by() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let (measured, plan) = (path("measured.json"), path("plan.json"));
    let options = ["--machine", "cpu:2", "--solver", "data"];
    let run = shardwright(&[&["run", MODEL, "--steps", "3", "--record", &measured], &options[..]].concat());
    assert!(String::from_utf8(run.stdout).unwrap().contains("--refine"));
    let sources = |more: &[&str]| {
        let plan = json(&[&["plan", MODEL, "--json"], &options[..], more].concat());
        (plan["costs"].clone(), plan["simulated"]["compute_seconds"].as_f64().unwrap())
    };
    let (before, after) = (sources(&[]), sources(&["--refine", &measured, "-o", &plan]));
    assert_ne!(before, after);
    assert!(
        before.0.to_string().contains("roofline") && after.0.to_string().contains("measured"),
        "{after:?}"
    );
    // The plan knows where its costs come from.
    assert!(shardwright(&["run", &plan, "--steps", "2"]).status.success());
    refused(&["plan", MODEL, "--machine", "p100x16", "--refine", &measured], "measured on `cpu`");
}

#[test]
fn people_see_times_and_the_verdict() {
    let output = shardwright(&["run", MODEL, "--machine", "cpu:2", "--solver", "data", "--steps", "2"]);
    let text = String::from_utf8(output.stdout).unwrap();
    for part in ["device", "computing", "waiting", "measured", "predicted", "serial ", "difference ", "loss "]
    {
        assert!(text.contains(part), "{part} in {text}");
    }
    let quick = shardwright(&["run", MODEL, "--no-verify", "--steps", "1", "-q"]);
    assert!(String::from_utf8(quick.stdout).unwrap().contains("not compared"));
    assert_eq!(shardwright(&["run", MODEL, "--steps", "0"]).status.code(), Some(2));
}

/// A product that is split, a convolution whose windows reach into other processes, and a transformer.
#[test]
fn processes_compute_what_threads_compute() {
    let cnn = ["lenet5:batch=4,image=16", "--solver", "exact", "--fix", "conv1=h4"];
    let gpt = ["gpt:batch=4,layers=1,hidden=8,heads=4,vocab=12,seq=4", "--solver", "megatron"];
    let cases: [(&[&str], &[&str]); 3] =
        [(&[MODEL, "--solver", "model"], &["2", "3", "4"]), (&cnn, &["2", "4"]), (&gpt, &["3"])];
    for (model, counts) in cases {
        let args = [&["run"], model, &["--machine", "flat:4", "--steps", "3", "--json"]].concat();
        let threads = json(&args);
        for processes in counts {
            let run = json(&[&args[..], &["--processes", processes]].concat());
            assert_eq!(run["loss"], threads["loss"], "{} in {processes} processes", model[0]);
            assert_eq!(run["max_relative_error"], threads["max_relative_error"]);
            assert_eq!(run["device_times"].as_array().unwrap().len(), 4);
        }
    }
    let refused = shardwright(&["run", MODEL, "--machine", "flat:2", "--processes", "3"]);
    assert_eq!(refused.status.code(), Some(2));
}

/// A process that is killed ends the run, which names it; the others do not stay behind.
#[cfg(target_os = "linux")]
#[test]
fn a_killed_process_ends_the_run_and_is_named() {
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};
    let mut parent = Command::new(assert_cmd::cargo::cargo_bin("shardwright"))
        .args(["run", "gpt:batch=4,layers=1,hidden=8,heads=4,vocab=12,seq=4"])
        .args(["--machine", "flat:4", "--solver", "megatron"])
        .args(["--steps", "1000000", "--processes", "2", "--no-verify"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let listed = format!("/proc/{0}/task/{0}/children", parent.id());
    let deadline = Instant::now() + Duration::from_secs(60);
    // Long enough after they started that they have met and train.
    let children: Vec<String> = loop {
        let text = std::fs::read_to_string(&listed).unwrap_or_default();
        let children: Vec<String> = text.split_whitespace().map(String::from).collect();
        if children.len() == 2 {
            break children;
        }
        assert!(Instant::now() < deadline, "the processes did not start");
        std::thread::sleep(Duration::from_millis(20));
    };
    std::thread::sleep(Duration::from_millis(1500));
    assert!(Command::new("kill").args(["-9", &children[1]]).status().unwrap().success());
    while parent.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            parent.kill().unwrap();
            panic!("the run hangs");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = parent.wait_with_output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("process 1 (devices 2 to 3) died: signal: 9"), "{message}");
    for child in children {
        assert!(!std::path::Path::new(&format!("/proc/{child}")).exists(), "process {child} stayed behind");
    }
}
