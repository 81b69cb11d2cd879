//! Delta simulation is full simulation, to the bit.

mod data_parallel;

use data_parallel::data_parallel;
use shardwright_graph::{Graph, microbatch};
use shardwright_lower::{LowerOptions, Work, lower_with};
use shardwright_machine::{AxisSet, Bytes, builtin};
use shardwright_plan::{Context, SearchProblem};
use shardwright_sim::{Classes, Delta, DeltaError, Links, schedule, simulate_priced};
use shardwright_space::{Assignment, configs_with_pins};
use shardwright_zoo::{BuildOptions, build};
use std::num::NonZeroU32;

/// A generator that needs no dependency.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % sides
    }
}

/// The simulation of the lowered program: the step, and the end of every op in the last micro-batch that is simulated.
fn lowered(context: &Context<'_>, assignment: &Assignment) -> (u64, Vec<u64>) {
    let options = LowerOptions { join_below: Bytes(0), ..LowerOptions::default() };
    let program = lower_with(context.graph, &context.resharder, assignment, options).unwrap();
    let step = simulate_priced(context, assignment, &program).unwrap();
    let program = program.unrolled_to(4);
    let (classes, links) = (Classes::of(&program), Links::of(context.machine));
    let schedule = schedule(context, assignment, &program, classes, links, options.sharing).unwrap();
    let line = schedule.simulate();
    let mut ends = vec![0; context.graph.ops.len()];
    for task in schedule.tasks.ids() {
        if let Work::Compute { op, completes: false } = program.instruction(schedule.instructions[task]).work
        {
            ends[op.index()] = line.end[task].max(ends[op.index()]);
        }
    }
    (step, ends)
}

/// A long random walk: proposals of one or several variables at once, kept or not.
fn walk(spec: &str, machine: &str, proposals: usize, untied: bool) {
    walk_over(spec, machine, proposals, untied, false);
}

fn walk_over(spec: &str, machine: &str, proposals: usize, untied: bool, pins: bool) {
    walk_graph(&build(spec, &BuildOptions::default()).unwrap(), machine, proposals, untied, pins);
}

/// A walk over a step in micro-batches.
fn walk_batches(spec: &str, count: u32, machine: &str, proposals: usize, untied: bool, pins: bool) {
    let graph = build(spec, &BuildOptions::default()).unwrap();
    let graph = microbatch(&graph, NonZeroU32::new(count).unwrap()).unwrap().graph;
    walk_graph(&graph, machine, proposals, untied, pins);
}

fn walk_graph(graph: &Graph, machine: &str, proposals: usize, untied: bool, pins: bool) {
    let spec = &graph.name;
    let machine = builtin(machine).unwrap();
    let make = if untied { SearchProblem::untied } else { SearchProblem::new };
    let problem = make(graph, &machine, None).unwrap();
    let mut dice = Dice(spec.len() as u64);
    let context = &*problem.context;
    let mut kept = data_parallel(context);
    let mesh = context.mesh();
    let apart = if pins { mesh.all() } else { AxisSet::EMPTY };
    let mut delta = Delta::with_pins(context, &kept, apart).unwrap();
    assert_eq!((delta.makespan(), delta.op_ends()), lowered(context, &kept), "{spec}");
    let mut legal = 0;
    for round in 0..proposals {
        let mut proposed = kept.clone();
        let mut changes = Vec::new();
        for _ in 0..1 + dice.roll(2) {
            let v = dice.roll(problem.choices.len());
            let split = &context.variables.members[v];
            let choice = if pins && dice.roll(2) == 0 {
                let all = configs_with_pins(&context.shapes[split.forward().index()].rule, mesh);
                split.configs(&context.shapes, mesh, &all[dice.roll(all.len())])
            } else {
                problem.choices[v][dice.roll(problem.choices[v].len())].configs.clone()
            };
            for (op, config) in split.ops.iter().zip(&choice) {
                if changes.iter().any(|&(other, _)| other == op.0) {
                    continue;
                }
                changes.push((op.0, delta.number(op.index(), config)));
                proposed.configs[op.index()] = config.clone();
            }
        }
        let makespan = match delta.propose(&changes) {
            // A sum over micro-batches that splits its terms adds up partial results, which not every op leaves.
            Err(DeltaError::Layout(_)) => {
                assert_eq!(delta.assignment(), kept);
                continue;
            }
            makespan => makespan.unwrap(),
        };
        legal += 1;
        assert_eq!(makespan, delta.simulate_anew(), "{spec} round {round}");
        if round % 8 == 0 {
            assert_eq!((makespan, delta.op_ends()), lowered(context, &proposed), "{spec} round {round}");
        }
        if dice.roll(3) > 0 {
            delta.reject();
        } else {
            delta.accept();
            kept = proposed;
        }
        assert_eq!(delta.assignment(), kept);
    }
    assert_eq!((delta.makespan(), delta.op_ends()), lowered(context, &kept), "{spec} at the end");
    assert!(legal > proposals / 4, "{spec}: {legal} of {proposals} proposals can be laid out");
    let share = delta.steps() as f64 / (delta.task_count() * legal) as f64;
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

#[test]
fn micro_batches() {
    walk_batches("mlp:batch=64,hidden=256,layers=3", 2, "p100x16", 250, true, false);
    walk_batches("gpt:batch=16,layers=2,hidden=32,heads=4,seq=8,vocab=32", 4, "flat:4", 400, false, false);
}

#[test]
fn more_micro_batches_than_are_simulated() {
    walk_batches("mlp:batch=64,hidden=256,layers=2", 16, "p100x16", 250, true, false);
    walk_batches("gpt:batch=32,layers=1,hidden=32,heads=4,seq=8,vocab=32", 8, "flat:4", 100, true, false);
}

#[test]
fn pinned_micro_batches() {
    walk_batches("mlp:batch=64,hidden=256,layers=2", 2, "flat:4", 200, false, true);
    walk_batches("mlp:batch=64,hidden=256,layers=2", 8, "p100x16:8", 100, true, true);
}

#[test]
fn micro_batches_on_cores_that_move_data_themselves() {
    walk_batches("mlp:batch=64,hidden=256,layers=2", 8, "cpu:4", 150, true, false);
}
