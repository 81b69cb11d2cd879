//! The layout of every tensor by name: for each of its dimensions the mesh axes that shard it. As data, and as a Python module
//! for JAX.

use crate::dtensor::MeshAxes;
use crate::layouts::Placements;
use crate::shardings::ExportError;
use serde::Serialize;
use shardwright_cost::{Layout, Placement};
use shardwright_graph::{Graph, Role, Tensor};
use shardwright_machine::Mesh;
use shardwright_space::{Assignment, OpShapes, Sharing, Transfers, assign_layouts};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// A tensor and the axes that shard it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TensorSpec {
    /// Sizes of the whole tensor.
    pub shape: Vec<u64>,
    /// Element type.
    pub dtype: String,
    /// Its role in the training step.
    pub role: Role,
    /// Whether a step begins with it: weights, optimizer state and data. The others are made by ops.
    pub given: bool,
    /// Per dimension: the mesh axes that shard it, outermost first.
    pub dimensions: Vec<Vec<String>>,
    /// Axes along which devices hold partial results.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub partial: Vec<String>,
    /// Axes along which only one position holds the tensor, with that position.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub pinned: BTreeMap<String, u16>,
}

/// The layouts of all tensors of a training step, as they are stored or produced.
#[derive(Clone, Debug, Serialize)]
pub struct TensorSpecs {
    /// The mesh.
    pub mesh: MeshAxes,
    /// Tensors by name.
    pub tensors: BTreeMap<String, TensorSpec>,
}

impl TensorSpecs {
    /// The layouts of a graph whose ops have these configs.
    pub fn of(graph: &Graph, mesh: &Mesh, assignment: &Assignment) -> Self {
        let shapes: Vec<OpShapes> = graph.op_ids().map(|op| OpShapes::of(graph, op)).collect();
        let transfers = Transfers::of(graph);
        let layouts = assign_layouts(graph, &shapes, &transfers, assignment, mesh, Sharing::AcrossLayers);
        let spec = |(tensor, own): (&Tensor, &shardwright_space::TensorLayout)| {
            Some((tensor.name.clone(), spec(tensor, &own.stored?, mesh)))
        };
        Self {
            mesh: MeshAxes::of(mesh),
            tensors: graph.tensors.iter().zip(&layouts.tensors).filter_map(spec).collect(),
        }
    }

    /// A Python module with the mesh and a `PartitionSpec` per tensor.
    ///
    /// # Errors
    /// If a tensor is on some devices only, which a `PartitionSpec` cannot say.
    pub fn to_jax_module(&self, model: &str, machine: &str) -> Result<String, ExportError> {
        if let Some((name, _)) = self.tensors.iter().find(|(_, spec)| !spec.pinned.is_empty()) {
            return Err(ExportError::Pinned { tensor: name.clone() });
        }
        let axes = self
            .mesh
            .names
            .iter()
            .zip(&self.mesh.shape)
            .map(|(name, size)| format!("{}: {size}", quoted(name)));
        let mut text = JAX_HEAD
            .replace("{model}", &quoted(model))
            .replace("{machine}", &quoted(machine))
            .replace("{axes}", &axes.collect::<Vec<_>>().join(", "));
        for (title, role, given) in GROUPS {
            let _ = write!(text, "\n{title} = {{\n");
            for (name, spec) in
                self.tensors.iter().filter(|(_, spec)| spec.role == role && spec.given == given)
            {
                let note = match spec.partial.is_empty() {
                    true => "",
                    false => "  # once partial sums are reduced",
                };
                let _ = writeln!(text, "    {}: {},{note}", quoted(name), partition_spec(spec));
            }
            text += "}\n";
        }
        Ok(text)
    }
}

/// The dictionaries of a module: a role, and whether the step begins with such tensors.
const GROUPS: [(&str, Role, bool); 5] = [
    ("PARAMETERS", Role::Parameter, true),
    ("OPTIMIZER_STATE", Role::OptimizerState, true),
    ("INPUTS", Role::Input, true),
    ("ACTIVATIONS", Role::Activation, false),
    ("GRADIENTS", Role::Gradient, false),
];

/// What a module begins with.
const JAX_HEAD: &str = r#""""The layout of every tensor of a training step, planned by Shardwright.

    mesh = make_mesh()
    weight = jax.device_put(weight, sharding(mesh, PARAMETERS["fc1.weight"]))
    hidden = jax.lax.with_sharding_constraint(hidden, sharding(mesh, ACTIVATIONS["fc1"]))
"""

import math

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

MODEL = {model}
MACHINE = {machine}

# Devices per mesh axis, outermost first.
AXES = {{axes}}


def make_mesh(devices=None):
    """The mesh of the plan; `devices` are all of JAX's, those of a node side by side."""
    devices = jax.devices() if devices is None else devices
    if len(devices) != math.prod(AXES.values()):
        raise ValueError(f"the plan is for {math.prod(AXES.values())} devices; here are {len(devices)}")
    return Mesh(np.asarray(devices).reshape(tuple(AXES.values())), tuple(AXES))


def sharding(mesh, spec):
    """A tensor's sharding."""
    return NamedSharding(mesh, spec)

"#;

fn spec(tensor: &Tensor, layout: &Layout, mesh: &Mesh) -> TensorSpec {
    let mut spec = TensorSpec {
        shape: tensor.ty.shape.to_vec(),
        dtype: tensor.ty.dtype.to_string(),
        role: tensor.role,
        given: tensor.producer.is_none(),
        dimensions: vec![Vec::new(); tensor.ty.shape.rank()],
        partial: Vec::new(),
        pinned: BTreeMap::new(),
    };
    for (axis, placement) in mesh.axes().iter().zip(Placements::of(layout, mesh).0) {
        match placement {
            Placement::Shard(dim) => spec.dimensions[usize::from(dim)].push(axis.name.clone()),
            Placement::Partial(_) => spec.partial.push(axis.name.clone()),
            Placement::Absent(digit) => {
                spec.pinned.insert(axis.name.clone(), digit);
            }
            Placement::Replicated => {}
        }
    }
    spec
}

/// `P(('node', 'gpu'), None)`; dimensions at the end that no axis shards are left out.
fn partition_spec(spec: &TensorSpec) -> String {
    let used = spec.dimensions.iter().rposition(|axes| !axes.is_empty()).map_or(0, |last| last + 1);
    let dimension = |axes: &Vec<String>| match &axes[..] {
        [] => "None".to_owned(),
        [one] => quoted(one),
        several => format!("({})", several.iter().map(|axis| quoted(axis)).collect::<Vec<_>>().join(", ")),
    };
    format!("P({})", spec.dimensions[..used].iter().map(dimension).collect::<Vec<_>>().join(", "))
}

/// Text as Python reads it; JSON's strings are Python's.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardwright_machine::builtin;
    use shardwright_space::{AxisUse, Config};
    use shardwright_zoo::{self as zoo, BuildOptions};

    #[test]
    fn axes_of_a_dimension_are_listed_and_hostile_names_stay_text() {
        let mut graph =
            zoo::build("mlp:batch=8,input=4,hidden=8,layers=1,classes=4", &BuildOptions::default()).unwrap();
        let evil = "\"\nimport os # \u{e9}";
        graph.tensors[0].name = evil.into();
        let machine = builtin("flat:4").unwrap();
        let product = graph.op_ids().find(|&op| graph.node(op).op.kind() == "contract").unwrap();
        let factor = graph.rule(product).find("n").unwrap();
        let config = |op| match op == product {
            true => Config::new([AxisUse::Split(factor); 2]),
            false => Config::replicated(2),
        };
        let assignment = Assignment::new(graph.op_ids().map(config).collect());
        let found = TensorSpecs::of(&graph, machine.mesh(), &assignment);
        let made = &graph.tensor(graph.node(product).outputs[0]).name;
        assert_eq!(found.tensors[made].dimensions[0], ["gpu.0", "gpu.1"]);
        let text = found.to_jax_module("m", "flat:4").unwrap();
        assert!(text.contains(&format!("{}: P((\"gpu.0\", \"gpu.1\")),", quoted(made))), "{text}");
        assert!(text.contains("AXES = {\"gpu.0\": 2, \"gpu.1\": 2}"), "{text}");
        assert!(!text.lines().any(|line| line.starts_with("import os")), "{text}");
    }
}
