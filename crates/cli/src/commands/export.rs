//! `export`: a plan's shardings for other engines.

use crate::files::{check_outputs, write_atomically};
use crate::{Verdict, complain};
use anyhow::Context;
use shardwright_export::{
    ExportError, Shardings, TensorPlacements, TensorSpecs, Trainer, to_sdy, to_trainer,
};
use shardwright_request::{OpenedPlan, read_known_plan};
use std::path::PathBuf;

/// Writes a plan for other engines: layouts of all tensors as JSON, as a JAX module, for PyTorch's DTensor (all plans); shardings
/// of a StableHLO program; options of trainers (uniform plans).
#[derive(clap::Args)]
pub struct Args {
    /// A plan that `plan -o` wrote
    plan: String,
    /// Of any plan: `layouts`: the mesh axes that shard every tensor, as JSON; `jax-module`: the same as a Python module with a mesh
    /// and `PartitionSpec`s; `dtensor`: mesh and placements as JSON. Of a StableHLO program: `sdy`: the program with its shardings
    /// in Shardy's dialect; `jax`: axes and shardings as JSON. Of a uniform plan (`plan --uniform`, `--as`, or a recipe of data
    /// parallelism) the options of a trainer: `megatron`, `nemo`, `torchtitan`, `maxtext`, `deepspeed`
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
    Layouts,
    JaxModule,
    Megatron,
    Nemo,
    Torchtitan,
    Maxtext,
    Deepspeed,
}

impl Engine {
    fn trainer(self) -> Option<Trainer> {
        match self {
            Self::Megatron => Some(Trainer::Megatron),
            Self::Nemo => Some(Trainer::Nemo),
            Self::Torchtitan => Some(Trainer::Torchtitan),
            Self::Maxtext => Some(Trainer::Maxtext),
            Self::Deepspeed => Some(Trainer::Deepspeed),
            Self::Sdy | Self::Jax | Self::Dtensor | Self::Layouts | Self::JaxModule => None,
        }
    }
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    check_outputs([&args.output])?;
    if let Some(trainer) = args.to.trainer() {
        let plan = read_known_plan(&args.plan)?;
        let Some(text) = to_trainer(&plan, trainer) else {
            complain(&format_args!(
                "{}: the plan is not uniform, so trainers have no options for it; plan with --uniform or --as",
                args.plan
            ));
            return Ok(Verdict::CannotBeMet);
        };
        write(args, &text)?;
        return Ok(Verdict::Done);
    }
    let opened = OpenedPlan::open(&args.plan)?;
    let text = match exported(args, &opened) {
        // The plan is valid, but the engine has no words for it.
        Err(error) if matches!(error.downcast_ref(), Some(ExportError::Pinned { .. })) => {
            complain(&format_args!("{error:#}"));
            return Ok(Verdict::CannotBeMet);
        }
        text => text?,
    };
    write(args, &text)?;
    Ok(Verdict::Done)
}

fn write(args: &Args, text: &str) -> anyhow::Result<()> {
    write_atomically(&args.output, |out| out.write_all(text.as_bytes()))
}

fn exported(args: &Args, opened: &OpenedPlan) -> anyhow::Result<String> {
    let OpenedPlan { inputs, plan, mesh, assignment } = opened;
    if let Engine::Dtensor = args.to {
        let placements = TensorPlacements::of(&inputs.graph, &opened.resharder(), assignment)?;
        return Ok(format!("{:#}\n", serde_json::to_value(&placements)?));
    }
    if let Engine::Layouts | Engine::JaxModule = args.to {
        let specs = TensorSpecs::of(&inputs.graph, mesh, assignment);
        return Ok(match args.to {
            Engine::Layouts => format!("{:#}\n", serde_json::to_value(&specs)?),
            _ => specs.to_jax_module(&plan.model, &plan.machine)?,
        });
    }
    let program = inputs.program.as_ref().with_context(|| {
        format!(
            "{}: only plans of StableHLO programs have shardings; this one is of {}: `--to jax-module`, `--to dtensor` and `--to layouts` have its layouts",
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
