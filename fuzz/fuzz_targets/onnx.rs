//! Any bytes as an ONNX model: an error, or a graph that keeps all invariants.
#![no_main]

use libfuzzer_sys::fuzz_target;
use shardwright_frontend::onnx::{ImportOptions, NoExternalData, import};
use shardwright_graph::verify::verify;

fuzz_target!(|bytes: &[u8]| {
    let bytes = bytes.to_vec().into();
    for training in [true, false] {
        let options = ImportOptions { training, ..ImportOptions::default() };
        if let Ok(imported) = import(&bytes, &options, &NoExternalData) {
            assert_eq!(verify(&imported.graph), Ok(()));
        }
    }
});
