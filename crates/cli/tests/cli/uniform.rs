//! `plan --as`, `plan --uniform` and exports to trainers.

use crate::{json, refused, shardwright};
use serde_json::Value;

const MODEL: &str = "gpt:layers=8,hidden=256,heads=4,seq=128,vocab=512,dtype=mixed";

fn plan<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["plan", MODEL, "--machine", "8xa100", "--batch", "32"], more].concat()
}

#[test]
fn a_trainers_plan_is_priced_and_written_as_its_options() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.json").display().to_string();
    let degrees = "tp=2,pp=2,vp=2,mbs=2,zero=1,sp,recompute=selective";
    let made = json(&plan(&["--as", degrees, "--json", "-o", &path]));
    assert_eq!(made["pipeline"]["schedule"], "interleaved");
    assert_eq!(made["pipeline"]["stages"].as_array().unwrap().len(), 4);
    assert_eq!(made["uniform"]["dp"], 2);
    assert_eq!(made["micro_batches"], 8);
    assert_eq!(made["uniform"]["blocks"], serde_json::json!([2, 2, 2, 2]));
    let step = made["simulated"]["step_seconds"].as_f64().unwrap();
    assert!(step > 0.0 && made["throughput"]["tokens_per_second"].as_f64().unwrap() > 0.0);
    let bound = made["overlap"]["lower_bound_seconds"].as_f64().unwrap();
    assert!(bound <= step, "{bound} against {step}");
    let notes = made["warnings"].to_string();
    assert!(
        notes.contains("without stages (tp=2,pp=1,dp=4") && notes.contains("with 4 stages (tp=2,pp=4"),
        "{notes}"
    );
    let text = |to: &str| {
        let output = shardwright(&["export", &path, "--to", to]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(text("megatron").contains("--num-virtual-stages-per-pipeline-rank 2"));
    assert!(text("megatron").contains("--global-batch-size 32\n--seq-length 128"));
    assert!(text("torchtitan").contains("pipeline_parallel_schedule = \"Interleaved1F1B\""));
    assert!(text("torchtitan").contains("pipeline_parallel_first_stage_less_layers = 0"));
    assert!(text("deepspeed").contains("\"train_batch_size\": 32"));
    assert!(text("maxtext").contains("ici_pipeline_parallelism: 2"));
    assert!(text("nemo").contains("trainer.strategy.sequence_parallel=True"));
    // A plan that is not uniform has no such options.
    let other = folder.path().join("other.json").display().to_string();
    assert!(shardwright(&plan(&["--solver", "model", "-q", "-o", &other])).status.success());
    assert_eq!(shardwright(&["export", &other, "--to", "megatron"]).status.code(), Some(1));
}

#[test]
fn the_best_uniform_plan_is_no_slower_than_a_stated_one() {
    let best = json(&plan(&["--uniform", "--json"]));
    let step = |plan: &serde_json::Value| plan["simulated"]["step_seconds"].as_f64().unwrap();
    for degrees in ["tp=1,mbs=2,zero=1", "tp=2,pp=2,mbs=1,zero=1,sp", "pp=4,mbs=1,zero=1,recompute=full"] {
        let stated = json(&plan(&["--as", degrees, "--json"]));
        assert!(step(&best) <= step(&stated) * (1.0 + 1e-9), "{degrees}");
    }
    let expert = best["baselines"]["expert"]["step_seconds"].as_f64().unwrap();
    assert!((expert / step(&best) - 1.0).abs() < 1e-9);
}

#[test]
fn a_planned_pipeline_is_never_worse_than_the_best_uniform_plan() {
    let step = |plan: &serde_json::Value| plan["simulated"]["step_seconds"].as_f64().unwrap();
    for (blocks, batch, machine) in [("8", "32", "8xa100"), ("6", "16", "8xl4"), ("5", "64", "4xh100")] {
        let model = format!("gpt:layers={blocks},hidden=256,heads=4,seq=128,vocab=2048,dtype=mixed");
        let plan = |way: &[&str]| {
            json(&[&["plan", &model, "--machine", machine, "--batch", batch, "--json"], way].concat())
        };
        let (auto, uniform) = (plan(&["--pipeline", "auto", "--time", "20"]), plan(&["--uniform"]));
        let expert = auto["baselines"]["expert"]["step_seconds"].as_f64().unwrap();
        assert!(step(&auto) <= expert * (1.0 + 1e-9), "{model}: {} against {expert}", step(&auto));
        // One bound on all of them: pipelines or none, any number of micro-batches.
        let bound = |plan: &serde_json::Value| plan["overlap"]["lower_bound_seconds"].as_f64().unwrap();
        assert!(bound(&auto) > 0.0 && bound(&auto) <= bound(&uniform) * (1.0 + 1e-9), "{model}");
        let stated = ["tp=1,mbs=1", "tp=2,mbs=2,zero=1", "tp=1,mbs=1,zero=3,recompute=full"];
        for degrees in stated {
            let stated = step(&plan(&["--as", degrees]));
            assert!(bound(&auto) <= stated && step(&uniform) <= stated * (1.0 + 1e-9), "{model}: {degrees}");
        }
    }
}

#[test]
fn degrees_that_do_not_suit_end_with_status_2() {
    refused(&plan(&["--as", "tp=3,pp=5"]), "tp=3 × pp=5 = 15 does not divide");
    refused(&plan(&["--as", "tp=8,mbs=1"]), "tp=8 does not divide `blocks.0.attn.q`");
    refused(&plan(&["--as", "tensor=8"]), "unknown key `tensor`");
    let tight = shardwright(&plan(&["--as", "tp=1,mbs=1", "--memory", "1MiB"]));
    assert_eq!(tight.status.code(), Some(1), "{}", String::from_utf8_lossy(&tight.stderr));
}

#[test]
fn a_uniform_plan_that_was_found_is_written_down_however_late_it_is() {
    let model = "gpt:layers=8,hidden=64,heads=4,vocab=256,seq=32,batch=16";
    for time in ["0", "0.02", "0.1", "0.5"] {
        let output =
            shardwright(&["plan", model, "--machine", "8xh100", "--uniform", "--time", time, "--json"]);
        let text = String::from_utf8_lossy(&output.stderr);
        match output.status.code() {
            Some(0) => assert!(serde_json::from_slice::<Value>(&output.stdout).is_ok(), "{time}: {text}"),
            // No plan was priced in that time.
            code => assert!(code == Some(3) && text.contains("--time"), "{time}: {code:?}: {text}"),
        }
    }
}
