//! Computing beside transfers: collectives run on cores of the device and read its memory, so kernels beside them are slower.
//!
//! A kernel loses a share of its rate in the time in which transfers run beside it. So a task of duration `d` takes `D = d + share *
//! o(D)`, where `o(D)` is the time of its run with a busy port. The timeline decides `o`, and `D` decides the timeline: a few rounds of
//! both come close to the fixed point. Times never fall below those without contention.

use crate::{
    schedule::{Schedule, Stream},
    timeline::Timeline,
    usage::{joined, overlap},
};
use shardwright_lower::{ParallelGraph, Work};
use shardwright_plan::Context;

/// Rounds of timeline and durations. What is left after them is less than the share to this power.
const ROUNDS: u32 = 3;

/// Lengthens compute tasks by the time that transfers on their devices take from them, as the context's engine says.
pub(crate) fn contend(context: &Context<'_>, program: &ParallelGraph, schedule: &mut Schedule) {
    let Some(lost) = context.lost_beside_collectives() else { return };
    let share = |task: usize| match program.instruction(schedule.instructions[task]).work {
        Work::Compute { op, .. } => lost[op.index()],
        _ => 0.0,
    };
    let shares: Vec<f64> = schedule.tasks.ids().map(share).collect();
    let alone: Vec<u64> = schedule.tasks.ids().map(|task| schedule.tasks.duration(task)).collect();
    for _ in 0..ROUNDS {
        let timeline = schedule.simulate();
        let ports = busy_ports(schedule, &timeline);
        let lost: Vec<u64> = schedule
            .tasks
            .ids()
            .map(|task| match schedule.owner(task) {
                Some(class) => {
                    let own = (timeline.start[task], timeline.end[task]);
                    (shares[task] * beside(own, &ports[class as usize]) as f64).round() as u64
                }
                None => 0,
            })
            .collect();
        schedule.tasks.rescale(|task, _| alone[task] + lost[task]);
    }
}

/// Per class: the times with a busy port, sorted and disjoint.
fn busy_ports(schedule: &Schedule, timeline: &Timeline) -> Vec<Vec<(u64, u64)>> {
    let mut ports = vec![Vec::new(); schedule.classes.len()];
    for task in schedule.tasks.ids() {
        let piece = (timeline.start[task], timeline.end[task]);
        for &stream in schedule.tasks.streams(task) {
            if let (class, Stream::Port(_)) = schedule.stream(stream) {
                ports[class as usize].push(piece);
            }
        }
    }
    ports.into_iter().map(joined).collect()
}

/// How long transfers run beside a task.
fn beside(own: (u64, u64), ports: &[(u64, u64)]) -> u64 {
    let first = ports.partition_point(|port| port.1 <= own.0);
    let after = first + ports[first..].partition_point(|port| port.0 < own.1);
    overlap(&[own], &ports[first..after])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_time_beside_transfers_counts() {
        let ports = [(0, 10), (20, 30), (50, 60)];
        assert_eq!(beside((5, 25), &ports), 5 + 5);
        assert_eq!(beside((30, 50), &ports), 0);
        assert_eq!(beside((0, 100), &ports), 30);
        assert_eq!(beside((22, 28), &ports), 6);
    }
}
