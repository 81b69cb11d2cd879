//! Ctrl-C: the first one asks the running search to stop and return its best, a second one ends at once.

use std::sync::atomic::{AtomicBool, Ordering};

static STOP: AtomicBool = AtomicBool::new(false);

/// Starts listening, and returns the flag that turns true when the user wants an end.
pub fn flag() -> &'static AtomicBool {
    // A second handler, or a platform without signals, only means that Ctrl-C ends the program.
    let _ = ctrlc::set_handler(|| {
        if STOP.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    });
    &STOP
}
