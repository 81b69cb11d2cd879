//! Scheduling assistants: simulates late devices whose ready tasks other devices steal while the step runs.
//!
//! The plan stays as it is. Every device has a queue of ready tasks and a [`Forecast`](shardwright_assist::Forecast) of
//! its lateness. A late device hands over a queued task to a thief under two conditions. The shared rule allows it
//! ([`DeviceStatus::should_steal_from`](shardwright_assist::DeviceStatus::should_steal_from)), and the task is
//! predicted to finish earlier there. The prediction includes the decision, the operands that the thief lacks, and the
//! results sent back. The thief also runs the successors of a stolen task if its queue is empty and they are predicted
//! to finish earlier. While all devices are about equally fast, no task moves.
//!
//! Moved bytes occupy links like any other transfer. Only predictions decide; the simulated durations are the actual ones.
//! Without stealing this is [`crate::Timeline`]'s simulation to the picosecond, which tests check. The paper that
//! proposes such assistants (arXiv 1906.08168) describes them in one sentence of its abstract; the rule is ours.

mod queues;

use crate::schedule::Schedule;
use queues::{Plan, second_step};
use shardwright_assist::{WINDOW, WORTHWHILE_RATIO};
use shardwright_cost::Comm;
use shardwright_lower::ParallelGraph;

/// The rule of stealing: which tasks may be stolen, and the cost of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StealRule {
    /// Picoseconds that a decision takes.
    pub latency: u64,
    /// Number of queued tasks per device that are considered; 0 turns stealing off.
    pub window: usize,
    /// Whether operands that the thief lacks may be sent to it. Otherwise only tasks with operands on both devices move.
    pub fetch: bool,
}

impl Default for StealRule {
    fn default() -> Self {
        Self { latency: 2_000_000, window: WINDOW, fetch: true }
    }
}

/// The actual durations of tasks. Noise belongs to a task, slowness to the device that runs it.
#[derive(Clone, Copy, Debug)]
pub struct Reality<'r> {
    /// The planned tasks with their actual durations on the planned devices.
    pub schedule: &'r Schedule,
    /// Slow devices, each with its actual over planned time, as in [`Schedule::slow_down`].
    pub slower: &'r [(u32, f64)],
}

impl Reality<'_> {
    fn slowness(&self, device: u32) -> f64 {
        self.slower.iter().filter(|(slow, _)| *slow == device).map(|(_, factor)| factor).product()
    }

    /// Picoseconds that a task actually takes on a device.
    fn duration(&self, task: usize, device: u32) -> u64 {
        let own = self.schedule.tasks.duration(task);
        match self.schedule.owner(task) {
            Some(owner) if owner != device => {
                (own as f64 * self.slowness(device) / self.slowness(owner)).round() as u64
            }
            _ => own,
        }
    }
}

/// A simulated step with assistants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AssistOutcome {
    /// Picoseconds of the step.
    pub makespan: u64,
    /// Number of stolen tasks.
    pub moved: usize,
    /// Bytes sent for them: operands there and results back.
    pub moved_bytes: u64,
}

/// Runs a schedule with assistants. It must have one class per device ([`crate::Classes::each`]).
///
/// Two steps are simulated and the second is returned: by then the forecasts know each device's slowdown. Stealing is left
/// out where it does not shorten the step by [`WORTHWHILE_RATIO`]; the engine finds that out by trial steps.
pub fn assist(
    schedule: &Schedule,
    program: &ParallelGraph,
    comm: &Comm,
    rule: StealRule,
    reality: Reality<'_>,
) -> AssistOutcome {
    let plan = Plan::new(schedule);
    let steps = |rule: StealRule| second_step(schedule, &plan, program, comm, rule, reality);
    let (helped, alone) = (steps(rule), steps(StealRule { window: 0, ..rule }));
    if helped.makespan as f64 <= WORTHWHILE_RATIO * alone.makespan as f64 { helped } else { alone }
}
