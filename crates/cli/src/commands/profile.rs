//! `profile`: measures op times on this computer's cores, or lists the workloads that another tool should measure.

use crate::lowered_plan::LoweredPlan;
use crate::{Verdict, files};
use anyhow::{Context, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use shardwright_cost::{CostFile, Mode, Sample, SpeedSample, SpeedTrace, TableText, WorkloadSet};
use shardwright_graph::{Optimizer, Real, TensorType, Workload};
use shardwright_lower::{Instruction, ParallelGraph};
use shardwright_machine::DeviceId;
use shardwright_request::Request;
use shardwright_runtime::measure::{Bench, Caches, Operand, Reach, Timings, median, reaches};
use shardwright_zoo as zoo;
use std::{
    collections::BTreeMap,
    io::{IsTerminal, Write},
    path::PathBuf,
    time::{Duration, Instant},
};

/// Models whose ops are measured by default: small enough for one core, and together every kind of op.
const DEFAULT_MODELS: &[&str] = &[
    "mlp:batch=64",
    "lenet5:batch=64",
    "alexnet:batch=32",
    "gpt:layers=1,batch=4",
    "moe:layers=2,batch=4",
    "rnnlm:vocab=10000,batch=16",
];
/// Ops with larger inputs are not measured on a core: they take seconds and add no information.
const LARGEST: u64 = 512 << 20;
/// At most this many ops of a plan with one workload are measured. Their average counts.
const MOST_EQUAL: usize = 4;
/// Rounds over all ops of a plan, since cores are slower at times. The median counts.
const ROUNDS: usize = 3;

/// Measures op times for the cost model (`--costs`).
///
/// The ops are those of the named models, split along one or two dimensions over up to 64 devices, or the ops of a plan's
/// devices. They run with Shardwright's own kernels on one core of this computer. With `--workers` they run on several cores
/// at once, which share memory as the devices of a run do. The file then also has the cores' speed trace (`paces`), for
/// `simulate --uneven`. For other devices, `--list` writes the workloads, and `python/profile_torch.py` measures them with
/// PyTorch.
#[derive(clap::Args)]
pub struct Args {
    /// The cost file (or list) to write
    #[arg(short, long)]
    output: PathBuf,
    /// A model or a plan (.json) whose ops are measured; may be repeated (default: a small selection of models)
    #[arg(short, long = "model")]
    models: Vec<String>,
    /// Write the list of workloads instead of measuring them
    #[arg(long)]
    list: bool,
    /// Measure every op on this many cores at once
    #[arg(long, default_value_t = 1)]
    workers: usize,
    /// Split ops over up to this many devices
    #[arg(long, default_value_t = 64)]
    devices: u64,
    /// Measure at most this many workloads of each class and element type
    #[arg(long, default_value_t = 400)]
    per_class: usize,
    /// Stop measuring after this many seconds and keep the results
    #[arg(long, default_value_t = 300.0)]
    time: f64,
    /// Name of the measured device in the file
    #[arg(long, default_value = "cpu")]
    name: String,
    /// Date in the file (default: today)
    #[arg(long)]
    date: Option<String>,
    /// Print a summary as one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    ensure!((1..=4096).contains(&args.devices), "--devices {}: from 1 to 4096", args.devices);
    ensure!((1..=1024).contains(&args.workers), "--workers {}: from 1 to 1024", args.workers);
    ensure!(args.time > 0.0, "--time {}: must be positive", args.time);
    files::check_outputs([&args.output])?;
    let caches = Caches::of_cores(args.workers);
    let mut workloads = WorkloadSet::default();
    let defaults: Vec<String> = DEFAULT_MODELS.iter().map(|m| m.to_string()).collect();
    let key = |sample: &Sample| {
        let Workload { class, dtype, ref sizes, .. } = sample.workload;
        (class, dtype, sizes.to_vec())
    };
    // Ops of a plan with equal workloads may still differ in time.
    let mut planned: BTreeMap<_, Vec<ProfiledOp>> = BTreeMap::new();
    for model in if args.models.is_empty() { &defaults } else { &args.models } {
        if let Some(lowered) = LoweredPlan::of_file(&Request::of_model(model))? {
            for met in ops_of(&lowered.program, caches) {
                let alike = planned.entry(key(&met.sample)).or_default();
                match alike.iter().position(|other| other.is(&met)) {
                    Some(known) => alike[known].times += 1,
                    None if alike.len() < MOST_EQUAL => alike.push(met),
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
    // All ops of a plan are measured, and first.
    let others = workloads.thinned(args.per_class).into_iter().filter(|s| !planned.contains_key(&key(s)));
    let others: Vec<ProfiledOp> = others.map(|sample| ProfiledOp::from_memory(sample.clone())).collect();
    let mut samples: Vec<&[ProfiledOp]> = planned.values().map(Vec::as_slice).collect();
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
    file.speed_trace = paces;
    files::write_atomically(&args.output, |out| out.write_all(file.to_json().as_bytes()))?;
    let slowest = file.speed_trace.as_ref().map(SpeedTrace::slowest);
    report(args, count, samples.len(), slowest)
}

/// An op of a program, the memory that holds its operands, and the number of such ops.
struct ProfiledOp {
    sample: Sample,
    reaches: Vec<Reach>,
    times: u32,
}

impl ProfiledOp {
    /// An op without a program: its operands are taken to be in memory.
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
fn ops_of(program: &ParallelGraph, caches: Caches) -> impl Iterator<Item = ProfiledOp> {
    program.devices().flat_map(move |device| {
        let reaches = reaches(program, device, caches);
        program.instructions.iter().zip(reaches).filter_map(move |(instruction, reaches)| {
            Some(ProfiledOp { sample: sample(program, instruction, device)?, reaches, times: 1 })
        })
    })
}

/// The op that a device runs for an instruction, if any.
pub fn sample(program: &ParallelGraph, instruction: &Instruction, device: DeviceId) -> Option<Sample> {
    let op = program.local_op(instruction, device)?;
    let local = |&value| program.value(value).local_type(&program.mesh, device);
    let inputs: Vec<TensorType> = instruction.reads.iter().map(local).collect::<Option<_>>()?;
    let results = op.operator().infer(&inputs).ok()?;
    Some(Sample { workload: op.workload(&inputs, &results), op, inputs })
}

/// One optimizer of each kind, since each has another update op.
fn optimizers() -> [Optimizer; 3] {
    let lr = Real(0.01);
    [Optimizer::Sgd { lr }, Optimizer::Momentum { lr, momentum: Real(0.9) }, Optimizer::adam(lr.0)]
}

fn list(args: &Args, samples: &[&[ProfiledOp]]) -> anyhow::Result<Verdict> {
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
                "slowest core: {:.0}% slower than the mean (see `simulate --uneven`)",
                slowest * 100.0
            )?;
        }
    }
    Ok(Verdict::Done)
}

type Tables<'a> = BTreeMap<(&'static str, &'static str), Vec<&'a [ProfiledOp]>>;

fn by_table<'a>(samples: &[&'a [ProfiledOp]]) -> Tables<'a> {
    let mut tables = Tables::new();
    for alike in samples {
        let workload = &alike[0].sample.workload;
        tables.entry((workload.class.name, workload.dtype.name())).or_default().push(alike);
    }
    tables
}

/// Tables of times, and the speed trace of several cores.
fn measure(args: &Args, samples: &[&[ProfiledOp]], rounds: usize) -> (Vec<TableText>, Option<SpeedTrace>) {
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
    // Coarse to fine, in turn over the tables: a time limit thins all of them equally.
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
    let paces = if args.workers > 1 { SpeedTrace::new(moments).ok() } else { None };
    let tables = by_place.iter().zip(times).filter_map(|(((class, _), samples), times)| {
        let row = |(alike, times): (&&[ProfiledOp], Vec<f64>)| {
            let mut row = alike[0].sample.workload.sizes.to_vec();
            row.push(((median(times) * 1e9).round() as u64).max(1));
            row
        };
        let measured = samples.iter().zip(times).filter(|(_, times)| !times.is_empty());
        let rows: Vec<Vec<u64>> = measured.map(row).collect();
        let dtype = samples[0][0].sample.workload.dtype;
        (!rows.is_empty()).then(|| TableText { class: (*class).into(), dtype, mode: Mode::Usual, rows })
    });
    (tables.collect(), paces)
}

/// The mean time of ops with one workload; their speeds per core are added to `moments`. None if the kernels lack this type or the
/// ops are too large.
fn once(alike: &[ProfiledOp], bench: &mut Bench, moments: &mut Vec<SpeedSample>) -> Option<f64> {
    let (mut sum, mut count) = (0.0, 0);
    for op in alike {
        if op.sample.inputs.iter().map(|t| t.bytes()).sum::<u64>() > LARGEST {
            continue;
        }
        if let Ok(timings) = bench.time(&op.sample.op, &op.operands()) {
            let (own, spent) = (each(&timings, Timings::mean), each(&timings, Timings::total));
            sum += mean(&own) * f64::from(op.times);
            count += op.times;
            moments.extend(SpeedSample::of(&own, mean(&spent)));
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
