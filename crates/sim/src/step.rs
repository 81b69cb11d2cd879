//! The step of an assignment: its program, lowered and simulated.

use crate::{
    classes::Classes,
    contention::contend,
    error::SimError,
    passes::{bubble, pass_spans},
    pipelined_products::pipeline_products,
    schedule::{Links, Schedule},
    usage::usages,
};
use shardwright_lower::{InstructionId, LowerOptions, ParallelGraph, Work, lower, lower_with};
use shardwright_machine::Bytes;
use shardwright_plan::{Context, StepTimes};
use shardwright_space::{Assignment, Sharing, assign_layouts};

/// The share of a pipelined step in which a group of devices runs no pass and nothing before or after all passes, on average.
///
/// # Errors
/// As [`simulate_step`].
pub fn simulate_bubble(context: &Context<'_>, assignment: &Assignment) -> Result<f64, SimError> {
    let program = lower(context.graph, &context.resharder, assignment)?;
    let (links, sharing) = (Links::of(context.machine), Sharing::AcrossLayers);
    let [makespan, idle] = repeat(&program, |program| {
        let schedule = schedule(context, assignment, program, Classes::of(program), links, sharing)?;
        let timeline = schedule.simulate();
        let spans = pass_spans(program, &schedule, &timeline);
        Ok([timeline.makespan(), bubble(program, &schedule, &timeline, &spans)])
    })?;
    Ok(idle as f64 / makespan.max(1) as f64)
}

/// The simulated times of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SimulatedStep {
    /// Picoseconds of the whole step.
    pub makespan: u64,
    /// The same in seconds, with computing and exposed communication of the device that computes longest.
    pub times: StepTimes,
}

/// Simulates the step with overlap, as it would run.
///
/// # Errors
/// Where the assignment cannot be lowered, or there are too many tasks.
pub fn simulate_step(context: &Context<'_>, assignment: &Assignment) -> Result<SimulatedStep, SimError> {
    simulate_program(context, assignment, &lower(context.graph, &context.resharder, assignment)?)
}

/// The same for an assignment whose program is known.
///
/// # Errors
/// Where there are too many tasks.
pub fn simulate_program(
    context: &Context<'_>,
    assignment: &Assignment,
    program: &ParallelGraph,
) -> Result<SimulatedStep, SimError> {
    let links = Links::of(context.machine);
    let sharing = Sharing::AcrossLayers;
    let [makespan, busy, exposed] = repeat(program, |program| {
        let schedule = schedule(context, assignment, program, Classes::of(program), links, sharing)?;
        let timeline = schedule.simulate();
        let busiest = usages(&schedule, &timeline).into_iter().max_by_key(|usage| usage.busy);
        debug_assert!(busiest.is_some(), "there is at least one device class");
        let busiest = busiest.unwrap_or_default();
        Ok([timeline.makespan(), busiest.busy, busiest.exposed])
    })?;
    // Further micro-batches may fill the gaps of the first ones, but a device still computes its ops in sequence.
    let makespan = makespan.max(busy);
    let seconds = |picoseconds: u64| picoseconds as f64 / 1e12;
    // In several micro-batches the host's time is inside of the passes.
    let host = if program.body.is_empty() { context.host_seconds() } else { 0.0 };
    let times = StepTimes {
        step_seconds: seconds(makespan).max(host),
        compute_seconds: seconds(busy),
        exposed_comm_seconds: seconds(exposed),
    };
    Ok(SimulatedStep { makespan, times })
}

/// Picoseconds of a program's step at priced times, which is what delta simulation knows: kernels neither wait for the engine's host nor
/// slow down beside collectives.
///
/// # Errors
/// Where there are too many tasks.
pub fn simulate_priced(
    context: &Context<'_>,
    assignment: &Assignment,
    program: &ParallelGraph,
) -> Result<u64, SimError> {
    let (links, sharing) = (Links::of(context.machine), Sharing::AcrossLayers);
    let [makespan, busy] = repeat(program, |program| {
        let schedule = priced_schedule(context, assignment, program, Classes::of(program), links, sharing)?;
        let timeline = schedule.simulate();
        let busy = usages(&schedule, &timeline).iter().map(|usage| usage.busy).max();
        Ok([timeline.makespan(), busy.unwrap_or(0)])
    })?;
    Ok(makespan.max(busy))
}

/// Micro-batches that are simulated; all further ones take as long as the last of these.
pub(crate) const SIMULATED: u32 = 4;

/// The time of a step with `further` periods more, each as long as the last one.
pub(crate) fn with_further(total: u64, fewer: u64, further: u64) -> u64 {
    total + further * total.saturating_sub(fewer)
}

/// Times of a step from those of its first micro-batches: from some micro-batch on, each one adds the same. In a pipeline, as
/// many as there are groups add the same: interleaved schedules run them together.
fn repeat<const N: usize>(
    program: &ParallelGraph,
    times: impl Fn(&ParallelGraph) -> Result<[u64; N], SimError>,
) -> Result<[u64; N], SimError> {
    let count = program.micro_batches.get();
    if program.body.is_empty() {
        return times(program);
    }
    let (simulated, period) = match &program.pipeline {
        None => (SIMULATED, 1),
        Some(pipeline) => {
            let period = pipeline.pipeline.groups(&program.mesh);
            // The others are whole periods.
            let steady = pipeline.steady_copies(&program.mesh);
            (steady + count.saturating_sub(steady) % period, period)
        }
    };
    let mut total = times(&program.unrolled_to(count.min(simulated)))?;
    if count > simulated {
        let fewer = times(&program.unrolled_to(simulated - period))?;
        for (total, fewer) in total.iter_mut().zip(fewer) {
            *total = with_further(*total, fewer, u64::from((count - simulated) / period));
        }
    }
    Ok(total)
}

/// Simulates the step with overlap turned off and transfers shared within layers only: the search's objective, in
/// picoseconds.
///
/// # Errors
/// As [`simulate_step`].
pub fn simulate_objective(context: &Context<'_>, assignment: &Assignment) -> Result<u64, SimError> {
    let sharing = Sharing::WithinLayers;
    let options = LowerOptions { sharing, join_below: Bytes(0) };
    let program = lower_with(context.graph, &context.resharder, assignment, options)?;
    let [makespan] = repeat(&program, |program| {
        let classes = Classes::of(program);
        let schedule = priced_schedule(context, assignment, program, classes, Links::Serial, sharing)?;
        Ok([schedule.simulate().makespan()])
    })?;
    Ok(makespan)
}

/// The step's program, and its tasks with one class per device, for simulations in which devices differ. Transfers on
/// one link wait for each other.
///
/// # Errors
/// As [`simulate_step`].
pub fn schedule_per_device(
    context: &Context<'_>,
    assignment: &Assignment,
) -> Result<(ParallelGraph, Schedule), SimError> {
    let program = lower(context.graph, &context.resharder, assignment)?.unrolled();
    let classes = Classes::each(context.mesh());
    let schedule = schedule(context, assignment, &program, classes, Links::Fifo, Sharing::AcrossLayers)?;
    Ok((program, schedule))
}

/// How much longer computing takes, given seconds of the host, of computing, and of transfers that computing waits for.
fn lateness([host, computing, waiting]: [f64; 3]) -> f64 {
    if computing > 0.0 { ((host - waiting) / computing).max(1.0) } else { 1.0 }
}

/// Kernels by which the host runs ahead of a device: the time that it loses with these is not made up for with the next ones.
const LAUNCHED_AHEAD: u32 = 32;

/// In micro-batches, tasks compute no faster than their host launches kernels: where it needs longer for [`LAUNCHED_AHEAD`] kernels of a
/// device class than the class for their tasks, computing takes as much longer.
fn launch(context: &Context<'_>, program: &ParallelGraph, links: Links, schedule: &mut Schedule) {
    let per_kernel = context.kernel_launch_seconds();
    if program.body.is_empty() || per_kernel == 0.0 {
        return;
    }
    let mut factors = vec![1.0f64; schedule.tasks.len()];
    for class in schedule.classes.ids() {
        // Tasks of the window, kernels launched, and seconds of the host, of computing, and of transfers that computing waits for.
        let (mut window, mut kernels, mut sums) = (Vec::new(), 0, [0.0f64; 3]);
        for at in program.body.clone() {
            let id = InstructionId(at as u32);
            let Some(task) = schedule.task(id, class) else { continue };
            let taken = schedule.tasks.duration(task as usize) as f64 / 1e12;
            match program.instruction(id).work {
                Work::Compute { op, .. } => {
                    let launch = context.launch_seconds(op);
                    kernels += u32::from(launch > 0.0);
                    sums[0] += launch;
                    sums[1] += taken;
                    window.push(task as usize);
                }
                _ => {
                    kernels += u32::from(taken > 0.0);
                    sums[0] += if taken > 0.0 { per_kernel } else { 0.0 };
                    sums[2] += if links == Links::Core { taken } else { 0.0 };
                }
            }
            if kernels >= LAUNCHED_AHEAD {
                let factor = lateness(sums);
                window.drain(..).for_each(|task| factors[task] = factor);
                (kernels, sums) = (0, [0.0; 3]);
            }
        }
        window.into_iter().for_each(|task| factors[task] = lateness(sums));
    }
    schedule.tasks.rescale(|task, duration| (duration as f64 * factors[task]).round() as u64);
}

/// The tasks of a lowered program as its engine runs them: no faster than the host launches kernels in micro-batches, slower
/// beside collectives, and with collectives in parts beside their products. Without overlap they are as priced.
///
/// # Errors
/// Where there are too many tasks.
pub fn schedule(
    context: &Context<'_>,
    assignment: &Assignment,
    program: &ParallelGraph,
    classes: Classes,
    links: Links,
    sharing: Sharing,
) -> Result<Schedule, SimError> {
    let mut schedule = priced_schedule(context, assignment, program, classes, links, sharing)?;
    if links != Links::Serial {
        launch(context, program, links, &mut schedule);
        pipeline_products(context, program, &mut schedule);
        contend(context, program, &mut schedule);
    }
    Ok(schedule)
}

/// The same without a host: as devices would run the tasks if all kernels were launched at once.
///
/// # Errors
/// Where there are too many tasks.
pub fn device_schedule(
    context: &Context<'_>,
    assignment: &Assignment,
    program: &ParallelGraph,
    links: Links,
) -> Result<Schedule, SimError> {
    let (classes, sharing) = (Classes::of(program), Sharing::AcrossLayers);
    let mut schedule = priced_schedule(context, assignment, program, classes, links, sharing)?;
    pipeline_products(context, program, &mut schedule);
    contend(context, program, &mut schedule);
    Ok(schedule)
}

/// The tasks of a lowered program, with the times that the cost model predicts.
///
/// # Errors
/// Where there are too many tasks.
fn priced_schedule(
    context: &Context<'_>,
    assignment: &Assignment,
    program: &ParallelGraph,
    classes: Classes,
    links: Links,
    sharing: Sharing,
) -> Result<Schedule, SimError> {
    let times = context.times()?;
    // Sums of partial results run under other configs than assigned.
    let (graph, shapes) = (context.graph, &context.shapes);
    let layouts = assign_layouts(graph, shapes, &context.transfers, assignment, context.mesh(), sharing);
    Ok(Schedule::new(program, classes, links, context.resharder.comm(), |op, completes| {
        let config = &layouts.configs[op.index()];
        let completion = times.completion(op, config);
        if completes { completion } else { times.compute(op, config) - completion }
    })?)
}
