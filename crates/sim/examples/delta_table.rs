//! Prints how long a proposal takes with full and with delta simulation, for the models of FlexFlow's table 4:
//! `cargo run --release -p shardwright-sim --example delta_table [-- MACHINE [MODEL...]]`
//!
//! A proposal gives one layer another config, both picked evenly, starting from data parallelism, and is accepted as the
//! search would. Full: all tasks made anew and simulated. Both run on the same proposals, in one thread.

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use shardwright_frontend::zoo::{BuildOptions, build};
use shardwright_machine::builtin;
use shardwright_plan::{Demands, Problem, search, strategy};
use shardwright_search::Control;
use shardwright_sim::Delta;
use std::error::Error;
use std::time::{Duration, Instant};

const MODELS: [&str; 6] =
    ["alexnet", "resnet101", "inception_v3", "rnntc:unroll=40", "rnnlm:unroll=40", "nmt:unroll=40"];
const DEVICES: [u32; 5] = [4, 8, 16, 32, 64];
/// Proposals that both ways are timed on, after as many to get to know configs.
const PROPOSALS: u32 = 2000;

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

fn row(model: &str, machine: &str, devices: u32) -> Result<(), Box<dyn Error>> {
    let graph = build(model, &BuildOptions::default())?;
    let machine = builtin(machine)?;
    let problem = Problem::new(&graph, &machine, None)?;
    let data = search(&problem, strategy::find("data")?, &Demands::default(), &Control::new())?;
    let mut delta = Delta::new(&problem, &data.configs)?;
    let mut random = Xoshiro256PlusPlus::seed_from_u64(1);
    let (mut quick, mut full) = (Duration::ZERO, Duration::ZERO);
    let mut timed = 0;
    for round in 0..2 * PROPOSALS {
        let v = random.random_range(0..problem.choices.len());
        let c = random.random_range(0..problem.choices[v].len());
        let ops = problem.variables.splits[v].ops.iter().zip(&problem.choices[v][c].configs);
        let changes: Vec<(u32, u32)> =
            ops.map(|(op, config)| (op.0, delta.number(op.index(), config))).collect();
        let old = delta.makespan();
        let (start, steps) = (Instant::now(), delta.steps());
        let new = delta.propose(&changes)?;
        let worse = (new as f64 - old as f64) / (old as f64 * 0.002);
        let taken = new <= old || random.random::<f64>() < (-worse).exp();
        if taken {
            delta.accept();
        } else {
            delta.reject();
        }
        let spent = start.elapsed();
        if round < PROPOSALS {
            continue;
        }
        quick += spent;
        timed += delta.steps() - steps;
        if round % 20 == 0 {
            let start = Instant::now();
            let makespan = delta.simulate_anew();
            full += 20 * start.elapsed();
            assert_eq!(makespan, delta.makespan());
        }
    }
    let per = |time: Duration| time.as_secs_f64() * 1e6 / f64::from(PROPOSALS);
    println!(
        "| {model} | {devices} | {} | {:.0} | {:.1} | {:.1} | {:.1}% |",
        delta.task_count(),
        per(full),
        per(quick),
        per(full) / per(quick),
        100.0 * timed as f64 / f64::from(PROPOSALS) / delta.task_count().max(1) as f64
    );
    Ok(())
}
