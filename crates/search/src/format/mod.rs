//! File formats of networks: reads and writes the contest's JSON, and writes toulbar2's `cfn`.
//!
//! Readers take any [`std::io::Read`] and writers any [`std::io::Write`]; no file is opened here. Compression is detected
//! by content, not by name.

mod cfn;
mod iopddl;
mod lexer;
mod number;
mod write;

pub use cfn::write_cfn;
pub use iopddl::{NamedNetwork, ReadError, ReadLimits, read_iopddl, read_iopddl_with};
pub use write::write_iopddl;
