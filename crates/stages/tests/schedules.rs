//! Schedules against the closed forms of their papers on equal stages, and against the rules that every schedule keeps.

use proptest::prelude::*;
use shardwright_stages::schedule::{Action, Costs, Pass, SCHEDULES, Schedule, Timeline, simulate};
use std::collections::BTreeMap;

const F: f64 = 2.0;
const B: f64 = 2.0;
const W: f64 = 2.0;

fn equal(schedule: Schedule, devices: u32, micro_batches: u32) -> Timeline {
    let chunks = f64::from(schedule.chunks());
    let costs = Costs::equal((devices * schedule.chunks()) as usize, F / chunks, B / chunks, W / chunks);
    simulate(schedule, devices, micro_batches, &costs).unwrap()
}

/// Bubble and activations in flight at the first device, for several pipelines.
fn check(schedule: Schedule, bubble: impl Fn(f64) -> f64, in_flight: impl Fn(f64, f64) -> f64) {
    for devices in [1, 2, 3, 4, 8] {
        for micro_batches in [2 * devices, 3 * devices, 8 * devices] {
            let timeline = equal(schedule, devices, micro_batches);
            let (p, m) = (f64::from(devices), f64::from(micro_batches));
            let place = format!("{} on {devices} devices, {micro_batches} micro-batches", schedule.name());
            assert!(
                (timeline.bubble() - bubble(p)).abs() < 1e-9,
                "{place}: {} not {}",
                timeline.bubble(),
                bubble(p)
            );
            let held = timeline.in_flight(schedule, 0);
            assert!(
                (held - in_flight(p, m)).abs() < 1e-9,
                "{place}: {held} in flight, not {}",
                in_flight(p, m)
            );
            for busy in &timeline.busy_seconds {
                assert!((busy - m * (F + B + W)).abs() < 1e-9 * busy, "{place}");
            }
        }
    }
}

#[test]
fn gpipe_fills_and_drains_once_and_holds_all_micro_batches() {
    check(Schedule::GPipe, |p| (p - 1.0) * (F + B + W), |_, m| m);
}

#[test]
fn one_forward_one_backward_holds_as_many_micro_batches_as_devices() {
    check(Schedule::OneForwardOneBackward, |p| (p - 1.0) * (F + B + W), |p, _| p);
    let timeline = equal(Schedule::OneForwardOneBackward, 4, 16);
    assert_eq!(timeline.chunks_in_flight, [4, 3, 2, 1]);
    assert_eq!(timeline.seconds, 16.0 * (F + B + W) + 3.0 * (F + B + W));
}

#[test]
fn interleaving_divides_the_bubble_by_the_chunks() {
    for chunks in [1, 2, 3, 5] {
        let v = f64::from(chunks);
        let schedule = Schedule::Interleaved { chunks };
        check(schedule, |p| (p - 1.0) * (F + B + W) / v, |p, _| p * (1.0 + (p - 1.0) / (p * v)));
    }
}

#[test]
fn zb_h1_fills_bubbles_with_weight_gradients_at_the_memory_of_1f1b() {
    // (p-1)(F+B-2W) with B the whole backward pass.
    check(Schedule::ZbH1, |p| (p - 1.0) * (F + B - W), |p, _| p);
}

#[test]
fn zb_v_has_no_bubble_on_equal_passes() {
    check(Schedule::ZbV, |_| 0.0, |p, _| p);
}

#[test]
fn accumulation_has_no_bubble_and_holds_one_micro_batch() {
    let timeline = equal(Schedule::Accumulate, 1, 7);
    assert_eq!(
        (timeline.bubble(), timeline.chunks_in_flight[0], timeline.seconds),
        (0.0, 1, 7.0 * (F + B + W))
    );
}

#[test]
fn dualpipe_v_has_the_bubble_of_its_authors() {
    // (PP/2 - 1)(F&B + B - 3W) on PP/2 devices, where chunks are the stages; activations of PP + 1 chunks. The formula counts the
    // whole step of the device with the most overlapped passes. Devices before it overlap fewer, work longer and wait less.
    for devices in [1u32, 2, 3, 4, 8] {
        for micro_batches in [2 * devices, 3 * devices, 8 * devices] {
            for hidden_share in [0.0, 0.5, 1.0] {
                let stages = 2 * devices as usize;
                let costs = Costs { hidden_share, ..Costs::equal(stages, 1.0, 1.0, 1.0) };
                let timeline = simulate(Schedule::DualPipeV, devices, micro_batches, &costs).unwrap();
                let overlapped = 3.0 - hidden_share;
                let expected = f64::from(devices - 1) * (overlapped + 2.0 - 3.0);
                let least = timeline.busy_seconds.iter().copied().fold(f64::INFINITY, f64::min);
                let idle = timeline.seconds - least;
                let place =
                    format!("{devices} devices, {micro_batches} micro-batches, {hidden_share} hidden");
                assert!((idle - expected).abs() < 1e-9, "{place}: {idle} not {expected}");
                assert!(
                    timeline.bubble() <= expected + 1e-9,
                    "{place}: {} above {expected}",
                    timeline.bubble()
                );
                assert!(timeline.chunks_in_flight.iter().all(|&held| held <= 2 * devices + 1), "{place}");
            }
        }
    }
}

#[test]
fn impossible_counts_are_refused_with_a_reason() {
    let refused = |schedule: Schedule, devices, micro_batches| {
        schedule.orders(devices, micro_batches).unwrap_err().to_string()
    };
    assert!(refused(Schedule::Interleaved { chunks: 2 }, 4, 6).contains("multiple of 4"));
    assert!(refused(Schedule::DualPipeV, 4, 7).contains("at least 8"));
    assert!(refused(Schedule::Accumulate, 2, 7).contains("one group"));
    assert!(refused(Schedule::GPipe, 0, 7).contains("at least one"));
    assert!(refused(Schedule::GPipe, u32::MAX, u32::MAX).contains("more than"));
    let costs = Costs { send: vec![f64::NAN; 2], ..Costs::equal(2, 1.0, 1.0, 1.0) };
    assert!(simulate(Schedule::GPipe, 2, 2, &costs).unwrap_err().to_string().contains("stage 0"));
    assert!(simulate(Schedule::GPipe, 3, 2, &Costs::equal(2, 1.0, 1.0, 1.0)).is_err());
}

/// Start and end of forward pass, input gradients and weight gradients.
type PassTimes = [Option<(f64, f64)>; 3];

/// Seconds of forward pass, input gradients, weight gradients and send.
type StageSeconds = (u32, u32, u32, u32);

/// Every pass of every chunk and micro-batch once, after its inputs, one at a time per device.
fn rules_hold(
    schedule: Schedule,
    devices: u32,
    micro_batches: u32,
    costs: &Costs,
) -> Result<(), TestCaseError> {
    let timeline = simulate(schedule, devices, micro_batches, costs).unwrap();
    let stages = devices * schedule.chunks();
    // (stage, micro-batch) → times of forward pass, input gradients, weight gradients.
    let mut times: BTreeMap<(u32, u32), PassTimes> = BTreeMap::new();
    for (device, actions) in timeline.devices.iter().enumerate() {
        let mut free = 0.0;
        let mut held: i64 = 0;
        let mut most = 0;
        for (index, entry) in actions.iter().enumerate() {
            let Action { pass, chunk, micro_batch } = entry.action;
            prop_assert_eq!(entry.stage, schedule.stage(devices, device as u32, chunk));
            prop_assert_eq!(schedule.place(devices, entry.stage), (device as u32, chunk));
            let time = (entry.start_seconds, entry.end_seconds);
            let is_overlapped = index > 0 && schedule == Schedule::DualPipeV && {
                let before = &actions[index - 1];
                (before.start_seconds, before.end_seconds) == time && before.action.pass == Pass::Forward
            };
            prop_assert!(is_overlapped || entry.start_seconds >= free, "two slots of a device overlap");
            free = entry.end_seconds;
            let slots = times.entry((entry.stage, micro_batch)).or_default();
            let kinds: &[usize] = match pass {
                Pass::Forward => &[0],
                Pass::Backward => &[1, 2],
                Pass::BackwardInput => &[1],
                Pass::BackwardWeight => &[2],
            };
            for &kind in kinds {
                prop_assert!(slots[kind].is_none(), "a pass runs twice");
                slots[kind] = Some(time);
            }
            held += i64::from(pass == Pass::Forward);
            most = most.max(held);
            held -= i64::from(matches!(pass, Pass::Backward | Pass::BackwardWeight));
        }
        prop_assert_eq!(held, 0, "activations are left");
        prop_assert_eq!(most, i64::from(timeline.chunks_in_flight[device]));
        prop_assert!(free <= timeline.seconds);
    }
    for stage in 0..stages {
        for micro_batch in 0..micro_batches {
            let [Some(forward), Some(input), Some(weight)] = times[&(stage, micro_batch)] else {
                return Err(TestCaseError::fail("a pass is missing"));
            };
            prop_assert!(forward.1 <= input.0 && (input.1 <= weight.0 || input == weight));
            if stage > 0 {
                let send = if schedule.place(devices, stage).0 == schedule.place(devices, stage - 1).0 {
                    0.0
                } else {
                    costs.send[stage as usize - 1]
                };
                let [Some(before), Some(after), _] = times[&(stage - 1, micro_batch)] else {
                    return Err(TestCaseError::fail("a pass is missing"));
                };
                prop_assert!(
                    before.1 + send <= forward.0 + 1e-9,
                    "a forward pass starts before its input arrives"
                );
                prop_assert!(
                    input.1 + send <= after.0 + 1e-9,
                    "a backward pass starts before its gradient arrives"
                );
            }
        }
    }
    let slowest = timeline.busy_seconds.iter().copied().fold(0.0, f64::max);
    prop_assert!(timeline.seconds >= slowest - 1e-9);
    Ok(())
}

proptest! {
    #[test]
    fn every_pass_runs_once_after_its_inputs(
        which in 0..SCHEDULES.len(),
        chunks in 1u32..4,
        devices in 1u32..7,
        rounds in 1u32..5,
        more in 0u32..6,
        seconds in prop::collection::vec((1u32..9, 1u32..9, 1u32..9, 0u32..5), 24),
        hidden in 0u32..5,
    ) {
        let schedule = match SCHEDULES[which].1 {
            Schedule::Interleaved { .. } => Schedule::Interleaved { chunks },
            other => other,
        };
        let devices = if schedule == Schedule::Accumulate { 1 } else { devices };
        let micro_batches = match schedule {
            Schedule::Interleaved { .. } => rounds * devices,
            Schedule::DualPipeV => 2 * devices + more,
            _ => rounds + more,
        };
        let stages = (devices * schedule.chunks()) as usize;
        let list = |of: &dyn Fn(&StageSeconds) -> u32| seconds[..stages].iter().map(|s| f64::from(of(s))).collect();
        let costs = Costs {
            forward: list(&|s| s.0),
            backward_input: list(&|s| s.1),
            backward_weight: list(&|s| s.2),
            send: list(&|s| s.3),
            hidden_share: f64::from(hidden) / 4.0,
        };
        rules_hold(schedule, devices, micro_batches, &costs)?;
    }
}
