//! `convert`: converts a cost network from one format to another.

use crate::Verdict;
use crate::files::{read_network, write_atomically};
use clap::ValueEnum;
use shardwright_search::format::{write_cfn, write_iopddl};
use std::path::PathBuf;

/// Converts a cost network to another format, for other solvers.
#[derive(clap::Args)]
pub struct Args {
    /// The network: the contest's JSON, plain or gzip; `-` is standard input
    network: PathBuf,
    /// The file to write, compressed if its name ends in `.gz`
    #[arg(short, long)]
    output: PathBuf,
    /// The format; by default `cfn` if the output's name ends so, else `iopddl`
    #[arg(long)]
    format: Option<Format>,
    /// Leave out the memory limit
    #[arg(long)]
    without_memory: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    /// The contest's JSON
    Iopddl,
    /// toulbar2's cost function networks
    Cfn,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    let problem = read_network(&args.network)?;
    let network = if args.without_memory { problem.network.without_memory() } else { problem.network };
    let name = args.output.to_string_lossy();
    let by_name = if name.trim_end_matches(".gz").ends_with(".cfn") { Format::Cfn } else { Format::Iopddl };
    write_atomically(&args.output, |out| match args.format.unwrap_or(by_name) {
        Format::Iopddl => write_iopddl(&network, &problem.name, out),
        Format::Cfn => write_cfn(&network, &problem.name, out),
    })?;
    Ok(Verdict::Done)
}
