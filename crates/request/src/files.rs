//! Reading the files that users name, unless they are absurdly large.

use anyhow::Context;
use shardwright_cost::CostFile;
use shardwright_machine as machine;
use shardwright_suggest::unknown;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The most bytes of a model or cost file that are read.
pub(crate) const MOST_BYTES: u64 = 1 << 30;

/// Reads a file.
///
/// # Errors
/// Where it cannot be read, or is larger than 1 GiB.
pub fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    let context = || format!("cannot read {}", path.display());
    let file = File::open(path).with_context(context)?;
    let mut bytes = Vec::new();
    file.take(MOST_BYTES + 1).read_to_end(&mut bytes).with_context(context)?;
    anyhow::ensure!(bytes.len() as u64 <= MOST_BYTES, "{} is larger than 1 GiB", path.display());
    Ok(bytes)
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
