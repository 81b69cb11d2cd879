//! One training step of whole models, op by op on one thread: the speed of the step, and of the op kinds that take the
//! most time. An op kind that is slow in every model has a kernel worth improving.
//!
//! `cargo bench -p shardwright-zoo --bench step [-- MODEL...]`

use shardwright_graph::{Graph, OpId};
use shardwright_runtime::{Context, HostTensor, initial_value, kernels::run};
use shardwright_zoo::{BuildOptions, build};
use std::{collections::BTreeMap, time::Instant};

const MODELS: [&str; 2] = ["vgg16:batch=4", "gpt:batch=4,layers=4,hidden=512,heads=8,vocab=8192,seq=256"];
const SHOWN: usize = 5;

/// Time and work of all ops of one kind.
#[derive(Default, Clone, Copy)]
struct KindTotals {
    seconds: f64,
    flops: u64,
    bytes: u64,
}

fn main() {
    let given: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let models = if given.is_empty() { MODELS.map(String::from).to_vec() } else { given };
    for model in models {
        let graph = build(&model, &BuildOptions::default()).unwrap();
        // The first step pays for memory allocation; the faster of the next two counts.
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
    let mut values: Vec<Option<HostTensor>> = graph.tensors.iter().map(given).collect();
    let mut context = Context::default();
    graph.op_ids().map(|id| time(graph, id, &mut values, &last_use, &mut context)).collect()
}

/// Runs one op, then drops the values that no later op reads.
fn time(
    graph: &Graph,
    id: OpId,
    values: &mut [Option<HostTensor>],
    last_use: &[Option<OpId>],
    context: &mut Context,
) -> f64 {
    let node = graph.node(id);
    let mut outputs: Vec<HostTensor> =
        node.outputs.iter().map(|&t| HostTensor::zeros(&graph.tensor(t).ty)).collect();
    let inputs: Vec<_> = node.inputs.iter().map(|t| values[t.index()].as_ref().unwrap().view()).collect();
    let mut views: Vec<_> = outputs.iter_mut().map(HostTensor::view_mut).collect();
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
    let mut kinds: BTreeMap<&str, KindTotals> = BTreeMap::new();
    let mut total = KindTotals::default();
    for (id, &seconds) in graph.op_ids().zip(times) {
        for totals in [kinds.entry(graph.node(id).op.kind()).or_default(), &mut total] {
            totals.seconds += seconds;
            totals.flops += graph.flops(id);
            totals.bytes += graph.bytes(id);
        }
    }
    let mut kinds: Vec<(&str, KindTotals)> = kinds.into_iter().collect();
    kinds.sort_by(|a, b| b.1.seconds.total_cmp(&a.1.seconds));
    println!("{model}");
    for (kind, totals) in [("whole step", total)].iter().chain(kinds.iter().take(SHOWN)) {
        println!(
            "  {kind:<16} {:>9.1} ms {:>5.1} % {:>7.1} GFLOP/s {:>6.1} GB/s",
            totals.seconds * 1e3,
            100.0 * totals.seconds / total.seconds,
            totals.flops as f64 / totals.seconds / 1e9,
            totals.bytes as f64 / totals.seconds / 1e9,
        );
    }
}
