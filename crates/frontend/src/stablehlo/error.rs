//! Where a StableHLO text goes wrong: file, line, column, what, and what to do about it.

/// A text that cannot be read, or a program that cannot be planned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}:{line}:{column}: {reason}")]
pub struct StablehloError {
    /// What the text is called.
    pub file: String,
    /// The line, from one.
    pub line: usize,
    /// The column in characters, from one.
    pub column: usize,
    /// What is wrong, and the remedy.
    pub reason: String,
}

/// What is wrong at a byte of the text; becomes a [`StablehloError`] once file and lines are known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    pub at: usize,
    pub reason: String,
}

impl Fault {
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
            reason: self.reason,
        }
    }
}

pub(super) type Result<T, E = Fault> = std::result::Result<T, E>;
