//! Plans that are chosen by their simulated steps.

use shardwright_machine::{Machine, builtin};
use shardwright_plan::{Constraints, Plan};
use shardwright_search::{Control, Progress};
use shardwright_strategies::{Planner, find, plan};
use shardwright_zoo::{BuildOptions, build};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

fn planned(planner: &Planner<'_>, name: &str, control: &Control<'_>) -> Plan {
    plan(planner, find(name).unwrap(), &Constraints::default(), control).unwrap().plan
}

#[test]
fn auto_is_never_slower_than_a_recipe_in_the_simulated_step() {
    let mut recipes_won = 0;
    for (model, machine) in [
        ("mlp:batch=64,hidden=512,layers=3", "flat:4"),
        ("mlp:batch=4096,hidden=512,layers=3", "p100x16:8"),
        ("mlp:batch=512,hidden=2048,layers=4", "k80x8"),
        ("lenet5:batch=512", "flat:8"),
        ("rnnlm:batch=64", "p100x16:4"),
        ("gpt:layers=1,hidden=256,heads=4,batch=32,seq=64,vocab=1024", "a100x64:8"),
        ("dlrm", "2080tix64:8"),
    ] {
        let graph = build(model, &BuildOptions::default()).unwrap();
        let machine = builtin(machine).unwrap();
        for untied in [false, true].into_iter().filter(|&untied| !untied || graph.ops.len() < 60) {
            let planner = Planner::new(&graph, &machine, None, untied);
            let exact = planned(&planner, "exact", &Control::new());
            let auto = planned(&planner, "auto", &Control::new());
            let step = auto.simulated.step_seconds;
            assert!(step <= exact.simulated.step_seconds, "{model} {untied}: {step}");
            for (name, recipe) in &auto.baselines {
                assert!(
                    step <= recipe.step_seconds,
                    "{model} {untied}: {step}, {name} {}",
                    recipe.step_seconds
                );
                recipes_won += usize::from(recipe.step_seconds < exact.simulated.step_seconds);
            }
        }
    }
    assert!(recipes_won > 0, "no case in which overlap decides: the test is too tame");
}

#[test]
fn what_moves_its_data_itself_computes_later() {
    // Gradients of the wide layers are too large to be joined, so they travel while others are computed.
    let graph = build("mlp:batch=1024,hidden=4096,layers=3", &BuildOptions::default()).unwrap();
    let mut spec = builtin("flat:4").unwrap().spec().clone();
    let at_once = Machine::new(spec.clone()).unwrap();
    spec.device.overlap = false;
    let in_turn = Machine::new(spec).unwrap();
    let simulated = |machine: &Machine, solver: &str| {
        let planner = Planner::new(&graph, machine, None, false);
        let plan = planned(&planner, solver, &Control::new());
        (plan.simulated.step_seconds, plan.objective as f64 / 1e12)
    };
    let ((fast, sum), (slow, same_sum)) = (simulated(&at_once, "data"), simulated(&in_turn, "data"));
    assert_eq!(sum.to_bits(), same_sum.to_bits());
    // All-reduces of small tensors are joined, which saves a little.
    assert!(fast < 0.97 * sum && slow <= sum && slow > 0.99 * sum, "{fast}, {slow}, {sum}");
    let (auto, exact) = (simulated(&in_turn, "auto"), simulated(&in_turn, "exact"));
    assert_eq!(auto.1.to_bits(), exact.1.to_bits(), "nothing is gained by hiding what cannot be hidden");
}

#[test]
fn a_walk_is_never_slower_than_what_it_starts_from() {
    let mut refined = 0;
    for (model, machine) in [
        ("mlp:batch=500,input=1500,hidden=1000,layers=2,classes=100", "flat:32"),
        ("mlp:batch=512,hidden=2048,layers=4", "k80x8"),
        ("rnnlm:batch=64,seq=2,hidden=256,vocab=1024,unroll=2", "p100x16"),
    ] {
        let graph = build(model, &BuildOptions::default()).unwrap();
        let machine = builtin(machine).unwrap();
        let planner = Planner::new(&graph, &machine, None, false);
        let exact = planned(&planner, "exact", &Control::new());
        let searched = planner.problem(&Control::new()).unwrap().context.mesh();
        refined += usize::from(exact.axes.len() != searched.len());
        // Hardly any proposals: what is found is what was there at the start.
        let short = Control::new().iteration_limit(20);
        let walked = planned(&planner, "mcmc", &short);
        let step = walked.simulated.step_seconds;
        assert!(
            step <= exact.simulated.step_seconds,
            "{model}: {step}, exact {}",
            exact.simulated.step_seconds
        );
        for (name, recipe) in &walked.baselines {
            assert!(step <= recipe.step_seconds, "{model}: {step}, {name} {}", recipe.step_seconds);
        }
    }
    assert!(refined > 0, "no plan has axes of its own: the test is too tame");
}

#[test]
fn a_search_that_was_stopped_is_not_polished_by_a_walk() {
    let graph = build("mlp:batch=4096,hidden=512,layers=3", &BuildOptions::default()).unwrap();
    let machine = builtin("p100x16:8").unwrap();
    let planner = Planner::new(&graph, &machine, None, false);
    let auto = |stopped: bool| {
        let (cancel, walks) = (AtomicBool::new(stopped), AtomicUsize::new(0));
        let listener = |progress: &Progress<'_>| {
            walks.fetch_add(usize::from(progress.source == "mcmc"), Relaxed);
        };
        let control = Control { cancel: Some(&cancel), ..Control::new() }.listen(&listener);
        let plan = planned(&planner, "auto", &control);
        (plan, walks.into_inner())
    };
    let ((_, walks), (plan, walks_when_stopped)) = (auto(false), auto(true));
    assert!(walks > 0, "nothing walks here: the test is too tame");
    assert_eq!(walks_when_stopped, 0);
    // What everybody knows still counts.
    let step = plan.simulated.step_seconds;
    assert!(plan.baselines.values().all(|recipe| step <= recipe.step_seconds), "{step}");
}
