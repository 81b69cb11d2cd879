//! The context of all planning: a graph, a machine, and a mesh of its axes. It prices any assignment and searches nothing.

use crate::{error::PlanError, op_times::OpTimes, variables::Variables};
use shardwright_cost::{CostFile, OperatorTimes, Resharder};
use shardwright_graph::Graph;
use shardwright_machine::{Device, DeviceId, Machine, Mesh};
use shardwright_space::{OpShapes, SearchMesh, Transfers};

/// A graph on a mesh of a machine, with everything that prices assignments.
pub struct Context<'a> {
    /// The training step.
    pub graph: &'a Graph,
    /// The machine.
    pub machine: &'a Machine,
    /// The mesh that configs refer to.
    pub search_mesh: SearchMesh,
    /// Rule and types of every op.
    pub shapes: Vec<OpShapes>,
    /// The layers.
    pub layers: Variables,
    /// The ops that choose together: the layers, or single ops.
    pub variables: Variables,
    /// Whether every op chooses for itself.
    pub untied: bool,
    /// Which tensors travel.
    pub transfers: Transfers,
    /// Reshard paths on the mesh.
    pub resharder: Resharder,
    costs: Option<&'a CostFile>,
    device: Device,
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
        Self::build(graph, machine, costs, untied, |_, _| {
            Ok(SearchMesh { prime: mesh.len() == machine.mesh().len(), mesh, most_configs: 0 })
        })
    }

    /// The context on a mesh that depends on the leading ops of the variables.
    pub(crate) fn build(
        graph: &'a Graph,
        machine: &'a Machine,
        costs: Option<&'a CostFile>,
        untied: bool,
        mesh: impl FnOnce(&Variables, &[OpShapes]) -> Result<SearchMesh, PlanError>,
    ) -> Result<Self, PlanError> {
        if graph.ops.is_empty() {
            return Err(PlanError::Empty { model: graph.name.clone() });
        }
        let device = machine.slowest();
        // Costs of another device are refused before anything is priced.
        OperatorTimes::new(&device, costs)?;
        let shapes: Vec<OpShapes> = graph.op_ids().map(|op| OpShapes::of(graph, op)).collect();
        let layers = Variables::layers(graph, &shapes);
        let variables = if untied { Variables::ops(graph, &shapes) } else { layers.clone() };
        let search_mesh = mesh(&variables, &shapes)?;
        Ok(Self {
            graph,
            machine,
            resharder: Resharder::new(machine, &search_mesh.mesh),
            transfers: Transfers::of(graph),
            search_mesh,
            shapes,
            layers,
            variables,
            untied,
            costs,
            device,
        })
    }

    /// The same graph, machine and costs on another mesh.
    ///
    /// # Errors
    /// As [`Context::new`].
    pub fn on(&self, mesh: Mesh) -> Result<Self, PlanError> {
        Self::new(self.graph, self.machine, self.costs, mesh, self.untied)
    }

    /// The mesh that configs refer to.
    pub fn mesh(&self) -> &Mesh {
        &self.search_mesh.mesh
    }

    /// The cost file in use.
    pub fn costs(&self) -> Option<&'a CostFile> {
        self.costs
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
            Ok(measured.or_else(|_| OperatorTimes::new(device, None))?)
        };
        (0..units).map(times).collect()
    }

    /// Times of ops on the slowest device, split over any mesh.
    pub(crate) fn times_on_slowest<'m>(&'m self, mesh: &'m Mesh) -> Result<OpTimes<'m>, PlanError> {
        let times = OperatorTimes::new(&self.device, self.costs)?;
        Ok(OpTimes::new(times, self.graph, &self.shapes, mesh))
    }
}
