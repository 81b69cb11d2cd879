//! `explain`: why every layer of a plan is split as it is, what the alternatives would cost, and what holds the memory.

use crate::Verdict;
use crate::commands::run::{read_plan, reopen};
use crate::interrupt;
use crate::planning::{PlanningArgs, show_bytes, show_seconds};
use anyhow::Context;
use serde_json::json;
use shardwright_plan::{Plan, Problem};
use shardwright_report::{
    Alternatives, Certainty, Choice, DeviceClass, Explainer, Explanation, Reoptimised, Step,
};
use shardwright_request::parse_seconds;
use shardwright_search::{Control, StopReason};
use shardwright_space::Config;
use std::io::{self, Write};
use std::time::Duration;

/// Says why ops got their configs: what the alternatives would cost.
#[derive(clap::Args)]
pub struct Args {
    /// A plan, as `plan -o` writes it
    plan: String,
    /// An op's or a layer's name; all layers, in a line each, where none is given
    op: Option<String>,
    /// How many alternatives
    #[arg(long, default_value_t = 8)]
    most: usize,
    /// The longest that is searched for what alternatives cost with everything else chosen anew
    #[arg(long, value_name = "SECONDS", default_value = "20", value_parser = parse_seconds)]
    time: Duration,
    /// One JSON object on standard output, nothing else
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    let not_one = || format!("{} is not a plan: `plan -o` writes them", args.plan);
    let plan = read_plan(&args.plan)?.with_context(not_one)?;
    let request = reopen(&PlanningArgs::of(&args.plan, 1), &plan)?;
    let problem = request.bare(plan.mesh(&request.machine)?, plan.space.untied)?;
    let configs = plan.configs(&request.graph, problem.mesh())?;
    let mut explainer = Explainer::new(&problem, &configs)?;
    let part = match &args.op {
        None => None,
        Some(name) => {
            let op = request.graph.op_ids().find(|&op| request.graph.node(op).name == *name);
            Some(explainer.part(op.with_context(|| unknown(&plan, name))?))
        }
    };
    let control = Control { cancel: Some(interrupt::flag()), ..Control::new() }.time_limit(args.time);
    let reoptimised = match part {
        None => Reoptimised::of(&problem, &plan, &configs, &control),
        Some(part) => {
            let leads = explainer.leads(part)?;
            one(&problem, &plan, &configs, part, &leads[..leads.len().min(args.most + 1)], &control)
        }
    };
    let parts = part.map_or_else(|| (0..explainer.parts()).collect(), |part| vec![part]);
    let known = reoptimised.as_ref().ok();
    let explained = parts.into_iter().map(|part| explainer.explain(part, args.most, known));
    let explained: Vec<Explanation> = explained.collect::<Result<_, _>>()?;
    let step = Step::simulate("plan", &problem, &configs)?;
    let fullest = step.fullest().context("the machine has no devices")?;
    let mut out = io::stdout().lock();
    if args.json {
        let rows: Vec<_> = explained.iter().map(|own| as_json(&plan, own)).collect();
        let answer = json!({ "choices": rows, "memory": memory_json(&plan, fullest) });
        writeln!(out, "{}", serde_json::to_string_pretty(&answer)?)?;
        return Ok(Verdict::Done);
    }
    if args.op.is_some() {
        explained.iter().try_for_each(|own| describe(&mut out, &plan, own))?;
    } else {
        list(&mut out, &plan, &explained)?;
        memory(&mut out, &plan, fullest)?;
    }
    if let Err(reason) = reoptimised {
        writeln!(out, "note: what everything else chosen anew would change is not known: {reason}")?;
    }
    Ok(Verdict::Done)
}

/// What configs of one part would change: by elimination where that is exact, else each by a search of its own.
fn one(
    problem: &Problem<'_>,
    plan: &Plan,
    configs: &[Config],
    part: usize,
    leads: &[Config],
    control: &Control<'_>,
) -> Result<Reoptimised, String> {
    let alternatives =
        Alternatives::new(problem, plan, configs, control).map_err(|error| error.to_string())?;
    let all = match alternatives.all(control) {
        Ok(known) if known.certainty != Certainty::AtLeast => return Ok(known),
        all => all,
    };
    match alternatives.one(part, leads, control) {
        Ok(Some(found)) => Ok(found),
        Ok(None) => all.map_err(|reason| match reason {
            StopReason::Refused(reason) => reason,
            other => format!("{other:?}"),
        }),
        Err(error) => Err(error.to_string()),
    }
}

/// What to say of a name that no op has.
fn unknown(plan: &Plan, name: &str) -> String {
    let close: Vec<&str> =
        plan.ops.iter().map(|op| &op.name[..]).filter(|op| op.contains(name)).take(5).collect();
    let hint = if close.is_empty() {
        "`plan -v` lists them".to_string()
    } else {
        format!("there is {}", close.join(", "))
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

/// What everything else chosen anew would change.
fn anew(choice: &Choice) -> String {
    choice.reoptimised_ps.map_or_else(|| "-".into(), change)
}

const NOTE: &str = "note: `alone`: everything else stays as it is; times add up as if nothing overlapped";

/// How changes with everything else chosen anew are meant.
fn meant(certainty: Option<Certainty>) -> &'static str {
    match certainty {
        None => "memory is not looked at",
        Some(Certainty::Exact) => "`anew`: everything else is chosen anew, as well as can be",
        Some(Certainty::AtLeast) => {
            "`anew`: everything else is chosen anew; at least, since nothing more was proved, or memory not looked at"
        }
        Some(Certainty::AtMost) => {
            "`anew`: everything else is chosen anew; at most, since ops with too many configs stay as they are"
        }
    }
}

/// One op's choice and the others.
fn describe(out: &mut impl Write, plan: &Plan, own: &Explanation) -> io::Result<()> {
    let (chosen, name) = (&own.options[0], &plan.ops[own.op as usize].name);
    writeln!(
        out,
        "{name} is {}: {}, of that {} computing, {} communication among its own ops, {} with its neighbours",
        chosen.config,
        show_seconds(seconds(chosen.total_ps())),
        show_seconds(seconds(chosen.compute_ps)),
        show_seconds(seconds(chosen.inside_ps)),
        show_seconds(seconds(chosen.neighbours_ps))
    )?;
    if own.ops.len() > 1 {
        writeln!(out, "{} ops follow it: its gradients and updates", own.ops.len() - 1)?;
    }
    if let Some(gain) = chosen.reoptimised_ps.filter(|change| *change < 0) {
        let most = if own.reoptimised == Some(Certainty::Exact) { "" } else { "at most " };
        let gain = show_seconds(seconds(-gain));
        writeln!(out, "with it kept and everything else chosen anew, the sum would be {most}{gain} less")?;
    }
    if own.options.len() == 1 {
        let why =
            if own.configs > 0 { "there is no other way" } else { "it has too many configs to look at" };
        return writeln!(out, "{why}");
    }
    writeln!(
        out,
        "\n{:<16} {:>12} {:>12} {:>12} {:>14} {:>14}",
        "instead", "computing", "its own", "neighbours", "alone", "anew"
    )?;
    for other in &own.options[1..] {
        writeln!(
            out,
            "{:<16} {:>12} {:>12} {:>12} {:>14} {:>14}",
            other.config,
            show_seconds(seconds(other.compute_ps)),
            show_seconds(seconds(other.inside_ps)),
            show_seconds(seconds(other.neighbours_ps)),
            change(other.total_ps() - chosen.total_ps()),
            anew(other)
        )?;
    }
    writeln!(out, "({} of {} configs)", own.options.len() - 1, own.configs)?;
    writeln!(out, "{NOTE}; {}", meant(own.reoptimised))
}

/// All choices, a line each.
fn list(out: &mut impl Write, plan: &Plan, explained: &[Explanation]) -> io::Result<()> {
    writeln!(
        out,
        "{:<32} {:<12} {:>11}   {:<12} {:>12} {:>12}",
        "op", "config", "costs", "next best", "alone", "anew"
    )?;
    for own in explained {
        let chosen = &own.options[0];
        let (next, alone, anew) = match own.options.get(1) {
            None => ("-", "-".to_string(), "-".to_string()),
            Some(next) => (&next.config[..], change(next.total_ps() - chosen.total_ps()), anew(next)),
        };
        writeln!(
            out,
            "{:<32} {:<12} {:>11}   {next:<12} {alone:>12} {anew:>12}",
            plan.ops[own.op as usize].name,
            chosen.config,
            show_seconds(seconds(chosen.total_ps()))
        )?;
    }
    writeln!(out, "{NOTE}; {}", meant(explained.first().and_then(|own| own.reoptimised)))
}

/// What holds a device's memory when it is fullest.
fn memory(out: &mut impl Write, plan: &Plan, fullest: &DeviceClass) -> io::Result<()> {
    let peak = &fullest.peak;
    let doing = peak.op.map_or_else(String::new, |op| format!(", in {}", plan.ops[op as usize].name));
    writeln!(
        out,
        "\ndevice {} holds most after {}{doing}: {}",
        fullest.device,
        show_seconds(peak.at_ps as f64 / 1e12),
        show_bytes(fullest.peak_memory_bytes)
    )?;
    for own in &peak.kinds {
        writeln!(out, "  {:<16} {:>12}", own.kind, show_bytes(own.bytes))?;
    }
    writeln!(out, "the largest:")?;
    for held in &peak.largest {
        writeln!(out, "  {:<16} {:>12}  {}", held.kind, show_bytes(held.bytes), held.tensor)?;
    }
    if peak.others > 0 {
        writeln!(out, "  and {} more", peak.others)?;
    }
    Ok(())
}
