//! The stealing rule: which device may take a task from which.

/// Work moves only between devices whose slowdowns differ by more than this factor. Smaller differences are noise, and
/// moving work because of noise costs more than it gains.
pub const NOISE_RATIO: f64 = 1.25;

/// Stealing stays on only where a step with it takes at most this fraction of a step without it.
pub const WORTHWHILE_RATIO: f64 = 0.98;

/// Number of ready tasks per victim, first ones first, that are considered for stealing.
pub const WINDOW: usize = 8;

/// How far a device is behind its plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceStatus {
    /// Predicted minus planned end of the device's step; negative where it is early.
    pub lateness: i64,
    /// Measured over planned time of the device's work so far.
    pub slowdown: f64,
}

impl DeviceStatus {
    /// Whether this device, the thief, should take a task from `victim`. `duration` is the task's predicted time on the thief.
    ///
    /// The thief must be clearly faster than the victim ([`NOISE_RATIO`]) and stay less late with the task.
    pub fn should_steal_from(&self, victim: &DeviceStatus, duration: u64) -> bool {
        victim.slowdown > NOISE_RATIO * self.slowdown
            && self.lateness.saturating_add_unsigned(duration) < victim.lateness
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thief_is_clearly_faster_and_stays_less_late() {
        let status = |lateness, slowdown| DeviceStatus { lateness, slowdown };
        assert!(status(0, 1.0).should_steal_from(&status(10, 2.0), 9));
        assert!(!status(0, 1.0).should_steal_from(&status(10, 2.0), 10), "as late then");
        assert!(!status(0, 1.0).should_steal_from(&status(10, 1.2), 9), "noise");
    }
}
