//! `stages` as users see it: output and exit status.

use super::{json, refused, shardwright};
use std::path::Path;

fn example(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/regressions/stages");
    folder.join(name).to_str().unwrap().to_string()
}

#[test]
fn stages_are_proved_and_printed() {
    let answer = json(&["stages", &example("piper.json"), "--json"]);
    assert_eq!(answer["proved_optimal"], true);
    // One stage on two replicas: (1.5 + 2.5) / 2 + 4 · 1/2 · 2 / 2 / 5.
    assert!((answer["objective"].as_f64().unwrap() - 2.4).abs() < 1e-9, "{answer}");
    assert_eq!(answer["stages"][0]["nodes"], serde_json::json!(["1", "2"]));
    assert_eq!(answer["stages"][0]["options"], serde_json::json!(["vanilla", "vanilla"]));
    let output = shardwright(&["stages", &example("table.json")]);
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).contains("proved optimal"));
}

#[test]
fn a_memory_limit_that_nothing_fits_is_a_proof() {
    let output = shardwright(&["stages", &example("piper.json"), "--memory", "5"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("layer 2 alone takes at least 6 bytes"));
    assert!(output.stdout.is_empty() || output.stdout.starts_with(b"#"));
}

#[test]
fn bad_requests_are_refused() {
    refused(&["stages", &example("piper.json"), "--devices", "0"], "number of devices is 0");
    refused(&["stages", &example("piper.json"), "--micro-batches", "0"], "number of micro-batches is 0");
    refused(&["stages", &example("piper.json"), "--memory", "nan"], "not a number");
    refused(&["stages", &example("piper.json"), "--bandwidth", "0"], "bandwidth");
    refused(&["stages", "/nowhere.json"], "cannot read");
}
