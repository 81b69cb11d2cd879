//! ONNX files on the command line.

use crate::{json, refused};
use std::path::{Path, PathBuf};

fn model(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/models").join(name);
    if path.exists() {
        return Some(path);
    }
    println!("skipped: {} is not there", path.display());
    None
}

fn step_seconds(model: &str, batch: &str) -> f64 {
    let plan = json(&["plan", model, "--machine", "p100x16:4", "--batch", batch, "--json"]);
    plan["simulated"]["step_seconds"].as_f64().unwrap()
}

/// AlexNet is the zoo's; the files of VGG-16 and GPT-2 lack biases, which were zero when they were exported.
#[test]
fn exported_models_plan_as_the_zoos_do() {
    for (name, zoo, difference) in [
        ("alexnet.onnx", "alexnet:dropout=0", 0.01),
        ("vgg16.onnx", "vgg16:dropout=0", 0.05),
        ("gpt2.onnx", "gpt:seq=128", 0.1),
    ] {
        let Some(path) = model(name) else { return };
        let (file, zoo) = (step_seconds(path.to_str().unwrap(), "64"), step_seconds(zoo, "64"));
        assert!((file / zoo - 1.0).abs() < difference, "{name}: {file} and {zoo}");
    }
}

#[test]
fn what_is_no_model_is_bad_input() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broken.onnx");
    std::fs::write(&path, "hello").unwrap();
    refused(&["plan", path.to_str().unwrap()], "broken.onnx: ");
    refused(&["plan", path.to_str().unwrap()], "not a readable ONNX model");
}

/// Protobuf by hand: fields of bytes, and of whole numbers.
fn bytes(tag: u8, contents: impl AsRef<[u8]>) -> Vec<u8> {
    let contents = contents.as_ref();
    assert!(contents.len() < 1 << 14);
    let length = [(contents.len() % 128 + 128) as u8, (contents.len() / 128) as u8];
    [&[tag << 3 | 2], &length[..], contents].concat()
}

fn whole(tag: u8, number: u8) -> Vec<u8> {
    vec![tag << 3, number]
}

/// `y = x w`, with x of n samples and three channels, and what is said of w's contents.
fn linear(contents: &[u8]) -> Vec<u8> {
    let shape = [bytes(1, bytes(2, "n")), bytes(1, whole(1, 3))].concat();
    let tensor = [whole(1, 1), bytes(2, shape)].concat();
    let input = [bytes(1, "x"), bytes(2, bytes(1, tensor))].concat();
    let node = [bytes(1, "x"), bytes(1, "w"), bytes(2, "y"), bytes(3, "layer"), bytes(4, "MatMul")].concat();
    let weight = [whole(1, 3), whole(1, 4), whole(2, 1), bytes(8, "w"), contents.to_vec()].concat();
    let graph =
        [bytes(1, node), bytes(2, "net"), bytes(5, weight), bytes(11, input), bytes(12, bytes(1, "y"))];
    let opset = whole(2, 18);
    [whole(1, 10), bytes(7, graph.concat()), bytes(8, opset)].concat()
}

#[test]
fn a_run_starts_from_the_files_weights_and_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("linear.onnx");
    let path = path.to_str().unwrap();
    let run = |contents: &[u8]| {
        std::fs::write(path, linear(contents)).unwrap();
        let common = ["--machine", "cpu:2", "--dim", "n=4", "--loss", "output", "--steps", "2", "--json"];
        let told = json(&[&["run", path], &common[..]].concat());
        (told["loss"][0].as_f64().unwrap(), told["weights"].clone())
    };
    let from = |from_file: u32, seeded: u32| serde_json::json!({"from_file": from_file, "seeded": seeded});
    let zeros = [0; 3 * 4 * 4];
    assert_eq!(run(&bytes(9, zeros)), (0.0, from(1, 0)), "the loss is the mean of x w");
    let (loss, origin) = run(&[]);
    assert!(loss != 0.0 && origin == from(0, 1), "{loss} {origin}");
    // In another file.
    let entry = |key: &str, value: &str| bytes(13, [bytes(1, key), bytes(2, value)].concat());
    let elsewhere = [entry("location", "weights.bin"), whole(14, 1)].concat();
    assert_eq!(run(&elsewhere).1, from(0, 1), "the other file is missing");
    std::fs::write(folder.path().join("weights.bin"), zeros).unwrap();
    assert_eq!(run(&elsewhere), (0.0, from(1, 0)));
}

#[test]
fn a_plan_remembers_how_its_model_was_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let [model, plan] = ["linear.onnx", "plan.json"].map(|name| folder.path().join(name));
    std::fs::write(&model, linear(&[])).unwrap();
    let (model, plan) = (model.to_str().unwrap(), plan.to_str().unwrap());
    json(&["plan", model, "--machine", "cpu:2", "--dim", "n=4", "--loss", "mse", "-o", plan, "--json"]);
    let told = json(&["run", plan, "--steps", "2", "--processes", "2", "--json"]);
    assert_eq!(told["steps"], 2);
}

#[test]
fn a_file_is_described_like_a_built_in_model() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("linear.onnx");
    std::fs::write(&path, linear(&[])).unwrap();
    let path = path.to_str().unwrap();
    let told = json(&["models", path, "--dim", "n=4", "--json"]);
    assert_eq!((&told["name"], &told["parameters"]), (&"net".into(), &12.into()));
    assert_eq!(told["inputs"], serde_json::json!(["x f32[4,3]", "labels i32[4]"]));
    refused(&["models", path], "--dim NAME=N");
    refused(&["models", "mlp", "--dim", "n=4"], "built-in models have options");
}
