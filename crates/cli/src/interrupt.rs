//! Ctrl-C: the first one asks the running search to stop and return its best, a second one ends at once; so does the first
//! where nobody searches.

use std::sync::atomic::{AtomicBool, Ordering};

static STOP: AtomicBool = AtomicBool::new(false);
/// Whether somebody looks at the flag.
static SEARCHING: AtomicBool = AtomicBool::new(true);

/// Starts listening, and returns the flag that turns true when the user wants an end.
pub fn flag() -> &'static AtomicBool {
    // A second handler, or a platform without signals, only means that Ctrl-C ends the program.
    let _ = ctrlc::set_handler(|| {
        if STOP.swap(true, Ordering::Relaxed) || !SEARCHING.load(Ordering::Relaxed) {
            std::process::exit(130);
        }
    });
    &STOP
}

/// From now on Ctrl-C ends the program: what is to come cannot be stopped halfway.
pub fn nobody_searches() {
    SEARCHING.store(false, Ordering::Relaxed);
}
