//! `shardwright plan`, `compare` and `network`, as a user or a script meets them.

use crate::{json, refused, shardwright};
use serde_json::Value;
use shardwright_zoo::{BuildOptions, build};

const MODEL: &str = "mlp:batch=64,hidden=512,layers=3";

#[test]
fn a_plan_answers_in_tokens_memory_and_money() {
    let model = "gpt:layers=1,hidden=64,heads=4,seq=16,vocab=256";
    let plan =
        json(&["plan", model, "--machine", "8xl4", "--batch", "32", "--price", "3.6/gpu-hour", "--json"]);
    let of = |value: &Value| value.as_f64().unwrap();
    let (rates, step) = (&plan["throughput"], of(&plan["simulated"]["step_seconds"]));
    let close = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-9, "{a} {b}");
    close(of(&rates["tokens_per_second"]), 32.0 * 16.0 / step);
    close(of(&rates["tokens_per_second_per_device"]), 4.0 * 16.0 / step);
    close(of(&rates["samples_per_second"]), 32.0 / step);
    // Eight devices at 0.001 per second.
    close(of(&rates["cost_per_million_tokens"]), 0.008 * step / 512.0 * 1e6);
    assert!((0.0..1.0).contains(&of(&rates["mfu"])));
    // 24 GB less 1 GiB.
    assert_eq!(plan["memory_limit_bytes"], 24_000_000_000_u64 - (1 << 30));
    assert_eq!((&plan["fits"], &plan["baselines"]["data"]["fits"]), (&Value::from(true), &Value::from(true)));
    let summary = plan["summary"].as_str().unwrap();
    assert!(summary.contains("tokens/s per device") && summary.contains("of 22.93 GB"), "{summary}");
    // Images are counted in samples, and without a limit a plan may say that it does not fit.
    let images = json(&["plan", "lenet5", "--machine", "flat:2", "--batch", "64", "--price", "1", "--json"]);
    assert!(images["throughput"]["tokens_per_second"].is_null());
    assert!(of(&images["throughput"]["cost_per_million_samples"]) > 0.0);
    assert!(images["memory_limit_bytes"].is_null());
}

#[test]
fn sharded_weights_of_mixed_precision_are_stored_in_shards() {
    let model = "mlp:dtype=mixed,batch=8,hidden=1024,layers=4";
    let peak = |solver: &str| {
        let plan = json(&[
            "plan",
            model,
            "--machine",
            "flat:8",
            "--untied",
            "--optimizer",
            "adam",
            "--solver",
            solver,
            "--json",
        ]);
        plan["peak_memory_bytes"].as_u64().unwrap()
    };
    // 16 bytes per parameter, an eighth of them on each device, and one gathered weight at a time.
    assert!(peak("fsdp") < peak("data") * 2 / 5, "{} {}", peak("fsdp"), peak("data"));
}

#[test]
fn a_plan_that_does_not_fit_the_device_is_refused_unless_the_limit_is_lifted() {
    // Nine tenths of a T4 in one weight and as much again in its gradient.
    let model = "mlp:batch=8,hidden=60000,layers=2,input=60000";
    let request = ["plan", model, "--machine", "1xt4", "--solver", "data"];
    let output = shardwright(&request);
    assert_eq!(output.status.code(), Some(1));
    let lifted = json(&[&request[..], &["--memory", "none", "--json"]].concat());
    assert_eq!(lifted["fits"], false);
    let notes = lifted["warnings"].to_string();
    assert!(
        notes.contains("the plan does not fit: a device needs ") && notes.contains("14.93 GB"),
        "{notes}"
    );
    refused(&["plan", "lenet5", "--machine", "8xh10"], "did you mean `8xh100`?");
    refused(&["plan", "lnet5"], "did you mean `lenet5`?");
    refused(&["plan", "lenet5", "--solver", "exct"], "did you mean `exact`?");
}

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
    assert!(plan["warnings"].is_array());
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
    assert!(text.contains("round-robin") && text.contains("imbalance"), "{text}");
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
        let sharded = ["zero1", "zero2", "fsdp", "hsdp", "ep", "megatron-sp"]
            .iter()
            .any(|name| other["solver"] == *name);
        assert!(other["objective"].as_i64().unwrap() >= exact || sharded, "{other}");
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
    assert!(told.contains("the smallest limit of any plan is"), "{told}");
}

#[test]
fn a_plan_is_written_to_a_file_and_told() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.json");
    let args =
        ["plan", MODEL, "--machine", "flat:2", "--solver", "exact", "-v", "-o", path.to_str().unwrap()];
    let text = String::from_utf8(shardwright(&args).stdout).unwrap();
    assert!(text.contains("proved") && text.contains("plan written to"), "{text}");
    let labels = [
        "computing",
        "exposed communication",
        "without overlap",
        "memory",
        "traffic",
        "search",
        "search space",
        "proof",
        "proof of the sum",
        "planning",
    ];
    for label in labels {
        let labelled = |line: &&str| line.starts_with(&format!("  {label}  "));
        assert_eq!(text.lines().filter(labelled).count(), 1, "{label} in {text}");
    }
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
    refused(&["plan", "nothing.pb"], "only .onnx, .mlir, .stablehlo, and configs and graphs in .json");
    refused(&["plan", "nothing.onnx"], "cannot read nothing.onnx");
    refused(&["plan", "missing.json"], "missing.json");
    refused(&["plan", MODEL, "--machine", "p100x16", "--costs", "h200"], "H200");
    refused(&["plan", MODEL, "--optimizer", "lbfgs"], "sgd, momentum, adam or adamw");
    refused(&["plan", MODEL, "--time", "nan"], "nan is not a duration");
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
        text.contains("no layer can be split into 64 equal parts") && text.contains("at most")
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
fn the_bare_command_plans_a_model_that_no_recipe_suits() {
    let folder = tempfile::tempdir().unwrap();
    let output = assert_cmd::cargo::cargo_bin_cmd!("shardwright").current_dir(&folder).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success());
    assert!(
        text.contains("The report is in shardwright-demo.html")
            && folder.path().join("shardwright-demo.html").exists()
    );
    assert!(text.contains("dlrm on 8xa100: ") && text.contains("proved within"), "{text}");
    assert!(text.contains("x the speed of") && text.contains("Next:"), "{text}");
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
    assert!(none.stdout.is_empty() && text.contains("the smallest limit of any plan is"), "{text}");
    // What fills the memory, what needs least, and what would help, in people's units.
    for part in [
        "fits into 1.0 kB per device",
        "Of the baselines `megatron` needs least",
        "(weights ",
        "activations ",
        "proved for every plan on all devices",
        "Weights and optimizer state alone take ",
        "What would help: about ",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(text.matches("fits into 1.0 kB").count(), 1, "{text}");
}

#[test]
fn what_fits_nowhere_is_refused_by_a_proof_at_once_and_says_by_how_much() {
    let output = shardwright(&["plan", "llama3-405b", "--machine", "8xh100", "--time", "1"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{text}");
    for part in
        ["proved for every plan on all devices", "and at least 7", " GB per device, each of them stored once"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    // State that exceeds the limit is no smaller in micro-batches, or recomputed.
    assert!(!text.contains("--micro-batches auto") && !text.contains("--untied"), "{text}");
    // One of a kind: not twice in one message.
    assert_eq!(text.matches("fits into").count(), 1, "{text}");
}

/// The limit that `gpt:batch=16` with Adam keeps on 16 P100s as FSDP, but under no other recipe.
const TIGHT: [&str; 8] =
    ["plan", "gpt:batch=16", "--machine", "p100x16", "--optimizer", "adam", "--memory", "2505682947B"];

#[test]
fn a_recipe_that_fits_is_found_in_any_time() {
    let plan = json(&[&TIGHT[..], &["--time", "0.001", "--json"]].concat());
    assert!(plan["peak_memory_bytes"].as_u64().unwrap() <= 2_505_682_947);
    assert_eq!(plan["proved_optimal"], false);
}

#[test]
fn what_is_not_found_in_the_time_is_not_called_impossible() {
    let status = |args: &[&str], part: &str| {
        let output = shardwright(args);
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.stdout.is_empty() && text.starts_with("error: ") && text.contains(part), "{text}");
        output.status.code()
    };
    // Above what every plan needs, below what the recipes need.
    let late = ["plan", MODEL, "--machine", "flat:4", "--memory", "1500kB", "--time", "0"];
    assert_eq!(status(&late, "did not prove that none does"), Some(3));
    assert_eq!(status(&late, "Of the baselines"), Some(3));
    let never = [&late[..5], &["1kB", "--time", "0"]].concat();
    assert_eq!(status(&never, "no plan of auto fits into 1.0 kB per device (proved"), Some(1));
    // A plan that is not searched within the limit says so.
    assert_eq!(
        status(&[&late[..6], &["--solver", "data"]].concat(), "does not search within a limit"),
        Some(1)
    );
    // Out of time and out of tables: the input is valid.
    assert_eq!(status(&[&late[..4], &["--solver", "pase", "--time", "0"]].concat(), "--time"), Some(1));
    assert_eq!(status(&[&late[..4], &["--solver", "pase", "--ram", "1kB"]].concat(), "--ram"), Some(1));
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

#[test]
fn steps_in_micro_batches_are_planned_simulated_and_run() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan.json");
    let file = file.to_str().unwrap();
    let model = "mlp:batch=8,input=64,hidden=256,layers=3";
    let with = |count: &'static str, solver: &'static str| {
        json(&["plan", model, "--machine", "flat:2", "--micro-batches", count, "--solver", solver, "--json"])
    };
    // Data parallelism reduces gradients once per step.
    let [one, four] = ["1", "4"].map(|count| with(count, "data"));
    assert_eq!(one["traffic_bytes"], four["traffic_bytes"]);
    // The stages of ZeRO: less memory for more traffic.
    let stages = ["zero1", "zero2", "fsdp"].map(|solver| with("4", solver));
    let number = |plan: &serde_json::Value, key: &str| plan[key].as_u64().unwrap();
    for pair in stages.windows(2) {
        assert!(number(&pair[0], "traffic_bytes") < number(&pair[1], "traffic_bytes"));
        assert!(number(&pair[0], "peak_memory_bytes") > number(&pair[1], "peak_memory_bytes"));
    }
    let plan = ["plan", model, "--machine", "cpu:2", "--micro-batches"];
    let written = shardwright(&[&plan[..], &["4", "--solver", "zero2", "-o", file]].concat());
    assert!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));
    let simulated = shardwright(&["simulate", file]);
    assert!(simulated.status.success(), "{}", String::from_utf8_lossy(&simulated.stderr));
    let checked = json(&["run", file, "--steps", "2", "--json"]);
    assert_eq!(checked["agrees"], true, "{checked}");
    refused(&[&plan[..], &["3"]].concat(), "do not divide a batch of 8; choose one of 1, 2, 4, 8");
    refused(&[&plan[..], &["0"]].concat(), "that divides the batch, or auto");
}

#[test]
fn micro_batches_are_chosen_where_memory_binds() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan.json").display().to_string();
    let page = folder.path().join("page.html").display().to_string();
    let model = "gpt:batch=4,layers=1,hidden=16,heads=2,vocab=32,seq=64";
    let plan = |options: &[&str]| {
        let args = [
            "plan",
            model,
            "--machine",
            "cpu:2",
            "--solver",
            "exact",
            "--json",
            "--time",
            "3",
            "--micro-batches",
            "auto",
        ];
        json(&[&args[..], options].concat())
    };
    let free = plan(&["--memory", "none", "--recompute", "off"]);
    assert_eq!(free["micro_batches"], 1, "no limit binds");
    let limit = free["peak_memory_bytes"].as_u64().unwrap() * 3 / 5;
    let fitting = plan(&["--memory", &format!("{limit}B"), "--recompute", "off", "-o", &file]);
    assert!(fitting["micro_batches"].as_u64().unwrap() > 1, "{}", fitting["micro_batches"]);
    assert!(fitting["peak_memory_bytes"].as_u64().unwrap() <= limit);
    let simulated = json(&["simulate", &file, "--json"]);
    assert_eq!(simulated["step_seconds"], fitting["simulated"]["step_seconds"]);
    assert_eq!(json(&["run", &file, "--steps", "2", "--json"])["agrees"], true);
    for args in [&["explain", &file, "blocks.0.mlp.fc1"][..], &["report", &file, "-o", &page]] {
        let output = shardwright(args);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}
