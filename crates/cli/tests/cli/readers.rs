//! Inputs that once made a reader fail, and small ones of every kind: each is accepted or refused, and never more than that.

#[path = "../../../../fuzz/readers.rs"]
mod fuzzed;

use fuzzed::READERS;
use std::path::Path;

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

macro_rules! readers {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            check(stringify!($name));
        })*

        #[test]
        fn every_reader_is_tested() {
            assert_eq!(READERS.map(|(name, _)| name).to_vec(), [$(stringify!($name)),*]);
        }
    };
}

readers!(graph_json graph_text onnx stablehlo machine costs plan network);
