//! `explain`: why every layer of a plan is split as it is, and what the alternatives would cost.

use crate::Verdict;
use crate::commands::run::{read_plan, reopen};
use crate::planning::{PlanningArgs, show_seconds};
use anyhow::Context;
use serde_json::json;
use shardwright_plan::Plan;
use shardwright_report::{Choice, Explainer, Explanation};
use std::io::{self, Write};

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
    let parts = match &args.op {
        None => (0..explainer.parts()).collect(),
        Some(name) => {
            let op = request.graph.op_ids().find(|&op| request.graph.node(op).name == *name);
            vec![explainer.part(op.with_context(|| unknown(&plan, name))?)]
        }
    };
    let explained = parts.into_iter().map(|part| explainer.explain(part, args.most));
    let explained: Vec<Explanation> = explained.collect::<Result<_, _>>()?;
    let mut out = io::stdout().lock();
    if args.json {
        let rows: Vec<_> = explained.iter().map(|own| as_json(&plan, own)).collect();
        writeln!(out, "{}", serde_json::to_string_pretty(&json!({ "choices": rows }))?)?;
    } else if args.op.is_some() {
        explained.iter().try_for_each(|own| describe(&mut out, &plan, own))?;
    } else {
        list(&mut out, &plan, &explained)?;
    }
    Ok(Verdict::Done)
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
            "compute_seconds": seconds(choice.compute_ps), "inside_seconds": seconds(choice.inside_ps),
            "neighbours_seconds": seconds(choice.neighbours_ps),
        })
    };
    json!({
        "op": name(own.op), "follow": own.ops.iter().map(|&op| name(op)).collect::<Vec<_>>(), "configs": own.configs,
        "chosen": option(&own.options[0]), "alternatives": own.options[1..].iter().map(option).collect::<Vec<_>>(),
    })
}

/// A difference, with its sign.
fn change(picoseconds: i64) -> String {
    let sign = if picoseconds < 0 { '-' } else { '+' };
    format!("{sign}{}", show_seconds(seconds(picoseconds.abs())))
}

const NOTE: &str =
    "note: everything else stays as it is; times add up as if nothing overlapped; memory is not looked at";

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
    if own.options.len() == 1 {
        let why =
            if own.configs > 0 { "there is no other way" } else { "it has too many configs to look at" };
        return writeln!(out, "{why}");
    }
    writeln!(
        out,
        "\n{:<16} {:>12} {:>12} {:>12} {:>14}",
        "instead", "computing", "its own", "neighbours", "step"
    )?;
    for other in &own.options[1..] {
        writeln!(
            out,
            "{:<16} {:>12} {:>12} {:>12} {:>14}",
            other.config,
            show_seconds(seconds(other.compute_ps)),
            show_seconds(seconds(other.inside_ps)),
            show_seconds(seconds(other.neighbours_ps)),
            change(other.total_ps() - chosen.total_ps())
        )?;
    }
    writeln!(out, "({} of {} configs)\n{NOTE}", own.options.len() - 1, own.configs)
}

/// All choices, a line each.
fn list(out: &mut impl Write, plan: &Plan, explained: &[Explanation]) -> io::Result<()> {
    writeln!(out, "{:<32} {:<12} {:>11}   {:<12} {:>12}", "op", "config", "costs", "next best", "step")?;
    for own in explained {
        let chosen = &own.options[0];
        let (next, by) = own.options.get(1).map_or(("-", "-".to_string()), |next| {
            (&next.config[..], change(next.total_ps() - chosen.total_ps()))
        });
        writeln!(
            out,
            "{:<32} {:<12} {:>11}   {next:<12} {by:>12}",
            plan.ops[own.op as usize].name,
            chosen.config,
            show_seconds(seconds(chosen.total_ps()))
        )?;
    }
    writeln!(out, "{NOTE}")
}
