//! Pipeline schedules: in which order every device runs the passes of its micro-batches.
//!
//! A schedule is an order of actions per device ([`Schedule::orders`]); [`simulate`] gives every action its start and end, over
//! stages and links. The orders follow the published ones: GPipe (Huang et al., 2019), 1F1B (PipeDream-flush, DAPPLE), interleaved
//! (Narayanan et al., 2021), ZB-H1 and ZB-V (Qi et al., 2023 and 2024), DualPipe-V (DeepSeek, 2025).

mod orders;
mod simulate;

pub use simulate::{Costs, Timeline, TimelineAction, simulate};

use thiserror::Error;

/// A pipeline schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Schedule {
    /// No pipeline: one device runs forward and backward pass of every micro-batch.
    Accumulate,
    /// All forward passes, then all backward passes.
    GPipe,
    /// One forward, one backward pass, after as many forward passes as devices follow.
    OneForwardOneBackward,
    /// 1F1B on several chunks of layers per device.
    Interleaved {
        /// Chunks per device.
        chunks: u32,
    },
    /// 1F1B with the weights' gradients as passes of their own, which fill bubbles. Keeps 1F1B's memory.
    ZbH1,
    /// Two chunks per device in a V, with the weights' gradients as passes of their own.
    ZbV,
    /// Two chunks per device in a V, where a forward and a backward pass overlap.
    DualPipeV,
}

/// All schedules by name; interleaved ones with two chunks.
pub const SCHEDULES: [(&str, Schedule); 7] = [
    ("accumulate", Schedule::Accumulate),
    ("gpipe", Schedule::GPipe),
    ("1f1b", Schedule::OneForwardOneBackward),
    ("interleaved", Schedule::Interleaved { chunks: 2 }),
    ("zb-h1", Schedule::ZbH1),
    ("zb-v", Schedule::ZbV),
    ("dualpipe-v", Schedule::DualPipeV),
];

/// The passes of a chunk for one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Pass {
    /// The forward pass.
    Forward,
    /// The whole backward pass: gradients of inputs and weights.
    Backward,
    /// The gradients of the inputs alone.
    BackwardInput,
    /// The gradients of the weights alone.
    BackwardWeight,
}

/// One pass of one chunk for one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Action {
    /// The pass.
    pub pass: Pass,
    /// The device's chunk.
    pub chunk: u32,
    /// The micro-batch.
    pub micro_batch: u32,
}

/// What a device does next: one action, or a forward and a backward pass that overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// One action.
    Single(Action),
    /// A forward and a backward pass that overlap.
    Overlapped(Action, Action),
}

impl Slot {
    /// The slot's actions.
    pub fn actions(self) -> impl Iterator<Item = Action> {
        let (first, second) = match self {
            Slot::Single(action) => (action, None),
            Slot::Overlapped(forward, backward) => (forward, Some(backward)),
        };
        [first].into_iter().chain(second)
    }
}

/// Why a schedule cannot run.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum ScheduleError {
    /// A count is out of range.
    #[error("{0}")]
    Count(String),
    /// Costs are not given for every stage.
    #[error("the costs have {costs} stages, and the schedule has {stages}")]
    Stages {
        /// Stages with costs.
        costs: usize,
        /// Stages of the schedule.
        stages: usize,
    },
    /// A cost is negative, infinite or not a number.
    #[error("the {what} of stage {stage} is {seconds} seconds")]
    Cost {
        /// Which cost.
        what: &'static str,
        /// The stage.
        stage: usize,
        /// Its value.
        seconds: f64,
    },
    /// The orders wait for each other.
    #[error("the orders wait for each other: device {device} cannot go on after {done} slots")]
    Deadlock {
        /// A device that waits.
        device: usize,
        /// The slots that it has done.
        done: usize,
    },
}

/// More actions are refused.
const MOST_ACTIONS: u64 = 1 << 26;

impl Schedule {
    /// The name for users.
    pub fn name(self) -> &'static str {
        match self {
            Schedule::Accumulate => "accumulate",
            Schedule::GPipe => "gpipe",
            Schedule::OneForwardOneBackward => "1f1b",
            Schedule::Interleaved { .. } => "interleaved",
            Schedule::ZbH1 => "zb-h1",
            Schedule::ZbV => "zb-v",
            Schedule::DualPipeV => "dualpipe-v",
        }
    }

    /// The schedule of a name, with `chunks` chunks of layers per device where they are free to choose.
    ///
    /// # Errors
    /// Where there is no such schedule, or it has another number of chunks.
    pub fn parse(name: &str, chunks: Option<u32>) -> Result<Self, ScheduleError> {
        let known = SCHEDULES.into_iter().find(|(known, _)| *known == name);
        let Some((_, schedule)) = known else {
            let names = SCHEDULES.map(|(name, _)| name).join(", ");
            return Err(ScheduleError::Count(format!("unknown schedule {name}; choose one of {names}")));
        };
        match (schedule, chunks) {
            (Schedule::Interleaved { .. }, Some(chunks)) if chunks > 0 => {
                Ok(Schedule::Interleaved { chunks })
            }
            (_, Some(chunks)) if chunks != schedule.chunks() => Err(ScheduleError::Count(format!(
                "{name} has {} chunks per device, not {chunks}",
                schedule.chunks()
            ))),
            _ => Ok(schedule),
        }
    }

    /// Chunks of layers per device.
    pub fn chunks(self) -> u32 {
        match self {
            Schedule::Interleaved { chunks } => chunks,
            Schedule::ZbV | Schedule::DualPipeV => 2,
            _ => 1,
        }
    }

    /// The stage that a device's chunk is: stages are numbered along the layers.
    pub fn stage(self, devices: u32, device: u32, chunk: u32) -> u32 {
        match self {
            Schedule::ZbV | Schedule::DualPipeV if chunk == 1 => 2 * devices - 1 - device,
            _ => chunk * devices + device,
        }
    }

    /// The device and chunk of a stage.
    pub fn place(self, devices: u32, stage: u32) -> (u32, u32) {
        match self {
            Schedule::ZbV | Schedule::DualPipeV if stage >= devices => (2 * devices - 1 - stage, 1),
            _ => (stage % devices, stage / devices),
        }
    }

    /// Checks that the schedule exists for these counts.
    pub fn check(self, devices: u32, micro_batches: u32) -> Result<(), ScheduleError> {
        let refuse = |text: String| Err(ScheduleError::Count(text));
        let name = self.name();
        if devices == 0 || micro_batches == 0 || self.chunks() == 0 {
            return refuse(format!("{name} needs at least one device, one chunk and one micro-batch"));
        }
        let actions = u64::from(devices) * u64::from(micro_batches);
        if actions.saturating_mul(3 * u64::from(self.chunks())) > MOST_ACTIONS {
            return refuse(format!(
                "{micro_batches} micro-batches on {devices} devices are more than {MOST_ACTIONS} passes"
            ));
        }
        match self {
            Schedule::Accumulate if devices > 1 => {
                refuse(format!("accumulate runs on one group of devices, not on {devices} stages"))
            }
            Schedule::Interleaved { .. } if !micro_batches.is_multiple_of(devices) => refuse(format!(
                "interleaved needs a multiple of {devices} micro-batches, one per device, not {micro_batches}"
            )),
            Schedule::DualPipeV if micro_batches < 2 * devices => refuse(format!(
                "dualpipe-v on {devices} devices needs at least {} micro-batches, not {micro_batches}",
                2 * devices
            )),
            _ => Ok(()),
        }
    }

    /// Every device's actions in order.
    pub fn orders(self, devices: u32, micro_batches: u32) -> Result<Vec<Vec<Slot>>, ScheduleError> {
        self.check(devices, micro_batches)?;
        let order = |device| match self {
            Schedule::Accumulate => orders::one_forward_one_backward(1, 0, micro_batches),
            Schedule::GPipe => orders::gpipe(micro_batches),
            Schedule::OneForwardOneBackward => {
                orders::one_forward_one_backward(devices, device, micro_batches)
            }
            Schedule::Interleaved { chunks } => orders::interleaved(devices, device, micro_batches, chunks),
            Schedule::ZbH1 => orders::zb_h1(devices, device, micro_batches),
            Schedule::ZbV => orders::zb_v(devices, device, micro_batches),
            Schedule::DualPipeV => orders::dualpipe_v(devices, device, micro_batches),
        };
        Ok((0..devices).map(order).collect())
    }
}
