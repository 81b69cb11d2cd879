//! `simulate`: a plan's step, task by task: how long it takes, where the time goes, what devices hold.

use crate::Verdict;
use crate::commands::run::{Opened, check_slow, read_plan, slow};
use crate::files::write_atomically;
use crate::planning::{PlanningArgs, show_bytes, show_seconds};
use anyhow::{Context, ensure};
use serde::Serialize;
use shardwright_cost::Relayouts;
use shardwright_graph::OpId;
use shardwright_lower::{Work, lower_joining};
use shardwright_machine::Bytes;
use shardwright_plan::strategy::Baseline;
use shardwright_request::parse_seconds;
use shardwright_sim::{
    Assisted, Classes, Delta, Links, Memory, Reality, Rule, Schedule, SimError, Timeline, Trace, Usage,
    apart, assist, homes, paces, usages,
};
use shardwright_space::{Config, OpShapes, place};
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Simulates a plan's training step: timeline, utilisation, memory.
#[derive(clap::Args)]
pub struct Args {
    /// A plan, as `plan -o` writes it
    plan: String,
    /// Write the timeline to this file, for Perfetto or chrome://tracing
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Let every task of every device take up to this share longer or shorter, at random: 0.2 for a fifth
    #[arg(long, value_name = "SHARE", value_parser = share)]
    perturb: Option<f64>,
    /// Let a device compute so much slower than planned, `2:1.5` for device 2; may be repeated
    #[arg(long, value_name = "DEVICE:FACTOR", value_parser = slow)]
    slow: Vec<(u32, f64)>,
    /// Let devices be as uneven as the cores that the plan's costs were measured on (`profile --workers`); of several runs the one that takes
    /// the middle time is shown
    #[arg(long, conflicts_with_all = ["delta", "assist"])]
    uneven: bool,
    /// Scheduling assistants: devices that are late hand over ready work to others
    #[arg(long, conflicts_with_all = ["delta", "links"])]
    assist: bool,
    /// For --assist: seconds that a decision takes
    #[arg(long, value_name = "SECONDS", default_value = "2e-6", value_parser = parse_seconds)]
    assist_latency: Duration,
    /// For --assist: how many of the tasks that wait at a device are looked at
    #[arg(long, value_name = "N", default_value_t = 8)]
    assist_window: usize,
    /// For --assist: only work whose operands are on both devices moves
    #[arg(long)]
    assist_resident: bool,
    /// For --assist: how many steps may be spent on finding layers of slow devices another home
    #[arg(long, value_name = "STEPS", default_value_t = 100)]
    assist_homes: usize,
    /// Only the full simulation
    #[arg(long, conflicts_with = "delta")]
    full: bool,
    /// Small all-reduces not joined, and the step simulated change by change too, held to the full simulation to the bit
    #[arg(long, conflicts_with_all = ["perturb", "links"])]
    delta: bool,
    /// What transfers do: wait for each other on a link (fifo), share its bandwidth (shared), or wait for each other and for
    /// the computing of who takes part, as with one core per device (core); as the machine does by default
    #[arg(long, value_parser = links)]
    links: Option<Links>,
    /// Seed of the noise
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// One JSON object on standard output, nothing else
    #[arg(long)]
    json: bool,
}

impl Args {
    /// Tasks with the times that they really take.
    fn reality(&self, planned: &Schedule) -> Schedule {
        let mut real = planned.clone();
        real.slow_down(&self.slow);
        if let Some(share) = self.perturb {
            real.perturb(share, self.seed);
        }
        real
    }
}

/// How many steps of uneven devices are simulated.
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
        _ => Err(format!("there are no links {text}; choose fifo, shared or core")),
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
    /// Wall time of simulating anew after one layer has changed, on average; none where that was not asked for or cannot be.
    delta_seconds: Option<f64>,
    devices: Vec<DeviceAnswer>,
    /// With assistants, where they were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    assisted: Option<AssistedAnswer>,
}

#[derive(Clone, Copy, Serialize)]
struct AssistedAnswer {
    step_seconds: f64,
    /// Tasks that move to another device in every step, and bytes that move with them, there and back.
    moved: usize,
    moved_bytes: u64,
    /// Layers that moved for good, bytes of weights and state that moved with them, and steps that were spent on that.
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
    let not_one = || format!("{} is not a plan: `plan -o` writes them", args.plan);
    let plan = read_plan(&args.plan)?.with_context(not_one)?;
    let mut opened = Opened::of_plan(&PlanningArgs::of(&args.plan, 1), plan)?;
    if args.delta {
        let relayouts = Relayouts::new(&opened.request.machine, &opened.program.mesh);
        opened.program = lower_joining(&opened.request.graph, &relayouts, &opened.configs, Bytes(0))?;
    }
    let opened = opened;
    let (graph, program) = (&opened.request.graph, &opened.program);
    let shapes: Vec<OpShapes> = graph.op_ids().map(|op| OpShapes::of(graph, op)).collect();
    // Sums of partial results are run otherwise than planned.
    let run_as = place(graph, &shapes, &opened.configs, &program.mesh).configs;
    let started = Instant::now();
    check_slow(&args.slow, &opened.plan)?;
    // With noise, or help, no two devices are alike.
    let apart = args.perturb.is_some() || args.uneven || args.assist || !args.slow.is_empty();
    let classes = if apart { Classes::each(&program.mesh) } else { Classes::of(program) };
    // Help is followed on links that serve one transfer after the other.
    let usual = if args.assist { Links::Fifo } else { Links::of(&opened.request.machine) };
    let planned = opened.schedule(classes, args.links.unwrap_or(usual))?;
    let mut schedule = args.reality(&planned);
    let mut timeline = schedule.simulate();
    if args.uneven {
        let paces = opened.request.costs().and_then(|costs| costs.paces.as_ref());
        let paces = paces.context(
            "--uneven: the plan's costs do not say how uneven devices are; measure them with `profile --workers N` and plan with `--costs`",
        )?;
        let mut runs: Vec<(Timeline, Schedule)> = (0..UNEVEN_RUNS)
            .map(|run| {
                let mut schedule = schedule.clone();
                schedule.pace(paces, args.seed.wrapping_add(run));
                (schedule.simulate(), schedule)
            })
            .collect();
        runs.sort_by_key(|(timeline, _)| timeline.makespan());
        (timeline, schedule) = runs.swap_remove(runs.len() / 2);
    }
    let timeline = timeline;
    let assisted = if args.assist { Some(assisted(args, &opened, &planned, &schedule)?) } else { None };
    let full_seconds = started.elapsed().as_secs_f64();
    let by_changes = match change_by_change(&opened) {
        _ if args.full => None,
        Ok(found) => Some(found),
        Err(error) if args.delta => return Err(error),
        Err(_) => None,
    };
    if let (true, Some((makespan, _))) = (args.delta, by_changes) {
        let full = timeline.makespan();
        ensure!(
            makespan == full,
            "delta simulation comes to {makespan} ps and full simulation to {full}: please report this plan"
        );
    }
    let delta_seconds = by_changes.map(|(_, seconds)| seconds);
    if let Some(path) = &args.trace {
        let config = |op: OpId| {
            let rule = &shapes[op.index()].rule;
            run_as[op.index()].show(rule, &program.mesh)
        };
        let relayouts = Relayouts::new(&opened.request.machine, &program.mesh);
        let trace = Trace {
            graph,
            program,
            comm: relayouts.comm(),
            schedule: &schedule,
            timeline: &timeline,
            config: &config,
        };
        write_atomically(path, |out| trace.write(out))?;
    }
    let simulated = Simulated { opened: &opened, schedule: &schedule, timeline: &timeline };
    let mut out = io::stdout().lock();
    if args.json {
        let answer = simulated.answer(full_seconds, delta_seconds, assisted);
        writeln!(out, "{}", serde_json::to_string_pretty(&answer)?)?;
    } else {
        simulated.summarise(&mut out)?;
        if let Some(assisted) = assisted {
            writeln!(
                out,
                "with assistants: {} per step; {} tasks move, {} with them; {} layers moved for good, {} with them, in {} steps",
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

/// The step with assistants: slow devices' layers find another home first, then work moves within the step.
fn assisted(
    args: &Args,
    opened: &Opened,
    planned: &Schedule,
    real: &Schedule,
) -> anyhow::Result<AssistedAnswer> {
    let rule = Rule {
        latency: u64::try_from(args.assist_latency.as_nanos())
            .unwrap_or(u64::MAX / 1000)
            .saturating_mul(1000),
        window: args.assist_window,
        fetch: !args.assist_resident,
    };
    let problem = opened.request.bare(opened.program.mesh.clone(), false)?;
    let step = |configs: &[Config]| -> Result<Assisted, SimError> {
        let (program, planned) = apart(&problem, configs)?;
        let schedule = &args.reality(&planned);
        let reality = Reality { schedule, slower: &args.slow };
        Ok(assist(&planned, &program, problem.relayouts.comm(), rule, reality))
    };
    let run = |configs: &[Config]| Ok(step(configs)?.makespan);
    let homes = homes(&problem, &opened.configs, &paces(planned, real), args.assist_homes, run)?;
    let within = step(&homes.configs)?;
    Ok(AssistedAnswer {
        step_seconds: seconds(within.makespan),
        moved: within.moved,
        moved_bytes: within.moved_bytes,
        layers: homes.layers,
        layer_bytes: homes.bytes,
        layer_steps: homes.steps,
    })
}

/// Simulates the plan change by change, from data parallelism: how long its step takes if no all-reduces are joined, and
/// how many seconds one change takes.
fn change_by_change(opened: &Opened) -> anyhow::Result<(u64, f64)> {
    let problem = opened.request.bare(opened.program.mesh.clone(), false)?;
    let data = Baseline::Data.configs(&problem);
    let mut delta = Delta::new(&problem, &data)?;
    let mut seconds = 0.0;
    // There, back and there again: what configs mean has to be found out once.
    for configs in [&opened.configs, &data, &opened.configs] {
        let changes: Vec<Vec<(u32, u32)>> = problem
            .variables
            .splits
            .iter()
            .map(|layer| {
                let numbers =
                    layer.ops.iter().map(|op| (op.0, delta.number(op.index(), &configs[op.index()])));
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

struct Simulated<'a> {
    opened: &'a Opened,
    schedule: &'a Schedule,
    timeline: &'a Timeline,
}

impl Simulated<'_> {
    /// Per class of devices: where its time goes, and the most that it holds.
    fn classes(&self) -> Vec<(Usage, u64)> {
        let usages = usages(self.schedule, self.timeline);
        let peak = |class: u32| {
            Memory::of(&self.opened.request.graph, &self.opened.program, self.schedule, self.timeline, class)
                .peak()
                .0
        };
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
                classes[self.schedule.classes.class(&self.opened.program.mesh, device) as usize];
            DeviceAnswer {
                busy: seconds(usage.busy),
                idle: seconds(usage.idle),
                exposed_comm: seconds(usage.exposed),
                peak_memory_bytes,
            }
        };
        Answer {
            step_seconds: seconds(self.timeline.makespan()),
            sum_seconds: self.opened.plan.objective as f64 / 1e12,
            tasks: self.schedule.tasks.len(),
            full_seconds,
            delta_seconds,
            devices: self.opened.program.devices().map(device).collect(),
            assisted,
        }
    }

    fn summarise(&self, out: &mut impl Write) -> io::Result<()> {
        let (plan, step) = (&self.opened.plan, self.timeline.makespan());
        let share = |part: u64| 100.0 * part as f64 / step.max(1) as f64;
        writeln!(
            out,
            "{} on {} ({} devices): {} per step; {} if nothing overlapped; {} tasks",
            plan.model,
            plan.machine,
            plan.devices,
            show_seconds(seconds(step)),
            show_seconds(plan.objective as f64 / 1e12),
            self.schedule.tasks.len()
        )?;
        writeln!(
            out,
            "{:<22} {:>16} {:>16} {:>21} {:>11}",
            "device", "computing", "idle", "exposed communication", "most held"
        )?;
        for (class, (usage, peak)) in self.schedule.classes.ids().zip(self.classes()) {
            let part = |time: u64| format!("{} ({:.0}%)", show_seconds(seconds(time)), share(time));
            let alike = self.schedule.classes.size(&self.opened.program.mesh, class) - 1;
            let mut name = self.schedule.classes.device(class).0.to_string();
            if alike > 0 {
                name += &format!(" and {alike} alike");
            }
            writeln!(
                out,
                "{name:<22} {:>16} {:>16} {:>21} {:>11}",
                part(usage.busy),
                part(usage.idle),
                part(usage.exposed),
                show_bytes(peak)
            )?;
        }
        self.critical_path(out, step)
    }

    /// What the step's length is made of, the longest parts by name.
    fn critical_path(&self, out: &mut impl Write, step: u64) -> io::Result<()> {
        let mut parts: Vec<(u64, String)> = Vec::new();
        let (mut computing, mut talking) = (0, 0);
        for task in self.timeline.critical_path() {
            let duration = self.schedule.tasks.duration(task as usize);
            let instruction = self.opened.program.instruction(self.schedule.instructions[task as usize]);
            let tensor =
                |value| &self.opened.request.graph.tensor(self.opened.program.value(value).tensor).name;
            let name = match &instruction.work {
                Work::Compute { op } => self.opened.request.graph.node(*op).name.clone(),
                Work::Relayout(r) => format!("{} {}", r.action.name(), tensor(instruction.writes[0])),
                Work::Window { .. } => format!("window {}", tensor(instruction.writes[0])),
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
            "critical path: {} of computing, {} of communicating; its longest tasks:",
            show_seconds(seconds(computing)),
            show_seconds(seconds(talking))
        )?;
        parts.sort_by(|a, b| b.cmp(a));
        for (duration, name) in parts.iter().take(5) {
            let share = 100.0 * *duration as f64 / step.max(1) as f64;
            writeln!(out, "  {name:<40} {:>10} ({share:.0}%)", show_seconds(seconds(*duration)))?;
        }
        Ok(())
    }
}
