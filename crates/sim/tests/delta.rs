//! Delta simulation is full simulation, to the bit.

use shardwright_frontend::zoo::{BuildOptions, build};
use shardwright_graph::OpId;
use shardwright_lower::{Work, lower_joining};
use shardwright_machine::{AxisSet, Bytes, builtin};
use shardwright_plan::{Demands, Problem, search, strategy};
use shardwright_search::Control;
use shardwright_sim::{Best, Classes, Delta, Limits, Links, Moves, Schedule, Timeline, mcmc};
use shardwright_space::{Config, configs_with_pins, place};

/// A generator that needs no dependency.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % sides
    }
}

/// The timeline of the lowered program: makespan, and the end of every op.
fn lowered(problem: &Problem<'_>, configs: &[Config]) -> (u64, Vec<u64>) {
    let program = lower_joining(problem.graph, &problem.relayouts, configs, Bytes(0)).unwrap();
    let times = problem.times().unwrap();
    let run_as = place(problem.graph, &problem.shapes, configs, problem.mesh()).configs;
    let compute = |op: OpId| times.compute(op, &run_as[op.index()]);
    let schedule =
        Schedule::new(&program, Classes::of(&program), Links::of(problem.machine), compute).unwrap();
    let line = schedule.simulate();
    let mut ends = vec![0; problem.graph.ops.len()];
    for task in schedule.tasks.ids() {
        if let Work::Compute { op } = program.instruction(schedule.instructions[task]).work {
            ends[op.index()] = line.end[task].max(ends[op.index()]);
        }
    }
    (line.makespan(), ends)
}

/// A long random walk: proposals of one or several variables at once, kept or not.
fn walk(spec: &str, machine: &str, proposals: usize, untied: bool) {
    walk_over(spec, machine, proposals, untied, false);
}

fn walk_over(spec: &str, machine: &str, proposals: usize, untied: bool, pins: bool) {
    let graph = build(spec, &BuildOptions::default()).unwrap();
    let machine = builtin(machine).unwrap();
    let make = if untied { Problem::untied } else { Problem::new };
    let problem = make(&graph, &machine, None).unwrap();
    let mut dice = Dice(spec.len() as u64);
    let data =
        search(&problem, strategy::find("data").unwrap(), &Demands::default(), &Control::new()).unwrap();
    let mut kept = data.configs;
    let mesh = problem.mesh();
    let apart = if pins { mesh.all() } else { AxisSet::EMPTY };
    let mut delta = Delta::with_pins(&problem, &kept, apart).unwrap();
    assert_eq!((delta.makespan(), delta.op_ends()), lowered(&problem, &kept), "{spec}");
    for round in 0..proposals {
        let mut configs = kept.clone();
        let mut changes = Vec::new();
        for _ in 0..1 + dice.roll(2) {
            let v = dice.roll(problem.choices.len());
            let split = &problem.variables.splits[v];
            let choice = if pins && dice.roll(2) == 0 {
                let all = configs_with_pins(&problem.shapes[split.forward().index()].rule, mesh);
                split.configs(&problem.shapes, mesh, &all[dice.roll(all.len())])
            } else {
                problem.choices[v][dice.roll(problem.choices[v].len())].configs.clone()
            };
            for (op, config) in split.ops.iter().zip(&choice) {
                if changes.iter().any(|&(other, _)| other == op.0) {
                    continue;
                }
                changes.push((op.0, delta.number(op.index(), config)));
                configs[op.index()] = config.clone();
            }
        }
        let makespan = delta.propose(&changes).unwrap();
        assert_eq!(makespan, Timeline::of(&delta.tasks()).makespan(), "{spec} round {round}");
        if round % 8 == 0 {
            assert_eq!((makespan, delta.op_ends()), lowered(&problem, &configs), "{spec} round {round}");
        }
        if dice.roll(3) > 0 {
            delta.reject();
        } else {
            delta.accept();
            kept = configs;
        }
        assert_eq!(delta.configs(), kept);
    }
    assert_eq!((delta.makespan(), delta.op_ends()), lowered(&problem, &kept), "{spec} at the end");
    let share = delta.steps() as f64 / (delta.task_count() * proposals) as f64;
    assert!(share > 0.0 && share < 0.7, "{spec}: {share} of the step timed anew per proposal");
}

#[test]
fn lenet() {
    walk("lenet5:batch=16", "p100x16", 250, false);
}

#[test]
fn perceptrons_untied() {
    walk("mlp:batch=64,hidden=256,layers=3", "p100x16", 300, true);
}

#[test]
fn recurrent_nets() {
    walk("nmt:batch=8,seq=4,hidden=16,vocab=24,unroll=4", "p100x16:8", 250, false);
}

#[test]
fn transformers() {
    walk("gpt:batch=8,layers=2,hidden=32,heads=4,seq=8,vocab=32", "flat:4", 250, false);
}

#[test]
fn pinned_lenet() {
    walk_over("lenet5:batch=8", "flat:4", 200, false, true);
}

#[test]
fn pinned_perceptrons_untied() {
    walk_over("mlp:batch=64,hidden=256,layers=2", "p100x16:8", 200, true, true);
}

#[test]
fn pinned_recurrent_nets() {
    walk_over("nmt:batch=8,seq=2,hidden=16,vocab=24,unroll=2", "p100x16:8", 100, false, true);
}

#[test]
fn cores_that_move_data_themselves() {
    walk("nmt:batch=8,seq=2,hidden=16,vocab=24,unroll=2", "cpu:4", 150, false);
    walk_over("lenet5:batch=8", "cpu:4", 100, false, true);
}

#[test]
fn inception() {
    walk("inception_v3:batch=16", "p100x16:4", 40, false);
}

fn chains(
    problem: &Problem<'_>,
    starts: &[Vec<Config>],
    proposals: u64,
    seed: u64,
    fixed: Vec<usize>,
) -> Vec<Best> {
    let limits = Limits { proposals, fixed, ..Limits::default() };
    let moves = Moves::new(problem, &starts[0]);
    mcmc(problem, &moves, starts, &limits, &Control { seed, ..Control::new() }).unwrap()
}

/// The shortest step that any choice of some variables gives, the others left as they are: all of them tried.
fn exhaustive(problem: &Problem<'_>, start: &[Config], free: &[usize]) -> u64 {
    let mut delta = Delta::new(problem, start).unwrap();
    let numbers: Vec<Vec<Vec<(u32, u32)>>> = free
        .iter()
        .map(|&v| {
            let ops = &problem.variables.splits[v].ops;
            let change = |configs: &[Config]| {
                let pairs = ops.iter().zip(configs);
                pairs.map(|(op, config)| (op.0, delta.number(op.index(), config))).collect()
            };
            problem.choices[v].iter().map(|choice| &choice.configs[..]).map(change).collect()
        })
        .collect();
    let mut at = vec![0; free.len()];
    let first: Vec<(u32, u32)> = numbers.iter().flat_map(|of| of[0].iter().copied()).collect();
    let mut least = delta.propose(&first).unwrap();
    delta.accept();
    // An odometer: mostly one variable changes.
    loop {
        let mut changes = Vec::new();
        let mut wheel = 0;
        loop {
            let Some(choice) = at.get_mut(wheel) else { return least };
            *choice = (*choice + 1) % numbers[wheel].len();
            changes.extend_from_slice(&numbers[wheel][*choice]);
            if *choice > 0 {
                break;
            }
            wheel += 1;
        }
        least = least.min(delta.propose(&changes).unwrap());
        delta.accept();
    }
}

/// The paper's check of optimality: the search finds what trying everything finds. All choices of the layers that
/// compute longest; the others are repeated on every device.
fn equals_exhaustive(spec: &str, machine: &str, layers: usize) {
    let graph = build(spec, &BuildOptions::default()).unwrap();
    let machine = builtin(machine).unwrap();
    let problem = Problem::new(&graph, &machine, None).unwrap();
    let whole = vec![Config::replicated(problem.mesh().len()); graph.ops.len()];
    let mut free: Vec<usize> = (0..problem.choices.len()).filter(|&v| problem.choices[v].len() > 1).collect();
    free.sort_by_key(|&v| std::cmp::Reverse(problem.choices[v].iter().map(|c| c.compute).max()));
    free.truncate(layers);
    let fixed = (0..problem.choices.len()).filter(|v| !free.contains(v)).collect();
    let least = exhaustive(&problem, &whole, &free);
    let best = &chains(&problem, std::slice::from_ref(&whole), 20_000, 0, fixed)[0];
    let before = lowered(&problem, &whole).0;
    println!("{spec}: whole {before} ps, all tried {least} ps, found {} ps", best.makespan);
    assert_eq!(best.makespan, least, "{spec}");
    assert_eq!(lowered(&problem, &best.configs).0, least);
    assert!(best.locally_optimal && least < before, "{spec}: {least} of {before}");
}

#[test]
fn the_search_finds_the_optimum_of_perceptrons() {
    equals_exhaustive("mlp:batch=16,hidden=64,layers=1", "flat:2", usize::MAX);
}

#[test]
fn the_search_finds_the_optimum_of_lenets_largest_layers() {
    equals_exhaustive("lenet5:batch=8", "flat:4", 4);
}

#[test]
fn the_search_finds_the_optimum_of_a_short_recurrent_nets_largest_layers() {
    equals_exhaustive("rnnlm:batch=64,seq=2,hidden=1024,vocab=8192,unroll=2", "flat:4", 4);
}

#[test]
#[ignore = "a minute in release: cargo test --release -p shardwright-sim --test delta -- --ignored"]
fn the_search_finds_the_optimum_of_more_layers() {
    equals_exhaustive("lenet5:batch=8", "flat:4", 6);
    equals_exhaustive("rnnlm:batch=64,seq=2,hidden=1024,vocab=8192,unroll=2", "flat:4", 6);
}

#[test]
fn the_search_is_the_same_for_the_same_seed() {
    let graph = build("lenet5:batch=16", &BuildOptions::default()).unwrap();
    let machine = builtin("flat:4").unwrap();
    let problem = Problem::new(&graph, &machine, None).unwrap();
    let starts: Vec<Vec<Config>> = ["data", "model", "exact"]
        .map(|s| {
            search(&problem, strategy::find(s).unwrap(), &Demands::default(), &Control::new())
                .unwrap()
                .configs
        })
        .to_vec();
    let run = |seed| chains(&problem, &starts, 500, seed, Vec::new());
    assert_eq!(run(1), run(1));
    for start in &starts {
        assert!(run(2)[0].makespan <= lowered(&problem, start).0);
    }
}
