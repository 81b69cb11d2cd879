//! `run`: trains a plan for some steps on this machine's cores, checks it against the serial program, and measures.

use crate::commands::plan;
use crate::files::write_atomically;
use crate::planning::{PlanningArgs, Request, read, show_bytes, show_seconds};
use crate::processes;
use crate::record;
use crate::trace;
use crate::weights::{Origin, Weights};
use crate::{Verdict, complain, interrupt};
use anyhow::{Context, bail, ensure};
use serde_json::json;
use shardwright_cost::Relayouts;
use shardwright_engine::{Check, Difference, Guide, Options, Outcome, median_after_first};
use shardwright_graph::Graph;
use shardwright_lower::{Instruction, InstructionId, ParallelGraph, Work, lower};
use shardwright_place::Planned;
use shardwright_plan::Plan;
use shardwright_sim::{Classes, Links, Schedule};
use shardwright_space::{Config, OpShapes, place};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Trains for some steps on this machine, checks the result against the serial program, measures.
///
/// Takes a plan that `plan -o` wrote, or a model with `plan`'s options. One thread per device, whatever the machine;
/// predictions mean something for machines of this computer: `cpu:N`, or a file of `machine probe`.
#[derive(clap::Args)]
#[command(mut_arg("machine", |arg| arg.default_value("cpu:2")))]
#[command(mut_arg("model", |arg| arg.value_name("PLAN|MODEL").help("A plan (.json), or a model as `plan` takes it")))]
pub struct Args {
    #[command(flatten)]
    planning: PlanningArgs,
    /// Which strategy plans a model: see `plan`
    #[arg(long, default_value = "auto")]
    solver: String,
    /// How many training steps
    #[arg(long, default_value_t = 5)]
    steps: usize,
    /// Spread the devices over so many processes, which talk through sockets
    #[arg(long, default_value_t = 1)]
    processes: u32,
    /// This is one of the processes; where they meet is the next argument
    #[arg(long, hide = true, requires = "meeting")]
    worker: Option<u32>,
    #[arg(long, hide = true)]
    meeting: Option<PathBuf>,
    /// Let a device take so many times as long to compute as it could, `2:1.5` for device 2; may be repeated
    #[arg(long, value_name = "DEVICE:FACTOR", value_parser = slow)]
    slow: Vec<(u32, f64)>,
    /// Scheduling assistants: devices that are late hand over ready work to others
    #[arg(long, conflicts_with = "processes")]
    assist: bool,
    /// Do not run the serial program for comparison
    #[arg(long)]
    no_verify: bool,
    /// Write when every device did what, for Perfetto (ui.perfetto.dev)
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Write how long ops took, as a cost file to plan anew with: `plan --refine FILE`
    #[arg(long, value_name = "FILE", conflicts_with = "processes")]
    record: Option<PathBuf>,
    /// One JSON object on standard output, nothing else
    #[arg(long)]
    json: bool,
    /// Only the verdict
    #[arg(short, long)]
    quiet: bool,
}

/// A plan, opened: everything that is needed to run it.
pub struct Opened {
    /// The model and the machine.
    pub request: Request,
    /// The plan.
    pub plan: Plan,
    /// The config of every op.
    pub configs: Vec<Config>,
    /// What the devices do.
    pub program: ParallelGraph,
}

impl Opened {
    /// Opens a plan file, or plans a model.
    fn new(planning: &PlanningArgs, solver: &str) -> anyhow::Result<Self> {
        match read_plan(&planning.model)? {
            None => {
                let made = plan::make(planning, solver)?;
                Self::lowered(made.request, made.plan)
            }
            Some(plan) => Self::of_plan(planning, plan),
        }
    }

    /// Opens a plan with the model and the machine that it was made for; other arguments as given.
    pub fn of_plan(planning: &PlanningArgs, plan: Plan) -> anyhow::Result<Self> {
        Self::lowered(reopen(planning, &plan)?, plan)
    }

    fn lowered(request: Request, plan: Plan) -> anyhow::Result<Self> {
        let mesh = plan.mesh(&request.machine)?;
        let configs = plan.configs(&request.graph, &mesh)?;
        let program = lower(&request.graph, &Relayouts::new(&request.machine, &mesh), &configs)?;
        Ok(Self { request, plan, configs, program })
    }
}

impl Opened {
    /// The tasks of the plan as the simulator sees them, with the times that the cost model predicts.
    pub fn schedule(&self, classes: Classes, links: Links) -> anyhow::Result<Schedule> {
        let (graph, mesh) = (&self.request.graph, &self.program.mesh);
        let shapes: Vec<OpShapes> = graph.op_ids().map(|op| OpShapes::of(graph, op)).collect();
        let device = self.request.machine.slowest();
        let times = self.request.times(&device, &shapes, mesh)?;
        // Sums of partial results are run otherwise than planned.
        let run_as = place(graph, &shapes, &self.configs, mesh).configs;
        Ok(Schedule::new(&self.program, classes, links, |op| times.compute(op, &run_as[op.index()]))?)
    }

    /// When the plan has devices do what, for scheduling assistants.
    fn guide(&self) -> anyhow::Result<Guide> {
        let schedule = self.schedule(Classes::each(&self.program.mesh), Links::Fifo)?;
        let line = schedule.simulate();
        let planned = |device: u32, at: usize| {
            let task = schedule.task(InstructionId(at as u32), device)? as usize;
            // From picoseconds to nanoseconds.
            Some(Planned { start: line.start[task] / 1000, duration: schedule.tasks.duration(task) / 1000 })
        };
        let instructions = 0..self.program.instructions.len();
        let of_device = |device: u32| instructions.clone().map(|at| planned(device, at)).collect();
        Ok(Guide((0..self.plan.devices).map(of_device).collect()))
    }
}

/// Refuses a slow device that the plan does not have.
pub fn check_slow(slow: &[(u32, f64)], plan: &Plan) -> anyhow::Result<()> {
    match slow.iter().find(|(device, _)| *device >= plan.devices) {
        Some((device, _)) => {
            bail!("there is no device {device}: the plan is for {} devices, counted from 0", plan.devices)
        }
        None => Ok(()),
    }
}

/// A device and how much slower it is.
pub fn slow(text: &str) -> Result<(u32, f64), String> {
    let known = text.split_once(':').and_then(|(device, factor)| {
        Some((device.parse().ok()?, factor.parse::<f64>().ok().filter(|f| (0.01..=1000.0).contains(f))?))
    });
    known.ok_or_else(|| format!("{text} is not a device and how much slower it is, as in 2:1.5"))
}

/// Opens the model and the machine that a plan was made for; other arguments as given.
pub fn reopen(planning: &PlanningArgs, plan: &Plan) -> anyhow::Result<Request> {
    let asked = plan.request.clone().with_context(|| {
        format!("{}: the plan does not say how its model was asked for; plan again", planning.model)
    })?;
    planning.for_request(asked)?.open()
}

/// Reads a plan; none where the name is a model's.
pub fn read_plan(name: &str) -> anyhow::Result<Option<Plan>> {
    #[derive(serde::Deserialize)]
    struct Mark {
        #[serde(rename = "machine_fingerprint")]
        _mark: String,
    }
    let path = Path::new(name);
    if !path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json")) {
        return Ok(None);
    }
    let bytes = read(path)?;
    if serde_json::from_slice::<Mark>(&bytes).is_err() {
        return Ok(None);
    }
    Plan::from_json(&bytes).map(Some).map_err(|reason| anyhow::anyhow!("{name}: {reason}"))
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    ensure!((1..=1_000_000).contains(&args.steps), "--steps {}: from 1 to 1000000", args.steps);
    let opened = match Opened::new(&args.planning, &args.solver) {
        Err(error) if plan::cannot_be_met(&error) => {
            complain(&error);
            return Ok(Verdict::CannotBeMet);
        }
        opened => opened?,
    };
    let (graph, program) = (&opened.request.graph, &opened.program);
    let devices = opened.plan.devices;
    ensure!(
        (1..=devices).contains(&args.processes),
        "--processes {}: from 1 to the number of devices, {devices}",
        args.processes
    );
    check_slow(&args.slow, &opened.plan)?;
    if let Some((device, factor)) = args.slow.iter().find(|(_, factor)| *factor < 1.0) {
        bail!("--slow {device}:{factor}: a device can be made slower than it is, not faster");
    }
    let guide = if args.assist { Some(opened.guide()?) } else { None };
    interrupt::nobody_searches();
    let weights = Weights::of(&opened.request)?;
    let options = Options {
        given: &weights.given,
        seed: args.planning.seed,
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
        Outcome::of(program, processes::start(&opened.plan, options, args.processes)?)
    } else {
        shardwright_engine::run(graph, program, options)?
    };
    if let Some(path) = &args.trace {
        write_atomically(path, |out| trace::write(out, &opened, &outcome))?;
    }
    if let Some(path) = &args.record {
        let costs = record::costs(&opened, &outcome)?;
        write_atomically(path, |out| out.write_all(costs.to_json().as_bytes()))?;
    }
    let check = if args.no_verify { None } else { Some(Verified::new(graph, &outcome, options)?) };
    let (origin, assisted) = (weights.origin, args.assist);
    let summary = Summary { opened: &opened, outcome: &outcome, check: check.as_ref(), origin, assisted };
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
                "op times written to {path}: `plan {} --refine {path}` plans with them",
                opened.plan.model
            )?;
        }
    }
    match check {
        Some(Verified { difference, .. }) if !difference.is_rounding() => {
            complain(&format_args!(
                "the run differs from the serial program by {:.1e} in {}, where rounding explains {:.0e}",
                difference.error, difference.worst, difference.tolerance
            ));
            Ok(Verdict::CannotBeMet)
        }
        _ => Ok(Verdict::Done),
    }
}

/// The serial run, and how the parallel one compares.
struct Verified {
    serial_step_seconds: f64,
    difference: Difference,
}

impl Verified {
    fn new(graph: &Graph, outcome: &Outcome, options: Options<'_>) -> anyhow::Result<Self> {
        let check = Check::new(graph, options).context("the serial program")?;
        let difference = check.compare(outcome).context("the serial program")?;
        Ok(Self { serial_step_seconds: median_after_first(check.step_seconds()), difference })
    }
}

struct Summary<'a> {
    opened: &'a Opened,
    outcome: &'a Outcome,
    check: Option<&'a Verified>,
    origin: Origin,
    /// Whether devices could hand over work.
    assisted: bool,
}

impl Summary<'_> {
    fn measured(&self) -> f64 {
        self.outcome.median_step_seconds()
    }

    /// The simulated step, or longer: the simulator lets devices compute while data moves, where a device of this engine is
    /// one core that does one after the other.
    fn predicted(&self) -> f64 {
        let Opened { plan, program, .. } = self.opened;
        let moving = |device| {
            let takes_part = |instruction: &&Instruction| {
                let values = instruction.reads.iter().chain(&instruction.writes);
                values.into_iter().any(|&v| program.value(v).is_on(&program.mesh, device))
            };
            let seconds = |instruction: &Instruction| match instruction.work {
                Work::Relayout(step) => step.seconds.0,
                Work::Window { seconds, .. } => seconds.0,
                Work::Compute { .. } => 0.0,
            };
            program.instructions.iter().filter(takes_part).map(seconds).sum::<f64>()
        };
        let moving = program.devices().map(moving).fold(0.0, f64::max);
        plan.simulated.step_seconds.max(plan.simulated.compute_seconds + moving)
    }

    /// How far the prediction is from the measurement, relative to the measurement.
    fn prediction_error(&self) -> f64 {
        (self.predicted() - self.measured()) / self.measured().max(f64::MIN_POSITIVE)
    }

    /// Tasks of other devices that devices ran, per step.
    fn moved(&self) -> f64 {
        let counted = self.outcome.step_seconds.len().saturating_sub(1).max(1);
        self.outcome.devices.iter().map(|d| d.helped).sum::<u64>() as f64 / counted as f64
    }

    fn json(&self) -> serde_json::Value {
        let (plan, outcome, check) = (&self.opened.plan, self.outcome, self.check);
        // Times of the steps after the first, on average.
        let counted = outcome.step_seconds.len().saturating_sub(1).max(1) as f64;
        let devices: Vec<_> = outcome
            .devices
            .iter()
            .map(|d| {
                json!({"device": d.device, "busy_seconds": d.spent.computing.as_secs_f64() / counted,
                    "communication_seconds": d.spent.communicating.as_secs_f64() / counted,
                    "idle_seconds": d.spent.waiting.as_secs_f64() / counted,
                    "memory_bytes": d.memory})
            })
            .collect();
        json!({
            "model": plan.model, "machine": plan.machine, "solver": plan.solver, "devices": plan.devices,
            "steps": outcome.step_seconds.len(),
            "max_relative_error": check.map(|c| c.difference.max_relative_error),
            "tolerance": check.map(|c| c.difference.tolerance),
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
        let (plan, outcome) = (&self.opened.plan, self.outcome);
        writeln!(out, "{} on {} ({} devices), {}", plan.model, plan.machine, plan.devices, plan.solver)?;
        if !quiet {
            let counted = outcome.step_seconds.len().saturating_sub(1).max(1) as u32;
            writeln!(
                out,
                "\n{:>6} {:>12} {:>14} {:>12} {:>12}",
                "device", "computing", "communicating", "waiting", "memory"
            )?;
            for d in &outcome.devices {
                let times = [d.spent.computing, d.spent.communicating, d.spent.waiting];
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
            if self.opened.request.stored.is_some() {
                writeln!(out, "{from_file} weights from the model's file, {seeded} seeded")?;
            }
        }
        writeln!(
            out,
            "measured {} per step, predicted {} ({:+.0}%)",
            show_seconds(self.measured()),
            show_seconds(self.predicted()),
            self.prediction_error() * 100.0
        )?;
        if self.assisted {
            writeln!(out, "{:.1} tasks per step were run by another device than planned", self.moved())?;
        }
        let Some(check) = self.check else {
            return writeln!(out, "not compared with the serial program (--no-verify)");
        };
        let difference = &check.difference;
        let ratio = check.serial_step_seconds / self.measured().max(f64::MIN_POSITIVE);
        writeln!(
            out,
            "the serial program takes {} per step, {ratio:.2} times as long; largest relative difference {:.1e} ({}, of \
             {:.0e} that rounding explains), {} of {} losses the same to the bit",
            show_seconds(check.serial_step_seconds),
            difference.error,
            difference.worst,
            difference.tolerance,
            difference.bitwise_steps,
            outcome.losses.len()
        )
    }
}
