//! Parallel equals serial: whole small models, trained for some steps under the plans of all strategies.

use shardwright_cost::Resharder;
use shardwright_engine::{Check, Difference, Options, run};
use shardwright_graph::{
    DType, Graph, GraphBuilder, Init, Optimizer, Real, Role, TensorType,
    ops::{Gather, Reduce},
    train,
};
use shardwright_lower::{ParallelGraph, lower};
use shardwright_machine::builtin;
use shardwright_plan::Constraints;
use shardwright_runtime::{HostTensor, Reference};
use shardwright_search::Control;
use shardwright_strategies::{Planner, find};
use shardwright_zoo::{BuildOptions, FAMILIES, build};

const STEPS: usize = 3;
const OPTIONS: Options<'static> =
    Options { given: &[], seed: 5, steps: STEPS, trace: false, finals: true, slow: &[], assist: None };

fn graph(model: &str, optimizer: Optimizer) -> Graph {
    build(model, &BuildOptions { batch: Some(8), optimizer, ..BuildOptions::default() }).unwrap()
}

fn program(graph: &Graph, devices: u32, solver: &str) -> ParallelGraph {
    let machine = builtin(&format!("flat:{devices}")).unwrap();
    let planner = Planner::new(graph, &machine, None, solver == "fsdp");
    let control = Control { threads: 1, ..Control::new() };
    let solution = find(solver).unwrap().solve(&planner, &Constraints::default(), &control).unwrap();
    let resharder = Resharder::new(&machine, solution.context.mesh());
    lower(graph, &resharder, &solution.assignment).unwrap()
}

fn check(model: &str, optimizer: Optimizer, devices: u32, solvers: &[&str]) -> Vec<Difference> {
    let graph = graph(model, optimizer);
    let serial = Check::new(&graph, OPTIONS).unwrap();
    let compared = |solver: &&str| {
        let outcome = run(&graph, &program(&graph, devices, solver), OPTIONS).unwrap();
        let difference = serial.compare(&outcome).unwrap();
        assert!(difference.is_rounding(), "{model}, {solver} on {devices}: {difference:?}");
        difference
    };
    solvers.iter().map(compared).collect()
}

fn tiny(name: &str) -> String {
    let family = FAMILIES.iter().find(|f| f.name == name).unwrap();
    format!("{name}:{}", family.tiny)
}

#[test]
fn plans_of_all_strategies_train_as_the_serial_one() {
    let strategies = ["data", "model", "owt", "megatron", "fsdp", "optcnn", "pase", "soybean", "exact"];
    for devices in [2, 8] {
        for name in ["mlp", "vgg16", "gpt"] {
            let found =
                check(&format!("{},dtype=f64", tiny(name)), Optimizer::adam(0.001), devices, &strategies);
            assert!(found.iter().all(|d| d.error <= 1e-10), "{name}: {found:?}");
        }
    }
}

#[test]
fn single_precision_stays_within_its_rounding() {
    for name in ["alexnet", "bert"] {
        let found = check(&tiny(name), Optimizer::sgd(0.01), 4, &["data", "exact"]);
        assert!(found.iter().all(|d| d.error <= 1e-4), "{name}: {found:?}");
    }
}

/// A hundred batch norms over a few small images amplify the last bits ten million times, in the serial program as well.
/// The check distinguishes that from a mistake.
#[test]
fn what_norms_make_of_rounding_is_told_from_mistakes() {
    let model = "inception_v3:batch=4,image=107,width=0.0625,classes=4,dropout=0,dtype=f64";
    let graph = graph(model, Optimizer::momentum(0.02, 0.9));
    let serial = Check::new(&graph, OPTIONS).unwrap();
    let largest = (0..=graph.carries.len()).map(|at| serial.changes(0, at).unwrap()[0]).fold(0.0, f64::max);
    assert!(largest > 1e-10, "{largest:e}");
    let mut outcome = run(&graph, &program(&graph, 4, "data"), OPTIONS).unwrap();
    let difference = serial.compare(&outcome).unwrap();
    println!("the last bits change {largest:e}, splitting the batch {difference:?}");
    assert!(difference.is_rounding(), "{difference:?}");
    let (tensor, value) = &mut outcome.finals[0];
    let mut numbers = value.to_f64_vec();
    numbers[0] += 1e-5 * numbers.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    *value = HostTensor::from_vec(value.shape().clone(), numbers);
    let name = graph.tensor(*tensor).name.clone();
    let difference = serial.compare(&outcome).unwrap();
    assert!(!difference.is_rounding() && difference.worst == name, "{difference:?}");
}

/// Scores of 4 heads and 512 tokens are 4 MiB per sample and layer; the rest of a layer is far smaller.
#[test]
fn fused_attention_holds_no_scores_in_a_run() {
    let memory = |form: &str| {
        let model = format!("gpt:layers=2,hidden=16,heads=4,vocab=11,seq=512,attention={form}");
        let graph = graph(&model, Optimizer::sgd(0.01));
        let outcome = run(&graph, &program(&graph, 4, "data"), Options { steps: 1, ..OPTIONS }).unwrap();
        outcome.devices.iter().map(|device| device.memory).max().unwrap()
    };
    let (fused, plain) = (memory("fused"), memory("plain"));
    assert!(plain > 16 << 20 && fused < 4 << 20, "fused: {fused} bytes, plain: {plain} bytes");
}

#[test]
fn runs_repeat_bit_by_bit() {
    let graph = graph(&tiny("gpt"), Optimizer::adam(0.001));
    let program = program(&graph, 8, "megatron");
    let first = run(&graph, &program, OPTIONS).unwrap();
    for _ in 0..5 {
        let again = run(&graph, &program, OPTIONS).unwrap();
        assert_eq!(again.losses, first.losses);
        assert_eq!(again.finals, first.finals);
    }
}

/// The same kernels on the same blocks, sums in the same order: all bits are equal.
#[test]
fn the_engine_equals_the_reference_executor_to_the_bit() {
    for (name, solver, devices) in [("vgg16", "exact", 4), ("gpt", "megatron", 8), ("alexnet", "owt", 2)] {
        let graph = graph(&tiny(name), Optimizer::adam(0.001));
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

/// An id outside of the table: the device that reads it names the op, and all others stop.
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
