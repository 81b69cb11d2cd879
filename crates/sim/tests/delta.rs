//! Delta simulation is full simulation, to the bit.

use shardwright_frontend::zoo::{BuildOptions, build};
use shardwright_graph::OpId;
use shardwright_lower::{Work, lower_joining};
use shardwright_machine::{Bytes, builtin};
use shardwright_plan::{Demands, Problem, search, strategy};
use shardwright_search::Control;
use shardwright_sim::{Best, Classes, Delta, Limits, Moves, Schedule, Timeline, mcmc};
use shardwright_space::{Config, place};

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
    let schedule = Schedule::new(&program, Classes::of(&program), compute).unwrap();
    let line = schedule.simulate();
    let mut ends = vec![0; problem.graph.ops.len()];
    for task in schedule.tasks.ids() {
        if let Work::Compute { op, .. } = program.instruction(schedule.instructions[task]).work {
            ends[op.index()] = line.end[task];
        }
    }
    (line.makespan(), ends)
}

/// A long random walk: proposals of one or several variables at once, kept or not.
fn walk(spec: &str, machine: &str, proposals: usize, untied: bool) {
    let graph = build(spec, &BuildOptions::default()).unwrap();
    let machine = builtin(machine).unwrap();
    let make = if untied { Problem::untied } else { Problem::new };
    let problem = make(&graph, &machine, None).unwrap();
    let mut dice = Dice(spec.len() as u64);
    let data =
        search(&problem, strategy::find("data").unwrap(), &Demands::default(), &Control::new()).unwrap();
    let mut kept = data.configs;
    let mut delta = Delta::new(&problem, &kept).unwrap();
    assert_eq!((delta.makespan(), delta.op_ends()), lowered(&problem, &kept), "{spec}");
    for round in 0..proposals {
        let mut configs = kept.clone();
        let mut changes = Vec::new();
        for _ in 0..1 + dice.roll(2) {
            let v = dice.roll(problem.choices.len());
            let choice = &problem.choices[v][dice.roll(problem.choices[v].len())];
            for (op, config) in problem.variables.splits[v].ops.iter().zip(&choice.configs) {
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
fn inception() {
    walk("inception_v3:batch=16", "p100x16:4", 40, false);
}

fn chains(problem: &Problem<'_>, starts: &[Vec<Config>], proposals: u64, seed: u64) -> Vec<Best> {
    let limits = Limits { proposals, ..Limits::default() };
    let moves = Moves::new(problem, &starts[0]);
    mcmc(problem, &moves, starts, &limits, &Control { seed, ..Control::new() }).unwrap()
}

/// Every choice of every variable tried against every other, on a step small enough.
#[test]
fn the_search_finds_the_optimum_of_small_spaces() {
    let graph = build("mlp:batch=16,hidden=64,layers=1", &BuildOptions::default()).unwrap();
    let machine = builtin("flat:2").unwrap();
    let problem = Problem::new(&graph, &machine, None).unwrap();
    let data =
        search(&problem, strategy::find("data").unwrap(), &Demands::default(), &Control::new()).unwrap();
    let counts: Vec<usize> = problem.choices.iter().map(|choices| choices.len()).collect();
    let all: usize = counts.iter().product();
    assert!(all < 200_000, "{counts:?}");
    let mut delta = Delta::new(&problem, &data.configs).unwrap();
    let mut choices = vec![usize::MAX; counts.len()];
    let mut least = u64::MAX;
    for code in 0..all {
        let mut rest = code;
        let mut changes = Vec::new();
        for (v, &count) in counts.iter().enumerate() {
            let choice = rest % count;
            rest /= count;
            if std::mem::replace(&mut choices[v], choice) != choice {
                let configs = &problem.choices[v][choice].configs;
                for (op, config) in problem.variables.splits[v].ops.iter().zip(configs) {
                    changes.push((op.0, delta.number(op.index(), config)));
                }
            }
        }
        least = least.min(delta.propose(&changes).unwrap());
        delta.accept();
    }
    let best = &chains(&problem, &[data.configs], 10_000, 0)[0];
    assert_eq!(best.makespan, least);
    assert!(best.locally_optimal);
    assert_eq!(lowered(&problem, &best.configs).0, least);
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
    let run = |seed| chains(&problem, &starts, 500, seed);
    assert_eq!(run(1), run(1));
    for start in &starts {
        assert!(run(2)[0].makespan <= lowered(&problem, start).0);
    }
}
