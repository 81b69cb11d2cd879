//! Bells: how devices wait for each other without locks, and how all of them learn that one has failed.
//!
//! Whoever changes something that a device may be waiting for rings its bell. A device that finds nothing to do
//! remembers how often its bell has rung, looks once more, and waits for the next ring: briefly by spinning, where
//! every worker has a core of its own, then asleep.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::{self, Thread};
use std::time::Duration;

/// How often a device looks at its bell before it goes to sleep: some tens of microseconds.
const SPINS: u32 = 4000;

/// The longest sleep. Bells make it unnecessary to wake up by oneself; this bounds what a lost one could cost.
const LONGEST_SLEEP: Duration = Duration::from_millis(50);

/// One device's bell, on cache lines of its own.
#[derive(Default)]
#[repr(align(128))]
pub struct Bell {
    rings: AtomicU32,
    asleep: AtomicBool,
    owner: OnceLock<Thread>,
}

impl Bell {
    /// Makes the calling thread the one that the bell wakes.
    pub fn claim(&self) {
        // A second claim of the same bell would be a bug of the caller; the first stays.
        let _ = self.owner.set(thread::current());
    }

    /// Rings.
    pub fn ring(&self) {
        // With the order in `wait`, either the ring is seen there before sleeping, or `asleep` is seen here.
        self.rings.fetch_add(1, Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst)
            && let Some(owner) = self.owner.get()
        {
            owner.unpark();
        }
    }

    /// How often it has rung.
    pub fn rings(&self) -> u32 {
        self.rings.load(Ordering::Acquire)
    }

    /// Waits until it has rung more often than `seen`, or a short while. Spins only if `crowded` is false.
    pub fn wait(&self, seen: u32, crowded: bool) {
        for _ in 0..if crowded { 0 } else { SPINS } {
            if self.rings() != seen {
                return;
            }
            std::hint::spin_loop();
        }
        self.asleep.store(true, Ordering::SeqCst);
        if self.rings.load(Ordering::SeqCst) == seen {
            thread::park_timeout(LONGEST_SLEEP);
        }
        self.asleep.store(false, Ordering::SeqCst);
    }
}

/// Whether everybody has to stop, and why.
#[derive(Default)]
pub struct Alarm {
    raised: AtomicBool,
    first: Mutex<Option<String>>,
}

impl Alarm {
    /// Stops everybody; the first reason given is the one that counts.
    pub fn raise(&self, reason: impl Into<String>) {
        let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert_with(|| reason.into());
        self.raised.store(true, Ordering::Release);
    }

    /// Whether everybody has to stop.
    pub fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Acquire)
    }

    /// Why, once it was raised.
    pub fn reason(&self) -> Option<String> {
        self.first.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two threads that take turns: every ring has to arrive, whether the other spins or sleeps.
    #[test]
    fn no_ring_is_lost() {
        const TURNS: u32 = if cfg!(miri) { 5 } else { 500 };
        for crowded in [true, false] {
            let bells = [Bell::default(), Bell::default()];
            let turn = AtomicU32::new(0);
            thread::scope(|scope| {
                for me in 0..2u32 {
                    let (bells, turn) = (&bells, &turn);
                    scope.spawn(move || {
                        bells[me as usize].claim();
                        for n in 0..TURNS {
                            loop {
                                let seen = bells[me as usize].rings();
                                if turn.load(Ordering::Acquire) == 2 * n + me {
                                    break;
                                }
                                bells[me as usize].wait(seen, crowded);
                            }
                            turn.fetch_add(1, Ordering::Release);
                            bells[1 - me as usize].ring();
                        }
                    });
                }
            });
            assert_eq!(turn.into_inner(), 2 * TURNS);
        }
    }

    #[test]
    fn the_first_reason_counts() {
        let alarm = Alarm::default();
        assert!(!alarm.is_raised() && alarm.reason().is_none());
        alarm.raise("first");
        alarm.raise("second");
        assert!(alarm.is_raised());
        assert_eq!(alarm.reason().as_deref(), Some("first"));
    }
}
