//! Ops that choose for themselves: weights, gradients and optimizer state in layouts of their own, under memory limits.

use shardwright_graph::{Graph, Optimizer, Phase};
use shardwright_machine::{Bytes, builtin};
use shardwright_plan::{ConfigConstraint, Constraints, Optimised, PlanError};
use shardwright_search::Control;
use shardwright_strategies::{
    Planner, Solution, StrategyError, find, plan,
    recipes::{DATA, FSDP, Recipe},
};
use shardwright_zoo::{BuildOptions, build};

const MLP: &str = "mlp:batch=32,hidden=256,layers=3";
const TRANSFORMER: &str = "gpt:layers=1,hidden=64,heads=4,seq=16,vocab=256";

fn graph(model: &str) -> Graph {
    let options =
        BuildOptions { batch: Some(32), optimizer: Optimizer::adam(1e-3), ..BuildOptions::default() };
    build(model, &options).unwrap()
}

fn control() -> Control<'static> {
    Control::new().iteration_limit(200)
}

fn holding(memory: Option<u64>) -> Constraints {
    Constraints { memory: memory.map(Bytes), ..Constraints::default() }
}

fn run<'a>(planner: &Planner<'a>, name: &str, memory: Option<u64>) -> Result<Solution<'a>, StrategyError> {
    let found = find(name)?.solve(planner, &holding(memory), &control())?;
    let costs = found.context.price(&found.assignment)?;
    assert_eq!(costs.objective(), found.objective(), "{name}");
    assert!(memory.is_none_or(|limit| costs.peak_memory.0 <= limit), "{name} keeps the limit");
    Ok(found)
}

#[test]
fn fsdp_shards_what_is_stored_and_gathers_weights_twice() {
    let (graph, machine) = (graph(MLP), builtin("flat:4").unwrap());
    let planner = Planner::new(&graph, &machine, None, true);
    // Both on the same axes.
    let on_primes = |recipe: &Recipe| {
        let context = planner.prime().unwrap();
        let assignment = recipe.assignment(&context);
        Solution::new(context, assignment, Optimised::Nothing).unwrap()
    };
    let (data, fsdp) = (on_primes(&DATA), on_primes(&FSDP));
    for (op, node) in graph.op_ids().zip(&graph.ops) {
        let parts = |found: &Solution<'_>| -> u64 {
            let context = &found.context;
            let rule = &context.shapes[op.index()].rule;
            found.assignment.config(op).parts(rule, context.mesh()).iter().product()
        };
        match node.phase {
            Phase::Update => {
                let elements = graph.tensor(node.inputs[0]).ty.shape.elements();
                let full = [4, 2, 1].into_iter().find(|parts| elements.is_multiple_of(*parts)).unwrap();
                assert_eq!((parts(&data), parts(&fsdp)), (1, full), "{}", node.name);
            }
            Phase::Forward => assert_eq!(data.assignment.config(op), fsdp.assignment.config(op)),
            Phase::Backward => {}
        }
    }
    // Weights and Adam's two numbers per weight are held in quarters.
    let weights: u64 = graph.parameters().map(|t| graph.tensor(t).ty.bytes()).sum();
    assert!(fsdp.costs.peak_memory.0 + weights < data.costs.peak_memory.0);
    // An all-reduce is a reduce-scatter and an all-gather: fsdp's gradient and forward pass. Gathering again for
    // the backward pass comes on top, for all weights that are products' but the first's, which has no input gradient.
    let matrices = graph.parameters().map(|t| &graph.tensor(t).ty).filter(|ty| ty.rank() == 2);
    let again: u64 = matrices.skip(1).map(|ty| 3 * ty.bytes()).sum();
    assert_eq!(fsdp.costs.traffic.total().0, data.costs.traffic.total().0 + again);
}

#[test]
fn under_a_tight_limit_the_search_is_no_slower_than_fsdp_and_data_and_keeps_it() {
    for model in [MLP, TRANSFORMER] {
        let (graph, machine) = (graph(model), builtin("flat:4").unwrap());
        let planner = Planner::new(&graph, &machine, None, true);
        let fsdp = run(&planner, "fsdp", None).unwrap();
        let data = run(&planner, "data", None).unwrap();
        assert!(fsdp.costs.peak_memory < data.costs.peak_memory, "{model}");
        let free = run(&planner, "exact", None).unwrap();
        assert!(free.objective() <= data.objective() && free.objective() <= fsdp.objective(), "{model}");
        // The memory of fsdp is too little for data parallelism; the search keeps it and is no slower than fsdp.
        let limit = fsdp.costs.peak_memory.0;
        let tight = run(&planner, "exact", Some(limit)).unwrap();
        assert!(tight.objective() <= fsdp.objective(), "{model}");
        assert!(tight.objective() >= free.objective(), "{model}");
        let refused = run(&planner, "data", Some(limit));
        let refused = matches!(refused, Err(StrategyError::Plan(PlanError::OverLimit { .. })));
        assert!(refused, "{model}");
        let roomy = run(&planner, "exact", Some(data.costs.peak_memory.0)).unwrap();
        assert!(roomy.objective() <= data.objective(), "{model}");
        // `auto` trades the sum for the simulated step, and keeps the limits.
        for limit in [None, Some(limit), Some(data.costs.peak_memory.0)] {
            let auto = plan(&planner, find("auto").unwrap(), &holding(limit), &control()).unwrap().plan;
            assert!(limit.is_none_or(|limit| auto.peak_memory_bytes <= limit), "{model}");
            for (name, baseline) in &auto.baselines {
                let fits = limit.is_none_or(|limit| baseline.peak_memory_bytes <= limit);
                assert!(!fits || auto.simulated.step_seconds <= baseline.step_seconds, "{model} {name}");
            }
        }
    }
}

#[test]
fn a_limit_that_the_message_names_is_kept_and_one_below_the_lower_bound_is_refused() {
    let (graph, machine) = (graph(MLP), builtin("flat:4").unwrap());
    for untied in [false, true] {
        let planner = Planner::new(&graph, &machine, None, untied);
        let Err(StrategyError::Plan(PlanError::DoesNotFit { least: Some(least), lower_bound, .. })) =
            run(&planner, "exact", Some(1000))
        else {
            panic!("nothing fits into 1000 bytes")
        };
        assert!(lower_bound <= least);
        run(&planner, "exact", Some(least)).unwrap();
        let refused = run(&planner, "exact", Some(lower_bound - 1));
        assert!(matches!(refused, Err(StrategyError::Plan(PlanError::DoesNotFit { .. }))));
    }
}

#[test]
fn untied_plans_say_how_weights_are_stored_and_constraints_can_name_any_op() {
    let (graph, machine) = (graph(MLP), builtin("flat:4").unwrap());
    let update = graph.ops.iter().find(|node| node.phase == Phase::Update).unwrap();
    let given = format!("{}=d0=2", update.name);
    let configs = vec![ConfigConstraint::parse(&given).unwrap()];
    let constraints = Constraints { configs, ..Constraints::default() };
    let auto = find("auto").unwrap();
    let untied = Planner::new(&graph, &machine, None, true);
    let answer = plan(&untied, auto, &constraints, &control()).unwrap();
    let planned = answer.plan;
    let op = planned.ops.iter().find(|op| op.name == update.name).unwrap();
    assert_eq!(op.config, "d0=2");
    let layer = planned.layers.iter().find(|layer| layer.name == op.layer).unwrap();
    assert!(layer.weights.is_some());
    assert!(planned.space.untied && planned.space.variables == graph.ops.len());
    assert!(planned.baselines.contains_key("fsdp"));
    assert!(planned.baselines.values().all(|b| planned.objective <= b.objective || !planned.proved_optimal));
    let tied = Planner::new(&graph, &machine, None, false);
    let error = auto.solve(&tied, &constraints, &control()).err().unwrap().to_string();
    assert!(error.contains("--untied"), "{error}");
}
