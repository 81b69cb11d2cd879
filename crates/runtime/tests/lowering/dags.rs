//! Random graphs of many op kinds: later ops read results of earlier ones, some of them more than once.

use crate::{
    case::Rng,
    check::{LARGE, Lab, MACHINES, Seen, check, random_config, show},
};
use shardwright_graph::{
    Graph, GraphBuilder, Op, Role, TensorId, TensorType,
    examples::NORMAL,
    ops::{Reshape, Slice},
};
use shardwright_space::Config;

/// A tensor of this type from the existing ones: one of them, or its first elements in another shape.
fn take(b: &mut GraphBuilder, rng: &mut Rng, there: &[TensorId], ty: &TensorType) -> Option<TensorId> {
    let count = ty.shape.elements();
    let enough = |t: &TensorId| b.ty(*t).dtype == ty.dtype && b.ty(*t).shape.elements() >= count;
    let fits: Vec<TensorId> = there.iter().copied().filter(enough).collect();
    if fits.is_empty() || rng.between(0, 4) == 0 {
        return None;
    }
    let mut taken = rng.pick(&fits);
    let size = b.ty(taken).shape.elements();
    if b.ty(taken) == ty {
        return Some(taken);
    }
    if size > count {
        taken = b.emit("flat", Reshape { shape: [size].into() }, &[taken]).unwrap();
        let start = rng.between(0, size - count);
        taken = b.emit("part", Slice::along(0, start, start + count, &[size]), &[taken]).unwrap();
    }
    Some(b.emit("shape", Reshape { shape: ty.shape.clone() }, &[taken]).unwrap())
}

/// A graph of some ops of any kind. Operands that accept any number come from existing tensors.
fn graph(rng: &mut Rng) -> Graph {
    let mut b = GraphBuilder::new("dag");
    let mut there: Vec<TensorId> = Vec::new();
    for _ in 0..rng.between(4, 12) {
        let examples = rng.pick(Op::EXAMPLES);
        if !examples.runs {
            continue; // Only its types are known: there is nothing to run.
        }
        let case = (examples.case)(rng);
        let mut inputs = Vec::new();
        for (ty, init) in &case.inputs {
            let taken = if *init == NORMAL { take(&mut b, rng, &there, ty) } else { None };
            let role = if rng.flip() { Role::Input } else { Role::Parameter };
            let source = |b: &mut GraphBuilder| b.source("source", ty.clone(), role, *init).unwrap();
            inputs.push(taken.unwrap_or_else(|| source(&mut b)));
        }
        let kind = case.op.kind();
        let results = b.add(kind, case.op, &inputs).unwrap();
        // The log-sum-exp of a query without keys is -inf. Padding times infinity depends on the kernel, so no op reads it.
        let finite = if kind == "attention" { &results[..1] } else { &results[..] };
        there.extend(inputs.iter().chain(finite).copied().filter(|&t| b.ty(t).dtype.is_float()));
        results.iter().for_each(|&t| b.output(t));
    }
    b.finish()
}

/// Runs one random case; returns the number of operands that come from other ops.
fn run(seed: u64, machines: &[&'static [u32]], seen: &mut Seen) -> usize {
    let mut rng = Rng::new(seed);
    let graph = graph(&mut rng);
    let counts = rng.pick(machines);
    let lab = Lab::of(counts);
    let mesh = lab.mesh();
    let pins = rng.between(0, 2) == 0;
    let configs: Vec<Config> =
        graph.op_ids().map(|op| random_config(&mut rng, &graph.rule(op), mesh, pins)).collect();
    match check(&graph, lab, &configs, 1) {
        Ok(found) => found.iter().for_each(|(kind, count)| *seen.entry(kind.clone()).or_default() += count),
        Err(error) => {
            panic!("case {seed}, machine {counts:?}: {error}\n{graph}\n{}", show(&graph, &configs, mesh))
        }
    }
    let made = |t: &&TensorId| graph.tensor(**t).producer.is_some();
    graph.ops.iter().flat_map(|node| &node.inputs).filter(made).count()
}

#[test]
fn random_graphs_under_random_configs_compute_the_serial_results() {
    let mut seen = Seen::new();
    let read: usize = (0..150).map(|seed| run(seed, &MACHINES, &mut seen)).sum();
    assert!(read > 500, "only {read} operands come from other ops");
}

/// For `scripts/bench fuzz-lower`: the environment sets the number of cases.
#[test]
#[ignore = "a fuzzing run of configurable length: scripts/bench fuzz-lower"]
fn fuzz_graphs() {
    let number = |name: &str, default: u64| {
        std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
    };
    let (cases, first) = (number("FUZZ_CASES", 2000) / 2, number("FUZZ_SEED", 1000));
    let mut seen = Seen::new();
    let machines = [&MACHINES[..], &LARGE[..]].concat();
    let read: usize = (first..first + cases).map(|seed| run(seed, &machines, &mut seen)).sum();
    println!(
        "{cases} random graphs ({read} operands from other ops) agree with the serial run, bytes as predicted"
    );
    println!("instructions: {seen:?}");
}
