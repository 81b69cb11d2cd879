//! `run`: runs training steps of a plan on this computer's cores, compares them with the serial program, and measures.

use crate::commands::plan;
use crate::files::{check_outputs, write_atomically};
use crate::lowered_plan::LoweredPlan;
use crate::processes;
use crate::record;
use crate::trace;
use crate::weights::{Origin, Weights};
use crate::{Verdict, complain, interrupt};
use anyhow::{Context, bail, ensure};
use serde_json::json;
use shardwright_engine::{
    Check, Difference, Options, Outcome, held_bytes, median_after_first, predicted_step_seconds, serial_bytes,
};
use shardwright_graph::Graph;
use shardwright_lower::ParallelGraph;
use shardwright_plan::Plan;
use shardwright_request::{Request, free_memory, open_machine, show_bytes, show_seconds};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::atomic::Ordering;

/// Runs training steps on this computer, compares them with the serial program, and measures.
///
/// Takes a plan that `plan -o` wrote, or a model with `plan`'s options. Every device is a thread. Predicted times are
/// meaningful for machines of this computer only: `cpu:N`, or a file of `machine probe`.
#[derive(clap::Args)]
#[command(mut_arg("machine", |arg| arg.default_value("cpu:2")))]
#[command(mut_arg("model", |arg| arg.value_name("PLAN|MODEL").help("A plan (.json), or a model as `plan` takes it")))]
pub struct Args {
    #[command(flatten)]
    request: Request,
    /// Strategy that plans a model: see `plan`
    #[arg(long, default_value = "auto")]
    solver: String,
    /// Number of training steps
    #[arg(long, default_value_t = 5)]
    steps: usize,
    /// Spread the devices over this many processes, which communicate through sockets
    #[arg(long, default_value_t = 1)]
    processes: u32,
    /// The number of this process among the processes; `--meeting` is their folder
    #[arg(long, hide = true, requires = "meeting")]
    worker: Option<u32>,
    #[arg(long, hide = true)]
    meeting: Option<PathBuf>,
    /// Slow a device down: `2:1.5` makes device 2 compute 1.5 times as long; may be repeated
    #[arg(long, value_name = "DEVICE:FACTOR", value_parser = slow)]
    slow: Vec<(u32, f64)>,
    /// Work stealing: idle devices run ready work of late devices
    #[arg(long, conflicts_with = "processes")]
    assist: bool,
    /// Do not compare with the serial program
    #[arg(long)]
    no_verify: bool,
    /// Write the measured timeline of all devices to this file, for Perfetto (ui.perfetto.dev)
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Write the measured op times to this cost file, for `plan --refine FILE`
    #[arg(long, value_name = "FILE", conflicts_with = "processes")]
    record: Option<PathBuf>,
    /// One JSON object on standard output, nothing else
    #[arg(long)]
    json: bool,
    /// Print only the verdict
    #[arg(short, long)]
    quiet: bool,
}

/// Refuses a slow device that the plan does not have.
pub fn check_slow(slow: &[(u32, f64)], plan: &Plan) -> anyhow::Result<()> {
    match slow.iter().find(|(device, _)| *device >= plan.devices) {
        Some((device, _)) => {
            bail!("there is no device {device}: the plan has {} devices, numbered from 0", plan.devices)
        }
        None => Ok(()),
    }
}

/// Parses a device and its slowdown.
pub fn slow(text: &str) -> Result<(u32, f64), String> {
    let known = text.split_once(':').and_then(|(device, factor)| {
        Some((device.parse().ok()?, factor.parse::<f64>().ok().filter(|f| (0.01..=1000.0).contains(f))?))
    });
    known.ok_or_else(|| format!("{text} is not DEVICE:FACTOR, such as 2:1.5"))
}

/// Opens a plan file, or plans a model.
fn open(args: &Args) -> anyhow::Result<LoweredPlan> {
    let request = &args.request;
    let Some(lowered) = LoweredPlan::of_file(request)? else {
        // A plan takes a while: this is said before.
        args.note_cores(open_machine(&request.machine)?.devices());
        interrupt::work_follows();
        let made = plan::make(request, &args.solver)?;
        interrupt::searches_are_over();
        if interrupt::flag().load(Ordering::Relaxed) {
            complain(&"note: the search was stopped: its best plan runs now; Ctrl-C ends the run");
        }
        return LoweredPlan::new(made.opened);
    };
    args.note_cores(lowered.plan().devices);
    Ok(lowered)
}

impl Args {
    /// Says that times are no measure of a plan, where devices share cores.
    fn note_cores(&self, devices: u32) {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        if devices as usize > cores && self.worker.is_none() && !self.json {
            complain(&format_args!(
                "note: {devices} devices share {cores} cores: results are checked, but times say nothing about the plan"
            ));
        }
    }
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    ensure!((1..=1_000_000).contains(&args.steps), "--steps {}: from 1 to 1000000", args.steps);
    check_outputs(args.trace.iter().chain(&args.record))?;
    let lowered = match open(args) {
        Err(error) => return plan::without_plan(error),
        Ok(lowered) => lowered,
    };
    let (graph, program) = (&lowered.opened.inputs.graph, &lowered.program);
    let devices = lowered.plan().devices;
    ensure!(
        (1..=devices).contains(&args.processes),
        "--processes {}: from 1 to the number of devices, {devices}",
        args.processes
    );
    check_slow(&args.slow, lowered.plan())?;
    if let Some((device, factor)) = args.slow.iter().find(|(_, factor)| *factor < 1.0) {
        bail!("--slow {device}:{factor}: the factor must be at least 1");
    }
    let guide = if args.assist { Some(lowered.planned_schedule()?) } else { None };
    if let Some(reason) = lack_of_memory(graph, program, !args.no_verify) {
        complain(&reason);
        return Ok(Verdict::CannotBeMet);
    }
    let weights = Weights::of(&lowered.opened.inputs)?;
    let options = Options {
        given: &weights.given,
        seed: args.request.seed,
        steps: args.steps,
        trace: args.trace.is_some() || args.record.is_some(),
        finals: !args.no_verify,
        slow: &args.slow,
        assist: guide.as_ref(),
    };
    if let (Some(worker), Some(meeting)) = (args.worker, &args.meeting) {
        return processes::work(graph, program, options, args.processes, worker, meeting);
    }
    let outcome = if args.processes > 1 {
        Outcome::of(program, processes::start(lowered.plan(), options, args.processes)?)
    } else {
        shardwright_engine::run(graph, program, options)?
    };
    if let Some(path) = &args.trace {
        write_atomically(path, |out| trace::write(out, &lowered, &outcome))?;
    }
    if let Some(path) = &args.record {
        let costs = record::costs(&lowered, &outcome)?;
        write_atomically(path, |out| out.write_all(costs.to_json().as_bytes()))?;
    }
    let check = if args.no_verify { None } else { Some(SerialComparison::new(graph, &outcome, options)?) };
    let (origin, assisted) = (weights.origin, args.assist);
    let summary = Summary { lowered: &lowered, outcome: &outcome, check: check.as_ref(), origin, assisted };
    let mut out = io::stdout().lock();
    if args.json {
        writeln!(out, "{:#}", summary.json())?;
    } else {
        summary.print(&mut out, args.quiet)?;
        if let Some(path) = &args.trace {
            writeln!(out, "trace written to {}: open it at ui.perfetto.dev", path.display())?;
        }
        if let Some(path) = &args.record {
            let path = path.display();
            writeln!(
                out,
                "op times written to {path}; plan with them: `plan {} --refine {path}`",
                lowered.plan().model
            )?;
        }
    }
    match check {
        Some(SerialComparison { difference, .. }) if !difference.is_rounding() => {
            match &difference.misplaced {
                Some(tensor) => complain(&format_args!(
                    "the run has NaN or infinity in {tensor} where the serial program has other numbers, or the other way \
                     round"
                )),
                None => complain(&format_args!(
                    "the run differs from the serial program by {:.1e} in {}; rounding explains {:.0e}",
                    difference.error, difference.worst, difference.tolerance
                )),
            }
            Ok(Verdict::CannotBeMet)
        }
        _ => Ok(Verdict::Done),
    }
}

/// The stack of a device's thread.
const STACK_BYTES: u64 = 2 << 20;

/// Why a run does not fit this computer's free memory; none where it does, or where the free memory is unknown.
fn lack_of_memory(graph: &Graph, program: &ParallelGraph, verify: bool) -> Option<String> {
    let parallel = held_bytes(graph, program);
    // The weights of the parallel run are kept for the comparison.
    let weights = graph.carries.iter().map(|carry| graph.tensor(carry.old).ty.bytes());
    let serial = weights.fold(serial_bytes(graph), u64::saturating_add);
    // Kernels need workspaces, messages buffers, and threads stacks.
    let stacks = program.devices().count() as u64 * STACK_BYTES;
    let with_workspaces = |bytes: u64| bytes.saturating_add(bytes / 8).saturating_add(stacks);
    let needed = with_workspaces(if verify { parallel.max(serial) } else { parallel });
    let free = free_memory().filter(|&free| needed > free)?;
    let remedy = match with_workspaces(parallel) <= free {
        true => "the comparison with the serial program does not fit: --no-verify leaves it out",
        false => "run a smaller model or batch, or fewer devices",
    };
    Some(format!(
        "the run needs {} of memory, and {} are free; {remedy}",
        show_bytes(needed),
        show_bytes(free)
    ))
}

/// The serial run, and how the parallel one compares.
struct SerialComparison {
    serial_step_seconds: f64,
    difference: Difference,
}

impl SerialComparison {
    fn new(graph: &Graph, outcome: &Outcome, options: Options<'_>) -> anyhow::Result<Self> {
        let check = Check::new(graph, options).context("the serial program")?;
        let difference = check.compare(outcome).context("the serial program")?;
        Ok(Self { serial_step_seconds: median_after_first(check.step_seconds()), difference })
    }
}

struct Summary<'a> {
    lowered: &'a LoweredPlan,
    outcome: &'a Outcome,
    check: Option<&'a SerialComparison>,
    origin: Origin,
    /// Whether devices could steal work.
    assisted: bool,
}

impl Summary<'_> {
    fn measured(&self) -> f64 {
        self.outcome.median_step_seconds()
    }

    /// Predicted seconds of a step of the engine.
    fn predicted(&self) -> f64 {
        let (simulated, program) = (&self.lowered.plan().simulated, &self.lowered.program);
        predicted_step_seconds(program, simulated.step_seconds, simulated.compute_seconds)
    }

    /// How far the prediction is from the measurement, relative to the measurement.
    fn prediction_error(&self) -> f64 {
        (self.predicted() - self.measured()) / self.measured().max(f64::MIN_POSITIVE)
    }

    /// Tasks of other devices that devices ran, per step.
    fn moved(&self) -> f64 {
        let counted = self.outcome.step_seconds.len().saturating_sub(1).max(1);
        self.outcome.devices.iter().map(|d| d.stolen).sum::<u64>() as f64 / counted as f64
    }

    fn json(&self) -> serde_json::Value {
        let (plan, outcome, check) = (self.lowered.plan(), self.outcome, self.check);
        // Times of the steps after the first, on average.
        let counted = outcome.step_seconds.len().saturating_sub(1).max(1) as f64;
        let devices: Vec<_> = outcome
            .devices
            .iter()
            .map(|d| {
                json!({"device": d.device, "busy_seconds": d.times.computing.as_secs_f64() / counted,
                    "communication_seconds": d.times.communicating.as_secs_f64() / counted,
                    "idle_seconds": d.times.waiting.as_secs_f64() / counted,
                    "memory_bytes": d.memory})
            })
            .collect();
        json!({
            "model": plan.model, "machine": plan.machine, "solver": plan.solver, "devices": plan.devices,
            "steps": outcome.step_seconds.len(),
            "max_relative_error": check.map(|c| c.difference.error),
            "tolerance": check.map(|c| c.difference.tolerance),
            "compared_tensor": check.map(|c| &c.difference.worst),
            "agrees": check.map(|c| c.difference.is_rounding()),
            "warnings": check.map_or(&[][..], |c| &c.difference.weaknesses),
            "bitwise_steps": check.map(|c| c.difference.bitwise_steps),
            "measured_step_seconds": self.measured(),
            "predicted_step_seconds": self.predicted(),
            "simulated_step_seconds": plan.simulated.step_seconds,
            "prediction_error": self.prediction_error(),
            "serial_step_seconds": check.map(|c| c.serial_step_seconds),
            "loss": outcome.losses,
            "weights": self.origin,
            "step_seconds": outcome.step_seconds,
            "device_times": devices,
            "moved_tasks_per_step": self.assisted.then(|| self.moved()),
        })
    }

    fn print(&self, out: &mut impl Write, quiet: bool) -> io::Result<()> {
        let (plan, outcome) = (self.lowered.plan(), self.outcome);
        writeln!(out, "{} on {} ({} devices), {}", plan.model, plan.machine, plan.devices, plan.solver)?;
        if !quiet {
            let counted = outcome.step_seconds.len().saturating_sub(1).max(1) as u32;
            writeln!(
                out,
                "\n{:>6} {:>12} {:>14} {:>12} {:>12}",
                "device", "computing", "communicating", "waiting", "memory"
            )?;
            for d in &outcome.devices {
                let times = [d.times.computing, d.times.communicating, d.times.waiting];
                let [computing, communicating, waiting] =
                    times.map(|t| show_seconds((t / counted).as_secs_f64()));
                let memory = show_bytes(d.memory);
                writeln!(
                    out,
                    "{:>6} {computing:>12} {communicating:>14} {waiting:>12} {memory:>12}",
                    d.device
                )?;
            }
            let losses: Vec<String> = outcome.losses.iter().take(10).map(|l| format!("{l:.6}")).collect();
            writeln!(out, "\nloss {}", losses.join(" "))?;
            let Origin { from_file, seeded } = self.origin;
            if self.lowered.opened.inputs.stored.is_some() {
                writeln!(out, "{from_file} weights from the model's file, {seeded} seeded")?;
            }
        }
        writeln!(
            out,
            "measured   {} per step\npredicted  {} per step ({:+.0}%)",
            show_seconds(self.measured()),
            show_seconds(self.predicted()),
            self.prediction_error() * 100.0
        )?;
        if self.assisted {
            writeln!(out, "stolen     {:.1} tasks per step", self.moved())?;
        }
        let Some(check) = self.check else {
            return writeln!(out, "serial     not compared (--no-verify)");
        };
        let difference = &check.difference;
        let ratio = check.serial_step_seconds / self.measured().max(f64::MIN_POSITIVE);
        writeln!(
            out,
            "serial     {} per step, {ratio:.2} times the measured step\n\
             difference {:.1e} at most ({}); rounding explains {:.0e}\n\
             losses     {} of {} equal to the bit",
            show_seconds(check.serial_step_seconds),
            difference.error,
            difference.worst,
            difference.tolerance,
            difference.bitwise_steps,
            outcome.losses.len()
        )?;
        difference.weaknesses.iter().try_for_each(|weakness| writeln!(out, "note       {weakness}"))
    }
}
