//! Times of a schedule's actions on stages and links.
//!
//! Every device runs its slots in order, each as soon as its inputs have arrived. A link between two devices carries one tensor
//! at a time per direction, in the order of sending.

use super::{Action, Pass, Schedule, ScheduleError, Slot};
use std::collections::BTreeMap;

/// Seconds of one micro-batch, per stage along the layers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Costs {
    /// Forward pass.
    pub forward: Vec<f64>,
    /// Gradients of inputs.
    pub backward_input: Vec<f64>,
    /// Gradients of weights.
    pub backward_weight: Vec<f64>,
    /// Sending a stage's output to the next stage; the last entry is unused. A tensor's gradient takes as long.
    pub send: Vec<f64>,
    /// The part of the shorter pass that overlapping a forward and a backward pass hides: 0 nothing, 1 all.
    pub hidden_share: f64,
}

impl Costs {
    /// Equal stages without sends.
    pub fn equal(stages: usize, forward: f64, backward_input: f64, backward_weight: f64) -> Costs {
        Costs {
            forward: vec![forward; stages],
            backward_input: vec![backward_input; stages],
            backward_weight: vec![backward_weight; stages],
            send: vec![0.0; stages],
            hidden_share: 0.0,
        }
    }

    fn check(&self, stages: usize) -> Result<(), ScheduleError> {
        let named = [
            ("forward pass", &self.forward),
            ("input gradient", &self.backward_input),
            ("weight gradient", &self.backward_weight),
            ("send", &self.send),
        ];
        for (what, list) in named {
            if list.len() != stages {
                return Err(ScheduleError::Stages { costs: list.len(), stages });
            }
            if let Some(stage) = list.iter().position(|seconds| !(0.0..1e30).contains(seconds)) {
                return Err(ScheduleError::Cost { what, stage, seconds: list[stage] });
            }
        }
        if !(0.0..=1.0).contains(&self.hidden_share) {
            return Err(ScheduleError::Count(format!(
                "the hidden share is {}: give 0 to 1",
                self.hidden_share
            )));
        }
        Ok(())
    }

    fn action(&self, pass: Pass, stage: usize) -> f64 {
        match pass {
            Pass::Forward => self.forward[stage],
            Pass::Backward => self.backward_input[stage] + self.backward_weight[stage],
            Pass::BackwardInput => self.backward_input[stage],
            Pass::BackwardWeight => self.backward_weight[stage],
        }
    }
}

/// An action with its time. Overlapping passes share start and end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TimelineAction {
    /// The action.
    pub action: Action,
    /// The stage of its chunk.
    pub stage: u32,
    /// When it starts.
    pub start_seconds: f64,
    /// When it ends.
    pub end_seconds: f64,
}

/// A simulated step.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// Every device's actions, in order.
    pub devices: Vec<Vec<TimelineAction>>,
    /// The end of the last action.
    pub seconds: f64,
    /// Every device's work.
    pub busy_seconds: Vec<f64>,
    /// Idle time between a device's first and last action: its bubble.
    pub bubble_seconds: Vec<f64>,
    /// The most chunks whose activations every device holds at once.
    pub chunks_in_flight: Vec<u32>,
}

impl Timeline {
    /// The largest bubble of a device.
    pub fn bubble(&self) -> f64 {
        self.bubble_seconds.iter().copied().fold(0.0, f64::max)
    }

    /// Activations that a device holds at once, in micro-batches of all its chunks.
    pub fn in_flight(&self, schedule: Schedule, device: usize) -> f64 {
        f64::from(self.chunks_in_flight[device]) / f64::from(schedule.chunks())
    }
}

/// When tensors arrive: (stage, micro-batch) → seconds, for activations and for gradients.
struct Arrivals {
    micro_batches: usize,
    forward: Vec<f64>,
    backward: Vec<f64>,
}

/// Simulates a schedule on `devices` devices.
pub fn simulate(
    schedule: Schedule,
    devices: u32,
    micro_batches: u32,
    costs: &Costs,
) -> Result<Timeline, ScheduleError> {
    let orders = schedule.orders(devices, micro_batches)?;
    let stages = devices as usize * schedule.chunks() as usize;
    costs.check(stages)?;
    let slots = stages * micro_batches as usize;
    let mut arrivals = Arrivals {
        micro_batches: micro_batches as usize,
        forward: vec![f64::NAN; slots],
        backward: vec![f64::NAN; slots],
    };
    // What the first stage reads and what the loss gives the last stage are there from the start.
    arrivals.forward[..micro_batches as usize].fill(0.0);
    let mut link_free: BTreeMap<(u32, u32), f64> = BTreeMap::new();
    let mut timeline = Timeline {
        devices: vec![Vec::new(); devices as usize],
        seconds: 0.0,
        busy_seconds: vec![0.0; devices as usize],
        bubble_seconds: vec![0.0; devices as usize],
        chunks_in_flight: vec![0; devices as usize],
    };
    let mut done = vec![0; devices as usize];
    let mut free = vec![0.0f64; devices as usize];
    loop {
        let mut progressed = false;
        for device in 0..devices {
            let at = device as usize;
            while let Some(&slot) = orders[at].get(done[at]) {
                let stage = |action: Action| schedule.stage(devices, device, action.chunk);
                let ready = slot.actions().map(|action| arrivals.ready(action, stage(action), stages));
                let ready = ready.fold(
                    free[at],
                    |latest, ready| if ready.is_nan() { f64::NAN } else { latest.max(ready) },
                );
                if ready.is_nan() {
                    break;
                }
                let seconds = slot_seconds(slot, costs, &stage);
                let end = ready + seconds;
                for action in slot.actions() {
                    let stage = stage(action);
                    timeline.devices[at].push(TimelineAction {
                        action,
                        stage,
                        start_seconds: ready,
                        end_seconds: end,
                    });
                    arrivals.send(schedule, devices, (stage, action), end, costs, &mut link_free);
                }
                timeline.busy_seconds[at] += seconds;
                free[at] = end;
                done[at] += 1;
                progressed = true;
            }
        }
        if !progressed {
            break;
        }
    }
    if let Some(device) = (0..devices as usize).find(|&device| done[device] < orders[device].len()) {
        return Err(ScheduleError::Deadlock { device, done: done[device] });
    }
    for (device, actions) in timeline.devices.iter().enumerate() {
        let first = actions.first().map_or(0.0, |action| action.start_seconds);
        timeline.bubble_seconds[device] = (free[device] - first - timeline.busy_seconds[device]).max(0.0);
        timeline.chunks_in_flight[device] = most_in_flight(actions);
    }
    timeline.seconds = free.iter().copied().fold(0.0, f64::max);
    Ok(timeline)
}

fn slot_seconds(slot: Slot, costs: &Costs, stage: &dyn Fn(Action) -> u32) -> f64 {
    let of = |action: Action| costs.action(action.pass, stage(action) as usize);
    match slot {
        Slot::Single(action) => of(action),
        Slot::Overlapped(forward, backward) => {
            let (forward, backward) = (of(forward), of(backward));
            forward + backward - costs.hidden_share * forward.min(backward)
        }
    }
}

/// The most chunks between the start of their forward pass and the end of their weight gradients.
fn most_in_flight(actions: &[TimelineAction]) -> u32 {
    let (mut held, mut most) = (0u32, 0);
    let mut index = 0;
    while index < actions.len() {
        // Overlapping passes hold the activations of both.
        let together =
            actions[index..].iter().take_while(|other| other.start_seconds == actions[index].start_seconds);
        let together =
            if actions[index].start_seconds < actions[index].end_seconds { together.count() } else { 1 };
        let slot = &actions[index..index + together];
        held += slot.iter().filter(|entry| entry.action.pass == Pass::Forward).count() as u32;
        most = most.max(held);
        let ends =
            |entry: &&TimelineAction| matches!(entry.action.pass, Pass::Backward | Pass::BackwardWeight);
        held -= slot.iter().filter(ends).count() as u32;
        index += together;
    }
    most
}

impl Arrivals {
    fn at(&self, stage: u32, micro_batch: u32) -> usize {
        stage as usize * self.micro_batches + micro_batch as usize
    }

    /// When an action's inputs are there; not a number while that is unknown.
    fn ready(&self, action: Action, stage: u32, stages: usize) -> f64 {
        let at = self.at(stage, action.micro_batch);
        match action.pass {
            Pass::Forward => self.forward[at],
            // The last stage's own forward pass gives the loss.
            Pass::Backward | Pass::BackwardInput if stage as usize + 1 == stages => 0.0,
            Pass::Backward | Pass::BackwardInput => self.backward[at],
            // The device's order puts it behind its input gradients.
            Pass::BackwardWeight => 0.0,
        }
    }

    /// Sends an action's result to the stage that reads it.
    fn send(
        &mut self,
        schedule: Schedule,
        devices: u32,
        (stage, action): (u32, Action),
        end: f64,
        costs: &Costs,
        link_free: &mut BTreeMap<(u32, u32), f64>,
    ) {
        let stages = devices * schedule.chunks();
        let (reader, seconds) = match action.pass {
            Pass::Forward if stage + 1 < stages => (stage + 1, costs.send[stage as usize]),
            Pass::Backward | Pass::BackwardInput if stage > 0 => (stage - 1, costs.send[stage as usize - 1]),
            _ => return,
        };
        let (from, to) = (schedule.place(devices, stage).0, schedule.place(devices, reader).0);
        let arrival = if from == to {
            end
        } else {
            let free = link_free.entry((from, to)).or_insert(0.0);
            *free = free.max(end) + seconds;
            *free
        };
        let at = self.at(reader, action.micro_batch);
        if action.pass == Pass::Forward {
            self.forward[at] = arrival;
        } else {
            self.backward[at] = arrival;
        }
    }
}
