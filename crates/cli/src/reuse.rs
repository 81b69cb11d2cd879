//! Where a program's ops find what they read: an op that reads what has just been written takes less time than one that reads weights, or
//! what the forward pass left long ago.

use shardwright_lower::{Instruction, ParallelGraph, ValueId};
use shardwright_machine::DeviceId;
use shardwright_runtime::measure::{Caches, Reach};

/// Per instruction: where a device finds what it reads, by how much it has read or written since it last touched it. Steps follow
/// on each other: this is about the second.
pub fn reaches(program: &ParallelGraph, device: DeviceId, caches: Caches) -> Vec<Vec<Reach>> {
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
            let reach = |value: &ValueId| {
                let distance = last[value.index()].map_or(u64::MAX, |then| now - then);
                // What comes to be used lately is pushed out by the rest of itself too.
                caches.reach(distance.saturating_add(bytes(value)))
            };
            found.push(instruction.reads.iter().map(reach).collect());
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
        let all = reaches(&program, device, Caches { own: u64::MAX, share: u64::MAX });
        assert!(all.iter().flatten().all(|&reach| reach == Reach::Own), "everything is touched once a step");
        let none = reaches(&program, device, Caches { own: 0, share: 0 });
        assert!(none.iter().flatten().all(|&reach| reach == Reach::Memory), "nothing is kept");
        // Room for what is read and nothing else: only what has just been touched is there.
        let values = program.values.iter().filter_map(|v| v.local_type(&program.mesh, device));
        let largest = values.map(|ty| ty.bytes()).max().unwrap();
        let small = reaches(&program, device, Caches { own: largest, share: u64::MAX });
        for (pair, reaches) in program.instructions.windows(2).zip(&small[1..]) {
            for (value, &reach) in pair[1].reads.iter().zip(reaches) {
                let just_now = pair[0].reads.contains(value) || pair[0].writes.contains(value);
                assert!(reach == Reach::Own || (reach == Reach::Shared && !just_now), "{pair:?}");
            }
        }
        assert!(small.iter().flatten().any(|&reach| reach == Reach::Shared));
    }
}
