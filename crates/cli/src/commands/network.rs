//! `network`: writes the search problem of a model on a machine, for other solvers to try.

use crate::Verdict;
use crate::files::write_atomically;
use crate::planning::PlanningArgs;
use shardwright_plan::limited;
use shardwright_search::format::{write_cfn, write_iopddl};
use shardwright_sim::find;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Writes the search problem: costs in picoseconds, one variable per layer, or per op with --untied.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    planning: PlanningArgs,
    /// The file to write, compressed if its name ends in .gz; `-` is standard output
    #[arg(short, long, default_value = "-")]
    output: PathBuf,
    /// The contest's JSON, or toulbar2's cfn
    #[arg(long, value_enum, default_value_t = Format::Iopddl)]
    format: Format,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Format {
    Iopddl,
    Cfn,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    let request = args.planning.open()?;
    let network = args.planning.on_threads(|| -> anyhow::Result<_> {
        let problem = request.problem(&args.planning.control(&request, find("exact")?))?;
        Ok(match args.planning.memory {
            Some(limit) => limited(&problem, limit)?,
            None => problem.network,
        })
    })??;
    let name = format!("{} on {}", args.planning.model, args.planning.machine);
    let write = |out: &mut dyn Write| match args.format {
        Format::Iopddl => write_iopddl(&network, &name, out),
        Format::Cfn => write_cfn(&network, &name, out),
    };
    if args.output == Path::new("-") {
        write(&mut io::stdout().lock())?;
    } else {
        write_atomically(&args.output, write)?;
    }
    Ok(Verdict::Done)
}
