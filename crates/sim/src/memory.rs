//! What a device holds over time.
//!
//! A value is held from the start of the task that makes it to the end of the last one that reads it, in time, not in
//! the program's order; weights, optimizer state and data all step long. An updated weight takes its predecessor's place
//! and a view lives in what it looks at, as in the plan's account of memory; unlike there, copies in other layouts
//! count too.

use crate::{schedule::Schedule, timeline::Timeline};
use shardwright_graph::Graph;
use shardwright_lower::{InstructionId, ParallelGraph, ValueId, Work};
use shardwright_machine::Bytes;

/// How much is held from a moment on, in order of time: the first entry is the start of the step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Picoseconds from the start of the step, and bytes.
    pub levels: Vec<(u64, Bytes)>,
    /// Everything that is ever held, in the order of values.
    pub stays: Vec<Stay>,
}

/// A value in a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stay {
    /// Which.
    pub value: ValueId,
    /// How much of it.
    pub bytes: Bytes,
    /// From when on, in picoseconds.
    pub from: u64,
    /// From when on it is gone; none where it outlives the step.
    pub until: Option<u64>,
}

impl Memory {
    /// The most that is held at once.
    pub fn peak(&self) -> Bytes {
        self.levels.iter().map(|(_, bytes)| *bytes).max().unwrap_or_default()
    }

    /// When the most is held for the first time, in picoseconds.
    pub fn fullest(&self) -> u64 {
        let peak = self.peak();
        self.levels.iter().find(|(_, bytes)| *bytes == peak).map_or(0, |(time, _)| *time)
    }

    /// What is held at a moment.
    pub fn held(&self, time: u64) -> impl Iterator<Item = &Stay> {
        self.stays.iter().filter(move |stay| stay.from <= time && stay.until.is_none_or(|until| until > time))
    }

    /// What a class of devices holds over time.
    pub fn of(
        graph: &Graph,
        program: &ParallelGraph,
        schedule: &Schedule,
        line: &Timeline,
        class: u32,
    ) -> Self {
        let (mesh, device) = (&program.mesh, schedule.classes.device(class));
        let step = line.makespan();
        let bytes = |at: usize| program.values[at].local_type(mesh, device).map_or(0, |ty| ty.bytes());
        let mut held: Vec<u64> = (0..program.values.len()).map(bytes).collect();
        let task = |at: usize| schedule.task(InstructionId(at as u32), class).map(|task| task as usize);
        let mut last: Vec<u64> = vec![0; program.values.len()];
        for (at, instruction) in program.instructions.iter().enumerate() {
            let Some(task) = task(at) else { continue };
            for value in instruction.reads.iter().chain(&instruction.writes) {
                last[value.index()] = last[value.index()].max(line.end[task]);
            }
        }
        for (_, last) in program.values.iter().zip(&mut last).filter(|(value, _)| value.kept) {
            *last = step;
        }
        // Views lend their lifetime to what they look at, last view first so that chains add up.
        for instruction in program.instructions.iter().rev() {
            let Work::Compute { op } = instruction.work else { continue };
            if graph.node(op).op.operator().is_view() {
                let (from, to) = (instruction.reads[0].index(), instruction.writes[0].index());
                last[from] = last[from].max(last[to]);
                held[to] = 0;
            }
        }
        for carry in &program.carries {
            if program.value(carry.new).made_by.is_some() {
                held[carry.new.index()] = 0;
            }
        }
        let mut stays = Vec::new();
        for (at, value) in program.values.iter().enumerate() {
            let made = value.made_by.and_then(|by| task(by.index()));
            let from = made.map_or(0, |task| line.start[task]);
            if held[at] > 0 && (last[at] > from || value.kept) {
                let until = (!value.kept).then_some(last[at]);
                stays.push(Stay { value: ValueId(at as u32), bytes: Bytes(held[at]), from, until });
            }
        }
        // What is given back at a moment is given back before more is asked for.
        let mut changes: Vec<(u64, bool, u64)> = Vec::new();
        for stay in &stays {
            changes.push((stay.from, true, stay.bytes.0));
            changes.extend(stay.until.map(|until| (until, false, stay.bytes.0)));
        }
        changes.sort_unstable();
        let mut levels: Vec<(u64, Bytes)> = vec![(0, Bytes(0))];
        let mut now = 0u64;
        for (time, taken, bytes) in changes {
            now = if taken { now.saturating_add(bytes) } else { now.saturating_sub(bytes) };
            match levels.last_mut() {
                // Within a moment the end of it counts; what is given back came first.
                Some(level) if level.0 == time => level.1 = Bytes(now),
                _ => levels.push((time, Bytes(now))),
            }
        }
        Self { levels, stays }
    }
}
