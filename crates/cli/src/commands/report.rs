//! `report`: a plan as one self-contained HTML page.

use crate::Verdict;
use crate::files::{check_outputs, is_standard, write_atomically};
use crate::interrupt;
use shardwright_report::Page;
use shardwright_request::{OpenedPlan, WallClock};
use shardwright_search::{Control, LogEntry};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The time limit of computing the reoptimised costs of alternatives.
const PATIENCE: Duration = Duration::from_secs(20);

/// Writes a plan's report: one self-contained HTML page.
#[derive(clap::Args)]
pub struct Args {
    /// A plan that `plan -o` wrote
    plan: String,
    /// The page to write; `-` is standard output
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    check_outputs([&args.output])?;
    write(&args.output, &OpenedPlan::open(&args.plan)?, &[])?;
    if is_standard(&args.output) {
        return Ok(Verdict::Done);
    }
    writeln!(io::stdout().lock(), "report written to {}", args.output.display())?;
    Ok(Verdict::Done)
}

/// Writes the page of a plan.
pub fn write(path: &Path, opened: &OpenedPlan, log: &[LogEntry]) -> anyhow::Result<()> {
    let context = opened.context()?;
    let page = Page::new(&context, &opened.plan, &opened.assignment, log, &control())?;
    write_atomically(path, |out| page.write(out))
}

/// The limits of computing a page's alternatives: [`PATIENCE`], or Ctrl-C.
pub fn control() -> Control<'static> {
    Control { cancel: Some(interrupt::flag()), ..Control::new() }.time_limit(WallClock::global(), PATIENCE)
}
