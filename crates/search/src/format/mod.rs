//! Networks as files: the contest's JSON, read and written, and toulbar2's `cfn`, written.
//!
//! Nothing here opens a file: readers take any [`std::io::Read`], writers any [`std::io::Write`]. What is
//! compressed is found out from the content, never from a name.

mod cfn;
mod iopddl;
mod lexer;
mod number;
mod write;

pub use cfn::write_cfn;
pub use iopddl::{Problem, ReadError, ReadLimits, read_iopddl, read_iopddl_with};
pub use write::write_iopddl;
