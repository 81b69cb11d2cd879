//! Mutates ONNX models and imports what comes of it: `onnx_fuzz SECONDS SEED OUT`, with the models' files on standard
//! input, one per line.
//!
//! An import may fail, but only with an error: no panic, no graph that breaks an invariant, nothing that takes seconds.
//! Inputs that do otherwise are written into the folder OUT and counted. `scripts/fuzz onnx` is guided by coverage; this one
//! needs nothing but the stable toolchain.

use bytes::Bytes;
use shardwright_frontend::onnx::{ImportOptions, NoExternalData, import};
use shardwright_graph::verify::verify;
use std::io::BufRead;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Larger files are left out: most of their bytes are names and weights.
const MOST_BYTES: usize = 1 << 16;
/// An import of so small a file that takes longer is a failure.
const TOO_LONG: Duration = Duration::from_secs(5);

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }
}

/// Numbers that tend to be special: sizes, axes, lengths, varints that go on.
const SPECIAL: [&[u8]; 10] = [
    &[0],
    &[1],
    &[0x7f],
    &[0x80],
    &[0xff],
    &[0x80, 0x80, 0x04],
    &[0xff, 0xff, 0xff, 0xff, 0x07],
    &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f],
    &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01],
    &[0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x01],
];

fn mutate(random: &mut Random, models: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = models[random.below(models.len())].clone();
    for _ in 0..=random.below(4) {
        if bytes.is_empty() {
            break;
        }
        let at = random.below(bytes.len());
        match random.below(8) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 | 2 => bytes[at] = random.next() as u8,
            3 => {
                let special = SPECIAL[random.below(SPECIAL.len())];
                bytes.splice(at..at + 1, special.iter().copied());
            }
            4 => bytes[at] = bytes[at].wrapping_add(if random.below(2) == 0 { 1 } else { 255 }),
            5 => {
                // A piece of it once more, or of another model.
                let other = &models[random.below(models.len())];
                let start = random.below(other.len());
                let end = (start + random.below(64)).min(other.len());
                bytes.splice(at..at, other[start..end].iter().copied());
            }
            6 => {
                let end = (at + random.below(32)).min(bytes.len());
                bytes.drain(at..end);
            }
            _ => {
                let (from, length) = (random.below(bytes.len()), random.below(16));
                for i in 0..length.min(bytes.len() - at.max(from)) {
                    bytes[at + i] = bytes[from + i];
                }
            }
        }
    }
    bytes
}

/// Why an input is a failure, if it is.
fn failure(bytes: &Bytes) -> Option<String> {
    let start = Instant::now();
    for training in [true, false] {
        let options = ImportOptions { training, ..ImportOptions::default() };
        let imported = catch_unwind(AssertUnwindSafe(|| import(bytes, &options, &NoExternalData)));
        match imported {
            Err(_) => return Some("a panic".into()),
            Ok(Ok(model)) => {
                if let Err(error) = verify(&model.graph) {
                    return Some(format!("a broken graph: {error}"));
                }
            }
            Ok(Err(_)) => {}
        }
    }
    (start.elapsed() > TOO_LONG).then(|| format!("{:.1} s", start.elapsed().as_secs_f64()))
}

fn main() -> std::io::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [seconds, seed, out] = arguments.as_slice() else {
        eprintln!("onnx_fuzz SECONDS SEED OUT <list of models");
        std::process::exit(2);
    };
    let limit = Duration::from_secs(seconds.parse().unwrap_or(60));
    let mut random = Random(seed.parse().unwrap_or(0));
    let mut models = Vec::new();
    for path in std::io::stdin().lock().lines() {
        let bytes = std::fs::read(path?)?;
        if (1..=MOST_BYTES).contains(&bytes.len()) {
            models.push(bytes);
        }
    }
    if models.is_empty() {
        eprintln!("no models to start from");
        std::process::exit(2);
    }
    let out = PathBuf::from(out);
    std::fs::create_dir_all(&out)?;
    let (start, mut tried, mut imported, mut failures) = (Instant::now(), 0u64, 0u64, 0u64);
    while start.elapsed() < limit {
        let bytes = Bytes::from(mutate(&mut random, &models));
        // Before it is tried: a stack that overflows leaves no time for that after.
        std::fs::write(out.join("last.onnx"), &bytes)?;
        tried += 1;
        if let Some(reason) = failure(&bytes) {
            failures += 1;
            eprintln!("{reason}: failure_{tried}.onnx");
            std::fs::write(out.join(format!("failure_{tried}.onnx")), &bytes)?;
        } else if import(&bytes, &ImportOptions::default(), &NoExternalData).is_ok() {
            imported += 1;
        }
    }
    println!(
        "{tried} inputs from {} models, {imported} of them models still; {failures} failures",
        models.len()
    );
    std::process::exit(i32::from(failures > 0));
}
