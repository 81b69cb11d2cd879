//! Graphs around the examples of op kinds: they survive both file forms, and are where fuzzing starts from.

mod common;

use common::{examples, mlp};
use shardwright_graph::{DType, Graph, GraphBuilder, Init, Real, Role};
use std::path::PathBuf;

/// One graph per op kind, and a training step.
fn graphs() -> Vec<(String, Graph)> {
    let mut graphs = vec![("mlp".to_owned(), mlp())];
    for e in examples() {
        let mut b = GraphBuilder::new(e.op.kind());
        let inputs = e.inputs.iter().enumerate().map(|(i, ty)| {
            let role = if i == 0 { Role::Input } else { Role::Parameter };
            let init = if ty.dtype == DType::Bool { Init::Below(2) } else { Init::Constant(Real(1.0)) };
            b.source(&format!("x{i}"), ty.clone(), role, init).unwrap()
        });
        let inputs: Vec<_> = inputs.collect();
        for output in b.add("y", e.op.clone(), &inputs).unwrap() {
            b.output(output);
        }
        graphs.push((e.op.kind().to_owned(), b.finish()));
    }
    graphs
}

#[test]
fn every_op_kind_survives_json_and_text() {
    for (kind, graph) in graphs() {
        assert_eq!(Graph::from_json(graph.to_json().as_bytes()).as_ref(), Ok(&graph), "{kind}");
        assert_eq!(graph.to_string().parse().as_ref(), Ok(&graph), "{kind}");
    }
}

fn write_seeds(extension: &str, form: impl Fn(&Graph) -> String) {
    let Some(folder) = std::env::var_os("SHARDWRIGHT_SEEDS").map(PathBuf::from) else {
        return println!("SHARDWRIGHT_SEEDS names no folder: no seeds written");
    };
    for (kind, graph) in graphs() {
        std::fs::write(folder.join(format!("{kind}.{extension}")), form(&graph)).unwrap();
    }
}

#[test]
#[ignore = "writes the seeds of a fuzz target: scripts/fuzz"]
fn graph_json_seeds() {
    write_seeds("json", Graph::to_json);
}

#[test]
#[ignore = "writes the seeds of a fuzz target: scripts/fuzz"]
fn graph_text_seeds() {
    write_seeds("txt", Graph::to_string);
}
