//! Which operands of a program's ops a core's caches have forgotten: an op that reads what has just been written takes less time than
//! one that reads weights, or what the forward pass left long ago.

use shardwright_lower::{Instruction, ParallelGraph, ValueId};
use shardwright_machine::{Bytes, DeviceId};

/// Per instruction: whether what a device reads is forgotten, that is, whether it has read or written more than `caches` since it
/// last touched it. Steps follow on each other: this is about the second.
pub fn forgotten(program: &ParallelGraph, device: DeviceId, caches: Bytes) -> Vec<Vec<bool>> {
    let bytes = |value: &ValueId| {
        let held = program.value(*value).local_type(&program.mesh, device);
        held.map_or(0, |ty| ty.bytes())
    };
    let sizes = |instruction: &Instruction| -> u64 {
        instruction.reads.iter().chain(&instruction.writes).map(bytes).fold(0, u64::saturating_add)
    };
    // Bytes touched up to now, and, by value, when it was last touched.
    let (mut now, mut last) = (0_u64, vec![None; program.values.len()]);
    let mut found = Vec::new();
    for _ in 0..2 {
        found.clear();
        for instruction in &program.instructions {
            let old = |value: &ValueId| last[value.index()].is_none_or(|then| now - then > caches.0);
            found.push(instruction.reads.iter().map(old).collect());
            now = now.saturating_add(sizes(instruction));
            for value in instruction.reads.iter().chain(&instruction.writes) {
                last[value.index()] = Some(now);
            }
        }
        for carry in &program.carries {
            last[carry.old.index()] = last[carry.new.index()];
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::run::Opened;
    use crate::planning::PlanningArgs;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn small_caches_remember_only_the_op_before() {
        let args = PlanningArgs { machine: "flat:2".into(), ..PlanningArgs::of("mlp:hidden=8,layers=2", 4) };
        let request = args.open().unwrap();
        let plan = request.plan("data", &args.search(), &AtomicBool::new(false), &|_| {}).unwrap();
        let program = Opened::of_plan(&args, plan).unwrap().program;
        let device = DeviceId(1);
        let all = forgotten(&program, device, Bytes(u64::MAX));
        assert!(all.iter().flatten().all(|forgotten| !forgotten), "everything is touched once a step");
        let small = forgotten(&program, device, Bytes(0));
        for (pair, forgotten) in program.instructions.windows(2).zip(&small[1..]) {
            for (value, &forgotten) in pair[1].reads.iter().zip(forgotten) {
                let just_now = pair[0].reads.contains(value) || pair[0].writes.contains(value);
                assert_eq!(forgotten, !just_now, "{pair:?}");
            }
        }
        assert!(small.iter().flatten().any(|forgotten| !forgotten));
    }
}
