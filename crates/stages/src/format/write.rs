//! Writes problems in this crate's JSON.

use super::{Problem, own};
use crate::problem::LayerProblem;
use crate::solve::Objective;
use crate::table::TableProblem;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

fn objective(objective: Objective) -> &'static str {
    match objective {
        Objective::Bottleneck => "bottleneck",
        Objective::Step { .. } => "step",
    }
}

/// The problem as JSON that [`super::read`] reads back.
pub fn write(problem: &Problem) -> String {
    match problem {
        Problem::Layers(problem) => layers(problem),
        Problem::Table(problem) => table(problem),
    }
    .to_string()
}

fn layers(problem: &LayerProblem) -> Value {
    let name = |layer: u32| problem.layers[layer as usize].name.clone();
    let ends = |bytes: &BTreeMap<u32, f64>| -> Map<String, Value> {
        bytes.iter().map(|(&layer, &bytes)| (name(layer), json!(bytes))).collect()
    };
    let layers: Vec<Value> = problem
        .layers
        .iter()
        .map(|layer| {
            let options: Map<String, Value> = layer
                .options
                .iter()
                .map(|(degree, options)| {
                    let options = options.iter().map(|option| {
                        json!({
                            "id": option.id,
                            "seconds": option.seconds,
                            "parameter_bytes": option.parameter_bytes,
                            "bytes_per_micro_batch": option.bytes_per_micro_batch,
                            "fixed_bytes": option.fixed_bytes,
                            "receive_bytes": ends(&option.receive_bytes),
                            "send_bytes": ends(&option.send_bytes),
                        })
                    });
                    (degree.to_string(), options.collect())
                })
                .collect();
            json!({"name": layer.name, "options": options})
        })
        .collect();
    let edges: Vec<Value> = problem
        .edges
        .iter()
        .map(|edge| json!({"from": name(edge.from), "to": name(edge.to), "bytes": edge.bytes}))
        .collect();
    json!({
        "format": own::NAME,
        "devices": problem.devices,
        "memory_bytes": problem.memory_bytes,
        "micro_batches": problem.micro_batches,
        "bandwidth_bytes_per_second": problem.bandwidth,
        "objective": objective(problem.objective),
        "layers": layers,
        "edges": edges,
    })
}

fn table(problem: &TableProblem) -> Value {
    let kind = |&kind: &u32| problem.kinds[kind as usize].as_str();
    let layers = problem.layers.iter().zip(&problem.layer_kinds);
    let layers: Vec<Value> = layers.map(|(name, of)| json!({"name": name, "kind": kind(of)})).collect();
    let stages: Vec<Value> = problem
        .stages
        .iter()
        .map(|stage| {
            let options = stage.options.iter().map(|option| {
                json!({
                    "id": option.id,
                    "seconds": option.costs.seconds,
                    "lower_bound_seconds": option.costs.lower_bound_seconds,
                    "bytes_per_micro_batch": option.costs.bytes_per_micro_batch,
                    "fixed_bytes": option.costs.fixed_bytes,
                })
            });
            json!({
                "kinds": stage.kinds.iter().map(kind).collect::<Vec<_>>(),
                "tensor_parallel": stage.shape.tensor,
                "data_parallel": stage.shape.replicas,
                "options": options.collect::<Vec<_>>(),
            })
        })
        .collect();
    json!({
        "format": own::NAME,
        "devices": problem.devices,
        "memory_bytes": problem.memory_bytes,
        "micro_batches": problem.micro_batches,
        "objective": objective(problem.objective),
        "layers": layers,
        "stages": stages,
    })
}
