//! Errors of the StableHLO reader: file, line, column, reason and remedy.

/// A text that cannot be read, or a program that cannot be planned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}:{line}:{column}: {reason}")]
pub struct StablehloError {
    /// The name of the file.
    pub file: String,
    /// The line, from one.
    pub line: usize,
    /// The column in characters, from one.
    pub column: usize,
    /// The reason, and the remedy.
    pub reason: String,
}

/// An error at a byte of the text. It becomes a [`StablehloError`] once the file name and lines are known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TextError {
    pub at: usize,
    pub reason: String,
}

impl TextError {
    pub fn new(at: usize, reason: impl Into<String>) -> Self {
        Self { at, reason: reason.into() }
    }

    pub fn locate(self, file: &str, text: &str) -> StablehloError {
        let mut at = self.at.min(text.len());
        while !text.is_char_boundary(at) {
            at -= 1;
        }
        let before = &text[..at];
        let start = before.rfind('\n').map_or(0, |newline| newline + 1);
        StablehloError {
            file: file.to_string(),
            line: before.bytes().filter(|&b| b == b'\n').count() + 1,
            column: before[start..].chars().count() + 1,
            // The reason may quote the text.
            reason: shardwright_graph::printable(&self.reason, 1000),
        }
    }
}

pub(super) type Result<T, E = TextError> = std::result::Result<T, E>;
