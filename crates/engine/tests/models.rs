//! Parallel equals serial: whole small models, trained for some steps under the plans of all strategies.

use shardwright_cost::Relayouts;
use shardwright_engine::{Options, Outcome, relative_error, run};
use shardwright_frontend::zoo::{BuildOptions, FAMILIES, build};
use shardwright_graph::{
    DType, Graph, GraphBuilder, Init, Optimizer, Real, Role, TensorType,
    ops::{Gather, Reduce},
    train,
};
use shardwright_lower::{ParallelGraph, lower};
use shardwright_machine::builtin;
use shardwright_plan::{Demands, Problem, search, strategy};
use shardwright_runtime::{Reference, Serial};
use shardwright_search::Control;

const STEPS: usize = 3;
const OPTIONS: Options = Options { seed: 5, steps: STEPS, trace: false, finals: true };

fn graph(model: &str, optimizer: Optimizer) -> Graph {
    build(model, &BuildOptions { batch: Some(8), optimizer, training: true }).unwrap()
}

fn program(graph: &Graph, devices: u32, solver: &str) -> ParallelGraph {
    let machine = builtin(&format!("flat:{devices}")).unwrap();
    let untied = solver == "fsdp";
    let problem = if untied { Problem::untied } else { Problem::new }(graph, &machine, None).unwrap();
    let control = Control { threads: 1, ..Control::new() };
    let found = search(&problem, strategy::find(solver).unwrap(), &Demands::default(), &control).unwrap();
    let relayouts = Relayouts::new(&machine, problem.mesh());
    lower(graph, &relayouts, &found.configs).unwrap()
}

struct Expected {
    losses: Vec<f64>,
    finals: Vec<Vec<f64>>,
}

fn serial(graph: &Graph) -> Expected {
    let mut serial = Serial::new(graph, OPTIONS.seed, &[]);
    let losses = (0..STEPS).map(|_| {
        serial.step().unwrap();
        serial.loss().unwrap()
    });
    let losses = losses.collect();
    let finals = graph.carries.iter().map(|c| serial.value(c.old).unwrap().to_f64_vec()).collect();
    Expected { losses, finals }
}

fn compare(graph: &Graph, outcome: &Outcome, expected: &Expected, tolerance: f64, name: &str) {
    assert_eq!(outcome.losses.len(), STEPS, "{name}");
    let apart = relative_error(&outcome.losses, &expected.losses);
    assert!(apart <= tolerance, "{name}: losses {:?} instead of {:?}", outcome.losses, expected.losses);
    assert_eq!(outcome.finals.len(), graph.carries.len(), "{name}");
    for ((carry, (tensor, value)), expected) in
        graph.carries.iter().zip(&outcome.finals).zip(&expected.finals)
    {
        assert_eq!(carry.old, *tensor);
        let apart = relative_error(&value.to_f64_vec(), expected);
        assert!(apart <= tolerance, "{name}: {} is off by {apart:e}", graph.tensor(*tensor).name);
    }
}

fn check(model: &str, optimizer: Optimizer, devices: u32, solvers: &[&str], tolerance: f64) {
    let graph = graph(model, optimizer);
    let expected = serial(&graph);
    for solver in solvers {
        let outcome = run(&graph, &program(&graph, devices, solver), OPTIONS).unwrap();
        compare(&graph, &outcome, &expected, tolerance, &format!("{model}, {solver} on {devices}"));
    }
}

#[test]
fn every_model_trains_as_the_serial_one_on_four_devices() {
    for family in FAMILIES {
        let model = format!("{}:{},dtype=f64", family.name, family.tiny);
        // Slowly: large steps of deep models without much data amplify every rounding.
        let tolerance = if family.name == "inception_v3" { 1e-9 } else { 1e-10 };
        check(&model, Optimizer::momentum(0.0005, 0.9), 4, &["data", "model"], tolerance);
    }
}

#[test]
fn plans_of_all_strategies_train_as_the_serial_one() {
    let strategies = ["data", "model", "owt", "megatron", "fsdp", "optcnn", "pase", "exact"];
    for devices in [2, 8] {
        // Adam makes whole steps of gradients that are only rounding, which transformers have.
        let (adam, momentum) = (Optimizer::adam(0.001), Optimizer::momentum(0.001, 0.9));
        for (name, optimizer) in [("mlp", adam), ("vgg16", adam), ("gpt", momentum)] {
            let family = FAMILIES.iter().find(|f| f.name == name).unwrap();
            let model = format!("{name}:{},dtype=f64", family.tiny);
            check(&model, optimizer, devices, &strategies, 1e-10);
        }
    }
}

#[test]
fn single_precision_stays_within_its_rounding() {
    for name in ["alexnet", "bert"] {
        let family = FAMILIES.iter().find(|f| f.name == name).unwrap();
        check(&format!("{name}:{}", family.tiny), Optimizer::sgd(0.01), 4, &["data", "exact"], 1e-4);
    }
}

#[test]
fn runs_repeat_bit_by_bit() {
    let family = FAMILIES.iter().find(|f| f.name == "gpt").unwrap();
    let graph = graph(&format!("gpt:{}", family.tiny), Optimizer::adam(0.001));
    let program = program(&graph, 8, "megatron");
    let first = run(&graph, &program, OPTIONS).unwrap();
    for _ in 0..5 {
        let again = run(&graph, &program, OPTIONS).unwrap();
        assert_eq!(again.losses, first.losses);
        assert_eq!(again.finals, first.finals);
    }
}

/// The same kernels on the same blocks, sums in the same order: nothing may differ.
#[test]
fn the_engine_equals_the_reference_executor_to_the_bit() {
    for (name, solver, devices) in [("vgg16", "exact", 4), ("gpt", "megatron", 8), ("alexnet", "owt", 2)] {
        let family = FAMILIES.iter().find(|f| f.name == name).unwrap();
        let graph = graph(&format!("{name}:{}", family.tiny), Optimizer::adam(0.001));
        let program = program(&graph, devices, solver);
        let mut reference = Reference::new(&graph, &program, OPTIONS.seed);
        let outcome = run(&graph, &program, OPTIONS).unwrap();
        for loss in &outcome.losses {
            reference.step().unwrap();
            assert_eq!(Some(*loss), reference.loss(), "{name}");
        }
        for (carry, (tensor, value)) in program.carries.iter().zip(&outcome.finals) {
            assert_eq!(reference.whole(carry.old).as_ref(), Some(value), "{}", graph.tensor(*tensor).name);
        }
    }
}

/// Ids that the table does not have: the device that meets one names the op, and all others stop.
#[test]
fn a_device_that_fails_ends_the_run_and_is_named() {
    let mut b = GraphBuilder::new("broken");
    let f32 = |shape: &[u64]| TensorType::new(DType::F32, shape);
    let table = b.source("table", f32(&[8, 4]), Role::Parameter, Init::Normal(Real(1.0))).unwrap();
    let ids = TensorType::new(DType::I32, [16]);
    let ids = b.source("ids", ids, Role::Input, Init::Below(1000)).unwrap();
    let rows = b.emit("lookup", Gather { axis: 0, base: 0, extent: 8 }, &[table, ids]).unwrap();
    let loss = b.emit("loss", Reduce::sum([0, 1].into_iter().collect()), &[rows]).unwrap();
    b.output(loss);
    train(&mut b, loss, &Optimizer::sgd(0.1)).unwrap();
    let graph = b.finish();
    let error = run(&graph, &program(&graph, 4, "data"), OPTIONS).unwrap_err().to_string();
    assert!(error.starts_with("device ") && error.contains("failed at `lookup`"), "{error}");
}
