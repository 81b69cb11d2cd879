//! Piper's own problems: the optima of its program, and those that it does not end on.

use shardwright_stages::Control;
use shardwright_stages::format::{Overrides, read};
use std::path::Path;

/// The optimum of a problem of Piper's, proved; `None` where the files are not there.
fn optimum(name: &str, devices: u32, memory_gib: f64, micro_batches: u64) -> Option<f64> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/piper").join(name);
    let bytes = std::fs::read(path).ok()?;
    let overrides = Overrides {
        devices: Some(devices),
        memory_bytes: Some(memory_gib * (1u64 << 30) as f64),
        micro_batches: Some(micro_batches),
        bandwidth: None,
    };
    let outcome = read(&bytes, &overrides).unwrap().solve(&Control::default());
    assert!(outcome.proved_optimal(), "{:?}", outcome.stop_reason);
    Some(outcome.objective_seconds)
}

#[test]
fn optima_equal_those_of_pipers_program() {
    for (name, devices, memory_gib, micro_batches, expected) in [
        ("bert32a100.json", 8, 8.0, 960, 0.166_904_266_6),
        ("bert32a100.json", 64, 8.0, 1920, 0.020_320_224_69),
        ("bert32a100.json", 512, 8.0, 1920, 0.002_578_746_207),
        ("bert32a100.json", 128, 1.0, 1920, 0.040_012_443_84),
        ("resnet.json", 8, 4.0, 7680, 73.493_638_93),
        // Piper's program did not end on this one; the value is our own proof.
        ("gnmt.json", 8, 1.2, 256, 68.565_642_435_3),
    ] {
        if let Some(found) = optimum(name, devices, memory_gib, micro_batches) {
            assert!((found - expected).abs() <= 1e-8 * expected, "{name}: {found} instead of {expected}");
        }
    }
}
