//! Any bytes for the reader that the environment names: `SHARDWRIGHT_READER=plan`. One program for all readers, since
//! building one takes minutes.
#![no_main]

#[path = "../readers.rs"]
mod readers;

use libfuzzer_sys::fuzz_target;
use readers::{READERS, Reader};
use std::sync::LazyLock;

static CHOSEN: LazyLock<Reader> = LazyLock::new(|| {
    let name = std::env::var("SHARDWRIGHT_READER").unwrap_or_default();
    let known = READERS.map(|(name, _)| name).join(", ");
    let reader = READERS.into_iter().find(|(known, _)| *known == name);
    reader.unwrap_or_else(|| panic!("SHARDWRIGHT_READER is `{name}`; choose one of {known}"))
});

fuzz_target!(|bytes: &[u8]| (CHOSEN.1)(bytes));
