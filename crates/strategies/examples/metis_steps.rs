//! Simulated steps of METIS's placements, one line of JSON for each machine: what `place` is compared with.
//!
//! Layers are vertices that weigh what they take on a device, what they exchange are edges: METIS balances the first and cuts few
//! bytes of the second. It knows nothing of time, so of its two methods the one with the shorter step counts.
//!
//!     cargo run --release -p shardwright-strategies --example metis_steps -- nmt:unroll=10,seq=10,batch=64 p100x16:2 p100x16:4

use shardwright_machine::{DeviceId, builtin};
use shardwright_plan::{Context, peak};
use shardwright_sim::simulate_step;
use shardwright_space::{Assignment, AxisUse, Config};
use shardwright_zoo::{BuildOptions, build};
use std::error::Error;

/// The config of an op on one device.
fn on(context: &Context<'_>, device: u32) -> Config {
    let mesh = context.mesh();
    Config::new(mesh.all().iter().map(|axis| AxisUse::Pin(mesh.digit(DeviceId(device), axis) as u16)))
}

/// METIS's parts of the layers, by recursive bisection and by cutting into all parts at once.
fn partitions(context: &Context<'_>) -> Result<Vec<Vec<i32>>, Box<dyn Error>> {
    let (times, first) = (context.times()?, on(context, 0));
    let layers = &context.variables.members;
    let seconds =
        |ops: &[shardwright_graph::OpId]| ops.iter().map(|&op| times.compute(op, &first)).sum::<i64>();
    let work: Vec<i64> = layers.iter().map(|layer| seconds(&layer.ops)).collect();
    let mut near: Vec<Vec<(i32, u64)>> = vec![Vec::new(); layers.len()];
    for transfer in &context.transfers.pairs {
        let [from, to] = [transfer.from, transfer.to].map(|end| context.variables.variable_of(end.op));
        let bytes = context.graph.tensor(transfer.tensor).ty.bytes();
        for (one, other) in [(from, to), (to, from)] {
            match near[one].iter_mut().find(|(at, _)| *at == other as i32) {
                _ if from == to => {}
                Some((_, sum)) => *sum += bytes,
                None => near[one].push((other as i32, bytes)),
            }
        }
    }
    // METIS counts in 32 bits.
    let scaled = |value: u64, sum: u64| (value as f64 / sum.max(1) as f64 * 1e9) as i32;
    let all: u64 = near.iter().flatten().map(|(_, bytes)| bytes).sum();
    let whole = work.iter().sum::<i64>().unsigned_abs();
    let work: Vec<i32> = work.iter().map(|&w| scaled(w.unsigned_abs(), whole)).collect();
    let (mut starts, mut others, mut weights) = (vec![0], Vec::new(), Vec::new());
    for list in &near {
        others.extend(list.iter().map(|(other, _)| *other));
        weights.extend(list.iter().map(|&(_, bytes)| scaled(bytes, all).max(1)));
        starts.push(others.len() as i32);
    }
    let (mut bisected, mut at_once) = (vec![0; layers.len()], vec![0; layers.len()]);
    let devices = context.mesh().devices() as i32;
    let graph = || {
        metis::Graph::new(1, devices, &starts, &others)
            .map(|graph| graph.set_vwgt(&work).set_adjwgt(&weights))
    };
    graph()?.part_recursive(&mut bisected)?;
    graph()?.part_kway(&mut at_once)?;
    Ok(vec![bisected, at_once])
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut words = std::env::args().skip(1);
    let model = words.next().ok_or("a model, then machines")?;
    let graph = build(&model, &BuildOptions::default())?;
    for name in words {
        let machine = builtin(&name)?;
        let context = Context::new(&graph, &machine, None, machine.mesh().clone(), false)?;
        let mut best: Option<(u64, u64)> = None;
        for part in partitions(&context)? {
            let mut assignment = Assignment::replicated(&graph, context.mesh());
            for (layer, &device) in context.variables.members.iter().zip(&part) {
                let lead = on(&context, device as u32);
                for (op, config) in
                    layer.ops.iter().zip(layer.configs(&context.shapes, context.mesh(), &lead))
                {
                    assignment.configs[op.index()] = config;
                }
            }
            let tried = (simulate_step(&context, &assignment)?.makespan, peak(&context, &assignment).0);
            best = Some(best.map_or(tried, |best| best.min(tried)));
        }
        let (step, peak) = best.unwrap_or_default();
        println!(
            "{{\"machine\": \"{name}\", \"step_seconds\": {:e}, \"peak_memory_bytes\": {peak}}}",
            step as f64 / 1e12
        );
    }
    Ok(())
}
