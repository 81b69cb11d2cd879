//! `stages`: solves a bare pipeline problem.

use crate::{Verdict, complain, interrupt};
use anyhow::Context;
use serde::Serialize;
use shardwright_machine::{Bytes, BytesPerSecond};
use shardwright_request::{WallClock, half_of_free, hanging, read, show_bytes, show_seconds};
use shardwright_search::Clock as _;
use shardwright_stages::format::{self, Overrides, Problem};
use shardwright_stages::{Control, Outcome, Progress, StopReason, no_fit};
use std::cell::RefCell;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Solves a pipeline problem: which layers share a stage, on how many devices, with which options. Prints improvements as
/// `# ...` lines, then the stages, first stage first.
#[derive(clap::Args)]
pub struct Args {
    /// The problem: our JSON or Piper's; `-` is standard input
    file: PathBuf,
    /// Number of devices, instead of the file's
    #[arg(long, value_name = "K")]
    devices: Option<u32>,
    /// Memory per device, instead of the file's: `8GiB`, a number of bytes, or `none`
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    memory: Option<f64>,
    /// Micro-batches per batch, instead of the file's. Data-parallel degrees divide it
    #[arg(long, value_name = "N", visible_alias = "batch")]
    micro_batches: Option<u64>,
    /// Bandwidth between stages, instead of the file's: `25GB/s`, or a number of bytes per second
    #[arg(long, value_name = "RATE", value_parser = bandwidth)]
    bandwidth: Option<f64>,
    /// Stop after this many seconds with the best stages so far
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = super::solve::seconds, allow_negative_numbers = true)]
    time: Duration,
    /// One JSON object on standard output, nothing else
    #[arg(long)]
    json: bool,
    /// Print no improvements
    #[arg(short, long)]
    quiet: bool,
}

/// A memory limit that no checked sum reaches.
const NO_LIMIT_BYTES: f64 = 9e29;
/// More bytes from standard input are refused.
const MOST_INPUT_BYTES: u64 = 1 << 30;

fn memory(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        _ if text == "none" => Ok(NO_LIMIT_BYTES),
        Ok(bytes) => Ok(bytes),
        Err(_) => Bytes::parse(text).map(|bytes| bytes.0 as f64),
    }
}

fn bandwidth(text: &str) -> Result<f64, String> {
    text.parse::<f64>().or_else(|_| BytesPerSecond::parse(text).map(|rate| rate.0))
}

/// The JSON answer: the contract of the command.
#[derive(Serialize)]
struct Answer<'a> {
    objective: Option<f64>,
    lower_bound: Option<f64>,
    gap: Option<f64>,
    proved_optimal: bool,
    proved_infeasible: bool,
    seconds: f64,
    devices: u32,
    stop_reason: &'static str,
    stages: Vec<Stage<'a>>,
}

#[derive(Serialize)]
struct Stage<'a> {
    nodes: Vec<&'a str>,
    tensor_parallel: u32,
    data_parallel: u32,
    options: Vec<&'a str>,
    seconds: f64,
    memory_bytes: f64,
    micro_batches_in_flight: u32,
}

/// Reads a file; `-` is standard input.
fn read_bytes(path: &Path) -> anyhow::Result<Vec<u8>> {
    if path != Path::new("-") {
        return read(path);
    }
    let mut bytes = Vec::new();
    io::stdin()
        .lock()
        .take(MOST_INPUT_BYTES + 1)
        .read_to_end(&mut bytes)
        .context("cannot read standard input")?;
    anyhow::ensure!(bytes.len() as u64 <= MOST_INPUT_BYTES, "standard input is larger than 1 GiB");
    Ok(bytes)
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    let clock = WallClock::global();
    let start = clock.now();
    let place = || args.file.display().to_string();
    let bytes = read_bytes(&args.file)?;
    let overrides = Overrides {
        devices: args.devices,
        memory_bytes: args.memory,
        micro_batches: args.micro_batches,
        bandwidth: args.bandwidth,
    };
    let problem = format::read(&bytes, &overrides).with_context(place)?;
    drop(bytes);
    let cancel = interrupt::flag();
    // The time limit counts from the start of the program: reading the file is part of it.
    let deadline = start.checked_add(args.time);
    let stop = || cancel.load(Ordering::Relaxed) || deadline.is_some_and(|deadline| clock.now() >= deadline);
    let failure = RefCell::new(None);
    let tell = |progress: &Progress<'_>| {
        if args.quiet || args.json {
            return;
        }
        let seconds = clock.now().saturating_sub(start).as_secs_f64();
        let best = progress
            .best_seconds
            .map_or("no stages yet".to_string(), |best| format!("best {}", exact_seconds(best)));
        let (bound, source) = (progress.lower_bound_seconds, progress.source);
        if let Err(error) =
            writeln!(io::stdout(), "# {seconds:.2} s: {best}, bound {} ({source})", exact_seconds(bound))
        {
            // The reader has closed the output (`| head`), so the search stops.
            cancel.store(true, Ordering::Relaxed);
            failure.borrow_mut().get_or_insert(error);
        }
    };
    let memory_bytes = usize::try_from(half_of_free()).unwrap_or(usize::MAX);
    let outcome = problem.solve(&Control { stop: &stop, progress: &tell, memory_bytes });
    if let Some(error) = failure.into_inner() {
        return Err(error.into());
    }
    let is_cancelled = cancel.load(Ordering::Relaxed);
    report(args, &problem, &outcome, is_cancelled, clock.now().saturating_sub(start))
}

fn report(
    args: &Args,
    problem: &Problem,
    outcome: &Outcome,
    is_cancelled: bool,
    elapsed: Duration,
) -> anyhow::Result<Verdict> {
    let stop_reason = match outcome.stop_reason {
        StopReason::Optimal => "optimal",
        StopReason::Infeasible => "infeasible",
        StopReason::Stopped if is_cancelled => "interrupted",
        StopReason::Stopped => "time limit",
        StopReason::Exhausted => "search exhausted",
    };
    let finite = |seconds: f64| seconds.is_finite().then_some(seconds);
    let (objective, bound) = (finite(outcome.objective_seconds), finite(outcome.lower_bound_seconds));
    let gap = objective.zip(bound).map(|(objective, bound)| {
        let difference = (objective - bound).max(0.0);
        if difference == 0.0 { 0.0 } else { difference / bound }
    });
    let stages: Vec<Stage<'_>> = outcome
        .stages
        .iter()
        .flatten()
        .map(|stage| Stage {
            nodes: stage.option.layers.iter().map(|&layer| problem.layer_name(layer)).collect(),
            tensor_parallel: stage.shape.tensor,
            data_parallel: stage.shape.replicas,
            options: problem.option_names(stage),
            seconds: stage.option.seconds,
            memory_bytes: stage.option.memory_bytes,
            micro_batches_in_flight: stage.in_flight,
        })
        .collect();
    let answer = Answer {
        objective,
        lower_bound: bound,
        gap: gap.and_then(finite),
        proved_optimal: outcome.proved_optimal(),
        proved_infeasible: outcome.stop_reason == StopReason::Infeasible,
        seconds: elapsed.as_secs_f64(),
        devices: stages.iter().map(|stage| stage.tensor_parallel * stage.data_parallel).sum(),
        stop_reason,
        stages,
    };
    let mut out = io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&answer)?)?;
    } else if !answer.stages.is_empty() {
        print(&mut out, args, problem, &answer)?;
    }
    if outcome.stages.is_some() {
        return Ok(Verdict::Done);
    }
    if outcome.stop_reason == StopReason::Infeasible {
        complain(&format!("infeasible: no stages fit (proved): {}", no_fit(problem)));
        return Ok(Verdict::CannotBeMet);
    }
    complain(&format!("no stages found ({stop_reason}); a longer --time may find some"));
    Ok(Verdict::NotFound)
}

fn print(out: &mut dyn Write, args: &Args, problem: &Problem, answer: &Answer<'_>) -> io::Result<()> {
    if !args.quiet {
        let proof = match answer.gap {
            _ if answer.proved_optimal => "proved optimal".to_string(),
            Some(gap) => format!("gap {:.4}%", gap * 100.0),
            None => "no bound".to_string(),
        };
        writeln!(out, "# {}: {proof}; {:.3} s", answer.stop_reason, answer.seconds)?;
    }
    writeln!(
        out,
        "objective {}, {} {} on {} of {} devices",
        exact_seconds(answer.objective.unwrap_or(f64::INFINITY)),
        answer.stages.len(),
        if answer.stages.len() == 1 { "stage" } else { "stages" },
        answer.devices,
        problem.devices()
    )?;
    for (index, stage) in answer.stages.iter().enumerate() {
        let (first, last) = (stage.nodes.first().unwrap_or(&""), stage.nodes.last().unwrap_or(&""));
        let layers = stage.nodes.len();
        let plural = if layers == 1 { "layer" } else { "layers" };
        let facts = format!(
            "{layers} {plural} ({}) on {} × {} devices, {}, {}, {} in flight, {}",
            if layers == 1 { (*first).to_string() } else { format!("{first} to {last}") },
            stage.tensor_parallel,
            stage.data_parallel,
            show_seconds(stage.seconds),
            show_bytes(stage.memory_bytes as u64),
            stage.micro_batches_in_flight,
            counted(&stage.options),
        );
        writeln!(out, "{}", hanging(&format!("{:>3}  ", index + 1), &facts))?;
    }
    Ok(())
}

/// Seconds with ten digits, by which answers are compared with those of other programs.
fn exact_seconds(seconds: f64) -> String {
    if !(1e-6..1e9).contains(&seconds) {
        return format!("{seconds:.9e} s");
    }
    let before = seconds.log10().floor() as i32 + 1;
    format!("{seconds:.digits$} s", digits = (10 - before).clamp(0, 15) as usize)
}

/// How often each option is chosen, in the order of first appearance.
fn counted(options: &[&str]) -> String {
    let mut counts: Vec<(&str, usize)> = Vec::new();
    for option in options {
        if let Some((_, count)) = counts.iter_mut().find(|(known, _)| known == option) {
            *count += 1;
        } else if counts.len() < 8 {
            counts.push((option, 1));
        }
    }
    let texts: Vec<String> = counts.into_iter().map(|(option, count)| format!("{option} ×{count}")).collect();
    texts.join(", ")
}
