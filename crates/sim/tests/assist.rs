//! Scheduling assistants: nothing changes where they may do nothing, and they help where a device is slow.

use proptest::prelude::*;
use shardwright_frontend::zoo::{BuildOptions, build};
use shardwright_graph::Graph;
use shardwright_lower::ParallelGraph;
use shardwright_machine::{Machine, builtin};
use shardwright_plan::{Demands, Problem, peak, strategy};
use shardwright_search::Control;
use shardwright_sim::{Assisted, Homes, PLACE, Reality, Rule, Schedule, apart, assist, homes, paces, search};
use shardwright_space::Config;

const CASES: [(&str, &str, &str); 4] = [
    ("nmt:batch=64,seq=4,hidden=1024,vocab=1024,unroll=4", "p100x16:4", "place"),
    ("mlp:batch=64,hidden=256,layers=3", "flat:4", "data"),
    ("lenet5:batch=64", "k80x8:4", "data"),
    ("dlrm:batch=2048,rows=1000", "flat:4", "place"),
];

struct Case {
    graph: Graph,
    machine: Machine,
}

impl Case {
    fn new(model: &str, machine: &str) -> Self {
        let graph = build(model, &BuildOptions::default()).unwrap();
        Self { graph, machine: builtin(machine).unwrap() }
    }

    fn problem(&self) -> Problem<'_> {
        Problem::bare(&self.graph, &self.machine, None, self.machine.mesh().clone(), false).unwrap()
    }
}

/// The plan's program and its tasks, every device for itself.
fn schedule(problem: &Problem<'_>, solver: &str) -> (ParallelGraph, Schedule) {
    let strategy = if solver == "place" { &PLACE } else { strategy::find(solver).unwrap() };
    let control = Control::new().iteration_limit(200);
    let found = search(problem, strategy, &Demands::default(), &control).unwrap();
    apart(problem, &found.configs).unwrap()
}

/// Static and assisted steps where a device is slow and everything is noisy.
fn both(
    problem: &Problem<'_>,
    (program, planned): &(ParallelGraph, Schedule),
    slow: &[(u32, f64)],
    noise: f64,
    rule: Rule,
) -> (u64, Assisted) {
    let mut real = planned.clone();
    real.slow_down(slow);
    real.perturb(noise, 7);
    let reality = Reality { schedule: &real, slower: slow };
    let assisted = assist(planned, program, problem.relayouts.comm(), rule, reality);
    (real.simulate().makespan(), assisted)
}

#[test]
fn assistants_that_may_do_nothing_change_nothing() {
    for (model, machine, solver) in CASES {
        let case = Case::new(model, machine);
        let problem = case.problem();
        let planned = schedule(&problem, solver);
        let nothing = Rule { window: 0, ..Rule::default() };
        for (slow, noise) in [(vec![], 0.0), (vec![(1, 1.7)], 0.0), (vec![(0, 3.0), (2, 1.2)], 0.3)] {
            let (fixed, assisted) = both(&problem, &planned, &slow, noise, nothing);
            assert_eq!(
                assisted,
                Assisted { makespan: fixed, ..Assisted::default() },
                "{model} {slow:?} {noise}"
            );
        }
    }
}

#[test]
fn idle_devices_take_over_work_of_a_slow_one_and_cost_next_to_nothing_otherwise() {
    let mut helped = 0;
    for (model, machine, solver) in CASES {
        let case = Case::new(model, machine);
        let problem = case.problem();
        let planned = schedule(&problem, solver);
        let (even, calm) = both(&problem, &planned, &[], 0.0, Rule::default());
        assert!(calm.makespan as f64 <= 1.02 * even as f64, "{model}: {} of {even}", calm.makespan);
        for device in 0..4 {
            let (fixed, assisted) = both(&problem, &planned, &[(device, 3.0)], 0.0, Rule::default());
            println!("{model} {solver}: device {device} slow: {fixed} of {even}, assisted {assisted:?}");
            assert!(assisted.makespan as f64 <= 1.05 * fixed as f64, "{model}: {assisted:?} of {fixed}");
            helped += u32::from(assisted.moved > 0 && assisted.makespan < fixed);
        }
    }
    assert!(helped > 0, "no case has work to take over");
}

#[test]
fn much_of_what_a_slow_device_loses_comes_back_where_there_is_work_to_hand_over() {
    let case = Case::new("nmt:batch=64,unroll=10,seq=10", "p100x16:4");
    let problem = case.problem();
    let planned = schedule(&problem, "data");
    let (even, noisy) = both(&problem, &planned, &[], 0.2, Rule::default());
    assert_eq!((noisy.makespan, noisy.moved), (even, 0), "noise is no reason to move work");
    let even = planned.1.simulate().makespan();
    for (factor, least) in [(1.5, 0.3), (2.0, 0.4), (3.0, 0.5)] {
        let (fixed, assisted) = both(&problem, &planned, &[(1, factor)], 0.0, Rule::default());
        let recovered = (fixed - assisted.makespan) as f64 / (fixed - even) as f64;
        assert!(recovered >= least, "{factor}: {recovered} of {fixed} - {even}, {assisted:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn every_task_runs_whatever_moves(
        case in 0usize..4, device in 0u32..4, factor in 0.5f64..4.0, noise in 0.0f64..0.5, latency in 0u64..100_000_000,
        window in 0usize..12, fetch: bool
    ) {
        let (model, machine, solver) = CASES[case];
        let case = Case::new(model, machine);
        let problem = case.problem();
        let planned = schedule(&problem, solver);
        let rule = Rule { latency, window, fetch };
        let (_, assisted) = both(&problem, &planned, &[(device, factor)], noise, rule);
        // No step is shorter than the work of all devices shared without loss at the best speed.
        let tasks = &planned.1.tasks;
        let work: u64 = tasks.ids().filter(|&t| planned.1.owner(t).is_some()).map(|t| tasks.duration(t)).sum();
        let least = work as f64 * (1.0 - noise) * factor.min(1.0) / 4.0;
        prop_assert!(assisted.makespan as f64 >= 0.99 * least, "{assisted:?} {least}");
        prop_assert_eq!(both(&problem, &planned, &[(device, factor)], noise, rule).1, assisted, "the same again");
    }
}

/// A step with assistants between steps and within them, and where layers went.
fn with_homes(
    problem: &Problem<'_>,
    configs: &[Config],
    slow: &[(u32, f64)],
    noise: f64,
    steps: usize,
) -> (u64, Homes) {
    let real = |planned: &Schedule| {
        let mut real = planned.clone();
        real.slow_down(slow);
        real.perturb(noise, 7);
        real
    };
    let run = |configs: &[Config]| Ok(real(&apart(problem, configs)?.1).simulate().makespan());
    let (_, planned) = apart(problem, configs).unwrap();
    let found = homes(problem, configs, &paces(&planned, &real(&planned)), steps, run).unwrap();
    (run(&found.configs).unwrap(), found)
}

#[test]
fn layers_of_a_slow_device_find_another_home() {
    for model in ["nmt:batch=64,unroll=6,seq=6", "rnnlm:batch=64,unroll=6,seq=6", "dlrm:batch=2048"] {
        let case = Case::new(model, "p100x16:4");
        let problem = case.problem();
        let configs = search(&problem, &PLACE, &Demands::default(), &Control::new().iteration_limit(500))
            .unwrap()
            .configs;
        let (_, planned) = apart(&problem, &configs).unwrap();
        let even = planned.simulate().makespan();
        let busy = |device| {
            let own = planned.tasks.ids().filter(|&task| planned.owner(task) == Some(device));
            own.map(|task| planned.tasks.duration(task)).sum::<u64>()
        };
        let busiest = (0..4).max_by_key(|&device| busy(device)).unwrap();
        for factor in [1.5, 3.0] {
            let slow = [(busiest, factor)];
            let (fixed, nothing) = with_homes(&problem, &configs, &slow, 0.0, 0);
            assert_eq!((nothing.layers, &nothing.configs), (0, &configs), "no steps to find out");
            let (step, found) = with_homes(&problem, &configs, &slow, 0.0, 100);
            let recovered = (fixed - step) as f64 / (fixed - even) as f64;
            assert!(recovered >= 0.5, "{model} {factor}: {recovered} of {fixed} - {even}");
            assert!(found.layers > 0 && found.bytes > 0 && found.steps <= 100, "{found:?}");
            let limit = problem.machine.slowest().memory;
            assert!(peak(&problem, &found.configs) <= limit.max(peak(&problem, &configs)));
            assert_eq!(with_homes(&problem, &configs, &slow, 0.0, 100).1, found, "the same again");
        }
        let (_, calm) = with_homes(&problem, &configs, &[], 0.0, 100);
        assert_eq!((calm.layers, calm.steps), (0, 0), "nothing is slow");
    }
}

#[test]
fn layers_that_are_split_stay_where_they_are() {
    let case = Case::new("mlp:batch=64,hidden=256,layers=3", "flat:4");
    let problem = case.problem();
    let data = strategy::find("data").unwrap();
    let configs = search(&problem, data, &Demands::default(), &Control::new()).unwrap().configs;
    let (_, found) = with_homes(&problem, &configs, &[(1, 3.0)], 0.0, 100);
    assert_eq!((found.layers, found.steps, found.configs), (0, 0, configs));
}
