//! Strategies side by side, as data and as a page: on one machine, over device counts, and over limits of memory.
//!
//! Nothing here searches: whoever has a clock fills in the rows.

use crate::html::write_page;
use serde::Serialize;
use std::io::{self, Write};

/// What `compare --json` prints, and what its page shows.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The model's name.
    pub model: String,
    /// The machine's.
    pub machine: String,
    /// How many devices it has.
    pub devices: u32,
    /// What a device's memory holds.
    pub device_memory_bytes: u64,
    /// Every strategy on the whole machine.
    pub rows: Vec<Row>,
    /// The same on its first devices; empty where nobody asked.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub scaling: Vec<Scale>,
    /// The best plan under several limits of memory, tightest first; empty where nobody asked.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pareto: Vec<MemoryLimitRow>,
    /// What the command line says below its table.
    pub notes: Vec<String>,
}

/// What came of a strategy.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    /// Its name.
    pub solver: &'static str,
    /// The simulated step.
    pub step_seconds: Option<f64>,
    /// How many times as long data parallelism's takes.
    pub speedup_over_data: Option<f64>,
    /// Bytes sent, all devices together.
    pub traffic_bytes: Option<u64>,
    /// The most that a device holds.
    pub peak_memory_bytes: Option<u64>,
    /// Whether that keeps the memory limit; without a limit, whether it fits the usable memory of a device.
    pub fits: Option<bool>,
    /// How long the search took.
    pub search_seconds: f64,
    /// Picoseconds if nothing overlapped.
    pub objective: Option<i64>,
    /// Whether nothing in the strategy's space has a smaller objective.
    pub proved_optimal: bool,
    /// Elements that all devices move by SoyBean's measure, where it can count the plan.
    pub soybean_elements: Option<u64>,
    /// Bytes that all devices are sent by OptCNN's counting: no collectives, weights through a parameter server.
    pub optcnn_bytes: Option<u64>,
    /// Passes over parts of the batch before one update.
    pub micro_batches: Option<u32>,
    /// The policy of recomputation.
    pub recompute: Option<&'static str>,
    /// Why there is no result, where there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// Strategies on some devices of the machine.
#[derive(Clone, Debug, Serialize)]
pub struct Scale {
    /// How many devices.
    pub devices: u32,
    /// Samples per step, where they were asked for.
    pub batch: Option<u64>,
    /// What came of them.
    pub rows: Vec<Row>,
}

/// The best plan under a limit of memory.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryLimitRow {
    /// The most that a device may hold; none without a limit.
    pub memory_limit_bytes: Option<u64>,
    /// Whether no other of the plans is at least as fast and as lean, and better in one of the two.
    pub on_front: bool,
    /// The plan.
    #[serde(flatten)]
    pub row: Row,
}

/// Says of plans under several limits which of them nobody would give up for another.
pub fn mark_front(plans: &mut [MemoryLimitRow]) {
    let place = |plan: &MemoryLimitRow| Some((plan.row.step_seconds?, plan.row.peak_memory_bytes?));
    let places: Vec<Option<(f64, u64)>> = plans.iter().map(place).collect();
    for (at, plan) in plans.iter_mut().enumerate() {
        let beats = |(other, own): (&Option<(f64, u64)>, (f64, u64))| {
            other.is_some_and(|other| other != own && other.0 <= own.0 && other.1 <= own.1)
        };
        plan.on_front = places[at].is_some_and(|own| !places.iter().any(|other| beats((other, own))));
    }
}

impl Comparison {
    /// Writes the page as one HTML file.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        write_page(out, &format!("{} on {}: strategies compared", self.model, self.machine), "", self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_slower_and_fuller_than_another_is_not_on_the_front() {
        let plan = |step: Option<f64>, bytes: u64| MemoryLimitRow {
            memory_limit_bytes: None,
            on_front: false,
            row: Row { step_seconds: step, peak_memory_bytes: step.map(|_| bytes), ..Row::default() },
        };
        let mut plans = [
            plan(Some(3.0), 10),
            plan(Some(2.0), 20),
            plan(Some(2.5), 20),
            plan(None, 0),
            plan(Some(2.0), 20),
        ];
        mark_front(&mut plans);
        assert_eq!(plans.map(|plan| plan.on_front), [true, true, false, false, true]);
    }
}
