//! Scheduling assistants: what happens if devices that are late may hand over ready work while the step runs.
//!
//! The plan stays as it is, but for layers that find another home between steps ([`homes`]). Every device has a queue of ready work, and a forecast of when it will be through with the step, given
//! how much slower than planned it has been so far ([`Forecast`]). A device that will be through later than planned hands over work
//! that waits in its queue to one that has been faster, compared with the plan, and would still be less late with it, if the work is predicted to be done earlier there, moving included: a decision, the operands that the
//! helper lacks, the results back. A helper goes on with what follows from work that it took over, if nothing else waits for it and
//! that is predicted to be done earlier. As long as all devices are about equally fast, nothing moves. Links are taken up by what is moved like by any other transfer. Only the
//! prediction decides; what work really takes, it takes.
//!
//! Without assistants this is [`crate::Timeline`]'s simulation, to the picosecond, which tests hold it to. The paper that
//! proposes such assistants (arXiv 1906.08168) describes them in one sentence of its abstract: the rule is ours.

mod homes;
mod queues;

use crate::schedule::Schedule;
pub use homes::{Homes, homes, paces};
use queues::{Plan, second_step};
use shardwright_cost::Comm;
use shardwright_lower::ParallelGraph;

/// When work may move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Picoseconds that a decision takes.
    pub latency: u64,
    /// How many of the tasks that wait at a device are looked at; none: nothing ever moves.
    pub window: usize,
    /// Whether operands may move that the idle device lacks; if not, only work whose operands are on both.
    pub fetch: bool,
}

impl Default for Rule {
    fn default() -> Self {
        Self { latency: 2_000_000, window: 8, fetch: true }
    }
}

/// How fast things really are: noise belongs to a task, slowness to whoever computes it.
#[derive(Clone, Copy, Debug)]
pub struct Reality<'r> {
    /// The same tasks with the times that they really take where the plan has them.
    pub schedule: &'r Schedule,
    /// Devices that compute so many times as slowly as planned, as in [`Schedule::slow_down`].
    pub slower: &'r [(u32, f64)],
}

impl Reality<'_> {
    fn slowness(&self, device: u32) -> f64 {
        self.slower.iter().filter(|(slow, _)| *slow == device).map(|(_, factor)| factor).product()
    }

    /// Picoseconds that a task really takes on a device.
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

/// What came of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Assisted {
    /// Picoseconds of the step.
    pub makespan: u64,
    /// Tasks that moved.
    pub moved: usize,
    /// Bytes that moved with them, there and back.
    pub moved_bytes: u64,
}

/// Help stays where steps with it are at most this long, compared with steps without: the runtime tries that out too.
const WORTH: f64 = 0.98;

/// Runs a schedule with assistants. It must have been made for every device by itself ([`crate::Classes::each`]).
///
/// Two steps are simulated, and the second one counts: by then assistants know how fast devices are. Where help does not pay, which
/// the runtime finds out by trying, there is none.
pub fn assist(
    schedule: &Schedule,
    program: &ParallelGraph,
    comm: &Comm,
    rule: Rule,
    reality: Reality<'_>,
) -> Assisted {
    let plan = Plan::new(schedule);
    let steps = |rule: Rule| second_step(schedule, &plan, program, comm, rule, reality);
    let (helped, alone) = (steps(rule), steps(Rule { window: 0, ..rule }));
    if helped.makespan as f64 <= WORTH * alone.makespan as f64 { helped } else { alone }
}
