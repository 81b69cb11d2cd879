//! The progress line of planning: the current stage, or the best cost, bound and gap.
//!
//! Only on a terminal, and only after the first second.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use shardwright_request::show_seconds;
use shardwright_search::{LogEntry, gap};
use std::io::{self, IsTerminal};
use std::time::Duration;

/// The line appears after this time.
const PATIENCE: Duration = Duration::from_secs(1);

/// The line; gone when dropped.
pub struct ProgressLine(ProgressBar);

impl ProgressLine {
    /// A line with its first text.
    pub fn new(doing: &str) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        let bar = match ProgressStyle::with_template("{spinner} {elapsed} {msg}") {
            Ok(style) => bar.with_style(style),
            Err(_) => bar,
        };
        bar.set_message(doing.to_string());
        if io::stderr().is_terminal() {
            let later = bar.clone();
            std::thread::spawn(move || {
                std::thread::sleep(PATIENCE);
                if !later.is_finished() {
                    later.set_draw_target(ProgressDrawTarget::stderr_with_hz(5));
                    later.enable_steady_tick(Duration::from_millis(200));
                }
            });
        }
        Self(bar)
    }

    /// Replaces the text.
    pub fn say(&self, doing: &str) {
        self.0.set_message(doing.to_string());
    }

    /// Prints something else: the line is gone meanwhile.
    pub fn aside<T>(&self, print: impl FnOnce() -> T) -> T {
        self.0.suspend(print)
    }

    /// Shows an improvement.
    pub fn improved(&self, entry: &LogEntry) {
        self.0.set_message(describe(entry));
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

fn describe(entry: &LogEntry) -> String {
    let seconds = |picoseconds: i64| show_seconds(picoseconds as f64 / 1e12);
    let bound = seconds(entry.bound);
    match entry.best {
        // A search on the simulated step proves nothing.
        Some(best) if entry.bound <= 0 => {
            format!("best {} per step (Ctrl-C keeps the best)", seconds(best))
        }
        Some(best) => {
            let gap = gap(best, entry.bound).unwrap_or(0.0) * 100.0;
            format!("best {} per step, bound {bound}, gap {gap:.2}% (Ctrl-C keeps the best)", seconds(best))
        }
        None => format!("no plan yet, bound {bound}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn improvements_are_told_in_seconds_and_percent() {
        let entry = |best| LogEntry { elapsed: PATIENCE, iteration: 1, best, bound: 3_000_000_000 };
        assert_eq!(
            describe(&entry(Some(4_000_000_000))),
            "best 4.00 ms per step, bound 3.00 ms, gap 33.33% (Ctrl-C keeps the best)"
        );
        assert_eq!(describe(&entry(None)), "no plan yet, bound 3.00 ms");
        let unproved = LogEntry { bound: 0, ..entry(Some(4_000_000_000)) };
        assert_eq!(describe(&unproved), "best 4.00 ms per step (Ctrl-C keeps the best)");
    }
}
