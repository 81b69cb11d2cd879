//! The price of an assignment, in all the detail that a plan reports.
//!
//! Any assignment has a price, whether the search offers it or not. Times follow the search's objective, where layers
//! share no transfers ([`Sharing::WithinLayers`](shardwright_space::Sharing)). The network and the simulated step
//! without overlap add up to the same picosecond. Traffic is that of the running program, which shares transfers across
//! layers.

use crate::{
    context::Context, error::PlanError, memory::peak_of, traffic::predicted_traffic,
    transfer_times::TransferTimes,
};
use rustc_hash::FxHashMap;
use shardwright_cost::{TimeSource, TimeSourceCounts, Traffic};
use shardwright_graph::Workload;
use shardwright_lower::{ParallelGraph, lower};
use shardwright_machine::Bytes;
use shardwright_search::Control;
use shardwright_space::{Assignment, Config, Endpoint};

/// The cost of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerCost {
    /// Picoseconds of its ops on one device.
    pub compute: i64,
    /// Picoseconds of communication: fetches, halo exchanges and reductions.
    pub comm: i64,
}

/// The costs of all layers: the network's objective in parts.
#[derive(Clone, Debug)]
pub struct LayerCosts {
    /// Per layer.
    pub layers: Vec<LayerCost>,
    /// Where operator times come from.
    pub sources: TimeSourceCounts,
}

impl LayerCosts {
    /// Picoseconds of all computing and communication: the network's objective.
    pub fn objective(&self) -> i64 {
        self.layers.iter().map(|l| l.compute + l.comm).sum()
    }
}

/// The price of an assignment.
#[derive(Clone, Debug)]
pub struct Costs {
    /// Per layer.
    pub layers: Vec<LayerCost>,
    /// Bytes sent, all devices together.
    pub traffic: Traffic,
    /// The most bytes that one device holds at once, by the account of memory ([`shardwright_lower::memory`]).
    pub peak_memory: Bytes,
    /// Where operator times come from.
    pub sources: TimeSourceCounts,
}

impl Costs {
    /// Picoseconds of all computing and communication: the network's objective.
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

impl Context<'_> {
    /// Prices any assignment.
    ///
    /// # Errors
    /// Where the assignment does not match this graph on this mesh.
    pub fn price(&self, assignment: &Assignment) -> Result<Costs, PlanError> {
        self.price_within(assignment, &Control::new())
    }

    /// Prices any assignment, unless `control` stops that: on many axes the search for reshard paths takes long.
    ///
    /// # Errors
    /// As [`Context::price`], or where `control` stops.
    pub fn price_within(&self, assignment: &Assignment, control: &Control<'_>) -> Result<Costs, PlanError> {
        let layers = self.layer_costs(assignment, control)?;
        self.price_program(assignment, layers, lower(self.graph, &self.resharder, assignment).ok().as_ref())
    }

    /// The price of an assignment whose layers' costs and program are known. One that cannot be lowered fits nowhere.
    ///
    /// # Errors
    /// Where a tensor cannot be laid out.
    pub fn price_program(
        &self,
        assignment: &Assignment,
        LayerCosts { layers, sources }: LayerCosts,
        program: Option<&ParallelGraph>,
    ) -> Result<Costs, PlanError> {
        let traffic = predicted_traffic(self, assignment)?;
        Ok(Costs { layers, traffic, peak_memory: peak_of(self, assignment, program), sources })
    }

    /// The costs of all layers, unless `control` stops: the part of the price that takes no lowering.
    ///
    /// # Errors
    /// As [`Context::price_within`].
    pub fn layer_costs(
        &self,
        assignment: &Assignment,
        control: &Control<'_>,
    ) -> Result<LayerCosts, PlanError> {
        let (graph, shapes, mesh) = (self.graph, &self.shapes[..], self.mesh());
        assignment.check(graph, shapes, mesh)?;
        let times = self.times()?;
        let mut costs = vec![LayerCost::default(); graph.layers.len()];
        let mut sources = TimeSourceCounts::default();
        // Deep models repeat equal ops with equal configs.
        let mut known: FxHashMap<(u32, &Config), (Workload, TimeSource, LayerCost)> = FxHashMap::default();
        for (op, config) in graph.op_ids().zip(&assignment.configs) {
            let (workload, source, cost) =
                known.entry((times.kinds()[op.index()], config)).or_insert_with(|| {
                    let (workload, estimate) = times.estimate(op, config);
                    let compute = times.compute(op, config);
                    (
                        workload,
                        estimate.source,
                        LayerCost { compute, comm: times.exchange(&self.resharder, op, config) },
                    )
                });
            sources.record(workload, *source);
            let layer = &mut costs[graph.node(op).layer.index()];
            let runs = i64::from(graph.runs(op));
            layer.compute += runs * cost.compute;
            layer.comm += runs * cost.comm;
        }
        let layout = |end: &Endpoint| end.layout(shapes, assignment.config(end.op), mesh);
        let transfer_times = TransferTimes::new(graph, &self.resharder);
        for transfer in &self.transfers.pairs {
            if let Some(reason) = control.stop(0) {
                return Err(PlanError::Stopped(reason));
            }
            let (from, to) = (layout(&transfer.from), layout(&transfer.to));
            let reader = graph.node(transfer.to.op);
            let runs = i64::from(graph.runs(transfer.to.op));
            costs[reader.layer.index()].comm += runs * transfer_times.time(transfer.tensor, &from, &to)?;
        }
        Ok(LayerCosts { layers: costs, sources })
    }
}
