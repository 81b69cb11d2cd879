//! The built-in machines, and the names of machines: `p100x16`, `8xh100`, `p100x16:4`, `flat:8`, `cpu:2`, or a path.
//!
//! Each built-in machine is a TOML file under `machines/`, embedded as text. `machines NAME` prints exactly the text in
//! use, with the source of every constant. `flat:N` and `cpu:N` are made from a file and a number.

use crate::error::MachineError;
use crate::file::{self, ReadFile};
use crate::machine::Machine;
use crate::sized::{SizedName, suggestion};

/// Name and file of every built-in machine, in list order.
const FILES: &[(&str, &str)] = &[
    ("p100x16", include_str!("../machines/p100x16.toml")),
    ("k80x64", include_str!("../machines/k80x64.toml")),
    ("k80x8", include_str!("../machines/k80x8.toml")),
    ("1080tix64", include_str!("../machines/1080tix64.toml")),
    ("2080tix64", include_str!("../machines/2080tix64.toml")),
    ("a100x64", include_str!("../machines/a100x64.toml")),
    ("h100x64", include_str!("../machines/h100x64.toml")),
    ("h200x64", include_str!("../machines/h200x64.toml")),
    ("b200x64", include_str!("../machines/b200x64.toml")),
    ("gb200x576", include_str!("../machines/gb200x576.toml")),
    ("a100-40gbx64", include_str!("../machines/a100-40gbx64.toml")),
    ("a100-4nicx64", include_str!("../machines/a100-4nicx64.toml")),
    ("h100-96gbx64", include_str!("../machines/h100-96gbx64.toml")),
    ("v100x64", include_str!("../machines/v100x64.toml")),
    ("a10x64", include_str!("../machines/a10x64.toml")),
    ("l4x64", include_str!("../machines/l4x64.toml")),
    ("l40sx64", include_str!("../machines/l40sx64.toml")),
    ("t4x64", include_str!("../machines/t4x64.toml")),
    ("mi300xx64", include_str!("../machines/mi300xx64.toml")),
    ("mi325xx64", include_str!("../machines/mi325xx64.toml")),
    ("v4-256", include_str!("../machines/v4-256.toml")),
    ("v5p-256", include_str!("../machines/v5p-256.toml")),
    ("v6e-256", include_str!("../machines/v6e-256.toml")),
    ("v5e-256", include_str!("../machines/v5e-256.toml")),
];

/// Machines whose size is part of the name. The number replaces `count = 1` in the file.
const SIZED: &[(&str, &str)] =
    &[("flat", include_str!("../machines/flat.toml")), ("cpu", include_str!("../machines/cpu.toml"))];

/// The names of the built-in machines of fixed size.
pub fn builtin_names() -> impl Iterator<Item = &'static str> {
    FILES.iter().map(|&(name, _)| name)
}

/// The text of a built-in machine's file, with comments and sources. For `flat:N` and `cpu:N` the text contains N. That of
/// `8xh100` refers to the file with the sources. A restriction (`p100x16:4`) has no file.
pub fn builtin_file(name: &str) -> Option<String> {
    if let Some((_, text)) = FILES.iter().find(|(known, _)| *known == name) {
        return Some((*text).to_string());
    }
    if let Some(sized) = SizedName::parse(name) {
        let machine = sized.machine().ok()?;
        let base = sized.base;
        return Some(format!(
            "# `{base}` in another size. Its file has the sources of all constants.\n{}",
            machine.to_toml()
        ));
    }
    let (stem, count) = name.split_once(':')?;
    let count: u32 = count.parse().ok()?;
    let (_, text) = SIZED.iter().find(|(known, _)| *known == stem)?;
    Some(
        text.replace("count = 1\n", &format!("count = {count}\n"))
            // Only the machine's name: cost files for machines of any size use the device's name further down.
            .replacen(&format!("name = \"{stem}\"\n"), &format!("name = \"{stem}:{count}\"\n"), 1),
    )
}

/// Whether a machine's name is a path rather than a built-in name.
pub fn is_file(name: &str) -> bool {
    let stem = split_part(name).0;
    stem.ends_with(".toml") || stem.contains(['/', '\\'])
}

/// The part of a machine that a name selects.
#[derive(Clone, Copy)]
enum DeviceSelection {
    /// Its first devices.
    First(u64),
    /// Its first devices, in groups of some size.
    Groups(u64, u64),
}

impl DeviceSelection {
    fn of(self, machine: &Machine) -> Result<Machine, MachineError> {
        match self {
            DeviceSelection::First(devices) => machine.restrict(devices),
            DeviceSelection::Groups(groups, members) => {
                machine.restrict(groups.saturating_mul(members))?.grouped(groups, members)
            }
        }
    }
}

/// Splits `p100x16:4` into `p100x16` and the first 4 devices, and `flat:4x2` into `flat` and four groups of two. Other
/// names have no selection.
fn split_part(name: &str) -> (&str, Option<DeviceSelection>) {
    // A number beyond 64 bits exceeds every machine, and `restrict` reports that.
    let number = |text: &str| {
        let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        digits.then(|| text.parse().unwrap_or(u64::MAX))
    };
    let part = |text: &str| match text.split_once('x') {
        Some((groups, members)) => Some(DeviceSelection::Groups(number(groups)?, number(members)?)),
        None => number(text).map(DeviceSelection::First),
    };
    match name.rsplit_once(':').map(|(stem, text)| (stem, part(text))) {
        Some((stem, Some(part))) => (stem, Some(part)),
        _ => (name, None),
    }
}

/// A built-in machine (`p100x16`, `flat:8`), its first devices (`p100x16:4`, `flat:8:2`) or groups (`flat:4x2`).
pub fn builtin(name: &str) -> Result<Machine, MachineError> {
    let no_files: &mut ReadFile<'_> = &mut |_| Err("built-in machines extend no files".to_string());
    if FILES.iter().all(|(known, _)| *known != name)
        && let Some(sized) = SizedName::parse(name)
    {
        return sized.machine();
    }
    if let Some(text) = builtin_file(name) {
        return file::parse(name, text.as_bytes(), no_files);
    }
    let sized = |stem: &str| SIZED.iter().any(|(known, _)| *known == stem);
    match split_part(name) {
        (stem, Some(DeviceSelection::Groups(groups, members))) if sized(stem) => {
            builtin(&format!("{stem}:{}", groups.saturating_mul(members)))?.grouped(groups, members)
        }
        (stem, Some(part)) if !sized(stem) => part.of(&builtin(stem).map_err(|error| match error {
            MachineError::UnknownMachine { .. } => unknown(name),
            other => other,
        })?),
        _ => Err(unknown(name)),
    }
}

/// The error about a name that no machine has.
fn unknown(name: &str) -> MachineError {
    let nearest = suggestion(name);
    let known = match nearest.is_empty() {
        true => format!(
            "built in are {}, `KxGPU` of each (`8xh100`), `flat:N` and `cpu:N`; a file's path ends in .toml",
            builtin_names().collect::<Vec<_>>().join(", ")
        ),
        false => "`shardwright machines` lists them".into(),
    };
    MachineError::UnknownMachine { name: name.to_string(), nearest, known }
}

/// A machine by name or path, as given to `--machine`: a built-in name or a `.toml` file. `:K` selects its first K
/// devices, `:GxK` G groups of K. `read` reads files.
pub fn open(name: &str, read: &mut ReadFile<'_>) -> Result<Machine, MachineError> {
    if !is_file(name) {
        return builtin(name);
    }
    let (path, part) = split_part(name);
    let bytes = read(path).map_err(|reason| MachineError::Unreadable { file: path.to_string(), reason })?;
    let machine = file::parse(path, &bytes, read)?;
    part.map_or(Ok(machine.clone()), |part| part.of(&machine))
}
