//! The passes of a simulated pipeline: when each device class runs which stage for which micro-batch, and how long it idles.

use crate::{schedule::Schedule, timeline::Timeline, usage::joined};
use shardwright_lower::{ParallelGraph, Pass, StagePass, Work};
use shardwright_stages::schedule::Schedule as PipelineSchedule;
use std::collections::BTreeMap;

/// One pass of a device class. Communication that its ops wait for is part of it, sums of gradients are not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassSpan {
    /// The device class.
    pub class: u32,
    /// The stage.
    pub stage: u32,
    /// `forward`, `backward`, `backward-input` or `backward-weight`.
    pub pass: &'static str,
    /// The micro-batch.
    pub micro_batch: u32,
    /// The start of its first op, in picoseconds.
    pub start: u64,
    /// The end of its last op.
    pub end: u64,
}

/// The name of a pass.
pub fn pass_name(pass: Pass) -> &'static str {
    match pass {
        Pass::Forward => "forward",
        Pass::Backward => "backward",
        Pass::BackwardInput => "backward-input",
        Pass::BackwardWeight => "backward-weight",
    }
}

/// Whether a schedule runs gradients of weights as passes of their own.
fn splits_backward(schedule: PipelineSchedule) -> bool {
    matches!(schedule, PipelineSchedule::ZbH1 | PipelineSchedule::ZbV | PipelineSchedule::DualPipeV)
}

/// The passes of all device classes, by class and start; none without a pipeline.
pub fn pass_spans(program: &ParallelGraph, schedule: &Schedule, timeline: &Timeline) -> Vec<PassSpan> {
    let Some(pipeline) = &program.pipeline else { return Vec::new() };
    let split = splits_backward(pipeline.pipeline.schedule);
    let mut spans: BTreeMap<(u32, StagePass), (u64, u64)> = BTreeMap::new();
    for task in schedule.tasks.ids() {
        let id = schedule.instructions[task];
        let instruction = program.instruction(id);
        let computes = matches!(instruction.work, Work::Compute { .. }) && !program.accumulates(instruction);
        let (Some(mut pass), Some(class)) = (program.stage_pass(id), schedule.owner(task)) else { continue };
        if !computes || schedule.tasks.duration(task) == 0 {
            continue;
        }
        if !split && pass.pass != Pass::Forward {
            pass.pass = Pass::Backward;
        }
        let span = spans.entry((class, pass)).or_insert((u64::MAX, 0));
        *span = (span.0.min(timeline.start[task]), span.1.max(timeline.end[task]));
    }
    let span = |((class, own), (start, end)): ((u32, StagePass), (u64, u64))| PassSpan {
        class,
        stage: own.stage,
        pass: pass_name(own.pass),
        micro_batch: own.micro_batch,
        start,
        end,
    };
    let mut spans: Vec<PassSpan> = spans.into_iter().map(span).collect();
    spans.sort_by_key(|span| (span.class, span.start, span.end));
    spans
}

/// Picoseconds in which a device class runs no pass and nothing before or after all passes, on average over the classes.
pub fn bubble(program: &ParallelGraph, schedule: &Schedule, timeline: &Timeline, spans: &[PassSpan]) -> u64 {
    let mut busy: Vec<Vec<(u64, u64)>> = vec![Vec::new(); schedule.classes.len()];
    spans.iter().for_each(|span| busy[span.class as usize].push((span.start, span.end)));
    let outside = |&task: &usize| {
        let id = schedule.instructions[task];
        program.stage_pass(id).is_none() || program.accumulates(program.instruction(id))
    };
    for task in schedule.tasks.ids().filter(outside) {
        for &stream in schedule.tasks.streams(task) {
            let class = schedule.stream(stream).0;
            busy[class as usize].push((timeline.start[task], timeline.end[task]));
        }
    }
    let step = timeline.makespan();
    let idle =
        |busy: Vec<(u64, u64)>| step - joined(busy).iter().map(|(start, end)| end - start).sum::<u64>();
    let classes = busy.len().max(1) as u64;
    busy.into_iter().map(idle).sum::<u64>() / classes
}
