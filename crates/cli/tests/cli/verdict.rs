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
    let other = folder.path().join("other.json").to_str().unwrap().to_string();
    narrow(&text(&["plan", long, "--machine", "p100x16", "--solver", "fsdp", "-o", &other, "-q"]));
    narrow(&text(&["diff", &plan, &other]));
    narrow(&text(&[
        "plan",
        "densenet121",
        "--machine",
        "p100x16:4",
        "--solver",
        "owt",
        "--memory",
        "1GB",
        "-q",
    ]));
    let listed = "models|models gpt|models gpt:layers=96,hidden=1536,heads=16,seq=512|models llama3-8b|machines|solvers|ops|--help|plan --help|run --help|stages --help";
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
fn equal_changes_of_equal_blocks_are_one_row() {
    let folder = tempfile::tempdir().unwrap();
    let model = "gpt:layers=6,hidden=64,heads=4,vocab=128,seq=16,batch=8";
    let plan = |solver: &str| {
        let path = folder.path().join(format!("{solver}.json")).to_str().unwrap().to_string();
        text(&["plan", model, "--machine", "flat:4", "--solver", solver, "-q", "-o", &path]);
        path
    };
    let (data, megatron) = (plan("data"), plan("megatron"));
    let shown = text(&["diff", &data, &megatron]);
    let changes = json(&["diff", &data, &megatron, "--json"])["changes"].as_array().unwrap().clone();
    let row = shown.lines().find(|line| line.starts_with("blocks.*.mlp.fc1 (6x)")).expect(&shown);
    let own = changes.iter().filter(|change| change["op"].as_str().unwrap().ends_with("mlp.fc1"));
    let ops: u64 = own.map(|change| change["ops"].as_u64().unwrap()).sum();
    assert_eq!(row.split_whitespace().nth(4).unwrap(), ops.to_string(), "{row}");
    assert!(shown.lines().count() < changes.len(), "{shown}");
}

#[test]
fn the_best_uniform_plan_is_a_row_of_every_count_that_has_one() {
    let model = "gpt:layers=4,hidden=64,heads=4,vocab=128,seq=16,batch=8";
    let counts = ["--solver", "auto,data,fsdp", "--devices", "1,2,4", "--time", "5", "-q"];
    let shown = text(&[&["compare", model, "--machine", "flat:4"][..], &counts].concat());
    let rows = |name: &str| -> Vec<Vec<&str>> {
        let own = shown
            .lines()
            .map(|line| line.split("  ").map(str::trim).filter(|word| !word.is_empty()).collect());
        own.filter(|words: &Vec<&str>| words.first() == Some(&name)).collect()
    };
    // In the table, and in that of counts, where both end with the step on all devices.
    let [table, counts] = &rows("expert")[..] else { panic!("{shown}") };
    assert_eq!((counts[1], counts.last()), ("-", Some(&table[1])), "{shown}");
    let [table, counts] = &rows("fsdp")[..] else { panic!("{shown}") };
    assert_eq!(counts.last(), Some(&table[1]), "{shown}");
}

#[test]
fn a_comparison_announces_all_of_its_searches() {
    let told = |args: &[&str]| {
        let all = [&["compare", MODEL, "--machine", "flat:4", "--time", "1", "--solver"], args].concat();
        let output = shardwright(&all);
        assert!(output.status.success());
        let told = String::from_utf8(output.stderr).unwrap();
        told.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert!(told(&["data,exact"]).starts_with("one search: at most 1 s (--time)"));
    let all = told(&["exact,data,mcmc", "--devices", "1,2,4", "--pareto", "1"]);
    let expected =
        "9 searches: at least 3 s, since mcmc uses its time up, and at most 9 s (--time); rows come";
    assert!(all.starts_with(expected), "{all}");
    let walks = told(&["data,mcmc", "--proposals", "10"]);
    assert!(walks.starts_with("one search: at most 1 s"), "{walks}");
    assert_eq!(told(&["data,owt"]), "");
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
