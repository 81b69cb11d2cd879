//! Plan files: `plan -o` writes them, and every command that takes one reads it once.

use crate::{json, shardwright};
use assert_cmd::cargo::cargo_bin_cmd;
use std::process::{Command, Output};
use std::sync::mpsc;
use std::time::Duration;

const MODEL: &str = "mlp:batch=64,hidden=512,layers=3";

/// Longer than any command of these tests takes. One that reads its plan twice would wait forever.
const PATIENCE: Duration = Duration::from_secs(300);

/// Runs a command with the plan in a pipe, whose bytes can be read only once.
fn with_piped_plan(plan: Vec<u8>, pipe: &str, args: &[&str]) -> Output {
    let (done, is_done) = mpsc::channel();
    let target = pipe.to_string();
    std::thread::spawn(move || done.send(std::fs::write(target, plan)));
    let output = cargo_bin_cmd!("shardwright").args(args).timeout(PATIENCE).output().unwrap();
    let written = is_done.recv_timeout(Duration::from_secs(10));
    assert!(matches!(written, Ok(Ok(()))), "{args:?} has not read the plan: {written:?}, {output:?}");
    output
}

#[test]
fn every_command_reads_a_plan_file_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (file, pipe) = (path("plan.json"), path("pipe.json"));
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let program = format!("{}/../stablehlo/tests/stablehlo/mlp_sgd.mlir.gz", env!("CARGO_MANIFEST_DIR"));
    let page = path("page.html");
    let cases: [(&str, &[&str]); 5] = [
        (MODEL, &["simulate", &pipe, "--full", "--json"]),
        (MODEL, &["explain", &pipe, "--json"]),
        (MODEL, &["report", &pipe, "-o", &page]),
        (MODEL, &["run", &pipe, "--steps", "2"]),
        (&program, &["export", &pipe, "--to", "jax"]),
    ];
    for (model, args) in cases {
        let plan = ["plan", model, "--machine", "flat:4", "--solver", "exact", "-q", "-o", &file];
        assert!(shardwright(&plan).status.success());
        let output = with_piped_plan(std::fs::read(&file).unwrap(), &pipe, args);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn a_plan_file_is_what_plan_prints() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan.json").display().to_string();
    let printed = json(&["plan", MODEL, "--machine", "flat:4", "-o", &file, "--json"]);
    let written: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(written, printed);
}
