//! The program from outside, as users and scripts meet it: output, files and exit status. One file per command.

#[cfg(unix)]
mod book;
mod compare;
mod engines;
mod export;
mod faults;
mod hostile;
mod interrupt;
mod machines;
mod measuring;
mod models;
mod onnx;
mod pipeline;
mod plan;
#[cfg(unix)]
mod plan_files;
mod readers;
mod recompute;
mod refine;
mod report;
mod run;
mod shell;
mod simulate;
mod solve;
mod sources;
mod soybean;
mod stages;
mod suggestions;
mod uniform;
mod verdict;

use assert_cmd::cargo::cargo_bin_cmd;
use serde_json::Value;
use std::process::Output;

/// Runs the program to its end.
fn shardwright(args: &[&str]) -> Output {
    cargo_bin_cmd!("shardwright").args(args).output().unwrap()
}

/// The one JSON value that a run which must succeed prints.
fn json(args: &[&str]) -> Value {
    let output = shardwright(args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A request that makes no sense is refused with an explanation, and prints nothing else.
fn refused(args: &[&str], part: &str) {
    let output = shardwright(args);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{args:?}: {text}");
    assert!(output.stdout.is_empty() && text.contains(part), "{args:?}: {text}");
}
