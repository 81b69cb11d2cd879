//! SoyBean's tilings as plans, and its measure for other plans.

use proptest::prelude::*;
use shardwright_frontend::zoo::{BuildOptions, build};
use shardwright_graph::Graph;
use shardwright_machine::builtin;
use shardwright_plan::{Demands, Plan, PlanError, Problem, Wish, evaluate, moved, plan, search, strategy};
use shardwright_search::Control;

fn graph(model: &str) -> Graph {
    build(model, &BuildOptions::default()).unwrap()
}

/// No count of a baseline's requests is below SoyBean's, on the same machine. These are the paper's baselines: cuts are
/// chosen one by one, and where sizes stop being even a recipe that foresees it (`megatron`) can do better.
fn beats_baselines(model: &str, machine: &str) {
    let (graph, machine) = (graph(model), builtin(machine).unwrap());
    let problem = Problem::prime(&graph, &machine, None).unwrap();
    let (free, control) = (Demands::default(), Control::new());
    let run = |name: &str| search(&problem, strategy::find(name).unwrap(), &free, &control).unwrap();
    let own = run("soybean");
    let least = own.moved.unwrap();
    for name in ["data", "model", "owt"] {
        let other = moved(&problem, &run(name).configs, &control).unwrap();
        assert!(
            least.total_elements <= other.total_elements,
            "{model}, {name}: {:?} against {:?}",
            least.cuts,
            other.cuts
        );
    }
    // Its own configs count as no more than it said: tilings are chosen anew.
    let again = moved(&problem, &own.configs, &control).unwrap();
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
    let problem = Problem::prime(&graph, &machine, None).unwrap();
    let (free, control) = (Demands::default(), Control::new());
    for name in ["soybean", "soybean-time"] {
        let found = plan(&problem, strategy::find(name).unwrap(), &free, &control).unwrap();
        assert_eq!(Plan::from_json(found.to_json().as_bytes()), Ok(found.clone()));
        let mesh = found.mesh(&machine).unwrap();
        let configs = found.configs(&graph, &mesh).unwrap();
        assert_eq!(evaluate(&problem, &configs).unwrap().objective(), found.objective);
        assert_eq!(found.soybean.as_ref().map(|moved| moved.cuts.len()), Some(4));
        assert!(!found.proved_optimal, "least elements is not least time");
        // Weights are large and samples few: splitting weights beats repeating them.
        assert!(found.objective < found.baselines["data"].objective, "{name}");
    }
}

#[test]
fn more_devices_than_the_network_search_can_take_one_by_one_are_cut_all_the_same() {
    let (graph, machine) = (graph("mlp:batch=512,hidden=256,layers=2"), builtin("flat:64").unwrap());
    let problem = Problem::prime(&graph, &machine, None).unwrap();
    let found =
        plan(&problem, strategy::find("soybean").unwrap(), &Demands::default(), &Control::new()).unwrap();
    assert_eq!((found.axes.len(), found.soybean.unwrap().cuts.len()), (6, 6));
    // Configs on glued axes can be counted too.
    let glued = Problem::new(&graph, &machine, None).unwrap();
    let data = search(&glued, strategy::find("data").unwrap(), &Demands::default(), &Control::new()).unwrap();
    let parameters = graph.parameter_count();
    assert_eq!(moved(&glued, &data.configs, &Control::new()).unwrap().total_elements, 2 * 63 * parameters);
}

#[test]
fn what_cannot_be_halved_and_what_is_wished_for_otherwise_is_refused() {
    let graph = graph("mlp:batch=48,hidden=48,layers=2");
    let soybean = strategy::find("soybean").unwrap();
    let machine = builtin("flat:6").unwrap();
    let problem = Problem::prime(&graph, &machine, None).unwrap();
    let error = search(&problem, soybean, &Demands::default(), &Control::new()).unwrap_err();
    assert!(error.to_string().contains("6 is not a power of two"), "{error}");
    assert!(moved(&problem, &[], &Control::new()).is_err());
    let machine = builtin("flat:4").unwrap();
    let problem = Problem::prime(&graph, &machine, None).unwrap();
    let wishes = vec![Wish::parse("fc1=whole").unwrap()];
    let wished = search(&problem, soybean, &Demands { wishes, ..Demands::default() }, &Control::new());
    assert!(matches!(wished, Err(PlanError::Wish { .. })), "{wished:?}");
}
