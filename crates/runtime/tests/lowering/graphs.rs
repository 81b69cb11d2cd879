//! Whole training steps of small models under random configs: tied to layers and untied.

use crate::{
    case::Rng,
    check::{KINDS, LARGE, Lab, MACHINES, Seen, check, random_config, show},
};
use shardwright_graph::{Graph, OpId, Optimizer, Phase, micro_batch_counts, microbatch, remat};
use shardwright_machine::Mesh;
use shardwright_space::{Assignment, Config, LayerSplit, OpShapes};
use shardwright_zoo::{BuildOptions, build};
use std::num::NonZeroU32;

/// Small models whose sizes can be split in many ways.
const MODELS: [&str; 8] = [
    "mlp:batch=8,input=12,hidden=8,layers=2,classes=6",
    "lenet5:batch=4,image=12,width=0.5,classes=4",
    "gpt:batch=4,layers=1,hidden=8,heads=4,vocab=12,seq=4",
    "moe:batch=2,layers=1,hidden=8,heads=2,kv_heads=1,ffn=12,vocab=12,seq=4,experts=4",
    "bert:batch=2,layers=1,hidden=8,heads=2,ffn=12,vocab=12,seq=4",
    "nmt:batch=4,seq=4,hidden=6,vocab=12",
    "rnnlm:batch=4,unroll=2,hidden=4,vocab=12",
    "dlrm:batch=4,tables=2,rows=8,dim=4,dense=6,bottom=6,top=6,lookups=2",
];

fn graph(spec: &str, rng: &mut Rng) -> Graph {
    let optimizer = rng.pick(&[Optimizer::sgd(0.1), Optimizer::momentum(0.1, 0.9), Optimizer::adam(0.01)]);
    let options = BuildOptions { optimizer, ..BuildOptions::default() };
    let graph = build(&format!("{spec},dtype=f64"), &options).unwrap_or_else(|e| panic!("{spec}: {e}"));
    // Half of the steps in micro-batches.
    let counts = micro_batch_counts(&graph).unwrap();
    let count = if rng.flip() { rng.pick(&counts) } else { 1 };
    microbatch(&graph, NonZeroU32::new(count).unwrap()).unwrap_or_else(|e| panic!("{spec}: {e}")).graph
}

/// Random configs: one per op, or one per layer, derived from its forward op.
fn configs(graph: &Graph, mesh: &Mesh, rng: &mut Rng) -> Vec<Config> {
    let pins = rng.between(0, 3) == 0;
    let shapes: Vec<OpShapes> = graph.op_ids().map(|op| OpShapes::of(graph, op)).collect();
    if rng.flip() {
        return shapes.iter().map(|s| random_config(rng, &s.rule, mesh, pins)).collect();
    }
    let mut configs = vec![Config::replicated(mesh.len()); graph.ops.len()];
    for (at, layer) in graph.layers.iter().enumerate() {
        let ops: Vec<OpId> = graph.op_ids().filter(|&op| graph.node(op).layer.index() == at).collect();
        let split = LayerSplit::new(graph, &shapes, ops, layer.forward);
        let forward = random_config(rng, &shapes[layer.forward.index()].rule, mesh, pins);
        for (op, config) in split.ops.iter().zip(split.configs(&shapes, mesh, &forward)) {
            configs[op.index()] = config;
        }
    }
    configs
}

/// The graph with some of its forward ops recomputed, in two of three cases.
fn recomputed(graph: Graph, seed: u64) -> Graph {
    let mut rng = Rng::new(seed.wrapping_mul(77).wrapping_add(graph.ops.len() as u64));
    let often = rng.between(0, 2);
    let named = |op: &OpId| graph.node(*op).phase == Phase::Forward && rng.between(1, 4) <= 2 * often;
    let named: Vec<OpId> = graph.op_ids().filter(named).collect();
    remat(&graph, &named).unwrap()
}

/// Runs one random case; counts the program's instructions.
pub fn run(model: &str, seed: u64, machines: &[&'static [u32]], seen: &mut Seen) {
    let mut rng = Rng::new(seed.wrapping_mul(31).wrapping_add(model.len() as u64));
    let graph = recomputed(graph(model, &mut rng), seed);
    let counts = rng.pick(machines);
    let lab = Lab::of(counts);
    let mesh = lab.mesh();
    let configs = configs(&graph, mesh, &mut rng);
    let shapes: Vec<OpShapes> = graph.op_ids().map(|op| OpShapes::of(&graph, op)).collect();
    let assignment = Assignment::of(&graph, configs).without_impossible_sums(&graph, &shapes, mesh);
    let configs = assignment.configs;
    match check(&graph, lab, &configs, 2) {
        Ok(found) => found.iter().for_each(|(kind, count)| *seen.entry(kind.clone()).or_default() += count),
        Err(error) => {
            panic!("{model}, case {seed}, machine {counts:?}: {error}\n{}", show(&graph, &configs, mesh))
        }
    }
}

#[test]
fn whole_models_under_random_configs_train_as_they_do_serially() {
    let mut seen = Seen::new();
    for model in MODELS {
        for seed in 0..6 {
            run(model, seed, &MACHINES, &mut seen);
        }
    }
    // Windows that need no exchange are rare in models.
    let missing: Vec<_> = KINDS.iter().filter(|kind| **kind != "Cut" && !seen.contains_key(**kind)).collect();
    assert!(missing.is_empty(), "no case has {missing:?}");
}

/// For `scripts/bench fuzz-lower`: the environment sets the number of cases.
#[test]
#[ignore = "a fuzzing run of configurable length: scripts/bench fuzz-lower"]
fn fuzz_models() {
    let number = |name: &str, default: u64| {
        std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
    };
    let (cases, first) = (number("FUZZ_CASES", 2000) / 10, number("FUZZ_SEED", 1000));
    let mut seen = Seen::new();
    let machines = [&MACHINES[..], &LARGE[..]].concat();
    for case in 0..cases {
        run(
            MODELS[(case % MODELS.len() as u64) as usize],
            first + case / MODELS.len() as u64,
            &machines,
            &mut seen,
        );
    }
    println!(
        "{cases} training steps of {} models agree with the serial run, bytes as predicted",
        MODELS.len()
    );
    println!("instructions: {seen:?}");
}
