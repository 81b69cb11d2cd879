//! `compare`: every strategy side by side, on one graph, machine and cost model; over device counts (`--devices`) and
//! over limits of memory (`--pareto`), where asked for.

mod race;

use crate::Verdict;
use crate::files::write_atomically;
use crate::planning::{PlanningArgs, show_bytes, show_seconds};
use crate::progress::ProgressLine;
use anyhow::ensure;
use race::Race;
use shardwright_plan::strategy::{Space, Strategy};
use shardwright_report::{Comparison, Limited, Row, Scale};
use shardwright_sim::{find, strategies};
use std::io::{self, Write};
use std::path::PathBuf;

/// Runs every strategy on a model and shows them side by side.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    planning: PlanningArgs,
    /// Only these strategies, say `auto,pase,data`; `shardwright solvers` lists them
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    solver: Vec<String>,
    /// Also on the machine's first devices, say `1,2,4,8`: the strategies named by --solver, or `auto` and the recipes
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    devices: Vec<u32>,
    /// Samples per step for every device, so that the batch grows with the devices
    #[arg(long, value_name = "N", conflicts_with = "batch", value_parser = clap::value_parser!(u64).range(1..))]
    batch_per_device: Option<u64>,
    /// Also the best plan under this many limits of memory, from what the leanest plan holds to what the fastest does
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true,
          value_parser = clap::value_parser!(u64).range(0..=64))]
    pareto: u64,
    /// Write a report to this file: one HTML page that needs nothing else
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// One JSON object on standard output, nothing else
    #[arg(long)]
    json: bool,
    /// Only the table, without notes
    #[arg(short, long)]
    quiet: bool,
}

const NOTES: [&str; 3] = [
    "SoyBean's count is elements moved with every op split on every axis; ops that a plan repeats count as split",
    "OptCNN's count sends all straight to who lacks it, weights through a parameter server; `sent` is what runs",
    "steps are simulated; what is proved is the cost model's sum, where nothing overlaps",
];

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    // Names that mean nothing are told before anything is read.
    let named = args.solver.iter().map(|name| find(name)).collect::<Result<Vec<&'static Strategy>, _>>()?;
    let whole = args.on(None)?;
    let request = whole.open()?;
    let all = request.machine.devices();
    // So are device counts that the machine does not have.
    for &devices in &args.devices {
        request.machine.restrict(u64::from(devices))?;
    }
    let line = ProgressLine::new("pricing every choice");
    let comparison = whole.on_threads(|| -> anyhow::Result<Comparison> {
        let race = Race::new(&whole, &request, &line)?;
        let rows = race.run(&if named.is_empty() { strategies().collect() } else { named.clone() })?;
        let data = rows.iter().find(|row| row.solver == "data").and_then(|row| row.step_seconds);
        let pareto = if args.pareto > 0 { race.front(args.pareto, data)? } else { Vec::new() };
        drop(race);
        let curves = if named.is_empty() { cheap() } else { named };
        let mut scaling = Vec::new();
        for &devices in &args.devices {
            let part = args.on(Some(devices))?;
            let rows = if devices == all {
                rows.iter().filter(|row| curves.iter().any(|own| own.name == row.solver)).cloned().collect()
            } else {
                Race::new(&part, &part.open()?, &line)?.run(&curves)?
            };
            scaling.push(Scale { devices, batch: part.batch, rows });
        }
        Ok(Comparison {
            model: request.graph.name.clone(),
            machine: request.machine.name().to_string(),
            devices: all,
            device_memory_bytes: request.machine.slowest().memory.0,
            rows,
            scaling,
            pareto,
            notes: NOTES.map(String::from).to_vec(),
        })
    })??;
    drop(line);
    if let Some(path) = &args.report {
        write_atomically(path, |out| comparison.write(out))?;
    }
    let mut out = io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&comparison)?)?;
        return Ok(Verdict::Done);
    }
    print_rows(&mut out, &comparison.rows)?;
    print_scaling(&mut out, &comparison.scaling)?;
    print_pareto(&mut out, &comparison.pareto)?;
    if !args.quiet {
        comparison.notes.iter().try_for_each(|note| writeln!(out, "note: {note}"))?;
    }
    if let Some(path) = &args.report {
        writeln!(out, "report written to {}", path.display())?;
    }
    Ok(Verdict::Done)
}

/// `auto` and the recipes: what curves over device counts show where nobody says otherwise.
fn cheap() -> Vec<&'static Strategy> {
    strategies().filter(|own| own.name == "auto" || matches!(own.space, Space::Fixed(_))).collect()
}

impl Args {
    /// The arguments for the machine's first devices, or for all of them.
    fn on(&self, devices: Option<u32>) -> anyhow::Result<PlanningArgs> {
        let mut planning = self.planning.clone();
        if let Some(devices) = devices {
            planning.machine = format!("{}:{devices}", self.planning.machine);
        }
        if let Some(each) = self.batch_per_device {
            let devices = match devices {
                Some(devices) => devices,
                None => shardwright_request::open_machine(&planning.machine)?.devices(),
            };
            let batch = each.checked_mul(u64::from(devices));
            ensure!(batch.is_some(), "{each} samples on each of {devices} devices are too many");
            planning.batch = batch;
        }
        Ok(planning)
    }
}

fn print_rows(out: &mut impl Write, rows: &[Row]) -> io::Result<()> {
    writeln!(
        out,
        "{:<12} {:>11} {:>9} {:>11} {:>15} {:>14} {:>11} {:>9}  optimal in its space",
        "solver", "step", "vs data", "sent", "SoyBean's count", "OptCNN's count", "per device", "search"
    )?;
    for row in rows {
        let Some(step) = row.step_seconds else {
            writeln!(out, "{:<12} {}", row.solver, row.failure.as_deref().unwrap_or("no result"))?;
            continue;
        };
        writeln!(
            out,
            "{:<12} {:>11} {:>9} {:>11} {:>15} {:>14} {:>11} {:>8.2}s  {}",
            row.solver,
            show_seconds(step),
            row.speedup_over_data.map_or_else(|| "-".into(), |speedup| format!("{speedup:.2}x")),
            show_bytes(row.traffic_bytes.unwrap_or(0)),
            row.soybean_elements.map_or_else(|| "-".into(), |elements| elements.to_string()),
            row.optcnn_bytes.map_or_else(|| "-".into(), show_bytes),
            show_bytes(row.peak_memory_bytes.unwrap_or(0)),
            row.search_seconds,
            if row.proved_optimal { "proved" } else { "-" }
        )?;
    }
    Ok(())
}

/// Steps by device count, a column for each strategy.
fn print_scaling(out: &mut impl Write, scaling: &[Scale]) -> io::Result<()> {
    let Some(first) = scaling.first() else { return Ok(()) };
    write!(out, "\n{:>7} {:>8}", "devices", "batch")?;
    first.rows.iter().try_for_each(|row| write!(out, " {:>12}", row.solver))?;
    writeln!(out)?;
    for scale in scaling {
        let batch = scale.batch.map_or_else(|| "-".into(), |batch| batch.to_string());
        write!(out, "{:>7} {batch:>8}", scale.devices)?;
        for row in &scale.rows {
            write!(out, " {:>12}", row.step_seconds.map_or_else(|| "-".into(), show_seconds))?;
        }
        writeln!(out)?;
    }
    Ok(())
}

/// What a limit of memory costs.
fn print_pareto(out: &mut impl Write, pareto: &[Limited]) -> io::Result<()> {
    if pareto.is_empty() {
        return Ok(());
    }
    writeln!(out, "\n{:>12} {:>12} {:>12} {:>12}", "memory limit", "per device", "step", "sum")?;
    for Limited { memory_limit_bytes, on_front, row } in pareto {
        let limit = memory_limit_bytes.map_or_else(|| "none".into(), show_bytes);
        let (Some(step), Some(held), Some(sum)) = (row.step_seconds, row.peak_memory_bytes, row.objective)
        else {
            writeln!(out, "{limit:>12} {}", row.failure.as_deref().unwrap_or("no result"))?;
            continue;
        };
        let sum = show_seconds(sum as f64 / 1e12);
        let beaten = if *on_front { "" } else { "  another is as fast and as lean" };
        writeln!(out, "{limit:>12} {:>12} {:>12} {sum:>12}{beaten}", show_bytes(held), show_seconds(step))?;
    }
    Ok(())
}
