//! Ctrl-C, once and twice: every command ends soon, with the best answer so far or with a message.
#![cfg(unix)]

use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

/// A model whose search takes most of a minute, even optimised.
const LONG: [&str; 6] = ["plan", "densenet121:batch=64", "--machine", "h100x64", "--untied", "--json"];

/// Starts the program and waits until it handles SIGINT, as long as it runs.
fn started(args: &[&str]) -> Child {
    let mut child = Command::new(env!("CARGO_BIN_EXE_shardwright"))
        .args(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let path = format!("/proc/{}/status", child.id());
    if !Path::new(&path).exists() {
        // No Linux: long enough for the handler to be there.
        std::thread::sleep(Duration::from_secs(3));
        return child;
    }
    // The mask of caught signals; SIGINT is the second.
    let caught = |status: String| {
        let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"))?.trim().to_owned();
        u64::from_str_radix(&mask, 16).ok()
    };
    while child.try_wait().unwrap().is_none() {
        if fs::read_to_string(&path).ok().and_then(caught).is_some_and(|mask| mask & 2 != 0) {
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child
}

fn interrupt(child: &Child) {
    let told = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(told.success());
}

/// What the program says that is interrupted so often, some milliseconds apart.
fn interrupted(args: &[&str], times: usize) -> Output {
    let mut child = started(args);
    // Long searches are on, or nearly so: an interrupt before them counts too.
    let wait = if args[0] == "plan" || args[0] == "compare" { 300 } else { 20 };
    std::thread::sleep(Duration::from_millis(wait));
    for _ in 0..times {
        if child.try_wait().unwrap().is_none() {
            interrupt(&child);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    child.wait_with_output().unwrap()
}

fn words(output: &Output) -> String {
    format!("{:?}: {}", output.status, String::from_utf8_lossy(&output.stderr))
}

#[test]
fn further_interrupts_within_a_second_do_not_lose_the_plan() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.json");
    let output = interrupted(&[&LONG[..], &["--time", "3600", "-o", path.to_str().unwrap()]].concat(), 3);
    assert!(output.status.success(), "{}", words(&output));
    let plan: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    assert_eq!(plan, serde_json::from_slice::<Value>(&output.stdout).unwrap());
}

#[test]
fn an_interrupted_comparison_has_all_its_rows() {
    let request =
        ["compare", "densenet121:batch=64", "--machine", "p100x16", "--solver", "auto,exact,data,owt"];
    for times in [1, 2] {
        let output = interrupted(&[&request[..], &["--untied", "--time", "3600", "--json"]].concat(), times);
        assert!(output.status.success(), "{}", words(&output));
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        let rows = answer["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 4);
        assert!(rows[0]["solver"] == "auto" && rows[0]["step_seconds"].is_f64(), "{answer}");
    }
}

#[test]
fn an_interrupted_search_gives_its_best_plan() {
    let output = interrupted(&[&LONG[..], &["--time", "3600"]].concat(), 1);
    assert!(output.status.success(), "{}", words(&output));
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    let objective = plan["objective"].as_i64().unwrap();
    assert!(plan["lower_bound"].as_i64().unwrap() <= objective);
    let step = plan["simulated"]["step_seconds"].as_f64().unwrap();
    for (name, baseline) in plan["baselines"].as_object().unwrap() {
        // The simulated step is what `auto` compares itself by.
        assert!(step <= baseline["step_seconds"].as_f64().unwrap(), "{name}");
    }
    let stopped =
        plan["warnings"].as_array().unwrap().iter().any(|w| w.as_str().unwrap().contains("stopped"));
    assert!(stopped && plan["proved_optimal"] == false, "{}", plan["warnings"]);
}

/// The search of `run` stops at the first interrupt, and its plan runs. Who presses Ctrl-C twice wants no run.
#[test]
fn one_interrupt_of_the_search_of_run_runs_its_best_plan_and_two_end_it() {
    // A search of minutes, and a step of well under a second.
    let request = ["run", "gpt:layers=8,hidden=32,heads=4,vocab=64,seq=16,batch=8", "--machine", "cpu:4"];
    let request = [&request[..], &["--untied", "--time", "3600", "--gap", "0", "--steps", "2"]].concat();
    let once = interrupted(&request, 1);
    assert_eq!(once.status.code(), Some(0), "{}", words(&once));
    assert!(String::from_utf8_lossy(&once.stdout).contains("\nserial "), "{}", words(&once));
    let child = started(&request);
    // Both are there before the program looks at the first: the search cannot have ended between them.
    let twice = format!("kill -INT {0}; kill -INT {0}", child.id());
    for _ in 0..2 {
        assert!(Command::new("sh").args(["-c", &twice]).status().is_ok());
    }
    let twice = child.wait_with_output().unwrap();
    assert_eq!(twice.status.code(), Some(130), "{}", words(&twice));
    assert!(twice.stdout.is_empty() && words(&twice).contains("stopped by Ctrl-C"), "{}", words(&twice));
}

#[test]
fn interrupted_solvers_of_networks_and_stages_give_their_best() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    // Nearly as many assignments as the exhaustive solver takes: seconds of work.
    let costs = vec![json!([1, 2]); 25];
    let network = json!({"problem": {"nodes": {"costs": costs}}});
    fs::write(path("network.json"), network.to_string()).unwrap();
    // Chains side by side: their suffixes are all combinations of suffixes of the chains.
    let neighbour = |there: bool, id: usize| if there { json!({id.to_string(): 0.0}) } else { json!({}) };
    let layer = |id: usize| {
        let (before, after) =
            (neighbour(!id.is_multiple_of(7), id.wrapping_sub(1)), neighbour(id % 7 != 6, id + 1));
        let first = json!([{"id": "x", "timePerSample": 1.0 + (id * 7 % 11) as f64, "parameterSize": 1.0,
            "memoryUsageA": 1.0, "memoryUsageB": 1.0, "syncTimeFw": before, "syncTimeBw": after}]);
        json!({"id": id, "TMPCs": {"1": first}})
    };
    let layers: Vec<Value> = (0..42).map(layer).collect();
    let edges: Vec<Value> = (0..42)
        .filter(|at| at % 7 != 6)
        .map(|at| json!({"sourceId": at, "destId": at + 1, "communicationCost": 1.0 + (at % 5) as f64}))
        .collect();
    let stages = json!({"maxDevices": 8, "maxMemoryPerDevice": 1000.0, "bandwidth": 5.0, "mbsInBatch": 64,
        "nodes": layers, "edges": edges});
    fs::write(path("stages.json"), stages.to_string()).unwrap();
    for times in [1, 2] {
        let solve = ["solve", &path("network.json"), "--solver", "brute", "--time", "3600", "--json"];
        let output = interrupted(&solve, times);
        assert_eq!(output.status.code(), Some(0), "{}", words(&output));
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(answer["choices"].as_array().map(Vec::len), Some(25), "{answer}");
        let output = interrupted(&["stages", &path("stages.json"), "--time", "3600", "--json"], times);
        // Stages where some were found, and the status that says so where none were.
        assert!(matches!(output.status.code(), Some(0 | 3)), "{}", words(&output));
        if output.status.success() {
            let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
            assert!(answer["objective"].as_f64() >= answer["lower_bound"].as_f64(), "{answer}");
        }
    }
}

/// Nothing is searched there: the program ends at once, and leaves no half of a file.
#[test]
fn an_interrupted_simulation_leaves_no_half_of_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let (plan, trace) = (path("plan.json"), path("trace.json"));
    let request = ["plan", "gpt:layers=4", "--machine", "h100x64:16", "--solver", "data", "-q", "-o", &plan];
    assert!(Command::new(env!("CARGO_BIN_EXE_shardwright")).args(request).output().unwrap().status.success());
    for times in [1, 2] {
        let output = {
            let mut command = Command::new(env!("CARGO_BIN_EXE_shardwright"));
            let child = command.args(["simulate", &plan, "--trace", &trace]);
            let mut child = child.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            std::thread::sleep(Duration::from_millis(20));
            for _ in 0..times {
                if child.try_wait().unwrap().is_none() {
                    interrupt(&child);
                }
            }
            child.wait().unwrap()
        };
        assert!(output.code().is_none_or(|status| status == 0), "{output:?}");
        if let Ok(text) = fs::read(&trace) {
            serde_json::from_slice::<Value>(&text).unwrap();
        }
    }
}
