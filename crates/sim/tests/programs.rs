//! Lowered programs of real models, simulated.

mod data_parallel;

use data_parallel::data_parallel;
use proptest::prelude::*;
use shardwright_cost::{SpeedSample, SpeedTrace};
use shardwright_graph::{
    DType, Graph, GraphBuilder, Init, OpId, Real, RecomputePolicy, Role, TensorType, microbatch, ops::*,
    remat,
};
use shardwright_lower::{InstructionId, ParallelGraph, lower};
use shardwright_machine::{Machine, builtin};
use shardwright_plan::{Context, SearchProblem};
use shardwright_search::{Control, Solver, exact::Exact};
use shardwright_sim::{Band, Classes, Links, Memory, Pass, Schedule, Trace, bands, usages};
use shardwright_space::{Assignment, AxisUse, Config, Sharing, assign_layouts, configs_with_pins};
use shardwright_zoo::{BuildOptions, build};
use std::collections::BTreeSet;

const MODELS: [&str; 3] =
    ["mlp:batch=16,hidden=64,layers=3", "lenet5:batch=8", "nmt:batch=4,seq=3,hidden=8,vocab=12,unroll=3"];

fn model(spec: &str) -> Graph {
    build(spec, &BuildOptions::default()).unwrap()
}

/// A pseudo-random config of every op, pinned or not.
fn random_assignment(context: &Context<'_>, mut seed: u64) -> Assignment {
    let mut next = move || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize
    };
    let config = |op: OpId| {
        let all = configs_with_pins(&context.shapes[op.index()].rule, context.mesh());
        let choice = next() % all.len();
        all[choice].clone()
    };
    Assignment::new(context.graph.op_ids().map(config).collect())
}

/// The context on the machine's prime axes.
fn context<'g>(graph: &'g Graph, machine: &'g Machine) -> Context<'g> {
    Context::new(graph, machine, None, machine.mesh().clone(), false).unwrap()
}

/// The configs that ops run with: sums of partial results have others than assigned.
fn running_configs(context: &Context<'_>, assignment: &Assignment) -> Vec<Config> {
    let (graph, shapes, mesh) = (context.graph, &context.shapes, context.mesh());
    assign_layouts(graph, shapes, &context.transfers, assignment, mesh, Sharing::AcrossLayers).configs
}

fn schedule(
    context: &Context<'_>,
    program: &ParallelGraph,
    assignment: &Assignment,
    classes: Classes,
) -> Schedule {
    let sharing = Sharing::AcrossLayers;
    shardwright_sim::schedule(context, assignment, program, classes, Links::Fifo, sharing).unwrap()
}

fn machine(name: &str) -> Machine {
    builtin(name).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn one_device_of_a_class_stands_for_all(
        (spec, name, seed) in (prop::sample::select(&MODELS[..]), prop::sample::select(&["flat:4", "p100x16:8"][..]), any::<u64>())
    ) {
        let (graph, machine) = (model(spec), machine(name));
        let context = context(&graph, &machine);
        let assignment = random_assignment(&context, seed);
        let program = lower(&graph, &context.resharder, &assignment).unwrap();
        let few = schedule(&context, &program, &assignment, Classes::of(&program));
        let all = schedule(&context, &program, &assignment, Classes::each(&program.mesh));
        let (few_line, all_line) = (few.simulate(), all.simulate());
        prop_assert_eq!(few_line.makespan(), all_line.makespan());
        let (few_use, all_use) = (usages(&few, &few_line), usages(&all, &all_line));
        for device in program.devices() {
            let class = few.classes.class(&program.mesh, device);
            for at in 0..program.instructions.len() {
                let id = InstructionId(at as u32);
                let times = |line: &shardwright_sim::Timeline, task: Option<u32>| {
                    task.map(|task| (line.start[task as usize], line.end[task as usize]))
                };
                prop_assert_eq!(times(&few_line, few.task(id, class)), times(&all_line, all.task(id, device.0)));
            }
            prop_assert_eq!(few_use[class as usize], all_use[device.index()]);
            let few_memory = Memory::of(&program, &few, &few_line, class);
            let all_memory = Memory::of(&program, &all, &all_line, device.0);
            prop_assert_eq!(few_memory, all_memory);
        }
        let sizes: u32 = few.classes.ids().map(|class| few.classes.size(&program.mesh, class)).sum();
        prop_assert_eq!(sizes, program.mesh.devices());
    }
}

/// Every task in sequence is what the cost model adds up, less what the program shares and joins.
#[test]
fn overlap_never_costs_time() {
    for spec in MODELS {
        for name in ["flat:4", "p100x16"] {
            let (graph, machine) = (model(spec), machine(name));
            let problem = SearchProblem::new(&graph, &machine, None).unwrap();
            let context = &*problem.context;
            let exact = Exact.solve(&problem.network, &Control::new()).choice.unwrap();
            for assignment in [data_parallel(context), problem.assignment(&exact)] {
                let program = lower(&graph, &context.resharder, &assignment).unwrap();
                let schedule = schedule(context, &program, &assignment, Classes::of(&program));
                let line = schedule.simulate();
                let times = context.times().unwrap();
                let configs = running_configs(context, &assignment);
                let computing = graph.op_ids().map(|op| times.compute(op, &configs[op.index()])).sum::<i64>();
                let usage = usages(&schedule, &line)[0];
                assert_eq!(usage.busy as i64, computing, "{spec} {name}");
                assert_eq!(usage.busy + usage.idle, line.makespan());
                let objective = context.price(&assignment).unwrap().objective();
                assert!(line.makespan() as i64 <= objective, "{spec} {name}");
                let memory = Memory::of(&program, &schedule, &line, 0);
                assert!(memory.peak().0 > 0);
                let held: u64 = memory.at_peak.iter().map(|stay| stay.bytes.0).sum();
                assert_eq!(held, memory.peak().0, "{spec} {name}: the buffers at the peak are the peak");
                assert_eq!(memory.peak().0, program.peak_memory(), "{spec} {name}");
                assert!(memory.levels.is_sorted_by(|a, b| a.0 < b.0));
            }
        }
    }
}

/// A product whose inner sum two devices share, then half of the rows each: bytes by hand.
#[test]
fn memory_follows_what_is_alive() {
    let f32 = |shape: &[u64]| TensorType::new(DType::F32, shape);
    let mut b = GraphBuilder::new("product");
    let x = b.source("x", f32(&[8, 6]), Role::Input, Init::Normal(Real(1.0))).unwrap();
    let w = b.source("w", f32(&[6, 4]), Role::Parameter, Init::Normal(Real(1.0))).unwrap();
    let y = b.emit("fc", Contract::parse("nc,co->no").unwrap(), &[x, w]).unwrap();
    let z = b.emit("relu", Unary { f: UnaryFn::Relu }, &[y]).unwrap();
    b.output(z);
    let (graph, machine) = (b.finish(), machine("flat:2"));
    let context = context(&graph, &machine);
    let split = |op: u32, factor| Config::new([AxisUse::Split(graph.rule(OpId(op)).find(factor).unwrap())]);
    let assignment = Assignment::new(vec![split(0, "c"), split(1, "d0")]);
    let program = lower(&graph, &context.resharder, &assignment).unwrap();
    let schedule = schedule(&context, &program, &assignment, Classes::of(&program));
    let memory = Memory::of(&program, &schedule, &schedule.simulate(), 0);
    // Half of x and of w, all step long; then the partial sums; then they and the half that is made of them; then
    // that half and the result.
    // Buffers are whole cache lines of 64 bytes.
    let (sources, partial, half) = (128 + 64, 8 * 4 * 4, 4 * 4 * 4);
    let bytes: Vec<u64> = memory.levels.iter().map(|(_, bytes)| bytes.0).collect();
    let expected = [sources + partial, sources + partial + half, sources + 2 * half];
    assert_eq!(bytes[..3], expected, "{memory:?}");
    assert_eq!((memory.peak().0, memory.fullest()), (expected[1], memory.levels[1].0));
    assert_eq!(memory.stays.len(), 5);
}

/// The tasks of data parallelism, with one class per device.
fn data_parallel_tasks() -> Schedule {
    let (graph, machine) = (model(MODELS[0]), machine("flat:4"));
    let context = context(&graph, &machine);
    let assignment = data_parallel(&context);
    let program = lower(&graph, &context.resharder, &assignment).unwrap();
    schedule(&context, &program, &assignment, Classes::each(&program.mesh))
}

#[test]
fn noise_is_the_same_for_the_same_seed_and_stays_in_bounds() {
    let plain = data_parallel_tasks();
    let noisy = |seed| {
        let mut schedule = plain.clone();
        schedule.perturb(0.2, seed);
        for task in schedule.tasks.ids() {
            let (was, is) = (plain.tasks.duration(task) as f64, schedule.tasks.duration(task) as f64);
            assert!((is - was).abs() <= 0.2 * was + 1.0, "{was} became {is}");
        }
        schedule.simulate().makespan()
    };
    assert_eq!(noisy(1), noisy(1));
    assert_ne!(noisy(1), noisy(2));
}

#[test]
fn uneven_devices_take_what_their_paces_say_and_wait_for_the_slowest() {
    let plain = data_parallel_tasks();
    let work = |schedule: &Schedule, class| {
        let own = schedule.tasks.ids().filter(|&task| schedule.owner(task) == Some(class));
        own.map(|task| schedule.tasks.duration(task)).sum::<u64>() as f64
    };
    let devices = plain.classes.len();
    let paced = |moments: Vec<SpeedSample>, seed| {
        let mut schedule = plain.clone();
        schedule.apply_speeds(&SpeedTrace::new(moments).unwrap(), seed);
        schedule
    };
    // One is slower by half all the time; who it is depends on the seed.
    let mut thousandths = vec![1000; devices];
    thousandths[0] = 1500;
    let slow = |seed| paced(vec![SpeedSample { microseconds: 10, thousandths: thousandths.clone() }], seed);
    let slower = |schedule: &Schedule| -> Vec<u32> {
        let late = |&class: &u32| work(schedule, class) > 1.4 * work(&plain, class);
        plain.classes.ids().filter(late).collect()
    };
    let who: BTreeSet<u32> = (0..40)
        .map(|seed| {
            let late = slower(&slow(seed));
            assert_eq!(late.len(), 1, "{late:?}");
            late[0]
        })
        .collect();
    assert!(who.len() > 1);
    assert_eq!(slow(3).simulate().makespan(), slow(3).simulate().makespan());
    let late = slower(&slow(1))[0];
    let more = work(&slow(1), late) / work(&plain, late);
    assert!((more - 1.5).abs() < 1e-3, "{more}");
    // Long moments: a step is in one of them. Short ones: in several.
    let both = |microseconds, seed| {
        let moments = [500, 2000].map(|t| SpeedSample { microseconds, thousandths: vec![t; devices] });
        work(&paced(moments.to_vec(), seed), 0) / work(&plain, 0)
    };
    for seed in 0..10 {
        let (long, short) = (both(1_000_000, seed), both(1, seed));
        assert!([0.5, 2.0].iter().any(|pace| (long - pace).abs() < 1e-3), "{long}");
        assert!((0.55..1.8).contains(&short), "{short}");
    }
    // Equal devices at their usual pace: nothing changes.
    let even = paced(vec![SpeedSample { microseconds: 7, thousandths: vec![1000; 3] }], 5);
    assert_eq!(even.simulate().makespan(), plain.simulate().makespan());
}

#[test]
fn a_trace_has_every_task_on_its_track() {
    let (graph, machine) = (model(MODELS[0]), machine("p100x16"));
    let context = context(&graph, &machine);
    let assignment = data_parallel(&context);
    let program = lower(&graph, &context.resharder, &assignment).unwrap();
    let schedule = schedule(&context, &program, &assignment, Classes::of(&program));
    let timeline = schedule.simulate();
    let config = |op: OpId| assignment.config(op).show(&context.shapes[op.index()].rule, context.mesh());
    let comm = context.resharder.comm();
    let trace = Trace {
        graph: &graph,
        program: &program,
        comm,
        schedule: &schedule,
        timeline: &timeline,
        config: &config,
    };
    let mut text = Vec::new();
    trace.write(&mut text).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let events = json["traceEvents"].as_array().unwrap();
    let of_kind = |kind: &str| events.iter().filter(|e| e["ph"] == kind).count();
    let boxes: usize = schedule.tasks.ids().map(|task| schedule.tasks.streams(task).len()).sum();
    let classes = schedule.classes.ids();
    let passes: usize = classes.map(|class| bands(&graph, &program, &schedule, &timeline, class).len()).sum();
    assert_eq!(of_kind("X"), boxes + passes);
    assert!(of_kind("C") > 1);
    let last = events.iter().filter_map(|e| Some(e["ts"].as_f64()? + e["dur"].as_f64()?)).fold(0.0, f64::max);
    assert!((last - timeline.makespan() as f64 / 1e6).abs() < 1e-6);
    let reduce = events.iter().find(|e| e["name"].as_str().unwrap().starts_with("all-reduce")).unwrap();
    assert!(reduce["args"]["bytes_sent"].as_u64().unwrap() > 0);
}

#[test]
fn bands_cover_all_computing_in_the_order_of_passes() {
    let whole = model("mlp:batch=8,hidden=32,layers=4");
    let base = microbatch(&whole, 4.try_into().unwrap()).unwrap().graph;
    let graph = remat(&base, &RecomputePolicy::Full.ops(&base)).unwrap();
    let machine = machine("flat:2");
    let context = context(&graph, &machine);
    let assignment = Assignment::replicated(&graph, machine.mesh());
    let program = lower(&graph, &context.resharder, &assignment).unwrap().unrolled();
    let schedule = schedule(&context, &program, &assignment, Classes::of(&program));
    let timeline = schedule.simulate();
    let bands = bands(&graph, &program, &schedule, &timeline, 0);
    assert!(bands.windows(2).all(|pair| pair[0].end <= pair[1].start), "one device computes in sequence");
    assert_eq!((bands[0].start, bands.last().unwrap().end), (0, timeline.makespan()));
    for micro_batch in 0..4 {
        for pass in [Pass::Forward, Pass::Backward, Pass::Recompute] {
            let own = |band: &Band| (band.micro_batch, band.pass) == (Some(micro_batch), pass);
            assert!(bands.iter().any(own), "{micro_batch} {pass:?}");
        }
    }
    assert_eq!(bands.last().map(|band| (band.micro_batch, band.pass)), Some((None, Pass::Update)));
}

/// Gradients are reduced to shards in every micro-batch, as ZeRO-2 does: the reductions overlap with the backward pass.
#[test]
fn sums_of_gradients_hold_up_no_other_op_of_the_body() {
    let whole = model("mlp:batch=16,hidden=64,layers=4");
    let graph = microbatch(&whole, 4.try_into().unwrap()).unwrap().graph;
    let machine = machine("flat:2");
    let context = context(&graph, &machine);
    let mut assignment = data_parallel(&context);
    let accumulates = |op: OpId| graph.node(op).op.operator().accumulates();
    for op in graph.op_ids().filter(|&op| accumulates(op)) {
        let shards = Config::new([AxisUse::Split(0)]);
        if shards.check(&context.shapes[op.index()].rule, context.mesh()).is_ok() {
            assignment.configs[op.index()] = shards;
        }
    }
    let program = lower(&graph, &context.resharder, &assignment).unwrap().unrolled();
    let own = schedule(&context, &program, &assignment, Classes::of(&program));
    let sums: Vec<bool> =
        own.instructions.iter().map(|id| program.accumulates(program.instruction(*id))).collect();
    let late = |&task: &usize| {
        sums[task] && own.tasks.waits_for(task).iter().any(|&before| own.owner(before as usize).is_none())
    };
    assert!(own.tasks.ids().filter(late).count() >= 4, "sums wait for reductions");
    for task in own.tasks.ids().filter(|&task| program.body.contains(&own.instructions[task].index())) {
        let held_up = own.tasks.waits_for(task).iter().any(|&before| sums[before as usize]);
        assert!(sums[task] || !held_up, "task {task} waits for a sum");
    }
    let timeline = own.simulate();
    let (exposed, all) = {
        let usage = &usages(&own, &timeline)[0];
        (usage.exposed, usage.communicating)
    };
    assert!(exposed < all, "{exposed} of {all} ps are exposed");
}
