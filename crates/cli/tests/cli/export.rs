//! `export`.

use crate::{json, refused, shardwright};

fn planned(model: &str, folder: &tempfile::TempDir) -> String {
    let path = folder.path().join("plan.json").display().to_string();
    let output = shardwright(&["plan", model, "--machine", "flat:4", "--solver", "data", "-q", "-o", &path]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    path
}

fn case(name: &str) -> String {
    format!("{}/../stablehlo/tests/stablehlo/{name}.mlir.gz", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn a_program_with_shardings_is_a_program_again() {
    let folder = tempfile::tempdir().unwrap();
    let plan = planned(&case("mlp_sgd"), &folder);
    let written = folder.path().join("sharded.mlir").display().to_string();
    assert!(shardwright(&["export", &plan, "--to", "sdy", "-o", &written]).status.success());
    let text = std::fs::read_to_string(&written).unwrap();
    assert!(text.contains(r#"sdy.mesh @mesh = <["gpu.0"=2, "gpu.1"=2]>"#), "{text}");
    assert!(text.matches("sdy.sharding_constraint").count() > 20, "{text}");
    assert!(text.contains(r#"sdy.sharding = #sdy.sharding<@mesh, [{"gpu.0", "gpu.1"}, {}]>"#), "{text}");
    // Constraints change nothing: both are planned alike.
    let same = |model: &str| json(&["plan", model, "--machine", "flat:4", "--json"])["objective"].clone();
    assert_eq!(same(&written), same(&case("mlp_sgd")));
}

#[test]
fn shardings_have_an_entry_per_argument() {
    let folder = tempfile::tempdir().unwrap();
    let plan = planned(&case("mlp_sgd"), &folder);
    let shardings = json(&["export", &plan, "--to", "jax"]);
    assert_eq!(shardings["arguments"].as_array().unwrap().len(), 5);
    assert_eq!(shardings["axes"][0]["size"], 2);
}

#[test]
fn what_was_said_about_the_program_need_not_be_said_again() {
    let folder = tempfile::tempdir().unwrap();
    let called = folder.path().join("called.mlir").display().to_string();
    let program = r#"module {
  func.func public @main(%arg0: tensor<8x16xf32>, %arg1: tensor<8x16xf32>) -> tensor<8x16xf32> {
    %0 = stablehlo.custom_call @mine(%arg0) : (tensor<8x16xf32>) -> tensor<8x16xf32>
    %1 = stablehlo.add %0, %arg1 : tensor<8x16xf32>
    return %1 : tensor<8x16xf32>
  }
}
"#;
    std::fs::write(&called, program).unwrap();
    refused(&["plan", &called, "--machine", "flat:4"], "mine");
    let path = folder.path().join("plan.json").display().to_string();
    let told = ["--opaque", "mine", "--role", "arg0=parameter", "-q", "-o", &path];
    assert!(shardwright(&[&["plan", &called, "--machine", "flat:4"], &told[..]].concat()).status.success());
    let shardings = json(&["export", &path, "--to", "jax"]);
    assert_eq!(shardings["arguments"].as_array().unwrap().len(), 2);
    // Another program under the same name is noticed.
    std::fs::write(&called, program.replace("8x16", "8x32")).unwrap();
    refused(&["export", &path, "--to", "jax"], "plan again");
}

#[test]
fn what_is_no_program_has_no_shardings() {
    let folder = tempfile::tempdir().unwrap();
    refused(&["export", &planned("mlp", &folder), "--to", "sdy"], "only plans of StableHLO programs");
    refused(&["export", "nothing.json", "--to", "sdy"], "cannot read nothing.json");
}

#[test]
fn a_plan_may_bring_its_program_along() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("step.mlir");
    let program = "module @step {
  func.func public @main(%w: tensor<64x32xf32>, %x: tensor<16x64xf32>) -> tensor<16x32xf32> {
    %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<16x64xf32>, tensor<64x32xf32>) -> tensor<16x32xf32>
    return %0 : tensor<16x32xf32>
  }
}
";
    std::fs::write(&file, program).unwrap();
    let path = planned(&file.display().to_string(), &folder);
    std::fs::remove_file(&file).unwrap();
    refused(&["export", &path, "--to", "jax"], "step.mlir");
    let mut plan: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    plan["request"]["text"] = program.into();
    std::fs::write(&path, plan.to_string()).unwrap();
    assert_eq!(json(&["export", &path, "--to", "jax"])["arguments"].as_array().unwrap().len(), 2);
    for command in [&["explain"][..], &["simulate"], &["report", "-o", &format!("{path}.html")]] {
        let output = shardwright(&[&command[..1], &[&path], &command[1..]].concat());
        assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    // Another program than the one that was planned is noticed.
    plan["request"]["text"] = program.replace("16x", "48x").into();
    std::fs::write(&path, plan.to_string()).unwrap();
    refused(&["export", &path, "--to", "jax"], "plan again");
}

#[test]
fn every_plan_has_dtensor_placements() {
    let folder = tempfile::tempdir().unwrap();
    for model in [
        "mlp:batch=8,hidden=16,layers=1",
        "gpt:batch=4,layers=1,hidden=8,heads=4,vocab=12,seq=4",
        &case("mlp_sgd"),
    ] {
        let exported = json(&["export", &planned(model, &folder), "--to", "dtensor"]);
        assert_eq!(exported["mesh"]["shape"], serde_json::json!([2, 2]), "{model}");
        let tensors = exported["tensors"].as_object().unwrap();
        let weights: Vec<_> = tensors.values().filter(|t| t["role"] == "parameter").collect();
        assert!(!weights.is_empty(), "{model}");
        for (name, tensor) in tensors {
            let placements = tensor["placements"].as_array().unwrap();
            assert_eq!(placements.len(), 2, "{model} {name}");
            let rank = tensor["shape"].as_array().unwrap().len();
            for placement in placements.iter().map(|p| p.as_str().unwrap()) {
                let dim = placement.strip_prefix("Shard(").and_then(|rest| rest.strip_suffix(')'));
                let known = ["Replicate()", "Partial('sum')", "Partial('max')"].contains(&placement);
                assert!(
                    known || dim.is_some_and(|d| d.parse::<usize>().unwrap() < rank),
                    "{name}: {placement}"
                );
            }
        }
        // Data parallelism: samples are split over both axes, weights are everywhere.
        assert!(
            weights.iter().all(|t| t["placements"] == serde_json::json!(["Replicate()", "Replicate()"])),
            "{model}"
        );
        let split = |t: &serde_json::Value| t["placements"] == serde_json::json!(["Shard(0)", "Shard(0)"]);
        assert!(tensors.values().any(|t| t["role"] == "input" && split(t)), "{model}");
        assert!(exported["ops"].is_object() && exported["stored"].is_object());
    }
}

#[test]
fn plans_that_pin_ops_cannot_be_placed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.json").display().to_string();
    let model = ["plan", "nmt:batch=4,seq=4,hidden=8,vocab=12", "--machine", "flat:2", "--solver", "place"];
    assert!(shardwright(&[&model[..], &["-q", "-o", &path]].concat()).status.success());
    let output = shardwright(&["export", &path, "--to", "dtensor"]);
    let text = String::from_utf8(output.stderr).unwrap();
    match output.status.code() {
        Some(1) => assert!(text.contains("on some devices only") && text.contains("--spmd"), "{text}"),
        // The placement may use one device for everything, which is a replicated plan.
        code => assert_eq!(code, Some(0), "{text}"),
    }
}

#[test]
fn every_plan_has_layouts_and_a_jax_module() {
    let folder = tempfile::tempdir().unwrap();
    for model in ["mlp:batch=8,hidden=16,layers=1", &case("mlp_sgd")] {
        let path = planned(model, &folder);
        let exported = json(&["export", &path, "--to", "layouts"]);
        let tensors = exported["tensors"].as_object().unwrap();
        let inputs = || tensors.values().filter(|tensor| tensor["role"] == "input");
        let both = serde_json::json!(["gpu.0", "gpu.1"]);
        assert!(inputs().any(|tensor| tensor["dimensions"][0] == both), "samples are split: {model}");
        assert!(
            tensors
                .values()
                .all(|t| t["dimensions"].as_array().unwrap().len() == t["shape"].as_array().unwrap().len())
        );
        let module = shardwright(&["export", &path, "--to", "jax-module"]);
        let text = String::from_utf8(module.stdout).unwrap();
        assert!(
            text.contains("AXES = {\"gpu.0\": 2, \"gpu.1\": 2}")
                && text.contains("P((\"gpu.0\", \"gpu.1\"))"),
            "{text}"
        );
    }
    // A pipeline's tensors are on some devices only: layouts say on which, a PartitionSpec cannot.
    let path = folder.path().join("stages.json").display().to_string();
    let model = [
        "plan",
        "mlp:batch=8,hidden=16,layers=2",
        "--machine",
        "flat:4",
        "--solver",
        "data",
        "--pipeline",
        "2",
    ];
    assert!(
        shardwright(&[&model[..], &["--micro-batches", "2", "-q", "-o", &path]].concat()).status.success()
    );
    let exported = json(&["export", &path, "--to", "layouts"]);
    assert!(exported["tensors"].as_object().unwrap().values().any(|tensor| tensor["pinned"]["gpu.0"] == 1));
    assert_eq!(shardwright(&["export", &path, "--to", "jax-module"]).status.code(), Some(1));
}

#[test]
fn a_recipe_of_data_parallelism_has_trainers_options() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.json").display().to_string();
    for (solver, expected) in [
        ("data", "data_parallel_replicate_degree = 8\ndata_parallel_shard_degree = 1\n"),
        ("fsdp", "data_parallel_replicate_degree = 1\ndata_parallel_shard_degree = 8\n"),
        ("hsdp", "data_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 4\n"),
    ] {
        let model =
            ["plan", "gpt:batch=16,layers=2,hidden=64,heads=4,vocab=96,seq=16", "--machine", "p100x16:8"];
        assert!(
            shardwright(&[&model[..], &["--solver", solver, "-q", "-o", &path]].concat()).status.success()
        );
        let output = shardwright(&["export", &path, "--to", "torchtitan"]);
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && text.contains(expected), "{solver}: {text}");
        assert!(text.contains("local_batch_size = 2\nglobal_batch_size = 16\n"), "{solver}: {text}");
    }
}
