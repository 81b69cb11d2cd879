//! `auto` is the best of all strategies, and baselines are priced where they are best.

use shardwright_graph::{Graph, Optimizer};
use shardwright_machine::{Bytes, builtin};
use shardwright_plan::{Constraints, Plan, PlanError, compute_lower_bound};
use shardwright_search::{Control, FrozenClock, StopReason};
use shardwright_sim::simulate_step;
use shardwright_strategies::{Planner, STRATEGIES, Solution, StrategyError, find, plan, recipes::RECIPES};
use shardwright_zoo::{BuildOptions, build};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

fn graph(model: &str) -> Graph {
    build(model, &BuildOptions::default()).unwrap()
}

/// Small models with fully connected layers, convolutions, branches, recurrences and attention.
const MODELS: [&str; 6] = [
    "mlp:batch=400,hidden=300,layers=5",
    "mlp:batch=48,input=96,hidden=768,layers=3",
    "lenet5:batch=64",
    "rnnlm:batch=64,seq=2,hidden=256,vocab=1024,unroll=2",
    "nmt:batch=64,hidden=64,layers=1,seq=2,vocab=512",
    "gpt:layers=1,hidden=64,heads=4,batch=16,seq=16,vocab=256",
];

fn solve<'a>(
    planner: &Planner<'a>,
    name: &str,
    control: &Control<'_>,
) -> Result<Solution<'a>, StrategyError> {
    find(name).unwrap().solve(planner, &Constraints::default(), control)
}

fn makespan(found: &Solution<'_>) -> u64 {
    let simulated = simulate_step(&found.context, &found.assignment).unwrap();
    assert!(found.step.is_none_or(|step| step == simulated), "the step that is kept is the assignment's");
    simulated.makespan
}

/// The statements of a solution agree with each other.
fn consistent(found: &Solution<'_>, model: &str) {
    let costs = found.context.price(&found.assignment).unwrap();
    assert_eq!(costs.objective(), found.objective(), "{model}");
    let bound = found.lower_bound.unwrap();
    assert!(bound <= found.objective(), "{model}: bound {bound}, objective {}", found.objective());
    assert!(compute_lower_bound(&found.context).unwrap() <= found.objective(), "{model}");
}

#[test]
fn no_strategy_has_a_shorter_step_than_auto() {
    let mut others_won = 0;
    for model in MODELS {
        for machine in ["flat:2", "flat:4", "p100x16:8"] {
            let (graph, machine) = (graph(model), builtin(machine).unwrap());
            let planner = Planner::new(&graph, &machine, None, false);
            let control = Control::new();
            let auto = solve(&planner, "auto", &control).unwrap();
            let at = format!("{model} on {}", machine.name());
            consistent(&auto, &at);
            let exact = makespan(&solve(&planner, "exact", &control).unwrap());
            // FlexFlow's full walk is no part of `auto`.
            for strategy in STRATEGIES.iter().filter(|own| !["auto", "mcmc"].contains(&own.name())) {
                let Ok(other) = solve(&planner, strategy.name(), &control) else { continue };
                let other = makespan(&other);
                assert!(
                    makespan(&auto) <= other,
                    "{at}: {} and {} {other}",
                    makespan(&auto),
                    strategy.name()
                );
                others_won += usize::from(other < exact);
            }
        }
    }
    assert!(others_won > 5, "no case in which another strategy is faster than exact: the test is too tame");
}

#[test]
fn answers_that_are_kept_are_candidates() {
    let mut walks_won = 0;
    for (model, machine) in
        [("mlp:batch=64,hidden=512,layers=3", "flat:4"), ("mlp:batch=96,hidden=480,layers=3", "k80x64:32")]
    {
        let (graph, machine) = (graph(model), builtin(machine).unwrap());
        let planner = Planner::new(&graph, &machine, None, false);
        let alone = makespan(&solve(&planner, "auto", &Control::new()).unwrap());
        let mut shortest = u64::MAX;
        for strategy in STRATEGIES.iter().filter(|own| own.name() != "auto") {
            // Walks of some length.
            let Ok(found) = solve(&planner, strategy.name(), &Control::new().iteration_limit(3000)) else {
                continue;
            };
            shortest = shortest.min(makespan(&found));
            walks_won += usize::from(strategy.name() == "mcmc" && makespan(&found) < alone);
            planner.keep(strategy.name(), &Constraints::default(), &found);
        }
        let auto = solve(&planner, "auto", &Control::new()).unwrap();
        consistent(&auto, model);
        assert!(makespan(&auto) <= shortest, "{model}: {} and {shortest}", makespan(&auto));
    }
    assert!(walks_won > 0, "auto alone is as fast as every long walk: the test is too tame");
}

fn planned(planner: &Planner<'_>, name: &str) -> Plan {
    let control = Control::new().iteration_limit(50);
    plan(planner, find(name).unwrap(), &Constraints::default(), &control).unwrap().plan
}

#[test]
fn a_baseline_has_the_step_of_its_own_plan_whatever_the_axes_of_the_plan_beside_it() {
    let mut other_axes = 0;
    for (model, machine) in [
        ("gpt:layers=1,hidden=64,heads=4,batch=16,seq=16,vocab=256", "p100x16"),
        ("mlp:batch=64,input=192,hidden=384,layers=2", "h100x64"),
        ("mlp:batch=96,input=480,hidden=480,layers=2", "flat:48"),
        ("mlp:batch=400,hidden=300,layers=5", "p100x16"),
    ] {
        let (graph, machine) = (graph(model), builtin(machine).unwrap());
        let fresh = || Planner::new(&graph, &machine, None, false);
        let auto = planned(&fresh(), "auto");
        // With one micro-batch zero1 and zero2 are fsdp, on one level so is hsdp, without experts so is ep, and without
        // tokens so is megatron-sp.
        let same =
            3 + usize::from(machine.levels().len() == 1) + usize::from(graph.step_size().tokens.is_none());
        assert_eq!(auto.baselines.len(), RECIPES.len() - same, "{model}");
        for (name, baseline) in &auto.baselines {
            let own = planned(&fresh(), name);
            let (step, peak) = (own.simulated.step_seconds, own.peak_memory_bytes);
            assert_eq!(baseline.step_seconds.to_bits(), step.to_bits(), "{model}: {name}");
            assert_eq!(
                (baseline.objective, baseline.peak_memory_bytes),
                (own.objective, peak),
                "{model}: {name}"
            );
            assert!(auto.simulated.step_seconds <= step, "{model}: {name}");
            other_axes += usize::from(own.axes != auto.axes);
        }
    }
    assert!(other_axes > 0, "every recipe is on the axes of the plan: the test is too tame");
}

#[test]
fn a_recipe_that_fits_is_an_answer_even_if_nothing_can_be_searched() {
    let options = BuildOptions { optimizer: Optimizer::adam(1e-3), ..BuildOptions::default() };
    let graph = build("gpt:layers=2,hidden=64,heads=4,batch=16,seq=16,vocab=256", &options).unwrap();
    let machine = builtin("p100x16").unwrap();
    let planner = || Planner::new(&graph, &machine, None, false);
    let peak = |name: &str| solve(&planner(), name, &Control::new()).unwrap().costs.peak_memory;
    let late = || Control::new().time_limit(&FrozenClock, Duration::ZERO);
    let limit = peak("fsdp");
    assert!(limit < peak("data"));
    let holding = |memory| Constraints { memory: Some(memory), ..Constraints::default() };
    let auto = find("auto").unwrap();
    let found = auto.solve(&planner(), &holding(limit), &late()).unwrap();
    assert!(found.costs.peak_memory <= limit && found.step.is_some());
    assert_eq!(found.stop_reason, StopReason::Deadline);
    // Nothing fits and nothing is proved: that is not the answer of a search that proves it.
    let half = Bytes(limit.0 / 2);
    let refused = auto.solve(&planner(), &holding(half), &late()).err();
    assert!(matches!(refused, Some(StrategyError::Plan(PlanError::NotFound { .. }))), "{refused:?}");
    let text = refused.unwrap().to_string();
    assert!(text.contains("did not prove") && text.contains("the time limit was reached"), "{text}");
    let (graph, machine) = (self::graph("mlp:batch=16,hidden=64,layers=2"), builtin("flat:4").unwrap());
    let small = Planner::new(&graph, &machine, None, false);
    let refused = auto.solve(&small, &holding(Bytes(1000)), &Control::new().iteration_limit(50)).err();
    assert!(matches!(refused, Some(StrategyError::Plan(PlanError::DoesNotFit { .. }))), "{refused:?}");
    assert!(refused.unwrap().to_string().contains("no plan of auto fits into 1.0 kB per device (proved"));
}

#[test]
fn a_cancelled_search_has_an_answer_at_every_stage() {
    let graph = graph("gpt:layers=1,hidden=64,heads=4,batch=64,seq=16,vocab=256");
    let machine = builtin("h100x64").unwrap();
    let planner = Planner::new(&graph, &machine, None, false);
    let cancel = AtomicBool::new(true);
    let stopped = Control { cancel: Some(&cancel), ..Control::new() };
    for name in ["auto", "exact", "mcmc", "data", "fsdp"] {
        let found = plan(&planner, find(name).unwrap(), &Constraints::default(), &stopped);
        let found = found.unwrap_or_else(|error| panic!("{name}: {error}")).plan;
        assert!(!found.proved_optimal && found.simulated.step_seconds > 0.0, "{name}");
    }
}
