//! `profile`: measures operator times on this computer's processor, or lists what another tool should measure.

use crate::commands::run::{Opened, read_plan};
use crate::planning::PlanningArgs;
use crate::reuse::reaches;
use crate::{Verdict, files};
use anyhow::{Context, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use shardwright_cost::{CostFile, Moment, Paces, Sample, TableText, WorkloadSet};
use shardwright_frontend::zoo;
use shardwright_graph::{Optimizer, Real, TensorType, Workload};
use shardwright_lower::{Instruction, ParallelGraph};
use shardwright_machine::DeviceId;
use shardwright_runtime::measure::{Bench, Caches, Operand, Reach, Timings, median};
use std::{
    collections::BTreeMap,
    io::{IsTerminal, Write},
    path::PathBuf,
    time::{Duration, Instant},
};

/// Models whose ops are measured unless others are named: small enough for one processor, and between them
/// every kind of op.
const DEFAULT_MODELS: &[&str] = &[
    "mlp:batch=64",
    "lenet5:batch=64",
    "alexnet:batch=32",
    "gpt:layers=1,batch=4",
    "moe:layers=2,batch=4",
    "rnnlm:vocab=10000,batch=16",
];
/// Inputs larger than this are not measured on a processor: they take seconds and say nothing new.
const LARGEST: u64 = 512 << 20;
/// The most ops of plans with one workload that are measured; their average counts.
const MOST_ALIKE: usize = 4;
/// How often all ops of a plan are measured, one time after all others: cores are slower at times. The middle one counts.
const ROUNDS: usize = 3;

/// Measures operator costs for the cost model (`--costs`).
///
/// The ops are those of the named models, split in one or two of their dimensions over up to 64 devices, or exactly those
/// that the devices of a plan run. They run with Shardwright's own kernels, each on one core of this computer, or on several
/// at once (`--workers`), where they share memory as devices of a run do. Then the file also says how uneven these cores
/// were (`paces`), for `simulate --uneven`. For other devices, `--list` writes what there is to measure, and `python/profile_torch.py` measures it with PyTorch.
#[derive(clap::Args)]
pub struct Args {
    /// Where to write the cost file (or the list)
    #[arg(short, long)]
    output: PathBuf,
    /// Models or plans (.json) to take the ops from; may be repeated (default: a small selection)
    #[arg(short, long = "model")]
    models: Vec<String>,
    /// Write the list of workloads instead of measuring them
    #[arg(long)]
    list: bool,
    /// Measure every op on so many cores at once
    #[arg(long, default_value_t = 1)]
    workers: usize,
    /// Splits over up to this many devices
    #[arg(long, default_value_t = 64)]
    devices: u64,
    /// At most this many workloads of each class and element type
    #[arg(long, default_value_t = 400)]
    per_class: usize,
    /// Stop measuring after so many seconds, keeping what there is
    #[arg(long, default_value_t = 300.0)]
    time: f64,
    /// Name of the measured device in the file
    #[arg(long, default_value = "cpu")]
    name: String,
    /// Date to note in the file
    #[arg(long)]
    date: Option<String>,
    /// A summary as one JSON object on standard output
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    ensure!((1..=4096).contains(&args.devices), "--devices {}: from 1 to 4096", args.devices);
    ensure!((1..=1024).contains(&args.workers), "--workers {}: from 1 to 1024", args.workers);
    ensure!(args.time > 0.0, "--time {}: must be positive", args.time);
    let caches = Caches::of_cores(args.workers);
    let mut workloads = WorkloadSet::default();
    let defaults: Vec<String> = DEFAULT_MODELS.iter().map(|m| m.to_string()).collect();
    let key = |sample: &Sample| {
        let Workload { class, dtype, ref sizes, .. } = sample.workload;
        (class, dtype, sizes.to_vec())
    };
    // Ops of a plan with the same workload: their times may differ all the same.
    let mut planned: BTreeMap<_, Vec<Alike>> = BTreeMap::new();
    for model in if args.models.is_empty() { &defaults } else { &args.models } {
        if let Some(plan) = read_plan(model)? {
            let opened = Opened::of_plan(&PlanningArgs::of(model, 1), plan)?;
            for met in ops_of(&opened.program, caches) {
                let alike = planned.entry(key(&met.sample)).or_default();
                match alike.iter().position(|other| other.is(&met)) {
                    Some(known) => alike[known].times += 1,
                    None if alike.len() < MOST_ALIKE => alike.push(met),
                    None => {}
                }
            }
            continue;
        }
        for optimizer in optimizers() {
            let options = zoo::BuildOptions { optimizer, ..zoo::BuildOptions::default() };
            let graph = zoo::build(model, &options).with_context(|| format!("model `{model}`"))?;
            workloads.add_graph(&graph, args.devices);
        }
    }
    // What a plan runs is measured first and all of it.
    let others = workloads.thinned(args.per_class).into_iter().filter(|s| !planned.contains_key(&key(s)));
    let others: Vec<Alike> = others.map(|sample| Alike::from_memory(sample.clone())).collect();
    let mut samples: Vec<&[Alike]> = planned.values().map(Vec::as_slice).collect();
    samples.extend(others.iter().map(std::slice::from_ref));
    if args.list {
        return list(args, &samples);
    }
    let rounds = if planned.is_empty() { 1 } else { ROUNDS };
    let (measured, paces) = measure(args, &samples, rounds);
    let count: usize = measured.iter().map(|t| t.rows.len()).sum();
    ensure!(count > 0, "nothing was measured; give it more --time");
    let date = args.date.clone().unwrap_or_else(today);
    let at_once =
        if args.workers == 1 { "one thread".into() } else { format!("{} threads at once", args.workers) };
    let source = format!("shardwright {}, its own kernels, {at_once}", env!("CARGO_PKG_VERSION"));
    let method = "mean of 5 timings of at least 2 ms each (3 of long ones), after a warm-up, operands in the caches or the memory where a step leaves \
                  them; of all threads; of a plan's ops the median of 3 such rounds"
        .into();
    let mut file = CostFile::new([args.name.clone(), date, source, method], measured)?;
    file.paces = paces;
    files::write_atomically(&args.output, |out| out.write_all(file.to_json().as_bytes()))?;
    let slowest = file.paces.as_ref().map(Paces::slowest);
    report(args, count, samples.len(), slowest)
}

/// An op of a program, where it finds its operands, and how often it is met so.
struct Alike {
    sample: Sample,
    reaches: Vec<Reach>,
    times: u32,
}

impl Alike {
    /// An op of which nobody knows what came before.
    fn from_memory(sample: Sample) -> Self {
        Self { reaches: vec![Reach::Memory; sample.inputs.len()], sample, times: 1 }
    }

    fn operands(&self) -> Vec<Operand> {
        let pairs = self.sample.inputs.iter().zip(&self.reaches);
        pairs.map(|(ty, &reach)| Operand { ty: ty.clone(), reach }).collect()
    }

    fn is(&self, other: &Self) -> bool {
        let (own, its) = (&self.sample, &other.sample);
        own.op == its.op && own.inputs == its.inputs && self.reaches == other.reaches
    }
}

/// The ops that the devices of a program run.
fn ops_of(program: &ParallelGraph, caches: Caches) -> impl Iterator<Item = Alike> {
    program.devices().flat_map(move |device| {
        let reaches = reaches(program, device, caches);
        program.instructions.iter().zip(reaches).filter_map(move |(instruction, reaches)| {
            Some(Alike { sample: sample(program, instruction, device)?, reaches, times: 1 })
        })
    })
}

/// What a device runs for an instruction; none where that is nothing.
pub fn sample(program: &ParallelGraph, instruction: &Instruction, device: DeviceId) -> Option<Sample> {
    let op = program.local_op(instruction, device)?;
    let local = |&value| program.value(value).local_type(&program.mesh, device);
    let inputs: Vec<TensorType> = instruction.reads.iter().map(local).collect::<Option<_>>()?;
    let results = op.operator().infer(&inputs).ok()?;
    Some(Sample { workload: op.workload(&inputs, &results), op, inputs })
}

/// One of each kind: their updates are ops of their own.
fn optimizers() -> [Optimizer; 3] {
    let lr = Real(0.01);
    [
        Optimizer::Sgd { lr },
        Optimizer::Momentum { lr, momentum: Real(0.9) },
        Optimizer::Adam { lr, beta1: Real(0.9), beta2: Real(0.999), eps: Real(1e-8) },
    ]
}

fn list(args: &Args, samples: &[&[Alike]]) -> anyhow::Result<Verdict> {
    let tables: Vec<_> = by_table(samples)
        .into_iter()
        .map(|((class, dtype), rows)| {
            let rows: Vec<_> = rows.iter().map(|s| s[0].sample.workload.sizes.to_vec()).collect();
            json!({"class": class, "dtype": dtype, "rows": rows})
        })
        .collect();
    let list = json!({"format": "shardwright-workloads", "version": 1, "tables": tables});
    files::write_atomically(&args.output, |out| writeln!(out, "{list}"))?;
    report(args, samples.len(), samples.len(), None)
}

fn report(args: &Args, count: usize, of: usize, slowest: Option<f64>) -> anyhow::Result<Verdict> {
    let mut out = std::io::stdout();
    let path = args.output.display();
    if args.json {
        writeln!(
            out,
            "{}",
            json!({"output": path.to_string(), "workloads": of, "written": count, "slowest": slowest})
        )?;
    } else {
        let what = if args.list { "listed" } else { "measured" };
        writeln!(out, "{count} of {of} workloads {what}: {path}")?;
        if let Some(slowest) = slowest {
            writeln!(
                out,
                "the slowest core took {:.0}% longer than the average one (simulate --uneven)",
                slowest * 100.0
            )?;
        }
    }
    Ok(Verdict::Done)
}

type Tables<'a> = BTreeMap<(&'static str, &'static str), Vec<&'a [Alike]>>;

fn by_table<'a>(samples: &[&'a [Alike]]) -> Tables<'a> {
    let mut tables = Tables::new();
    for alike in samples {
        let workload = &alike[0].sample.workload;
        tables.entry((workload.class, workload.dtype.name())).or_default().push(alike);
    }
    tables
}

/// Tables of times, and how uneven the cores were, if there are several.
fn measure(args: &Args, samples: &[&[Alike]], rounds: usize) -> (Vec<TableText>, Option<Paces>) {
    let bar = if std::io::stderr().is_terminal() {
        ProgressBar::new((samples.len() * rounds) as u64)
    } else {
        ProgressBar::hidden()
    };
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} ({eta} left)") {
        bar.set_style(style);
    }
    let deadline = Instant::now() + Duration::from_secs_f64(args.time.min(1e6));
    let tables = by_table(samples);
    // Coarse to fine, turn by turn over the tables: a time limit thins all of them alike.
    let orders: Vec<Vec<usize>> = tables.values().map(|t| coarse_to_fine(t.len())).collect();
    let turns = tables.values().map(Vec::len).max().unwrap_or(0);
    let turn = |turn: usize| {
        let places = orders.iter().enumerate();
        places.filter_map(move |(table, order)| Some((table, *order.get(turn)?)))
    };
    let by_place: Vec<_> = tables.iter().collect();
    let mut times: Vec<Vec<Vec<f64>>> = by_place.iter().map(|(_, t)| vec![Vec::new(); t.len()]).collect();
    let (mut bench, mut moments) = (Bench::new(args.workers), Vec::new());
    for (table, row) in (0..rounds).flat_map(|_| (0..turns).flat_map(&turn)) {
        if Instant::now() > deadline {
            break;
        }
        let ((class, _), samples) = by_place[table];
        bar.set_message(*class);
        bar.inc(1);
        times[table][row].extend(once(samples[row], &mut bench, &mut moments));
    }
    bar.finish_and_clear();
    let paces = if args.workers > 1 { Paces::new(moments).ok() } else { None };
    let tables = by_place.iter().zip(times).filter_map(|(((class, _), samples), times)| {
        let row = |(alike, times): (&&[Alike], Vec<f64>)| {
            let mut row = alike[0].sample.workload.sizes.to_vec();
            row.push(((median(times) * 1e9).round() as u64).max(1));
            row
        };
        let measured = samples.iter().zip(times).filter(|(_, times)| !times.is_empty());
        let rows: Vec<Vec<u64>> = measured.map(row).collect();
        let dtype = samples[0][0].sample.workload.dtype;
        (!rows.is_empty()).then(|| TableText { class: (*class).into(), dtype, rows })
    });
    (tables.collect(), paces)
}

/// The average time of ops with one workload, and how uneven cores were meanwhile. None where our kernels do not run them on this type, or where they
/// are too large.
fn once(alike: &[Alike], bench: &mut Bench, moments: &mut Vec<Moment>) -> Option<f64> {
    let (mut sum, mut count) = (0.0, 0);
    for op in alike {
        if op.sample.inputs.iter().map(|t| t.bytes()).sum::<u64>() > LARGEST {
            continue;
        }
        if let Ok(timings) = bench.time(&op.sample.op, &op.operands()) {
            let (own, spent) = (each(&timings, Timings::mean), each(&timings, Timings::spent));
            sum += mean(&own) * f64::from(op.times);
            count += op.times;
            moments.extend(Moment::of(&own, mean(&spent)));
        }
    }
    (count > 0).then(|| sum / f64::from(count))
}

fn each(timings: &[Timings], of: fn(&Timings) -> f64) -> Vec<f64> {
    timings.iter().map(of).collect()
}

fn mean(numbers: &[f64]) -> f64 {
    numbers.iter().sum::<f64>() / numbers.len().max(1) as f64
}

/// All indices below `count`: first those far apart, then those between them.
fn coarse_to_fine(count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by_key(|i| std::cmp::Reverse(i.trailing_zeros()));
    order
}

/// Today's date, from the clock and the calendar (days since 1970 to year, month and day).
pub fn today() -> String {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let days = (since.as_secs() / 86_400) as i64;
    let (mut year, mut day) = (1970, days);
    let length = |y: i64| if y % 4 == 0 && (y % 100 != 0 || y % 400 == 0) { 366 } else { 365 };
    while day >= length(year) {
        day -= length(year);
        year += 1;
    }
    let february = length(year) - 337;
    let months = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while day >= months[month] {
        day -= months[month];
        month += 1;
    }
    format!("{year:04}-{:02}-{:02}", month + 1, day + 1)
}

#[cfg(test)]
mod tests {
    #[test]
    fn coarse_to_fine_visits_all_and_far_ones_first() {
        assert_eq!(super::coarse_to_fine(7), [0, 4, 2, 6, 1, 3, 5]);
    }

    #[test]
    fn today_is_a_date_of_this_century() {
        let date = super::today();
        assert_eq!((date.len(), &date[..2]), (10, "20"), "{date}");
    }
}
