//! `export`: a plan's shardings for other engines.

use crate::files::write_atomically;
use crate::{Verdict, complain};
use anyhow::Context;
use shardwright_export::{ExportError, Shardings, TensorPlacements, to_sdy};
use shardwright_request::OpenedPlan;
use std::path::PathBuf;

/// Writes a plan's shardings for other engines: JAX and XLA (StableHLO programs), PyTorch's DTensor (all plans).
#[derive(clap::Args)]
pub struct Args {
    /// A plan that `plan -o` wrote
    plan: String,
    /// `sdy`: the program with its shardings in Shardy's dialect; `jax`: axes and shardings as JSON; `dtensor`: mesh and
    /// placements of all tensors as JSON
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
    Dtensor,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    let opened = OpenedPlan::open(&args.plan)?;
    let text = match exported(args, &opened) {
        // The plan is valid, but the engine has no words for it.
        Err(error) if matches!(error.downcast_ref(), Some(ExportError::Pinned { .. })) => {
            complain(&format_args!("{error:#}"));
            return Ok(Verdict::CannotBeMet);
        }
        text => text?,
    };
    write_atomically(&args.output, |out| out.write_all(text.as_bytes()))?;
    Ok(Verdict::Done)
}

fn exported(args: &Args, opened: &OpenedPlan) -> anyhow::Result<String> {
    let OpenedPlan { inputs, plan, mesh, assignment } = opened;
    if let Engine::Dtensor = args.to {
        let placements = TensorPlacements::of(&inputs.graph, &opened.resharder(), assignment)?;
        return Ok(format!("{:#}\n", serde_json::to_value(&placements)?));
    }
    let program = inputs.program.as_ref().with_context(|| {
        format!(
            "{}: only plans of StableHLO programs have shardings; this one is of {}: `--to dtensor` has its placements",
            args.plan, plan.model
        )
    })?;
    let shardings = Shardings::of(&program.imported, &inputs.graph, &opened.resharder(), assignment)?;
    if let Engine::Sdy = args.to {
        return Ok(to_sdy(&program.text, &plan.model, &shardings, mesh)?);
    }
    let mut json = serde_json::to_value(&shardings)?;
    json["axes"] = serde_json::to_value(&plan.axes)?;
    Ok(format!("{json:#}\n"))
}
