//! Models under random configs, tied to layers or untied, with pins and without: the engine gives the bits of the
//! reference executor, also where one device is slow and others steal its tasks. The reference executor is compared with the serial
//! program in the runtime's tests.

mod random_plans;

use random_plans::{Random, configs};
use shardwright_assist::PlannedTask;
use shardwright_cost::Resharder;
use shardwright_engine::{Options, PlannedSchedule, run};
use shardwright_graph::{OpId, Optimizer, Phase, micro_batch_counts, microbatch, remat};
use shardwright_lower::{ParallelGraph, lower};
use shardwright_machine::builtin;
use shardwright_runtime::Reference;
use shardwright_space::{Assignment, AxisUse, OpShapes};
use shardwright_zoo::{BuildOptions, build};
use std::num::NonZeroU32;

const OPTIONS: Options<'static> =
    Options { given: &[], seed: 11, steps: 8, trace: false, finals: true, slow: &[], assist: None };

/// A planned schedule in which every task takes a microsecond.
fn guide(program: &ParallelGraph) -> PlannedSchedule {
    let planned = |at: u64| Some(PlannedTask { start: at * 1000, duration: 1000 });
    let of_device = |_| (0..program.instructions.len() as u64).map(planned).collect();
    PlannedSchedule(program.devices().map(of_device).collect())
}

#[test]
fn random_configs_give_the_reference_executors_bits() {
    let models = [
        "mlp:batch=8,input=12,hidden=8,layers=2,classes=6",
        "lenet5:batch=4,image=12,width=0.5,classes=4",
        "gpt:batch=4,layers=1,hidden=8,heads=4,vocab=12,seq=4",
        "moe:batch=2,layers=1,hidden=8,heads=2,kv_heads=1,ffn=12,vocab=12,seq=4,experts=4",
        "rnnlm:batch=4,unroll=2,hidden=4,vocab=12",
    ];
    let (mut pinned, mut moved) = (0, 0);
    for (m, model) in models.iter().enumerate() {
        let options = BuildOptions { optimizer: Optimizer::adam(0.01), ..BuildOptions::default() };
        let whole = build(model, &options).unwrap();
        for (c, devices) in [2, 4, 6, 8].into_iter().enumerate() {
            let machine = builtin(&format!("flat:{devices}")).unwrap();
            let resharder = Resharder::new(&machine, machine.mesh());
            for case in 0..4 {
                let mut random = Random((m * 100 + c * 10 + case) as u64 * 1_000_003);
                let counts = micro_batch_counts(&whole).unwrap();
                let count = NonZeroU32::new(counts[random.below(counts.len())]).unwrap();
                let base = microbatch(&whole, count).unwrap().graph;
                // No op is recomputed, some are, or all.
                let named =
                    |op: &OpId| base.node(*op).phase == Phase::Forward && (random.below(2) < c || case == 3);
                let graph = remat(&base, &base.op_ids().filter(named).collect::<Vec<_>>()).unwrap();
                let configs = configs(&graph, machine.mesh(), &mut random, case % 2 == 0, case / 2 == 0);
                pinned +=
                    configs.iter().filter(|c| c.uses().iter().any(|u| matches!(u, AxisUse::Pin(_)))).count();
                let shapes: Vec<OpShapes> = graph.op_ids().map(|op| OpShapes::of(&graph, op)).collect();
                let assignment = Assignment::of(&graph, configs);
                let assignment = assignment.without_impossible_sums(&graph, &shapes, machine.mesh());
                let program = lower(&graph, &resharder, &assignment).unwrap().unrolled();
                let what = format!("{model} on {devices} in {count} micro-batches, case {case}");
                let guide = guide(&program);
                let assisted = Options { slow: &[(1, 30.0)], assist: Some(&guide), ..OPTIONS };
                let outcomes = [OPTIONS, assisted]
                    .map(|options| run(&graph, &program, options).unwrap_or_else(|e| panic!("{what}: {e}")));
                moved += outcomes[1].devices.iter().map(|d| d.stolen).sum::<u64>();
                let mut reference = Reference::new(&graph, &program, OPTIONS.seed);
                for step in 0..OPTIONS.steps {
                    reference.step().unwrap();
                    let losses = outcomes.each_ref().map(|outcome| Some(outcome.losses[step]));
                    assert_eq!(losses, [reference.loss(); 2], "{what}");
                }
                for (at, carry) in program.carries.iter().enumerate() {
                    let whole = reference.whole(carry.old);
                    for (tensor, value) in outcomes.iter().map(|outcome| &outcome.finals[at]) {
                        assert_eq!(whole.as_ref(), Some(value), "{what}: {}", graph.tensor(*tensor).name);
                    }
                }
            }
        }
    }
    assert!(pinned > 100, "{pinned} ops are pinned");
    assert!(moved > 100, "{moved} tasks were run by others");
}
