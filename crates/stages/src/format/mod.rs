//! Problems as JSON: this crate's own format, and Piper's.
//!
//! Readers treat their input as hostile: every number and name is checked, and messages name the layer.

mod non_numbers;
mod own;
mod piper;
mod scalar;
mod write;

use crate::control::Control;
use crate::problem::{LayerProblem, ProblemError};
use crate::solve::{Outcome, PlacedStage, solve_layers};
use crate::table::TableProblem;
use serde::Deserialize;
use serde::de::IgnoredAny;
pub use write::write;

/// Values that replace those of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Overrides {
    /// The number of devices.
    pub devices: Option<u32>,
    /// Memory per device.
    pub memory_bytes: Option<f64>,
    /// Micro-batches per batch.
    pub micro_batches: Option<u64>,
    /// Bandwidth in bytes per second.
    pub bandwidth: Option<f64>,
}

/// A problem of either form.
#[derive(Clone, Debug, PartialEq)]
pub enum Problem {
    /// Options per layer.
    Layers(LayerProblem),
    /// Options per stage of a chain.
    Table(TableProblem),
}

impl Problem {
    /// Finds the stages.
    pub fn solve(&self, control: &Control<'_>) -> Outcome {
        match self {
            Problem::Layers(problem) => solve_layers(problem, control),
            Problem::Table(problem) => problem.solve(control),
        }
    }

    /// The name of a layer.
    pub fn layer_name(&self, layer: u32) -> &str {
        match self {
            Problem::Layers(problem) => &problem.layers[layer as usize].name,
            Problem::Table(problem) => &problem.layers[layer as usize],
        }
    }

    /// The names of a stage's options: one per layer, or one for all layers in a table.
    pub fn option_names(&self, stage: &PlacedStage) -> Vec<&str> {
        let option = &stage.option;
        match self {
            Problem::Layers(problem) => {
                let chosen = option.layers.iter().zip(&option.options);
                let of = |(&layer, &index): (&u32, &u32)| {
                    problem.layers[layer as usize].options[&stage.shape.tensor][index as usize].id.as_str()
                };
                chosen.map(of).collect()
            }
            Problem::Table(problem) => {
                let first = option.layers[0] as usize;
                let options = problem.options(first..first + option.layers.len(), stage.shape);
                option.options.iter().map(|&index| options[index as usize].id.as_str()).collect()
            }
        }
    }

    /// The memory per device.
    pub fn memory_bytes(&self) -> f64 {
        match self {
            Problem::Layers(problem) => problem.memory_bytes,
            Problem::Table(problem) => problem.memory_bytes,
        }
    }

    /// The number of devices.
    pub fn devices(&self) -> u32 {
        match self {
            Problem::Layers(problem) => problem.devices,
            Problem::Table(problem) => problem.devices,
        }
    }
}

/// The keys that tell the formats apart.
#[derive(Deserialize)]
struct Keys {
    layers: Option<IgnoredAny>,
    nodes: Option<IgnoredAny>,
}

/// Reads and checks a problem. `nodes` mark Piper's format, `layers` our own.
pub fn read(bytes: &[u8], overrides: &Overrides) -> Result<Problem, ProblemError> {
    // A sequence would be read as the fields of a structure, one after the other.
    if bytes.trim_ascii_start().first() == Some(&b'[') {
        return Err(ProblemError("the file is no pipeline problem: it is a list, not an object".to_string()));
    }
    let bytes = &non_numbers::quoted(bytes)[..];
    let keys: Keys = serde_json::from_slice(bytes).map_err(|error| ProblemError(error.to_string()))?;
    match (keys.layers, keys.nodes) {
        (Some(_), None) => own::read(bytes, overrides),
        (None, Some(_)) => piper::read(bytes, overrides).map(Problem::Layers),
        (Some(_), Some(_)) => Err(ProblemError("the file has both `layers` and `nodes`".to_string())),
        (None, None) => Err(ProblemError(
            "the file is no pipeline problem: it has neither `layers` (our format) nor `nodes` (Piper's)"
                .to_string(),
        )),
    }
}
