//! `report`: a plan as one HTML page that needs nothing else.

use crate::Verdict;
use crate::commands::run::{read_plan, reopen};
use crate::files::write_atomically;
use crate::interrupt;
use crate::planning::{PlanningArgs, Request};
use anyhow::Context;
use shardwright_plan::Plan;
use shardwright_report::Page;
use shardwright_search::{Control, LogEntry};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The longest that is worked on what alternatives cost with everything else chosen anew.
const PATIENCE: Duration = Duration::from_secs(20);

/// Writes a plan's report: one HTML page that needs nothing else.
#[derive(clap::Args)]
pub struct Args {
    /// A plan, as `plan -o` writes it
    plan: String,
    /// The page
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    let not_one = || format!("{} is not a plan: `plan -o` writes them", args.plan);
    let plan = read_plan(&args.plan)?.with_context(not_one)?;
    let request = reopen(&PlanningArgs::of(&args.plan, 1), &plan)?;
    write(&args.output, &request, &plan, &[])?;
    writeln!(io::stdout().lock(), "report written to {}", args.output.display())?;
    Ok(Verdict::Done)
}

/// Writes the page of a plan.
pub fn write(path: &Path, request: &Request, plan: &Plan, log: &[LogEntry]) -> anyhow::Result<()> {
    let problem = request.bare(plan.mesh(&request.machine)?, plan.space.untied)?;
    let page = Page::new(&problem, plan, log, &control())?;
    write_atomically(path, |out| page.write(out))
}

/// How long a page's alternatives are worked on: [`PATIENCE`], or until Ctrl-C.
pub fn control() -> Control<'static> {
    Control { cancel: Some(interrupt::flag()), ..Control::new() }.time_limit(PATIENCE)
}
