//! Measured times of collectives, for machines whose links say little about them: the devices of one computer, which
//! exchange data through its memory.

use crate::spec::{MachineSpec, Problem, check_seconds, problem};
use crate::units::{Bytes, Seconds};
use serde::{Deserialize, Serialize};

/// The most sizes that one collective may be measured at.
const MAX_POINTS: usize = 64;

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Exchange {
    /// All get the sum of what all have.
    AllReduce,
    /// Each gets its part of the sum.
    ReduceScatter,
    /// All get all parts.
    AllGather,
    /// Each sends a different part to each.
    AllToAll,
    /// Every member sends all it has to one other.
    Permute,
}

impl Exchange {
    /// All of them.
    pub const ALL: [Exchange; 5] = [
        Exchange::AllReduce,
        Exchange::ReduceScatter,
        Exchange::AllGather,
        Exchange::AllToAll,
        Exchange::Permute,
    ];

    /// As written in machine files.
    pub fn name(self) -> &'static str {
        match self {
            Exchange::AllReduce => "all-reduce",
            Exchange::ReduceScatter => "reduce-scatter",
            Exchange::AllGather => "all-gather",
            Exchange::AllToAll => "all-to-all",
            Exchange::Permute => "permute",
        }
    }
}

/// How long a collective takes in groups of some size within one level, all groups at once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// The level.
    pub level: String,
    /// What was measured.
    pub collective: Exchange,
    /// How many devices a group has.
    pub members: u32,
    /// By ascending size.
    pub points: Vec<Point>,
}

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Point {
    /// The larger side of what one device holds.
    pub bytes: Bytes,
    /// How long that takes.
    #[serde(with = "crate::units::seconds_text")]
    pub seconds: Seconds,
}

impl Measured {
    /// The time for a size: on the lines between the sizes measured; that of the smallest one below it; in proportion
    /// above the largest one.
    pub fn at(&self, bytes: Bytes) -> Seconds {
        let above = self.points.partition_point(|point| point.bytes <= bytes);
        let size = |bytes: Bytes| bytes.0 as f64;
        Seconds(match (above.checked_sub(1).map(|i| self.points[i]), self.points.get(above)) {
            (None, None) => 0.0,
            (None, Some(first)) => first.seconds.0,
            (Some(last), None) => last.seconds.0 * size(bytes) / size(last.bytes),
            (Some(low), Some(high)) => {
                let share = (size(bytes) - size(low.bytes)) / (size(high.bytes) - size(low.bytes));
                low.seconds.0 + (high.seconds.0 - low.seconds.0) * share
            }
        })
    }

    pub(crate) fn check(&self, i: usize, machine: &MachineSpec) -> Result<(), Problem> {
        let key = |field: &str| format!("measured[{i}].{field}");
        let Some(level) = machine.levels.iter().find(|level| level.name == self.level) else {
            return problem(key("level"), format!("there is no level `{}`", self.level.escape_debug()));
        };
        if self.members < 2 || !level.count.is_multiple_of(self.members) {
            let reason = format!("groups of {} among {} units: must divide them", self.members, level.count);
            return problem(key("members"), reason);
        }
        if self.points.is_empty() || self.points.len() > MAX_POINTS {
            return problem(key("bytes"), format!("{} sizes; must be 1 to {MAX_POINTS}", self.points.len()));
        }
        let any = |wrong: fn(&Point, &Point) -> bool| self.points.windows(2).any(|p| wrong(&p[0], &p[1]));
        if self.points[0].bytes.0 == 0 || any(|a, b| a.bytes >= b.bytes) {
            return problem(key("bytes"), "must be above zero and ascending");
        }
        self.points.iter().try_for_each(|point| check_seconds(key("times"), point.seconds))?;
        if any(|a, b| a.seconds > b.seconds) {
            return problem(key("times"), "larger messages cannot take less time");
        }
        let same = |other: &&Measured| {
            (&other.level, other.collective, other.members) == (&self.level, self.collective, self.members)
        };
        match machine.measured[..i].iter().find(same) {
            None => Ok(()),
            Some(_) => problem(
                key("collective"),
                format!("{} among {} has been stated already", self.collective.name(), self.members),
            ),
        }
    }
}
