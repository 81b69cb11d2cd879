//! Prints how long a proposal takes with full and with delta simulation, for the models of FlexFlow's table 4:
//! `cargo run --release -p shardwright-strategies --example delta_table [-- MACHINE [MODEL...]]`
//!
//! A proposal gives one layer another config, both picked evenly, starting from data parallelism, and is accepted as the
//! search would. "Delta": the same proposals once more, so that what every config means is known; "first": the first time. Full:
//! all tasks made anew and simulated, after the last of them. One thread; its processor time, where the
//! system tells that, so that a busy machine gives the same numbers.

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use shardwright_machine::builtin;
use shardwright_plan::SearchProblem;
use shardwright_sim::Delta;
use shardwright_space::Config;
use shardwright_strategies::recipes;
use shardwright_zoo::{BuildOptions, build};
use std::error::Error;
use std::time::Instant;

const MODELS: [&str; 6] =
    ["alexnet", "resnet101", "inception_v3", "rnntc:unroll=40", "rnnlm:unroll=40", "nmt:unroll=40"];
const DEVICES: [u32; 5] = [4, 8, 16, 32, 64];
/// Proposals that are timed, after others that lead away from the start.
const PROPOSALS: u32 = 5000;
const BEFORE: u32 = 20_000;
/// The same is done again until it has taken so many seconds: the system's clock of a thread's work is a coarse one.
const LEAST: f64 = 0.4;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let machine = args.first().map_or("k80x64", String::as_str);
    let models: Vec<&str> =
        if args.len() > 1 { args[1..].iter().map(String::as_str).collect() } else { MODELS.to_vec() };
    println!("| model | devices | tasks | full, µs | delta, µs | ratio | first, µs | timed | accepted |");
    println!("|---|---|---|---|---|---|---|---|---|");
    for model in models {
        for devices in DEVICES {
            row(model, &format!("{machine}:{devices}"), devices)?;
        }
    }
    Ok(())
}

/// Seconds that this thread has been working; of the wall clock where the system does not say.
fn worked(begin: Instant) -> f64 {
    let told = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let nanoseconds = told.and_then(|text| text.split_whitespace().next()?.parse::<f64>().ok());
    nanoseconds.map_or_else(|| begin.elapsed().as_secs_f64(), |nanoseconds| nanoseconds / 1e9)
}

fn row(model: &str, machine: &str, devices: u32) -> Result<(), Box<dyn Error>> {
    let graph = build(model, &BuildOptions::default())?;
    let machine = builtin(machine)?;
    let problem = SearchProblem::new(&graph, &machine, None)?;
    let context = &*problem.context;
    let mut delta = Delta::new(context, &recipes::DATA.assignment(context))?;
    let mut random = Xoshiro256PlusPlus::seed_from_u64(1);
    let moves: Vec<Vec<Vec<(u32, u32)>>> = (0..problem.choices.len())
        .map(|v| {
            let ops = &context.variables.members[v].ops;
            let numbers = |configs: &[Config], delta: &mut Delta<'_>| {
                let pairs = ops.iter().zip(configs);
                pairs.map(|(op, config)| (op.0, delta.number(op.index(), config))).collect()
            };
            problem.choices[v].iter().map(|choice| numbers(&choice.configs, &mut delta)).collect()
        })
        .collect();
    let begin = Instant::now();
    walk(&mut delta, &moves, &mut random, BEFORE)?;
    let mut start = Vec::new();
    delta.numbers(&mut start);
    let round = |delta: &mut Delta<'_>| -> Result<(f64, u64, u32), Box<dyn Error>> {
        let (from, steps) = (worked(begin), delta.steps());
        let accepted = walk(delta, &moves, &mut random.clone(), PROPOSALS)?;
        Ok(((worked(begin) - from) * 1e6 / f64::from(PROPOSALS), delta.steps() - steps, accepted))
    };
    let (first, ..) = round(&mut delta)?;
    let end = delta.makespan();
    // Back to where these proposals began.
    let back: Vec<(u32, u32)> = start.iter().enumerate().map(|(op, &number)| (op as u32, number)).collect();
    let (mut quick, mut rounds, mut steps, mut accepted) = (0.0, 0, 0, 0);
    while quick * f64::from(PROPOSALS) < LEAST * 1e6 {
        delta.propose(&back)?;
        delta.accept();
        let (time, timed, taken) = round(&mut delta)?;
        assert_eq!(delta.makespan(), end, "the same proposals");
        (quick, rounds, steps, accepted) = (quick + time, rounds + 1, timed, taken);
    }
    let quick = quick / f64::from(rounds);
    let tasks = delta.task_count();
    let (from, mut count) = (worked(begin), 0);
    while worked(begin) - from < LEAST {
        assert_eq!(delta.simulate_anew(), delta.makespan());
        count += 1;
    }
    let full = (worked(begin) - from) * 1e6 / f64::from(count);
    println!(
        "| {model} | {devices} | {tasks} | {full:.0} | {quick:.1} | {:.1} | {first:.1} | {:.1}% | {:.0}% |",
        full / quick,
        100.0 * steps as f64 / f64::from(PROPOSALS) / tasks.max(1) as f64,
        100.0 * f64::from(accepted) / f64::from(PROPOSALS)
    );
    Ok(())
}

/// So many proposals; how many were accepted.
fn walk(
    delta: &mut Delta<'_>,
    moves: &[Vec<Vec<(u32, u32)>>],
    random: &mut Xoshiro256PlusPlus,
    proposals: u32,
) -> Result<u32, Box<dyn Error>> {
    let mut accepted = 0;
    for _ in 0..proposals {
        let v = random.random_range(0..moves.len());
        let c = random.random_range(0..moves[v].len());
        let old = delta.makespan();
        let new = delta.propose(&moves[v][c])?;
        let worse = (new as f64 - old as f64) / (old as f64 * 0.002);
        if new <= old || random.random::<f64>() < (-worse).exp() {
            delta.accept();
            accepted += 1;
        } else {
            delta.reject();
        }
    }
    Ok(accepted)
}
