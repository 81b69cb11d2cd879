//! This crate's JSON, documented in `docs/formats.md`: layers with options and edges, or a chain with a table of stages.

use super::scalar::{Entries, Field, Scalar};
use super::{Overrides, Problem};
use crate::chain::RangeOption;
use crate::oracle::Shape;
use crate::problem::{
    Edge, Layer, LayerOption, LayerProblem, MOST_DEVICES, MOST_MICRO_BATCHES, ProblemError,
};
use crate::solve::Objective;
use crate::table::{TableOption, TableProblem, TableStage};
use serde::Deserialize;
use std::collections::BTreeMap;

/// The value of `format`.
pub(super) const NAME: &str = "shardwright-stages-1";

#[derive(Deserialize)]
struct File {
    format: Option<Scalar>,
    devices: Option<Scalar>,
    memory_bytes: Option<Scalar>,
    micro_batches: Option<Scalar>,
    bandwidth_bytes_per_second: Option<Scalar>,
    objective: Option<Scalar>,
    layers: Option<Vec<FileLayer>>,
    edges: Option<Vec<FileEdge>>,
    stages: Option<Vec<FileStage>>,
}

#[derive(Deserialize)]
struct FileLayer {
    name: Option<Scalar>,
    kind: Option<Scalar>,
    options: Option<Entries<Vec<FileOption>>>,
}

#[derive(Deserialize)]
struct FileOption {
    id: Option<Scalar>,
    seconds: Option<Scalar>,
    lower_bound_seconds: Option<Scalar>,
    parameter_bytes: Option<Scalar>,
    bytes_per_micro_batch: Option<Scalar>,
    fixed_bytes: Option<Scalar>,
    receive_bytes: Option<Entries<Scalar>>,
    send_bytes: Option<Entries<Scalar>>,
}

#[derive(Deserialize)]
struct FileEdge {
    from: Option<Scalar>,
    to: Option<Scalar>,
    bytes: Option<Scalar>,
}

#[derive(Deserialize)]
struct FileStage {
    kinds: Option<Vec<Scalar>>,
    tensor_parallel: Option<Scalar>,
    data_parallel: Option<Scalar>,
    options: Option<Vec<FileOption>>,
}

/// Reads and checks a problem.
pub(super) fn read(bytes: &[u8], overrides: &Overrides) -> Result<Problem, ProblemError> {
    let file: File = serde_json::from_slice(bytes).map_err(|error| ProblemError(error.to_string()))?;
    let refuse = |text: &str| Err(ProblemError(text.to_string()));
    let top = || "the file".to_string();
    let field = |value, key| Field { value, key, owner: &top };
    if let Some(format) = &file.format
        && *format != Scalar::Text(NAME.to_string())
    {
        return Err(ProblemError(format!("`format` is {format}: this version reads \"{NAME}\"")));
    }
    let devices = match overrides.devices {
        Some(devices) => devices,
        None => field(file.devices.as_ref(), "devices").count(1, MOST_DEVICES.into())? as u32,
    };
    let micro_batches = match overrides.micro_batches {
        Some(count) => count,
        None => field(file.micro_batches.as_ref(), "micro_batches").count(1, MOST_MICRO_BATCHES)?,
    };
    let memory_bytes = match overrides.memory_bytes {
        Some(bytes) => bytes,
        None => field(file.memory_bytes.as_ref(), "memory_bytes").number()?,
    };
    let objective = match file.objective {
        None => Objective::Bottleneck,
        Some(Scalar::Text(text)) if text == "bottleneck" => Objective::Bottleneck,
        Some(Scalar::Text(text)) if text == "step" => Objective::Step { micro_batches },
        Some(other) => {
            return Err(ProblemError(format!("`objective` is {other}: give \"bottleneck\" or \"step\"")));
        }
    };
    let Some(layers) = file.layers else { return refuse("`layers` is missing") };
    let mut names: BTreeMap<String, u32> = BTreeMap::new();
    let mut ordered = Vec::new();
    for (position, layer) in layers.iter().enumerate() {
        let owner = || format!("entry {position} of `layers`");
        let name = Field { value: layer.name.as_ref(), key: "name", owner: &owner }.text()?;
        if names.insert(name.clone(), position as u32).is_some() {
            return Err(ProblemError(format!("layer {name} appears twice")));
        }
        ordered.push(name);
    }
    if let Some(stages) = file.stages {
        if file.edges.is_some_and(|edges| !edges.is_empty())
            || layers.iter().any(|layer| layer.options.is_some())
        {
            return refuse("give `stages` for a chain, or `options` of layers with `edges`, not both");
        }
        let mut problem = TableProblem {
            devices,
            memory_bytes,
            micro_batches,
            objective,
            layers: ordered,
            layer_kinds: Vec::new(),
            kinds: Vec::new(),
            stages: Vec::new(),
        };
        read_table(&mut problem, &layers, &stages)?;
        problem.check()?;
        return Ok(Problem::Table(problem));
    }
    let bandwidth = match overrides.bandwidth {
        Some(bandwidth) => bandwidth,
        None => field(file.bandwidth_bytes_per_second.as_ref(), "bandwidth_bytes_per_second").number()?,
    };
    let mut problem = LayerProblem {
        devices,
        memory_bytes,
        micro_batches,
        bandwidth,
        objective,
        layers: Vec::new(),
        edges: Vec::new(),
    };
    for (index, edge) in file.edges.iter().flatten().enumerate() {
        let owner = || format!("entry {index} of `edges`");
        let end = |value, key| {
            let name = Field { value, key, owner: &owner }.text()?;
            let unknown = || {
                ProblemError(format!("`{key}` of entry {index} of `edges` is {name}: there is no such layer"))
            };
            names.get(&name).copied().ok_or_else(unknown)
        };
        let (from, to) = (end(edge.from.as_ref(), "from")?, end(edge.to.as_ref(), "to")?);
        let bytes = Field { value: edge.bytes.as_ref(), key: "bytes", owner: &owner }.number_or_zero()?;
        problem.edges.push(Edge { from, to, bytes });
    }
    for (layer, name) in layers.into_iter().zip(ordered) {
        let Some(by_degree) = layer.options else {
            return Err(ProblemError(format!("`options` of layer {name} is missing")));
        };
        let mut read = Layer { name, options: BTreeMap::new() };
        for (degree, options) in by_degree.0 {
            let Some(degree) = degree.parse().ok().filter(|degree| (1..=MOST_DEVICES).contains(degree))
            else {
                let name = read.name;
                return Err(ProblemError(format!(
                    "a degree of layer {name} is {degree:?}: give 1 to {MOST_DEVICES}"
                )));
            };
            let list: Result<Vec<LayerOption>, ProblemError> = options
                .iter()
                .enumerate()
                .map(|(index, option)| {
                    let owner = || format!("option {index} of layer {} at degree {degree}", read.name);
                    layer_option(option, &owner, &names)
                })
                .collect();
            let list = list?;
            if read.options.insert(degree, list).is_some() {
                return Err(ProblemError(format!("degree {degree} of layer {} appears twice", read.name)));
            }
        }
        problem.layers.push(read);
    }
    problem.check()?;
    Ok(Problem::Layers(problem))
}

fn layer_option(
    option: &FileOption,
    owner: &dyn Fn() -> String,
    names: &BTreeMap<String, u32>,
) -> Result<LayerOption, ProblemError> {
    let number = |value: &Option<Scalar>, key| Field { value: value.as_ref(), key, owner }.number_or_zero();
    let bytes = |entries: &Option<Entries<Scalar>>, key: &'static str| {
        let mut read = BTreeMap::new();
        for (other, value) in entries.iter().flat_map(|entries| &entries.0) {
            let wrong =
                |what: &str| ProblemError(format!("`{key}` of {} names layer {other}{what}", owner()));
            let position = *names.get(other).ok_or_else(|| wrong(", which does not exist"))?;
            if read.insert(position, Field { value: Some(value), key, owner }.number()?).is_some() {
                return Err(wrong(" twice"));
            }
        }
        Ok(read)
    };
    Ok(LayerOption {
        id: Field { value: option.id.as_ref(), key: "id", owner }.text()?,
        seconds: Field { value: option.seconds.as_ref(), key: "seconds", owner }.number()?,
        parameter_bytes: number(&option.parameter_bytes, "parameter_bytes")?,
        bytes_per_micro_batch: number(&option.bytes_per_micro_batch, "bytes_per_micro_batch")?,
        fixed_bytes: number(&option.fixed_bytes, "fixed_bytes")?,
        receive_bytes: bytes(&option.receive_bytes, "receive_bytes")?,
        send_bytes: bytes(&option.send_bytes, "send_bytes")?,
    })
}

fn read_table(
    problem: &mut TableProblem,
    layers: &[FileLayer],
    stages: &[FileStage],
) -> Result<(), ProblemError> {
    let mut kinds: BTreeMap<String, u32> = BTreeMap::new();
    for (layer, name) in layers.iter().zip(&problem.layers) {
        let owner = || format!("layer {name}");
        let kind = match &layer.kind {
            None => name.clone(),
            Some(kind) => Field { value: Some(kind), key: "kind", owner: &owner }.text()?,
        };
        let next = problem.kinds.len() as u32;
        let id = *kinds.entry(kind).or_insert_with_key(|kind| {
            problem.kinds.push(kind.clone());
            next
        });
        problem.layer_kinds.push(id);
    }
    for (index, stage) in stages.iter().enumerate() {
        let owner = || format!("entry {index} of `stages`");
        let missing = |key: &str| ProblemError(format!("`{key}` of {} is missing", owner()));
        let mut named = Vec::new();
        for kind in stage.kinds.as_ref().ok_or_else(|| missing("kinds"))? {
            let kind = Field { value: Some(kind), key: "kinds", owner: &owner }.text()?;
            let unknown =
                || ProblemError(format!("`kinds` of {} has {kind}: no layer has this kind", owner()));
            named.push(*kinds.get(&kind).ok_or_else(unknown)?);
        }
        let degree = |value: &Option<Scalar>, key| match value {
            None => Ok(1),
            Some(_) => Field { value: value.as_ref(), key, owner: &owner }.count(1, MOST_DEVICES.into()),
        };
        let shape = Shape {
            tensor: degree(&stage.tensor_parallel, "tensor_parallel")? as u32,
            replicas: degree(&stage.data_parallel, "data_parallel")? as u32,
        };
        let mut options = Vec::new();
        for (option, entry) in stage.options.as_ref().ok_or_else(|| missing("options"))?.iter().enumerate() {
            let owner = || format!("option {option} of entry {index} of `stages`");
            let field = |value, key| Field { value, key, owner: &owner };
            let seconds = field(entry.seconds.as_ref(), "seconds").number()?;
            let lower_bound_seconds = match &entry.lower_bound_seconds {
                None => seconds,
                Some(bound) => field(Some(bound), "lower_bound_seconds").number()?,
            };
            let per_micro_batch = field(entry.bytes_per_micro_batch.as_ref(), "bytes_per_micro_batch");
            options.push(TableOption {
                id: field(entry.id.as_ref(), "id").text()?,
                costs: RangeOption {
                    seconds,
                    lower_bound_seconds,
                    bytes_per_micro_batch: per_micro_batch.number_or_zero()?,
                    fixed_bytes: field(entry.fixed_bytes.as_ref(), "fixed_bytes").number_or_zero()?,
                },
            });
        }
        problem.stages.push(TableStage { kinds: named, shape, options });
    }
    Ok(())
}
