//! `--engine`: ops as an engine's kernels run them.

use crate::{json, refused};
use serde_json::Value;

const MODEL: &str = "llama:layers=2,hidden=512,heads=8,kv_heads=8,ffn=1024,vocab=4096,seq=256,dtype=bf16";

fn planned(more: &[&str]) -> Value {
    let usual = [
        "plan",
        MODEL,
        "--batch",
        "8",
        "--machine",
        "2xh200",
        "--solver",
        "exact",
        "--recompute",
        "off",
        "--json",
    ];
    json(&[&usual[..], more].concat())
}

fn objective(plan: &Value) -> u64 {
    plan["objective"].as_u64().unwrap()
}

#[test]
fn compilers_fuse_what_op_by_op_engines_launch_one_by_one() {
    let (plain, eager, compiled) =
        (planned(&[]), planned(&["--engine", "torch-eager"]), planned(&["--engine", "torch-compile"]));
    assert!(objective(&compiled) < objective(&eager) && objective(&eager) < objective(&plain));
    // Such a small step is bound by the host: its kernels take less time than their launches, 37 us each.
    let step = |plan: &Value| plan["simulated"]["step_seconds"].as_f64().unwrap();
    assert!(step(&compiled) > 1e-3 && step(&compiled) < step(&eager), "{} {}", step(&compiled), step(&eager));
    assert!(step(&plain) < step(&compiled));
    // What never reaches memory is computed again: silu of the gate, in each layer.
    let again = |plan: &Value| plan["recompute"]["ops"].as_array().unwrap().len();
    assert_eq!((again(&plain), again(&eager)), (0, 0));
    let first = compiled["recompute"]["ops"][0].as_str().unwrap();
    assert!(again(&compiled) >= 2 && first.starts_with("blocks.0.mlp"), "{first}");
}

#[test]
fn all_accounts_of_a_plan_for_an_engine_agree() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan.json");
    let file = file.to_str().unwrap();
    let plan = planned(&["--engine", "torch-compile", "-o", file]);
    // The file keeps the engine. Without overlap, the simulated step is the search's objective.
    let step = json(&["simulate", file, "--json"]);
    let sum = step["sum_seconds"].as_f64().unwrap();
    assert_eq!((sum * 1e12).round() as u64, objective(&plan));
    // The host takes longer than the devices, in the plan and in the simulation.
    assert_eq!(step["step_seconds"], plan["simulated"]["step_seconds"]);
    assert!(step["step_seconds"].as_f64() > step["devices"][0]["busy"].as_f64());
    let kept: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert_eq!(kept["request"]["engine"], "torch-compile");
    assert_eq!(kept["proved_optimal"], true);
}

#[test]
fn an_unknown_engine_is_named_with_the_known_ones() {
    refused(
        &["plan", MODEL, "--engine", "torch"],
        "torch-eager, torch-compile, torchtitan, torchtitan-eager, megatron, megatron-core, megatron-bridge, xla or embedded",
    );
    refused(&["compare", MODEL, "--engine", "tvm"], "there is no engine `tvm`");
}
