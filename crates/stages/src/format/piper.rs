//! Piper's JSON (Tarnawski et al., NeurIPS 2021): `maxDevices`, `maxMemoryPerDevice`, `bandwidth`, `mbsInBatch`, `nodes`, `edges`.

use super::Overrides;
use super::scalar::{Entries, Field, Scalar};
use crate::problem::{
    Edge, Layer, LayerOption, LayerProblem, MOST_DEVICES, MOST_MICRO_BATCHES, ProblemError,
};
use crate::solve::Objective;
use serde::Deserialize;
use std::collections::BTreeMap;

#[derive(Deserialize)]
struct File {
    #[serde(rename = "maxMemoryPerDevice")]
    memory: Option<Scalar>,
    #[serde(rename = "maxDevices")]
    devices: Option<Scalar>,
    bandwidth: Option<Scalar>,
    #[serde(rename = "mbsInBatch")]
    micro_batches: Option<Scalar>,
    nodes: Option<Vec<Node>>,
    edges: Option<Vec<FileEdge>>,
}

#[derive(Deserialize)]
struct Node {
    id: Option<Scalar>,
    #[serde(rename = "TMPCs")]
    options: Option<Entries<Vec<FileOption>>>,
}

#[derive(Deserialize)]
struct FileOption {
    id: Option<Scalar>,
    #[serde(rename = "timePerSample")]
    seconds: Option<Scalar>,
    #[serde(rename = "parameterSize")]
    parameters: Option<Scalar>,
    #[serde(rename = "memoryUsageA")]
    per_micro_batch: Option<Scalar>,
    #[serde(rename = "memoryUsageB")]
    fixed: Option<Scalar>,
    #[serde(rename = "syncTimeFw")]
    receive: Option<Entries<Scalar>>,
    #[serde(rename = "syncTimeBw")]
    send: Option<Entries<Scalar>>,
}

#[derive(Deserialize)]
struct FileEdge {
    #[serde(rename = "sourceId")]
    from: Option<Scalar>,
    #[serde(rename = "destId")]
    to: Option<Scalar>,
    #[serde(rename = "communicationCost")]
    bytes: Option<Scalar>,
}

/// Reads and checks a problem.
pub(super) fn read(bytes: &[u8], overrides: &Overrides) -> Result<LayerProblem, ProblemError> {
    let file: File = serde_json::from_slice(bytes).map_err(|error| ProblemError(error.to_string()))?;
    let refuse = |text: String| Err(ProblemError(text));
    let top = || "the file".to_string();
    let field = |value, key| Field { value, key, owner: &top };
    let Some(nodes) = file.nodes else { return refuse("`nodes` is missing".to_string()) };
    let Some(edges) = file.edges else { return refuse("`edges` is missing".to_string()) };
    let mut positions: BTreeMap<String, u32> = BTreeMap::new();
    for (position, node) in nodes.iter().enumerate() {
        let owner = || format!("entry {position} of `nodes`");
        let id = Field { value: node.id.as_ref(), key: "id", owner: &owner }.text()?;
        if positions.insert(id.clone(), position as u32).is_some() {
            return refuse(format!("node {id} appears twice"));
        }
    }
    let mut problem = LayerProblem {
        devices: match overrides.devices {
            Some(devices) => devices,
            None => field(file.devices.as_ref(), "maxDevices").count(1, MOST_DEVICES.into())? as u32,
        },
        memory_bytes: match overrides.memory_bytes {
            Some(bytes) => bytes,
            None => field(file.memory.as_ref(), "maxMemoryPerDevice").number()?,
        },
        micro_batches: match overrides.micro_batches {
            Some(count) => count,
            None => field(file.micro_batches.as_ref(), "mbsInBatch").count(1, MOST_MICRO_BATCHES)?,
        },
        bandwidth: match overrides.bandwidth {
            Some(bandwidth) => bandwidth,
            None => field(file.bandwidth.as_ref(), "bandwidth").number()?,
        },
        objective: Objective::Bottleneck,
        layers: Vec::new(),
        edges: Vec::new(),
    };
    let mut neighbours: Vec<(Vec<u32>, Vec<u32>)> = vec![Default::default(); nodes.len()];
    for (index, edge) in edges.iter().enumerate() {
        let owner = || format!("entry {index} of `edges`");
        let end = |value, key| {
            let id = Field { value, key, owner: &owner }.text()?;
            let unknown = || {
                ProblemError(format!("`{key}` of entry {index} of `edges` is {id}: there is no such node"))
            };
            positions.get(&id).copied().ok_or_else(unknown)
        };
        let (from, to) = (end(edge.from.as_ref(), "sourceId")?, end(edge.to.as_ref(), "destId")?);
        let bytes = Field { value: edge.bytes.as_ref(), key: "communicationCost", owner: &owner }.number()?;
        problem.edges.push(Edge { from, to, bytes });
        neighbours[from as usize].1.push(to);
        neighbours[to as usize].0.push(from);
    }
    let names: Vec<&String> = {
        let mut names: Vec<_> = positions.iter().collect();
        names.sort_by_key(|&(_, position)| position);
        names.into_iter().map(|(name, _)| name).collect()
    };
    let unread = |name: &&String| Layer { name: (*name).clone(), options: BTreeMap::new() };
    problem.layers = names.iter().map(unread).collect();
    problem.check_edges()?;
    for (position, node) in nodes.into_iter().enumerate() {
        let name = names[position];
        let Some(by_degree) = node.options else {
            return refuse(format!("`TMPCs` of node {name} is missing"));
        };
        for (degree, options) in by_degree.0 {
            let Some(degree) = degree.parse().ok().filter(|degree| (1..=MOST_DEVICES).contains(degree))
            else {
                return refuse(format!("a degree of node {name} is {degree:?}: give 1 to {MOST_DEVICES}"));
            };
            let mut read = Vec::new();
            for (index, option) in options.iter().enumerate() {
                let owner = || format!("option {index} of node {name} at degree {degree}");
                read.push(read_option(option, &owner, &positions, &neighbours[position], &names)?);
            }
            if problem.layers[position].options.insert(degree, read).is_some() {
                return refuse(format!("degree {degree} of node {name} appears twice"));
            }
        }
    }
    problem.check()?;
    Ok(problem)
}

fn read_option(
    option: &FileOption,
    owner: &dyn Fn() -> String,
    positions: &BTreeMap<String, u32>,
    neighbours: &(Vec<u32>, Vec<u32>),
    names: &[&String],
) -> Result<LayerOption, ProblemError> {
    let number = |value: &Option<Scalar>, key| Field { value: value.as_ref(), key, owner }.number();
    let bytes = |entries: &Option<Entries<Scalar>>, key: &'static str, neighbours: &[u32]| {
        let missing = |what: &str| ProblemError(format!("`{key}` of {} {what}", owner()));
        let entries = entries.as_ref().ok_or_else(|| missing("is missing"))?;
        let mut read = BTreeMap::new();
        for (other, value) in &entries.0 {
            let unknown = || missing(&format!("names node {other}, which does not exist"));
            let position = *positions.get(other).ok_or_else(unknown)?;
            let value = Field { value: Some(value), key, owner }.number()?;
            if read.insert(position, value).is_some() {
                return Err(missing(&format!("names node {other} twice")));
            }
        }
        match neighbours.iter().find(|neighbour| !read.contains_key(neighbour)) {
            Some(&lacking) => Err(missing(&format!("lacks the edge with node {}", names[lacking as usize]))),
            None => Ok(read),
        }
    };
    Ok(LayerOption {
        id: Field { value: option.id.as_ref(), key: "id", owner }.text()?,
        seconds: number(&option.seconds, "timePerSample")?,
        parameter_bytes: number(&option.parameters, "parameterSize")?,
        bytes_per_micro_batch: number(&option.per_micro_batch, "memoryUsageA")?,
        fixed_bytes: number(&option.fixed, "memoryUsageB")?,
        receive_bytes: bytes(&option.receive, "syncTimeFw", &neighbours.0)?,
        send_bytes: bytes(&option.send, "syncTimeBw", &neighbours.1)?,
    })
}
