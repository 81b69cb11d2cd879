//! `export`: a plan of a StableHLO program in the words of other engines.

use crate::Verdict;
use crate::commands::run::read_plan;
use crate::files::write_atomically;
use crate::planning::PlanningArgs;
use anyhow::Context;
use shardwright_cost::Relayouts;
use shardwright_export::{Shardings, to_sdy};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Writes a plan's shardings: of a StableHLO program (.mlir), for JAX and XLA.
#[derive(clap::Args)]
pub struct Args {
    /// A plan, as `plan -o` writes it
    plan: String,
    /// `sdy`: the program with its shardings in Shardy's dialect; `jax`: axes and shardings as JSON
    #[arg(long, value_enum)]
    to: Engine,
    /// The file to write; `-` is standard output
    #[arg(short, long, default_value = "-")]
    output: PathBuf,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Engine {
    Sdy,
    Jax,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    let plan = read_plan(&args.plan)?.with_context(|| format!("{}: not a plan", args.plan))?;
    let asked = plan.request.clone().with_context(|| {
        format!("{}: the plan does not say how its model was asked for; plan again", args.plan)
    })?;
    let request = PlanningArgs::of(&asked.model, 0).for_request(asked)?.open()?;
    let program = request.program.as_ref().with_context(|| {
        format!(
            "{}: only plans of StableHLO programs have shardings; this one is of {}",
            args.plan, plan.model
        )
    })?;
    let mesh = plan.mesh(&request.machine)?;
    let configs = plan.configs(&request.graph, &mesh)?;
    let relayouts = Relayouts::new(&request.machine, &mesh);
    let shardings = Shardings::of(&program.imported, &request.graph, &relayouts, &configs)?;
    let text = match args.to {
        Engine::Sdy => to_sdy(&program.text, &plan.model, &shardings, &mesh)?,
        Engine::Jax => {
            let axes = serde_json::to_value(&plan.axes)?;
            let mut json = serde_json::to_value(&shardings)?;
            json["axes"] = axes;
            format!("{json:#}\n")
        }
    };
    if args.output == Path::new("-") {
        io::stdout().lock().write_all(text.as_bytes())?;
    } else {
        write_atomically(&args.output, |out| out.write_all(text.as_bytes()))?;
    }
    Ok(Verdict::Done)
}
