//! The use of a device's time: computing, overlapped communication, exposed communication, waiting.

use crate::{
    schedule::{Schedule, Stream},
    timeline::Timeline,
};

/// A device's time in one step, in picoseconds. Computing, exposed communication and waiting add up to the step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Computing.
    pub busy: u64,
    /// Time with at least one busy port.
    pub communicating: u64,
    /// Time with at least one busy port and no computing.
    pub exposed: u64,
    /// Not computing: exposed communication and waiting.
    pub idle: u64,
}

/// Intervals, sorted and merged where they touch.
pub(crate) fn joined(mut pieces: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    pieces.sort_unstable();
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (start, end) in pieces {
        match joined.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => joined.push((start, end)),
        }
    }
    joined
}

fn total(pieces: &[(u64, u64)]) -> u64 {
    pieces.iter().map(|(start, end)| end - start).sum()
}

/// Total overlap of two lists of intervals.
pub(crate) fn overlap(a: &[(u64, u64)], b: &[(u64, u64)]) -> u64 {
    let (mut i, mut j, mut common) = (0, 0, 0);
    while i < a.len() && j < b.len() {
        let (start, end) = (a[i].0.max(b[j].0), a[i].1.min(b[j].1));
        common += end.saturating_sub(start);
        if a[i].1 < b[j].1 { i += 1 } else { j += 1 }
    }
    common
}

/// The usage of every device class.
pub fn usages(schedule: &Schedule, timeline: &Timeline) -> Vec<Usage> {
    let classes = schedule.classes.len();
    let mut computing: Vec<Vec<(u64, u64)>> = vec![Vec::new(); classes];
    let mut talking = computing.clone();
    for task in schedule.tasks.ids() {
        let piece = (timeline.start[task], timeline.end[task]);
        for &stream in schedule.tasks.streams(task) {
            match schedule.stream(stream) {
                (class, Stream::Compute) => computing[class as usize].push(piece),
                (class, Stream::Port(_)) => talking[class as usize].push(piece),
            }
        }
    }
    let step = timeline.makespan();
    let usage = |(computing, talking)| {
        let (computing, talking) = (joined(computing), joined(talking));
        let (busy, communicating) = (total(&computing), total(&talking));
        let exposed = communicating - overlap(&computing, &talking);
        Usage { busy, communicating, exposed, idle: step - busy }
    };
    computing.into_iter().zip(talking).map(usage).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_joined_and_compared() {
        let pieces = joined(vec![(5, 7), (0, 2), (2, 3), (6, 9)]);
        assert_eq!(pieces, [(0, 3), (5, 9)]);
        assert_eq!(total(&pieces), 7);
        assert_eq!(overlap(&pieces, &[(1, 6), (8, 20)]), 2 + 1 + 1);
    }
}
