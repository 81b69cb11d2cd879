//! `convert`: a cost network from one format to another.

use crate::Verdict;
use crate::files::{read_network, write_atomically};
use clap::ValueEnum;
use shardwright_search::format::{write_cfn, write_iopddl};
use std::path::PathBuf;

/// Converts a bare cost network, say for another solver to check.
#[derive(clap::Args)]
pub struct Args {
    /// The network: the contest's JSON, plain or gzip; `-` reads standard input.
    network: PathBuf,
    /// Where to write it; a name that ends in `.gz` is compressed.
    #[arg(short, long)]
    output: PathBuf,
    /// The format; by default `cfn` where the output's name says so, else `iopddl`.
    #[arg(long)]
    format: Option<Format>,
    /// Leave the memory limit out.
    #[arg(long)]
    without_memory: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    /// The contest's JSON.
    Iopddl,
    /// toulbar2's cost function networks.
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
