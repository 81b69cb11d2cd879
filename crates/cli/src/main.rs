//! The `shardwright` command: a thin shell over the library crates.
//!
//! One file per subcommand in `commands/`; this file only says which exist and turns their result into an
//! exit status: 0 done, 1 the request cannot be met, 2 bad usage or bad input.

mod commands;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Finds the fastest way to split a training step over devices, proves it, shows why, and runs it.
#[derive(Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {}

/// What a command that ran to its end has to say: the request was met, or it cannot be.
pub enum Verdict {
    /// The request was met.
    Done,
    /// The input was fine, but what was asked for does not exist (say, no plan fits the memory).
    CannotBeMet,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let verdict: anyhow::Result<Verdict> = match cli.command {
        None => Ok(Verdict::Done),
        Some(command) => match command {},
    };
    match verdict {
        Ok(Verdict::Done) => ExitCode::SUCCESS,
        Ok(Verdict::CannotBeMet) => ExitCode::from(1),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}
