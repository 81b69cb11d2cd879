//! Prints how long a proposal takes with full and with delta simulation, for the models of FlexFlow's table 4:
//! `cargo run --release -p shardwright-sim --example delta_table [-- MACHINE [MODEL...]]`
//!
//! A proposal gives one layer another config, both picked evenly, starting from data parallelism, and is accepted as the
//! search would. Full: all tasks made anew and simulated, after the last of them. One thread; its processor time, where the
//! system tells that, so that a busy machine gives the same numbers.

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use shardwright_frontend::zoo::{BuildOptions, build};
use shardwright_machine::builtin;
use shardwright_plan::{Demands, Problem, search, strategy};
use shardwright_search::Control;
use shardwright_sim::Delta;
use std::error::Error;
use std::time::Instant;

const MODELS: [&str; 6] =
    ["alexnet", "resnet101", "inception_v3", "rnntc:unroll=40", "rnnlm:unroll=40", "nmt:unroll=40"];
const DEVICES: [u32; 5] = [4, 8, 16, 32, 64];
/// Proposals that are timed, after others that get to know configs; and full simulations.
const PROPOSALS: u32 = 5000;
const BEFORE: u32 = 20_000;
const FULL: u32 = 100;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let machine = args.first().map_or("k80x64", String::as_str);
    let models: Vec<&str> =
        if args.len() > 1 { args[1..].iter().map(String::as_str).collect() } else { MODELS.to_vec() };
    println!("| model | devices | tasks | full, µs | delta, µs | ratio | timed |");
    println!("|---|---|---|---|---|---|---|");
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
    let problem = Problem::new(&graph, &machine, None)?;
    let data = search(&problem, strategy::find("data")?, &Demands::default(), &Control::new())?;
    let mut delta = Delta::new(&problem, &data.configs)?;
    let mut random = Xoshiro256PlusPlus::seed_from_u64(1);
    let begin = Instant::now();
    let (mut start, mut steps) = (0.0, 0);
    for round in 0..BEFORE + PROPOSALS {
        if round == BEFORE {
            (start, steps) = (worked(begin), delta.steps());
        }
        let v = random.random_range(0..problem.choices.len());
        let c = random.random_range(0..problem.choices[v].len());
        let ops = problem.variables.splits[v].ops.iter().zip(&problem.choices[v][c].configs);
        let changes: Vec<(u32, u32)> =
            ops.map(|(op, config)| (op.0, delta.number(op.index(), config))).collect();
        let old = delta.makespan();
        let new = delta.propose(&changes)?;
        let worse = (new as f64 - old as f64) / (old as f64 * 0.002);
        if new <= old || random.random::<f64>() < (-worse).exp() {
            delta.accept();
        } else {
            delta.reject();
        }
    }
    let quick = (worked(begin) - start) * 1e6 / f64::from(PROPOSALS);
    let timed = (delta.steps() - steps) as f64 / f64::from(PROPOSALS);
    let start = worked(begin);
    for _ in 0..FULL {
        assert_eq!(delta.simulate_anew(), delta.makespan());
    }
    let full = (worked(begin) - start) * 1e6 / f64::from(FULL);
    let tasks = delta.task_count();
    println!(
        "| {model} | {devices} | {tasks} | {full:.0} | {quick:.1} | {:.1} | {:.1}% |",
        full / quick,
        100.0 * timed / tasks.max(1) as f64
    );
    Ok(())
}
