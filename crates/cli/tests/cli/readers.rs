//! Inputs that once made a reader fail, small ones of every kind, and mutants of both: each is accepted or refused, and never
//! more than that.

#[path = "../../../../fuzz/readers.rs"]
mod fuzzed;
#[path = "../../../../fuzz/mutate.rs"]
mod mutate;

use fuzzed::READERS;
use std::path::Path;

/// Mutants per reader. `SHARDWRIGHT_MUTANTS=100000` tries more, `SHARDWRIGHT_SEEDS_OF=FOLDER` mutates other files.
const MUTANTS: usize = 300;

/// Hands every file of a reader's folder to it.
fn check(name: &str) {
    let (_, reader) = READERS.iter().find(|(known, _)| *known == name).unwrap();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/regressions").join(name);
    let mut files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty(), "{} has no inputs", folder.display());
    for file in files {
        println!("{}", file.display());
        reader(&std::fs::read(&file).unwrap());
    }
}

/// Hands mutants of every file of a reader's folder to it. A mutant that fails is kept for a look.
fn mutants(name: &str) {
    let (_, reader) = READERS.iter().find(|(known, _)| *known == name).unwrap();
    let variable = |name: &str| std::env::var(name).ok();
    let folder = match variable("SHARDWRIGHT_SEEDS_OF") {
        Some(folder) => Path::new(&folder).join(name),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/regressions").join(name),
    };
    let mut files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let seeds: Vec<Vec<u8>> = files.iter().map(|file| std::fs::read(file).unwrap()).collect();
    let count = variable("SHARDWRIGHT_MUTANTS").and_then(|n| n.parse().ok()).unwrap_or(MUTANTS);
    let first = variable("SHARDWRIGHT_FIRST").and_then(|n| n.parse().ok()).unwrap_or(0);
    for number in first..first + count {
        let seed = &seeds[number % seeds.len()];
        let mutant = mutate::mutate(name, seed, &mut mutate::Random(number as u64));
        let failed = std::panic::catch_unwind(|| reader(&mutant)).is_err();
        if failed {
            let kept = std::env::temp_dir().join(format!("{name}-mutant-{number}"));
            std::fs::write(&kept, &mutant).unwrap();
            panic!("mutant {number} of {}: {}", files[number % seeds.len()].display(), kept.display());
        }
    }
}

macro_rules! readers {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            check(stringify!($name));
            mutants(stringify!($name));
        })*

        #[test]
        fn every_reader_is_tested() {
            assert_eq!(READERS.map(|(name, _)| name).to_vec(), [$(stringify!($name)),*]);
        }
    };
}

readers!(graph_json graph_text onnx stablehlo machine costs plan network stages);
