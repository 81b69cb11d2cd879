//! Rules that the sources of all crates keep.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Crates that may read the clock. The others are given one: see `shardwright_search::Clock`.
const CLOCK_READERS: [&str; 5] = ["cli", "engine", "python", "request", "runtime"];

/// The crates by stage, as in ARCHITECTURE.md: a crate uses only crates before it.
const STAGES: [&str; 26] = [
    "simd",
    "suggest",
    "search",
    "stages",
    "graph",
    "machine",
    "zoo",
    "onnx",
    "stablehlo",
    "cost",
    "trace",
    "space",
    "soybean",
    "place",
    "assist",
    "lower",
    "plan",
    "sim",
    "strategies",
    "runtime",
    "engine",
    "export",
    "report",
    "request",
    "cli",
    "python",
];

/// The folder of all crates.
fn crates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn rust_files(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

#[test]
fn core_crates_read_no_clock() {
    let mut files = Vec::new();
    for entry in fs::read_dir(crates()).unwrap() {
        let entry = entry.unwrap();
        if !CLOCK_READERS.iter().any(|name| entry.file_name() == *name) {
            rust_files(&entry.path().join("src"), &mut files);
        }
    }
    files.sort();
    let readers: Vec<&PathBuf> = files
        .iter()
        .filter(|path| {
            let text = fs::read_to_string(path).unwrap();
            ["Instant::now", "SystemTime"].iter().any(|word| text.contains(word))
        })
        .collect();
    assert!(files.len() > 100, "only {} files were read", files.len());
    assert_eq!(readers, Vec::<&PathBuf>::new(), "these read the clock");
}

/// The crates of the workspace that a manifest's dependencies name, without those of tests and benches.
fn dependencies(manifest: &str) -> BTreeSet<&str> {
    let mut found = BTreeSet::new();
    let mut counts = false;
    for line in manifest.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[') {
            let section = section.trim_end_matches(']');
            // `[dependencies]`, `[build-dependencies]`, `[target.'...'.dependencies]`, but not `[dev-dependencies]`.
            counts = section.ends_with("dependencies") && !section.ends_with("dev-dependencies");
            assert!(!section.contains("dependencies."), "[{section}] is a form that this test does not read");
        } else if let Some(name) = line.strip_prefix("shardwright-").filter(|_| counts) {
            let end = name.find(['.', ' ', '=']).unwrap_or(name.len());
            found.insert(&name[..end]);
        }
    }
    found
}

#[test]
fn crates_use_only_crates_of_earlier_stages() {
    let mut folders: Vec<String> = fs::read_dir(crates())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| crates().join(name).join("Cargo.toml").exists())
        .collect();
    folders.sort();
    let mut staged = STAGES;
    staged.sort_unstable();
    assert_eq!(folders, staged, "every crate has one stage");
    let (mut wrong, mut all) = (Vec::new(), 0);
    for (stage, name) in STAGES.iter().enumerate() {
        let manifest = fs::read_to_string(crates().join(name).join("Cargo.toml")).unwrap();
        for other in dependencies(&manifest) {
            all += 1;
            if !STAGES[..stage].contains(&other) {
                wrong.push(format!("{name} uses {other}"));
            }
        }
    }
    assert!(all > 80, "only {all} dependencies were read");
    assert!(wrong.is_empty(), "against the stages of ARCHITECTURE.md: {}", wrong.join(", "));
}

#[test]
fn dependencies_of_tests_are_not_those_of_a_crate() {
    let manifest = "[dependencies]\nserde.workspace = true\nshardwright-graph.workspace = true\n\
        shardwright-cost = { path = \"../cost\" }\n[dev-dependencies]\nshardwright-zoo.workspace = true\n\
        [target.'cfg(unix)'.dependencies]\nshardwright-simd.workspace = true\n[lints]\nworkspace = true\n";
    assert_eq!(dependencies(manifest), BTreeSet::from(["cost", "graph", "simd"]));
}
