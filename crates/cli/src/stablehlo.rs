//! Models that are StableHLO text: `.mlir` and `.stablehlo`, plain or gz.

use crate::planning::MOST_BYTES;
use anyhow::Context;
use flate2::read::GzDecoder;
use shardwright_frontend::stablehlo::{Imported, Options, import};
use shardwright_graph::Role;
use std::io::Read;
use std::path::Path;

/// What the text does not say.
#[derive(Clone, Default, clap::Args)]
pub struct StablehloArgs {
    /// What an argument of a StableHLO program is for: `params.*=parameter`, `arg3=input`; roles are parameter,
    /// state, input and constant; may be repeated
    #[arg(long, value_name = "NAME=ROLE", value_parser = named_role)]
    role: Vec<(String, Role)>,
    /// Plan custom calls to this target replicated: for pure functions; may be repeated
    #[arg(long, value_name = "TARGET")]
    opaque: Vec<String>,
}

fn named_role(text: &str) -> Result<(String, Role), String> {
    let (name, role) = text.rsplit_once('=').ok_or("expected NAME=ROLE")?;
    let role = match role {
        "parameter" => Role::Parameter,
        "state" => Role::OptimizerState,
        "input" => Role::Input,
        "constant" => Role::Constant,
        _ => return Err(format!("there is no role {role}; choose parameter, state, input or constant")),
    };
    Ok((name.into(), role))
}

/// Whether a file's name says that it is StableHLO.
pub fn is_stablehlo(path: &Path) -> bool {
    let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase()).unwrap_or_default();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    name.ends_with(".mlir") || name.ends_with(".stablehlo")
}

impl StablehloArgs {
    /// Reads a program; errors begin with file, line and column.
    pub fn read(&self, path: &Path, bytes: Vec<u8>) -> anyhow::Result<Imported> {
        let file = path.display().to_string();
        let bytes = if bytes.starts_with(&[0x1f, 0x8b]) {
            unpack(&bytes).with_context(|| file.clone())?
        } else {
            bytes
        };
        let text = String::from_utf8(bytes);
        let text = text.map_err(|e| {
            anyhow::anyhow!(
                "{file}: byte {} is not text; write the program with `lowered.as_text()`, not as bytecode",
                e.utf8_error().valid_up_to()
            )
        })?;
        let options = Options { roles: self.role.clone(), opaque: self.opaque.clone() };
        Ok(import(&text, &file, &options)?)
    }
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
