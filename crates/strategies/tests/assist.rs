//! Scheduling assistants: nothing changes where they may do nothing, and they help where a device is slow.

use proptest::prelude::*;
use shardwright_graph::Graph;
use shardwright_lower::ParallelGraph;
use shardwright_machine::{Machine, builtin};
use shardwright_plan::{Constraints, Context, peak};
use shardwright_search::Control;
use shardwright_sim::{AssistOutcome, Reality, Schedule, StealRule, assist, schedule_per_device};
use shardwright_space::Assignment;
use shardwright_strategies::{Migration, Planner, find, migrate, slowdowns};
use shardwright_zoo::{BuildOptions, build};

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

    fn context(&self) -> Context<'_> {
        Context::new(&self.graph, &self.machine, None, self.machine.mesh().clone(), false).unwrap()
    }

    /// The answer of a strategy, which is on the machine's prime axes.
    fn assignment(&self, solver: &str, proposals: u64) -> Assignment {
        let planner = Planner::new(&self.graph, &self.machine, None, false);
        let control = Control::new().iteration_limit(proposals);
        let found = find(solver).unwrap().solve(&planner, &Constraints::default(), &control).unwrap();
        assert!(found.context.search_mesh.prime);
        found.assignment
    }

    /// The plan's program and its tasks, with one class per device.
    fn schedule(&self, solver: &str) -> (ParallelGraph, Schedule) {
        schedule_per_device(&self.context(), &self.assignment(solver, 200)).unwrap()
    }
}

/// Static and assisted steps where a device is slow and everything is noisy.
fn both(
    context: &Context<'_>,
    (program, planned): &(ParallelGraph, Schedule),
    slow: &[(u32, f64)],
    noise: f64,
    rule: StealRule,
) -> (u64, AssistOutcome) {
    let mut real = planned.clone();
    real.slow_down(slow);
    real.perturb(noise, 7);
    let reality = Reality { schedule: &real, slower: slow };
    let assisted = assist(planned, program, context.resharder.comm(), rule, reality);
    (real.simulate().makespan(), assisted)
}

#[test]
fn assistants_that_may_do_nothing_change_nothing() {
    for (model, machine, solver) in CASES {
        let case = Case::new(model, machine);
        let context = case.context();
        let planned = case.schedule(solver);
        let nothing = StealRule { window: 0, ..StealRule::default() };
        for (slow, noise) in [(vec![], 0.0), (vec![(1, 1.7)], 0.0), (vec![(0, 3.0), (2, 1.2)], 0.3)] {
            let (fixed, assisted) = both(&context, &planned, &slow, noise, nothing);
            assert_eq!(
                assisted,
                AssistOutcome { makespan: fixed, ..AssistOutcome::default() },
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
        let context = case.context();
        let planned = case.schedule(solver);
        let (even, calm) = both(&context, &planned, &[], 0.0, StealRule::default());
        assert!(calm.makespan as f64 <= 1.02 * even as f64, "{model}: {} of {even}", calm.makespan);
        for device in 0..4 {
            let (fixed, assisted) = both(&context, &planned, &[(device, 3.0)], 0.0, StealRule::default());
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
    let context = case.context();
    let planned = case.schedule("data");
    let (even, noisy) = both(&context, &planned, &[], 0.2, StealRule::default());
    assert_eq!((noisy.makespan, noisy.moved), (even, 0), "noise is no reason to move work");
    let even = planned.1.simulate().makespan();
    for (factor, least) in [(1.5, 0.3), (2.0, 0.4), (3.0, 0.5)] {
        let (fixed, assisted) = both(&context, &planned, &[(1, factor)], 0.0, StealRule::default());
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
        let context = case.context();
        let planned = case.schedule(solver);
        let rule = StealRule { latency, window, fetch };
        let (_, assisted) = both(&context, &planned, &[(device, factor)], noise, rule);
        // No step is shorter than the work of all devices shared without loss at the best speed.
        let tasks = &planned.1.tasks;
        let work: u64 = tasks.ids().filter(|&t| planned.1.owner(t).is_some()).map(|t| tasks.duration(t)).sum();
        let least = work as f64 * (1.0 - noise) * factor.min(1.0) / 4.0;
        prop_assert!(assisted.makespan as f64 >= 0.99 * least, "{assisted:?} {least}");
        prop_assert_eq!(both(&context, &planned, &[(device, factor)], noise, rule).1, assisted, "the same again");
    }
}

/// The makespan of a step after migration, and the migration.
fn with_migration(
    context: &Context<'_>,
    assignment: &Assignment,
    slow: &[(u32, f64)],
    noise: f64,
    steps: usize,
) -> (u64, Migration) {
    let real = |planned: &Schedule| {
        let mut real = planned.clone();
        real.slow_down(slow);
        real.perturb(noise, 7);
        real
    };
    let run = |assignment: &Assignment| {
        Ok(real(&schedule_per_device(context, assignment)?.1).simulate().makespan())
    };
    let (_, planned) = schedule_per_device(context, assignment).unwrap();
    let found = migrate(context, assignment, &slowdowns(&planned, &real(&planned)), steps, run).unwrap();
    (run(&found.assignment).unwrap(), found)
}

#[test]
fn layers_migrate_off_a_slow_device() {
    for model in ["nmt:batch=64,unroll=6,seq=6", "rnnlm:batch=64,unroll=6,seq=6", "dlrm:batch=2048"] {
        let case = Case::new(model, "p100x16:4");
        let context = case.context();
        let assignment = case.assignment("place", 500);
        let (_, planned) = schedule_per_device(&context, &assignment).unwrap();
        let even = planned.simulate().makespan();
        let busy = |device| {
            let own = planned.tasks.ids().filter(|&task| planned.owner(task) == Some(device));
            own.map(|task| planned.tasks.duration(task)).sum::<u64>()
        };
        let busiest = (0..4).max_by_key(|&device| busy(device)).unwrap();
        for factor in [1.5, 3.0] {
            let slow = [(busiest, factor)];
            let (fixed, nothing) = with_migration(&context, &assignment, &slow, 0.0, 0);
            assert_eq!((nothing.layers, &nothing.assignment), (0, &assignment), "no steps to find out");
            let (step, found) = with_migration(&context, &assignment, &slow, 0.0, 100);
            let recovered = (fixed - step) as f64 / (fixed - even) as f64;
            assert!(recovered >= 0.5, "{model} {factor}: {recovered} of {fixed} - {even}");
            assert!(found.layers > 0 && found.bytes > 0 && found.steps <= 100, "{found:?}");
            let limit = context.machine.slowest().memory;
            assert!(peak(&context, &found.assignment) <= limit.max(peak(&context, &assignment)));
            assert_eq!(with_migration(&context, &assignment, &slow, 0.0, 100).1, found, "the same again");
        }
        let (_, calm) = with_migration(&context, &assignment, &[], 0.0, 100);
        assert_eq!((calm.layers, calm.steps), (0, 0), "nothing is slow");
    }
}

#[test]
fn layers_that_are_split_stay_where_they_are() {
    let case = Case::new("mlp:batch=64,hidden=256,layers=3", "flat:4");
    let context = case.context();
    let assignment = case.assignment("data", 200);
    let (_, found) = with_migration(&context, &assignment, &[(1, 3.0)], 0.0, 100);
    assert_eq!((found.layers, found.steps, found.assignment), (0, 0, assignment));
}
