//! Run-time scheduling assistants: the lateness forecast and the stealing rule that simulator and engine share.
//!
//! The plan gives every task a start and a duration. A device that is slower than planned becomes late; work stealing moves
//! its ready tasks to faster devices. [`Forecast`] predicts each device's lateness from its work so far, and
//! [`DeviceStatus::should_steal_from`] decides whether a thief may take a victim's task. The simulator
//! (`sim/src/assist/`) and the engine (`engine/src/assist.rs`) apply this rule to simulated and to measured times.
//!
//! The crate knows neither programs nor clocks. Times are whole numbers in any one unit: the simulator counts
//! picoseconds, the engine nanoseconds. The paper that proposes such assistants (arXiv 1906.08168) describes them in one
//! sentence of its abstract; the rule is ours.
//!
//! ```
//! use shardwright_assist::{Forecast, PlannedTask};
//!
//! let tasks = [(0, 10), (10, 10)].map(|(start, duration)| PlannedTask { start, duration });
//! let mut slow = Forecast::new(&tasks);
//! slow.begin(0, 10);
//! slow.done(10, 20);
//! // The first task took twice its planned time, so the second is predicted to take 20 as well: the end at 40 is 20 late.
//! let victim = slow.status(20);
//! assert_eq!((victim.lateness, victim.slowdown), (20, 2.0));
//! let idle = Forecast::new(&[]);
//! assert!(idle.status(0).should_steal_from(&victim, 10));
//! ```

mod forecast;
mod rule;

pub use forecast::{Forecast, PlannedTask};
pub use rule::{DeviceStatus, NOISE_RATIO, WINDOW, WORTHWHILE_RATIO};
