//! `plan`: finds a strategy for a model on a machine; and the bare command's demonstration.

use crate::commands::report;
use crate::files::write_atomically;
use crate::interrupt;
use crate::planning::{PlanningArgs, Request};
use crate::progress::ProgressLine;
use crate::{Verdict, complain};
use shardwright_plan::{Plan, PlanError};
use shardwright_request::{Detail, Event, summarise};
use shardwright_search::LogEntry;
use shardwright_sim::find;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Finds the fastest way to split a model's training step over a machine.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    planning: PlanningArgs,
    /// auto, exact, optcnn, pase, mcmc, place, soybean, soybean-time, data, model, owt, megatron, fsdp
    #[arg(long, default_value = "auto")]
    solver: String,
    /// Plan with what a run has measured, as `run --record` writes it, in the place of --costs
    #[arg(long, value_name = "RUN", conflicts_with = "costs")]
    refine: Option<String>,
    /// Write the plan to this file
    #[arg(short, long)]
    output: Option<PathBuf>,
    /// Write a report to this file: one HTML page that needs nothing else
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
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
    let mut planning = args.planning.clone();
    planning.costs = args.refine.clone().or(planning.costs);
    let made = match make(&planning, &args.solver) {
        Err(error) if cannot_be_met(&error) => {
            complain(&error);
            return Ok(Verdict::CannotBeMet);
        }
        made => made?,
    };
    let plan = &made.plan;
    if let Some(path) = &args.output {
        write_atomically(path, |out| writeln!(out, "{}", plan.to_json()))?;
    }
    if let Some(path) = &args.report {
        report::write(path, &made.request, plan, &made.log)?;
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
        summarise(&mut out, plan, detail)?;
        if let Some(path) = &args.output {
            writeln!(out, "plan written to {}", path.display())?;
        }
        if let Some(path) = &args.report {
            writeln!(out, "report written to {}", path.display())?;
        }
    }
    Ok(Verdict::Done)
}

/// What the bare command shows: VGG-16 on four nodes of four P100s, 32 samples each.
pub fn demonstrate() -> anyhow::Result<Verdict> {
    let mut out = io::stdout().lock();
    writeln!(out, "VGG-16 on four nodes of four P100s, 32 samples per GPU:\n")?;
    let made = make(&PlanningArgs::of("vgg16", 512), "auto")?;
    summarise(&mut out, &made.plan, Detail::Usual)?;
    let path = Path::new("shardwright-vgg16.html");
    match report::write(path, &made.request, &made.plan, &made.log) {
        Ok(()) => writeln!(out, "\nThe report is in {}: open it in a browser.", path.display())?,
        // A folder that cannot be written to takes nothing from what was shown.
        Err(error) => writeln!(out, "\nThere is no report: {error:#}.")?,
    }
    writeln!(
        out,
        "Next: `shardwright plan MODEL --machine NAME --report plan.html`, `shardwright compare MODEL`,\n\
         `shardwright models` and `shardwright machines` for what is built in."
    )?;
    Ok(Verdict::Done)
}

/// Whether there is no plan although nothing was wrong with the request: none fits.
pub fn cannot_be_met(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(PlanError::DoesNotFit { .. }))
}

/// A plan, what it was made from, and how the search went.
pub struct Made {
    /// The model and the machine.
    pub request: Request,
    /// The plan.
    pub plan: Plan,
    /// The search's improvements.
    pub log: Vec<LogEntry>,
}

/// Plans what the arguments ask for.
pub fn make(planning: &PlanningArgs, solver: &str) -> anyhow::Result<Made> {
    // A name that means nothing is told before anything is read.
    find(solver)?;
    let request = planning.open()?;
    let line = ProgressLine::new("pricing every choice");
    let log = Mutex::new(Vec::new());
    let plan = request.plan(solver, &planning.search(), interrupt::flag(), &|event| match event {
        Event::Searching => line.say("searching"),
        Event::Improved(entry) => {
            line.improved(entry);
            log.lock().unwrap_or_else(PoisonError::into_inner).push(entry.clone());
        }
    })?;
    let log = log.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok(Made { request, plan, log })
}
