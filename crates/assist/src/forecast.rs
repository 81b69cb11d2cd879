//! Predicts when a device finishes its step, from the plan and the device's work so far.
//!
//! A device that has been slower than planned will finish later: its remaining work is predicted to take its slowdown times
//! the planned time, while its planned waits stay as they are. Work stealing compares these predictions: only a device
//! that will be late has work to give away.

use crate::rule::DeviceStatus;

/// A task of a device as the plan has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedTask {
    /// When it starts.
    pub start: u64,
    /// How long it takes.
    pub duration: u64,
}

/// The predicted end of one device's step.
#[derive(Clone, Debug)]
pub struct Forecast {
    /// Per task, in planned order: how long the device waits from the task's start to the end of the step.
    waits: Vec<u64>,
    /// Per task: whether it has begun, here or on a thief.
    begun: Vec<bool>,
    /// The first task that has not begun.
    next: usize,
    /// The planned end of the device's step.
    planned_end: u64,
    /// Planned time of all tasks that have not begun, promised ones included.
    ahead: u64,
    /// Planned and measured time of the device's work so far.
    work: (u64, u64),
}

impl Forecast {
    /// The forecast of a device with these tasks, in the order of their starts.
    pub fn new(tasks: &[PlannedTask]) -> Self {
        let planned_end = tasks.iter().map(|task| task.start + task.duration).max().unwrap_or(0);
        let mut waits = vec![0; tasks.len() + 1];
        let mut ahead = 0u64;
        for (at, task) in tasks.iter().enumerate().rev() {
            ahead += task.duration;
            waits[at] = planned_end.saturating_sub(task.start).saturating_sub(ahead);
        }
        Self { waits, begun: vec![false; tasks.len()], next: 0, planned_end, ahead, work: (0, 0) }
    }

    /// Begins the next step. The slowdown carries over; each step multiplies the weight of older work by 7/8.
    pub fn restart(&mut self, tasks: &[PlannedTask]) {
        let decay = |sum: u64| sum - sum / 8;
        *self = Self { work: (decay(self.work.0), decay(self.work.1)), ..Self::new(tasks) };
    }

    /// Records that one of the device's tasks has begun, here or on a thief.
    pub fn begin(&mut self, task: usize, planned: u64) {
        self.ahead -= planned;
        self.begun[task] = true;
        while self.begun.get(self.next) == Some(&true) {
            self.next += 1;
        }
    }

    /// Records that the device will run another device's task of this planned time.
    pub fn promise(&mut self, planned: u64) {
        self.ahead += planned;
    }

    /// Records that a promised task has begun.
    pub fn redeem(&mut self, planned: u64) {
        self.ahead -= planned;
    }

    /// Records a finished task by its planned and measured time.
    pub fn done(&mut self, planned: u64, measured: u64) {
        self.work = (self.work.0 + planned, self.work.1 + measured);
    }

    /// Measured over planned time of the work so far; 1 before any work is done.
    fn slowdown(&self) -> f64 {
        if self.work.0 == 0 { 1.0 } else { self.work.1 as f64 / self.work.0 as f64 }
    }

    /// The predicted time on this device of work with this planned time.
    pub fn scaled(&self, planned: u64) -> u64 {
        (planned as f64 * self.slowdown()) as u64
    }

    /// The device's status if its current task ends at `free`.
    pub fn status(&self, free: u64) -> DeviceStatus {
        DeviceStatus { lateness: self.lateness(free), slowdown: self.slowdown() }
    }

    fn lateness(&self, free: u64) -> i64 {
        let end = free.saturating_add(self.scaled(self.ahead)).saturating_add(self.waits[self.next]);
        (i128::from(end) - i128::from(self.planned_end)) as i64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_keeps_to_the_plan_is_not_late_and_a_slow_one_will_be() {
        let tasks = [(0, 10), (10, 10), (30, 5)].map(|(start, duration)| PlannedTask { start, duration });
        let mut device = Forecast::new(&tasks);
        assert_eq!(device.lateness(0), 0);
        device.begin(0, 10);
        device.done(10, 10);
        assert_eq!(device.lateness(10), 0, "waits are part of the plan");
        device.begin(1, 10);
        // The second task took three times its planned time: the slowdown of both is 2, and so is the last one's predicted.
        device.done(10, 30);
        assert_eq!(device.scaled(5), 10);
        assert_eq!(device.lateness(40), 40 + 10 - 35);
        device.promise(3);
        assert_eq!(device.lateness(40), 40 + 16 - 35);
        device.redeem(3);
        device.begin(2, 5);
        assert_eq!(device.lateness(50), 15);
        device.restart(&tasks);
        assert!(device.lateness(0).abs_diff(50 + 10 - 35) <= 2, "the slowdown carries over, up to rounding");
    }
}
