//! The limits of a search and its listener.
//!
//! This crate reads no clock. The caller's `stop` says when the time is up or the user cancelled; time only decides when the
//! search ends, never which stages a finished search returns.

/// The state of a search after an improvement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress<'a> {
    /// The objective of the best stages so far, in seconds.
    pub best_seconds: Option<f64>,
    /// No stages have a smaller objective.
    pub lower_bound_seconds: f64,
    /// The part of the search that found the improvement.
    pub source: &'a str,
}

/// Limits and listener of one search.
#[derive(Clone, Copy)]
pub struct Control<'a> {
    /// Whether the search must end now. It is asked often.
    pub stop: &'a dyn Fn() -> bool,
    /// Called on every improvement of incumbent or bound.
    pub progress: &'a dyn Fn(&Progress<'_>),
    /// Approximate upper limit of the bytes that the search's tables take.
    pub memory_bytes: usize,
}

impl Default for Control<'_> {
    fn default() -> Self {
        Control { stop: &|| false, progress: &|_| {}, memory_bytes: 2 << 30 }
    }
}
