//! Feeds arbitrary bytes to the reader that the environment names: `SHARDWRIGHT_READER=plan`. One program serves all
//! readers, since a build takes minutes.
#![no_main]

#[path = "../mutate.rs"]
mod mutate;
#[path = "../readers.rs"]
mod readers;

use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};
use readers::{READERS, Reader};
use std::sync::LazyLock;

static CHOSEN: LazyLock<Reader> = LazyLock::new(|| {
    let known = READERS.map(|(name, _)| name).join(", ");
    let Ok(name) = std::env::var("SHARDWRIGHT_READER") else {
        panic!("SHARDWRIGHT_READER is not set; choose one of {known}")
    };
    let reader = READERS.into_iter().find(|(known, _)| *known == name);
    reader.unwrap_or_else(|| panic!("SHARDWRIGHT_READER is `{name}`; choose one of {known}"))
});

fuzz_target!(|bytes: &[u8]| (CHOSEN.1)(bytes));

// Half of the mutants keep the structure of the format; libFuzzer makes the others.
fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    if seed % 2 == 0 {
        return fuzzer_mutate(data, size, max_size);
    }
    let mutant = mutate::mutate(CHOSEN.0, &data[..size], &mut mutate::Random(seed.into()));
    let length = mutant.len().min(max_size).min(data.len());
    data[..length].copy_from_slice(&mutant[..length]);
    length
});
