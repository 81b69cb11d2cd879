//! What can be wrong with a machine, said with the place and the remedy.

use std::fmt;

/// A line of a machine file. Built-in files are named like the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The file as it was asked for.
    pub file: String,
    /// Counted from 1; 0 where the whole file is meant.
    pub line: u32,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line == 0 { f.write_str(&self.file) } else { write!(f, "{}:{}", self.file, self.line) }
    }
}

/// Why a machine could not be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MachineError {
    /// Neither a built-in name nor a path.
    #[error(
        "there is no machine `{name}`; built in are {known}, `flat:N` and `cpu:N`; a file's path ends in .toml"
    )]
    UnknownMachine {
        /// What was asked for.
        name: String,
        /// The built-in names.
        known: String,
    },
    /// The text is not TOML.
    #[error("{place}: {message}")]
    Syntax {
        /// Where.
        place: Place,
        /// What the TOML parser says.
        message: String,
    },
    /// The file is not UTF-8 text.
    #[error("{place}: not UTF-8 text (byte {offset}); machine files are plain TOML")]
    NotUtf8 {
        /// The line that holds the first wrong byte.
        place: Place,
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
    /// A key that means nothing here.
    #[error("{place}: unknown key `{key}`; known here: {known}")]
    UnknownKey {
        /// Where.
        place: Place,
        /// Its full path, such as `level[0].bandwith`.
        key: String,
        /// What may stand there.
        known: String,
    },
    /// A key that must be there is not.
    #[error("{place}: `{key}` is missing: {remedy}")]
    MissingKey {
        /// The table that lacks it.
        place: Place,
        /// Its full path.
        key: String,
        /// What to write.
        remedy: String,
    },
    /// A value that is not allowed.
    #[error("{place}: `{key}`: {reason}")]
    BadValue {
        /// Where.
        place: Place,
        /// The key's full path.
        key: String,
        /// What is wrong and what is allowed.
        reason: String,
    },
    /// A machine description that did not come from a file is wrong.
    #[error("machine description: `{key}`: {reason}")]
    Invalid {
        /// The field.
        key: String,
        /// What is wrong and what is allowed.
        reason: String,
    },
    /// Files that extend each other in a circle.
    #[error("{place}: `extends` goes round in a circle: {chain}")]
    Cycle {
        /// The line that closes the circle.
        place: Place,
        /// The files, in order.
        chain: String,
    },
    /// Too many files extending each other.
    #[error("{place}: more than {limit} files extend one another")]
    TooDeep {
        /// Where the chain was cut.
        place: Place,
        /// The longest allowed chain.
        limit: usize,
    },
    /// A file could not be read.
    #[error("cannot read {file}: {reason}")]
    Unreadable {
        /// The file.
        file: String,
        /// Why.
        reason: String,
    },
    /// `NAME:GxK` where the machine is not G groups of K.
    #[error("`{machine}` as {groups} groups of {members}: {reason}")]
    CannotGroup {
        /// The machine.
        machine: String,
        /// G.
        groups: u64,
        /// K.
        members: u64,
        /// Why it cannot be.
        reason: String,
    },
    /// `NAME:K` where K devices are not a whole part of the machine.
    #[error("`{machine}:{devices}`: {reason}")]
    CannotRestrict {
        /// The machine.
        machine: String,
        /// K.
        devices: u64,
        /// Why it does not fit and which numbers do.
        reason: String,
    },
}
