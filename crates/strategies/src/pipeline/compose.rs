//! From segments to stages, and from stages to the step of a schedule.

use super::{degrees::UniformPlan, segment_costs::SegmentCost};
use shardwright_stages::schedule::{Costs, Schedule, ScheduleError, Timeline, simulate};
use std::ops::Range;

/// One group of devices of a pipeline.
#[derive(Clone, Debug, PartialEq)]
pub struct StagePrice {
    /// The blocks of each of its chunks: numbers of the first block and past the last.
    pub blocks: Vec<Range<u32>>,
    /// The segments of each of its chunks.
    pub segments: Vec<Range<usize>>,
    /// Devices of the group.
    pub devices: u32,
    /// Seconds of one micro-batch, forwards and backwards.
    pub seconds: f64,
    /// Seconds that the group works in a step, with what is done once.
    pub busy: f64,
    /// Exposed seconds per step of gradient sums, updates and gathers.
    pub once: f64,
    /// The most bytes that a device of it holds.
    pub peak_memory: u64,
    /// The part of these bytes for weights, gradients and state.
    pub fixed_memory: u64,
    /// Micro-batches in flight, in passes of chunks.
    pub in_flight: u32,
}

/// The price of a uniform plan.
#[derive(Clone, Debug, PartialEq)]
pub struct PipelinePrice {
    /// Seconds of the step.
    pub step_seconds: f64,
    /// Seconds that the busiest device computes.
    pub compute_seconds: f64,
    /// The largest idle time of a device between its first and last pass, as a part of the step.
    pub bubble: f64,
    /// The groups of devices, in the order of their first chunks.
    pub stages: Vec<StagePrice>,
    /// The most bytes that a device holds.
    pub peak_memory: u64,
}

/// A model's segments on the mesh of a stage.
pub(super) struct ModelCosts<'m> {
    /// Per segment of the whole model.
    pub segments: Vec<&'m SegmentCost>,
    /// Per segment: its blocks.
    pub blocks: Vec<u32>,
    /// Seconds of sending a boundary of so many bytes from a group of devices to the next.
    pub send: &'m dyn Fn(u64, u32) -> f64,
    /// Whether devices compute nothing while they send and receive.
    pub blocking: bool,
    /// Seconds of summing the gradients of a weight that the first and the last stage share.
    pub tied: f64,
}

/// The segments of every stage along the layers: equal numbers of blocks, embedding and head at the ends. Where blocks do not
/// divide, the first and the last stage have one block less, if they divide then (as torchtitan counts embedding and head).
pub(super) fn even_stages(blocks: &[u32], stages: u32) -> Option<Vec<Range<usize>>> {
    let total: u32 = blocks.iter().sum();
    let plain = total.is_multiple_of(stages);
    if !plain && (stages < 2 || !(total + 2).is_multiple_of(stages) || (total + 2) / stages < 2) {
        return None;
    }
    let wanted = |stage: u32| match plain {
        true => total / stages,
        false => (total + 2) / stages - u32::from(stage == 0 || stage + 1 == stages),
    };
    let (mut ranges, mut start, mut at) = (Vec::new(), 0, 0);
    for stage in 0..stages {
        let mut taken = 0;
        while at < blocks.len() && (taken + blocks[at] <= wanted(stage) || stage + 1 == stages) {
            taken += blocks[at];
            at += 1;
        }
        ranges.push(start..at);
        start = at;
    }
    (start == blocks.len() && ranges.iter().all(|range| !range.is_empty())).then_some(ranges)
}

/// The step of a plan whose stages have these segments, in the order of the layers.
///
/// # Errors
/// Where the schedule does not exist for these counts.
pub(super) fn compose(
    plan: &UniformPlan,
    model: &ModelCosts<'_>,
    ranges: &[Range<usize>],
    devices: u32,
) -> Result<PipelinePrice, ScheduleError> {
    let sum = |range: &Range<usize>, of: &dyn Fn(&SegmentCost) -> f64| -> f64 {
        model.segments[range.clone()].iter().map(|cost| of(cost)).sum()
    };
    let per_stage = |of: &dyn Fn(&SegmentCost) -> f64| -> Vec<f64> {
        ranges.iter().map(|range| sum(range, of)).collect()
    };
    let schedule = plan.schedule;
    let group = |stage: usize| schedule.place(plan.pipeline, stage as u32).0;
    let send = |stage: usize| {
        let boundary = model.segments[ranges[stage].end - 1].boundary_bytes;
        let next = ranges.get(stage + 1).map(|_| group(stage + 1));
        match next {
            Some(next) if next != group(stage) => (model.send)(boundary, group(stage).min(next)),
            _ => 0.0,
        }
    };
    // A pass takes as long as its kernels, or as the host that launches them.
    let times = pass_times(plan, model, ranges);
    let slowed = |stage: usize| {
        let alone = sum(&ranges[stage], &|cost| cost.backward);
        if alone > 0.0 { times[stage][1] / alone } else { 1.0 }
    };
    let weight = per_stage(&|cost| cost.weight_backward);
    let weight: Vec<f64> = weight.iter().enumerate().map(|(stage, weight)| weight * slowed(stage)).collect();
    let sends: Vec<f64> = (0..ranges.len()).map(send).collect();
    // What a pass waits for: the tensor that it reads and the one that it makes, if nothing is computed meanwhile.
    let waits = |stage: usize| match model.blocking {
        true => sends[stage] + stage.checked_sub(1).map_or(0.0, |before| sends[before]),
        false => 0.0,
    };
    let backward = times.iter().map(|[_, backward]| *backward);
    let inputs = backward.zip(&weight).map(|(all, weight)| (all - weight).max(0.0));
    let costs = Costs {
        forward: times.iter().enumerate().map(|(stage, [forward, _])| forward + waits(stage)).collect(),
        backward_input: inputs.enumerate().map(|(stage, inputs)| inputs + waits(stage)).collect(),
        backward_weight: weight,
        send: if model.blocking { vec![0.0; ranges.len()] } else { sends.clone() },
        hidden_share: 0.0,
    };
    let timeline = simulate(schedule, plan.pipeline, plan.micro_batches, &costs)?;
    Ok(price(plan, model, ranges, devices, &times, &timeline))
}

/// Seconds of the forward and the backward pass of every stage.
fn pass_times(plan: &UniformPlan, model: &ModelCosts<'_>, ranges: &[Range<usize>]) -> Vec<[f64; 2]> {
    let time = |range: &Range<usize>| {
        model.segments[range.clone()].iter().fold([0.0; 2], |sum, cost| {
            // The host runs ahead over both passes of a segment.
            let kernels = (cost.forward + cost.backward).max(f64::MIN_POSITIVE);
            let late = ((cost.host[0] + cost.host[1]) / kernels).max(1.0);
            [sum[0] + cost.forward * late, sum[1] + cost.backward * late]
        })
    };
    let mut times: Vec<[f64; 2]> = ranges.iter().map(time).collect();
    // Passes of a group wait for its busiest stream.
    let group = |stage: usize| plan.schedule.place(plan.pipeline, stage as u32).0 as usize;
    let mut of_group = vec![[0.0; 2]; plan.pipeline as usize];
    for (stage, range) in ranges.iter().enumerate() {
        let busy: f64 = model.segments[range.clone()].iter().map(|cost| cost.busy).sum();
        let own = &mut of_group[group(stage)];
        *own = [own[0] + times[stage].iter().sum::<f64>(), own[1] + busy];
    }
    for (stage, time) in times.iter_mut().enumerate() {
        let [passes, busy] = of_group[group(stage)];
        let longer = if passes > 0.0 { (busy / passes).max(1.0) } else { 1.0 };
        *time = time.map(|seconds| seconds * longer);
    }
    times
}

fn price(
    plan: &UniformPlan,
    model: &ModelCosts<'_>,
    ranges: &[Range<usize>],
    devices: u32,
    times: &[[f64; 2]],
    timeline: &Timeline,
) -> PipelinePrice {
    let block_before = |segment: usize| model.blocks[..segment].iter().sum::<u32>();
    let last_group = plan.schedule.place(plan.pipeline, ranges.len() as u32 - 1).0;
    let mut step = 0.0f64;
    let mut stages = Vec::new();
    let mut compute = 0.0f64;
    for group in 0..plan.pipeline {
        let stages_of = || {
            (0..plan.schedule.chunks()).map(|chunk| plan.schedule.stage(plan.pipeline, group, chunk) as usize)
        };
        let chunks: Vec<Range<usize>> = stages_of().map(|stage| ranges[stage].clone()).collect();
        let all = || chunks.iter().flat_map(|range| &model.segments[range.clone()]);
        let tied = if plan.pipeline > 1 && (group == 0 || group == last_group) { model.tied } else { 0.0 };
        let once: f64 = all().map(|cost| cost.once).sum::<f64>() + tied;
        let seconds: f64 = stages_of().flat_map(|stage| times[stage]).sum();
        let end =
            timeline.devices[group as usize].iter().map(|action| action.end_seconds).fold(0.0, f64::max);
        let micro_batches = f64::from(plan.micro_batches);
        let busy: f64 = all().map(|cost| cost.busy * micro_batches + cost.once_busy).sum();
        step = step.max(end + once).max(busy);
        let computing: f64 = all().map(|cost| cost.computing * micro_batches + cost.once_computing).sum();
        compute = compute.max(computing);
        let fixed: u64 = all().map(|cost| cost.memory.fixed).sum();
        let kept = |range: &Range<usize>| -> u64 {
            model.segments[range.clone()].iter().map(|cost| cost.memory.kept).sum()
        };
        let largest = chunks.iter().map(kept).max().unwrap_or(0);
        let in_flight = timeline.chunks_in_flight[group as usize];
        let transient = all().map(|cost| cost.memory.transient).max().unwrap_or(0);
        stages.push(StagePrice {
            blocks: chunks.iter().map(|range| block_before(range.start)..block_before(range.end)).collect(),
            segments: chunks,
            devices,
            seconds,
            busy: timeline.busy_seconds[group as usize] + once,
            once,
            peak_memory: fixed
                .saturating_add(largest.saturating_mul(u64::from(in_flight)))
                .saturating_add(transient),
            fixed_memory: fixed,
            in_flight,
        });
    }
    let peak_memory = stages.iter().map(|stage| stage.peak_memory).max().unwrap_or(0);
    let bubble = if step > 0.0 { timeline.bubble() / step } else { 0.0 };
    PipelinePrice { step_seconds: step, compute_seconds: compute, bubble, stages, peak_memory }
}

/// A time that no schedule of these stages beats: before a group's first pass all earlier groups run one forward pass, and after
/// its last one they run a backward pass; between them it works on all micro-batches.
pub(super) fn step_bound(plan: &UniformPlan, model: &ModelCosts<'_>, ranges: &[Range<usize>]) -> f64 {
    let micro_batches = f64::from(plan.micro_batches);
    let stage = |group: u32, chunk: u32| {
        let range = ranges[plan.schedule.stage(plan.pipeline, group, chunk) as usize].clone();
        &model.segments[range]
    };
    let (mut fill, mut bound, mut busiest) = (0.0, 0.0f64, 0.0f64);
    for group in 0..plan.pipeline {
        let own = || (0..plan.schedule.chunks()).flat_map(|chunk| stage(group, chunk));
        let work: f64 = own().map(|cost| (cost.forward + cost.backward) * micro_batches + cost.once).sum();
        let busy: f64 = own().map(|cost| cost.busy * micro_batches + cost.once_busy).sum();
        bound = bound.max(fill + work);
        busiest = busiest.max(busy);
        // Where gradients of weights are passes of their own, a group may run them during the drain.
        let drains = matches!(
            plan.schedule,
            Schedule::GPipe | Schedule::OneForwardOneBackward | Schedule::Interleaved { .. }
        );
        let pass = |cost: &&SegmentCost| cost.forward + if drains { cost.backward } else { 0.0 };
        fill += stage(group, 0).iter().map(pass).sum::<f64>();
    }
    // Sums of gradients of the last groups may hide behind the drain.
    let once: f64 = (0..plan.pipeline)
        .map(|group| stage(group, 0).iter().map(|cost| cost.once).sum())
        .fold(0.0, f64::max);
    (bound - once).max(busiest)
}

/// The schedule that a trainer uses where none is named.
pub(super) fn usual_schedule(pipeline: u32, chunks: u32) -> Schedule {
    match (pipeline, chunks) {
        (1, _) => Schedule::Accumulate,
        (_, 1) => Schedule::OneForwardOneBackward,
        (_, chunks) => Schedule::Interleaved { chunks },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_divided_evenly_or_less_one_at_the_ends() {
        let blocks = |count: usize| [vec![0], vec![1; count], vec![0]].concat();
        let stages = even_stages(&blocks(8), 4).unwrap();
        assert_eq!(stages, [0..3, 3..5, 5..7, 7..10]);
        let stages = even_stages(&blocks(6), 4).unwrap();
        assert_eq!(stages, [0..2, 2..4, 4..6, 6..8]);
        assert_eq!(even_stages(&blocks(7), 4), None);
        assert_eq!(even_stages(&blocks(3), 1).unwrap().len(), 1);
        assert_eq!(even_stages(&blocks(2), 4), None);
    }
}
