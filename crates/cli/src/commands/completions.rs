//! `completions`: completion scripts for shells.

use crate::{Cli, Verdict};
use clap::CommandFactory;
use clap_complete::Shell;
use std::io::{self, Write};

/// Prints a completion script for bash, elvish, fish, powershell or zsh.
#[derive(clap::Args)]
pub struct Args {
    /// The shell
    shell: Shell,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "shardwright", &mut script);
    io::stdout().lock().write_all(&script)?;
    Ok(Verdict::Done)
}
