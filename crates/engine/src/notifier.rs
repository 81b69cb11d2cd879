//! Waiting without locks, and stopping all devices once one has failed.
//!
//! A thread that changes something a device may wait for notifies the device. A device without work reads its notification
//! count, checks for work once more, and waits until the count changes. It spins briefly where every worker has its own
//! core, then sleeps.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::{self, Thread};
use std::time::Duration;

/// Number of spins before a device goes to sleep: some tens of microseconds.
const SPINS: u32 = 4000;

/// The longest sleep. Notifications wake a sleeper; this bounds the delay of a lost one.
const LONGEST_SLEEP: Duration = Duration::from_millis(50);

/// The notification count of one device. Aligned so that no two notifiers share a cache line.
#[derive(Default)]
#[repr(align(128))]
pub struct Notifier {
    notifications: AtomicU32,
    asleep: AtomicBool,
    owner: OnceLock<Thread>,
}

impl Notifier {
    /// Makes the calling thread the one that is woken.
    pub fn claim(&self) {
        let first = self.owner.set(thread::current()).is_ok();
        debug_assert!(first, "a notifier is claimed once, by the thread of its device");
    }

    /// Adds a notification and wakes the device.
    pub fn notify(&self) {
        // With the order in `wait`, either the new count is seen there before sleeping, or `asleep` is seen here.
        self.notifications.fetch_add(1, Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst)
            && let Some(owner) = self.owner.get()
        {
            owner.unpark();
        }
    }

    /// Number of notifications so far.
    pub fn notifications(&self) -> u32 {
        self.notifications.load(Ordering::Acquire)
    }

    /// Waits until the count differs from `seen`, for `LONGEST_SLEEP` at most. Spins only if `crowded` is false.
    pub fn wait(&self, seen: u32, crowded: bool) {
        for _ in 0..if crowded { 0 } else { SPINS } {
            if self.notifications() != seen {
                return;
            }
            std::hint::spin_loop();
        }
        self.asleep.store(true, Ordering::SeqCst);
        if self.notifications.load(Ordering::SeqCst) == seen {
            thread::park_timeout(LONGEST_SLEEP);
        }
        self.asleep.store(false, Ordering::SeqCst);
    }
}

/// Tells all devices to stop, and why.
#[derive(Default)]
pub struct StopSignal {
    raised: AtomicBool,
    first: Mutex<Option<String>>,
}

impl StopSignal {
    /// Tells all devices to stop. The first reason is kept.
    pub fn raise(&self, reason: impl Into<String>) {
        let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert_with(|| reason.into());
        self.raised.store(true, Ordering::Release);
    }

    /// Whether all devices have to stop.
    pub fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Acquire)
    }

    /// The first reason, once the signal is raised.
    pub fn reason(&self) -> Option<String> {
        self.first.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two threads take turns: every notification has to arrive, whether the other thread spins or sleeps.
    #[test]
    fn no_notification_is_lost() {
        const TURNS: u32 = if cfg!(miri) { 5 } else { 500 };
        for crowded in [true, false] {
            let notifiers = [Notifier::default(), Notifier::default()];
            let turn = AtomicU32::new(0);
            thread::scope(|scope| {
                for me in 0..2u32 {
                    let (notifiers, turn) = (&notifiers, &turn);
                    scope.spawn(move || {
                        notifiers[me as usize].claim();
                        for n in 0..TURNS {
                            loop {
                                let seen = notifiers[me as usize].notifications();
                                if turn.load(Ordering::Acquire) == 2 * n + me {
                                    break;
                                }
                                notifiers[me as usize].wait(seen, crowded);
                            }
                            turn.fetch_add(1, Ordering::Release);
                            notifiers[1 - me as usize].notify();
                        }
                    });
                }
            });
            assert_eq!(turn.into_inner(), 2 * TURNS);
        }
    }

    #[test]
    fn the_first_reason_counts() {
        let stop = StopSignal::default();
        assert!(!stop.is_raised() && stop.reason().is_none());
        stop.raise("first");
        stop.raise("second");
        assert!(stop.is_raised());
        assert_eq!(stop.reason().as_deref(), Some("first"));
    }
}
