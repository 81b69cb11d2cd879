//! Every op kind under random configs, its operands and results on their way from and to ops with other configs.

use crate::{
    case::{Case, Rng},
    cases::GENERATORS,
    check::{KINDS, LARGE, MACHINES, Seen, check, random_config, relayouts, show},
    coverage::Coverage,
};
use shardwright_graph::{
    Graph, GraphBuilder, Init, Op, OpId, Role, TensorId,
    ops::{Reduce, Reshape},
};
use shardwright_space::Config;

/// The kind of which there is nothing to run.
const OPAQUE: &str = "opaque";

/// A tensor of these values that arrives by way of another op: a sum over a leading dimension, so that it may come as
/// partial sums, or a copy; or as it is.
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

/// The op between others that bring its operands and take its results.
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

/// One random case of an op kind; counts what its program does, and what config the op has.
fn run(
    kind: usize,
    seed: u64,
    machines: &[&'static [u32]],
    seen: &mut Seen,
    coverage: Option<&mut Coverage>,
) {
    let (name, generate) = GENERATORS[kind];
    if name == OPAQUE {
        return; // Only its types are known: there is nothing to run.
    }
    let mut rng = Rng::new(seed.wrapping_mul(1009).wrapping_add(kind as u64));
    let case = generate(&mut rng);
    let graph = surround(&mut rng, &case);
    let counts = rng.pick(machines);
    let relayouts = relayouts(counts);
    let mesh = relayouts.comm().mesh();
    let pins = rng.between(0, 2) == 0;
    let configs: Vec<Config> =
        graph.op_ids().map(|op| random_config(&mut rng, &graph.rule(op), mesh, pins)).collect();
    if let Some(coverage) = coverage {
        let op = middle(&graph);
        coverage.note(name, &graph.rule(op), mesh, &configs[op.index()]);
    }
    let checked = check(&graph, relayouts, &configs, 1);
    if let Ok(found) = &checked {
        found.iter().for_each(|(kind, count)| *seen.entry(kind.clone()).or_default() += count);
    }
    if let Err(error) = checked {
        let listing = shardwright_lower::lower(&graph, relayouts, &configs)
            .map(|p| p.listing(&graph).to_string())
            .unwrap_or_default();
        panic!(
            "{name}, case {seed}, machine {counts:?}: {error}\n{:?}\n{}\n{listing}",
            case.op,
            show(&graph, &configs, mesh)
        );
    }
}

#[test]
fn every_op_kind_under_random_configs_computes_the_serial_result() {
    let (mut seen, mut coverage) = (Seen::new(), Coverage::default());
    for (kind, (name, _)) in GENERATORS.iter().enumerate() {
        // Eight cases, and as many more as it takes to meet every kind of config that the op can have.
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

/// Holds the table in the documentation to what was counted, or writes it there where the environment asks for that.
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

/// For `scripts/bench fuzz-lower`: as many cases as the environment asks for.
#[test]
#[ignore = "takes as long as it is told to"]
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
