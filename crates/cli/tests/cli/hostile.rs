//! Requests and files that ask for more than there is, or write to the terminal what they should not.

#![cfg(target_os = "linux")]

use crate::shardwright;
use std::process::{Command, Output};

/// The message of a command that ends with this status, without a panic.
fn ends(output: &Output, status: i32) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(status), "{text}");
    assert!(!text.contains("panicked") && !text.contains("memory allocation of"), "{text}");
    text
}

#[test]
fn a_run_that_does_not_fit_the_memory_is_not_started() {
    let huge = "mlp:batch=4194304,input=65536,hidden=65536,layers=2";
    let output = shardwright(&["run", huge, "--machine", "flat:2", "--solver", "data", "--steps", "1"]);
    let text = ends(&output, 1);
    assert!(text.contains("the run needs") && text.contains("are free"), "{text}");
}

#[test]
fn a_program_with_huge_shapes_is_not_started() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("huge.mlir").display().to_string();
    let program = "module @m { func.func public @main(%x: tensor<1048576x16777216xf32>) -> tensor<1048576x16777216xf32> {
  %0 = stablehlo.add %x, %x : tensor<1048576x16777216xf32>
  return %0 : tensor<1048576x16777216xf32>
} }";
    std::fs::write(&file, program).unwrap();
    let output = shardwright(&["run", &file, "--machine", "flat:2", "--solver", "data", "--steps", "1"]);
    let text = ends(&output, 1);
    assert!(text.contains("the run needs"), "{text}");
}

#[test]
fn threads_that_do_not_fit_the_address_space_are_not_started() {
    let output = Command::new("sh")
        .args(["-c", "ulimit -v 900000; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_shardwright")])
        .args(["run", "mlp:batch=1024,input=8,hidden=8,layers=1,classes=8", "--machine", "flat:512"])
        .args(["--solver", "data", "--steps", "1", "--threads", "1"])
        .output()
        .unwrap();
    let text = ends(&output, 1);
    assert!(text.contains("the run needs"), "{text}");
}

#[test]
fn text_that_would_reach_the_terminal_is_escaped_and_cut() {
    let folder = tempfile::tempdir().unwrap();
    let hostile = format!("\u{1b}]0;title\u{7}\u{202e}{}", "x".repeat(100_000));
    let write = |name: &str, text: String| {
        let path = folder.path().join(name).display().to_string();
        std::fs::write(&path, text).unwrap();
        path
    };
    let name = serde_json::Value::from(hostile.clone()).to_string();
    let files = [
        write(
            "graph.json",
            format!("{{\"name\": {name}, \"tensors\": [], \"ops\": [{{\"kind\": {name}}}]}}"),
        ),
        write("plan.json", format!("{{\"format\": {name}}}")),
        write("program.mlir", format!("module @m {{ {hostile} }}")),
    ];
    let machine = write("machine.toml", format!("name = {name}\n[{hostile}]\n"));
    let network = write("network.json", format!("{{{name}: 1}}"));
    let mut commands: Vec<Vec<&str>> =
        files.iter().map(|file| vec!["plan", file, "--machine", "flat:2"]).collect();
    commands.push(vec!["plan", "mlp", "--machine", &machine]);
    commands.push(vec!["plan", "mlp", "--machine", "flat:2", "--costs", &files[0]]);
    commands.push(vec!["solve", &network]);
    commands.push(vec!["plan", "mlp:\u{1b}[31m=1"]);
    for command in commands {
        let output = shardwright(&command);
        let text = ends(&output, 2);
        assert!(text.len() < 30_000, "{command:?}: {} bytes", text.len());
        assert!(!text.contains(['\u{1b}', '\u{7}', '\u{202e}']), "{command:?}: {text:?}");
    }
}
