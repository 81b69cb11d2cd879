//! One objective: the price of an assignment is the makespan of its simulated step without overlap, to the picosecond. No
//! overlapped step is shorter than its bound.

#[path = "../../plan/tests/graphs/mod.rs"]
mod graphs;

use proptest::prelude::*;
use shardwright_graph::{Graph, OpId, Phase, micro_batch_counts, microbatch, remat};
use shardwright_machine::{AxisId, Machine, builtin, parse};
use shardwright_plan::{Context, step_lower_bound};
use shardwright_sim::{simulate_objective, simulate_step};
use shardwright_space::{Assignment, AxisUse, Config};
use shardwright_zoo::{BuildOptions, build};
use std::num::NonZeroU32;

const MODELS: [&str; 9] = [
    "mlp:batch=48,hidden=96,layers=3",
    "lenet5:batch=12",
    "gpt:batch=8,layers=1,hidden=32,heads=4,seq=8,vocab=32",
    "llama:batch=8,layers=1,hidden=32,heads=4,kv_heads=2,seq=8,vocab=48",
    "nmt:batch=8,seq=2,hidden=24,vocab=24,unroll=2",
    "rnnlm:batch=8,seq=3,hidden=16,vocab=24,unroll=3",
    "moe:batch=8,layers=1,hidden=32,heads=4,seq=8,vocab=32",
    "dlrm:batch=16,rows=96",
    "vgg16:batch=4,image=32,width=0.25,classes=16",
];

const MACHINES: [&str; 10] = [
    "flat:2",
    "flat:3",
    "flat:4",
    "flat:6",
    "p100x16",
    "p100x16:12",
    "k80x8",
    "a100x64:32",
    "cpu:4",
    "slow unit",
];

fn machine(name: &str) -> Machine {
    if name != "slow unit" {
        return builtin(name).unwrap();
    }
    let text = "extends = \"p100x16\"\nname = \"mixed\"\n[[mixed]]\nunits = [1]\nname = \"slow\"\npeak.f32 = \"1 TFLOP/s\"";
    parse("mixed.toml", text.as_bytes(), &mut |_| Err("none".into())).unwrap().restrict(8).unwrap()
}

/// A generator that needs no dependency.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % sides
    }
}

/// A random legal config of an op: per axis a factor, a pin where those are wanted, or nothing.
fn random_config(context: &Context<'_>, op: OpId, pins: bool, dice: &mut Dice) -> Config {
    let (rule, mesh) = (&context.shapes[op.index()].rule, context.mesh());
    let mut config = Config::replicated(mesh.len());
    for axis in (0..mesh.len()).map(|axis| AxisId(axis as u32)) {
        for _ in 0..3 {
            let used = match dice.roll(4) {
                0 => AxisUse::Replicate,
                1 if pins => AxisUse::Pin(dice.roll(mesh.axis(axis).size as usize) as u16),
                _ if rule.factors.is_empty() => AxisUse::Replicate,
                _ => AxisUse::Split(dice.roll(rule.factors.len()) as u8),
            };
            let mut other = config.clone();
            other.set(axis, used);
            if other.check(rule, mesh).is_ok() {
                config = other;
                break;
            }
        }
    }
    config
}

/// One random config per variable: per op, or per layer, whose other ops follow the leading one.
fn random_assignment(context: &Context<'_>, pins: bool, dice: &mut Dice) -> Assignment {
    let mut assignment = Assignment::replicated(context.graph, context.mesh());
    for variable in &context.variables.members {
        let lead = random_config(context, variable.forward(), pins, dice);
        let configs = variable.configs(&context.shapes, context.mesh(), &lead);
        for (op, config) in variable.ops.iter().zip(configs) {
            assignment.configs[op.index()] = config;
        }
    }
    assignment.without_impossible_sums(context.graph, &context.shapes, context.mesh())
}

/// The graph with none, half or all of its forward ops recomputed.
fn recomputed(graph: &Graph, halves: usize, seed: u64) -> Graph {
    let mut dice = Dice(seed);
    let named = |op: &OpId| graph.node(*op).phase == Phase::Forward && dice.roll(2) < halves;
    remat(graph, &graph.op_ids().filter(named).collect::<Vec<_>>()).unwrap()
}

/// Checks random assignments of a graph: tied and untied, with and without pins, on prime and merged axes.
fn check(graph: &Graph, machine: &Machine, seed: u64) -> usize {
    let mut dice = Dice(seed);
    let mut cases = 0;
    let mut meshes = vec![machine.mesh().clone()];
    if machine.mesh().per_level().len() != machine.mesh().len() {
        meshes.push(machine.mesh().per_level());
    }
    for mesh in meshes {
        for untied in [false, true] {
            let context = Context::new(graph, machine, None, mesh.clone(), untied).unwrap();
            for pins in [false, true] {
                let assignment = random_assignment(&context, pins, &mut dice);
                let priced = context.price(&assignment).unwrap().objective();
                let simulated = simulate_objective(&context, &assignment).unwrap();
                assert_eq!(
                    simulated as i64,
                    priced,
                    "{} on {}, {} axes, untied {untied}, pins {pins}, seed {seed}",
                    graph.name,
                    machine.name(),
                    mesh.len()
                );
                let step = simulate_step(&context, &assignment).unwrap().makespan as i64;
                let bound = |spmd| step_lower_bound(&context, spmd).unwrap();
                let bounds = [bound(false), if pins { 0 } else { bound(true) }];
                assert!(bounds.iter().all(|&bound| bound <= step), "{}: {bounds:?}, step {step}", graph.name);
                cases += 1;
            }
        }
    }
    cases
}

#[test]
fn the_price_of_random_assignments_is_their_simulated_step_without_overlap() {
    let mut cases = 0;
    for (at, model) in MODELS.iter().enumerate() {
        let graph = build(model, &BuildOptions::default()).unwrap();
        let counts = micro_batch_counts(&graph).unwrap();
        for (turn, name) in MACHINES.iter().enumerate() {
            // Every other machine in micro-batches.
            let count = if turn % 2 == 1 { counts[turn % counts.len()] } else { 1 };
            let graph = microbatch(&graph, NonZeroU32::new(count).unwrap()).unwrap().graph;
            let seed = (at * MACHINES.len() + turn) as u64;
            cases += check(&recomputed(&graph, turn % 3, seed), &machine(name), seed);
        }
    }
    println!("{cases} cases");
    assert!(cases >= 300, "{cases}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_price_of_random_graphs_is_their_simulated_step_without_overlap(
        samples in prop::sample::select(vec![2u64, 6, 8, 512]),
        inputs in prop::sample::select(vec![4u64, 5, 12, 1024]),
        steps in graphs::steps(),
        name in prop::sample::select(&MACHINES[..]),
        seed in any::<u64>(),
    ) {
        check(&graphs::random_graph(samples, inputs, &steps), &machine(name), seed);
    }
}
