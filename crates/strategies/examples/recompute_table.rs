//! Prints what recomputation costs on one device at several memory limits, against published heuristics:
//! `cargo run --release -p shardwright-strategies --example recompute_table [-- SECONDS [MODEL...]]`
//!
//! All methods choose on the same graph, times and memory (the network's). Heuristics: every √n-th result kept, and segments of
//! equal bytes (Chen et al. 2016, "√n" and "greedy", the best of 64 segment sizes); binomial checkpoints with several
//! recomputations per value (Griewank and Walther 2000), whose memory is counted in its favour: weights, data, snapshots and the
//! largest op alone. "Bound": no set of ops that are recomputed at most once takes less; `-` where the network is too large.

use shardwright_graph::{
    BuildError, DType, Graph, GraphBuilder, OpId, Optimizer, Phase, TensorId, ops::Transpose, train,
};
use shardwright_machine::{Bytes, builtin};
use shardwright_plan::{KeepPricer, KeepSpace, SearchProblem, keep_network};
use shardwright_search::{Clock, Control, Solver, StopReason, exact::Exact};
use shardwright_strategies::cheapest_set;
use shardwright_zoo::{
    BuildOptions, build,
    layers::{
        Conv2d, Pool2d, batch_norm, concat, conv2d, cross_entropy, data, global_avg_pool, ids, linear,
        max_pool2d, mse, relu, reshape,
    },
};
use std::error::Error;
use std::time::{Duration, Instant};

/// Limits in percent of the memory that keeping everything takes.
const LIMITS: [u64; 4] = [90, 75, 60, 50];
const MODELS: [&str; 4] = ["vgg16:batch=32", "resnet101:batch=32,depth=50", "unet", "mobilenet"];

struct WallClock(Instant);

impl Clock for WallClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let seconds: f64 = args.first().map_or(Ok(10.0), |text| text.parse())?;
    let models: Vec<&str> =
        if args.len() > 1 { args[1..].iter().map(String::as_str).collect() } else { MODELS.to_vec() };
    println!("| model | forward ops | limit | ours | bound | √n | greedy | binomial |");
    println!("|---|---|---|---|---|---|---|---|");
    for model in models {
        let graph = match model {
            "unet" => unet(8, 128)?,
            "mobilenet" => mobilenet(32, 224)?,
            name => build(name, &BuildOptions::default())?,
        };
        rows(model, &graph, Duration::from_secs_f64(seconds))?;
    }
    Ok(())
}

fn rows(model: &str, graph: &Graph, seconds: Duration) -> Result<(), Box<dyn Error>> {
    let machine = builtin("p100x16:1")?;
    let problem = SearchProblem::new(graph, &machine, None)?;
    let space = KeepSpace::of(graph);
    let ops = space.recomputable();
    let mut pricer = KeepPricer::new(&problem, &space)?.ok_or("a layer has several forward ops")?;
    let kept = pricer.price(&[], u64::MAX);
    let groups: Vec<Vec<OpId>> = ops.iter().map(|&op| vec![op]).collect();
    let clock = WallClock(Instant::now());
    for percent in LIMITS {
        let limit = kept.peak / 100 * percent;
        let control = Control { deadline: Some(clock.now() + seconds), clock: &clock, ..Control::new() };
        let found = cheapest_set(&mut pricer, &groups, &[], limit, &control);
        let mut ours = found.map(|found| found.price.time);
        let (mut bound, mut infeasible) = (None, false);
        if let Some(built) = keep_network(&problem, &space, Some(Bytes(limit)), &Control::new())? {
            let control = Control { deadline: Some(clock.now() + seconds), clock: &clock, ..Control::new() };
            let outcome = Exact.solve(&built.network, &control);
            infeasible = outcome.stop_reason == StopReason::Infeasible;
            bound = Some(outcome.bound).filter(|_| !infeasible);
            ours = ours.into_iter().chain(outcome.cost).min();
        }
        let sets = |sets: Vec<Vec<OpId>>, pricer: &mut KeepPricer<'_, '_>| {
            let prices = sets.iter().map(|set| pricer.price(set, limit)).collect::<Vec<_>>();
            prices.iter().filter(|price| price.excess == 0).map(|price| price.time).min()
        };
        let root =
            sets(vec![all_but(&ops, |at| at % (ops.len() as f64).sqrt().ceil() as usize == 0)], &mut pricer);
        let greedy = sets((1..=64).map(|part| greedy(graph, &ops, part)).collect(), &mut pricer);
        let binomial = binomial(graph, &mut pricer, &ops, limit);
        let more = |time: Option<i64>| {
            time.map_or("-".into(), |time| {
                format!("+{:.2}%", (time - kept.time) as f64 * 100.0 / kept.time as f64)
            })
        };
        println!(
            "| {model} | {} | {:.2} GB ({percent}%) | {} | {} | {} | {} | {} |",
            ops.len(),
            limit as f64 / 1e9,
            more(ours),
            if infeasible { "nothing fits".into() } else { more(bound) },
            more(root),
            more(greedy),
            more(binomial)
        );
        for other in [root, greedy].into_iter().flatten() {
            assert!(ours.is_some_and(|ours| ours <= other), "a heuristic is cheaper");
        }
    }
    Ok(())
}

/// All ops but those at some positions.
fn all_but(ops: &[OpId], kept: impl Fn(usize) -> bool) -> Vec<OpId> {
    ops.iter().enumerate().filter(|(at, _)| !kept(*at)).map(|(_, &op)| op).collect()
}

fn result_bytes(graph: &Graph, op: OpId) -> u64 {
    graph.node(op).outputs.iter().map(|&t| graph.tensor(t).ty.bytes()).sum()
}

/// Chen's greedy segments: a result is kept as soon as the segment's results have one part in so many of all bytes.
fn greedy(graph: &Graph, ops: &[OpId], parts: u64) -> Vec<OpId> {
    let all: u64 = ops.iter().map(|&op| result_bytes(graph, op)).sum();
    let (mut segment, mut recomputed) = (0, Vec::new());
    for &op in ops {
        segment += result_bytes(graph, op);
        if segment > all / parts {
            segment = 0;
        } else {
            recomputed.push(op);
        }
    }
    recomputed
}

/// The time of binomial checkpointing with as many snapshots as the limit allows.
fn binomial(graph: &Graph, pricer: &mut KeepPricer<'_, '_>, ops: &[OpId], limit: u64) -> Option<i64> {
    let base = pricer.price(&[], limit).time;
    let times: Vec<i64> = ops.iter().map(|&op| pricer.clone_time(op)).collect();
    let bytes = |t: &TensorId| graph.tensor(*t).ty.bytes();
    let sources: u64 =
        graph.tensor_ids().filter(|&t| graph.tensor(t).producer.is_none()).map(|t| bytes(&t)).sum();
    let touched = |op: OpId| {
        let node = graph.node(op);
        let made = node.inputs.iter().filter(|&&t| graph.tensor(t).producer.is_some()).chain(&node.outputs);
        made.map(bytes).sum::<u64>()
    };
    let backward = graph.op_ids().filter(|&op| graph.node(op).phase == Phase::Backward);
    let working = backward.map(touched).max().unwrap_or(0);
    // A snapshot is one result: that of the mean op.
    let snapshot = ops.iter().map(|&op| result_bytes(graph, op)).sum::<u64>() / ops.len() as u64;
    let free = limit.checked_sub(sources + working)?;
    let snapshots = ((free / snapshot.max(1)) as usize).min(ops.len() - 1);
    if snapshots == 0 {
        return None;
    }
    // The least number of forward steps for each length, by snapshots left (Griewank and Walther, eq. 3), as a recursion.
    let mut least: Vec<u64> =
        (0..=ops.len() as u64).map(|length| length * length.saturating_sub(1) / 2).collect();
    for _ in 0..snapshots {
        let mut row = vec![0u64; ops.len() + 1];
        for length in 2..=ops.len() {
            let steps = |split: usize| split as u64 + least[length - split] + row[split];
            row[length] = (1..length).map(steps).min().unwrap_or(0);
        }
        least = row;
    }
    // The first sweep belongs to the step; each op's own forward step is repeated once for its backward op, unless it is kept.
    let forward = ops.len() as u64 - 1;
    let again = (least[ops.len()].saturating_sub(forward)) as f64 / ops.len() as f64;
    let all: i64 = times.iter().sum();
    Some(base + (all as f64 * again) as i64)
}

fn conv_relu(b: &mut GraphBuilder, name: &str, x: TensorId, conv: Conv2d) -> Result<TensorId, BuildError> {
    let x = conv2d(b, name, x, conv)?;
    let x = batch_norm(b, &format!("{name}.norm"), x, 1e-5)?;
    relu(b, &format!("{name}.relu"), x)
}

/// MobileNet (Howard et al. 2017): pairs of depthwise and pointwise convolutions.
fn mobilenet(batch: u64, image: u64) -> Result<Graph, Box<dyn Error>> {
    let mut b = GraphBuilder::new("mobilenet");
    let x = data(&mut b, "images", DType::F32, &[batch, 3, image, image])?;
    let mut x = conv_relu(&mut b, "conv0", x, Conv2d::square(32, 3).stride(2).pad(1))?;
    let blocks = [
        (64, 1),
        (128, 2),
        (128, 1),
        (256, 2),
        (256, 1),
        (512, 2),
        (512, 1),
        (512, 1),
        (512, 1),
        (512, 1),
        (512, 1),
        (1024, 2),
        (1024, 1),
    ];
    for (at, (outputs, stride)) in blocks.into_iter().enumerate() {
        let inputs = b.shape(x)[1];
        let depthwise = Conv2d::square(inputs, 3).stride(stride).pad(1).groups(inputs);
        x = conv_relu(&mut b, &format!("depthwise{at}"), x, depthwise)?;
        x = conv_relu(&mut b, &format!("pointwise{at}"), x, Conv2d::square(outputs, 1))?;
    }
    let x = global_avg_pool(&mut b, "pool", x)?;
    let logits = linear(&mut b, "logits", x, 1000, true)?;
    let labels = ids(&mut b, "labels", &[batch], 1000)?;
    let loss = cross_entropy(&mut b, "loss", logits, labels)?;
    b.output(loss);
    train(&mut b, loss, &Optimizer::sgd(0.1))?;
    Ok(b.finish())
}

/// U-Net (Ronneberger et al. 2015) with padded convolutions; resolution is doubled by moving channels into pixels.
fn unet(batch: u64, image: u64) -> Result<Graph, Box<dyn Error>> {
    let mut b = GraphBuilder::new("unet");
    let mut x = data(&mut b, "images", DType::F32, &[batch, 1, image, image])?;
    let mut skips = Vec::new();
    for (level, channels) in [64u64, 128, 256, 512].into_iter().enumerate() {
        for i in 0..2 {
            x = conv_relu(&mut b, &format!("down{level}.{i}"), x, Conv2d::square(channels, 3).same())?;
        }
        skips.push(x);
        x = max_pool2d(&mut b, &format!("pool{level}"), x, Pool2d::new(2, 2))?;
    }
    for i in 0..2 {
        x = conv_relu(&mut b, &format!("middle.{i}"), x, Conv2d::square(1024, 3).same())?;
    }
    for (level, channels) in [64u64, 128, 256, 512].into_iter().enumerate().rev() {
        let name = format!("up{level}");
        x = conv2d(&mut b, &name, x, Conv2d::square(4 * channels, 1))?;
        let shape = b.shape(x).to_vec();
        let (n, h, w) = (shape[0], shape[2], shape[3]);
        x = reshape(&mut b, &format!("{name}.parts"), x, &[n, channels, 2, 2, h, w])?;
        x = b.emit(
            &format!("{name}.order"),
            Transpose { perm: [0, 1, 4, 2, 5, 3].into_iter().collect() },
            &[x],
        )?;
        x = reshape(&mut b, &format!("{name}.image"), x, &[n, channels, 2 * h, 2 * w])?;
        let skip = skips.pop().ok_or("a level without its skip")?;
        x = concat(&mut b, &format!("{name}.concat"), &[skip, x], 1)?;
        for i in 0..2 {
            x = conv_relu(&mut b, &format!("{name}.{i}"), x, Conv2d::square(channels, 3).same())?;
        }
    }
    let x = conv2d(&mut b, "last", x, Conv2d::square(1, 1))?;
    let target = data(&mut b, "target", DType::F32, &[batch, 1, image, image])?;
    let loss = mse(&mut b, "loss", x, target)?;
    b.output(loss);
    train(&mut b, loss, &Optimizer::sgd(0.1))?;
    Ok(b.finish())
}
