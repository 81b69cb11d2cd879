//! Whole layers on devices: against plain placements, against all placements, under limits, and on devices that differ.

use shardwright_cost::Action;
use shardwright_graph::{DType, Graph, GraphBuilder, Optimizer, ops::Reduce, train};
use shardwright_lower::{Work, lower};
use shardwright_machine::{Bytes, Machine, builtin, parse};
use shardwright_plan::{Constraints, Context, Plan, PlanError, peak};
use shardwright_search::Control;
use shardwright_sim::simulate_step;
use shardwright_space::{Assignment, AxisUse, Config};
use shardwright_strategies::{
    Moves, Planner, StrategyError,
    chain::{Limits, run_chains},
    find, plan,
};
use shardwright_zoo::{
    BuildOptions, build,
    layers::{add, data, dense},
};

fn graph(model: &str) -> Graph {
    build(model, &BuildOptions::default()).unwrap()
}

/// The layers of a graph on the machine's prime axes.
fn layers_of<'g>(graph: &'g Graph, machine: &'g Machine) -> Context<'g> {
    Context::new(graph, machine, None, machine.mesh().clone(), false).unwrap()
}

fn place(graph: &Graph, machine: &Machine, constraints: &Constraints) -> Result<Plan, StrategyError> {
    let planner = Planner::new(graph, machine, None, false);
    let control = Control::new().iteration_limit(400);
    Ok(plan(&planner, find("place")?, constraints, &control)?.plan)
}

/// Every layer on its device.
fn pinned(context: &Context<'_>, devices: &[u32]) -> Assignment {
    let mesh = context.mesh();
    let mut assignment = Assignment::replicated(context.graph, mesh);
    for (split, &device) in context.variables.members.iter().zip(devices) {
        let digit = |axis| AxisUse::Pin(mesh.digit(shardwright_machine::DeviceId(device), axis) as u16);
        let lead = Config::new(mesh.all().iter().map(digit));
        for (op, config) in split.ops.iter().zip(split.configs(&context.shapes, mesh, &lead)) {
            assignment.configs[op.index()] = config;
        }
    }
    assignment
}

#[test]
fn no_plain_placement_is_better_and_every_layer_is_whole_on_one_device() {
    for (model, machine) in [
        ("nmt:batch=16,seq=3,hidden=256,vocab=512,unroll=3", "p100x16:4"),
        ("dlrm:batch=512,rows=10000", "flat:8"),
        ("lenet5:batch=64", "k80x8:2"),
        ("rnnlm:batch=16,hidden=256,vocab=1000,unroll=4", "p100x16:8"),
    ] {
        let (graph, machine) = (graph(model), builtin(machine).unwrap());
        let plan = place(&graph, &machine, &Constraints::default()).unwrap();
        let own = &plan.placements[0];
        assert_eq!(own.name, "place");
        assert!(plan.placements.iter().filter(|row| row.baseline).count() >= 3, "{model}");
        for other in &plan.placements {
            assert!(own.step_seconds <= other.step_seconds, "{model}: {own:?} {other:?}");
        }
        assert_eq!(own.step_seconds, plan.simulated.step_seconds, "{model}");
        assert_eq!(own.peak_memory_bytes, plan.peak_memory_bytes, "{model}");
        let (layers, devices) = (graph.layers.len(), machine.devices() as usize);
        assert_eq!((plan.space.variables, plan.space.choices), (layers, layers * devices), "{model}");
        let whole = |op: &shardwright_plan::PlanOp| {
            op.axes.iter().all(|a| a.as_ref().is_some_and(|a| a.starts_with('@')))
        };
        assert!(plan.ops.iter().all(whole), "{model}");
    }
}

#[test]
fn more_devices_are_never_slower() {
    for model in [
        "nmt:batch=16,seq=3,hidden=256,vocab=512,unroll=3",
        "dlrm:batch=512,rows=10000",
        "rnnlm:batch=16,hidden=256,vocab=1000,unroll=4",
    ] {
        let graph = graph(model);
        let mut fewer = f64::INFINITY;
        for devices in [1, 2, 4, 8, 16] {
            let machine = builtin(&format!("p100x16:{devices}")).unwrap();
            let plan = place(&graph, &machine, &Constraints::default()).unwrap();
            let step = plan.simulated.step_seconds;
            assert!(step <= fewer, "{model} on {devices}: {step} after {fewer}");
            fewer = step;
        }
    }
}

#[test]
fn layers_that_share_weights_move_together() {
    let graph = graph("rnnlm:batch=64,hidden=1024,vocab=1000,layers=2,unroll=6");
    let machine = builtin("flat:4").unwrap();
    let context = layers_of(&graph, &machine);
    let layers = context.variables.members.len();
    let single = pinned(&context, &vec![0; layers]);
    // All that reads the same weight.
    let mut readers = std::collections::BTreeMap::<_, Vec<u32>>::new();
    for transfer in &context.transfers.pairs {
        if graph.tensor(transfer.tensor).producer.is_none() {
            let readers = readers.entry(transfer.tensor).or_default();
            readers
                .extend([transfer.from, transfer.to].map(|end| context.variables.variable_of(end.op) as u32));
        }
    }
    let clusters = readers.into_values().map(|mut cluster| {
        cluster.sort_unstable();
        cluster.dedup();
        cluster
    });
    let on = |device: u32| {
        let mesh = context.mesh();
        let digit = |axis| AxisUse::Pin(mesh.digit(shardwright_machine::DeviceId(device), axis) as u16);
        Config::new(mesh.all().iter().map(digit))
    };
    let limits = Limits { proposals: 1500, pins: context.mesh().all(), ..Limits::default() };
    let [one_by_one, together] = [Vec::new(), clusters.collect()].map(|clusters| {
        let moves = Moves::whole(&context, on, clusters);
        run_chains(&context, &moves, std::slice::from_ref(&single), &limits, &Control::new()).unwrap()[0]
            .makespan
    });
    assert!(together as f64 <= 0.9 * one_by_one as f64, "{together} {one_by_one}");
}

/// What goes from one device to another goes nowhere else, on machines of several axes and levels too.
#[test]
fn placed_layers_exchange_data_straight() {
    let graph = graph("nmt:batch=16,seq=3,hidden=256,vocab=512,unroll=3");
    for machine in ["p100x16", "flat:4", "a100x64:32"] {
        let machine = builtin(machine).unwrap();
        let context = layers_of(&graph, &machine);
        let places: Vec<u32> =
            (0..context.variables.members.len() as u32).map(|layer| layer * 7 % machine.devices()).collect();
        let program = lower(&graph, &context.resharder, &pinned(&context, &places)).unwrap();
        let mut sent = 0;
        for instruction in &program.instructions {
            if let Work::Reshard(step) = &instruction.work {
                assert_eq!(step.action, Action::Send, "{step:?}");
                sent += 1;
            }
        }
        assert!(sent > 10, "{sent}");
    }
}

#[test]
fn parallel_branches_go_to_several_devices_and_a_chain_stays_on_one() {
    let machine = builtin("flat:4").unwrap();
    // Tables of their own for eight features, and an unrolled recurrent network, have work to do side by side.
    let recurrent = graph("rnnlm:batch=64,hidden=1024,vocab=1000,layers=4,unroll=8");
    let plan = place(&recurrent, &machine, &Constraints::default()).unwrap();
    let single = plan.placements.iter().find(|row| row.name == "single").unwrap();
    assert!(plan.placements[0].step_seconds < 0.9 * single.step_seconds, "{:?}", plan.placements);
    // Nothing in a chain can run at the same time.
    let chain = graph("mlp:batch=64,hidden=512,layers=5");
    let plan = place(&chain, &machine, &Constraints::default()).unwrap();
    let single = plan.placements.iter().find(|row| row.name == "single").unwrap();
    assert!(plan.placements[0].step_seconds <= single.step_seconds);
    assert!(plan.placements[0].cut_bytes < 10_000, "weights and activations stay: {:?}", plan.placements[0]);
}

/// Branches of products from one input, added up at the end.
fn branches(widths: &[Vec<u64>]) -> Graph {
    let mut b = GraphBuilder::new("branches");
    let x = data(&mut b, "x", DType::F32, &[256, 512]).unwrap();
    let mut ends = Vec::new();
    for (i, widths) in widths.iter().enumerate() {
        let mut y = x;
        for (j, &width) in widths.iter().enumerate() {
            y = dense(&mut b, &format!("b{i}.{j}"), "nc,co->no", y, &[width], false).unwrap();
        }
        ends.push(dense(&mut b, &format!("b{i}.end"), "nc,co->no", y, &[64], false).unwrap());
    }
    let mut sum = ends[0];
    for (i, &end) in ends.iter().enumerate().skip(1) {
        sum = add(&mut b, &format!("sum{i}"), sum, end).unwrap();
    }
    let loss = b.emit("loss", Reduce::mean((0..2).collect(), b.shape(sum)), &[sum]).unwrap();
    b.output(loss);
    train(&mut b, loss, &Optimizer::sgd(0.1)).unwrap();
    b.finish()
}

/// How many times as long as the best of all placements' the step of `place` is.
fn over_the_best(widths: &[Vec<u64>], machine: &str) -> f64 {
    let (graph, machine) = (branches(widths), builtin(machine).unwrap());
    let context = layers_of(&graph, &machine);
    let (layers, devices) = (context.variables.members.len() as u32, machine.devices() as usize);
    // The first layer stays where it is: devices are equal.
    let count = devices.pow(layers - 1);
    assert!(count <= 20_000, "{widths:?} has {layers} layers");
    let step = |code: usize| {
        let places: Vec<u32> = (0..layers)
            .map(|l| if l == 0 { 0 } else { (code / devices.pow(l - 1) % devices) as u32 })
            .collect();
        simulate_step(&context, &pinned(&context, &places)).unwrap().makespan
    };
    let best = (0..count).map(step).min().unwrap();
    let found = place(&graph, &machine, &Constraints::default()).unwrap().simulated.step_seconds * 1e12;
    let ratio = found / best as f64;
    println!("{widths:?}: {layers} layers, {found} of {best}, {ratio:.4}");
    assert!(ratio > 0.999_999, "{widths:?}");
    ratio
}

#[test]
fn small_graphs_are_placed_within_a_few_percent_of_the_best_placement() {
    for (widths, machine) in [
        (vec![vec![512, 256], vec![256, 768], vec![1024, 512]], "flat:2"),
        (vec![vec![2048, 64], vec![64, 64, 64]], "flat:2"),
        (vec![vec![1024], vec![768]], "flat:3"),
        (vec![vec![512, 512, 512, 512]], "flat:2"),
        (vec![vec![256, 1024], vec![2048, 256], vec![128]], "p100x16:2"),
    ] {
        let ratio = over_the_best(&widths, machine);
        assert!(ratio <= 1.03, "{ratio}");
    }
}

#[test]
#[ignore = "minutes: the distribution in docs/benchmarks-placing.md"]
fn random_small_graphs_are_placed_near_the_best_placement() {
    let mut state = 1u64;
    let mut below = |limit: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % limit
    };
    let mut ratios: Vec<f64> = Vec::new();
    for case in 0..100 {
        let mut widths: Vec<Vec<u64>> = Vec::new();
        for _ in 0..2 + below(2) {
            widths.push((0..1 + below(2)).map(|_| 64 << below(6)).collect());
        }
        let small = widths.iter().map(Vec::len).sum::<usize>() <= 3;
        let machine = if small && widths.len() == 2 { "flat:3" } else { ["flat:2", "p100x16:2"][case % 2] };
        ratios.push(over_the_best(&widths, machine));
    }
    ratios.sort_by(f64::total_cmp);
    let best = ratios.iter().filter(|r| **r < 1.000_001).count();
    println!("{best} of 100 are the best; median {}, 90th {}, worst {}", ratios[50], ratios[90], ratios[99]);
    assert!(ratios[90] <= 1.05 && ratios[99] <= 1.25, "{ratios:?}");
}

/// Small products side by side: split over devices they wait for each other, placed they do not.
#[test]
fn auto_places_layers_where_that_is_faster_and_the_engine_can_do_it() {
    let (graph, machine) = (branches(&[vec![512, 512], vec![512, 512]]), builtin("k80x8:2").unwrap());
    let planner = Planner::new(&graph, &machine, None, false);
    let auto = |spmd| {
        let constraints = Constraints { spmd, ..Constraints::default() };
        plan(&planner, find("auto").unwrap(), &constraints, &Control::new()).unwrap().plan
    };
    let pins = |plan: &Plan| {
        let assignment = plan.assignment(&graph, &plan.mesh(&machine).unwrap()).unwrap();
        assignment
            .configs
            .iter()
            .flat_map(|config| config.uses().to_vec())
            .filter(|u| matches!(u, AxisUse::Pin(_)))
            .count()
    };
    let (placed, split) = (auto(false), auto(true));
    assert_eq!(pins(&split), 0);
    assert!(pins(&placed) > 0);
    let [placed, split] = [placed, split].map(|plan| plan.simulated.step_seconds);
    assert!(placed < 0.98 * split, "{placed} {split}");
}

#[test]
fn a_memory_limit_is_kept_by_spreading_layers_and_an_impossible_one_is_refused() {
    let (graph, machine) = (graph("mlp:batch=16,input=512,hidden=512,layers=6"), builtin("flat:4").unwrap());
    let free = place(&graph, &machine, &Constraints::default()).unwrap();
    let single = free.placements.iter().find(|row| row.name == "single").unwrap();
    let limit = Bytes(single.peak_memory_bytes * 3 / 5);
    let constraints = Constraints { memory: Some(limit), ..Constraints::default() };
    let tight = place(&graph, &machine, &constraints).unwrap();
    assert!(tight.peak_memory_bytes <= limit.0, "{} {}", tight.peak_memory_bytes, limit.0);
    assert!(tight.placements[0].cut_bytes > 0);
    let context = layers_of(&graph, &machine);
    let assignment = tight.assignment(&graph, context.mesh()).unwrap();
    assert_eq!(peak(&context, &assignment).0, tight.peak_memory_bytes);
    let hopeless = Constraints { memory: Some(Bytes(1000)), ..Constraints::default() };
    let error = place(&graph, &machine, &hopeless).unwrap_err();
    assert!(matches!(error, StrategyError::Plan(PlanError::NotFound { .. })), "{error}");
}

#[test]
fn a_device_holds_only_what_is_pinned_to_it() {
    let (graph, machine) = (graph("mlp:batch=16,hidden=64,layers=3"), builtin("flat:2").unwrap());
    let context = layers_of(&graph, &machine);
    let layers = context.variables.members.len();
    let here = peak(&context, &pinned(&context, &vec![0; layers]));
    let there = peak(&context, &pinned(&context, &vec![1; layers]));
    let half: Vec<u32> = (0..layers).map(|layer| u32::from(layer >= layers / 2)).collect();
    let apart = peak(&context, &pinned(&context, &half));
    assert_eq!(here, there);
    assert!(apart < here, "{apart:?} {here:?}");
}

#[test]
fn the_faster_node_gets_a_chain() {
    let chain = graph("mlp:batch=512,hidden=1024,layers=4");
    let with_slow = |unit: u32| {
        let text = format!(
            "extends = \"p100x16\"\nname = \"mixed\"\n[[mixed]]\nunits = [{unit}]\nname = \"slow\"\npeak.f32 = \"1 TFLOP/s\""
        );
        let machine = parse("mixed.toml", text.as_bytes(), &mut |_| Err("none".into())).unwrap();
        let plan = place(&chain, &machine.restrict(8).unwrap(), &Constraints::default()).unwrap();
        (plan.simulated.step_seconds, plan.ops[0].axes[0].clone())
    };
    let ((one, first), (other, second)) = (with_slow(1), with_slow(0));
    assert_eq!((first.as_deref(), second.as_deref()), (Some("@0"), Some("@1")));
    assert!((one - other).abs() < 0.02 * one, "{one} {other}");
}
