//! `diff`: what two plans of one model do differently, layer by layer, and what each difference is worth.

use crate::Verdict;
use crate::commands::{
    report,
    run::{read_plan, reopen},
};
use crate::files::write_atomically;
use crate::planning::{PlanningArgs, show_bytes, show_seconds};
use anyhow::{Context, ensure};
use shardwright_plan::Plan;
use shardwright_report::{Difference, Page};
use std::io::{self, Write};
use std::path::PathBuf;

/// Compares two plans of one model on one machine: what changed, and what each change is worth.
#[derive(clap::Args)]
pub struct Args {
    /// A plan, as `plan -o` writes it
    before: String,
    /// Another of the same model and machine
    after: String,
    /// Write a report to this file: the second plan beside the first, one HTML page that needs nothing else
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// One JSON object on standard output, nothing else
    #[arg(long)]
    json: bool,
}

fn open(path: &str) -> anyhow::Result<Plan> {
    read_plan(path)?.with_context(|| format!("{path} is not a plan: `plan -o` writes them"))
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    let (before, after) = (open(&args.before)?, open(&args.after)?);
    ensure!(
        before.model_hash == after.model_hash,
        "{} and {} are plans of different models: {} and {}",
        args.before,
        args.after,
        before.model,
        after.model
    );
    ensure!(
        before.machine_fingerprint == after.machine_fingerprint && before.axes == after.axes,
        "{} and {} speak of different devices: {} and {}",
        args.before,
        args.after,
        axes(&before),
        axes(&after)
    );
    let request = reopen(&PlanningArgs::of(&args.before, 1), &before)?;
    // Layers, unless ops of a layer differ from it in one of the plans.
    let untied = before.space.untied || after.space.untied;
    let problem = request.bare(before.mesh(&request.machine)?, untied)?;
    let difference = match &args.report {
        None => Difference::of(&problem, &before, &after)?,
        Some(path) => {
            let page = Page::of_two(&problem, &before, &after, &report::control())?;
            write_atomically(path, |out| page.write(out))?;
            page.difference.context("a page of two plans has their difference")?
        }
    };
    let mut out = io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&difference)?)?;
        return Ok(Verdict::Done);
    }
    print(&mut out, &difference)?;
    if let Some(path) = &args.report {
        writeln!(out, "report written to {}", path.display())?;
    }
    Ok(Verdict::Done)
}

fn axes(plan: &Plan) -> String {
    let axes: Vec<String> = plan.axes.iter().map(|axis| format!("{}:{}", axis.name, axis.size)).collect();
    format!("{} ({})", plan.machine, axes.join(" "))
}

/// A difference, with its sign.
fn signed(seconds: f64) -> String {
    format!("{}{}", if seconds < 0.0 { '-' } else { '+' }, show_seconds(seconds.abs()))
}

fn print(out: &mut impl Write, answer: &Difference) -> io::Result<()> {
    let sums = answer.objective.map(|objective| objective as f64 / 1e12);
    let line = |out: &mut dyn Write, name: &str, values: [f64; 2], show: &dyn Fn(f64) -> String| {
        let [before, after] = values;
        let percent = 100.0 * (after - before) / before.abs().max(f64::MIN_POSITIVE);
        writeln!(out, "{name:<26} {:>12} -> {:>12}  ({percent:+.1}%)", show(before), show(after))
    };
    let bytes = |value: f64| show_bytes(value as u64);
    line(out, "simulated step", answer.step_seconds, &show_seconds)?;
    line(out, "if nothing overlapped", sums, &show_seconds)?;
    line(out, "memory per device", answer.peak_memory_bytes.map(|b| b as f64), &bytes)?;
    line(out, "sent per step", answer.traffic_bytes.map(|b| b as f64), &bytes)?;
    if answer.changes.is_empty() {
        return writeln!(out, "\nno op is split otherwise");
    }
    writeln!(
        out,
        "\n{:<32} {:<14} {:<14} {:>4} {:>14} {:>14}",
        "op", "before", "after", "ops", "alone", "undone"
    )?;
    for change in &answer.changes {
        writeln!(
            out,
            "{:<32} {:<14} {:<14} {:>4} {:>14} {:>14}",
            change.op,
            change.before,
            change.after,
            change.ops,
            signed(change.alone_seconds),
            signed(change.undone_seconds)
        )?;
    }
    let alone: f64 = answer.changes.iter().map(|change| change.alone_seconds).sum();
    writeln!(
        out,
        "note: `alone` is what the first plan's sum would become longer by, were this the only change, `undone` what the \
         second's would, were this alone taken back; together the changes are worth {:+.3} ms, one by one {:+.3} ms: the rest is what neighbours do for each other",
        (sums[1] - sums[0]) * 1e3,
        alone * 1e3
    )
}
