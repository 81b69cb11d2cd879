//! The context of all planning: a graph, a machine, and a mesh of its axes. It prices any assignment and searches nothing.

use crate::{
    conv_format::keeps_contiguous,
    error::PlanError,
    fusion::{FusedOp, fuse, is_mixed},
    graph_facts::{FactorKinds, GraphFacts},
    op_times::OpTimes,
    variables::Variables,
};
use shardwright_cost::{CostFile, Engine, OperatorTimes, Resharder, WorkKind};
use shardwright_graph::{Graph, OpId, Phase, TensorId};
use shardwright_machine::{Device, DeviceId, EngineName, Machine, Mesh};
use shardwright_space::{OpShapes, SearchMesh, Transfers};
use std::sync::Arc;

/// A graph on a mesh of a machine, with everything that prices assignments.
pub struct Context<'a> {
    /// The training step.
    pub graph: &'a Graph,
    /// The machine.
    pub machine: &'a Machine,
    /// The mesh that configs refer to.
    pub search_mesh: SearchMesh,
    /// Rule and types of every op. As layers and transfers, they depend on the graph alone, and contexts share them.
    pub shapes: Arc<[OpShapes]>,
    /// The layers.
    pub layers: Arc<Variables>,
    /// The ops that choose together: the layers, or single ops.
    pub variables: Arc<Variables>,
    /// Whether every op chooses for itself.
    pub untied: bool,
    /// Which tensors travel.
    pub transfers: Arc<Transfers>,
    /// Reshard paths on the mesh.
    pub resharder: Resharder,
    pub(crate) facts: Arc<GraphFacts>,
    costs: Option<&'a CostFile>,
    device: Device,
    /// What the engine's kernels leave of each op; empty without an engine.
    fused: Arc<[Option<FusedOp>]>,
    /// Whether the engine keeps contiguous tensors for the step's convolutions.
    contiguous: bool,
}

/// A mesh on which nothing is enumerated yet.
fn all_of(mesh: Mesh, machine: &Machine) -> SearchMesh {
    SearchMesh { prime: mesh.len() == machine.mesh().len(), mesh, most_configs: 0 }
}

impl<'a> Context<'a> {
    /// The context on a mesh of the machine; operator times are measured ones where `costs` has them.
    ///
    /// # Errors
    /// Where the graph has no ops, or the costs are of another device.
    pub fn new(
        graph: &'a Graph,
        machine: &'a Machine,
        costs: Option<&'a CostFile>,
        mesh: Mesh,
        untied: bool,
    ) -> Result<Self, PlanError> {
        if graph.ops.is_empty() {
            return Err(PlanError::Empty { model: graph.name.clone() });
        }
        let device = machine.slowest();
        // Costs of another device are refused before anything is priced.
        let engine = OperatorTimes::new(&device, costs)?.engine();
        let shapes: Arc<[OpShapes]> = graph.op_ids().map(|op| OpShapes::of(graph, op)).collect();
        let layers = Arc::new(Variables::layers(graph, &shapes));
        let variables = if untied { Arc::new(Variables::ops(graph, &shapes)) } else { Arc::clone(&layers) };
        Ok(Self {
            graph,
            machine,
            fused: engine
                .map_or_else(Vec::new, |engine| fuse(graph, &shapes, engine, machine.devices() > 1))
                .into(),
            contiguous: engine.is_some_and(|engine| keeps_contiguous(graph, &shapes, engine)),
            resharder: Resharder::new(machine, &mesh),
            transfers: Arc::new(Transfers::of(graph)),
            search_mesh: all_of(mesh, machine),
            shapes,
            layers,
            variables,
            untied,
            facts: Arc::default(),
            costs,
            device,
        })
    }

    /// The same graph, machine and costs on another mesh.
    pub fn on(&self, mesh: Mesh) -> Self {
        self.with(mesh, self.untied)
    }

    /// The same graph, machine and costs on another mesh, choosing per op or per layer.
    pub fn with(&self, mesh: Mesh, untied: bool) -> Self {
        let variables = match untied {
            _ if untied == self.untied => Arc::clone(&self.variables),
            true => Arc::new(Variables::ops(self.graph, &self.shapes)),
            false => Arc::clone(&self.layers),
        };
        Self {
            resharder: Resharder::new(self.machine, &mesh),
            search_mesh: all_of(mesh, self.machine),
            shapes: Arc::clone(&self.shapes),
            layers: Arc::clone(&self.layers),
            transfers: Arc::clone(&self.transfers),
            variables,
            untied,
            facts: Arc::clone(&self.facts),
            device: self.device.clone(),
            fused: Arc::clone(&self.fused),
            ..*self
        }
    }

    /// The mesh that configs refer to.
    pub fn mesh(&self) -> &Mesh {
        &self.search_mesh.mesh
    }

    /// The cost file in use.
    pub fn costs(&self) -> Option<&'a CostFile> {
        self.costs
    }

    /// The engine that runs the step.
    pub fn engine(&self) -> Option<&'static Engine> {
        self.device.engine.and_then(Engine::of)
    }

    /// The least time of a step: that of the host, which launches all kernels one by one. Zero without an engine.
    pub fn host_seconds(&self) -> f64 {
        let Some(engine) = self.engine() else { return 0.0 };
        let ops = self.graph.op_ids();
        let launches: f64 = ops.map(|op| f64::from(self.graph.runs(op)) * self.launch_seconds(op)).sum();
        let widened = if is_mixed(self.graph) { engine.mixed.kernels_per_weight } else { 0 };
        let widening = f64::from(widened) * self.graph.parameters().count() as f64;
        let once = engine.host_us_per_step * 1e-6 * self.host_slowdown();
        once + widening * engine.host_us_per_update * 1e-6 * self.host_slowdown() + launches
    }

    /// The host's time to launch a kernel, by the engine's table and the host's slowdown. Zero without an engine.
    pub fn kernel_launch_seconds(&self) -> f64 {
        self.engine().map_or(0.0, |engine| engine.host_us_per_kernel * 1e-6 * self.host_slowdown())
    }

    /// How many times as long the machine's host takes as that of the engines' tables: measured op by op, where it was.
    fn host_slowdown(&self) -> f64 {
        let table = Engine::of(EngineName::TorchEager).and_then(|engine| engine.probed_host_us);
        self.device.host_launch.zip(table).map_or(1.0, |(measured, table)| measured.0 * 1e6 / table)
    }

    /// Per op: the share of its rate that it loses beside collectives. Nothing without an engine that says so.
    pub fn lost_beside_collectives(&self) -> Option<Vec<f64>> {
        let slowdowns = &self.engine()?.beside_collectives;
        let lost = |op: OpId| slowdowns.get(&self.work_kind(op)).map_or(0.0, |slowdown| 1.0 - 1.0 / slowdown);
        (!slowdowns.is_empty()).then(|| self.graph.op_ids().map(lost).collect())
    }

    /// The host's time to launch an op once. Zero without an engine, and for ops that start no kernel.
    pub fn launch_seconds(&self, op: OpId) -> f64 {
        let fused = self.fused.get(op.index()).and_then(Option::as_ref);
        let is_kernel =
            fused.map_or_else(|| !self.graph.node(op).op.operator().is_view(), |part| part.starts);
        if !is_kernel {
            return 0.0;
        }
        let Some(engine) = self.engine() else { return 0.0 };
        let special = match self.graph.node(op).phase {
            Phase::Update => Some(engine.host_us_per_update),
            _ => engine.host_us_per_convolution.filter(|_| self.work_kind(op) == WorkKind::Convolutions),
        };
        special.unwrap_or(engine.host_us_per_kernel) * 1e-6 * self.host_slowdown()
    }

    /// Whether an op is a matrix product.
    pub fn is_product(&self, op: OpId) -> bool {
        self.work_kind(op) == WorkKind::Products
    }

    /// The kind of an op's work.
    fn work_kind(&self, op: OpId) -> WorkKind {
        let shapes = &self.shapes[op.index()];
        WorkKind::of(&self.graph.node(op).op.workload(&shapes.inputs, &shapes.outputs).roofline)
    }

    /// Whether a tensor never reaches memory: the engine's kernel that makes it is the only one that reads it.
    pub(crate) fn stays_inside(&self, tensor: TensorId) -> bool {
        let Some(op) = self.graph.tensor(tensor).producer else { return false };
        let part = self.fused.get(op.index()).and_then(Option::as_ref);
        let output = self.graph.node(op).outputs.iter().position(|own| *own == tensor);
        part.zip(output).is_some_and(|(part, output)| part.stays_inside(output))
    }

    /// Times of ops. Where devices differ, a pinned op takes the time of the devices that it is pinned to.
    ///
    /// # Errors
    /// Where the costs are of another device.
    pub fn times(&self) -> Result<OpTimes<'_>, PlanError> {
        Ok(self.times_on_slowest(self.mesh())?.on(self.machine, self.costs))
    }

    /// Operator times of each kind of device. Measurements of one kind do not apply to another.
    pub(crate) fn times_of_each_device(&self) -> Result<Vec<OperatorTimes<'_>>, PlanError> {
        let units = if self.machine.is_homogeneous() { 1 } else { self.machine.levels()[0].count };
        let per_unit = self.machine.devices_per_unit(0);
        let times = |unit: u32| {
            let device = self.machine.device(DeviceId(unit * per_unit));
            let measured = OperatorTimes::new(device, self.costs);
            Ok(measured.or_else(|_| OperatorTimes::new(device, None))?.contiguous(self.contiguous))
        };
        (0..units).map(times).collect()
    }

    /// Times of ops on the slowest device, split over any mesh.
    pub(crate) fn times_on_slowest<'m>(&'m self, mesh: &'m Mesh) -> Result<OpTimes<'m>, PlanError> {
        let times = OperatorTimes::new(&self.device, self.costs)?.contiguous(self.contiguous);
        Ok(self.op_times(times, mesh))
    }

    /// Times of ops on one device, split over any mesh.
    pub(crate) fn op_times<'m>(&'m self, times: OperatorTimes<'m>, mesh: &'m Mesh) -> OpTimes<'m> {
        let classes = Arc::clone(self.facts.op_classes(self.graph, &self.shapes, &self.fused));
        OpTimes::new(times, self.graph, &self.shapes, classes, mesh, &self.fused)
    }

    /// Per layer: its class. The layers of a class have the same configs under the same config of the forward op.
    pub fn layer_classes(&self) -> &[u32] {
        self.facts.layer_classes(self.graph, &self.shapes, &self.fused, &self.layers)
    }

    /// Per op: the kinds of its factors.
    pub fn factor_kinds(&self) -> &[FactorKinds] {
        self.facts.factor_kinds(self.graph)
    }
}
