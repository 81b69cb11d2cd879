//! `shardwright plan`, `compare` and `network`, as a user or a script meets them.

use crate::{json, refused, shardwright};
use serde_json::Value;
use shardwright_frontend::zoo::{BuildOptions, build};

const MODEL: &str = "mlp:batch=64,hidden=512,layers=3";

#[test]
fn a_plan_has_everything_that_scripts_rely_on() {
    let plan = json(&["plan", MODEL, "--machine", "flat:4", "--solver", "exact", "--json"]);
    assert_eq!((&plan["model"], &plan["devices"]), (&Value::from(MODEL), &Value::from(4)));
    assert_eq!((&plan["solver"], &plan["proved_optimal"]), (&Value::from("exact"), &Value::from(true)));
    assert_eq!(plan["optimised"], "sum");
    assert_eq!(plan["objective"], plan["lower_bound"]);
    assert_eq!(plan["gap"], 0.0);
    let times = &plan["simulated"];
    let of = |key: &str| times[key].as_f64().unwrap();
    let sum = of("compute_seconds") + of("exposed_comm_seconds");
    assert!((of("step_seconds") - sum).abs() < 1e-9 && sum > 0.0);
    for key in ["machine", "search_seconds", "peak_memory_bytes", "traffic_bytes", "model_hash", "space"] {
        assert!(!plan[key].is_null(), "{key}");
    }
    for baseline in ["data", "model", "owt"] {
        let cost = &plan["baselines"][baseline];
        assert!(cost["objective"].as_i64() >= plan["objective"].as_i64(), "{baseline}");
        assert!(cost["step_seconds"].as_f64().unwrap() > 0.0);
    }
    let axes = plan["axes"].as_array().unwrap().len();
    for op in plan["ops"].as_array().unwrap() {
        assert!(op["name"].is_string() && op["kind"].is_string() && op["config"].is_string());
        assert_eq!(op["axes"].as_array().unwrap().len(), axes);
        assert!(op["degrees"].as_object().unwrap().values().all(|d| d.as_u64().unwrap() > 1));
    }
    assert!(plan["warnings"][0].as_str().unwrap().contains("no overlap"));
}

#[test]
fn plans_for_the_simulated_step_are_never_slower_than_what_everybody_knows() {
    let plan = |solver: &str| {
        let args =
            ["plan", MODEL, "--machine", "p100x16", "--solver", solver, "--proposals", "500", "--json"];
        json(&args)
    };
    let step = |of: &Value| of["step_seconds"].as_f64().unwrap();
    let exact = plan("exact");
    for solver in ["auto", "mcmc"] {
        let plan = plan(solver);
        let own = step(&plan["simulated"]);
        for (name, baseline) in plan["baselines"].as_object().unwrap() {
            assert!(own <= step(baseline), "{solver} {name}");
        }
        assert!(own <= step(&exact["simulated"]), "{solver}");
        let (objective, bound) = (plan["objective"].as_i64().unwrap(), plan["lower_bound"].as_i64().unwrap());
        assert!(
            bound <= exact["objective"].as_i64().unwrap()
                && exact["objective"].as_i64().unwrap() <= objective
        );
        assert_eq!(plan["proved_optimal"], bound == objective, "{solver}");
    }
    let again = plan("mcmc");
    assert_eq!(again["optimised"], "simulated");
    assert_eq!(again["ops"], plan("mcmc")["ops"], "the same seed, the same plan");
}

#[test]
fn whole_layers_are_placed_at_least_as_well_as_by_anybodys_first_idea() {
    let model = "nmt:batch=16,seq=3,hidden=256,vocab=512,unroll=3";
    let args = ["plan", model, "--machine", "p100x16:4", "--solver", "place", "--proposals", "200"];
    let plan = json(&[&args[..], &["--json"]].concat());
    let rows = plan["placements"].as_array().unwrap();
    assert_eq!(rows[0]["name"], "place");
    for row in rows {
        assert!(rows[0]["step_seconds"].as_f64() <= row["step_seconds"].as_f64(), "{row}");
    }
    assert_eq!(rows[0]["step_seconds"], plan["simulated"]["step_seconds"]);
    let text = String::from_utf8(shardwright(&[&args[..], &["--balance", "0.5"]].concat()).stdout).unwrap();
    assert!(text.contains("round-robin") && text.contains("times its share"), "{text}");
    refused(&[&args[..], &["--balance=-1"]].concat(), "-1 is not a share");
}

#[test]
fn the_written_network_has_the_plans_objective() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("n.json.gz");
    let path = path.to_str().unwrap();
    let output = shardwright(&["network", MODEL, "--machine", "flat:4", "-o", path]);
    assert!(output.status.success() && output.stdout.is_empty());
    let solved = json(&["solve", path, "--json"]);
    let plan = json(&["plan", MODEL, "--machine", "flat:4", "--solver", "exact", "--json"]);
    assert_eq!(solved["cost"], plan["objective"]);
    let cfn = shardwright(&["network", MODEL, "--machine", "flat:4", "--format", "cfn"]);
    assert!(String::from_utf8(cfn.stdout).unwrap().contains("\"problem\""));
}

#[test]
fn strategies_stand_side_by_side() {
    let rows = json(&["compare", MODEL, "--machine", "flat:4", "--json"]);
    let rows = rows["rows"].as_array().unwrap();
    let row = |name: &str| rows.iter().find(|r| r["solver"] == name).unwrap();
    assert_eq!(row("data")["speedup_over_data"], 1.0);
    let exact = row("exact")["objective"].as_i64().unwrap();
    for other in rows {
        // Tied layers cannot store weights as fsdp does.
        assert!(other["objective"].as_i64().unwrap() >= exact || other["solver"] == "fsdp", "{other}");
        assert!(other["traffic_bytes"].is_u64() && other["peak_memory_bytes"].is_u64());
    }
    assert_eq!(row("pase")["objective"], row("exact")["objective"]);
}

#[test]
fn untied_plans_beat_fsdp_under_the_limit_that_it_needs_and_name_the_smallest_limit() {
    let model = [MODEL, "--machine", "flat:4", "--optimizer", "adam", "--untied"];
    let with = |command: &str, more: &[&str]| {
        let mut args = vec![command];
        args.extend(model);
        args.extend(more);
        args.iter().map(|arg| arg.to_string()).collect::<Vec<String>>()
    };
    let run = |args: Vec<String>| shardwright(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let fsdp: Value =
        serde_json::from_slice(&run(with("plan", &["--solver", "fsdp", "--json"])).stdout).unwrap();
    let limit = format!("{}B", fsdp["peak_memory_bytes"]);
    let tight: Value =
        serde_json::from_slice(&run(with("plan", &["--memory", &limit, "--json"])).stdout).unwrap();
    assert!(tight["objective"].as_i64() <= fsdp["objective"].as_i64());
    assert!(tight["peak_memory_bytes"].as_u64() <= fsdp["peak_memory_bytes"].as_u64());
    assert_eq!(tight["space"]["untied"], true);
    let output = run(with("plan", &["--memory", "1kB"]));
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(told.contains("the smallest limit that one keeps is"), "{told}");
}

#[test]
fn a_plan_is_written_to_a_file_and_told() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.json");
    let args = ["plan", MODEL, "--machine", "flat:2", "--solver", "exact", "-o", path.to_str().unwrap()];
    let text = String::from_utf8(shardwright(&args).stdout).unwrap();
    assert!(text.contains("proved") && text.contains("plan written to"), "{text}");
    let plan: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    assert_eq!(plan["format_version"], 1);
}

#[test]
fn requests_that_make_no_sense_are_explained() {
    refused(&["plan", MODEL, "--solver", "best"], "there is no strategy `best`; there are auto, exact");
    refused(&["plan", MODEL, "--machine", "flat:0"], "flat:0");
    refused(&["plan", MODEL, "--machine", "flat:-3"], "flat:-3");
    refused(&["plan", MODEL, "--machine", "p100x16:0"], "ask for 1 to 16");
    refused(&["plan", MODEL, "--machine", "p100x16:17"], "ask for 1 to 16");
    refused(&["plan", "mlp", "--batch", "0"], "batch=0");
    refused(&["plan", "mlp", "--batch", "99999999999999"], "batch takes a whole number from 1 to");
    refused(&["plan", "nothing.pb"], "only .onnx, .mlir, .stablehlo and graphs in .json");
    refused(&["plan", "nothing.onnx"], "cannot read nothing.onnx");
    refused(&["plan", "missing.json"], "missing.json");
    refused(&["plan", MODEL, "--machine", "p100x16", "--costs", "h200"], "H200");
    refused(&["plan", MODEL, "--optimizer", "lbfgs"], "sgd, momentum or adam");
    refused(&["plan", MODEL, "--time", "nan"], "nan is not a time that can be waited");
    refused(&["plan", MODEL, "--memory", "16"], "has no unit");
    refused(&["plan", MODEL, "--fix", "nobody=n2"], "no layer has such a name");
    refused(&["plan", MODEL, "--machine", "flat:4", "--fix", "fc1=z4"], "cannot be split so; it can be");
    refused(&["plan", MODEL, "--machine", "flat:4", "--fix", "fc1=n3"], "cannot be split so; it can be");
}

#[test]
fn an_op_that_nobody_knows_is_named() {
    let graph = build(MODEL, &BuildOptions::default()).unwrap();
    let text = graph.to_json();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("graph.json");
    let write = |text: String| std::fs::write(&path, text).unwrap();
    let path = path.to_str().unwrap();
    write(text.clone());
    assert_eq!(json(&["plan", path, "--machine", "flat:4", "--json"])["proved_optimal"], true);
    assert!(text.contains("\"relu\""));
    write(text.replace("\"relu\"", "\"frobnicate\""));
    refused(&["plan", path, "--machine", "flat:4"], "graph.json");
    refused(&["plan", path, "--machine", "flat:4"], "frobnicate");
}

#[test]
fn more_devices_than_elements_is_planned_and_said() {
    let plan =
        json(&["plan", "mlp:batch=2,input=4,hidden=2,layers=1,classes=2", "--machine", "flat:64", "--json"]);
    let told = plan["warnings"].as_array().unwrap().iter().any(|w| {
        let text = w.as_str().unwrap();
        text.contains("no layer can be cut into 64 equal parts") && text.contains("is the most")
    });
    assert!(told, "{}", plan["warnings"]);
    for op in plan["ops"].as_array().unwrap() {
        let parts: u64 = op["degrees"].as_object().unwrap().values().map(|d| d.as_u64().unwrap()).product();
        assert!(parts <= 16, "{op}");
    }
}

#[test]
fn a_quiet_comparison_is_only_its_table() {
    let output = shardwright(&["compare", MODEL, "--machine", "flat:2", "-q"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.starts_with("solver"), "{text}");
    assert!(text.lines().skip(1).all(|line| !line.starts_with("note")) && text.lines().count() > 8, "{text}");
}

#[test]
fn a_batch_that_does_not_divide_is_planned_with_what_does() {
    let plan = json(&["plan", "mlp:batch=63,hidden=512,layers=2", "--machine", "flat:4", "--json"]);
    for op in plan["ops"].as_array().unwrap() {
        assert!(op["degrees"].get("n").is_none(), "63 samples cannot be halved: {op}");
    }
}

#[test]
fn the_bare_command_plans_vgg() {
    let folder = tempfile::tempdir().unwrap();
    let output = assert_cmd::cargo::cargo_bin_cmd!("shardwright").current_dir(&folder).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success());
    assert!(
        text.contains("The report is in shardwright-vgg16.html")
            && folder.path().join("shardwright-vgg16.html").exists()
    );
    assert!(text.contains("vgg16 on p100x16 (16 devices)") && text.contains("proved"), "{text}");
    assert!(text.contains("conv1_2") && text.contains("n16") && text.contains("Next:"), "{text}");
}

#[test]
fn a_memory_limit_is_kept_or_the_answer_says_what_would_do() {
    let plan =
        |limit: &str| shardwright(&["plan", MODEL, "--machine", "flat:4", "--memory", limit, "--json"]);
    let loose = plan("1GiB");
    assert!(loose.status.success());
    let loose: Value = serde_json::from_slice(&loose.stdout).unwrap();
    assert_eq!(loose["memory_limit_bytes"], 1 << 30);
    let none = plan("1kB");
    assert_eq!(none.status.code(), Some(1));
    let text = String::from_utf8(none.stderr).unwrap();
    assert!(none.stdout.is_empty() && text.contains("the smallest limit that one keeps is"), "{text}");
}

#[test]
fn toulbar2_finds_the_same_optimum_where_it_is_installed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("n.cfn");
    let path = path.to_str().unwrap();
    let written = shardwright(&["network", MODEL, "--machine", "flat:4", "--format", "cfn", "-o", path]);
    assert!(written.status.success());
    let Ok(run) = std::process::Command::new("toulbar2").arg(path).output() else {
        println!("skipped: toulbar2 is not installed");
        return;
    };
    let text = String::from_utf8_lossy(&run.stdout).into_owned();
    let optimum = text.lines().find_map(|line| line.strip_prefix("Optimum: ")?.split(' ').next());
    let plan = json(&["plan", MODEL, "--machine", "flat:4", "--solver", "exact", "--json"]);
    assert_eq!(optimum, Some(plan["objective"].to_string().as_str()), "{text}");
}
