//! One simulated step, laid out for drawing: bars on tracks, what devices hold, what travels.
//!
//! Tables are written column by column, so that ten thousand ops stay a few megabytes; times are whole picoseconds.

use crate::{
    page::ReportError,
    peak::{Peak, tensor_layers},
};
use serde::Serialize;
use shardwright_graph::OpId;
use shardwright_lower::{Instruction, InstructionId, ParallelGraph, ValueId, Work, lower};
use shardwright_plan::{Context, picoseconds};
use shardwright_sim::{Band, Classes, Links, Memory, Schedule, Stream, Timeline, bands, pass_spans, usages};
use shardwright_space::{Assignment, Sharing, assign_layouts};

/// The most bars of a step; classes of devices beyond that are left out.
const MOST_BARS: usize = 1 << 18;

/// A step of the model under some configs.
#[derive(Clone, Debug, Serialize)]
pub struct StepView {
    /// The strategy's name; `plan` for the plan itself.
    pub name: &'static str,
    /// How long it takes.
    pub step_ps: u64,
    /// Classes of devices that nobody can tell apart; all that are shown.
    pub classes: Vec<DeviceClass>,
    /// How many more there are.
    pub more_classes: usize,
    /// The tracks of these classes, class by class.
    pub tracks: Vec<Track>,
    /// What is drawn on them.
    pub bars: Bars,
    /// Everything that moves between devices, in the program's order.
    pub moves: Vec<Move>,
    /// Per op: how long one device computes it.
    pub compute_ps: Vec<u64>,
    /// The passes of a pipeline; empty without one.
    pub passes: Passes,
}

/// Passes of a pipeline, column by column, by group and then by start. One device of every group stands for the others.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Passes {
    /// The group of devices.
    pub group: Vec<u32>,
    /// The stage.
    pub stage: Vec<u32>,
    /// The group's chunk that the stage is.
    pub chunk: Vec<u32>,
    /// `forward`, `backward`, `backward-input` or `backward-weight`.
    pub pass: Vec<&'static str>,
    /// The micro-batch.
    pub micro_batch: Vec<u32>,
    /// From when on.
    pub start: Vec<u64>,
    /// How long.
    pub duration: Vec<u64>,
}

impl Passes {
    fn of(program: &ParallelGraph, schedule: &Schedule, line: &Timeline) -> Self {
        let mut passes = Self::default();
        let Some(own) = &program.pipeline else { return passes };
        let group_of = |class: u32| own.group_of(&program.mesh, schedule.classes.device(class));
        let mut shown: Vec<(u32, u32)> = Vec::new();
        for class in schedule.classes.ids() {
            if shown.iter().all(|(_, group)| *group != group_of(class)) {
                shown.push((class, group_of(class)));
            }
        }
        for span in pass_spans(program, schedule, line).into_iter().take(MOST_BARS) {
            let Some(&(_, group)) = shown.iter().find(|(class, _)| *class == span.class) else { continue };
            let groups = own.pipeline.groups(&program.mesh);
            passes.group.push(group);
            passes.stage.push(span.stage);
            passes.chunk.push(own.pipeline.schedule.place(groups, span.stage).1);
            passes.pass.push(span.pass);
            passes.micro_batch.push(span.micro_batch);
            passes.start.push(span.start);
            passes.duration.push(span.end - span.start);
        }
        passes
    }
}

/// Devices that do the same at the same times.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceClass {
    /// One of them.
    pub device: u32,
    /// How many they are.
    pub size: u32,
    /// Computing.
    pub busy_ps: u64,
    /// Communicating, whatever else goes on.
    pub communicating_ps: u64,
    /// Communicating while nothing is computed.
    pub exposed_ps: u64,
    /// Not computing.
    pub idle_ps: u64,
    /// The most that one of them holds.
    pub peak_memory_bytes: u64,
    /// When what it holds changes.
    pub memory_ps: Vec<u64>,
    /// What it holds from then on.
    pub memory_bytes: Vec<u64>,
    /// What holds the memory when it is fullest.
    pub peak: Peak,
    /// Passes of micro-batches.
    pub bands: Vec<BandView>,
}

/// A time of computing in one pass of one micro-batch.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct BandView {
    /// `forward`, `backward`, `recompute` or `update`.
    pub pass: &'static str,
    /// The micro-batch, from 0; none for updates.
    pub micro_batch: Option<u32>,
    /// Its start.
    pub start_ps: u64,
    /// Its end.
    pub end_ps: u64,
}

impl BandView {
    fn of(band: Band) -> Self {
        let Band { micro_batch, pass, start, end } = band;
        Self { pass: pass.name(), micro_batch, start_ps: start, end_ps: end }
    }
}

/// A device's compute units, or its port to a level's links.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Track {
    /// The class of devices.
    pub class: u32,
    /// The level; none for computing.
    pub level: Option<u32>,
}

/// Pieces of time, column by column, by track and then by start.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Bars {
    /// On which track.
    pub track: Vec<u32>,
    /// An op, or, where negative, the move -1 - this.
    pub what: Vec<i64>,
    /// From when on.
    pub start: Vec<u64>,
    /// How long.
    pub duration: Vec<u64>,
    /// The bars that the step's length is made of, as positions in the columns.
    pub critical: Vec<u32>,
}

/// Something that moves between devices.
#[derive(Clone, Debug, Serialize)]
pub struct Move {
    /// How: `all-reduce`, `window`.
    pub action: &'static str,
    /// What: tensors that travel together.
    pub tensors: Vec<String>,
    /// The op that made it; none for weights and data.
    pub from: Option<u32>,
    /// The op that needs it first; where none does, the one that made it.
    pub to: u32,
    /// The mesh axes that it crosses.
    pub axes: Vec<u32>,
    /// Bytes sent, all devices together.
    pub bytes: u64,
    /// How long.
    pub ps: u64,
}

impl StepView {
    /// Lowers and simulates a step.
    pub fn simulate(
        name: &'static str,
        context: &Context<'_>,
        assignment: &Assignment,
    ) -> Result<Self, ReportError> {
        let graph = context.graph;
        let program = lower(graph, &context.resharder, assignment)?.unrolled();
        let times = context.times()?;
        let (classes, links, sharing) =
            (Classes::of(&program), Links::of(context.machine), Sharing::AcrossLayers);
        let schedule = shardwright_sim::schedule(context, assignment, &program, classes, links, sharing)?;
        // Sums of partial results run with other configs than assigned.
        let transfers = &context.transfers;
        let layouts = assign_layouts(graph, &context.shapes, transfers, assignment, context.mesh(), sharing);
        let compute = |op: OpId| times.compute(op, &layouts.configs[op.index()]);
        let line = schedule.simulate();
        let (whats, moves) = whats(context, &program);
        let mut step = Self {
            name,
            step_ps: line.makespan(),
            classes: Vec::new(),
            more_classes: 0,
            tracks: Vec::new(),
            bars: Bars::default(),
            moves,
            compute_ps: graph.op_ids().map(|op| u64::try_from(compute(op)).unwrap_or(0)).collect(),
            passes: Passes::of(&program, &schedule, &line),
        };
        step.draw(&schedule, &line, &whats);
        let layers = tensor_layers(graph);
        for (class, usage) in schedule.classes.ids().zip(usages(&schedule, &line)).take(step.shown()) {
            let memory = Memory::of(&program, &schedule, &line, class);
            let peak = Peak::of(graph, &program, &layers, &memory, |time| step.running(class, time));
            let bands = bands(graph, &program, &schedule, &line, class);
            step.classes.push(DeviceClass {
                bands: bands.into_iter().map(BandView::of).collect(),
                device: schedule.classes.device(class).0,
                size: schedule.classes.size(&program.mesh, class),
                busy_ps: usage.busy,
                communicating_ps: usage.communicating,
                exposed_ps: usage.exposed,
                idle_ps: usage.idle,
                peak_memory_bytes: memory.peak().0,
                memory_ps: memory.levels.iter().map(|level| level.0).collect(),
                memory_bytes: memory.levels.iter().map(|level| level.1.0).collect(),
                peak,
            });
        }
        step.more_classes = schedule.classes.len() - step.classes.len();
        Ok(step)
    }

    /// The op that a class of devices computes at a time.
    fn running(&self, class: u32, time: u64) -> Option<u32> {
        let own = |at: &usize| {
            let Track { class: owner, level } = self.tracks[self.bars.track[*at] as usize];
            let start = self.bars.start[*at];
            owner == class && level.is_none() && start <= time && time < start + self.bars.duration[*at]
        };
        let bar = (0..self.bars.what.len()).find(own)?;
        u32::try_from(self.bars.what[bar]).ok()
    }

    /// The class of devices that holds most, of those that are shown.
    pub fn fullest(&self) -> Option<&DeviceClass> {
        self.classes.iter().max_by_key(|class| (class.peak_memory_bytes, std::cmp::Reverse(class.device)))
    }

    /// How many classes have tracks.
    fn shown(&self) -> usize {
        self.tracks.last().map_or(1, |track| track.class as usize + 1)
    }

    /// Lays bars on tracks.
    fn draw(&mut self, schedule: &Schedule, line: &Timeline, whats: &[i64]) {
        // (stream, start, task): in the order in which they are drawn.
        let mut bars: Vec<(u32, u64, usize)> = Vec::new();
        for task in schedule.tasks.ids() {
            bars.extend(schedule.tasks.streams(task).iter().map(|&stream| (stream, line.start[task], task)));
        }
        bars.sort_unstable();
        if let Some(&(stream, ..)) = bars.get(MOST_BARS) {
            let (class, _) = schedule.stream(stream);
            let most = class.max(1);
            bars.retain(|&(stream, ..)| schedule.stream(stream).0 < most);
        }
        let mut critical = vec![false; schedule.tasks.len()];
        line.critical_path().iter().for_each(|&task| critical[task as usize] = true);
        let mut last = None;
        for (stream, start, task) in bars {
            if last != Some(stream) {
                last = Some(stream);
                let (class, stream) = schedule.stream(stream);
                let level = match stream {
                    Stream::Compute => None,
                    Stream::Port(level) => Some(level),
                };
                self.tracks.push(Track { class, level });
            }
            if critical[task] {
                self.bars.critical.push(self.bars.what.len() as u32);
            }
            self.bars.track.push(self.tracks.len() as u32 - 1);
            self.bars.what.push(whats[schedule.instructions[task].index()]);
            self.bars.start.push(start);
            self.bars.duration.push(line.end[task] - start);
        }
    }
}

/// Per instruction what it is (see [`Bars::what`]), and the moves among them.
fn whats(context: &Context<'_>, program: &ParallelGraph) -> (Vec<i64>, Vec<Move>) {
    let readers = first_readers(program);
    let mut whats = Vec::with_capacity(program.instructions.len());
    let mut moves = Vec::new();
    for (at, instruction) in program.instructions.iter().enumerate() {
        let (action, axes, seconds) = match &instruction.work {
            Work::Compute { op, .. } => {
                whats.push(i64::from(op.0));
                continue;
            }
            Work::Reshard(step) => (step.action.name(), step.axes, step.seconds),
            Work::HaloExchange { axes, seconds, .. } => ("window", *axes, *seconds),
        };
        let tensor = |value: &ValueId| context.graph.tensor(program.value(*value).tensor).name.clone();
        let from = maker(program, instruction);
        whats.push(-1 - moves.len() as i64);
        moves.push(Move {
            action,
            tensors: instruction.writes.iter().map(tensor).collect(),
            from: from.map(|op| op.0),
            to: readers[at].or(from).map_or(0, |op| op.0),
            axes: axes.iter().map(|axis| axis.0).collect(),
            bytes: program.traffic_of(context.resharder.comm(), instruction).total().0,
            ps: u64::try_from(picoseconds(seconds)).unwrap_or(0),
        });
    }
    (whats, moves)
}

/// Per instruction: the first op that needs what it does; of an op, itself.
fn first_readers(program: &ParallelGraph) -> Vec<Option<OpId>> {
    let mut of_value: Vec<Option<InstructionId>> = vec![None; program.values.len()];
    for (at, instruction) in program.instructions.iter().enumerate().rev() {
        instruction.reads.iter().for_each(|v| of_value[v.index()] = Some(InstructionId(at as u32)));
    }
    let mut readers = vec![None; program.instructions.len()];
    for (at, instruction) in program.instructions.iter().enumerate().rev() {
        readers[at] = match instruction.work {
            Work::Compute { op, .. } => Some(op),
            // Readers come later, so theirs is known.
            _ => instruction.writes.iter().filter_map(|v| readers[of_value[v.index()]?.index()]).min(),
        };
    }
    readers
}

/// The op that made what an instruction moves.
fn maker(program: &ParallelGraph, instruction: &Instruction) -> Option<OpId> {
    let mut at = instruction;
    loop {
        at = program.instruction(program.value(*at.reads.first()?).made_by?);
        if let Work::Compute { op, .. } = at.work {
            return Some(op);
        }
    }
}
