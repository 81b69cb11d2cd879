//! `plan`: finds a strategy for a model on a machine; and the bare command's demonstration.

use crate::Verdict;
use crate::files::write_atomically;
use crate::interrupt;
use crate::planning::PlanningArgs;
use crate::progress::ProgressLine;
use shardwright_plan::{Plan, PlanError};
use shardwright_request::{Detail, Event, summarise};
use shardwright_sim::find;
use std::io::{self, Write};
use std::path::PathBuf;

/// Finds the fastest way to split a model's training step over a machine.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    planning: PlanningArgs,
    /// auto, exact, optcnn, pase, mcmc, soybean, soybean-time, data, model, owt, megatron, fsdp
    #[arg(long, default_value = "auto")]
    solver: String,
    /// Write the plan to this file
    #[arg(short, long)]
    output: Option<PathBuf>,
    /// One JSON object on standard output, nothing else
    #[arg(long)]
    json: bool,
    /// Only the verdict
    #[arg(short, long)]
    quiet: bool,
    /// Every layer, not only those that differ from the one before
    #[arg(short, long)]
    verbose: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    let plan = match make(&args.planning, &args.solver) {
        Err(error) if matches!(error.downcast_ref(), Some(PlanError::DoesNotFit { .. })) => {
            eprintln!("{error}");
            return Ok(Verdict::CannotBeMet);
        }
        plan => plan?,
    };
    if let Some(path) = &args.output {
        write_atomically(path, |out| writeln!(out, "{}", plan.to_json()))?;
    }
    let mut out = io::stdout().lock();
    if args.json {
        writeln!(out, "{}", plan.to_json())?;
    } else {
        let detail = match (args.quiet, args.verbose) {
            (true, _) => Detail::Verdict,
            (_, true) => Detail::All,
            _ => Detail::Usual,
        };
        summarise(&mut out, &plan, detail)?;
        if let Some(path) = &args.output {
            writeln!(out, "plan written to {}", path.display())?;
        }
    }
    Ok(Verdict::Done)
}

/// What the bare command shows: VGG-16 on four nodes of four P100s, 32 samples each.
pub fn demonstrate() -> anyhow::Result<Verdict> {
    let mut out = io::stdout().lock();
    writeln!(out, "VGG-16 on four nodes of four P100s, 32 samples per GPU:\n")?;
    let plan = make(&PlanningArgs::of("vgg16", 512), "auto")?;
    summarise(&mut out, &plan, Detail::Usual)?;
    writeln!(
        out,
        "\nNext: `shardwright plan MODEL --machine NAME -o plan.json`, `shardwright compare MODEL`,\n\
         `shardwright models` and `shardwright machines` for what is built in."
    )?;
    Ok(Verdict::Done)
}

/// Plans what the arguments ask for.
pub fn make(planning: &PlanningArgs, solver: &str) -> anyhow::Result<Plan> {
    // A name that means nothing is told before anything is read.
    find(solver)?;
    let request = planning.open()?;
    let line = ProgressLine::new("pricing every choice");
    request.plan(solver, &planning.search(), interrupt::flag(), &|event| match event {
        Event::Searching => line.say("searching"),
        Event::Improved(entry) => line.improved(entry),
    })
}
