//! The memory of a device over the simulated step.
//!
//! Buffers and their order are those of the one account of memory ([`shardwright_lower::memory`]): results are allocated
//! and operands released in program order. This module adds the times. A task of the account has the time at which it and
//! all tasks before it have started. A transfer that the timeline starts early is thus counted when its turn comes: a
//! device that keeps its memory within the account delays such a transfer, and its times may differ.

use crate::{schedule::Schedule, timeline::Timeline};
use shardwright_lower::{DeviceAccount, ParallelGraph, ValueId};
use shardwright_machine::Bytes;

/// Held bytes over time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Picoseconds from the start of the step, ascending, and the most bytes held from then until the next entry.
    pub levels: Vec<(u64, Bytes)>,
    /// All buffers, in the order of their allocation.
    pub stays: Vec<Stay>,
    /// The buffers at the peak, workspace included.
    pub at_peak: Vec<Stay>,
}

/// A buffer in a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stay {
    /// The value; none for shares of all-reduces and for workspaces.
    pub value: Option<ValueId>,
    /// Bytes held.
    pub bytes: Bytes,
    /// Start, in picoseconds.
    pub from: u64,
    /// End, in picoseconds; none if it outlives the step.
    pub until: Option<u64>,
}

impl Memory {
    /// The most bytes held at once.
    pub fn peak(&self) -> Bytes {
        self.levels.iter().map(|(_, bytes)| *bytes).max().unwrap_or_default()
    }

    /// The first time of the peak, in picoseconds.
    pub fn fullest(&self) -> u64 {
        let peak = self.peak();
        self.levels.iter().find(|(_, bytes)| *bytes == peak).map_or(0, |(time, _)| *time)
    }

    /// The memory of a class of devices over time: of its device that holds most.
    pub fn of(program: &ParallelGraph, schedule: &Schedule, line: &Timeline, class: u32) -> Self {
        let devices = program.memory_devices().into_iter();
        let own = devices.filter(|&device| schedule.classes.class(&program.mesh, device) == class);
        let own: Vec<_> = own.collect();
        let own = if own.is_empty() { vec![schedule.classes.device(class)] } else { own };
        let accounts = own.into_iter().map(|device| DeviceAccount::of(program, device));
        // Of equal peaks the first device's.
        let fullest = accounts.reduce(|a, b| if b.account.peak() > a.account.peak() { b } else { a });
        fullest.map_or_else(Self::default, |account| Self::timed(program, schedule, line, class, &account))
    }

    fn timed(
        program: &ParallelGraph,
        schedule: &Schedule,
        line: &Timeline,
        class: u32,
        DeviceAccount { account, instructions }: &DeviceAccount,
    ) -> Self {
        // Per task: the time at which it and all tasks before it have started.
        let mut now = 0;
        let started = instructions.iter().map(|&instruction| {
            let start = schedule.task(instruction, class).map_or(0, |task| line.start[task as usize]);
            now = now.max(start);
            now
        });
        let started: Vec<u64> = started.collect();
        let time = |task: u32| started.get(task as usize).copied().unwrap_or(line.makespan());
        let mut levels: Vec<(u64, Bytes)> = Vec::new();
        for (&time, &level) in started.iter().zip(&account.levels) {
            match levels.last_mut() {
                Some(last) if last.0 == time => last.1 = last.1.max(Bytes(level)),
                _ => levels.push((time, Bytes(level))),
            }
        }
        let tasks = account.levels.len() as u32;
        let stay = |buffer: &shardwright_lower::memory::BufferSpan| Stay {
            value: Some(ValueId(buffer.value)).filter(|value| value.index() < program.values.len()),
            bytes: Bytes(buffer.bytes),
            from: if buffer.tasks.start == 0 { 0 } else { time(buffer.tasks.start) },
            until: (buffer.tasks.end <= tasks).then(|| time(buffer.tasks.end)),
        };
        let stays = account.buffers.iter().filter(|buffer| buffer.bytes > 0).map(stay).collect();
        let mut at_peak: Vec<Stay> = Vec::new();
        if let Some(peak) = account.fullest() {
            let held = account.buffers.iter().filter(|buffer| buffer.tasks.contains(&(peak as u32)));
            at_peak.extend(held.filter(|buffer| buffer.bytes > 0).map(stay));
            let held: u64 = at_peak.iter().map(|stay| stay.bytes.0).sum();
            let workspace = account.peak().saturating_sub(held);
            if workspace > 0 {
                let (from, until) = (time(peak as u32), Some(time(peak as u32 + 1)));
                at_peak.push(Stay { value: None, bytes: Bytes(workspace), from, until });
            }
        }
        Self { levels, stays, at_peak }
    }
}
