//! The timeline is what the rules say, whatever the tasks.

use proptest::prelude::*;
use shardwright_sim::{Tasks, Timeline};

/// Random tasks on a few streams: duration, streams as bits, and whom to wait for by how far back.
fn tasks() -> impl Strategy<Value = Tasks> {
    let task = (0u64..6, 1u32..16, prop::collection::vec(1usize..12, 0..4));
    prop::collection::vec(task, 0..60).prop_map(|list| {
        let mut tasks = Tasks::default();
        for (at, (duration, streams, back)) in list.into_iter().enumerate() {
            let streams: Vec<u32> = (0..4).filter(|s| streams >> s & 1 == 1).collect();
            let mut waits_for: Vec<u32> =
                back.iter().filter(|&&b| b <= at).map(|b| (at - b) as u32).collect();
            waits_for.sort_unstable();
            waits_for.dedup();
            tasks.push(duration, &streams, &waits_for);
        }
        tasks
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// These rules leave exactly one timeline.
    #[test]
    fn tasks_run_first_come_first_served_without_pause(tasks in tasks()) {
        let line = Timeline::of(&tasks);
        prop_assert_eq!(line.order.len(), tasks.len());
        let key = |task: u32| (line.ready[task as usize], task);
        prop_assert!(line.order.is_sorted_by_key(|&task| key(task)));
        let mut free = vec![0; tasks.stream_count()];
        for &task in &line.order {
            let at = task as usize;
            let ready = tasks.waits_for(at).iter().map(|&p| line.end[p as usize]).max().unwrap_or(0);
            prop_assert_eq!(line.ready[at], ready);
            let streams = tasks.streams(at).iter().map(|&s| free[s as usize]).max().unwrap_or(0);
            prop_assert_eq!(line.start[at], ready.max(streams));
            prop_assert_eq!(line.end[at], line.start[at] + tasks.duration(at));
            tasks.streams(at).iter().for_each(|&s| free[s as usize] = line.end[at]);
        }
    }

    #[test]
    fn the_critical_path_has_no_gaps(tasks in tasks()) {
        let line = Timeline::of(&tasks);
        let path = line.critical_path();
        for pair in path.windows(2) {
            prop_assert_eq!(line.end[pair[0] as usize], line.start[pair[1] as usize]);
        }
        let length: u64 = path.iter().map(|&task| tasks.duration(task as usize)).sum();
        prop_assert_eq!(length, line.makespan());
    }
}
