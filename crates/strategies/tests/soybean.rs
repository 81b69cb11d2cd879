//! SoyBean's tilings as plans, and its measure for other plans.

use proptest::prelude::*;
use shardwright_graph::Graph;
use shardwright_machine::builtin;
use shardwright_plan::{ConfigConstraint, Constraints, Plan, PlanError};
use shardwright_search::Control;
use shardwright_space::Assignment;
use shardwright_strategies::{Planner, StrategyError, count_moves, find, plan, recipes};
use shardwright_zoo::{BuildOptions, build};

fn graph(model: &str) -> Graph {
    build(model, &BuildOptions::default()).unwrap()
}

/// No count of a baseline's requests is below SoyBean's, on the same machine. These are the paper's baselines: cuts are
/// chosen one by one, and where sizes stop being even a recipe that foresees it (`megatron`) can do better.
fn beats_baselines(model: &str, machine: &str) {
    let (graph, machine) = (graph(model), builtin(machine).unwrap());
    let (planner, control) = (Planner::new(&graph, &machine, None, true), Control::new());
    let own = find("soybean").unwrap().solve(&planner, &Constraints::default(), &control).unwrap();
    assert!(own.context.untied && own.context.search_mesh.prime);
    let least = own.moves.unwrap();
    let moved = |assignment: &Assignment| count_moves(&own.context, assignment, &control).unwrap();
    for recipe in [&recipes::DATA, &recipes::MODEL, &recipes::OWT] {
        let other = moved(&recipe.assignment(&own.context));
        assert!(
            least.total_elements <= other.total_elements,
            "{model}, {recipe:?}: {:?} against {:?}",
            least.cuts,
            other.cuts
        );
    }
    // Its own configs count as no more than it said: tilings are chosen anew.
    let again = moved(&own.assignment);
    assert!(again.cuts[0] <= least.cuts[0]);
}

#[test]
fn whole_models_never_move_more_than_a_baseline() {
    for model in [
        "alexnet:batch=64",
        "lenet5:batch=32",
        "dlrm:batch=64",
        "rnntc:batch=16",
        "gpt:layers=2,hidden=64,heads=4,seq=16,vocab=256",
        "moe:layers=2,hidden=32,heads=4,seq=16,vocab=128",
    ] {
        beats_baselines(model, "flat:8");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn no_perceptron_moves_more_than_a_baseline(
        batch in prop::sample::select(vec![8u64, 64, 400, 2048]),
        hidden in prop::sample::select(vec![16u64, 48, 300, 1024, 4096]),
        layers in 1u64..6,
        loss in prop::sample::select(vec!["elementwise", "cross_entropy"]),
        machine in prop::sample::select(vec!["flat:2", "flat:4", "flat:8", "k80x8"]),
    ) {
        beats_baselines(&format!("mlp:batch={batch},hidden={hidden},layers={layers},loss={loss}"), machine);
    }
}

#[test]
fn a_plan_of_soybean_is_a_plan_like_any_other() {
    let (graph, machine) = (graph("mlp:batch=512,hidden=1024,layers=3"), builtin("p100x16").unwrap());
    let (planner, control) = (Planner::new(&graph, &machine, None, true), Control::new());
    for name in ["soybean", "soybean-time"] {
        let found = plan(&planner, find(name).unwrap(), &Constraints::default(), &control).unwrap().plan;
        assert_eq!(Plan::from_json(found.to_json().unwrap().as_bytes()), Ok(found.clone()));
        let mesh = found.mesh(&machine).unwrap();
        let assignment = found.assignment(&graph, &mesh).unwrap();
        let context = planner.prime().unwrap();
        assert_eq!(context.price(&assignment).unwrap().objective(), found.objective);
        assert_eq!(found.soybean.as_ref().map(|moved| moved.cuts.len()), Some(4));
        assert!(!found.proved_optimal, "least elements is not least time");
        // Weights are large and samples few: splitting weights beats repeating them.
        assert!(found.objective < found.baselines["data"].objective, "{name}");
    }
}

#[test]
fn more_devices_than_the_network_search_can_take_one_by_one_are_cut_all_the_same() {
    let (graph, machine) = (graph("mlp:batch=512,hidden=256,layers=2"), builtin("flat:64").unwrap());
    let planner = Planner::new(&graph, &machine, None, false);
    let (free, control) = (Constraints::default(), Control::new());
    let found = plan(&planner, find("soybean").unwrap(), &free, &control).unwrap().plan;
    assert_eq!((found.axes.len(), found.soybean.unwrap().cuts.len()), (6, 6));
    // Configs on merged axes can be counted too.
    let merged = planner.context(machine.mesh().per_level(), false).unwrap();
    assert!(!merged.search_mesh.prime);
    let moved = count_moves(&merged, &recipes::DATA.assignment(&merged), &control).unwrap();
    assert_eq!(moved.total_elements, 2 * 63 * graph.parameter_count());
}

#[test]
fn odd_device_counts_and_other_given_configs_are_refused() {
    let graph = graph("mlp:batch=48,hidden=48,layers=2");
    let (soybean, control) = (find("soybean").unwrap(), Control::new());
    let machine = builtin("flat:6").unwrap();
    let planner = Planner::new(&graph, &machine, None, true);
    let error = soybean.solve(&planner, &Constraints::default(), &control).err().unwrap();
    assert!(error.to_string().contains("6 is not a power of two"), "{error}");
    let none = Assignment::new(Vec::new());
    assert!(count_moves(&planner.prime().unwrap(), &none, &control).is_err());
    let machine = builtin("flat:4").unwrap();
    let planner = Planner::new(&graph, &machine, None, true);
    let configs = vec![ConfigConstraint::parse("fc1=whole").unwrap()];
    let refused = soybean.solve(&planner, &Constraints { configs, ..Constraints::default() }, &control);
    let error = refused.err().unwrap();
    assert!(matches!(error, StrategyError::Plan(PlanError::ConfigConstraint { .. })), "{error}");
}
