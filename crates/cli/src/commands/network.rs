//! `network`: writes the cost network of a model on a machine, for other solvers.

use crate::Verdict;
use crate::files::{check_outputs, write_atomically};
use crate::interrupt;
use anyhow::{Context as _, ensure};
use shardwright_plan::{KeepSpace, keep_network, limited};
use shardwright_request::{PipelineChoice, RecomputeUnit, Request};
use shardwright_search::{
    Control,
    format::{write_cfn, write_iopddl},
};
use shardwright_strategies::find;
use std::io::Write;
use std::path::PathBuf;

/// Writes the cost network: costs in picoseconds, one variable per layer, or per op with --untied.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    request: Request,
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
    ensure!(
        args.request.pipeline == PipelineChoice::Off
            && args.request.as_plan.is_none()
            && !args.request.uniform,
        "--pipeline, --as, --uniform: a network has no stages; `stages` solves pipeline problems"
    );
    check_outputs([&args.output])?;
    let mut inputs = args.request.open()?;
    // One step has one network: the first of the variants that may be planned.
    let variant = inputs.variants()?[0];
    inputs.graph = variant.graph(&inputs.graph)?.graph.into_owned();
    let network = args.request.on_threads(|| -> anyhow::Result<_> {
        let planner = inputs.planner();
        // Nothing is searched: a time limit does not apply.
        let control = Control { deadline: None, ..inputs.control(find("exact")?, interrupt::flag()) };
        let problem = planner.problem(&control)?;
        let memory = inputs.constraints().memory;
        if args.request.recompute_policy == RecomputeUnit::Ops {
            let built = keep_network(problem, &KeepSpace::of(problem.context.graph), memory, &control)?;
            return built.map(|built| built.network).context(
                "--recompute-policy ops: the network of configs and recomputed ops is too large, or single ops choose (--untied); \
                 plan solves it in parts",
            );
        }
        Ok(match memory {
            Some(limit) => limited(problem, limit, &control)?,
            None => problem.network.clone(),
        })
    })??;
    let name = format!("{} on {}", args.request.model.name, args.request.machine);
    let write = |out: &mut dyn Write| match args.format {
        Format::Iopddl => write_iopddl(&network, &name, out),
        Format::Cfn => write_cfn(&network, &name, out),
    };
    write_atomically(&args.output, write)?;
    Ok(Verdict::Done)
}
