//! Bands of a simulated step: when a device runs the forward, backward, recompute and update ops of each micro-batch.

use crate::{
    schedule::{Schedule, Stream},
    timeline::Timeline,
};
use shardwright_graph::{Graph, OpId, Phase};
use shardwright_lower::{ParallelGraph, Work};

/// The part of the step that an op belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pass {
    /// Forward ops.
    Forward,
    /// Backward ops.
    Backward,
    /// Forward ops that the backward pass runs again.
    Recompute,
    /// Updates of weights.
    Update,
}

impl Pass {
    /// The pass of an op.
    pub fn of(graph: &Graph, op: OpId) -> Self {
        let node = graph.node(op);
        match node.phase {
            _ if node.recomputes.is_some() => Self::Recompute,
            Phase::Forward => Self::Forward,
            Phase::Backward => Self::Backward,
            Phase::Update => Self::Update,
        }
    }

    /// The name, for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Recompute => "recompute",
            Self::Update => "update",
        }
    }
}

/// A time in which a device computes ops of one pass of one micro-batch only, or nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Band {
    /// The micro-batch; 0 is the first. Updates belong to none.
    pub micro_batch: Option<u32>,
    /// The pass.
    pub pass: Pass,
    /// Picoseconds from the step's start to the first op.
    pub start: u64,
    /// The end of the last op.
    pub end: u64,
}

/// The bands of a device class, in the order of time. Sums of gradients are in none: each is added to when its gradient has
/// arrived, which may be in the next micro-batch.
pub fn bands(
    graph: &Graph,
    program: &ParallelGraph,
    schedule: &Schedule,
    timeline: &Timeline,
    class: u32,
) -> Vec<Band> {
    let mut computed: Vec<Band> = Vec::new();
    for task in schedule.tasks.ids() {
        let id = schedule.instructions[task];
        let Work::Compute { op, .. } = program.instruction(id).work else { continue };
        let own = |&stream: &u32| schedule.stream(stream) == (class, Stream::Compute);
        let accumulates = program.accumulates(program.instruction(id));
        if accumulates || schedule.tasks.duration(task) == 0 || !schedule.tasks.streams(task).iter().any(own)
        {
            continue;
        }
        let pass = Pass::of(graph, op);
        let micro_batch = (pass != Pass::Update).then(|| program.micro_batch_of(id));
        computed.push(Band { micro_batch, pass, start: timeline.start[task], end: timeline.end[task] });
    }
    computed.sort_by_key(|band| band.start);
    let mut bands: Vec<Band> = Vec::new();
    for band in computed {
        match bands.last_mut().filter(|last| (last.pass, last.micro_batch) == (band.pass, band.micro_batch)) {
            Some(last) => last.end = band.end,
            None => bands.push(band),
        }
    }
    bands
}
