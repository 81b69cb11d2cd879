//! Random pipelines run as the serial program: random models, stages, schedules, micro-batches, and configs inside stages.
//!
//! `PIPELINES=500` in the environment runs that many instead of a few.

mod random_plans;

use random_plans::{Random, configs};
use shardwright_cost::Resharder;
use shardwright_engine::{Check, Options, run};
use shardwright_graph::{
    DType, Graph, GraphBuilder, Init, LayerId, Optimizer, Real, Role, TensorId, TensorType, microbatch,
    ops::*, train,
};
use shardwright_lower::{Pass, Work, lower};
use shardwright_machine::{AxisSet, Mesh, builtin};
use shardwright_space::{Assignment, OpShapes, Pipeline, reads_data};
use shardwright_stages::schedule::{SCHEDULES, Schedule};
use shardwright_zoo::{BuildOptions, build};
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

const OPTIONS: Options<'static> =
    Options { given: &[], seed: 4, steps: 2, trace: true, finals: true, slow: &[], assist: None };
/// Random pipelines where the environment asks for no other number.
const CASES: usize = 40;
/// Samples of every model.
const BATCH: u64 = 24;

/// A random graph of products, sums, products of elements and activations, with shared weights.
fn random_graph(random: &mut Random) -> Graph {
    let mut b = GraphBuilder::new("random");
    let ty = |shape: &[u64]| TensorType::new(DType::F64, shape);
    let x = b.source("x", ty(&[BATCH, 4]), Role::Input, Init::Normal(Real(1.0))).unwrap();
    let weights: Vec<TensorId> = (0..4)
        .map(|i| b.source(&format!("w{i}"), ty(&[4, 4]), Role::Parameter, Init::Normal(Real(0.5))).unwrap())
        .collect();
    let mut tensors = vec![x];
    for _ in 0..8 + random.below(12) {
        // Mostly the last tensor, so that the graph is long.
        let back = random.below(3).min(tensors.len() - 1);
        let (x, y) = (tensors[tensors.len() - 1 - back], tensors[random.below(tensors.len())]);
        let w = weights[random.below(weights.len())];
        tensors.push(match random.below(6) {
            0 | 1 => b.emit("fc", Contract::parse("nk,ko->no").unwrap(), &[x, w]).unwrap(),
            2 => b.emit("add", Binary { f: BinaryFn::Add }, &[x, y]).unwrap(),
            3 => b.emit("relu", Unary { f: UnaryFn::Relu }, &[x]).unwrap(),
            4 => b.emit("tanh", Unary { f: UnaryFn::Tanh }, &[x]).unwrap(),
            _ => b.emit("softmax", Softmax { axis: 1 }, &[x]).unwrap(),
        });
    }
    let last = tensors[tensors.len() - 1];
    let last = b.emit("last", Contract::parse("nk,ko->no").unwrap(), &[last, weights[0]]).unwrap();
    let shape = b.shape(last).to_vec();
    let loss = b.emit("loss", Reduce::mean((0..2).collect(), &shape), &[last]).unwrap();
    b.output(loss);
    train(&mut b, loss, &Optimizer::momentum(0.01, 0.9)).unwrap();
    b.finish()
}

/// A random graph or a small model of the zoo.
fn model(random: &mut Random) -> Graph {
    let zoo = [
        "mlp:batch=24,input=12,hidden=8,layers=6,classes=6,dtype=f64",
        "lenet5:batch=24,image=12,width=0.5,classes=4,dtype=f64",
        "gpt:batch=24,layers=4,hidden=8,heads=4,vocab=12,seq=4,dtype=f64",
        "bert:batch=24,layers=2,hidden=8,heads=4,ffn=12,vocab=12,seq=4,dtype=f64",
        "transformer:batch=24,layers=1,hidden=8,heads=4,ffn=12,vocab=12,seq=4,dtype=f64",
    ];
    match random.below(2 * zoo.len()) {
        at if at < zoo.len() => {
            let optimizer = Optimizer::adam(0.001);
            let options = BuildOptions { optimizer, ..BuildOptions::default() };
            build(zoo[at], &options).unwrap()
        }
        _ => random_graph(random),
    }
}

/// Random stages of consecutive layers.
fn random_stages(graph: &Graph, stages: u32, random: &mut Random) -> Option<Vec<u32>> {
    let of_data = reads_data(graph);
    let mut layers: Vec<usize> = (0..graph.layers.len()).filter(|&layer| of_data[layer]).collect();
    layers.sort_by_key(|&layer| graph.layers[layer].forward);
    if layers.len() < stages as usize {
        return None;
    }
    let mut cuts = BTreeSet::new();
    while cuts.len() + 1 < stages as usize {
        cuts.insert(1 + random.below(layers.len() - 1));
    }
    let mut stage_of = vec![0; graph.layers.len()];
    for (place, &layer) in layers.iter().enumerate() {
        stage_of[layer] = cuts.iter().filter(|cut| **cut <= place).count() as u32;
    }
    Some(stage_of)
}

fn random_axes(mesh: &Mesh, random: &mut Random) -> AxisSet {
    let mut axes = AxisSet::EMPTY;
    while axes.is_empty() {
        axes = mesh.all().iter().filter(|_| random.below(2) == 0).collect();
    }
    axes
}

/// A random pipeline of a graph; none where the graph has too few layers or micro-batches.
fn random_pipeline(whole: &Graph, mesh: &Mesh, random: &mut Random) -> Option<(Graph, Assignment)> {
    let axes = random_axes(mesh, random);
    let groups = mesh.group_size(axes);
    let schedule = match SCHEDULES[1 + random.below(SCHEDULES.len() - 1)].1 {
        Schedule::Interleaved { .. } => Schedule::Interleaved { chunks: 1 + random.below(3) as u32 },
        other => other,
    };
    let count = [1, 2, 3, 4, 6, 8, 12, 24][random.below(8)];
    schedule.check(groups, count).ok()?;
    let graph = microbatch(whole, NonZeroU32::new(count)?).unwrap().graph;
    let stages = random_stages(&graph, groups * schedule.chunks(), random)?;
    let pipeline = Pipeline::new(&graph, axes, schedule, |layer: LayerId| stages[layer.index()]);
    let tied = random.below(2) == 0;
    let mut configs = configs(&graph, mesh, random, tied, false);
    for (config, stage) in configs.iter_mut().zip(pipeline.op_stages(&graph)) {
        pipeline.pin(mesh, stage, config);
    }
    let shapes: Vec<OpShapes> = graph.op_ids().map(|op| OpShapes::of(&graph, op)).collect();
    let assignment = Assignment { pipeline: Some(pipeline), ..Assignment::of(&graph, configs) };
    let assignment = assignment.without_impossible_sums(&graph, &shapes, mesh);
    Some((graph, assignment))
}

#[test]
fn random_pipelines_train_as_the_serial_program() {
    let cases = std::env::var("PIPELINES").ok().and_then(|count| count.parse().ok()).unwrap_or(CASES);
    let (mut done, mut schedules, mut tries) = (0, BTreeMap::new(), 0u64);
    while done < cases {
        tries += 1;
        assert!(tries < 20 * cases as u64, "{done} of {tries} random pipelines are possible");
        let mut random = Random(tries * 1_000_003);
        let whole = model(&mut random);
        let machine = builtin(&format!("flat:{}", [2, 3, 4, 6, 8][random.below(5)])).unwrap();
        let mesh = machine.mesh();
        let Some((graph, assignment)) = random_pipeline(&whole, mesh, &mut random) else { continue };
        let pipeline = assignment.pipeline.as_ref().unwrap();
        let (devices, name) = (mesh.devices(), pipeline.schedule.name());
        let what = format!(
            "case {tries}: {} on {devices} devices, {} groups, {name}, {} micro-batches",
            graph.name,
            pipeline.groups(mesh),
            graph.micro_batches
        );
        let program = lower(&graph, &Resharder::new(&machine, mesh), &assignment);
        let program = program.unwrap_or_else(|error| panic!("{what}: {error}"));
        let planned = program.peak_memory();
        let program = program.unrolled();
        assert_eq!(program.verify(), Ok(()), "{what}");
        let simulated = program.peak_memory();
        assert!(planned >= simulated, "{what}: {planned} bytes planned, {simulated} needed");
        let outcome = run(&graph, &program, OPTIONS).unwrap_or_else(|error| panic!("{what}: {error}"));
        let difference = Check::new(&graph, OPTIONS).unwrap().compare(&outcome).unwrap();
        assert!(difference.is_rounding(), "{what}: {difference:?}");
        for device in &outcome.devices {
            assert!(device.memory <= simulated, "{what}: {} bytes held of {simulated}", device.memory);
        }
        // Every device computes its passes in the order of its schedule.
        let orders = pipeline.schedule.orders(pipeline.groups(mesh), graph.micro_batches.get()).unwrap();
        for device in outcome.devices.iter().filter(|_| graph.micro_batches.get() > 1) {
            let group = program
                .pipeline
                .as_ref()
                .unwrap()
                .group_of(mesh, shardwright_machine::DeviceId(device.device));
            let mut turn: BTreeMap<(u32, Pass, u32), usize> = BTreeMap::new();
            for (at, slot) in orders[group as usize].iter().enumerate() {
                for action in slot.actions() {
                    let stage = pipeline.schedule.stage(pipeline.groups(mesh), group, action.chunk);
                    let passes = match action.pass {
                        Pass::Backward => vec![Pass::BackwardInput, Pass::BackwardWeight],
                        one => vec![one],
                    };
                    turn.extend(passes.into_iter().map(|pass| ((stage, pass, action.micro_batch), at)));
                }
            }
            let mut now = 0;
            let length = device.events.len() / OPTIONS.steps;
            for event in &device.events[..length] {
                let Some(pass) = program.stage_pass(event.instruction) else { continue };
                if matches!(program.instruction(event.instruction).work, Work::Compute { .. }) {
                    let own = turn[&(pass.stage, pass.pass, pass.micro_batch)];
                    assert!(own >= now, "{what}: device {} runs slot {own} after {now}", device.device);
                    now = own;
                }
            }
        }
        *schedules.entry(name).or_insert(0) += 1;
        done += 1;
    }
    println!("{done} pipelines of {tries} tries: {schedules:?}");
    assert!(schedules.len() >= SCHEDULES.len() - 2, "{schedules:?}");
}
