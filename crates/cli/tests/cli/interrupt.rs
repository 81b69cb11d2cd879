//! Ctrl-C: the best plan so far is what the user gets.

use serde_json::Value;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A model whose search takes most of a minute, even optimised.
const LONG: [&str; 6] = ["plan", "densenet121:batch=64", "--machine", "h100x64", "--untied", "--json"];

#[cfg(unix)]
fn interrupt(child: &std::process::Child) {
    let told = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(told.success());
}

#[cfg(unix)]
#[test]
fn further_interrupts_within_a_second_do_not_lose_the_plan() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.json");
    let child = Command::new(env!("CARGO_BIN_EXE_shardwright"))
        .args(LONG)
        .args(["--time", "3600", "-o", path.to_str().unwrap()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    for _ in 0..3 {
        interrupt(&child);
        std::thread::sleep(Duration::from_millis(50));
    }
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{:?}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    let plan: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(plan, serde_json::from_slice::<Value>(&output.stdout).unwrap());
}

#[cfg(unix)]
#[test]
fn an_interrupted_comparison_has_all_its_rows() {
    let child = Command::new(env!("CARGO_BIN_EXE_shardwright"))
        .args(["compare", "densenet121:batch=64", "--machine", "p100x16", "--solver", "auto,exact,data,owt"])
        .args(["--untied", "--time", "3600", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(700));
    for _ in 0..2 {
        interrupt(&child);
        std::thread::sleep(Duration::from_millis(100));
    }
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{:?}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = answer["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4);
    assert!(rows[0]["solver"] == "auto" && rows[0]["step_seconds"].is_f64(), "{answer}");
}

#[cfg(unix)]
#[test]
fn an_interrupted_search_gives_its_best_plan() {
    let child = Command::new(env!("CARGO_BIN_EXE_shardwright"))
        .args(LONG)
        .args(["--time", "3600"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Long enough for the handler to be there.
    std::thread::sleep(Duration::from_millis(700));
    let told = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    let start = Instant::now();
    let output = child.wait_with_output().unwrap();
    println!("ended {:?} after the signal", start.elapsed());
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(told.success() && output.status.success(), "{:?}: {text}", output.status);
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
