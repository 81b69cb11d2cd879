//! What one assignment of choices costs, in all the detail that a plan reports.
//!
//! The sum of everything here equals the network's objective, which a test holds it to.

use crate::{
    error::PlanError,
    problem::{Problem, needs},
    tables::Tables,
};
use shardwright_cost::{Layout, Lifetimes, Placement, Tally, Traffic};
use shardwright_graph::TensorId;
use shardwright_machine::{AxisId, Bytes};
use shardwright_space::halos;

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
    /// The most bytes that one device holds at once: tensors in the layouts that they are made or stored in.
    pub peak_memory: Bytes,
    /// Where operator times come from.
    pub tally: Tally,
}

impl Costs {
    /// Picoseconds of computation.
    pub fn compute(&self) -> i64 {
        self.layers.iter().map(|l| l.compute).sum()
    }

    /// Picoseconds of communication.
    pub fn comm(&self) -> i64 {
        self.layers.iter().map(|l| l.comm).sum()
    }
}

/// Bytes of a tensor that one device holds.
pub fn local_bytes(problem: &Problem<'_>, tensor: TensorId, layout: &Layout) -> u64 {
    let sharded = layout.axes_where(|p| matches!(p, Placement::Shard(_)));
    problem.graph.tensor(tensor).ty.bytes() / u64::from(problem.mesh().group_size(sharded)).max(1)
}

/// Evaluates one choice per layer.
pub fn evaluate(problem: &Problem<'_>, choices: &[u32]) -> Result<Costs, PlanError> {
    let chosen: Vec<_> = problem.choices.iter().zip(choices).map(|(all, &c)| &all[c as usize]).collect();
    let (layers, shapes, mesh) = (&problem.layers, &problem.shapes[..], problem.mesh());
    let comm = problem.relayouts.comm();
    let times = problem.times()?;
    let tables = Tables::new(problem.graph, &problem.relayouts);
    let mut costs: Vec<LayerCost> =
        chosen.iter().map(|c| LayerCost { compute: c.compute, comm: c.comm }).collect();
    let mut traffic = Traffic::default();
    let mut tally = Tally::default();
    for op in problem.graph.op_ids() {
        let (layer, member) = layers.place[op.index()];
        let config = &chosen[layer as usize].configs[member as usize];
        let (workload, estimate) = times.estimate(op, config);
        tally.record(&workload, estimate.source);
        for i in 0..shapes[op.index()].inputs.len() {
            for halo in halos(&shapes[op.index()], i, config, mesh) {
                traffic.merge(&comm.halo_traffic(halo.axes, halo.down, halo.up));
            }
        }
    }
    for transfer in &problem.transfers.all {
        let maker = &chosen[transfer.from.layer as usize].configs;
        let reader = &chosen[transfer.reader() as usize].configs;
        let from = transfer.from.layout(layers, shapes, maker, mesh);
        let needs = needs(transfer, layers, shapes, reader, mesh);
        if !transfer.is_internal() {
            costs[transfer.reader() as usize].comm += tables.time(transfer.tensor, &from, &needs)?;
        }
        let tensor = problem.relayouts.tensor(tables.shape(transfer.tensor)?);
        for to in &needs {
            let way = problem.relayouts.find(&tensor, &from, to).map_err(|source| PlanError::Tensor {
                tensor: problem.graph.tensor(transfer.tensor).name.clone(),
                source,
            })?;
            traffic.merge(&way.traffic);
        }
    }
    let held = |t: TensorId| {
        let layout = problem.transfers.homes[t.index()]
            .map(|home| home.layout(layers, shapes, &chosen[home.layer as usize].configs, mesh));
        let replicated = Layout::replicated(mesh.len());
        Bytes(local_bytes(problem, t, &layout.unwrap_or(replicated)))
    };
    let peak = Lifetimes::of(problem.graph).peak(problem.graph, held, |_| Bytes(0));
    let peak_memory = peak.map_or(Bytes(0), |peak| peak.held.total());
    Ok(Costs { layers: costs, traffic, peak_memory, tally })
}

/// Names of the axes' uses: the factor that each axis splits, none where it repeats.
pub fn axis_names(
    problem: &Problem<'_>,
    op: usize,
    config: &shardwright_space::Config,
) -> Vec<Option<String>> {
    let rule = &problem.shapes[op].rule;
    let name = |axis: usize| match config.get(AxisId(axis as u32)) {
        shardwright_space::AxisUse::Split(f) => Some(rule.factors[f as usize].name.to_string()),
        shardwright_space::AxisUse::Replicate => None,
    };
    (0..problem.mesh().len()).map(name).collect()
}
