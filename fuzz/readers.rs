//! All readers of external files, each with its invariant for arbitrary bytes: the bytes are refused, or the result can be
//! queried and survives being written and read again.
//!
//! The fuzz target calls these functions. The tests of the command line call them on inputs that once failed
//! (`fuzz/regressions`).

use shardwright_cost::{CostFile, OperatorTimes};
use shardwright_engine::serial_bytes;
use shardwright_graph::{Graph, OpId, factor_kinds, verify::verify};
use shardwright_machine::{Device, Machine, builtin, parse};
use shardwright_onnx as onnx;
use shardwright_plan::{Context, Plan};
use shardwright_report::{Page, StepView};
use shardwright_runtime::Serial;
use shardwright_search::format::{ReadLimits, read_iopddl, read_iopddl_with, write_iopddl};
use shardwright_search::{Control, Network, VarId, registry::SOLVERS};
use shardwright_stablehlo as stablehlo;
use shardwright_stages as stages_core;
use shardwright_zoo::{self as zoo, BuildOptions};
use std::sync::LazyLock;

/// A reader's name and its check.
pub type Reader = (&'static str, fn(&[u8]));

/// All readers.
pub const READERS: [Reader; 9] = [
    ("graph_json", graph_json),
    ("graph_text", graph_text),
    ("onnx", onnx),
    ("stablehlo", stablehlo),
    ("machine", machine),
    ("costs", costs),
    ("plan", plan),
    ("network", network),
    ("stages", stages),
];

/// The model and the machine of the plans. Plans of others are refused at once.
pub const PLANNED: (&str, &str) = ("mlp:batch=8,input=4,hidden=8,layers=1,classes=4", "flat:4");

static STEP: LazyLock<(Graph, Machine)> = LazyLock::new(|| {
    let graph = zoo::build(PLANNED.0, &BuildOptions::default()).expect("a built-in model");
    (graph, builtin(PLANNED.1).expect("a built-in machine"))
});

/// Queries a graph as the later stages do.
fn query(graph: &Graph) {
    for id in graph.op_ids() {
        graph.flops(id);
        graph.bytes(id);
    }
    factor_kinds(graph);
    assert_eq!(Graph::from_json(graph.to_json().as_bytes()).as_ref(), Ok(graph));
}

/// Evaluates a small graph: every kernel takes what shape inference accepts. A kernel may refuse values, such as ids out of
/// range.
fn evaluate(graph: &Graph) {
    let work = graph.op_ids().fold(0u64, |sum, op| sum.saturating_add(graph.flops(op)));
    if serial_bytes(graph) <= 1 << 20 && work <= 1 << 22 {
        let _ = Serial::new(graph, 0, &[]).evaluate();
    }
}

fn graph_json(bytes: &[u8]) {
    if let Ok(graph) = Graph::from_json(bytes) {
        query(&graph);
        evaluate(&graph);
        assert_eq!(graph.to_string().parse().as_ref(), Ok(&graph));
    }
}

fn graph_text(bytes: &[u8]) {
    if let Ok(text) = str::from_utf8(bytes)
        && let Ok(graph) = text.parse::<Graph>()
    {
        query(&graph);
        assert_eq!(graph.to_string().parse().as_ref(), Ok(&graph));
    }
}

fn onnx(bytes: &[u8]) {
    let bytes = bytes.to_vec().into();
    for training in [true, false] {
        let options = onnx::ImportOptions { training, ..onnx::ImportOptions::default() };
        if let Ok(imported) = onnx::import(&bytes, &options, &onnx::NoExternalData) {
            assert_eq!(verify(&imported.graph), Ok(()));
            evaluate(&imported.graph);
        }
    }
}

fn stablehlo(bytes: &[u8]) {
    let Ok(text) = str::from_utf8(bytes) else { return };
    if let Ok(generic) = stablehlo::normalise(text, "fuzz") {
        assert_eq!(stablehlo::normalise(&generic, "again").as_ref(), Ok(&generic));
    }
    let options =
        stablehlo::ImportOptions { opaque: vec!["*".into()], ..stablehlo::ImportOptions::default() };
    match stablehlo::import(text, "fuzz", &options) {
        Ok(imported) => {
            query(&imported.graph);
            evaluate(&imported.graph);
        }
        Err(error) => assert!(error.line >= 1 && error.column >= 1),
    }
}

fn machine(bytes: &[u8]) {
    let alone = &mut |file: &str| Err(format!("there is no {file} here"));
    if let Ok(machine) = parse("fuzz.toml", bytes, alone) {
        let again = parse("again.toml", machine.to_toml().as_bytes(), alone).expect("what was written");
        assert_eq!(again.fingerprint(), machine.fingerprint());
        for devices in [1, 2, u64::from(machine.devices())] {
            if let Ok(part) = machine.restrict(devices) {
                assert_eq!(u64::from(part.devices()), devices);
            }
        }
    }
}

fn costs(bytes: &[u8]) {
    let Ok(costs) = CostFile::from_json(bytes) else { return };
    assert_eq!(CostFile::from_json(costs.to_json().as_bytes()).expect("what was written"), costs);
    let (graph, machine) = &*STEP;
    let device = Device { name: costs.device.clone(), ..machine.slowest() };
    let times = OperatorTimes::new(&device, Some(&costs)).expect("costs of this device");
    let workload = |op: OpId| graph.node(op).op.workload(&graph.input_types(op), &graph.output_types(op));
    for op in graph.op_ids() {
        let seconds = times.estimate(&workload(op)).seconds.0;
        assert!(seconds.is_finite() && seconds >= 0.0, "{seconds}");
    }
}

fn plan(bytes: &[u8]) {
    let Ok(plan) = Plan::from_json(bytes) else { return };
    assert_eq!(Plan::from_json(plan.to_json().expect("plain data").as_bytes()).as_ref(), Ok(&plan));
    shardwright_request::summarise(&mut std::io::sink(), &plan, shardwright_request::Detail::All)
        .expect("nothing to fail");
    let (graph, machine) = &*STEP;
    let Ok(mesh) = plan.mesh(machine) else { return };
    let Ok(assignment) = plan.assignment(graph, &mesh) else { return };
    let context = Context::new(graph, machine, None, mesh, plan.space.untied).expect("a step on a machine");
    StepView::simulate("plan", &context, &assignment).expect("configs that were checked");
    if let Ok(page) = Page::new(&context, &plan, &assignment, &[], &Control::new().iteration_limit(0)) {
        page.write(&mut std::io::sink()).expect("nothing to fail");
    }
}

fn network(bytes: &[u8]) {
    // The limits on what a short text may request are lower here than for users.
    let limits = ReadLimits { text_bytes: 1 << 22, numbers: 1 << 18, ..ReadLimits::default() };
    let Ok(problem) = read_iopddl_with(bytes, &limits) else { return };
    let mut text = Vec::new();
    write_iopddl(&problem.network, &problem.name, &mut text).expect("memory to write to");
    let again = read_iopddl(&text[..]).expect("what was written").network;
    let network = &problem.network;
    let first = vec![0; network.variables()];
    assert_eq!(again.evaluate(&first), network.evaluate(&first));
    if size(network) <= 1 << 12 {
        solve(network);
    }
}

/// The number of costs in a network.
fn size(network: &Network) -> usize {
    let choices: usize = (0..network.variables()).map(|v| network.choices(VarId(v as u32))).sum();
    (0..network.tables()).map(|t| network.table(t as u32).len()).sum::<usize>() + choices
}

/// Every solver states the true cost of its choice, and no cost is below another solver's bound.
fn solve(network: &Network) {
    let control = Control { threads: 1, memory_bytes: 1 << 24, ..Control::new().iteration_limit(8) };
    let outcomes: Vec<_> = SOLVERS
        .iter()
        .map(|entry| (entry.respects_memory, entry.solver().solve(network, &control)))
        .collect();
    for (_, outcome) in &outcomes {
        let (Some(choice), Some(cost)) = (&outcome.choice, outcome.cost) else { continue };
        let judged = network.evaluate(choice).expect("one choice per variable");
        assert!(judged.feasible());
        assert_eq!(judged.cost, i128::from(cost));
        assert!(outcomes.iter().all(|(_, other)| other.bound <= cost));
    }
}

/// A problem survives being written, and its stages have no smaller objective than the bound.
fn stages(bytes: &[u8]) {
    use stages_core::format::{Overrides, read, write};
    let Ok(problem) = read(bytes, &Overrides::default()) else { return };
    read(write(&problem).as_bytes(), &Overrides::default()).expect("what was written");
    // Mutants may ask for a million devices: the search ends after a number of questions.
    let asked = std::cell::Cell::new(0);
    let stop = || {
        asked.set(asked.get() + 1);
        asked.get() > 200
    };
    let control =
        stages_core::Control { stop: &stop, memory_bytes: 1 << 22, ..stages_core::Control::default() };
    let outcome = problem.solve(&control);
    assert!(outcome.lower_bound_seconds <= outcome.objective_seconds * (1.0 + 1e-8));
    assert_eq!(outcome.stages.is_some(), outcome.objective_seconds.is_finite());
}
