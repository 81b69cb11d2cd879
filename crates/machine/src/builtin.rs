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
            // The machine's name; its device's, further down, is that of costs for machines of any size.
            .replacen(&format!("name = \"{stem}\"\n"), &format!("name = \"{stem}:{count}\"\n"), 1),
    )
}

/// Whether a machine's name is a path rather than a built-in name.
pub fn is_file(name: &str) -> bool {
    let stem = split_part(name).0;
    stem.ends_with(".toml") || stem.contains(['/', '\\'])
}

/// What a name asks of a machine.
#[derive(Clone, Copy)]
enum Part {
    /// Its first devices.
    First(u64),
    /// Its first devices, in groups of some size.
    Groups(u64, u64),
}

impl Part {
    fn of(self, machine: &Machine) -> Result<Machine, MachineError> {
        match self {
            Part::First(devices) => machine.restrict(devices),
            Part::Groups(groups, members) => {
                machine.restrict(groups.saturating_mul(members))?.grouped(groups, members)
            }
        }
    }
}

/// `p100x16:4` as `p100x16` and the first 4, `flat:4x2` as `flat` and four groups of two; the name alone otherwise.
fn split_part(name: &str) -> (&str, Option<Part>) {
    // A number beyond 64 bits is more devices than any machine has; restricting will say so.
    let number = |text: &str| {
        let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        digits.then(|| text.parse().unwrap_or(u64::MAX))
    };
    let part = |text: &str| match text.split_once('x') {
        Some((groups, members)) => Some(Part::Groups(number(groups)?, number(members)?)),
        None => number(text).map(Part::First),
    };
    match name.rsplit_once(':').map(|(stem, text)| (stem, part(text))) {
        Some((stem, Some(part))) => (stem, Some(part)),
        _ => (name, None),
    }
}

/// A built-in machine: `p100x16`, `flat:8`, or the first devices of one, `p100x16:4`, `flat:8:2`, also in groups,
/// `flat:4x2`.
pub fn builtin(name: &str) -> Result<Machine, MachineError> {
    let no_files: &mut ReadFile<'_> = &mut |_| Err("built-in machines extend no files".to_string());
    if let Some(text) = builtin_file(name) {
        return file::parse(name, text.as_bytes(), no_files);
    }
    let sized = |stem: &str| SIZED.iter().any(|(known, _)| *known == stem);
    match split_part(name) {
        (stem, Some(Part::Groups(groups, members))) if sized(stem) => {
            builtin(&format!("{stem}:{}", groups.saturating_mul(members)))?.grouped(groups, members)
        }
        (stem, Some(part)) if !sized(stem) => part.of(&builtin(stem).map_err(|error| match error {
            MachineError::UnknownMachine { known, .. } => {
                MachineError::UnknownMachine { name: name.to_string(), known }
            }
            other => other,
        })?),
        _ => {
            let known: Vec<&str> = builtin_names().collect();
            Err(MachineError::UnknownMachine { name: name.to_string(), known: known.join(", ") })
        }
    }
}

/// A machine by name or path, as given to `--machine`: a built-in name, a `.toml` file, either with `:K` for its
/// first K devices or `:GxK` for G groups of K. `read` fetches files; this crate does no I/O of its own.
pub fn open(name: &str, read: &mut ReadFile<'_>) -> Result<Machine, MachineError> {
    if !is_file(name) {
        return builtin(name);
    }
    let (path, part) = split_part(name);
    let bytes = read(path).map_err(|reason| MachineError::Unreadable { file: path.to_string(), reason })?;
    let machine = file::parse(path, &bytes, read)?;
    part.map_or(Ok(machine.clone()), |part| part.of(&machine))
}
