//! A pipeline problem by layers: options per layer and tensor-parallel degree, edges with bytes, and the limits of a machine.
//!
//! The times are Piper's (Tarnawski et al., NeurIPS 2021). A stage with degree t and d replicas takes, per sample,
//! Σ seconds / d + (Σ over crossing edges 2·(bytes + the option's bytes) / d + Σ 4·(d−1)/d · parameter bytes / N) / bandwidth.

use crate::lattice::Order;
use crate::solve::Objective;
use std::collections::{BTreeMap, BTreeSet};

/// One way to run a layer on the devices of a degree.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerOption {
    /// The name that the answer gives.
    pub id: String,
    /// Forward and backward pass of one sample.
    pub seconds: f64,
    /// Weights, which replicas synchronise once per batch.
    pub parameter_bytes: f64,
    /// Memory per micro-batch in flight.
    pub bytes_per_micro_batch: f64,
    /// Memory beside that.
    pub fixed_bytes: f64,
    /// Further bytes per edge that enters, where it comes from another stage: predecessor → bytes.
    pub receive_bytes: BTreeMap<u32, f64>,
    /// Further bytes per edge that leaves, where it goes to another stage: successor → bytes.
    pub send_bytes: BTreeMap<u32, f64>,
}

/// A layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// The name that messages and answers give: an id in Piper's files.
    pub name: String,
    /// Tensor-parallel degree → options.
    pub options: BTreeMap<u32, Vec<LayerOption>>,
}

/// An edge between layers, by their position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Edge {
    /// The layer that sends.
    pub from: u32,
    /// The layer that receives.
    pub to: u32,
    /// Bytes per sample.
    pub bytes: f64,
}

/// A pipeline problem by layers.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerProblem {
    /// The number of devices.
    pub devices: u32,
    /// Memory per device.
    pub memory_bytes: f64,
    /// Micro-batches per batch. Replicas divide it.
    pub micro_batches: u64,
    /// Bandwidth between stages and replicas, in bytes per second.
    pub bandwidth: f64,
    /// What is minimised.
    pub objective: Objective,
    /// The layers.
    pub layers: Vec<Layer>,
    /// The edges.
    pub edges: Vec<Edge>,
}

/// Why a problem is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ProblemError(pub String);

/// More devices are refused.
pub const MOST_DEVICES: u32 = 1 << 20;
/// More micro-batches are refused.
pub const MOST_MICRO_BATCHES: u64 = 1 << 31;
/// Times, bytes and rates from here on are refused: sums of them lose what they measure.
pub const HUGE: f64 = 1e30;
/// More layers are refused.
pub const MOST_LAYERS: usize = 100_000;
/// More different tensor-parallel degrees are refused.
const MOST_DEGREES: usize = 1000;

/// Checks a time, a size or a rate.
pub(crate) fn check_number(value: f64, what: &dyn Fn() -> String) -> Result<(), ProblemError> {
    let reason = if value.is_nan() {
        "is not a number"
    } else if value < 0.0 {
        "is negative"
    } else if value >= HUGE {
        "is 1e30 or more"
    } else {
        return Ok(());
    };
    Err(ProblemError(format!("{} {reason}: {value:e}", what())))
}

/// Checks the limits that all problems have.
pub(crate) fn check_limits(devices: u32, memory_bytes: f64, micro_batches: u64) -> Result<(), ProblemError> {
    if !(1..=MOST_DEVICES).contains(&devices) {
        return Err(ProblemError(format!("the number of devices is {devices}: give 1 to {MOST_DEVICES}")));
    }
    if !(1..=MOST_MICRO_BATCHES).contains(&micro_batches) {
        return Err(ProblemError(format!(
            "the number of micro-batches is {micro_batches}: give 1 to {MOST_MICRO_BATCHES}"
        )));
    }
    check_number(memory_bytes, &|| "the memory per device".to_string())
}

impl LayerProblem {
    /// Checks everything that the search relies on. Messages name the layer.
    pub fn check(&self) -> Result<(), ProblemError> {
        let refuse = |text: String| Err(ProblemError(text));
        check_limits(self.devices, self.memory_bytes, self.micro_batches)?;
        check_number(self.bandwidth, &|| "the bandwidth".to_string())?;
        if self.bandwidth < 1e-9 {
            return refuse(format!(
                "the bandwidth is {:e} bytes per second: give a positive one",
                self.bandwidth
            ));
        }
        if self.layers.is_empty() {
            return refuse("there are no layers".to_string());
        }
        if self.layers.len() > MOST_LAYERS {
            return refuse(format!("there are {} layers: at most {MOST_LAYERS} are read", self.layers.len()));
        }
        let mut names = BTreeSet::new();
        let mut degrees: BTreeSet<u32> = BTreeSet::new();
        for layer in &self.layers {
            if !names.insert(layer.name.as_str()) {
                return refuse(format!("layer {} appears twice", layer.name));
            }
            degrees.extend(layer.options.keys().copied().filter(|&degree| degree <= self.devices));
        }
        if degrees.len() > MOST_DEGREES {
            return refuse(format!(
                "there are {} tensor-parallel degrees: at most {MOST_DEGREES} are read",
                degrees.len()
            ));
        }
        self.check_edges()?;
        let pairs: BTreeSet<(u32, u32)> = self.edges.iter().map(|edge| (edge.from, edge.to)).collect();
        for (position, layer) in self.layers.iter().enumerate() {
            self.check_layer(position as u32, layer, &pairs)?;
        }
        Ok(())
    }

    /// Refuses edges that appear twice or form a cycle.
    pub(crate) fn check_edges(&self) -> Result<(), ProblemError> {
        let name = |layer: u32| &self.layers[layer as usize].name;
        let mut pairs = BTreeSet::new();
        for edge in &self.edges {
            let layers = self.layers.len() as u32;
            if edge.from >= layers || edge.to >= layers {
                return Err(ProblemError(format!(
                    "an edge runs from layer {} to layer {}",
                    edge.from, edge.to
                )));
            }
            let what = || format!("the edge from {} to {}", name(edge.from), name(edge.to));
            check_number(edge.bytes, &|| format!("the bytes of {}", what()))?;
            if !pairs.insert((edge.from, edge.to)) {
                return Err(ProblemError(format!("{} appears twice", what())));
            }
            if edge.from == edge.to {
                return Err(ProblemError(format!("{} is a cycle", what())));
            }
        }
        match self.order().topological() {
            Ok(_) => Ok(()),
            Err(on_cycle) => Err(ProblemError(format!("layer {} is on a cycle of edges", name(on_cycle)))),
        }
    }

    fn check_layer(
        &self,
        position: u32,
        layer: &Layer,
        edges: &BTreeSet<(u32, u32)>,
    ) -> Result<(), ProblemError> {
        let incoming = |from: u32| edges.contains(&(from, position));
        let outgoing = |to: u32| edges.contains(&(position, to));
        if layer.options.values().all(Vec::is_empty) {
            return Err(ProblemError(format!("layer {} has no options", layer.name)));
        }
        for (&degree, options) in &layer.options {
            if degree == 0 {
                return Err(ProblemError(format!("layer {} has options for a degree of 0", layer.name)));
            }
            let mut ids = BTreeSet::new();
            for option in options {
                let place = || format!("of option {} of layer {} at degree {degree}", option.id, layer.name);
                if !ids.insert(option.id.as_str()) {
                    return Err(ProblemError(format!("the name {} is not unique", place())));
                }
                check_number(option.seconds, &|| format!("the time {}", place()))?;
                check_number(option.parameter_bytes, &|| format!("the parameter size {}", place()))?;
                check_number(option.bytes_per_micro_batch, &|| {
                    format!("the memory per micro-batch {}", place())
                })?;
                check_number(option.fixed_bytes, &|| format!("the fixed memory {}", place()))?;
                let ends =
                    option.receive_bytes.iter().map(|(&other, &bytes)| (other, bytes, incoming(other)));
                let ends = ends
                    .chain(option.send_bytes.iter().map(|(&other, &bytes)| (other, bytes, outgoing(other))));
                for (other, bytes, exists) in ends {
                    let other = self.layers.get(other as usize).map_or("?", |layer| &layer.name);
                    check_number(bytes, &|| format!("the bytes of the edge with {other} {}", place()))?;
                    if !exists {
                        return Err(ProblemError(format!(
                            "there is no edge between {other} and the layer {}",
                            place()
                        )));
                    }
                }
            }
        }
        Ok(())
    }

    /// The precedence of the layers.
    pub fn order(&self) -> Order {
        Order::new(self.layers.len(), self.edges.iter().map(|edge| (edge.from, edge.to)))
    }

    /// The most replicas of a stage, and of all stages together.
    pub fn most_replicas(&self) -> u32 {
        u32::try_from(self.micro_batches).unwrap_or(u32::MAX).min(self.devices)
    }

    /// The data-parallel degrees: divisors of the number of micro-batches.
    pub fn replicas(&self) -> Vec<u32> {
        (1..=self.most_replicas()).filter(|&d| self.micro_batches.is_multiple_of(u64::from(d))).collect()
    }

    /// The time of an option in a stage with `replicas` replicas, where `crossing_bytes` of its edges cross the stage's border.
    pub fn option_seconds(&self, option: &LayerOption, crossing_bytes: f64, replicas: u32) -> f64 {
        let d = f64::from(replicas);
        let sync_bytes = 4.0 * (d - 1.0) * option.parameter_bytes / d / self.micro_batches as f64;
        (2.0 * crossing_bytes / d + sync_bytes) / self.bandwidth + option.seconds / d
    }
}
