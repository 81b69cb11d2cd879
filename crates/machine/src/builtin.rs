//! The machines that come built in, and how machines are named: `p100x16`, `p100x16:4`, `flat:8`, `cpu:2`, a path.
//!
//! One TOML file each under `machines/`, embedded as text, so that `machines NAME` prints exactly what is used and
//! every constant stands beside its source. `flat:N` and `cpu:N` are made from a file and a number.

use crate::error::MachineError;
use crate::file::{self, ReadFile};
use crate::machine::Machine;

/// Name and file of every built-in machine, in the order that lists show them.
const FILES: &[(&str, &str)] = &[
    ("p100x16", include_str!("../machines/p100x16.toml")),
    ("k80x64", include_str!("../machines/k80x64.toml")),
    ("k80x8", include_str!("../machines/k80x8.toml")),
    ("1080tix64", include_str!("../machines/1080tix64.toml")),
    ("2080tix64", include_str!("../machines/2080tix64.toml")),
    ("a100x64", include_str!("../machines/a100x64.toml")),
    ("h100x64", include_str!("../machines/h100x64.toml")),
    ("h100x4096", include_str!("../machines/h100x4096.toml")),
    ("h200x64", include_str!("../machines/h200x64.toml")),
    ("b200x64", include_str!("../machines/b200x64.toml")),
    ("v5e-256", include_str!("../machines/v5e-256.toml")),
];

/// Machines whose size is part of the name. The files say `count = 1`; the number replaces it.
const SIZED: &[(&str, &str)] =
    &[("flat", include_str!("../machines/flat.toml")), ("cpu", include_str!("../machines/cpu.toml"))];

/// The names of the built-in machines of fixed size.
pub fn builtin_names() -> impl Iterator<Item = &'static str> {
    FILES.iter().map(|&(name, _)| name)
}

/// The text of a built-in machine's file as it stands in the source: with comments and sources. `flat:N` and
/// `cpu:N` give their file with N filled in; a restriction (`p100x16:4`) has no file of its own.
pub fn builtin_file(name: &str) -> Option<String> {
    if let Some((_, text)) = FILES.iter().find(|(known, _)| *known == name) {
        return Some((*text).to_string());
    }
    let (stem, count) = name.split_once(':')?;
    let count: u32 = count.parse().ok()?;
    let (_, text) = SIZED.iter().find(|(known, _)| *known == stem)?;
    Some(
        text.replace("count = 1\n", &format!("count = {count}\n"))
            .replace(&format!("name = \"{stem}\"\n"), &format!("name = \"{stem}:{count}\"\n")),
    )
}

/// Whether a machine's name is a path rather than a built-in name.
pub fn is_file(name: &str) -> bool {
    let stem = split_restriction(name).0;
    stem.ends_with(".toml") || stem.contains(['/', '\\'])
}

/// `p100x16:4` as `p100x16` and 4; no number, no restriction.
fn split_restriction(name: &str) -> (&str, Option<u64>) {
    match name.rsplit_once(':') {
        Some((stem, count)) if !count.is_empty() && count.bytes().all(|b| b.is_ascii_digit()) => {
            // A number beyond 64 bits is more devices than any machine has; restricting will say so.
            (stem, Some(count.parse().unwrap_or(u64::MAX)))
        }
        _ => (name, None),
    }
}

/// A built-in machine: `p100x16`, `flat:8`, or the first devices of one, `p100x16:4`, `flat:8:2`.
pub fn builtin(name: &str) -> Result<Machine, MachineError> {
    let no_files: &mut ReadFile<'_> = &mut |_| Err("built-in machines extend no files".to_string());
    if let Some(text) = builtin_file(name) {
        return file::parse(name, text.as_bytes(), no_files);
    }
    match split_restriction(name) {
        (stem, Some(devices)) if !SIZED.iter().any(|(known, _)| *known == stem) => builtin(stem)
            .map_err(|error| match error {
                MachineError::UnknownMachine { known, .. } => {
                    MachineError::UnknownMachine { name: name.to_string(), known }
                }
                other => other,
            })?
            .restrict(devices),
        _ => {
            let known: Vec<&str> = builtin_names().collect();
            Err(MachineError::UnknownMachine { name: name.to_string(), known: known.join(", ") })
        }
    }
}

/// A machine by name or path, as given to `--machine`: a built-in name, a `.toml` file, either with `:K` for its
/// first K devices. `read` fetches files; this crate does no I/O of its own.
pub fn open(name: &str, read: &mut ReadFile<'_>) -> Result<Machine, MachineError> {
    if !is_file(name) {
        return builtin(name);
    }
    let (path, devices) = split_restriction(name);
    let bytes = read(path).map_err(|reason| MachineError::Unreadable { file: path.to_string(), reason })?;
    let machine = file::parse(path, &bytes, read)?;
    match devices {
        Some(devices) => machine.restrict(devices),
        None => Ok(machine),
    }
}
