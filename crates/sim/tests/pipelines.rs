//! Pipelined programs as tasks: with equal stages the bubble is that of the schedule's closed form, and with any stages the step is
//! that of the schedule's own simulation.

use shardwright_graph::{
    DType, Graph, GraphBuilder, Init, LayerId, OpId, Optimizer, Phase, Real, Role, TensorType, microbatch,
    ops::*, train,
};
use shardwright_lower::{ParallelGraph, Work, lower, weight_gradient_ops};
use shardwright_machine::{Machine, Seconds, builtin};
use shardwright_plan::Context;
use shardwright_sim::{
    Classes, Links, Schedule as Tasks, bubble, pass_spans, simulate_bubble, simulate_step,
};
use shardwright_space::{Assignment, AxisUse, Pipeline};
use shardwright_stages::schedule::{Costs, Schedule, simulate};
use std::num::NonZeroU32;

/// A picosecond: a send that takes no time would connect no devices.
const SEND: f64 = 1e-12;

/// A chain of products in micro-batches.
fn chain(layers: u32, micro_batches: u32) -> Graph {
    let mut b = GraphBuilder::new("chain");
    let ty = |shape: &[u64]| TensorType::new(DType::F32, shape);
    let mut x =
        b.source("x", ty(&[u64::from(micro_batches) * 2, 4]), Role::Input, Init::Normal(Real(1.0))).unwrap();
    for layer in 0..layers {
        let name = format!("w{layer}");
        let w = b.source(&name, ty(&[4, 4]), Role::Parameter, Init::Normal(Real(1.0))).unwrap();
        x = b.emit(&format!("fc{layer}"), Contract::parse("nc,co->no").unwrap(), &[x, w]).unwrap();
    }
    let loss = b.emit("loss", Reduce::sum((0..2).collect()), &[x]).unwrap();
    train(&mut b, loss, &Optimizer::sgd(0.1)).unwrap();
    b.output(loss);
    microbatch(&b.finish(), NonZeroU32::new(micro_batches).unwrap()).unwrap().graph
}

/// One product per stage.
fn assignment(graph: &Graph, machine: &Machine, schedule: Schedule) -> Assignment {
    let mesh = machine.mesh();
    let last = mesh.devices() * schedule.chunks() - 1;
    let stage = |layer: LayerId| {
        let name = &graph.layers[layer.index()].name;
        name.strip_prefix("fc").map_or(last, |number| number.parse().unwrap())
    };
    let pipeline = Pipeline::new(graph, mesh.all(), schedule, stage);
    let mut assignment = Assignment::replicated(graph, mesh);
    for (config, stage) in assignment.configs.iter_mut().zip(pipeline.op_stages(graph)) {
        pipeline.pin(mesh, stage, config);
    }
    Assignment { pipeline: Some(pipeline), ..assignment }
}

/// The tasks of a program whose products alone take time: picoseconds of the forward pass, the gradients of inputs and those of
/// weights, per stage.
fn tasks(context: &Context<'_>, program: &mut ParallelGraph, times: &[[i64; 3]]) -> Tasks {
    let graph = context.graph;
    for instruction in &mut program.instructions {
        if let Work::Reshard(step) = &mut instruction.work {
            step.seconds = Seconds(SEND);
        }
    }
    let weights = weight_gradient_ops(graph);
    // The first product has no gradients of inputs: its sum over micro-batches stands for it.
    let pipeline = program.pipeline.as_ref().unwrap().pipeline.clone();
    let stages = pipeline.op_stages(graph);
    let time = |op: OpId, _: bool| {
        let (node, stage) = (graph.node(op), stages[op.index()] as usize);
        let is_product = node.op.kind() == "contract";
        match node.phase {
            Phase::Forward if is_product => times[stage][0],
            Phase::Backward if is_product && !weights[op.index()] => times[stage][1],
            Phase::Backward if is_product && stage == 0 => times[0][1] + times[0][2],
            Phase::Backward if is_product => times[stage][2],
            _ => 0,
        }
    };
    Tasks::new(program, Classes::of(program), Links::Fifo, context.resharder.comm(), time).unwrap()
}

#[test]
fn equal_stages_have_the_bubble_of_the_closed_form() {
    let unit = 1_000_000;
    // The whole backward pass as one op: gradients of inputs are sent as soon as they exist.
    let (whole, split) = ([unit, 2 * unit, 0], [unit, unit, unit]);
    for (schedule, times, closed_form) in [
        (Schedule::GPipe, whole, (4 - 1) * 3 * unit),
        (Schedule::OneForwardOneBackward, whole, (4 - 1) * 3 * unit),
        (Schedule::Interleaved { chunks: 2 }, whole, (4 - 1) * 3 * unit),
        // (p-1)(F+B-2W) with B the whole backward pass.
        (Schedule::ZbH1, split, (4 - 1) * unit),
        // No bubble between passes: groups start later or end earlier, together by p-1 forward passes.
        (Schedule::ZbV, split, (4 - 1) * unit),
        // Gradients of inputs hide those of weights in 1F1B too: (p-1)(F+B-W).
        (Schedule::OneForwardOneBackward, split, (4 - 1) * 2 * unit),
    ] {
        let machine = builtin("flat:4").unwrap();
        let stages = 4 * schedule.chunks();
        let graph = chain(stages, 8);
        let context = Context::new(&graph, &machine, None, machine.mesh().clone(), false).unwrap();
        let assignment = assignment(&graph, &machine, schedule);
        let mut program = lower(&graph, &context.resharder, &assignment).unwrap().unrolled();
        let tasks = tasks(&context, &mut program, &vec![times; stages as usize]);
        let line = tasks.simulate();
        let spans = pass_spans(&program, &tasks, &line);
        let idle = bubble(&program, &tasks, &line, &spans);
        // Sends and waits for them take some picoseconds.
        assert!(idle.abs_diff(closed_form as u64) < 1000, "{}: {idle} not {closed_form}", schedule.name());
        assert!(spans.len() >= (stages * 8 * 2) as usize, "{}", spans.len());
    }
}

#[test]
fn steps_are_those_of_the_schedules_own_simulation() {
    let mut dice = 7u64;
    let mut next = || {
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((dice >> 33) % 9 + 1) as i64 * 1_000_000
    };
    for schedule in [
        Schedule::GPipe,
        Schedule::OneForwardOneBackward,
        Schedule::Interleaved { chunks: 3 },
        Schedule::ZbH1,
        Schedule::ZbV,
    ] {
        for devices in [2, 4] {
            let machine = builtin(&format!("flat:{devices}")).unwrap();
            let stages = devices * schedule.chunks();
            let graph = chain(stages, 8);
            let context = Context::new(&graph, &machine, None, machine.mesh().clone(), false).unwrap();
            let assignment = assignment(&graph, &machine, schedule);
            let mut times: Vec<[i64; 3]> = (0..stages).map(|_| [next(), next(), next()]).collect();
            if matches!(schedule, Schedule::ZbH1 | Schedule::ZbV) {
                // The first product has no gradients of inputs.
                times[0][1] = 0;
            } else {
                // The whole backward pass as one op: gradients of inputs are sent as soon as they exist.
                times.iter_mut().for_each(|time| time[2] = 0);
            }
            let mut program = lower(&graph, &context.resharder, &assignment).unwrap().unrolled();
            let makespan = tasks(&context, &mut program, &times).simulate().makespan();
            let of = |kind: usize| times.iter().map(|time| time[kind] as f64).collect::<Vec<f64>>();
            let costs = Costs {
                forward: of(0),
                backward_input: of(1),
                backward_weight: of(2),
                send: vec![1.0; stages as usize],
                hidden_share: 0.0,
            };
            let expected = simulate(schedule, devices, 8, &costs).unwrap().seconds;
            let what = format!("{} on {devices}: {makespan} not {expected}", schedule.name());
            assert!((makespan as f64 - expected).abs() < 10_000.0, "{what}");
        }
    }
}

#[test]
fn further_micro_batches_add_the_same_time() {
    let machine = builtin("flat:2").unwrap();
    for schedule in [Schedule::OneForwardOneBackward, Schedule::Interleaved { chunks: 2 }] {
        let graph = chain(2 * schedule.chunks(), 40);
        let context = Context::new(&graph, &machine, None, machine.mesh().clone(), false).unwrap();
        let assignment = assignment(&graph, &machine, schedule);
        // The step from some micro-batches, and from all of them.
        let few = simulate_step(&context, &assignment).unwrap().makespan;
        let program = lower(&graph, &context.resharder, &assignment).unwrap().unrolled();
        let sharing = shardwright_space::Sharing::AcrossLayers;
        let classes = Classes::of(&program);
        let all =
            shardwright_sim::schedule(&context, &assignment, &program, classes, Links::of(&machine), sharing);
        let all = all.unwrap().simulate().makespan();
        assert!(few.abs_diff(all) * 1000 <= all, "{}: {few} not {all}", schedule.name());
        let share = simulate_bubble(&context, &assignment).unwrap();
        assert!((0.0..1.0).contains(&share), "{share}");
    }
}

/// A product split along its depth waits for an all-reduce, during which the device could compute the next micro-batch. Only sums of
/// gradients may be late: nothing in the body waits for them.
#[test]
fn without_a_pipeline_a_device_computes_one_micro_batch_after_the_other() {
    let machine = builtin("2xa100").unwrap();
    let mesh = machine.mesh();
    let graph = chain(3, 4);
    let mut assignment = Assignment::replicated(&graph, mesh);
    for op in graph.op_ids().filter(|&op| graph.node(op).op.kind() == "contract") {
        let depth = graph.rule(op).factors.iter().position(|factor| factor.name == "c").unwrap();
        for axis in mesh.all().iter() {
            assignment.configs[op.index()].set(axis, AxisUse::Split(depth as u8));
        }
    }
    let context = Context::new(&graph, &machine, None, mesh.clone(), true).unwrap();
    let program = lower(&graph, &context.resharder, &assignment).unwrap().unrolled();
    let (classes, comm) = (Classes::of(&program), context.resharder.comm());
    let tasks = Tasks::new(&program, classes, Links::Fifo, comm, |_, _| 1_000_000).unwrap();
    let line = tasks.simulate();
    let computed = tasks.tasks.ids().filter(|&task| {
        let id = tasks.instructions[task];
        let sums = program.accumulates(program.instruction(id));
        program.body.contains(&id.index()) && tasks.owner(task) == Some(0) && !sums
    });
    let spans: Vec<(u64, u64)> = computed.map(|task| (line.start[task], line.end[task])).collect();
    assert!(spans.len() > 4 * 6);
    assert!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{spans:?}");
    assert!(spans.windows(2).any(|pair| pair[0].1 < pair[1].0), "some op waits for an all-reduce");
}
