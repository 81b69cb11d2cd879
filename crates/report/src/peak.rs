//! What holds a device's memory when it is fullest.

use serde::Serialize;
use shardwright_graph::{Graph, Role};
use shardwright_lower::{ParallelGraph, Value, Work};
use shardwright_sim::Memory;
use std::collections::BTreeMap;

/// How many tensors are named.
const LARGEST: usize = 12;

/// The fullest moment of a device's step.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Peak {
    /// When it begins.
    pub at_ps: u64,
    /// The op that is computed then, if one is.
    pub op: Option<u32>,
    /// What the memory is used for; together all that is held.
    pub kinds: Vec<KindOfUse>,
    /// Bytes by the layer that the tensor belongs to, in the order of layers; tensors without a layer are left out.
    pub layers: Vec<LayerUse>,
    /// The largest tensors, largest first.
    pub largest: Vec<HeldTensor>,
    /// How many more there are.
    pub others: usize,
}

/// Bytes of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct KindOfUse {
    /// See [`KINDS`].
    pub kind: &'static str,
    /// How many.
    pub bytes: u64,
}

/// Bytes of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LayerUse {
    /// A position in the plan's layers.
    pub layer: u32,
    /// How many.
    pub bytes: u64,
}

/// A tensor in memory.
#[derive(Clone, Debug, Serialize)]
pub struct HeldTensor {
    /// Its name.
    pub tensor: String,
    /// What it is for: see [`KINDS`].
    pub kind: &'static str,
    /// What one device holds of it.
    pub bytes: u64,
}

/// The uses of memory. Copies are the results of reshards and halo exchanges (a gathered weight, a reduced gradient), the
/// shares of all-reduces, and kernels' workspaces.
pub const KINDS: [&str; 6] = ["weights", "gradients", "optimizer state", "activations", "data", "copies"];

/// The name of memory that holds no tensor.
const WORKSPACE: &str = "workspace";

fn kind(graph: &Graph, program: &ParallelGraph, value: &Value) -> &'static str {
    let made = value.made_by.map(|by| &program.instruction(by).work);
    if matches!(made, Some(Work::Reshard(_) | Work::HaloExchange { .. })) {
        return "copies";
    }
    match graph.tensor(value.tensor).role {
        Role::Parameter => "weights",
        Role::Gradient => "gradients",
        Role::OptimizerState => "optimizer state",
        Role::Activation => "activations",
        Role::Input | Role::Constant => "data",
    }
}

/// The layer that every tensor belongs to: that of the op that makes it, else of the first op that reads it.
pub fn tensor_layers(graph: &Graph) -> Vec<Option<u32>> {
    let mut layers = vec![None; graph.tensors.len()];
    for node in graph.ops.iter().rev() {
        for tensor in &node.inputs {
            layers[tensor.index()] = Some(node.layer.0);
        }
    }
    for node in &graph.ops {
        for tensor in &node.outputs {
            layers[tensor.index()] = Some(node.layer.0);
        }
    }
    layers
}

impl Peak {
    /// The first of the fullest moments; `layers` are those of `tensor_layers`, `running` says which op is
    /// computed at a time.
    pub fn of(
        graph: &Graph,
        program: &ParallelGraph,
        layers: &[Option<u32>],
        memory: &Memory,
        running: impl Fn(u64) -> Option<u32>,
    ) -> Self {
        let at_ps = memory.fullest();
        let mut by_layer: BTreeMap<u32, u64> = BTreeMap::new();
        for stay in &memory.at_peak {
            if let Some(layer) = stay.value.and_then(|value| layers[program.value(value).tensor.index()]) {
                *by_layer.entry(layer).or_default() += stay.bytes.0;
            }
        }
        let held = memory.at_peak.iter().map(|stay| match stay.value.map(|value| program.value(value)) {
            Some(value) => HeldTensor {
                tensor: graph.tensor(value.tensor).name.clone(),
                kind: kind(graph, program, value),
                bytes: stay.bytes.0,
            },
            None => HeldTensor { tensor: WORKSPACE.into(), kind: "copies", bytes: stay.bytes.0 },
        });
        let mut held: Vec<HeldTensor> = held.collect();
        let bytes_of = |kind: &str| held.iter().filter(|own| own.kind == kind).map(|own| own.bytes).sum();
        let kinds = KINDS.map(|kind| KindOfUse { kind, bytes: bytes_of(kind) });
        let kinds = kinds.into_iter().filter(|own| own.bytes > 0).collect();
        held.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.tensor.cmp(&b.tensor)));
        let others = held.len().saturating_sub(LARGEST);
        held.truncate(LARGEST);
        let layers = by_layer.into_iter().map(|(layer, bytes)| LayerUse { layer, bytes }).collect();
        Self { at_ps, op: running(at_ps), kinds, layers, largest: held, others }
    }
}
