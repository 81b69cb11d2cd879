//! Measured times of collectives, for machines whose link parameters predict them badly: devices of one computer that
//! exchange data through its memory.

use crate::spec::{MachineSpec, SpecError, check_seconds, spec_error};
use crate::units::{Bytes, Seconds};
use serde::{Deserialize, Serialize};

/// The most sizes per collective.
const MAX_POINTS: usize = 64;

/// A collective that machine files may have measurements of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CollectiveKind {
    /// Every member gets the sum over all members.
    AllReduce,
    /// Every member gets its part of the sum.
    ReduceScatter,
    /// Every member gets all parts.
    AllGather,
    /// Every member sends a different part to each other.
    AllToAll,
    /// Every member sends all of its data to one other.
    Permute,
}

impl CollectiveKind {
    /// All kinds.
    pub const ALL: [CollectiveKind; 5] = [
        CollectiveKind::AllReduce,
        CollectiveKind::ReduceScatter,
        CollectiveKind::AllGather,
        CollectiveKind::AllToAll,
        CollectiveKind::Permute,
    ];

    /// The name in machine files.
    pub fn name(self) -> &'static str {
        match self {
            CollectiveKind::AllReduce => "all-reduce",
            CollectiveKind::ReduceScatter => "reduce-scatter",
            CollectiveKind::AllGather => "all-gather",
            CollectiveKind::AllToAll => "all-to-all",
            CollectiveKind::Permute => "permute",
        }
    }
}

/// Measured times of a collective in groups of one size within one level, with all groups active at once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CollectiveMeasurement {
    /// The level.
    pub level: String,
    /// The collective.
    pub collective: CollectiveKind,
    /// Devices per group.
    pub members: u32,
    /// By ascending size.
    pub points: Vec<MeasuredTime>,
}

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredTime {
    /// Message size: the larger side on one device.
    pub bytes: Bytes,
    /// Its time.
    #[serde(with = "crate::units::seconds_text")]
    pub seconds: Seconds,
}

impl CollectiveMeasurement {
    /// The time for a message size: interpolated linearly between the measured sizes, constant below the smallest and
    /// proportional to the size above the largest.
    pub fn at(&self, bytes: Bytes) -> Seconds {
        let above = self.points.partition_point(|point| point.bytes <= bytes);
        let size = |bytes: Bytes| bytes.0 as f64;
        Seconds(match (above.checked_sub(1).map(|i| self.points[i]), self.points.get(above)) {
            (None, None) => {
                debug_assert!(false, "a checked measurement has at least one point");
                // Without data the collective must not look free.
                f64::INFINITY
            }
            (None, Some(first)) => first.seconds.0,
            (Some(last), None) => last.seconds.0 * size(bytes) / size(last.bytes),
            (Some(low), Some(high)) => {
                let share = (size(bytes) - size(low.bytes)) / (size(high.bytes) - size(low.bytes));
                low.seconds.0 + (high.seconds.0 - low.seconds.0) * share
            }
        })
    }

    pub(crate) fn check(&self, i: usize, machine: &MachineSpec) -> Result<(), SpecError> {
        let key = |field: &str| format!("measured[{i}].{field}");
        let Some(level) = machine.levels.iter().find(|level| level.name == self.level) else {
            return spec_error(key("level"), format!("there is no level `{}`", self.level.escape_debug()));
        };
        if self.members < 2 || !level.count.is_multiple_of(self.members) {
            let reason = format!("groups of {} among {} units: must divide them", self.members, level.count);
            return spec_error(key("members"), reason);
        }
        if self.points.is_empty() || self.points.len() > MAX_POINTS {
            return spec_error(
                key("bytes"),
                format!("{} sizes; must be 1 to {MAX_POINTS}", self.points.len()),
            );
        }
        let any = |wrong: fn(&MeasuredTime, &MeasuredTime) -> bool| {
            self.points.windows(2).any(|p| wrong(&p[0], &p[1]))
        };
        if self.points[0].bytes.0 == 0 || any(|a, b| a.bytes >= b.bytes) {
            return spec_error(key("bytes"), "must be above zero and ascending");
        }
        self.points.iter().try_for_each(|point| check_seconds(key("times"), point.seconds))?;
        if any(|a, b| a.seconds > b.seconds) {
            return spec_error(key("times"), "larger messages cannot take less time");
        }
        let same = |other: &&CollectiveMeasurement| {
            (&other.level, other.collective, other.members) == (&self.level, self.collective, self.members)
        };
        match machine.measured[..i].iter().find(same) {
            None => Ok(()),
            Some(_) => spec_error(
                key("collective"),
                format!("{} among {} is stated twice", self.collective.name(), self.members),
            ),
        }
    }
}
