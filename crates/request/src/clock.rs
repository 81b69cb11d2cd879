//! The real clock, which the searches of the planner are given.

use shardwright_search::Clock;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// The system's monotonic clock. Its origin is the first use in the process.
#[derive(Debug)]
pub struct WallClock {
    origin: LazyLock<Instant>,
}

static WALL_CLOCK: WallClock = WallClock { origin: LazyLock::new(Instant::now) };

impl WallClock {
    /// The clock of this process: all readings have one origin.
    pub fn global() -> &'static Self {
        &WALL_CLOCK
    }
}

impl Clock for WallClock {
    fn now(&self) -> Duration {
        self.origin.elapsed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardwright_search::{Control, StopReason};

    #[test]
    fn a_deadline_by_the_wall_clock_passes() {
        let control = Control::new().time_limit(WallClock::global(), Duration::from_millis(5));
        assert!(control.remaining().is_some_and(|left| left <= Duration::from_millis(5)));
        std::thread::sleep(Duration::from_millis(6));
        assert_eq!(control.stop(0), Some(StopReason::Deadline));
        assert!(control.elapsed() >= Duration::from_millis(6));
    }
}
