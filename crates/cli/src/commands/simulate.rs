//! `simulate`: a plan's step, task by task: how long it takes, where the time goes, what devices hold.

use crate::Verdict;
use crate::commands::run::{check_slow, slow};
use crate::files::{check_outputs, write_atomically};
use crate::lowered_plan::LoweredPlan;
use anyhow::{Context as _, ensure};
use serde::Serialize;
use shardwright_graph::OpId;
use shardwright_lower::{LowerOptions, Work, lower_with};
use shardwright_machine::Bytes;
use shardwright_request::{OpenedPlan, hanging, parse_seconds, shortened, show_bytes, show_seconds};
use shardwright_sim::{
    AssistOutcome, Classes, Delta, Links, Memory, Reality, Schedule, StealRule, Timeline, Trace, Usage,
    assist, bubble, pass_spans, schedule_per_device, simulate_priced, usages,
};
use shardwright_space::{Assignment, Sharing, assign_layouts};
use shardwright_strategies::{StrategyError, migrate, recipes::DATA, slowdowns};
use shardwright_suggest::unknown;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Simulates a plan's training step: timeline, utilisation and memory.
#[derive(clap::Args)]
pub struct Args {
    /// A plan that `plan -o` wrote
    plan: String,
    /// Write the timeline to this file, for Perfetto or chrome://tracing
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Lengthen or shorten every task on every device at random, by up to this share: 0.2 for a fifth
    #[arg(long, value_name = "SHARE", value_parser = share)]
    perturb: Option<f64>,
    /// Slow a device down: `2:1.5` makes device 2 compute 1.5 times as long; may be repeated
    #[arg(long, value_name = "DEVICE:FACTOR", value_parser = slow)]
    slow: Vec<(u32, f64)>,
    /// Give devices the measured speed trace of the plan's costs (`profile --workers`). The median of 15 simulated steps is
    /// shown
    #[arg(long, conflicts_with_all = ["delta", "assist"])]
    uneven: bool,
    /// Work stealing within steps, and migration of layers between steps
    #[arg(long, conflicts_with_all = ["delta", "links"])]
    assist: bool,
    /// For --assist: seconds per decision
    #[arg(long, value_name = "SECONDS", default_value = "2e-6", value_parser = parse_seconds)]
    assist_latency: Duration,
    /// For --assist: at most this many waiting tasks of a device can be stolen
    #[arg(long, value_name = "N", default_value_t = 8)]
    assist_window: usize,
    /// For --assist: steal only tasks whose operands both devices hold
    #[arg(long)]
    assist_resident: bool,
    /// For --assist: at most this many trial steps for migrating layers off slow devices
    #[arg(long, alias = "assist-homes", value_name = "STEPS", default_value_t = 100)]
    assist_migrations: usize,
    /// Skip delta simulation
    #[arg(long, conflicts_with = "delta")]
    full: bool,
    /// Also simulate the step by delta simulation, and compare both to the bit. Small all-reduces are not joined
    #[arg(long, conflicts_with_all = ["perturb", "links"])]
    delta: bool,
    /// Transfers on one link: one after the other (fifo), with shared bandwidth (shared), or in turn with the device's
    /// computing, for devices of one core (core). The machine sets the default
    #[arg(long, value_parser = links)]
    links: Option<Links>,
    /// Turn overlap off: tasks run one after the other, and layers share no transfers. The step equals the plan's objective
    #[arg(long, conflicts_with_all = ["delta", "links", "perturb", "slow", "uneven", "assist"])]
    no_overlap: bool,
    /// Seed of --perturb and --uneven
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// One JSON object on standard output, nothing else
    #[arg(long)]
    json: bool,
}

impl Args {
    /// The schedule with slowdowns and noise.
    fn reality(&self, planned: &Schedule) -> Schedule {
        let mut real = planned.clone();
        real.slow_down(&self.slow);
        if let Some(share) = self.perturb {
            real.perturb(share, self.seed);
        }
        real
    }
}

/// Simulated steps of uneven devices.
const UNEVEN_RUNS: u64 = 15;

fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err(format!("{text} is not a share between 0 and 1")),
    }
}

fn links(text: &str) -> Result<Links, String> {
    match text {
        "fifo" => Ok(Links::Fifo),
        "shared" => Ok(Links::Shared),
        "core" => Ok(Links::Core),
        _ => Err(unknown("kind of links", text, &["fifo", "shared", "core"])),
    }
}

#[derive(Serialize)]
struct Answer {
    step_seconds: f64,
    /// The cost model's sum, for comparison.
    sum_seconds: f64,
    tasks: usize,
    /// Wall time of making the tasks and simulating them.
    full_seconds: f64,
    /// Mean wall time of delta simulation after one layer has changed, if it was run.
    delta_seconds: Option<f64>,
    devices: Vec<DeviceAnswer>,
    /// For a pipeline: the share of the step in which devices run no pass and nothing before or after all passes.
    #[serde(skip_serializing_if = "Option::is_none")]
    bubble: Option<f64>,
    /// The step with `--assist`.
    #[serde(skip_serializing_if = "Option::is_none")]
    assisted: Option<AssistedAnswer>,
}

#[derive(Clone, Copy, Serialize)]
struct AssistedAnswer {
    step_seconds: f64,
    /// Stolen tasks per step, and the bytes of their operands and results.
    moved: usize,
    moved_bytes: u64,
    /// Migrated layers, the bytes of their weights and state, and the trial steps.
    layers: usize,
    layer_bytes: u64,
    layer_steps: usize,
}

#[derive(Serialize)]
struct DeviceAnswer {
    /// Seconds of computing.
    busy: f64,
    /// Seconds of not computing.
    idle: f64,
    /// Of those, seconds of communicating.
    exposed_comm: f64,
    peak_memory_bytes: u64,
}

fn seconds(picoseconds: u64) -> f64 {
    picoseconds as f64 / 1e12
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Verdict> {
    check_outputs(&args.trace)?;
    let opened = OpenedPlan::open(&args.plan)?;
    let mut options = LowerOptions::default();
    if args.delta || args.no_overlap {
        options.join_below = Bytes(0);
    }
    if args.no_overlap {
        options.sharing = Sharing::WithinLayers;
    }
    let lowered = LoweredPlan::with(opened, options)?;
    let (inputs, program) = (&lowered.opened.inputs, &lowered.program);
    let graph = &inputs.graph;
    let started = Instant::now();
    check_slow(&args.slow, lowered.plan())?;
    ensure!(
        !args.assist || program.pipeline.is_none(),
        "--assist: layers of a pipeline stay on their stages; simulate without it"
    );
    // Noise and assistants make devices differ.
    let apart = args.perturb.is_some() || args.uneven || args.assist || !args.slow.is_empty();
    let classes = if apart { Classes::each(&program.mesh) } else { Classes::of(program) };
    // Work stealing is simulated on fifo links only.
    let usual = match (args.assist, args.no_overlap) {
        (_, true) => Links::Serial,
        (true, false) => Links::Fifo,
        (false, false) => Links::of(&inputs.machine),
    };
    let planned = lowered.schedule(classes, args.links.unwrap_or(usual))?;
    let mut schedule = args.reality(&planned);
    let mut timeline = schedule.simulate();
    if args.uneven {
        let speeds = inputs.costs.as_ref().and_then(|costs| costs.speed_trace.as_ref());
        let speeds = speeds.context(
            "--uneven: the plan's costs have no speed trace; measure one with `profile --workers N` and plan with `--costs`",
        )?;
        let mut runs: Vec<(Timeline, Schedule)> = (0..UNEVEN_RUNS)
            .map(|run| {
                let mut schedule = schedule.clone();
                schedule.apply_speeds(speeds, args.seed.wrapping_add(run));
                (schedule.simulate(), schedule)
            })
            .collect();
        runs.sort_by_key(|(timeline, _)| timeline.makespan());
        (timeline, schedule) = runs.swap_remove(runs.len() / 2);
    }
    let timeline = timeline;
    let assisted = if args.assist { Some(assisted(args, &lowered, &planned, &schedule)?) } else { None };
    let full_seconds = started.elapsed().as_secs_f64();
    let by_changes = match change_by_change(&lowered) {
        _ if args.full || args.no_overlap => None,
        Ok(found) => Some(found),
        Err(error) if args.delta => return Err(error),
        Err(_) => None,
    };
    if let (true, Some((makespan, _))) = (args.delta, by_changes) {
        // Delta simulation knows the first micro-batches: so does the program before it is unrolled.
        let assignment = &lowered.opened.assignment;
        let once = lower_with(graph, &lowered.opened.resharder(), assignment, options)?;
        let full = simulate_priced(&lowered.opened.context()?, assignment, &once)?;
        ensure!(
            makespan == full,
            "delta simulation gives {makespan} ps and full simulation {full} ps: please report this plan"
        );
    }
    let delta_seconds = by_changes.map(|(_, seconds)| seconds);
    if let Some(path) = &args.trace {
        let context = lowered.opened.context()?;
        let (shapes, assignment) = (&context.shapes, &lowered.opened.assignment);
        // Sums of partial results run with other configs than assigned.
        let layouts =
            assign_layouts(graph, shapes, &context.transfers, assignment, context.mesh(), options.sharing);
        let config = |op: OpId| {
            let rule = &shapes[op.index()].rule;
            layouts.configs[op.index()].show(rule, &program.mesh)
        };
        let trace = Trace {
            graph,
            program,
            comm: context.resharder.comm(),
            schedule: &schedule,
            timeline: &timeline,
            config: &config,
        };
        write_atomically(path, |out| trace.write(out))?;
    }
    // In several micro-batches the host's time is inside of the tasks; without overlap the step is that of the search's objective.
    let bound_by_host = program.body.is_empty() && !args.no_overlap;
    let host = if bound_by_host { lowered.opened.context()?.host_seconds() } else { 0.0 };
    let simulated = SimulatedPlan { lowered: &lowered, schedule: &schedule, timeline: &timeline, host };
    let mut out = io::stdout().lock();
    if args.json {
        let answer = simulated.answer(full_seconds, delta_seconds, assisted);
        writeln!(out, "{}", serde_json::to_string_pretty(&answer)?)?;
    } else {
        simulated.summarise(&mut out)?;
        if let Some(assisted) = assisted {
            writeln!(
                out,
                "with assistants: {} per step\n  stolen    {} tasks per step, {}\n  migrated  {} layers, {}, in {} trial steps",
                show_seconds(assisted.step_seconds),
                assisted.moved,
                show_bytes(assisted.moved_bytes),
                assisted.layers,
                show_bytes(assisted.layer_bytes),
                assisted.layer_steps
            )?;
        }
        if let Some(path) = &args.trace {
            writeln!(out, "timeline written to {}", path.display())?;
        }
    }
    Ok(Verdict::Done)
}

/// The step with assistants: layers migrate off slow devices first, then idle devices steal work within the step.
fn assisted(
    args: &Args,
    lowered: &LoweredPlan,
    planned: &Schedule,
    real: &Schedule,
) -> anyhow::Result<AssistedAnswer> {
    let rule = StealRule {
        latency: u64::try_from(args.assist_latency.as_nanos())
            .unwrap_or(u64::MAX / 1000)
            .saturating_mul(1000),
        window: args.assist_window,
        fetch: !args.assist_resident,
    };
    let context = lowered.opened.inputs.context(lowered.opened.mesh.clone(), false)?;
    let step = |assignment: &Assignment| -> Result<AssistOutcome, StrategyError> {
        let (program, planned) = schedule_per_device(&context, assignment)?;
        let schedule = &args.reality(&planned);
        let reality = Reality { schedule, slower: &args.slow };
        Ok(assist(&planned, &program, context.resharder.comm(), rule, reality))
    };
    let run = |assignment: &Assignment| Ok(step(assignment)?.makespan);
    let slowdowns = slowdowns(planned, real);
    let migration = migrate(&context, &lowered.opened.assignment, &slowdowns, args.assist_migrations, run)?;
    let within = step(&migration.assignment)?;
    Ok(AssistedAnswer {
        step_seconds: seconds(within.makespan),
        moved: within.moved,
        moved_bytes: within.moved_bytes,
        layers: migration.layers,
        layer_bytes: migration.bytes,
        layer_steps: migration.steps,
    })
}

/// Delta-simulates the plan layer by layer, from data parallelism: the makespan without joined all-reduces, and the mean
/// wall time of a change.
fn change_by_change(lowered: &LoweredPlan) -> anyhow::Result<(u64, f64)> {
    let context = lowered.opened.inputs.context(lowered.opened.mesh.clone(), false)?;
    let (data, planned) = (DATA.assignment(&context), &lowered.opened.assignment);
    let mut delta = Delta::new(&context, &data)?;
    let mut seconds = 0.0;
    // There, back and there again: the first round fills the caches.
    for assignment in [planned, &data, planned] {
        let changes: Vec<Vec<(u32, u32)>> = context
            .variables
            .members
            .iter()
            .map(|layer| {
                let numbers =
                    layer.ops.iter().map(|op| (op.0, delta.number(op.index(), assignment.config(*op))));
                numbers.collect()
            })
            .collect();
        let started = Instant::now();
        for change in &changes {
            delta.propose(change)?;
            delta.accept();
        }
        seconds = started.elapsed().as_secs_f64() / changes.len().max(1) as f64;
    }
    Ok((delta.makespan(), seconds))
}

struct SimulatedPlan<'a> {
    lowered: &'a LoweredPlan,
    schedule: &'a Schedule,
    timeline: &'a Timeline,
    /// Seconds in which the engine's host launches all kernels: no step is shorter.
    host: f64,
}

impl SimulatedPlan<'_> {
    fn step_seconds(&self) -> f64 {
        seconds(self.timeline.makespan()).max(self.host)
    }

    /// Per device class: its use of time, and its peak memory.
    fn classes(&self) -> Vec<(Usage, u64)> {
        let usages = usages(self.schedule, self.timeline);
        let peak =
            |class: u32| Memory::of(&self.lowered.program, self.schedule, self.timeline, class).peak().0;
        usages.into_iter().zip(self.schedule.classes.ids().map(peak)).collect()
    }

    fn answer(
        &self,
        full_seconds: f64,
        delta_seconds: Option<f64>,
        assisted: Option<AssistedAnswer>,
    ) -> Answer {
        let classes = self.classes();
        let device = |device| {
            let (usage, peak_memory_bytes) =
                classes[self.schedule.classes.class(&self.lowered.program.mesh, device) as usize];
            DeviceAnswer {
                busy: seconds(usage.busy),
                idle: seconds(usage.idle),
                exposed_comm: seconds(usage.exposed),
                peak_memory_bytes,
            }
        };
        Answer {
            step_seconds: self.step_seconds(),
            sum_seconds: self.lowered.plan().objective as f64 / 1e12,
            tasks: self.schedule.tasks.len(),
            full_seconds,
            delta_seconds,
            devices: self.lowered.program.devices().map(device).collect(),
            bubble: self.bubble(),
            assisted,
        }
    }

    /// The share of a pipelined step in which devices run no pass and nothing before or after all passes.
    fn bubble(&self) -> Option<f64> {
        let program = &self.lowered.program;
        program.pipeline.as_ref()?;
        let spans = pass_spans(program, self.schedule, self.timeline);
        let idle = bubble(program, self.schedule, self.timeline, &spans);
        Some(idle as f64 / self.timeline.makespan().max(1) as f64)
    }

    fn summarise(&self, out: &mut impl Write) -> io::Result<()> {
        let (plan, step) = (self.lowered.plan(), self.timeline.makespan());
        let share = |part: u64| 100.0 * part as f64 / step.max(1) as f64;
        let (model, machine, devices) = (&plan.model, &plan.machine, plan.devices);
        let headline = format!(
            "{model} on {machine} ({devices} devices): {} per step",
            show_seconds(self.step_seconds())
        );
        writeln!(out, "{}", hanging("", &headline))?;
        if self.step_seconds() > seconds(step) {
            writeln!(
                out,
                "  on the devices   {}; the host launches kernels for longer",
                show_seconds(seconds(step))
            )?;
        }
        writeln!(out, "  without overlap  {}", show_seconds(plan.objective as f64 / 1e12))?;
        writeln!(out, "  tasks            {}", self.schedule.tasks.len())?;
        if let (Some(bubble), Some(pipeline)) = (self.bubble(), &plan.pipeline) {
            let (schedule, stages) = (&pipeline.schedule, pipeline.stages.len());
            let bubble = 100.0 * bubble;
            writeln!(
                out,
                "  pipeline         {stages} stages, {schedule}; no pass for {bubble:.1}% of the step"
            )?;
        }
        writeln!(
            out,
            "{:<18} {:>16} {:>16} {:>16} {:>10}",
            "device", "computing", "exposed comm.", "other waiting", "peak"
        )?;
        for (class, (usage, peak)) in self.schedule.classes.ids().zip(self.classes()) {
            let part = |time: u64| format!("{} ({:.0}%)", show_seconds(seconds(time)), share(time));
            let others = self.schedule.classes.size(&self.lowered.program.mesh, class) - 1;
            let mut name = self.schedule.classes.device(class).0.to_string();
            if others > 0 {
                name += &format!(" (and {others} equal)");
            }
            writeln!(
                out,
                "{name:<18} {:>16} {:>16} {:>16} {:>10}",
                part(usage.busy),
                part(usage.exposed),
                part(usage.idle.saturating_sub(usage.exposed)),
                show_bytes(peak)
            )?;
        }
        self.critical_path(out, step)
    }

    /// The tasks that determine the step's length, longest first.
    fn critical_path(&self, out: &mut impl Write, step: u64) -> io::Result<()> {
        let mut parts: Vec<(u64, String)> = Vec::new();
        let (mut computing, mut talking) = (0, 0);
        for task in self.timeline.critical_path() {
            let duration = self.schedule.tasks.duration(task as usize);
            let instruction = self.lowered.program.instruction(self.schedule.instructions[task as usize]);
            let tensor = |value| {
                &self.lowered.opened.inputs.graph.tensor(self.lowered.program.value(value).tensor).name
            };
            let name = match &instruction.work {
                Work::Compute { op, .. } => self.lowered.opened.inputs.graph.node(*op).name.clone(),
                Work::Reshard(r) => format!("{} {}", r.action.name(), tensor(instruction.writes[0])),
                Work::HaloExchange { .. } => format!("halo exchange {}", tensor(instruction.writes[0])),
            };
            *(if matches!(instruction.work, Work::Compute { .. }) {
                &mut computing
            } else {
                &mut talking
            }) += duration;
            parts.push((duration, name));
        }
        writeln!(
            out,
            "critical path: {} computing, {} communicating; longest tasks:",
            show_seconds(seconds(computing)),
            show_seconds(seconds(talking))
        )?;
        parts.sort_by(|a, b| b.cmp(a));
        for (duration, name) in parts.iter().take(5) {
            let share = 100.0 * *duration as f64 / step.max(1) as f64;
            let name = shortened(name, 56);
            writeln!(out, "  {name:<56} {:>11} ({share:.0}%)", show_seconds(seconds(*duration)))?;
        }
        Ok(())
    }
}
