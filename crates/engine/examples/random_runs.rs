//! Trains random models under random assignments on the engine, and compares each run with the serial program:
//! `random_runs COUNT [SEED]`.
//!
//! A pair is a model of the zoo with random sizes and a random optimizer, in f64, and a random config for every op: tied to
//! layers or not, with pins or without, on 2 to 8 devices. The program prints the number of pairs and every difference that
//! rounding does not explain, and ends with status 1 if there is one.

#[path = "../tests/random_plans/mod.rs"]
mod random_plans;

use random_plans::{Random, configs};
use shardwright_cost::Resharder;
use shardwright_engine::{Check, Options, run};
use shardwright_graph::{Graph, Optimizer};
use shardwright_lower::lower;
use shardwright_machine::builtin;
use shardwright_space::Assignment;
use shardwright_zoo::{BuildOptions, build};
use std::time::Instant;

/// Assignments per graph: the serial run is shared.
const ASSIGNMENTS: usize = 20;

/// A model with random sizes.
fn model(random: &mut Random) -> String {
    let mut even = |most: usize| 2 * (1 + random.below(most));
    let (batch, hidden, vocab, seq, classes) = (even(4), 4 * even(2), even(8), even(3), even(4));
    let image = 12 + even(3);
    let block = format!("batch={batch},layers=1,hidden={hidden},vocab={vocab},seq={seq}");
    let models = [
        format!("mlp:batch={batch},input={vocab},hidden={hidden},layers={},classes={classes}", 1 + seq / 2),
        format!("lenet5:batch={batch},image={image},width=0.5,classes={classes}"),
        format!("vgg16:batch={batch},image=32,width=0.0625,classes={classes},dropout=0"),
        format!("gpt:{block},heads=4"),
        format!("bert:{block},heads=4,ffn=12"),
        format!("llama:{block},heads=4,kv_heads=2,ffn=12"),
        format!("moe:{block},heads=4,kv_heads=2,ffn=12,experts=4"),
        format!("transformer:{block},heads=4,ffn=12"),
        format!("rnnlm:batch={batch},seq={seq},hidden={hidden},vocab={vocab}"),
        format!("nmt:batch={batch},seq={seq},hidden={hidden},vocab={vocab}"),
        format!("dlrm:batch={batch},tables=2,rows=8,dim=4,dense=6,bottom=8,top=8,lookups=2"),
    ];
    format!("{},dtype=f64", models[random.below(models.len())])
}

fn optimizer(random: &mut Random) -> Optimizer {
    match random.below(3) {
        0 => Optimizer::sgd(0.01),
        1 => Optimizer::momentum(0.01, 0.9),
        _ => Optimizer::adam(0.001),
    }
}

/// Runs some assignments of a graph and returns the differences that rounding does not explain.
fn failures(graph: &Graph, model: &str, random: &mut Random, count: usize) -> Vec<String> {
    let options =
        Options { given: &[], seed: 3, steps: 2, trace: false, finals: true, slow: &[], assist: None };
    let check = match Check::new(graph, options) {
        Ok(check) => check,
        Err(error) => return vec![format!("{model}: {error}")],
    };
    let mut found = Vec::new();
    for _ in 0..count {
        let devices = [2, 3, 4, 6, 8][random.below(5)];
        let Ok(machine) = builtin(&format!("flat:{devices}")) else { continue };
        let (tied, pins) = (random.below(2) == 0, random.below(2) == 0);
        let seed = random.0;
        let configs = configs(graph, machine.mesh(), random, tied, pins);
        let resharder = Resharder::new(&machine, machine.mesh());
        let case = format!("{model} on {devices} devices (seed {seed}, tied {tied}, pins {pins})");
        let outcome = lower(graph, &resharder, &Assignment::new(configs))
            .map_err(|e| e.to_string())
            .and_then(|program| run(graph, &program, options).map_err(|e| e.to_string()))
            .and_then(|outcome| check.compare(&outcome).map_err(|e| e.to_string()));
        match outcome {
            Ok(difference) if difference.is_rounding() => {}
            Ok(difference) => found.push(format!("{case}: {difference:?}")),
            Err(error) => found.push(format!("{case}: {error}")),
        }
    }
    found
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default: u64| arguments.next().and_then(|n| n.parse().ok()).unwrap_or(default);
    let (count, seed) = (number(1000) as usize, number(0));
    let mut random = Random(seed.wrapping_mul(1_000_003));
    let (start, mut done, mut graphs, mut wrong) = (Instant::now(), 0, 0, 0);
    while done < count {
        let model = model(&mut random);
        let options = BuildOptions { optimizer: optimizer(&mut random), ..BuildOptions::default() };
        // Some sizes do not fit together; another model follows.
        let Ok(graph) = build(&model, &options) else { continue };
        let pairs = ASSIGNMENTS.min(count - done);
        for failure in failures(&graph, &model, &mut random, pairs) {
            wrong += 1;
            println!("{failure}");
        }
        (done, graphs) = (done + pairs, graphs + 1);
        if graphs % 50 == 0 {
            println!("{done} runs of {graphs} graphs, {wrong} wrong, {:.0} s", start.elapsed().as_secs_f64());
        }
    }
    println!("{done} runs of {graphs} graphs, {wrong} wrong, {:.0} s", start.elapsed().as_secs_f64());
    std::process::exit(i32::from(wrong > 0));
}
