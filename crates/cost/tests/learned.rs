//! Costs that learned from a run, and machines whose collectives are slower inside of steps.

use shardwright_cost::{
    Collective, Comm, CostFile, Engine, LearnedOp, LearnedRun, OperatorTimes, TimeSource, WorkKind,
};
use shardwright_graph::{DType, RooflineKind, Workload, WorkloadClass, WorkloadSizes};
use shardwright_machine::{Bytes, CollectiveKind, EngineName, Machine, builtin};
use std::collections::BTreeMap;

fn workload(class: &str, sizes: &[u64]) -> Workload {
    let (class, roofline) = (WorkloadClass::find(class).unwrap(), RooflineKind::Stream);
    let none = WorkloadSizes::new();
    Workload { class, dtype: DType::F32, sizes: none, flops: 0, bytes: 0, roofline }.resized(sizes)
}

fn run() -> LearnedRun {
    let own = LearnedOp { class: "gemm".into(), dtype: DType::F32, sizes: vec![1, 64, 64, 64], factor: 3.0 };
    LearnedRun {
        model: "m".into(),
        weights: "w".into(),
        engine: Some(EngineName::TorchCompile),
        release: "0.0.0".into(),
        computing: BTreeMap::from([(WorkKind::Products, 2.0), (WorkKind::MemoryBound, 1.5)]),
        ops: vec![own],
        collectives: BTreeMap::from([(CollectiveKind::AllReduce, 2.1)]),
    }
}

fn costs(run: Option<LearnedRun>) -> CostFile {
    let mut costs = CostFile::new(["H200", "2026-01-01", "s", "m"].map(String::from), Vec::new()).unwrap();
    costs.run = run;
    costs
}

#[test]
fn factors_multiply_times_of_their_kind_and_of_their_ops() {
    let machine = builtin("h200x64").unwrap();
    let device = &machine.spec().device;
    let (plain, learned) = (costs(None), costs(Some(run())));
    let seconds = |costs: &CostFile, work: &Workload| {
        let estimate = OperatorTimes::new(device, Some(costs)).unwrap().estimate(work);
        assert_eq!(estimate.source, TimeSource::Roofline);
        estimate.seconds.0
    };
    let factor = |work: &Workload| seconds(&learned, work) / seconds(&plain, work);
    assert!((factor(&workload("gemm", &[1, 64, 64, 64])) - 3.0).abs() < 1e-9, "its own");
    assert!((factor(&workload("gemm", &[1, 512, 64, 64])) - 2.0).abs() < 1e-9, "that of products");
    assert!((factor(&workload("binary", &[1 << 24])) - 1.5).abs() < 1e-9);
    let conv = workload("conv", &[64, 1, 256, 1024, 14, 14, 1, 1, 1, 1]);
    assert_eq!(factor(&conv), 1.0, "the run had none");
    let stream = |costs| OperatorTimes::new(device, Some(costs)).unwrap().stream(1 << 30, 0.5).0;
    assert!((stream(&learned) / stream(&plain) - 1.5).abs() < 1e-9, "fused kernels too");
}

#[test]
fn factors_survive_writing_and_reading_and_are_checked() {
    let learned = costs(Some(run()));
    let text = learned.to_json();
    assert_eq!(CostFile::from_json(text.as_bytes()).unwrap(), learned);
    for (wrong, with) in [("2.1", "0.0"), ("2.1", "1e9"), ("3.0", "-1.0")] {
        let error = CostFile::from_json(text.replace(wrong, with).as_bytes()).unwrap_err().to_string();
        assert!(error.contains("run: a factor of") && error.contains("read the trace again"), "{error}");
    }
    let unknown = text.replace("memory-bound", "memory-free");
    assert!(CostFile::from_json(unknown.as_bytes()).unwrap_err().to_string().contains("memory-free"));
}

#[test]
fn slowed_collectives_take_that_many_times_as_long() {
    let machine = builtin("h100x64").unwrap();
    let mut spec = machine.spec().clone();
    spec.slowdown.insert(CollectiveKind::AllReduce, 2.1);
    let slowed = Machine::try_from(spec.clone()).unwrap();
    assert_ne!(slowed.fingerprint(), machine.fingerprint(), "prices differ");
    let seconds = |machine: &Machine, kind| {
        Comm::new(machine, machine.mesh()).seconds(kind, machine.mesh().all(), Bytes(1 << 28)).0
    };
    let factor = |kind| seconds(&slowed, kind) / seconds(&machine, kind);
    assert!((factor(Collective::AllReduce) - 2.1).abs() < 1e-9);
    assert_eq!(factor(Collective::AllGather), 1.0);
    spec.slowdown.insert(CollectiveKind::Permute, 0.0);
    assert!(Machine::try_from(spec).unwrap_err().to_string().contains("slowdown.permute"));
}

#[test]
fn reserves_leave_less_for_plans_where_devices_communicate() {
    let engine = Engine::of(EngineName::TorchCompile).unwrap();
    let memory = 80 << 30;
    let (alone, many) = (engine.reserves.bytes(memory, false), engine.reserves.bytes(memory, true));
    assert!(alone > engine.reserves.context_mib << 20 && many > alone && many < memory / 4);
    // Tensors and their fragments fill the memory.
    let fixed = engine.reserves.context_mib << 20;
    let usable = (memory - alone) as f64;
    assert!((usable * (1.0 + engine.reserves.fragments) / (memory - fixed) as f64 - 1.0).abs() < 1e-6);
    assert_eq!(Engine::of(EngineName::Embedded).unwrap().reserves.bytes(memory, true), 0);
}
