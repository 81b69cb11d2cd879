//! The files beside an ONNX model that hold its weights.

use bytes::Bytes;
use shardwright_graph::TensorId;
use shardwright_onnx::{ExternalData, ExternalRange, Literal, TensorSource};
use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Reads files of one folder, and no others.
pub(crate) struct NeighbouringFiles {
    folder: PathBuf,
}

impl NeighbouringFiles {
    /// The files beside this one.
    pub fn of(path: &Path) -> Self {
        let folder = path.parent().filter(|p| *p != Path::new("")).unwrap_or(Path::new("."));
        Self { folder: folder.into() }
    }
}

/// The contents of weights and constants that an ONNX model has, in its own file or in those beside it.
pub struct StoredValues {
    sources: Vec<TensorSource>,
    files: NeighbouringFiles,
}

impl StoredValues {
    pub(crate) fn new(path: &Path, sources: Vec<TensorSource>) -> Self {
        Self { sources, files: NeighbouringFiles::of(path) }
    }

    /// Reads them, in the order of the graph's tensors; those that are missing are left out.
    ///
    /// # Errors
    /// Where a file cannot be read, or does not hold what the model says.
    pub fn load(&self) -> anyhow::Result<Vec<(TensorId, Literal)>> {
        let mut found = Vec::with_capacity(self.sources.len());
        for source in &self.sources {
            let contents = source.load(&self.files).map_err(anyhow::Error::msg)?;
            found.extend(contents.map(|literal| (source.tensor, literal)));
        }
        found.sort_by_key(|(tensor, _)| *tensor);
        Ok(found)
    }
}

impl ExternalData for NeighbouringFiles {
    /// The ONNX reader has refused paths out of the folder by their text; links are checked here.
    fn read(&self, place: &ExternalRange) -> Result<Option<Bytes>, String> {
        let shown = shardwright_graph::printable(&place.location, 200);
        let fail = |error: std::io::Error| format!("external data `{shown}`: {error}");
        let path = self.folder.join(&place.location);
        let real = match path.canonicalize() {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            real => real.map_err(fail)?,
        };
        if !real.starts_with(self.folder.canonicalize().map_err(fail)?) {
            return Err(format!("external data `{shown}` leads out of the model's folder: refused"));
        }
        // Opening a pipe would wait for its writer.
        if !real.metadata().map_err(fail)?.is_file() {
            return Err(format!("external data `{shown}` is not a regular file: refused"));
        }
        let mut file = File::open(real).map_err(fail)?;
        let size = file.metadata().map_err(fail)?.len();
        if place.offset.checked_add(place.length).is_none_or(|end| end > size) {
            return Err(format!(
                "external data `{shown}` has {size} bytes; {} from {} on are asked for",
                place.length, place.offset
            ));
        }
        file.seek(SeekFrom::Start(place.offset)).map_err(fail)?;
        let mut bytes = Vec::new();
        file.take(place.length).read_to_end(&mut bytes).map_err(fail)?;
        Ok(Some(bytes.into()))
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn only_regular_files_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let files = NeighbouringFiles { folder: folder.path().into() };
        let place = |name: &str| ExternalRange { location: name.into(), offset: 0, length: 4 };
        std::fs::write(folder.path().join("plain"), "12345").unwrap();
        assert_eq!(files.read(&place("plain")).unwrap().unwrap()[..], *b"1234");
        assert_eq!(files.read(&place("missing")), Ok(None));
        // A pipe without a writer would wait for ever.
        let pipe = folder.path().join("pipe");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let refused = files.read(&place("pipe")).unwrap_err();
        assert!(refused.contains("`pipe` is not a regular file"), "{refused}");
        std::fs::create_dir(folder.path().join("folder")).unwrap();
        assert!(files.read(&place("folder")).unwrap_err().contains("not a regular file"));
    }
}
