//! The placement of every tensor on the mesh, in the words of PyTorch's DTensor.
//!
//! A placement is Python text that `torch.distributed.tensor` defines: `Shard(0)`, `Replicate()`, `Partial('sum')`. Axes that
//! shard the same dimension do so in mesh order, outermost first, as DTensor's do.

use crate::layouts::{Layouts, Placements};
use crate::shardings::ExportError;
use crate::tensor_paths::PlanLayouts;
use serde::Serialize;
use shardwright_cost::{Layout, Placement, Reduction, Resharder};
use shardwright_graph::{Graph, Role};
use shardwright_machine::Mesh;
use shardwright_space::Assignment;
use std::collections::BTreeMap;

/// The mesh, as `init_device_mesh` takes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MeshAxes {
    /// Devices per axis, outermost first.
    pub shape: Vec<u32>,
    /// Names of the axes.
    pub names: Vec<String>,
}

impl MeshAxes {
    pub(crate) fn of(mesh: &Mesh) -> Self {
        Self {
            shape: mesh.axes().iter().map(|axis| axis.size).collect(),
            names: mesh.axes().iter().map(|axis| axis.name.clone()).collect(),
        }
    }
}

/// A tensor and its placement per axis.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PlacedTensor {
    /// Sizes of the whole tensor.
    pub shape: Vec<u64>,
    /// Element type.
    pub dtype: String,
    /// Its role in the training step.
    pub role: Role,
    /// One placement per axis, outermost first.
    pub placements: Vec<String>,
}

/// A plan's placements.
#[derive(Clone, Debug, Serialize)]
pub struct TensorPlacements {
    /// The mesh.
    pub mesh: MeshAxes,
    /// All tensors of the training step by name, as they are stored or produced.
    pub tensors: BTreeMap<String, PlacedTensor>,
    /// The layouts of ops and weights, for engines that run op by op.
    #[serde(flatten)]
    pub layouts: Layouts,
}

impl TensorPlacements {
    /// The placements of a graph whose ops have these configs, on the mesh of `resharder`.
    ///
    /// # Errors
    /// If the configs pin ops to devices.
    pub fn of(graph: &Graph, resharder: &Resharder, assignment: &Assignment) -> Result<Self, ExportError> {
        let known = PlanLayouts::of(graph, resharder, assignment)?;
        let placed = |(tensor, layouts): (&shardwright_graph::Tensor, &shardwright_space::TensorLayout)| {
            let placements = placements(&layouts.stored?, known.mesh);
            let (shape, dtype) = (tensor.ty.shape.to_vec(), tensor.ty.dtype.to_string());
            Some((tensor.name.clone(), PlacedTensor { shape, dtype, role: tensor.role, placements }))
        };
        Ok(Self {
            mesh: MeshAxes::of(known.mesh),
            tensors: graph.tensors.iter().zip(&known.layouts.tensors).filter_map(placed).collect(),
            layouts: Layouts::from(graph, &known),
        })
    }
}

fn placements(layout: &Layout, mesh: &Mesh) -> Vec<String> {
    let placement = |placement: &Placement| match placement {
        Placement::Shard(dim) => format!("Shard({dim})"),
        Placement::Partial(Reduction::Max) => "Partial('max')".into(),
        Placement::Partial(Reduction::LogSumExp) => "Partial('logsumexp')".into(),
        Placement::Partial(Reduction::Sum) => "Partial('sum')".into(),
        // Absent tensors are refused before.
        Placement::Replicated | Placement::Absent(_) => "Replicate()".into(),
    };
    Placements::of(layout, mesh).0.iter().map(placement).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardwright_graph::{FactorKind, OpId, factor_kinds};
    use shardwright_machine::builtin;
    use shardwright_space::{AxisUse, Config};
    use shardwright_zoo::{self as zoo, BuildOptions};

    #[test]
    fn every_tensor_has_a_placement_per_axis() {
        let graph =
            zoo::build("mlp:batch=8,input=4,hidden=8,layers=1,classes=4", &BuildOptions::default()).unwrap();
        let machine = builtin("flat:4").unwrap();
        let resharder = Resharder::new(&machine, machine.mesh());
        // Samples along both axes, where ops have them.
        let kinds = factor_kinds(&graph);
        let samples = |op: OpId| kinds[op.index()].iter().position(|kind| *kind == FactorKind::Sample);
        let config = |op| {
            let axis = samples(op).map_or(AxisUse::Replicate, |factor| AxisUse::Split(factor as u8));
            Config::new([axis, axis])
        };
        let configs: Vec<Config> = graph.op_ids().map(config).collect();
        let found = TensorPlacements::of(&graph, &resharder, &Assignment::new(configs)).unwrap();
        assert_eq!(found.mesh.shape, [2, 2]);
        assert_eq!(found.tensors.len(), graph.tensors.len());
        assert!(found.tensors.values().all(|tensor| tensor.placements.len() == 2));
        let forward = graph.op_ids().find(|&op| samples(op).is_some()).unwrap();
        let output = &graph.tensor(graph.node(forward).outputs[0]).name;
        assert_eq!(found.tensors[output].placements, ["Shard(0)", "Shard(0)"]);
        let json = serde_json::to_value(&found).unwrap();
        assert!(json["ops"].is_object() && json["stored"].is_object() && json["mesh"]["names"].is_array());
    }
}
