//! `machine probe`: measures this machine and writes a machine file for `--machine`.

use crate::{Verdict, files};
use anyhow::ensure;
use serde_json::json;
use shardwright_cost::Comm;
use shardwright_engine::{WorkerGroups, collective_seconds};
use shardwright_machine::{
    Bytes, BytesPerSecond, CollectiveKind, CollectiveMeasurement, Device, FlopsPerSecond, Level, Link,
    Machine, MachineSpec, MeasuredTime, Peaks, Seconds, Tf32Use, Topology,
};
use shardwright_runtime::measure::{WorkerRates, op_overhead, signal_latency, worker_rates};
use std::{fmt::Write as _, io::Write as _, path::PathBuf};

/// Measures this machine.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Measures matrix products, memory and collectives with 1 to N workers at once
    Probe(ProbeArgs),
}

#[derive(clap::Args)]
struct ProbeArgs {
    /// Where to write the machine file (default: standard output)
    #[arg(short, long)]
    output: Option<PathBuf>,
    /// The largest number of workers (default: the number of cores)
    #[arg(long)]
    workers: Option<usize>,
    /// Print the measurements as one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    let Action::Probe(args) = &args.action;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let workers = args.workers.unwrap_or(cores);
    ensure!((1..=1024).contains(&workers), "--workers {workers}: from 1 to 1024");
    files::check_outputs(&args.output)?;
    let rates: Vec<WorkerRates> = steps(workers).map(worker_rates).collect();
    let latency = signal_latency(cores);
    let overhead = op_overhead();
    let memory = total_memory().unwrap_or(4 << 30);
    let copied = machine_of(&rates, latency, overhead, memory)?;
    let collectives = collectives(workers, memory)?;
    let machine = fitted(&copied, &collectives)?;
    let text = format!("{}{}", comment(&rates), machine.to_toml());
    if args.json {
        let rows: Vec<_> = rates.iter().map(row).collect();
        let timed: Vec<_> = collectives.iter().map(Timed::json).collect();
        let all = json!({"workers": rows, "collectives": timed, "signal_seconds": latency, "op_overhead_seconds": overhead,
            "memory_bytes": memory, "machine": machine.spec()});
        print(&format!("{all:#}\n"))?;
    }
    match &args.output {
        Some(path) => files::write_atomically(path, |file| file.write_all(text.as_bytes()))?,
        None if !args.json => print(&text)?,
        None => {}
    }
    Ok(Verdict::Done)
}

fn print(text: &str) -> anyhow::Result<()> {
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

/// This computer's memory in bytes, from Linux.
fn total_memory() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// 1, 2, 4, ... and the requested number.
fn steps(workers: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(1), |n| Some(n * 2)).take_while(move |&n| n < workers).chain([workers])
}

fn row(r: &WorkerRates) -> serde_json::Value {
    json!({"workers": r.workers, "f32_flops_per_second": r.f32_flops, "f64_flops_per_second": r.f64_flops,
        "memory_bytes_per_second": r.memory, "neighbour_bytes_per_second": r.neighbour})
}

fn comment(rates: &[WorkerRates]) -> String {
    let mut text = String::from(
        "# Measured by `shardwright machine probe`; per worker while all of them work:\n\
         # workers  f32 GFLOP/s  f64 GFLOP/s  memory GB/s  from neighbour GB/s\n",
    );
    for r in rates {
        let [f32s, f64s, memory, neighbour] =
            [r.f32_flops, r.f64_flops, r.memory, r.neighbour].map(|x| x * 1e-9);
        let _ =
            writeln!(text, "# {:7}  {f32s:11.1}  {f64s:11.1}  {memory:11.2}  {neighbour:19.2}", r.workers);
    }
    text
}

/// One of the engine's collectives, measured.
struct Timed {
    exchange: CollectiveKind,
    members: usize,
    bytes: u64,
    seconds: f64,
}

impl Timed {
    fn json(&self) -> serde_json::Value {
        let (name, members) = (self.exchange.name(), self.members);
        json!({"collective": name, "members": members, "bytes": self.bytes, "seconds": self.seconds})
    }
}

/// Message sizes in bytes: from latency alone to more than a core's caches hold.
const SIZES: [u64; 5] = [256, 16 << 10, 256 << 10, 2 << 20, 16 << 20];
/// A worker holds less than this many messages while one is timed.
const HELD: u64 = 16;

/// Times the engine's collectives in all equal groups of the workers. A single worker has no collectives. Messages that do not
/// fit into half of the memory are left out.
fn collectives(workers: usize, memory: u64) -> anyhow::Result<Vec<Timed>> {
    let mut found = Vec::new();
    let fits = |bytes: &u64| HELD * bytes * workers as u64 <= memory / 2;
    for members in (2..=workers).filter(|members| workers.is_multiple_of(*members)) {
        for exchange in CollectiveKind::ALL {
            for bytes in SIZES.into_iter().filter(fits) {
                let groups = WorkerGroups { workers, members };
                if let Some(seconds) = collective_seconds(exchange.into(), groups, bytes)? {
                    found.push(Timed { exchange, members, bytes, seconds });
                }
            }
        }
    }
    Ok(found)
}

/// The measurements as tables of a machine file.
fn tables(collectives: &[Timed], level: &str) -> Vec<CollectiveMeasurement> {
    let table = |of_one: &[Timed]| {
        // Times must not fall with the size: a faster larger message is noise.
        let mut least = 0.0_f64;
        let points = of_one.iter().map(|timed| {
            least = least.max(rounded(timed.seconds));
            MeasuredTime { bytes: Bytes(timed.bytes), seconds: Seconds(least) }
        });
        let points = points.collect();
        let (collective, members) = (of_one[0].exchange, of_one[0].members as u32);
        CollectiveMeasurement { level: level.into(), collective, members, points }
    };
    collectives.chunk_by(|a, b| (a.exchange, a.members) == (b.exchange, b.members)).map(table).collect()
}

/// The machine with measured collectives, and a link fitted to them for all others. Large messages give the bandwidth, small ones
/// the latency: the geometric mean over all collectives among all workers.
fn fitted(machine: &Machine, collectives: &[Timed]) -> anyhow::Result<Machine> {
    let mut spec = machine.spec().clone();
    let comm = Comm::new(machine, machine.mesh());
    let predicted = |timed: &Timed| {
        comm.seconds(timed.exchange.into(), machine.mesh().all(), Bytes(timed.bytes)).0.max(f64::MIN_POSITIVE)
    };
    // The mean ratio of measured to predicted time for one message size.
    let slower = |bytes: Option<u64>| {
        let logs: Vec<f64> = collectives
            .iter()
            .filter(|timed| Some(timed.bytes) == bytes && timed.members == machine.devices() as usize)
            .map(|timed| (timed.seconds / predicted(timed)).ln())
            .collect();
        if logs.is_empty() { 1.0 } else { (logs.iter().sum::<f64>() / logs.len() as f64).exp() }
    };
    let sizes = || collectives.iter().map(|timed| timed.bytes);
    let link = &mut spec.levels[0].link;
    link.bandwidth = BytesPerSecond(rounded(link.bandwidth.0 / slower(sizes().max())));
    link.latency = Seconds(rounded(link.latency.0 * slower(sizes().min())));
    spec.measured = tables(collectives, &spec.levels[0].name);
    Machine::new(spec).map_err(|problem| anyhow::anyhow!("{}: {}", problem.key, problem.reason))
}

/// Rounds to four digits, the precision of these measurements.
fn rounded(x: f64) -> f64 {
    format!("{x:.3e}").parse().unwrap_or(x)
}

/// The machine of all workers: the rates of one worker while all of them work.
fn machine_of(rates: &[WorkerRates], latency: f64, overhead: f64, memory: u64) -> anyhow::Result<Machine> {
    let Some(all) = rates.last() else { anyhow::bail!("nothing was measured") };
    let (latency, overhead) = (rounded(latency), rounded(overhead));
    let peak = Peaks {
        f32: Some(FlopsPerSecond(rounded(all.f32_flops))),
        f64: Some(FlopsPerSecond(rounded(all.f64_flops))),
        ..Peaks::default()
    };
    let spec = MachineSpec {
        name: format!("probed-cpu-{}", all.workers),
        description: format!("{} workers on this computer, measured", all.workers),
        levels: vec![Level {
            name: "worker".into(),
            count: all.workers as u32,
            link: Link {
                bandwidth: BytesPerSecond(rounded(all.neighbour)),
                efficiency: 1.0,
                latency: Seconds(latency),
                ports: 1,
                topology: Topology::Memory,
            },
        }],
        device: Device {
            name: "cpu".into(),
            memory: Bytes(memory / all.workers as u64),
            reserve: Bytes::ZERO,
            memory_limit: true,
            memory_bandwidth: BytesPerSecond(rounded(all.memory)),
            launch_overhead: Seconds(overhead),
            cores: 1,
            sustained: None,
            host_launch: None,
            overlap: false,
            tf32: Tf32Use::default(),
            engine: None,
            peak,
        },
        slowdown: std::collections::BTreeMap::new(),
        mixed: vec![],
        measured: vec![],
    };
    Machine::new(spec).map_err(|problem| anyhow::anyhow!("{}: {}", problem.key, problem.reason))
}
