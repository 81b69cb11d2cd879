//! Ctrl-C: the first one stops the running search, which returns its best answer. Further ones within a second of the first
//! count as the first: a held key, or a signal to a whole group of processes, must not lose the answer. A later one ends the
//! program. So does any second one where work follows the search ([`work_follows`]), and the first where no search runs.

use crate::complain;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

static STOP: AtomicBool = AtomicBool::new(false);
/// Whether a search reads the flag.
static SEARCHING: AtomicBool = AtomicBool::new(true);
/// Whether the search's answer is the beginning of other work.
static WORK_FOLLOWS: AtomicBool = AtomicBool::new(false);
/// When the first Ctrl-C came.
static FIRST: OnceLock<Instant> = OnceLock::new();

/// Interrupts within this time of the first are part of it.
const PATIENCE: Duration = Duration::from_secs(1);
/// The exit status of a program that SIGINT ends.
const INTERRUPTED: i32 = 130;

/// Installs the handler, and returns the flag that Ctrl-C sets.
pub fn flag() -> &'static AtomicBool {
    // A second handler, or a platform without signals, only means that Ctrl-C ends the program.
    let _ = ctrlc::set_handler(|| {
        let again = STOP.swap(true, Ordering::Relaxed);
        let first = FIRST.get_or_init(Instant::now);
        let searching = SEARCHING.load(Ordering::Relaxed);
        let follows = again && WORK_FOLLOWS.load(Ordering::Relaxed);
        if first.elapsed() > PATIENCE || follows || !searching {
            let what = if searching { "before its search had an answer" } else { "before it was done" };
            complain(&format_args!("stopped by Ctrl-C {what}"));
            std::process::exit(INTERRUPTED);
        }
    });
    &STOP
}

/// From now on Ctrl-C ends the program: no search follows.
pub fn searches_are_over() {
    SEARCHING.store(false, Ordering::Relaxed);
}

/// The answer of the search is worked on afterwards, for as long as that takes. So nobody who presses Ctrl-C twice waits for it.
pub fn work_follows() {
    WORK_FOLLOWS.store(true, Ordering::Relaxed);
}
