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

#[test]
fn the_exported_alexnet_plans_as_the_zoos_does() {
    let Some(path) = model("alexnet.onnx") else { return };
    let (file, zoo) = (step_seconds(path.to_str().unwrap(), "64"), step_seconds("alexnet:dropout=0", "64"));
    assert!((file / zoo - 1.0).abs() < 0.01, "{file} and {zoo}");
}

#[test]
fn what_is_no_model_is_bad_input() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broken.onnx");
    std::fs::write(&path, "hello").unwrap();
    refused(&["plan", path.to_str().unwrap()], "broken.onnx: ");
    refused(&["plan", path.to_str().unwrap()], "not a readable ONNX model");
}
