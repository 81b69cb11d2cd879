//! Reading the files that users name, unless they are absurdly large.

use anyhow::Context;
use shardwright_cost::CostFile;
use shardwright_machine as machine;
use shardwright_suggest::{did_you_mean, unknown};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The most bytes of a model or cost file that are read.
pub(crate) const MOST_BYTES: u64 = 1 << 30;

/// So many names of a folder are compared with that of a missing file.
const MOST_NAMES: usize = 10_000;

/// Reads a file.
///
/// # Errors
/// Where it cannot be read, or is larger than 1 GiB.
pub fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    let context = || format!("cannot read {}", path.display());
    let file = File::open(path).with_context(|| format!("{}{}", context(), nearest_file(path)))?;
    let mut bytes = Vec::new();
    file.take(MOST_BYTES + 1).read_to_end(&mut bytes).with_context(context)?;
    anyhow::ensure!(bytes.len() as u64 <= MOST_BYTES, "{} is larger than 1 GiB", path.display());
    Ok(bytes)
}

/// Of a file that does not exist: the file beside it with the nearest name, as a message appends it.
fn nearest_file(path: &Path) -> String {
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let (Some(name), false, Ok(entries)) = (path.file_name(), path.exists(), std::fs::read_dir(folder))
    else {
        return String::new();
    };
    // Sorted, since folders are not.
    let mut known: Vec<String> = entries
        .flatten()
        .take(MOST_NAMES)
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    known.sort_unstable();
    did_you_mean(&name.to_string_lossy(), known.iter().map(String::as_str))
}

/// Opens a machine by built-in name or path.
///
/// # Errors
/// Where there is no such machine, or its file is wrong.
pub fn open_machine(name: &str) -> anyhow::Result<machine::Machine> {
    let read: &mut machine::ReadFile<'_> = &mut |path| {
        // One byte past the limit is enough to know that a file is too large.
        let mut bytes = Vec::new();
        let file = File::open(path).map_err(|error| error.to_string())?;
        let mut file = file.take(machine::MAX_FILE_BYTES as u64 + 1);
        file.read_to_end(&mut bytes).map_err(|error| error.to_string())?;
        Ok(bytes)
    };
    Ok(machine::open(name, read)?)
}

/// Measured costs of a built-in device, or from a file.
pub(crate) fn read_costs(name: &str) -> anyhow::Result<CostFile> {
    if let Some(built_in) = CostFile::builtin(name) {
        return Ok(built_in?);
    }
    let path = PathBuf::from(name);
    // A name without an extension was meant as that of a measured device.
    if path.extension().is_none() && !path.exists() {
        let known: Vec<&str> = CostFile::builtin_names().collect();
        anyhow::bail!("there is no such cost file, and {}", unknown("measured device", name, &known));
    }
    CostFile::from_json(&read(&path)?).with_context(|| path.display().to_string())
}
