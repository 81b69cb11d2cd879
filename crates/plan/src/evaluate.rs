//! What one assignment of configs to ops costs, in all the detail that a plan reports.
//!
//! Any assignment will do, whether the search offers it or not. Times add up to the network's objective, which a
//! test holds them to. Traffic is what the running program sends ([`crate::predicted_traffic`]): there, all that need a
//! tensor share what is fetched, while the objective has every layer pay for its own.

use crate::{
    error::PlanError, memory::peak, problem::Problem, tables::Tables, traffic::predicted_traffic,
    transfer::End,
};
use shardwright_cost::{Tally, Traffic};
use shardwright_machine::{AxisId, Bytes};
use shardwright_space::Config;

/// What a layer costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerCost {
    /// Picoseconds of its ops on one device.
    pub compute: i64,
    /// Picoseconds of communication: what it fetches, exchanges and reduces.
    pub comm: i64,
}

/// What a whole assignment costs.
#[derive(Clone, Debug)]
pub struct Costs {
    /// Per layer.
    pub layers: Vec<LayerCost>,
    /// Bytes sent, all devices together.
    pub traffic: Traffic,
    /// The most bytes that one device holds at once: tensors as they are made or stored, and copies for their readers.
    pub peak_memory: Bytes,
    /// Where operator times come from.
    pub tally: Tally,
}

impl Costs {
    /// Picoseconds of everything: the network's objective.
    pub fn objective(&self) -> i64 {
        self.compute() + self.comm()
    }

    /// Picoseconds of computation.
    pub fn compute(&self) -> i64 {
        self.layers.iter().map(|l| l.compute).sum()
    }

    /// Picoseconds of communication.
    pub fn comm(&self) -> i64 {
        self.layers.iter().map(|l| l.comm).sum()
    }
}

/// Evaluates any assignment of one config per op, in the graph's order.
///
/// # Errors
/// Where there is not one config for every op, or an op cannot be split as its config says.
pub fn evaluate(problem: &Problem<'_>, configs: &[Config]) -> Result<Costs, PlanError> {
    check(problem, configs)?;
    let (graph, shapes, mesh) = (problem.graph, &problem.shapes[..], problem.mesh());
    let comm = problem.relayouts.comm();
    let times = problem.times()?;
    let mut costs = vec![LayerCost::default(); graph.layers.len()];
    let traffic = predicted_traffic(graph, shapes, &problem.relayouts, configs)?;
    let mut tally = Tally::default();
    for (op, config) in graph.op_ids().zip(configs) {
        let (workload, estimate) = times.estimate(op, config);
        tally.record(&workload, estimate.source);
        let layer = &mut costs[graph.node(op).layer.index()];
        layer.compute += times.compute(op, config);
        layer.comm += times.halo(comm, op, config);
    }
    let layout = |end: &End| end.layout(shapes, &configs[end.op.index()], mesh);
    let tables = Tables::new(graph, &problem.relayouts);
    for transfer in &problem.transfers.all {
        let (from, to) = (layout(&transfer.from), layout(&transfer.to));
        let reader = graph.node(transfer.to.op);
        costs[reader.layer.index()].comm += tables.time(transfer.tensor, &from, &to)?;
    }
    let peak_memory = peak(problem, configs);
    Ok(Costs { layers: costs, traffic, peak_memory, tally })
}

/// Whether every op has a config that it can have.
fn check(problem: &Problem<'_>, configs: &[Config]) -> Result<(), PlanError> {
    let graph = problem.graph;
    let error = |op: &str, reason: String| PlanError::Config { op: op.to_string(), reason };
    if configs.len() != graph.ops.len() {
        let reason = format!("there are {} configs for {} ops", configs.len(), graph.ops.len());
        return Err(error(&graph.name, reason));
    }
    for ((node, shapes), config) in graph.ops.iter().zip(&problem.shapes).zip(configs) {
        config.check(&shapes.rule, problem.mesh()).map_err(|reason| error(&node.name, reason))?;
    }
    Ok(())
}

/// Names of the axes' uses: the factor that each axis splits, `@` and the digit of a pin, none where it repeats.
pub fn axis_names(
    problem: &Problem<'_>,
    op: usize,
    config: &shardwright_space::Config,
) -> Vec<Option<String>> {
    let rule = &problem.shapes[op].rule;
    let name = |axis: usize| match config.get(AxisId(axis as u32)) {
        shardwright_space::AxisUse::Split(f) => Some(rule.factors[f as usize].name.to_string()),
        shardwright_space::AxisUse::Replicate => None,
        shardwright_space::AxisUse::Pin(digit) => Some(format!("@{digit}")),
    };
    (0..problem.mesh().len()).map(name).collect()
}
