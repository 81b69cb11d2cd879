//! A pipeline problem as a table: a chain of layers, and the options of stages by the kinds of their layers.

use crate::chain::{ChainOracle, RangeCosts, RangeOption};
use crate::control::Control;
use crate::oracle::Shape;
use crate::problem::{MOST_DEVICES, ProblemError, check_limits, check_number};
use crate::solve::{Limits, Objective, Outcome, solve};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// An option of a stage, with its name.
#[derive(Clone, Debug, PartialEq)]
pub struct TableOption {
    /// The name that the answer gives.
    pub id: String,
    /// Times and memory.
    pub costs: RangeOption,
}

/// The options of every stage whose layers have these kinds.
#[derive(Clone, Debug, PartialEq)]
pub struct TableStage {
    /// The kinds of the stage's layers, in order.
    pub kinds: Vec<u32>,
    /// Its devices.
    pub shape: Shape,
    /// Its options.
    pub options: Vec<TableOption>,
}

/// A pipeline problem as a table.
#[derive(Clone, Debug, PartialEq)]
pub struct TableProblem {
    /// The number of devices.
    pub devices: u32,
    /// Memory per device.
    pub memory_bytes: f64,
    /// Micro-batches per step.
    pub micro_batches: u64,
    /// What is minimised.
    pub objective: Objective,
    /// The names of the layers, in order.
    pub layers: Vec<String>,
    /// The kind of every layer, as an index into `kinds`.
    pub layer_kinds: Vec<u32>,
    /// The names of the kinds.
    pub kinds: Vec<String>,
    /// Options of stages.
    pub stages: Vec<TableStage>,
}

/// More layers are refused: classes of ranges are quadratic.
const MOST_LAYERS: usize = 4000;

impl TableProblem {
    /// Checks everything that the search relies on. Messages name the stage by its kinds.
    pub fn check(&self) -> Result<(), ProblemError> {
        let refuse = |text: String| Err(ProblemError(text));
        check_limits(self.devices, self.memory_bytes, self.micro_batches)?;
        if self.layers.is_empty() || self.layers.len() > MOST_LAYERS {
            return refuse(format!(
                "there are {} layers: a table takes 1 to {MOST_LAYERS}",
                self.layers.len()
            ));
        }
        let mut names = BTreeSet::new();
        if let Some(twice) = self.layers.iter().find(|name| !names.insert(name.as_str())) {
            return refuse(format!("layer {twice} appears twice"));
        }
        let mut known = BTreeSet::new();
        let mut shapes = BTreeSet::new();
        for stage in &self.stages {
            let place = || self.place(stage);
            if stage.kinds.is_empty() {
                return refuse("a stage has no kinds".to_string());
            }
            let Shape { tensor, replicas } = stage.shape;
            if tensor == 0
                || replicas == 0
                || u64::from(tensor) * u64::from(replicas) > u64::from(MOST_DEVICES)
            {
                return refuse(format!("the devices of {} are {tensor} × {replicas}", place()));
            }
            if !known.insert((&stage.kinds, stage.shape)) {
                return refuse(format!("{} appears twice", place()));
            }
            shapes.insert(stage.shape);
            let mut ids = BTreeSet::new();
            for TableOption { id, costs } in &stage.options {
                let option = || format!("of option {id} of {}", place());
                check_number(costs.seconds, &|| format!("the time {}", option()))?;
                check_number(costs.lower_bound_seconds, &|| format!("the lower bound {}", option()))?;
                check_number(costs.bytes_per_micro_batch, &|| {
                    format!("the memory per micro-batch {}", option())
                })?;
                check_number(costs.fixed_bytes, &|| format!("the fixed memory {}", option()))?;
                if costs.lower_bound_seconds > costs.seconds {
                    return refuse(format!("the lower bound {} is above its time", option()));
                }
                if !ids.insert(id) {
                    return refuse(format!("the name {} is not unique", option()));
                }
            }
        }
        if shapes.len() > 60_000 {
            return refuse(format!("there are {} shapes of stages: at most 60000 are read", shapes.len()));
        }
        Ok(())
    }

    fn place(&self, stage: &TableStage) -> String {
        let mut kinds: Vec<&str> =
            stage.kinds.iter().take(8).map(|&kind| self.kinds[kind as usize].as_str()).collect();
        if stage.kinds.len() > kinds.len() {
            kinds.push("...");
        }
        let Shape { tensor, replicas } = stage.shape;
        format!("the stage of [{}] on {tensor} × {replicas} devices", kinds.join(", "))
    }

    /// Finds the stages.
    pub fn solve(&self, control: &Control<'_>) -> Outcome {
        let replicas = u32::try_from(self.micro_batches).unwrap_or(u32::MAX).min(self.devices);
        let limits = Limits { devices: self.devices, replicas };
        let mut oracle = ChainOracle::new(TableCosts::new(self), self.memory_bytes);
        let order = oracle.order();
        solve(&mut oracle, &order, limits, self.objective, control)
    }

    /// The options of the stage with these layers on a shape.
    pub fn options(&self, layers: Range<usize>, shape: Shape) -> &[TableOption] {
        let kinds = &self.layer_kinds[layers];
        let stage = self.stages.iter().find(|stage| stage.shape == shape && stage.kinds == kinds);
        stage.map_or(&[], |stage| &stage.options)
    }
}

/// A table's options by kinds and shape.
struct TableCosts<'p> {
    problem: &'p TableProblem,
    stages: BTreeMap<(&'p [u32], Shape), &'p [TableOption]>,
    kind_device_seconds: Vec<f64>,
}

impl<'p> TableCosts<'p> {
    fn new(problem: &'p TableProblem) -> Self {
        let stages = problem.stages.iter();
        let stages = stages.map(|stage| ((&stage.kinds[..], stage.shape), &stage.options[..])).collect();
        // Every stage's work, divided evenly among its layers: the least share over all stages is a valid bound.
        let mut kind_device_seconds = vec![f64::INFINITY; problem.kinds.len()];
        for stage in &problem.stages {
            let least = stage
                .options
                .iter()
                .map(|option| option.costs.lower_bound_seconds)
                .fold(f64::INFINITY, f64::min);
            let share = least * f64::from(stage.shape.devices()) / stage.kinds.len() as f64;
            for &kind in &stage.kinds {
                let slot = &mut kind_device_seconds[kind as usize];
                *slot = slot.min(share);
            }
        }
        for seconds in &mut kind_device_seconds {
            if seconds.is_infinite() {
                *seconds = 0.0;
            }
        }
        TableCosts { problem, stages, kind_device_seconds }
    }
}

impl RangeCosts for TableCosts<'_> {
    fn layers(&self) -> usize {
        self.problem.layers.len()
    }

    fn kind(&self, layer: usize) -> u32 {
        self.problem.layer_kinds[layer]
    }

    fn families(&self) -> Vec<Vec<Shape>> {
        let fits = |shape: &Shape| {
            shape.devices() <= self.problem.devices
                && self.problem.micro_batches.is_multiple_of(u64::from(shape.replicas))
        };
        let shapes: BTreeSet<Shape> =
            self.problem.stages.iter().map(|stage| stage.shape).filter(fits).collect();
        let mut families: Vec<Vec<Shape>> = Vec::new();
        for shape in shapes {
            match families.last_mut() {
                Some(family) if family[0].tensor == shape.tensor => family.push(shape),
                _ => families.push(vec![shape]),
            }
        }
        families
    }

    fn device_seconds(&self, layer: usize) -> f64 {
        self.kind_device_seconds[self.kind(layer) as usize]
    }

    fn options(&mut self, range: Range<usize>, shape: Shape) -> Vec<RangeOption> {
        let kinds = &self.problem.layer_kinds[range];
        self.stages
            .get(&(kinds, shape))
            .map_or_else(Vec::new, |options| options.iter().map(|option| option.costs).collect())
    }
}
