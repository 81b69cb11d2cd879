//! Every op kind under random configs. Its operands come from, and its results go to, ops with other configs.

use crate::{
    case::{Case, Rng},
    check::{KINDS, LARGE, Lab, MACHINES, Seen, check, random_config, show},
    coverage::Coverage,
};
use shardwright_graph::{
    Graph, GraphBuilder, Init, Op, OpId, Role, TensorId,
    examples::OpExamples,
    ops::{Reduce, Reshape},
};
use shardwright_space::Config;

/// A tensor of these values from another op: a sum over a leading dimension, so that it may be a
/// partial sum; or a copy; or a source.
fn arrive(b: &mut GraphBuilder, rng: &mut Rng, i: usize, case: &Case) -> TensorId {
    let (ty, init) = &case.inputs[i];
    let role = if rng.flip() { Role::Input } else { Role::Parameter };
    let name = format!("input{i}");
    let summed = ty.dtype.is_float() && matches!(init, Init::Normal(_)) && ty.rank() < 7;
    match rng.between(0, 3) {
        0 if summed => {
            let mut larger = ty.clone();
            larger.shape.0.insert(0, 4);
            let x = b.source(&name, larger, role, *init).unwrap();
            b.emit(&format!("sum{i}"), Reduce::sum([0].into_iter().collect()), &[x]).unwrap()
        }
        1 | 2 => {
            let x = b.source(&name, ty.clone(), role, *init).unwrap();
            b.emit(&format!("copy{i}"), Reshape { shape: ty.shape.clone() }, &[x]).unwrap()
        }
        _ => b.source(&name, ty.clone(), role, *init).unwrap(),
    }
}

/// The op between producers of its operands and readers of its results.
fn surround(rng: &mut Rng, case: &Case) -> Graph {
    let mut b = GraphBuilder::new("case");
    let inputs: Vec<TensorId> = (0..case.inputs.len()).map(|i| arrive(&mut b, rng, i, case)).collect();
    let results = b.add("op", case.op.clone(), &inputs).unwrap();
    for (o, &result) in results.iter().enumerate() {
        b.output(result);
        for reader in 0..rng.between(1, 2) {
            let shape = b.ty(result).shape.clone();
            let read = b.emit(&format!("read{o}.{reader}"), Reshape { shape }, &[result]).unwrap();
            b.output(read);
        }
    }
    b.finish()
}

/// The op in the middle of a case.
fn middle(graph: &Graph) -> OpId {
    graph.op_ids().find(|&op| graph.node(op).name == "op").unwrap()
}

/// Runs one random case of an op kind; counts the program's instructions and the op's kind of config.
fn run(
    kind: usize,
    seed: u64,
    machines: &[&'static [u32]],
    seen: &mut Seen,
    coverage: Option<&mut Coverage>,
) {
    let OpExamples { kind: name, runs, case: generate, .. } = Op::EXAMPLES[kind];
    if !runs {
        return; // Only its types are known: there is nothing to run.
    }
    let mut rng = Rng::new(seed.wrapping_mul(1009).wrapping_add(kind as u64));
    let case = generate(&mut rng);
    let graph = surround(&mut rng, &case);
    let counts = rng.pick(machines);
    let lab = Lab::of(counts);
    let mesh = lab.mesh();
    let pins = rng.between(0, 2) == 0;
    let configs: Vec<Config> =
        graph.op_ids().map(|op| random_config(&mut rng, &graph.rule(op), mesh, pins)).collect();
    if let Some(coverage) = coverage {
        let op = middle(&graph);
        coverage.note(name, &graph.rule(op), mesh, &configs[op.index()]);
    }
    let checked = check(&graph, lab, &configs, 1);
    if let Ok(found) = &checked {
        found.iter().for_each(|(kind, count)| *seen.entry(kind.clone()).or_default() += count);
    }
    if let Err(error) = checked {
        panic!(
            "{name}, case {seed}, machine {counts:?}: {error}\n{:?}\n{}\n{}",
            case.op,
            show(&graph, &configs, mesh),
            lab.listing(&graph, &configs)
        );
    }
}

#[test]
fn every_op_kind_under_random_configs_computes_the_serial_result() {
    let (mut seen, mut coverage) = (Seen::new(), Coverage::default());
    for (kind, OpExamples { kind: name, .. }) in Op::EXAMPLES.iter().enumerate() {
        // Eight cases, and more until every kind of config of the op is covered.
        for seed in 0..1000 {
            if seed < 8 || coverage.lacking(name).is_some() {
                run(kind, seed, &MACHINES, &mut seen, Some(&mut coverage));
            }
        }
        assert_eq!(coverage.lacking(name), None, "of {name}");
    }
    written_down(&coverage.table());
    // Buckets need several weights.
    let missing: Vec<_> =
        KINDS.iter().filter(|kind| **kind != "Bucket" && !seen.contains_key(**kind)).collect();
    assert!(missing.is_empty(), "no case has {missing:?}");
}

/// Compares the table in the documentation with the counts, or rewrites it if `UPDATE_DOCS` is set.
fn written_down(table: &str) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/testing.md");
    let text = std::fs::read_to_string(path).unwrap();
    let marks = [
        "<!-- op kinds: written by UPDATE_DOCS=1 cargo test -p shardwright-runtime --test lowering -->\n",
        "<!-- end of op kinds -->",
    ];
    let (before, rest) = text.split_once(marks[0]).expect("docs/testing.md has a place for the table");
    let (there, after) = rest.split_once(marks[1]).expect("and an end of it");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, [before, marks[0], table, marks[1], after].concat()).unwrap();
    } else {
        assert!(there == table, "docs/testing.md is not what was counted: run with UPDATE_DOCS=1\n{table}");
    }
}

/// For `scripts/bench fuzz-lower`: the environment sets the number of cases.
#[test]
#[ignore = "a fuzzing run of configurable length: scripts/bench fuzz-lower"]
fn fuzz_ops() {
    let number = |name: &str, default: u64| {
        std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
    };
    let (cases, first) = (number("FUZZ_CASES", 2000), number("FUZZ_SEED", 1000));
    let mut seen = Seen::new();
    let machines = [&MACHINES[..], &LARGE[..]].concat();
    for case in 0..cases {
        run(
            (case % Op::KINDS.len() as u64) as usize,
            first + case / Op::KINDS.len() as u64,
            &machines,
            &mut seen,
            None,
        );
    }
    println!("{cases} cases of {} op kinds agree with the serial run, bytes as predicted", Op::KINDS.len());
    println!("instructions: {seen:?}");
}
