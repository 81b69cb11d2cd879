//! The `shardwright` program; everything is in the library beside it, which the Python package runs too.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(shardwright::run(std::env::args_os()))
}
