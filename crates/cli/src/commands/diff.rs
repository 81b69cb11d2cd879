//! `diff`: the layers in which two plans of one model differ, and the gain of each change.

use crate::Verdict;
use crate::commands::report;
use crate::files::{check_outputs, is_standard, write_atomically};
use anyhow::{Context as _, ensure};
use shardwright_plan::Plan;
use shardwright_report::{Change, Difference, Page};
use shardwright_request::{
    OpenedPlan, Request, hanging, read_known_plan, shortened, show_bytes, show_seconds, stem,
};
use shardwright_space::{common_axes, on_finer_axes};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::PathBuf;

/// Compares two plans of one model on one machine: changed configs, and the gain of each change.
#[derive(clap::Args)]
pub struct Args {
    /// A plan that `plan -o` wrote
    before: String,
    /// Another plan of the same model and machine
    after: String,
    /// Write a report of both plans to this file: one self-contained HTML page
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// One JSON object on standard output, nothing else
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    check_outputs(&args.report)?;
    let (before, after) = (read_known_plan(&args.before)?, read_known_plan(&args.after)?);
    ensure!(
        before.model != after.model || before.recompute == after.recompute,
        "{} and {} recompute different ops ({} and {}), so their ops cannot be compared one by one; `report` shows each plan",
        args.before,
        args.after,
        before.recompute.policy,
        after.recompute.policy
    );
    ensure!(
        before.model_hash == after.model_hash,
        "{} and {} are plans of different models: {} and {}",
        args.before,
        args.after,
        before.model,
        after.model
    );
    ensure!(
        before.machine_fingerprint == after.machine_fingerprint,
        "{} and {} are plans for different devices: {} and {}",
        args.before,
        args.after,
        axes(&before),
        axes(&after)
    );
    let opened = OpenedPlan::of(before, &Request::of_model(&args.before))?;
    let OpenedPlan { inputs, plan: before, mesh, assignment: old } = &opened;
    let after_mesh = after.mesh(&inputs.machine)?;
    let new = after.assignment(&inputs.graph, &after_mesh)?;
    let common = common_axes(&inputs.machine, mesh, &after_mesh)?;
    let (old, new) = (on_finer_axes(old, mesh, &common), on_finer_axes(&new, &after_mesh, &common));
    // Changes are listed by layer, unless one of the plans is untied.
    let untied = before.space.untied || after.space.untied;
    let context = inputs.context(common, untied)?;
    let (before, after) = ((before, &old), (&after, &new));
    let difference = match &args.report {
        None => Difference::of(&context, before, after)?,
        Some(path) => {
            let page = Page::of_two(&context, before, after, &report::control())?;
            write_atomically(path, |out| page.write(out))?;
            page.difference.context("a page of two plans has their difference")?
        }
    };
    if args.report.as_deref().is_some_and(is_standard) {
        return Ok(Verdict::Done);
    }
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
    line(out, "without overlap", sums, &show_seconds)?;
    line(out, "memory per device", answer.peak_memory_bytes.map(|b| b as f64), &bytes)?;
    line(out, "traffic per step", answer.traffic_bytes.map(|b| b as f64), &bytes)?;
    if answer.pipelines.iter().any(Option::is_some) {
        let [before, after] = answer.pipelines.each_ref().map(|own| own.as_deref().unwrap_or("none"));
        writeln!(out, "{:<26} {before:>12} -> {after:>12}", "pipeline")?;
    }
    if answer.changes.is_empty() {
        return writeln!(out, "\nall ops have equal configs");
    }
    writeln!(
        out,
        "\n{:<25} {:<13} {:<13} {:>4} {:>10} {:>10}",
        "op", "before", "after", "ops", "alone", "undone"
    )?;
    for row in rows(&answer.changes) {
        let times = if row.layers > 1 { format!(" ({}x)", row.layers) } else { String::new() };
        writeln!(
            out,
            "{:<25} {:<13} {:<13} {:>4} {:>10} {:>10}",
            shortened(&row.op, 25_usize.saturating_sub(times.len())) + &times,
            shortened(row.before, 13),
            shortened(row.after, 13),
            row.ops,
            row.alone.map_or_else(|| "-".into(), signed),
            row.undone.map_or_else(|| "-".into(), signed)
        )?;
    }
    let alone: f64 = answer.changes.iter().filter_map(|change| change.alone_seconds).sum();
    let together = format!(
        "all changes together: {}; sum of `alone`: {}; neighbours cause the difference",
        signed(sums[1] - sums[0]),
        signed(alone)
    );
    [
        "`alone`: change of the first plan's time without overlap by this change alone; rows of several layers have their sums",
        "`undone`: change of the second plan's time without overlap if this change is taken back",
        &together,
    ]
    .iter()
    .try_for_each(|note| writeln!(out, "{}", hanging("note: ", note)))
}

/// A row of the table: a layer, or the equal changes of several blocks with the sums of their times.
struct Row<'d> {
    op: String,
    before: &'d str,
    after: &'d str,
    layers: usize,
    ops: usize,
    alone: Option<f64>,
    undone: Option<f64>,
}

/// One row for all layers that change equally and whose names differ only in the number of the block.
fn rows(changes: &[Change]) -> Vec<Row<'_>> {
    let mut rows: Vec<Row<'_>> = Vec::new();
    let mut known: BTreeMap<(String, &str, &str), usize> = BTreeMap::new();
    for change in changes {
        let key = (stem(&change.op), change.before.as_str(), change.after.as_str());
        if let Some(&at) = known.get(&key) {
            let row = &mut rows[at];
            row.op = key.0;
            (row.layers, row.ops) = (row.layers + 1, row.ops + change.ops);
            let sum = |a: Option<f64>, b: Option<f64>| a.zip(b).map(|(a, b)| a + b);
            row.alone = sum(row.alone, change.alone_seconds);
            row.undone = sum(row.undone, change.undone_seconds);
            continue;
        }
        known.insert(key, rows.len());
        rows.push(Row {
            op: change.op.clone(),
            before: &change.before,
            after: &change.after,
            layers: 1,
            ops: change.ops,
            alone: change.alone_seconds,
            undone: change.undone_seconds,
        });
    }
    rows
}
