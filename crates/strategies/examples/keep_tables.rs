//! Prints the tables that an integer program of recomputation needs, and the answers of our search, as one JSON object:
//! `cargo run --release -p shardwright-strategies --example keep_tables -- MODEL PERCENT...`
//!
//! Tables: times of ops on one device, bytes and roles of tensors. Nothing of the search's network is in them. Limits are percents of
//! the memory that keeping everything takes. `scripts/checkmate.py` solves its own program on these tables.

use shardwright_graph::{OpId, Phase};
use shardwright_machine::{Bytes, builtin};
use shardwright_plan::{KeepPricer, KeepSpace, SearchProblem, keep_network};
use shardwright_search::{Control, Solver, exact::Exact};
use shardwright_space::Config;
use shardwright_strategies::cheapest_set;
use shardwright_zoo::{BuildOptions, build};
use std::error::Error;

fn list<T: ToString>(items: impl IntoIterator<Item = T>) -> String {
    let items: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    format!("[{}]", items.join(","))
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let model = args.next().ok_or("usage: keep_tables MODEL PERCENT...")?;
    let percents = args.map(|text| text.parse()).collect::<Result<Vec<u64>, _>>()?;
    let graph = build(&model, &BuildOptions::default())?;
    let machine = builtin("flat:1")?;
    let problem = SearchProblem::new(&graph, &machine, None)?;
    let context = &problem.context;
    let times = context.times()?;
    let whole = Config::replicated(context.mesh().len());
    let ops = graph.op_ids().map(|op| {
        let node = graph.node(op);
        format!(
            "{{\"forward\":{},\"view\":{},\"time\":{},\"inputs\":{},\"outputs\":{}}}",
            node.phase == Phase::Forward,
            node.op.operator().is_view(),
            times.compute(op, &whole),
            list(node.inputs.iter().map(|t| t.index())),
            list(node.outputs.iter().map(|t| t.index())),
        )
    });
    let tensors = graph.tensors.iter().map(|tensor| tensor.ty.bytes());
    let space = KeepSpace::of(&graph);
    let mut pricer = KeepPricer::new(&problem, &space)?.ok_or("a layer has several forward ops")?;
    let kept = pricer.price(&[], u64::MAX);
    let groups: Vec<Vec<OpId>> = space.recomputable().into_iter().map(|op| vec![op]).collect();
    let mut answers = Vec::new();
    for percent in percents {
        let limit = kept.peak / 100 * percent;
        let local = cheapest_set(&mut pricer, &groups, &[], limit, &Control::new());
        let local = local.map_or("null".into(), |found| found.price.time.to_string());
        let built = keep_network(&problem, &space, Some(Bytes(limit)), &Control::new())?;
        let outcome = Exact.solve(&built.ok_or("the network is too large")?.network, &Control::new());
        let cost = outcome.cost.map_or("null".into(), |cost| cost.to_string());
        let proved = outcome.cost.is_none_or(|cost| cost == outcome.bound);
        answers.push(format!(
            "{{\"percent\":{percent},\"limit\":{limit},\"cost\":{cost},\"proved\":{proved},\"local\":{local}}}"
        ));
    }
    println!(
        "{{\"ops\":{},\"tensors\":{},\"outputs\":{},\"updated\":{},\"kept\":{{\"time\":{},\"peak\":{}}},\"answers\":{}}}",
        list(ops),
        list(tensors),
        list(graph.outputs.iter().map(|t| t.index())),
        list(graph.carries.iter().map(|carry| carry.new.index())),
        kept.time,
        kept.peak,
        list(answers)
    );
    Ok(())
}
