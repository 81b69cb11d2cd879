//! The files beside an ONNX model that hold its weights.

use bytes::Bytes;
use shardwright_frontend::onnx::{ExternalData, ExternalPlace, Literal, Source};
use shardwright_graph::TensorId;
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
    sources: Vec<Source>,
    files: NeighbouringFiles,
}

impl StoredValues {
    pub(crate) fn new(path: &Path, sources: Vec<Source>) -> Self {
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
    /// The front end has refused paths that lead out of the folder by their text; links are checked here.
    fn read(&self, place: &ExternalPlace) -> Result<Option<Bytes>, String> {
        let shown = place.location.escape_default();
        let fail = |error: std::io::Error| format!("external data `{shown}`: {error}");
        let path = self.folder.join(&place.location);
        let real = match path.canonicalize() {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            real => real.map_err(fail)?,
        };
        if !real.starts_with(self.folder.canonicalize().map_err(fail)?) {
            return Err(format!("external data `{shown}` leads out of the model's folder: refused"));
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
