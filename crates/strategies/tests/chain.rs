//! Markov chains: what they find is what trying everything finds, and the same for the same seed.

use shardwright_lower::{LowerOptions, lower_with};
use shardwright_machine::{Bytes, builtin};
use shardwright_plan::SearchProblem;
use shardwright_search::{Control, Solver, exact::Exact};
use shardwright_sim::{Classes, Delta, Links, schedule};
use shardwright_space::{Assignment, Config};
use shardwright_strategies::{
    Moves,
    chain::{ChainResult, Limits, run_chains},
    recipes,
};
use shardwright_zoo::{BuildOptions, build};

/// The makespan of the lowered program.
fn lowered(problem: &SearchProblem<'_>, assignment: &Assignment) -> u64 {
    let context = &*problem.context;
    let options = LowerOptions { join_below: Bytes(0), ..LowerOptions::default() };
    let program = lower_with(context.graph, &context.resharder, assignment, options).unwrap();
    let (classes, links) = (Classes::of(&program), Links::of(context.machine));
    let schedule = schedule(context, assignment, &program, classes, links, options.sharing).unwrap();
    schedule.simulate().makespan()
}

fn chains(
    problem: &SearchProblem<'_>,
    starts: &[Assignment],
    proposals: u64,
    seed: u64,
    fixed: Vec<usize>,
) -> Vec<ChainResult> {
    let limits = Limits { proposals, fixed, ..Limits::default() };
    let moves = Moves::new(&problem.context, &problem.choices, &starts[0]);
    run_chains(&problem.context, &moves, starts, &limits, &Control { seed, ..Control::new() }).unwrap()
}

/// The shortest step that any choice of some variables gives, the others left as they are: all of them tried.
fn exhaustive(problem: &SearchProblem<'_>, start: &Assignment, free: &[usize]) -> u64 {
    let mut delta = Delta::new(&problem.context, start).unwrap();
    let numbers: Vec<Vec<Vec<(u32, u32)>>> = free
        .iter()
        .map(|&v| {
            let ops = &problem.context.variables.members[v].ops;
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
    let problem = SearchProblem::new(&graph, &machine, None).unwrap();
    let whole = Assignment::replicated(&graph, problem.context.mesh());
    let mut free: Vec<usize> = (0..problem.choices.len()).filter(|&v| problem.choices[v].len() > 1).collect();
    free.sort_by_key(|&v| std::cmp::Reverse(problem.choices[v].iter().map(|c| c.compute).max()));
    free.truncate(layers);
    let fixed = (0..problem.choices.len()).filter(|v| !free.contains(v)).collect();
    let least = exhaustive(&problem, &whole, &free);
    let best = &chains(&problem, std::slice::from_ref(&whole), 20_000, 0, fixed)[0];
    let before = lowered(&problem, &whole);
    println!("{spec}: whole {before} ps, all tried {least} ps, found {} ps", best.makespan);
    assert_eq!(best.makespan, least, "{spec}");
    assert_eq!(lowered(&problem, &best.assignment), least);
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
#[ignore = "a minute in release: cargo test --release -p shardwright-strategies --test chain -- --ignored"]
fn the_search_finds_the_optimum_of_more_layers() {
    equals_exhaustive("lenet5:batch=8", "flat:4", 6);
    equals_exhaustive("rnnlm:batch=64,seq=2,hidden=1024,vocab=8192,unroll=2", "flat:4", 6);
}

#[test]
fn the_search_is_the_same_for_the_same_seed() {
    let graph = build("lenet5:batch=16", &BuildOptions::default()).unwrap();
    let machine = builtin("flat:4").unwrap();
    let problem = SearchProblem::new(&graph, &machine, None).unwrap();
    let context = &*problem.context;
    let exact = Exact.solve(&problem.network, &Control::new()).choice.unwrap();
    let starts =
        [recipes::DATA.assignment(context), recipes::MODEL.assignment(context), problem.assignment(&exact)];
    let run = |seed| chains(&problem, &starts, 500, seed, Vec::new());
    assert_eq!(run(1), run(1));
    for start in &starts {
        assert!(run(2)[0].makespan <= lowered(&problem, start));
    }
}
