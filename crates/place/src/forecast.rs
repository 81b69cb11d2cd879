//! When a device will be through with its part of the step, given how it has gone so far.
//!
//! The plan says how long everything takes and when a device waits. A device that is slower than planned will be through
//! later: what it has yet to do takes as many times as long as what it has done, and its waits stay. Schedulers that move
//! work at run time compare such forecasts: only who is later than planned has work to give away.
//!
//! Times may be counted in any unit; the simulator counts picoseconds, the runtime nanoseconds.

/// How much slower than another a device has to be, compared with the plan, for work to move from it to the other: less is
/// noise, and moving work because of noise costs more than it gains.
pub const TOLERATED: f64 = 1.25;

/// How a device stands at some time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Standing {
    /// By how much it will be through later than planned.
    pub lateness: i64,
    /// How many times as long as planned its work has taken.
    pub pace: f64,
}

impl Standing {
    /// Whether it should take over work of one that is late, which takes it so long: it has been clearly faster, and would
    /// still be less late.
    pub fn should_help(&self, late: &Standing, takes: u64) -> bool {
        late.pace > TOLERATED * self.pace && self.lateness.saturating_add_unsigned(takes) < late.lateness
    }
}

/// A piece of a device's work as planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planned {
    /// When it starts.
    pub start: u64,
    /// How long it takes.
    pub duration: u64,
}

/// What is known of one device's step.
#[derive(Clone, Debug)]
pub struct Forecast {
    /// Per piece, in the order planned: how long the device waits from its start to the end of the step.
    waits: Vec<u64>,
    /// Per piece: whether it was begun, here or elsewhere.
    begun: Vec<bool>,
    /// The first that was not.
    next: usize,
    /// When the device is through as planned.
    through: u64,
    /// How long what it has yet to begin was planned to take.
    ahead: u64,
    /// How long its work so far was planned to take, and took.
    pace: (u64, u64),
}

impl Forecast {
    /// Of a device that does these pieces, in the order of their starts.
    pub fn new(pieces: &[Planned]) -> Self {
        let through = pieces.iter().map(|piece| piece.start + piece.duration).max().unwrap_or(0);
        let mut waits = vec![0; pieces.len() + 1];
        let mut ahead = 0u64;
        for (at, piece) in pieces.iter().enumerate().rev() {
            ahead += piece.duration;
            waits[at] = through.saturating_sub(piece.start).saturating_sub(ahead);
        }
        Self { waits, begun: vec![false; pieces.len()], next: 0, through, ahead, pace: (0, 0) }
    }

    /// The next step begins; how fast the device is stays known, but what is long ago counts less.
    pub fn restart(&mut self, pieces: &[Planned]) {
        let kept = |sum: u64| sum - sum / 8;
        *self = Self { pace: (kept(self.pace.0), kept(self.pace.1)), ..Self::new(pieces) };
    }

    /// A piece of the device's own work was begun, wherever.
    pub fn begin(&mut self, piece: usize, planned: u64) {
        self.ahead -= planned;
        self.begun[piece] = true;
        while self.begun.get(self.next) == Some(&true) {
            self.next += 1;
        }
    }

    /// Work of others has been promised to this device.
    pub fn promise(&mut self, planned: u64) {
        self.ahead += planned;
    }

    /// Promised work was begun.
    pub fn redeem(&mut self, planned: u64) {
        self.ahead -= planned;
    }

    /// Work that was planned to take so long took so long here.
    pub fn done(&mut self, planned: u64, took: u64) {
        self.pace = (self.pace.0 + planned, self.pace.1 + took);
    }

    /// How many times as long as planned work has taken here.
    fn pace(&self) -> f64 {
        if self.pace.0 == 0 { 1.0 } else { self.pace.1 as f64 / self.pace.0 as f64 }
    }

    /// How long work will take here that was planned to take so long.
    pub fn scaled(&self, planned: u64) -> u64 {
        (planned as f64 * self.pace()) as u64
    }

    /// How the device stands, if it has nothing else to do from some time on.
    pub fn standing(&self, free: u64) -> Standing {
        Standing { lateness: self.lateness(free), pace: self.pace() }
    }

    fn lateness(&self, free: u64) -> i64 {
        let through = free.saturating_add(self.scaled(self.ahead)).saturating_add(self.waits[self.next]);
        (i128::from(through) - i128::from(self.through)) as i64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_keeps_to_the_plan_is_not_late_and_who_is_slow_will_be() {
        let pieces = [(0, 10), (10, 10), (30, 5)].map(|(start, duration)| Planned { start, duration });
        let mut device = Forecast::new(&pieces);
        assert_eq!(device.lateness(0), 0);
        device.begin(0, 10);
        device.done(10, 10);
        assert_eq!(device.lateness(10), 0, "waits are part of the plan");
        device.begin(1, 10);
        // The second piece took three times as long: the first two took twice as long as planned, and so will the last.
        device.done(10, 30);
        assert_eq!(device.scaled(5), 10);
        assert_eq!(device.lateness(40), 40 + 10 - 35);
        device.promise(3);
        assert_eq!(device.lateness(40), 40 + 16 - 35);
        device.redeem(3);
        device.begin(2, 5);
        assert_eq!(device.lateness(50), 15);
        device.restart(&pieces);
        assert!(device.lateness(0).abs_diff(50 + 10 - 35) <= 2, "the pace stays known, up to rounding");
        let standing = |lateness, pace| Standing { lateness, pace };
        assert!(standing(0, 1.0).should_help(&standing(10, 2.0), 9));
        assert!(!standing(0, 1.0).should_help(&standing(10, 2.0), 10), "as late then");
        assert!(!standing(0, 1.0).should_help(&standing(10, 1.2), 9), "noise");
    }
}
