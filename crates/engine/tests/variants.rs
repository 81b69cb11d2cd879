//! Random variants of a step (micro-batches, recomputed ops) under random configs: the engine computes what the serial program
//! of the whole batch computes, in f64. `SHARDWRIGHT_VARIANT_CASES=1000` runs that many cases.

mod random_plans;

use random_plans::{Random, configs};
use shardwright_cost::Resharder;
use shardwright_engine::{Options, run};
use shardwright_graph::{OpId, Optimizer, Phase, micro_batch_counts, microbatch, remat};
use shardwright_lower::lower;
use shardwright_machine::builtin;
use shardwright_runtime::Serial;
use shardwright_space::{Assignment, OpShapes};
use shardwright_zoo::{BuildOptions, build};
use std::num::NonZeroU32;

const OPTIONS: Options<'static> =
    Options { given: &[], seed: 7, steps: 2, trace: false, finals: true, slow: &[], assist: None };

/// A random model with random sizes.
fn model(random: &mut Random) -> String {
    let batch = [2, 4, 6, 8, 12][random.below(5)];
    let (layers, width) = (1 + random.below(3), [4, 8, 12][random.below(3)]);
    match random.below(4) {
        0 | 1 => format!("mlp:batch={batch},input=6,hidden={width},layers={layers},classes=4"),
        2 => format!("gpt:batch={batch},layers={layers},hidden=8,heads=2,vocab=12,seq=4"),
        _ => format!("llama:batch={batch},layers=1,hidden=8,heads=2,kv_heads=1,ffn={width},vocab=12,seq=4"),
    }
}

/// The largest difference of two lists, relative to the largest number.
fn difference(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let scale = a.iter().fold(1e-3, |scale: f64, x| scale.max(x.abs()));
    a.iter().zip(b).fold(0.0, |most: f64, (a, b)| most.max((a - b).abs() / scale))
}

#[test]
fn random_variants_under_random_configs_train_as_the_serial_program_of_the_whole_batch() {
    let cases = std::env::var("SHARDWRIGHT_VARIANT_CASES").ok().and_then(|cases| cases.parse().ok());
    let (mut divided, mut recomputed, mut both) = (0, 0, 0);
    for case in 0..cases.unwrap_or(40u64) {
        let mut random = Random(case * 1_000_003);
        let spec = model(&mut random);
        let options = BuildOptions { optimizer: Optimizer::momentum(0.02, 0.9), ..BuildOptions::default() };
        let whole = build(&format!("{spec},dtype=f64"), &options).unwrap();
        let counts = micro_batch_counts(&whole).unwrap();
        let count = NonZeroU32::new(counts[random.below(counts.len())]).unwrap();
        let base = microbatch(&whole, count).unwrap().graph;
        let share = random.below(4);
        let named = |op: &OpId| base.node(*op).phase == Phase::Forward && random.below(3) < share;
        let graph = remat(&base, &base.op_ids().filter(named).collect::<Vec<_>>()).unwrap();
        let clones = graph.ops.len() - base.ops.len();
        divided += usize::from(count.get() > 1);
        recomputed += usize::from(clones > 0);
        both += usize::from(clones > 0 && count.get() > 1);
        let machine = builtin(["flat:2", "flat:3", "flat:4", "p100x16:8"][random.below(4)]).unwrap();
        let (tied, pins) = (random.below(2) == 0, random.below(4) == 0);
        let configs = configs(&graph, machine.mesh(), &mut random, tied, pins);
        let shapes: Vec<OpShapes> = graph.op_ids().map(|op| OpShapes::of(&graph, op)).collect();
        let assignment = Assignment::of(&graph, configs);
        let assignment = assignment.without_impossible_sums(&graph, &shapes, machine.mesh());
        let resharder = Resharder::new(&machine, machine.mesh());
        let program = lower(&graph, &resharder, &assignment).unwrap().unrolled();
        let what = format!("case {case}: {spec}, {count} micro-batches, {clones} ops recomputed");
        let outcome = run(&graph, &program, OPTIONS).unwrap_or_else(|error| panic!("{what}: {error}"));
        let mut serial = Serial::new(&whole, OPTIONS.seed, &[]);
        for step in 0..OPTIONS.steps {
            serial.step().unwrap();
            let off = difference(&[serial.loss().unwrap()], &[outcome.losses[step]]);
            assert!(off < 1e-9, "{what}: the loss of step {step} differs by {off}");
        }
        assert_eq!(outcome.finals.len(), whole.carries.len(), "{what}");
        for (carry, (tensor, value)) in whole.carries.iter().zip(&outcome.finals) {
            let name = &whole.tensor(carry.old).name;
            assert_eq!(*name, graph.tensor(*tensor).name, "{what}");
            let off = difference(&serial.value(carry.old).unwrap().to_f64_vec(), &value.to_f64_vec());
            assert!(off < 1e-9, "{what}: {name} differs by {off}");
        }
    }
    assert!(divided > 10 && recomputed > 10 && both > 5, "{divided}, {recomputed}, {both}");
}
