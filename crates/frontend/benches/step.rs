//! One training step of whole models, op by op on one thread: the rate of the step, and the op kinds that
//! take most of its time with their own rates. A kind whose rates are all low is a kernel worth a look.
//!
//! `cargo bench -p shardwright-frontend --bench step [-- MODEL...]`

use shardwright_frontend::zoo::{BuildOptions, build};
use shardwright_graph::{Graph, OpId};
use shardwright_runtime::{Context, Value, initial_value, kernels::run};
use std::{collections::BTreeMap, time::Instant};

const MODELS: [&str; 2] = ["vgg16:batch=4", "gpt:batch=4,layers=4,hidden=512,heads=8,vocab=8192,seq=256"];
const SHOWN: usize = 5;

/// What the ops of one kind took and did.
#[derive(Default, Clone, Copy)]
struct Share {
    seconds: f64,
    flops: u64,
    bytes: u64,
}

fn main() {
    let given: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let models = if given.is_empty() { MODELS.map(String::from).to_vec() } else { given };
    for model in models {
        let graph = build(&model, &BuildOptions::default()).unwrap();
        // The first step pays for the memory; the faster of the next two counts.
        let mut times = step(&graph);
        for repeat in 0..2 {
            let again = step(&graph);
            let total = |t: &[f64]| t.iter().sum::<f64>();
            if repeat == 0 || total(&again) < total(&times) {
                times = again;
            }
        }
        print(&model, &graph, &times);
    }
}

/// Seconds of each op.
fn step(graph: &Graph) -> Vec<f64> {
    let mut last_use = vec![None; graph.tensors.len()];
    for id in graph.op_ids() {
        for t in graph.node(id).inputs.iter().chain(&graph.node(id).outputs) {
            last_use[t.index()] = Some(id);
        }
    }
    let given = |t: &shardwright_graph::Tensor| t.producer.is_none().then(|| initial_value(1, t));
    let mut values: Vec<Option<Value>> = graph.tensors.iter().map(given).collect();
    let mut context = Context::default();
    graph.op_ids().map(|id| time(graph, id, &mut values, &last_use, &mut context)).collect()
}

/// Runs one op and drops what no later op reads.
fn time(
    graph: &Graph,
    id: OpId,
    values: &mut [Option<Value>],
    last_use: &[Option<OpId>],
    context: &mut Context,
) -> f64 {
    let node = graph.node(id);
    let mut outputs: Vec<Value> = node.outputs.iter().map(|&t| Value::zeros(&graph.tensor(t).ty)).collect();
    let inputs: Vec<_> = node.inputs.iter().map(|t| values[t.index()].as_ref().unwrap().view()).collect();
    let mut views: Vec<_> = outputs.iter_mut().map(Value::view_mut).collect();
    let begin = Instant::now();
    run(&node.op, &inputs, &mut views, context).unwrap();
    let seconds = begin.elapsed().as_secs_f64();
    for (t, value) in node.outputs.iter().zip(outputs) {
        values[t.index()] = Some(value);
    }
    for t in node.inputs.iter().chain(&node.outputs).filter(|t| last_use[t.index()] == Some(id)) {
        values[t.index()] = None;
    }
    seconds
}

fn print(model: &str, graph: &Graph, times: &[f64]) {
    let mut kinds: BTreeMap<&str, Share> = BTreeMap::new();
    let mut total = Share::default();
    for (id, &seconds) in graph.op_ids().zip(times) {
        for share in [kinds.entry(graph.node(id).op.kind()).or_default(), &mut total] {
            share.seconds += seconds;
            share.flops += graph.flops(id);
            share.bytes += graph.bytes(id);
        }
    }
    let mut kinds: Vec<(&str, Share)> = kinds.into_iter().collect();
    kinds.sort_by(|a, b| b.1.seconds.total_cmp(&a.1.seconds));
    println!("{model}");
    for (kind, share) in [("whole step", total)].iter().chain(kinds.iter().take(SHOWN)) {
        println!(
            "  {kind:<16} {:>9.1} ms {:>5.1} % {:>7.1} GFLOP/s {:>6.1} GB/s",
            share.seconds * 1e3,
            100.0 * share.seconds / total.seconds,
            share.flops as f64 / share.seconds / 1e9,
            share.bytes as f64 / share.seconds / 1e9,
        );
    }
}
