//! Errors in machine descriptions, with location and remedy.

use std::fmt;

/// A line of a machine file. Built-in files are named like the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileLocation {
    /// The file as the caller named it.
    pub file: String,
    /// Counted from 1; 0 for the whole file.
    pub line: u32,
}

impl fmt::Display for FileLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line == 0 { f.write_str(&self.file) } else { write!(f, "{}:{}", self.file, self.line) }
    }
}

/// Why a machine name or file was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MachineError {
    /// Neither a built-in name nor a path.
    #[error("there is no machine `{name}`; {known}{nearest}")]
    UnknownMachine {
        /// The name.
        name: String,
        /// The nearest known name, as the message's text; empty where none is near.
        nearest: String,
        /// The built-in names, or where they are listed.
        known: String,
    },
    /// The text is not TOML.
    #[error("{location}: {message}")]
    Syntax {
        /// The location.
        location: FileLocation,
        /// The TOML parser's message.
        message: String,
    },
    /// The file is not UTF-8 text.
    #[error("{location}: not UTF-8 text (byte {offset}); machine files are plain TOML")]
    NotUtf8 {
        /// The line that holds the first wrong byte.
        location: FileLocation,
        /// Its offset in the file.
        offset: usize,
    },
    /// The file cannot be a machine description.
    #[error("{file}: {bytes} bytes is too large for a machine file (at most {limit})")]
    FileTooLarge {
        /// The file.
        file: String,
        /// Its size.
        bytes: usize,
        /// The largest allowed.
        limit: usize,
    },
    /// An unknown key.
    #[error("{location}: unknown key `{key}`; known here: {known}")]
    UnknownKey {
        /// The location.
        location: FileLocation,
        /// Its full path, such as `level[0].bandwith`.
        key: String,
        /// The allowed keys.
        known: String,
    },
    /// A missing key.
    #[error("{location}: `{key}` is missing: {remedy}")]
    MissingKey {
        /// The table that lacks it.
        location: FileLocation,
        /// Its full path.
        key: String,
        /// What to write.
        remedy: String,
    },
    /// A value that is not allowed.
    #[error("{location}: `{key}`: {reason}")]
    BadValue {
        /// The location.
        location: FileLocation,
        /// The key's full path.
        key: String,
        /// What is wrong and what is allowed.
        reason: String,
    },
    /// An invalid machine description that did not come from a file.
    #[error("machine description: `{key}`: {reason}")]
    Invalid {
        /// The field.
        key: String,
        /// What is wrong and what is allowed.
        reason: String,
    },
    /// Files that extend each other in a cycle.
    #[error("{location}: `extends` forms a cycle: {chain}")]
    Cycle {
        /// The line that closes the cycle.
        location: FileLocation,
        /// The files, in order.
        chain: String,
    },
    /// Too many files extending each other.
    #[error("{location}: more than {limit} files extend one another")]
    TooDeep {
        /// The first `extends` beyond the limit.
        location: FileLocation,
        /// The longest allowed chain.
        limit: usize,
    },
    /// A file could not be read.
    #[error("cannot read {file}: {reason}")]
    Unreadable {
        /// The file.
        file: String,
        /// The reason.
        reason: String,
    },
    /// `NAME:GxK` for a machine that is not G groups of K.
    #[error("`{machine}` as {groups} groups of {members}: {reason}")]
    CannotGroup {
        /// The machine.
        machine: String,
        /// G.
        groups: u64,
        /// K.
        members: u64,
        /// Why it is impossible.
        reason: String,
    },
    /// `KxGPU` or a TPU slice in a size that the machine does not come in.
    #[error("`{name}`: {reason}")]
    CannotResize {
        /// The machine.
        name: String,
        /// Why it is impossible, and numbers that are possible.
        reason: String,
    },
    /// `NAME:K` where K devices are not whole units of the machine.
    #[error("`{machine}:{devices}`: {reason}")]
    CannotRestrict {
        /// The machine.
        machine: String,
        /// K.
        devices: u64,
        /// Why it is impossible, and numbers that are possible.
        reason: String,
    },
}
