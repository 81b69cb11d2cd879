//! Models that are StableHLO text: `.mlir` and `.stablehlo`, plain or gz, or the text itself.

use crate::files::MOST_BYTES;
use anyhow::Context;
use flate2::read::GzDecoder;
use shardwright_stablehlo::{ImportOptions, ImportedProgram, import};
use std::io::Read;
use std::path::Path;

/// A program that was read: its text, and what it became.
#[derive(Clone, Debug)]
pub struct Program {
    /// The text.
    pub text: String,
    /// Which tensors its arguments and results are.
    pub imported: ImportedProgram,
}

/// Whether a file's name says that it is StableHLO.
pub(crate) fn is_stablehlo(path: &Path) -> bool {
    let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase()).unwrap_or_default();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    name.ends_with(".mlir") || name.ends_with(".stablehlo")
}

/// Reads a program; errors begin with file, line and column.
pub(crate) fn read_program(path: &Path, bytes: Vec<u8>, options: &ImportOptions) -> anyhow::Result<Program> {
    let file = path.display().to_string();
    let bytes =
        if bytes.starts_with(&[0x1f, 0x8b]) { unpack(&bytes).with_context(|| file.clone())? } else { bytes };
    let text = String::from_utf8(bytes);
    let text = text.map_err(|e| {
        anyhow::anyhow!(
            "{file}: byte {} is not text; write the program with `lowered.as_text()`, not as bytecode",
            e.utf8_error().valid_up_to()
        )
    })?;
    let imported = import(&text, &file, options)?;
    Ok(Program { text, imported })
}

fn unpack(bytes: &[u8]) -> anyhow::Result<Vec<u8>> {
    let mut unpacked = Vec::new();
    GzDecoder::new(bytes).take(MOST_BYTES + 1).read_to_end(&mut unpacked).context("is no whole gz file")?;
    anyhow::ensure!(unpacked.len() as u64 <= MOST_BYTES, "is larger than 1 GiB once unpacked");
    Ok(unpacked)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endings_say_what_a_file_is() {
        for name in ["a.mlir", "b/c.stablehlo", "d.mlir.gz", "E.MLIR"] {
            assert!(is_stablehlo(Path::new(name)), "{name}");
        }
        for name in ["a.json", "mlir", "a.gz", "a.onnx"] {
            assert!(!is_stablehlo(Path::new(name)), "{name}");
        }
    }
}
