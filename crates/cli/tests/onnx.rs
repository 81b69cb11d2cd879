//! ONNX files on the command line.

use assert_cmd::Command;
use std::path::{Path, PathBuf};

fn shardwright() -> Command {
    Command::new(env!("CARGO_BIN_EXE_shardwright"))
}

fn model(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/models").join(name);
    if path.exists() {
        return Some(path);
    }
    println!("skipped: {} is not there", path.display());
    None
}

fn step_seconds(model: &str, batch: &str) -> f64 {
    let arguments = ["plan", model, "--machine", "p100x16:4", "--batch", batch, "--json"];
    let output = shardwright().args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let plan: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
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
    let output = shardwright().arg("plan").arg(&path).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("broken.onnx") && text.contains("not a readable ONNX model"), "{text}");
}
