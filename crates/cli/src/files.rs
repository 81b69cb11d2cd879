//! Reads and writes the files that users name.
//!
//! A file is written under a temporary name and renamed when it is complete, so that no reader ever sees half a file. A name
//! that ends in `.gz` is compressed.

use anyhow::Context;
use flate2::{Compression, write::GzEncoder};
use shardwright_search::format::{NamedNetwork, read_iopddl};
use std::fs::{File, Metadata};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Reads a cost network in the contest's JSON, plain or gzip; `-` is standard input.
pub fn read_network(path: &Path) -> anyhow::Result<NamedNetwork> {
    let problem = if is_standard(path) {
        read_iopddl(io::stdin().lock())
    } else {
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        anyhow::ensure!(!file.metadata()?.is_dir(), "{} is a folder, not a network", path.display());
        read_iopddl(file)
    };
    problem.with_context(|| path.display().to_string())
}

/// The name of standard output and standard input.
const STANDARD: &str = "-";

/// Writes a temporary file in the same folder and renames it. Links are followed. Devices and pipes (`/dev/stdout`) are written
/// directly; `-` is standard output.
pub fn write_atomically(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> anyhow::Result<()> {
    let context = || format!("cannot write {}", path.display());
    if is_standard(path) {
        let mut out = BufWriter::new(io::stdout().lock());
        return write(&mut out).and_then(|()| out.flush()).context("cannot write standard output");
    }
    let known = path.metadata().ok();
    anyhow::ensure!(!known.as_ref().is_some_and(Metadata::is_dir), "{}: it is a folder", context());
    if known.as_ref().is_some_and(|known| !known.is_file()) {
        let mut out = BufWriter::new(File::options().write(true).open(path).with_context(context)?);
        return write(&mut out).and_then(|()| out.flush()).with_context(context);
    }
    // The target of a link, if it exists.
    let resolved = std::fs::canonicalize(path).ok();
    let path = resolved.as_deref().unwrap_or(path);
    let folder = folder_of(path);
    let mut temporary = tempfile::NamedTempFile::new_in(folder).with_context(context)?;
    let mut buffered = BufWriter::new(&mut temporary);
    if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gz")) {
        let mut packed = GzEncoder::new(&mut buffered, Compression::default());
        write(&mut packed).and_then(|()| packed.finish().map(drop)).with_context(context)?;
    } else {
        write(&mut buffered).with_context(context)?;
    }
    buffered.flush().with_context(context)?;
    drop(buffered);
    make_readable(temporary.as_file()).with_context(context)?;
    // The contents must be on the disk before the name refers to them.
    temporary.as_file().sync_all().with_context(context)?;
    temporary.persist(path).map_err(|error| error.error).with_context(context)?;
    Ok(())
}

/// Whether a file is standard output: then nothing else is printed there.
pub fn is_standard(path: &Path) -> bool {
    path == Path::new(STANDARD)
}

/// Refuses files that cannot be written, before the work whose results they are to hold.
pub fn check_outputs<'p>(paths: impl IntoIterator<Item = &'p PathBuf>) -> anyhow::Result<()> {
    let (standard, files): (Vec<&PathBuf>, Vec<&PathBuf>) =
        paths.into_iter().partition(|path| is_standard(path));
    anyhow::ensure!(standard.len() < 2, "only one of the outputs can be standard output (`-`)");
    for path in files {
        let context = || format!("cannot write {}", path.display());
        match path.metadata() {
            Ok(known) if known.is_dir() => anyhow::bail!("{}: it is a folder", context()),
            Ok(known) if !known.is_file() => {}
            _ => {
                let folder = folder_of(path);
                let known = folder.metadata().with_context(context)?;
                anyhow::ensure!(known.is_dir(), "{}: {} is not a folder", context(), folder.display());
                tempfile::NamedTempFile::new_in(folder).with_context(context)?;
            }
        }
    }
    Ok(())
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

/// Temporary files are private; a result is readable by all.
#[cfg(unix)]
fn make_readable(file: &File) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    file.set_permissions(std::fs::Permissions::from_mode(0o644))
}

#[cfg(not(unix))]
fn make_readable(_: &File) -> io::Result<()> {
    Ok(())
}
