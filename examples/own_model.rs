//! A model built op by op, planned for a machine described in TOML, lowered, simulated and written down: the library from
//! end to end. `cargo run --example own_model`

use shardwright_graph::{DType, GraphBuilder, Init, Optimizer, Real, Role, TensorType, ops::*, train};
use shardwright_lower::lower;
use shardwright_machine::parse;
use shardwright_plan::Constraints;
use shardwright_search::Control;
use shardwright_sim::simulate_step;
use shardwright_strategies::{Planner, find};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Two layers that give their input back: the forward pass and its loss.
    let f32 = |shape: &[u64]| TensorType::new(DType::F32, shape);
    let mut b = GraphBuilder::new("two layers");
    let x = b.source("x", f32(&[256, 512]), Role::Input, Init::Normal(Real(1.0)))?;
    let up = b.source("up", f32(&[512, 4096]), Role::Parameter, Init::Normal(Real(0.02)))?;
    let down = b.source("down", f32(&[4096, 512]), Role::Parameter, Init::Normal(Real(0.02)))?;
    let wide = b.emit("wide", Contract::parse("mk,kn->mn")?, &[x, up])?;
    let bent = b.emit("bent", Unary { f: UnaryFn::Relu }, &[wide])?;
    let y = b.emit("y", Contract::parse("mk,kn->mn")?, &[bent, down])?;
    let error = b.emit("error", Binary { f: BinaryFn::Sub }, &[y, x])?;
    let square = b.emit("square", Binary { f: BinaryFn::Mul }, &[error, error])?;
    let loss = b.emit("loss", Reduce::mean([0, 1].into_iter().collect(), &[256, 512]), &[square])?;
    b.output(loss);
    // Gradients, and an update of every weight.
    train(&mut b, loss, &Optimizer::sgd(0.1))?;
    let graph = b.finish();
    println!("{} ops in {} layers", graph.ops.len(), graph.layers.len());

    // What every way to split every layer costs on this machine, and the best choice of all.
    let text = include_bytes!("own_machine.toml");
    let machine = parse("own_machine.toml", text, &mut |_| Err("it extends nothing".into()))?;
    let planner = Planner::new(&graph, &machine, None, false);
    let best = find("exact")?.solve(&planner, &Constraints::default(), &Control::new())?;
    let data = find("data")?.solve(&planner, &Constraints::default(), &Control::new())?;
    assert!(best.proved_optimal());

    // The program that all devices run, and how long its step takes when communication hides behind computing.
    let program = lower(&graph, &best.context.resharder, &best.assignment)?;
    print!("{}", program.listing(&graph));
    for (name, found) in [("exact", &best), ("data", &data)] {
        let step = simulate_step(&found.context, &found.assignment)?;
        println!("{name:<6} {:.3} ms per step", step.times.step_seconds * 1e3);
    }

    // As a file, for the command line: `shardwright plan graph.json`.
    let path = std::env::temp_dir().join("shardwright-own-model.json");
    std::fs::write(&path, graph.to_json())?;
    println!("written to {}", path.display());
    Ok(())
}
