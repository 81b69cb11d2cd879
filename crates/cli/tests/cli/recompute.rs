//! `--recompute`: what fits only with recomputation is planned, simulated, explained and run with it.

use crate::{json, refused, shardwright};

const MODEL: &str = "gpt:batch=8,layers=4,hidden=32,heads=4,vocab=64,seq=32,dropout=0.1";

fn plan(options: &[&str]) -> serde_json::Value {
    let args = ["plan", MODEL, "--machine", "flat:2", "--json", "--solver", "exact"];
    json(&[&args[..], options].concat())
}

#[test]
fn policies_trade_time_for_memory_and_auto_takes_what_fits() {
    let [off, selective, full] = ["off", "selective", "full"].map(|policy| plan(&["--recompute", policy]));
    let memory = |plan: &serde_json::Value| plan["peak_memory_bytes"].as_u64().unwrap();
    let time = |plan: &serde_json::Value| plan["objective"].as_i64().unwrap();
    assert!(memory(&full) < memory(&off) && memory(&selective) < memory(&off));
    assert!(time(&full) > time(&selective) && time(&selective) > time(&off));
    assert_eq!(
        (&off["recompute"]["policy"], off["recompute"]["ops"].as_array().unwrap().len()),
        (&"off".into(), 0)
    );
    assert_eq!(full["recompute"]["policy"], "full");
    // No limit binds: nothing is recomputed.
    assert_eq!(plan(&[])["recompute"]["policy"], "off");
    // Less than any plan that keeps everything takes: something is recomputed, and the plan fits.
    let refusal = shardwright(&[
        "plan",
        MODEL,
        "--machine",
        "flat:2",
        "--solver",
        "exact",
        "--recompute",
        "off",
        "--memory",
        "1kB",
    ]);
    assert_eq!(refusal.status.code(), Some(1));
    let limit = (memory(&full) * 102 / 100).to_string();
    let fitting = plan(&["--memory", &format!("{limit}B")]);
    assert!(memory(&fitting) <= limit.parse().unwrap());
    // The bound on any plan's step is that of all plans that may fit.
    let bound = |plan: &serde_json::Value| plan["overlap"]["lower_bound_seconds"].as_f64().unwrap();
    assert_ne!(fitting["recompute"]["policy"], "off");
    assert!(bound(&fitting) >= bound(&off));
    assert!(bound(&fitting) <= fitting["simulated"]["step_seconds"].as_f64().unwrap());
}

#[test]
fn a_plan_file_with_recomputation_is_simulated_explained_and_run() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan.json").display().to_string();
    let page = folder.path().join("page.html").display().to_string();
    let written = plan(&["--recompute", "full", "-o", &file]);
    let clones = written["ops"].as_array().unwrap().iter().filter(|op| op["recomputes"].is_string()).count();
    assert_eq!(clones, written["recompute"]["ops"].as_array().unwrap().len());
    assert!(clones > 20, "{clones}");
    let simulated = json(&["simulate", &file, "--json"]);
    assert_eq!(simulated["step_seconds"], written["simulated"]["step_seconds"]);
    let run = json(&["run", &file, "--steps", "2", "--json"]);
    assert_eq!(run["agrees"], true, "{run}");
    for args in [&["explain", &file, "blocks.1.mlp.fc1.recompute"][..], &["report", &file, "-o", &page]] {
        let output = shardwright(args);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let off = folder.path().join("off.json").display().to_string();
    plan(&["--recompute", "off", "-o", &off]);
    refused(&["diff", &file, &off], "recompute different ops (full and off)");
}

#[test]
fn recomputed_ops_are_chosen_one_by_one_written_down_and_run() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan.json").display().to_string();
    let free = plan(&["--recompute", "off", "--memory", "none"])["peak_memory_bytes"].as_u64().unwrap();
    let limit = format!("{}B", free * 3 / 4);
    let by = |policy: &str| plan(&["--memory", &limit, "--recompute-policy", policy, "-o", &file]);
    let (blocks, ops) = (by("blocks"), by("ops"));
    assert_eq!(ops["fits"], true);
    let step = |plan: &serde_json::Value| plan["simulated"]["step_seconds"].as_f64().unwrap();
    assert!(step(&ops) <= step(&blocks), "{} and {}", step(&ops), step(&blocks));
    let simulated = json(&["simulate", &file, "--json"]);
    assert_eq!(simulated["step_seconds"], ops["simulated"]["step_seconds"]);
    let run = json(&["run", &file, "--steps", "2", "--json"]);
    assert_eq!(run["agrees"], true, "{run}");
}

#[test]
fn ops_that_cannot_be_chosen_are_refused() {
    let ops = |more: &[&'static str], expected: &str| {
        refused(&[&["plan", MODEL, "--recompute-policy", "ops"], more].concat(), expected);
    };
    ops(&["--recompute", "full"], "leave one of them out");
    ops(&["--inference"], "no backward pass");
    ops(&["--pipeline", "2", "--machine", "cpu:4"], "without a pipeline");
    ops(&["--engine", "torch-compile"], "chooses what it recomputes");
    refused(&["plan", MODEL, "--recompute-policy", "op"], "choose blocks or ops");
}

#[test]
fn policies_that_name_no_op_are_refused() {
    refused(&["plan", MODEL, "--recompute", "ful"], "choose off, auto, elementwise, selective or full");
    refused(&["plan", MODEL, "--inference", "--recompute", "full"], "--recompute full: no backward op");
    refused(&["plan", MODEL, "--inference", "--recompute", "full"], "use --recompute off or auto");
}
