//! `diff`: what two plans of one model do differently, layer by layer, and what each difference is worth.

use crate::Verdict;
use crate::commands::run::{read_plan, reopen};
use crate::planning::{PlanningArgs, show_bytes, show_seconds};
use anyhow::{Context, ensure};
use serde::Serialize;
use shardwright_plan::Plan;
use shardwright_report::Explainer;
use shardwright_space::Config;
use std::io::{self, Write};

/// Compares two plans of one model on one machine: what changed, and what each change is worth.
#[derive(clap::Args)]
pub struct Args {
    /// A plan, as `plan -o` writes it
    before: String,
    /// Another of the same model and machine
    after: String,
    /// One JSON object on standard output, nothing else
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Answer {
    step_seconds: [f64; 2],
    objective: [i64; 2],
    peak_memory_bytes: [u64; 2],
    traffic_bytes: [u64; 2],
    /// Layers (untied: ops), those that are worth most first.
    changes: Vec<Change>,
}

#[derive(Serialize)]
struct Change {
    op: String,
    before: String,
    after: String,
    /// Ops whose configs differ.
    ops: usize,
    /// What the first plan's sum would become longer by, were this the only change.
    alone_seconds: f64,
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
    let changes = changes(args, &before, &after)?;
    let answer = Answer {
        step_seconds: [before.simulated.step_seconds, after.simulated.step_seconds],
        objective: [before.objective, after.objective],
        peak_memory_bytes: [before.peak_memory_bytes, after.peak_memory_bytes],
        traffic_bytes: [before.traffic_bytes, after.traffic_bytes],
        changes,
    };
    let mut out = io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&answer)?)?;
    } else {
        print(&mut out, &answer)?;
    }
    Ok(Verdict::Done)
}

fn axes(plan: &Plan) -> String {
    let axes: Vec<String> = plan.axes.iter().map(|axis| format!("{}:{}", axis.name, axis.size)).collect();
    format!("{} ({})", plan.machine, axes.join(" "))
}

fn changes(args: &Args, before: &Plan, after: &Plan) -> anyhow::Result<Vec<Change>> {
    let request = reopen(&PlanningArgs::of(&args.before, 1), before)?;
    // Layers, unless ops of a layer differ from it in one of the plans.
    let untied = before.space.untied || after.space.untied;
    let problem = request.bare(before.mesh(&request.machine)?, untied)?;
    let [old, new] = [before, after].map(|plan| plan.configs(&request.graph, problem.mesh()));
    let (old, new): (Vec<Config>, Vec<Config>) = (old?, new?);
    let mut explainer = Explainer::new(&problem, &old)?;
    let mut changes = Vec::new();
    for (part, split) in problem.variables.splits.iter().enumerate() {
        let differ = split.ops.iter().filter(|op| old[op.index()] != new[op.index()]).count();
        if differ == 0 {
            continue;
        }
        let lead = split.forward();
        let price = |explainer: &mut Explainer<'_>, configs: &[Config]| {
            let own: Vec<Config> = split.ops.iter().map(|op| configs[op.index()].clone()).collect();
            explainer.price(part, &own).map(|choice| choice.total_ps())
        };
        let alone = price(&mut explainer, &new)? - price(&mut explainer, &old)?;
        let shown = |configs: &[Config]| {
            configs[lead.index()].show(&problem.shapes[lead.index()].rule, problem.mesh())
        };
        changes.push(Change {
            op: request.graph.node(lead).name.clone(),
            before: shown(&old),
            after: shown(&new),
            ops: differ,
            alone_seconds: alone as f64 / 1e12,
        });
    }
    changes.sort_by(|a, b| b.alone_seconds.abs().total_cmp(&a.alone_seconds.abs()));
    Ok(changes)
}

fn print(out: &mut impl Write, answer: &Answer) -> io::Result<()> {
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
    writeln!(out, "\n{:<32} {:<14} {:<14} {:>4} {:>14}", "op", "before", "after", "ops", "alone")?;
    for change in &answer.changes {
        let sign = if change.alone_seconds < 0.0 { '-' } else { '+' };
        let alone = format!("{sign}{}", show_seconds(change.alone_seconds.abs()));
        writeln!(
            out,
            "{:<32} {:<14} {:<14} {:>4} {alone:>14}",
            change.op, change.before, change.after, change.ops
        )?;
    }
    let alone: f64 = answer.changes.iter().map(|change| change.alone_seconds).sum();
    writeln!(
        out,
        "note: `alone` is what the first plan's sum would become longer by, were this the only change; together the \
         changes are worth {:+.3} ms, one by one {:+.3} ms: the rest is what neighbours do for each other",
        (sums[1] - sums[0]) * 1e3,
        alone * 1e3
    )
}
