//! Ctrl-C: the first one stops the running search, which returns its best answer. A later one ends the program, and so does the
//! first where no search runs. Further ones within a second of the first count as the first: a held key, or a signal to a
//! whole group of processes, must not lose the answer.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

static STOP: AtomicBool = AtomicBool::new(false);
/// Whether a search reads the flag.
static SEARCHING: AtomicBool = AtomicBool::new(true);
/// When the first Ctrl-C came.
static FIRST: OnceLock<Instant> = OnceLock::new();

/// Interrupts within this time of the first are part of it.
const PATIENCE: Duration = Duration::from_secs(1);

/// Installs the handler, and returns the flag that Ctrl-C sets.
pub fn flag() -> &'static AtomicBool {
    // A second handler, or a platform without signals, only means that Ctrl-C ends the program.
    let _ = ctrlc::set_handler(|| {
        STOP.store(true, Ordering::Relaxed);
        let first = FIRST.get_or_init(Instant::now);
        if first.elapsed() > PATIENCE || !SEARCHING.load(Ordering::Relaxed) {
            std::process::exit(130);
        }
    });
    &STOP
}

/// From now on Ctrl-C ends the program: no search follows.
pub fn searches_are_over() {
    SEARCHING.store(false, Ordering::Relaxed);
}
