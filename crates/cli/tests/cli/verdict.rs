//! What people read: the verdict in words, lines that fit a terminal, and outputs that are refused before the work.

use crate::{json, refused, shardwright};

const MODEL: &str = "mlp:batch=64,hidden=512,layers=3";

fn text(args: &[&str]) -> String {
    let output = shardwright(args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn lines_fit_eighty_columns() {
    let long = "gpt:layers=2,hidden=256,heads=4,vocab=512,seq=64,batch=16";
    let requests = [
        vec!["plan", long, "--machine", "p100x16", "--untied", "-v", "--time", "2"],
        vec!["plan", long, "--machine", "p100x16", "--solver", "place", "--time", "2"],
        vec!["plan", MODEL, "--machine", "flat:4", "--solver", "soybean", "-v"],
        vec!["compare", MODEL, "--machine", "flat:4", "--solver", "data,fsdp,model,exact", "-q"],
    ];
    let narrow = |text: &str| {
        let longest = text.lines().max_by_key(|line| line.chars().count()).unwrap();
        assert!(longest.chars().count() <= 80, "{} columns: {longest}", longest.chars().count());
    };
    requests.iter().for_each(|request| narrow(&text(request)));
    let folder = tempfile::tempdir().unwrap();
    let plan = folder.path().join("plan.json").to_str().unwrap().to_string();
    narrow(&text(&["plan", long, "--machine", "p100x16", "--solver", "megatron", "-o", &plan, "-q"]));
    let listed =
        "models|models gpt|models llama3-8b|machines|solvers|ops|--help|plan --help|run --help|stages --help";
    listed.split('|').for_each(|line| narrow(&text(&line.split(' ').collect::<Vec<_>>())));
    let counts = ["--devices", "1,2,4,8", "--pareto", "2", "--time", "1", "-v"];
    let compared =
        ["compare", MODEL, "--machine", "flat:8", "--solver", "auto,data,model,owt,fsdp,hsdp,zero1"];
    narrow(&text(&[&compared[..], &counts].concat()));
    narrow(&text(&["simulate", &plan, "--delta"]));
    narrow(&text(&["explain", &plan, "--time", "1"]));
    narrow(&text(&["explain", &plan, "blocks.0.mlp.fc1", "--time", "1"]));
}

#[test]
fn the_verdict_names_what_every_axis_does() {
    let plan = |solver| json(&["plan", MODEL, "--machine", "p100x16", "--solver", solver, "--json"]);
    let data = plan("data");
    assert_eq!(data["parallelism"]["recipe"], "data");
    assert_eq!(data["parallelism"]["words"], "data parallelism over 4 nodes × 4 GPUs");
    let summary = data["summary"].as_str().unwrap();
    assert!(summary.contains(": data: data parallelism over 4 nodes × 4 GPUs: "), "{summary}");
    let fsdp = plan("fsdp");
    assert_eq!(fsdp["parallelism"]["recipe"], "fsdp");
    assert!(fsdp["parallelism"]["words"].as_str().unwrap().ends_with("; weights sharded"), "{fsdp}");
    let megatron = plan("megatron");
    let words = megatron["parallelism"]["words"].as_str().unwrap();
    assert!(words.starts_with("data parallelism over 4 nodes × "), "{words}");
    assert!(words.ends_with("tensor parallelism over 4 GPUs"), "{words}");
    for axis in megatron["parallelism"]["axes"].as_array().unwrap() {
        let shares = axis["roles"].as_array().unwrap().iter().map(|role| role["share"].as_f64().unwrap());
        assert!((shares.sum::<f64>() - 1.0).abs() < 1e-9, "{axis}");
    }
}

#[test]
fn computing_and_exposed_communication_add_up_to_the_step() {
    let plan = json(&["plan", MODEL, "--machine", "p100x16", "--json"]);
    let of = |key: &str| plan["simulated"][key].as_f64().unwrap();
    let sum = of("compute_seconds") + of("exposed_comm_seconds");
    assert!((sum / of("step_seconds") - 1.0).abs() < 1e-9, "{plan}");
}

#[test]
fn a_plan_on_standard_output_is_all_that_is_there() {
    let piped = text(&["plan", MODEL, "--machine", "flat:2", "-o", "-"]);
    let plan: serde_json::Value = serde_json::from_str(&piped).unwrap();
    assert_eq!(plan["devices"], 2);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan.json");
    std::fs::write(&file, &piped).unwrap();
    assert!(text(&["report", file.to_str().unwrap(), "-o", "-"]).starts_with("<!doctype html>"));
    let page = text(&["plan", MODEL, "--machine", "flat:2", "--report", "-"]);
    assert!(page.starts_with("<!doctype html>") && page.trim_end().ends_with("</html>"));
    let compared = ["compare", MODEL, "--machine", "flat:2", "--solver", "data,owt", "--report", "-"];
    assert!(text(&compared).starts_with("<!doctype html>"));
    refused(&["plan", MODEL, "--machine", "flat:2", "-o", "-", "--report", "-"], "only one of the outputs");
}

#[test]
fn outputs_that_cannot_be_written_are_refused_before_the_work() {
    // A model that does not exist would be refused too, but later.
    refused(
        &["plan", "nothing", "-o", "/no/such/folder/plan.json"],
        "cannot write /no/such/folder/plan.json",
    );
    refused(&["plan", "nothing", "--report", "/"], "it is a folder");
    refused(&["compare", "nothing", "--report", "/no/such/folder/c.html"], "cannot write");
    refused(&["run", "nothing", "--trace", "/no/such/folder/t.json"], "cannot write");
    refused(&["simulate", "nothing.json", "--trace", "/no/such/folder/t.json"], "cannot write");
    refused(&["network", "nothing", "-o", "/no/such/folder/n.json"], "cannot write");
}

#[test]
fn built_in_models_take_the_options_of_plan() {
    let flops = |args: &[&str]| {
        json(&[&["models", "gpt:layers=1,hidden=64,heads=2,vocab=128", "--json"], args].concat())
            ["flops_per_step"]
            .as_u64()
            .unwrap()
    };
    assert!(flops(&["--batch", "8", "--seq", "32"]) > flops(&["--batch", "4", "--seq", "32"]));
    assert!(flops(&["--batch", "4", "--seq", "64"]) > flops(&["--batch", "4", "--seq", "32"]));
}

#[test]
fn more_devices_than_cores_are_mentioned_at_once() {
    let output =
        shardwright(&["run", MODEL, "--machine", "flat:64", "--solver", "data", "--steps", "1", "-q"]);
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(told.contains("64 devices share"), "{told}");
}
