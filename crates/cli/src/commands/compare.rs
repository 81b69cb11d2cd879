//! `compare`: all strategies on one graph, machine and cost model; optionally over device counts (`--devices`) and memory
//! limits (`--pareto`).

mod race;

use crate::files::{check_outputs, is_standard, write_atomically};
use crate::interrupt;
use crate::progress::ProgressLine;
use crate::{Verdict, complain};
use anyhow::ensure;
use race::Race;
use shardwright_plan::Optimised;
use shardwright_report::{Comparison, MemoryLimitRow, Row, Scale};
use shardwright_request::{Inputs, PipelineChoice, Request, hanging, show_bytes, show_seconds};
use shardwright_strategies::{EXPERT, STRATEGIES, Strategy, Variant, VariantGraph, find, plan_variants};
use std::io::{self, Write};
use std::path::PathBuf;

/// Runs every strategy on a model and prints one row for each.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    request: Request,
    /// Run only these strategies, such as `auto,pase,data`; `shardwright solvers` lists them
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    solver: Vec<String>,
    /// Also plan for the machine's first devices, such as `1,2,4,8`, with the strategies of --solver, or `auto` and the
    /// recipes
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    devices: Vec<u32>,
    /// Samples per step and device: the batch grows with the number of devices
    #[arg(long, value_name = "N", conflicts_with = "batch", value_parser = clap::value_parser!(u64).range(1..))]
    batch_per_device: Option<u64>,
    /// Also plan under this many memory limits, from the least memory of any plan to that of the fastest
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true,
          value_parser = clap::value_parser!(u64).range(0..=64))]
    pareto: u64,
    /// Write a report to this file: one self-contained HTML page
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// One JSON object on standard output, nothing else
    #[arg(long)]
    json: bool,
    /// Print the table without notes
    #[arg(short, long)]
    quiet: bool,
    /// Print SoyBean's and OptCNN's counts of moved data too
    #[arg(short, long)]
    verbose: bool,
}

const NOTES: [&str; 4] = [
    "SoyBean's count is elements moved, with every op split on every axis; replicated ops count as split",
    "OptCNN's count sends every block directly to its readers, weights through a parameter server; `traffic` is what the plan sends",
    "auto runs last, and the answers of all other rows are its candidates: its `search` does not count theirs",
    "step is simulated; `optimal` is proved of the cost model's sum, without overlap",
];

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    // Unknown names are refused before anything is read.
    let named =
        args.solver.iter().map(|name| find(name)).collect::<Result<Vec<&'static dyn Strategy>, _>>()?;
    check_outputs(&args.report)?;
    // Of two things for standard output the page is the one that was named.
    let silent = args.json || args.report.as_deref().is_some_and(is_standard);
    let whole = args.on(None)?;
    ensure!(
        whole.pipeline == PipelineChoice::Off && whole.as_plan.is_none() && !whole.uniform,
        "--pipeline, --as, --uniform: solvers are compared without pipelines; use `plan`"
    );
    let inputs = whole.open()?;
    let variants = inputs.variants()?;
    let all = inputs.machine.devices();
    // So are device counts that the machine does not have.
    for &devices in &args.devices {
        inputs.machine.restrict(u64::from(devices))?;
    }
    let strategies = if named.is_empty() { STRATEGIES.to_vec() } else { named.clone() };
    if !args.json && !args.quiet {
        let named = (!named.is_empty()).then_some(&named[..]);
        // The number of micro-batches is searched before the strategies run.
        let chosen = usize::from(variants.iter().any(|own| own.micro_batches != variants[0].micro_batches));
        if let Some(told) = args.announcement(&strategies, named.unwrap_or(&cheap()), all, chosen, &whole) {
            complain(&told);
        }
    }
    let line = ProgressLine::new("pricing every choice");
    if !silent {
        print_header(&mut io::stdout().lock())?;
    }
    let show = |row: &Row| -> io::Result<()> {
        if silent { Ok(()) } else { line.aside(|| print_row(&mut io::stdout().lock(), row)) }
    };
    let comparison = whole.on_threads(|| -> anyhow::Result<Comparison> {
        let step = compared(&inputs, &variants, &line)?;
        let race = Race::new(&inputs, &step, &line);
        let rows = race.run(&strategies, &show)?;
        let data = rows.iter().find(|row| row.solver == "data").and_then(|row| row.step_seconds);
        let pareto = if args.pareto > 0 { race.front(&variants, args.pareto, data)? } else { Vec::new() };
        drop(race);
        let curves = if named.is_empty() { cheap() } else { named };
        let mut scaling = Vec::new();
        for &devices in &args.devices {
            let part = args.on(Some(devices))?;
            let rows = if devices == all {
                // The best uniform plan is a row of every count.
                let is_shown =
                    |row: &&Row| row.solver == EXPERT || curves.iter().any(|own| own.name() == row.solver);
                rows.iter().filter(is_shown).cloned().collect()
            } else {
                let part = part.open()?;
                let step = compared(&part, &part.variants()?, &line)?;
                Race::new(&part, &step, &line).run(&curves, &|_| Ok(()))?
            };
            scaling.push(Scale { devices, batch: part.model.batch, rows });
        }
        Ok(Comparison {
            model: inputs.graph.name.clone(),
            machine: inputs.machine.name().to_string(),
            devices: all,
            device_memory_bytes: inputs.machine.slowest().memory.0,
            rows,
            scaling,
            pareto,
            notes: NOTES.map(String::from).to_vec(),
        })
    })??;
    drop(line);
    if let Some(path) = &args.report {
        write_atomically(path, |out| comparison.write(out))?;
        if is_standard(path) {
            return Ok(Verdict::Done);
        }
    }
    let mut out = io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&comparison)?)?;
        return Ok(Verdict::Done);
    }
    if args.verbose {
        print_counts(&mut out, &comparison.rows)?;
    }
    print_scaling(&mut out, &comparison.scaling)?;
    print_pareto(&mut out, &comparison.pareto)?;
    if !args.quiet {
        let [soybean, optcnn, auto, steps] = NOTES;
        let auto = Some(auto).filter(|_| comparison.rows.iter().any(|row| row.solver == "auto"));
        let counts = [soybean, optcnn].into_iter().filter(|_| args.verbose);
        let shown = counts.chain(auto).chain([steps]);
        shown.map(|note| hanging("note: ", note)).try_for_each(|note| writeln!(out, "{note}"))?;
    }
    if let Some(path) = &args.report {
        writeln!(out, "report written to {}", path.display())?;
    }
    Ok(Verdict::Done)
}

/// The step that strategies are compared on: that of the variant asked for. Among several numbers of micro-batches `auto` chooses;
/// else it is the first variant, the step as it is.
fn compared<'g>(
    inputs: &'g Inputs,
    variants: &[Variant],
    line: &ProgressLine,
) -> anyhow::Result<VariantGraph<'g>> {
    let first = variants[0];
    if variants.iter().all(|variant| variant.micro_batches == first.micro_batches) {
        return Ok(first.graph(&inputs.graph)?);
    }
    line.say("choosing micro-batches and recomputation");
    let (auto, constraints) = (find("auto")?, inputs.constraints());
    let control = inputs.control(auto, interrupt::flag());
    let found =
        plan_variants(&inputs.graph, variants, race::variant_inputs(inputs), auto, &constraints, &control);
    // Where nothing fits, rows say so.
    Ok(found.map_or_else(|_| first.graph(&inputs.graph), |found| Ok(found.step))?)
}

/// `auto` and the recipes: the default strategies of curves over device counts.
fn cheap() -> Vec<&'static dyn Strategy> {
    let cheap = |own: &&&dyn Strategy| own.name() == "auto" || own.optimises() == Optimised::Nothing;
    STRATEGIES.iter().filter(cheap).copied().collect()
}

impl Args {
    /// How many searches there are and how long they take: some use all of their time, the others end when they are done. None where
    /// nothing is searched.
    fn announcement(
        &self,
        strategies: &[&dyn Strategy],
        curves: &[&dyn Strategy],
        devices: u32,
        chosen: usize,
        request: &Request,
    ) -> Option<String> {
        let searching = |own: &&&dyn Strategy| own.optimises() != Optimised::Nothing;
        let counts = self.devices.iter().filter(|&&count| count != devices).count();
        // `--pareto` also plans without a limit, and looks for the least memory.
        let limits = if self.pareto > 0 { self.pareto as usize + 2 } else { 0 };
        let searches = chosen
            + strategies.iter().filter(searching).count()
            + counts * curves.iter().filter(searching).count()
            + limits;
        if searches == 0 {
            return None;
        }
        let walking = |own: &&&dyn Strategy| own.takes_all_time() && request.proposals.is_none();
        let walks =
            strategies.iter().filter(walking).count() + counts * curves.iter().filter(walking).count();
        let time = request.time.as_secs_f64();
        let least = match strategies.iter().find(walking) {
            Some(walk) => {
                format!("at least {:.0} s, since {} uses its time up, and ", walks as f64 * time, walk.name())
            }
            None => String::new(),
        };
        let count = if searches == 1 { "one search".into() } else { format!("{searches} searches") };
        let most = searches as f64 * time;
        Some(hanging(
            "",
            &format!("{count}: {least}at most {most:.0} s (--time); rows come as they are found"),
        ))
    }

    /// The arguments for the machine's first devices, or for all of them.
    fn on(&self, devices: Option<u32>) -> anyhow::Result<Request> {
        let mut request = self.request.clone();
        if let Some(devices) = devices {
            request.machine = format!("{}:{devices}", self.request.machine);
        }
        if let Some(each) = self.batch_per_device {
            let devices = match devices {
                Some(devices) => devices,
                None => shardwright_request::open_machine(&request.machine)?.devices(),
            };
            let batch = each.checked_mul(u64::from(devices));
            ensure!(batch.is_some(), "{each} samples on each of {devices} devices are too many");
            request.model.batch = batch;
        }
        Ok(request)
    }
}

fn print_header(out: &mut impl Write) -> io::Result<()> {
    writeln!(
        out,
        "{:<12} {:>10} {:>8} {:>10} {:>10} {:>8}  proof",
        "solver", "step", "vs data", "traffic", "memory", "search"
    )
}

fn print_row(out: &mut impl Write, row: &Row) -> io::Result<()> {
    let Some(step) = row.step_seconds else {
        let reason = row.failure.as_deref().unwrap_or("no result");
        return writeln!(out, "{}", hanging(&format!("{:<12} ", row.solver), reason));
    };
    writeln!(
        out,
        "{:<12} {:>10} {:>8} {:>10} {:>10} {:>8}  {}",
        row.solver,
        show_seconds(step),
        row.speedup_over_data.map_or_else(|| "-".into(), |speedup| format!("{speedup:.2}x")),
        show_bytes(row.traffic_bytes.unwrap_or(0)),
        show_bytes(row.peak_memory_bytes.unwrap_or(0)),
        format!("{:.2} s", row.search_seconds),
        match (row.fits, row.proved_optimal) {
            (Some(false), _) => "does not fit",
            (_, true) => "optimal",
            _ => "-",
        }
    )
}

/// What SoyBean and OptCNN count for each plan.
fn print_counts(out: &mut impl Write, rows: &[Row]) -> io::Result<()> {
    writeln!(out, "\n{:<12} {:>20} {:>16}", "solver", "SoyBean's count", "OptCNN's count")?;
    for row in rows.iter().filter(|row| row.step_seconds.is_some()) {
        let elements = row.soybean_elements.map_or_else(|| "-".into(), |elements| elements.to_string());
        let bytes = row.optcnn_bytes.map_or_else(|| "-".into(), show_bytes);
        writeln!(out, "{:<12} {elements:>20} {bytes:>16}", row.solver)?;
    }
    Ok(())
}

/// As many device counts as fit beside each other.
const COUNTS_PER_TABLE: usize = 6;

/// Steps by device count: a column for each count, a line for each strategy.
fn print_scaling(out: &mut impl Write, scaling: &[Scale]) -> io::Result<()> {
    for scales in scaling.chunks(COUNTS_PER_TABLE) {
        let line = |out: &mut dyn Write, name: &str, cell: &dyn Fn(&Scale) -> String| -> io::Result<()> {
            write!(out, "{name:<12}")?;
            scales.iter().try_for_each(|scale| write!(out, " {:>10}", cell(scale)))?;
            writeln!(out)
        };
        writeln!(out)?;
        line(out, "devices", &|scale| scale.devices.to_string())?;
        line(out, "batch", &|scale| scale.batch.map_or_else(|| "-".into(), |batch| batch.to_string()))?;
        // Not every count has every row: one device has no uniform plans.
        let mut names: Vec<&str> = Vec::new();
        for row in scales.iter().flat_map(|scale| &scale.rows) {
            if !names.contains(&row.solver) {
                names.push(row.solver);
            }
        }
        for name in names {
            line(out, name, &|scale| {
                let step = scale.rows.iter().find(|row| row.solver == name).and_then(|row| row.step_seconds);
                step.map_or_else(|| "-".into(), show_seconds)
            })?;
        }
    }
    Ok(())
}

/// The step under each memory limit.
fn print_pareto(out: &mut impl Write, pareto: &[MemoryLimitRow]) -> io::Result<()> {
    if pareto.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "\n{:>12} {:>10} {:>10} {:>15} {:>13} {:>10}",
        "memory limit", "memory", "step", "without overlap", "micro-batches", "recompute"
    )?;
    for MemoryLimitRow { memory_limit_bytes, on_front, row } in pareto {
        let limit = memory_limit_bytes.map_or_else(|| "none".into(), show_bytes);
        let (Some(step), Some(held), Some(sum)) = (row.step_seconds, row.peak_memory_bytes, row.objective)
        else {
            let reason = row.failure.as_deref().unwrap_or("no result");
            writeln!(out, "{}", hanging(&format!("{limit:>12} "), reason))?;
            continue;
        };
        let sum = show_seconds(sum as f64 / 1e12);
        let beaten = if *on_front { "" } else { " *" };
        let (count, policy) = (row.micro_batches.unwrap_or(1), row.recompute.unwrap_or("off"));
        let (held, step) = (show_bytes(held), show_seconds(step));
        writeln!(out, "{limit:>12} {held:>10} {step:>10} {sum:>15} {count:>13} {policy:>10}{beaten}")?;
    }
    if pareto.iter().any(|plan| !plan.on_front) {
        writeln!(out, "* another row has no more memory and no longer step")?;
    }
    Ok(())
}
