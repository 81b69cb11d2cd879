//! Kernels beside collectives are slower, and so are steps on slow hosts.

use shardwright_graph::Graph;
use shardwright_machine::{EngineName, Machine, Seconds, builtin};
use shardwright_plan::Context;
use shardwright_sim::{Classes, Links, Schedule, schedule, simulate_step, usages};
use shardwright_space::{Assignment, AxisUse, Config, Sharing};
use shardwright_zoo::{BuildOptions, build};

/// Eight H100s whose steps an engine runs.
fn machine(engine: Option<EngineName>) -> Machine {
    let mut spec = builtin("8xh100").unwrap().spec().clone();
    spec.device.engine = engine;
    Machine::new(spec).unwrap()
}

/// Every layer split along the batch.
fn data_parallel(graph: &Graph, context: &Context<'_>) -> Assignment {
    let mesh = context.machine.mesh();
    let batch = Config::new([AxisUse::Split(0); 3]);
    let mut assignment = Assignment::replicated(graph, mesh);
    for layer in &context.layers.members {
        if batch.check(&context.shapes[layer.forward().index()].rule, mesh).is_ok() {
            for (op, config) in layer.ops.iter().zip(layer.configs(&context.shapes, mesh, &batch)) {
                assignment.configs[op.index()] = config;
            }
        }
    }
    assignment
}

fn tasks(context: &Context<'_>, assignment: &Assignment, links: Links) -> Schedule {
    let program = shardwright_lower::lower(context.graph, &context.resharder, assignment).unwrap();
    let classes = Classes::of(&program);
    schedule(context, assignment, &program, classes, links, Sharing::AcrossLayers).unwrap()
}

#[test]
fn computing_beside_collectives_loses_a_share_of_its_rate() {
    let graph = build("mlp:batch=4096,hidden=4096,layers=6", &BuildOptions::default()).unwrap();
    let machine = machine(Some(EngineName::TorchCompile));
    let context = Context::new(&graph, &machine, None, machine.mesh().clone(), false).unwrap();
    let shares = context.lost_beside_collectives().unwrap();
    let [least, most] = [f64::min, f64::max].map(|of| shares.iter().copied().reduce(of).unwrap());
    assert!(0.0 < least && least < most, "products lose more than element-wise ops");
    let assignment = data_parallel(&graph, &context);
    // Without overlap nothing runs beside a collective.
    let alone = tasks(&context, &assignment, Links::Serial);
    let slowed = tasks(&context, &assignment, Links::Fifo);
    let timeline = slowed.simulate();
    let usage = usages(&slowed, &timeline)[0];
    let mut lost = 0;
    for task in slowed.tasks.ids() {
        let (own, before) = (slowed.tasks.duration(task), alone.tasks.duration(task));
        if slowed.owner(task).is_none() {
            assert_eq!(own, before, "collectives keep their time");
            continue;
        }
        assert!(own >= before && own as f64 <= before as f64 / (1.0 - most) + 1.0, "{before} {own}");
        lost += own - before;
    }
    // Computing lost a share of the time in which transfers ran beside it.
    let beside = usage.communicating - usage.exposed;
    assert!(beside > 0);
    let expected = [least, most].map(|share| share * beside as f64);
    assert!(0.98 * expected[0] < lost as f64 && (lost as f64) < 1.02 * expected[1], "{lost} {expected:?}");
}

#[test]
fn without_an_engine_nothing_is_slowed() {
    let graph = build("mlp:batch=4096,hidden=4096,layers=6", &BuildOptions::default()).unwrap();
    let machine = machine(None);
    let context = Context::new(&graph, &machine, None, machine.mesh().clone(), false).unwrap();
    let assignment = data_parallel(&graph, &context);
    let [beside, alone] = [Links::Fifo, Links::Serial].map(|links| tasks(&context, &assignment, links));
    assert!(beside.tasks.ids().all(|task| beside.tasks.duration(task) == alone.tasks.duration(task)));
    let step = simulate_step(&context, &assignment).unwrap();
    assert_eq!(beside.simulate().makespan(), step.makespan);
}

#[test]
fn a_host_that_launches_half_as_fast_doubles_steps_that_it_bounds() {
    let graph = build("mlp:batch=4,hidden=16,layers=6", &BuildOptions::default()).unwrap();
    let step = |microseconds: Option<f64>| {
        let mut spec = builtin("1xh100").unwrap().spec().clone();
        spec.device.engine = Some(EngineName::TorchEager);
        spec.device.host_launch = microseconds.map(|us| Seconds(us * 1e-6));
        let machine = Machine::new(spec).unwrap();
        let context = Context::new(&graph, &machine, None, machine.mesh().clone(), false).unwrap();
        let step = simulate_step(&context, &Assignment::replicated(&graph, machine.mesh())).unwrap();
        step.times.step_seconds
    };
    let table = step(None);
    // The tables hold for a host of 14 us per kernel, as `probe` measures it.
    assert!((step(Some(14.0)) / table - 1.0).abs() < 1e-9);
    assert!((step(Some(28.0)) / table - 2.0).abs() < 1e-9);
}
