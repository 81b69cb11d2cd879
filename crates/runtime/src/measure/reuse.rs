//! Reuse distances of a program's operands: which cache an op finds each operand in.
//!
//! An op that reads a value written just before takes less time than one that reads weights, or activations of a forward pass
//! long ago. The reuse distance of an operand is the number of bytes that the device has touched since it last touched the
//! operand; [`Caches::reach`] tells the cache that still holds it.

use super::caches::{Caches, Reach};
use shardwright_lower::{Instruction, ParallelGraph, ValueId};
use shardwright_machine::DeviceId;

/// Per instruction and operand: where the device finds the operand. Steps follow on each other; these are the distances of the
/// second step.
pub fn reaches(program: &ParallelGraph, device: DeviceId, caches: Caches) -> Vec<Vec<Reach>> {
    // A device without a block of a value touches no bytes of it.
    let bytes = |value: &ValueId| {
        let block = program.value(*value).local_type(&program.mesh, device);
        block.map_or(0, |ty| ty.bytes())
    };
    let touched = |instruction: &Instruction| -> u64 {
        instruction.reads.iter().chain(&instruction.writes).map(bytes).fold(0, u64::saturating_add)
    };
    // Bytes touched up to now, and per value the count at its last use.
    let (mut now, mut last_use) = (0_u64, vec![None; program.values.len()]);
    let mut reaches = Vec::new();
    for _ in 0..2 {
        reaches.clear();
        for instruction in &program.instructions {
            let reach = |value: &ValueId| {
                let distance = last_use[value.index()].map_or(u64::MAX, |then| now - then);
                // A value larger than the cache evicts its own beginning.
                caches.reach(distance.saturating_add(bytes(value)))
            };
            reaches.push(instruction.reads.iter().map(reach).collect());
            now = now.saturating_add(touched(instruction));
            for value in instruction.reads.iter().chain(&instruction.writes) {
                last_use[value.index()] = Some(now);
            }
        }
        for carry in &program.carries {
            last_use[carry.old.index()] = last_use[carry.new.index()];
        }
    }
    reaches
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardwright_lower::lower;
    use shardwright_machine::builtin;
    use shardwright_plan::Context;
    use shardwright_strategies::recipes::DATA;
    use shardwright_zoo::{BuildOptions, build};

    #[test]
    fn small_caches_remember_only_the_op_before() {
        let options = BuildOptions { batch: Some(4), ..BuildOptions::default() };
        let graph = build("mlp:hidden=8,layers=2", &options).unwrap();
        let machine = builtin("flat:2").unwrap();
        let context = Context::new(&graph, &machine, None, machine.mesh().clone(), true).unwrap();
        let program = lower(&graph, &context.resharder, &DATA.assignment(&context)).unwrap();
        let device = DeviceId(1);
        let all = reaches(&program, device, Caches { own: u64::MAX, share: u64::MAX });
        assert!(all.iter().flatten().all(|&reach| reach == Reach::Own), "everything is touched once a step");
        let none = reaches(&program, device, Caches { own: 0, share: 0 });
        assert!(none.iter().flatten().all(|&reach| reach == Reach::Memory), "nothing is kept");
        // Room for the operand and nothing else: only values that were touched just before are there.
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
