//! `explain`: the cost of every layer's alternatives, and the tensors that hold the memory.

use crate::Verdict;
use crate::interrupt;
use anyhow::Context as _;
use serde_json::json;
use shardwright_plan::{Context, Plan};
use shardwright_report::{
    Alternatives, Certainty, Choice, DeviceClass, Explainer, Explanation, Reoptimisation, StepView,
};
use shardwright_request::{
    OpenedPlan, WallClock, hanging, parse_seconds, shortened, show_bytes, show_seconds,
};
use shardwright_search::{Control, StopReason};
use shardwright_space::{Assignment, Config};
use shardwright_suggest::did_you_mean;
use std::io::{self, Write};
use std::time::Duration;

/// Explains configs by the costs of their alternatives.
#[derive(clap::Args)]
pub struct Args {
    /// A plan that `plan -o` wrote
    plan: String,
    /// The name of an op or a layer; without one, all layers, one line each
    op: Option<String>,
    /// At most this many alternatives
    #[arg(long, default_value_t = 8)]
    most: usize,
    /// Seconds of search for the costs of alternatives with all other configs reoptimised
    #[arg(long, value_name = "SECONDS", default_value = "20", value_parser = parse_seconds)]
    time: Duration,
    /// One JSON object on standard output, nothing else
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    let opened = OpenedPlan::open(&args.plan)?;
    let (context, graph) = (opened.context()?, &opened.inputs.graph);
    let OpenedPlan { plan, assignment, .. } = &opened;
    let mut explainer = Explainer::new(&context, assignment)?;
    let part = match &args.op {
        None => None,
        Some(name) => {
            let op = graph.op_ids().find(|&op| graph.node(op).name == *name);
            Some(explainer.part(op.with_context(|| unknown(plan, name))?))
        }
    };
    let control = Control { cancel: Some(interrupt::flag()), ..Control::new() }
        .time_limit(WallClock::global(), args.time);
    let reoptimised = match part {
        None => Reoptimisation::of(&context, plan, assignment, &control),
        Some(part) => {
            let leads = explainer.leads(part)?;
            one(&context, plan, assignment, part, &leads[..leads.len().min(args.most + 1)], &control)
        }
    };
    let parts = part.map_or_else(|| (0..explainer.parts()).collect(), |part| vec![part]);
    let known = reoptimised.as_ref().ok();
    let explained = parts.into_iter().map(|part| explainer.explain(part, args.most, known));
    let explained: Vec<Explanation> = explained.collect::<Result<_, _>>()?;
    let step = StepView::simulate("plan", &context, assignment)?;
    let fullest = step.fullest().context("the machine has no devices")?;
    let mut out = io::stdout().lock();
    if args.json {
        let rows: Vec<_> = explained.iter().map(|own| as_json(plan, own)).collect();
        let answer = json!({ "choices": rows, "memory": memory_json(plan, fullest) });
        writeln!(out, "{}", serde_json::to_string_pretty(&answer)?)?;
        return Ok(Verdict::Done);
    }
    if args.op.is_some() {
        explained.iter().try_for_each(|own| describe(&mut out, plan, own))?;
    } else {
        list(&mut out, plan, &explained)?;
        memory(&mut out, plan, fullest)?;
    }
    if let Err(reason) = reoptimised {
        writeln!(out, "{}", hanging("note: ", &format!("`reoptimised` is unknown: {reason}")))?;
    }
    Ok(Verdict::Done)
}

/// The reoptimised costs of one part's configs: by elimination where that is exact, else by one search per config.
fn one(
    context: &Context<'_>,
    plan: &Plan,
    assignment: &Assignment,
    part: usize,
    leads: &[Config],
    control: &Control<'_>,
) -> Result<Reoptimisation, String> {
    let alternatives =
        Alternatives::new(context, plan, assignment, control).map_err(|error| error.to_string())?;
    let all = match alternatives.all(control) {
        Ok(known) if known.certainty != Certainty::AtLeast => return Ok(known),
        all => all,
    };
    match alternatives.one(part, leads, control) {
        // Both are lower bounds under a memory limit.
        Ok(Some(found)) => Ok(match all {
            Ok(known) if found.certainty == Certainty::AtLeast => found.tightened(known),
            _ => found,
        }),
        Ok(None) => all.map_err(|reason| match reason {
            StopReason::Refused(reason) => reason,
            other => format!("{other:?}"),
        }),
        Err(error) => Err(error.to_string()),
    }
}

/// The message for a name that no op has.
fn unknown(plan: &Plan, name: &str) -> String {
    let close: Vec<&str> =
        plan.ops.iter().map(|op| &op.name[..]).filter(|op| op.contains(name)).take(5).collect();
    let hint = if close.is_empty() {
        let nearest = did_you_mean(name, plan.ops.iter().map(|op| &op.name[..]));
        format!("`plan -v` lists them{nearest}")
    } else {
        format!("did you mean {}?", close.join(", "))
    };
    format!("{} has no op `{name}`; {hint}", plan.model)
}

fn seconds(picoseconds: i64) -> f64 {
    picoseconds as f64 / 1e12
}

fn as_json(plan: &Plan, own: &Explanation) -> serde_json::Value {
    let name = |op: u32| &plan.ops[op as usize].name;
    let option = |choice: &Choice| {
        json!({
            "config": choice.config, "seconds": seconds(choice.total_ps()),
            "change_seconds": seconds(choice.total_ps() - own.options[0].total_ps()),
            "reoptimised_change_seconds": choice.reoptimised_ps.map(seconds),
            "compute_seconds": seconds(choice.compute_ps), "inside_seconds": seconds(choice.inside_ps),
            "neighbours_seconds": seconds(choice.neighbours_ps),
        })
    };
    json!({
        "op": name(own.op), "follow": own.ops.iter().map(|&op| name(op)).collect::<Vec<_>>(), "configs": own.configs,
        "reoptimised": own.reoptimised,
        "chosen": option(&own.options[0]), "alternatives": own.options[1..].iter().map(option).collect::<Vec<_>>(),
    })
}

fn memory_json(plan: &Plan, fullest: &DeviceClass) -> serde_json::Value {
    let peak = &fullest.peak;
    json!({
        "device": fullest.device, "peak_memory_bytes": fullest.peak_memory_bytes, "at_seconds": peak.at_ps as f64 / 1e12,
        "op": peak.op.map(|op| &plan.ops[op as usize].name), "kinds": peak.kinds, "largest": peak.largest,
        "others": peak.others,
    })
}

/// A difference, with its sign.
fn change(picoseconds: i64) -> String {
    let sign = if picoseconds < 0 { '-' } else { '+' };
    format!("{sign}{}", show_seconds(seconds(picoseconds.abs())))
}

/// The change with all other configs reoptimised.
fn reoptimised(choice: &Choice) -> String {
    choice.reoptimised_ps.map_or_else(|| "-".into(), change)
}

const ALONE: &str = "`alone`: change of the time without overlap if all other configs stay";

/// The notes below a table.
fn notes(out: &mut impl Write, explained: &[Explanation]) -> io::Result<()> {
    let certainty = explained.first().and_then(|own| own.reoptimised);
    writeln!(out, "{}\n{}", hanging("note: ", ALONE), hanging("note: ", meant(certainty)))?;
    let Some(gain) = explained.iter().filter_map(gain).min() else { return Ok(()) };
    let most = if certainty == Some(Certainty::Exact) { "" } else { "up to " };
    let text = format!(
        "changes below zero: without overlap, another plan is {most}{} shorter; this plan was chosen for its simulated step",
        show_seconds(seconds(gain))
    );
    writeln!(out, "{}", hanging("note: ", &text))
}

/// The time without overlap that reoptimising all other configs saves, in picoseconds, where it saves any.
fn gain(own: &Explanation) -> Option<i64> {
    own.options[0].reoptimised_ps.filter(|change| *change < 0).map(|change| -change)
}

/// The note on reoptimised changes.
fn meant(certainty: Option<Certainty>) -> &'static str {
    match certainty {
        None => "the memory limit is ignored",
        Some(Certainty::Exact) => "`reoptimised`: change if all other configs are chosen again optimally",
        Some(Certainty::AtLeast) => {
            "`reoptimised`: lower bound of the change if all other configs are chosen again; the memory limit is ignored"
        }
        Some(Certainty::AtMost) => {
            "`reoptimised`: upper bound of the change if all other configs are chosen again; ops with too many configs keep theirs"
        }
    }
}

/// One op's config and its alternatives.
fn describe(out: &mut impl Write, plan: &Plan, own: &Explanation) -> io::Result<()> {
    let (chosen, name) = (&own.options[0], &plan.ops[own.op as usize].name);
    writeln!(
        out,
        "{name}: config {}, {} without overlap",
        chosen.config,
        show_seconds(seconds(chosen.total_ps()))
    )?;
    writeln!(out, "  {:<28} {}", "computing", show_seconds(seconds(chosen.compute_ps)))?;
    writeln!(out, "  {:<28} {}", "reshards inside the layer", show_seconds(seconds(chosen.inside_ps)))?;
    writeln!(out, "  {:<28} {}", "reshards with neighbours", show_seconds(seconds(chosen.neighbours_ps)))?;
    if own.ops.len() > 1 {
        writeln!(out, "  {:<28} {} (gradients and updates)", "ops that follow", own.ops.len() - 1)?;
    }
    if let Some(gain) = gain(own) {
        let most = if own.reoptimised == Some(Certainty::Exact) { "" } else { "at most " };
        let gain = show_seconds(seconds(gain));
        writeln!(out, "  {:<28} {most}{gain} less", "all others reoptimised")?;
    }
    if own.options.len() == 1 {
        let why =
            if own.configs > 0 { "it has no other config" } else { "it has too many configs to compare" };
        return writeln!(out, "  {:<28} {why}", "alternatives");
    }
    writeln!(
        out,
        "\n{:<20} {:>11} {:>11} {:>11} {:>11} {:>11}",
        "instead", "computing", "inside", "neighbours", "alone", "reoptimised"
    )?;
    for other in &own.options[1..] {
        writeln!(
            out,
            "{:<20} {:>11} {:>11} {:>11} {:>11} {:>11}",
            shortened(&other.config, 20),
            show_seconds(seconds(other.compute_ps)),
            show_seconds(seconds(other.inside_ps)),
            show_seconds(seconds(other.neighbours_ps)),
            change(other.total_ps() - chosen.total_ps()),
            reoptimised(other)
        )?;
    }
    writeln!(out, "({} of {} configs)", own.options.len() - 1, own.configs)?;
    notes(out, std::slice::from_ref(own))
}

/// All choices, one line each.
fn list(out: &mut impl Write, plan: &Plan, explained: &[Explanation]) -> io::Result<()> {
    writeln!(
        out,
        "{:<22} {:<11} {:>9}  {:<11} {:>10} {:>11}",
        "op", "config", "cost", "next best", "alone", "reoptimised"
    )?;
    for own in explained {
        let chosen = &own.options[0];
        let (next, alone, again) = match own.options.get(1) {
            None => ("-", "-".to_string(), "-".to_string()),
            Some(next) => (&next.config[..], change(next.total_ps() - chosen.total_ps()), reoptimised(next)),
        };
        writeln!(
            out,
            "{:<22} {:<11} {:>9}  {:<11} {alone:>10} {again:>11}",
            shortened(&plan.ops[own.op as usize].name, 22),
            shortened(&chosen.config, 11),
            show_seconds(seconds(chosen.total_ps())),
            shortened(next, 11),
        )?;
    }
    notes(out, explained)
}

/// The tensors that hold a device's memory at its peak.
fn memory(out: &mut impl Write, plan: &Plan, fullest: &DeviceClass) -> io::Result<()> {
    let peak = &fullest.peak;
    let doing = peak.op.map_or_else(String::new, |op| format!(", in {}", plan.ops[op as usize].name));
    let when = show_seconds(peak.at_ps as f64 / 1e12);
    let (held, device) = (show_bytes(fullest.peak_memory_bytes), fullest.device);
    let text = format!("{held} on device {device}, {when} into the step{doing}");
    writeln!(out, "\n{}", hanging("peak memory: ", &text))?;
    for own in &peak.kinds {
        writeln!(out, "  {:<16} {:>12}", own.kind, show_bytes(own.bytes))?;
    }
    writeln!(out, "largest tensors:")?;
    for held in &peak.largest {
        let tensor = shortened(&held.tensor, 48);
        writeln!(out, "  {:<16} {:>12}  {tensor}", held.kind, show_bytes(held.bytes))?;
    }
    if peak.others > 0 {
        writeln!(out, "  and {} more", peak.others)?;
    }
    Ok(())
}
