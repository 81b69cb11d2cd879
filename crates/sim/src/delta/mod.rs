//! Delta simulation: the step's new makespan after a change of configs, without simulating the whole step.
//!
//! FlexFlow's idea (arXiv 1807.05358, section 5.3): a change rebuilds only the tasks that it affects, and times only
//! the tasks after them. The result of [`Delta`] equals [`crate::Timeline`]'s for the lowered program without joined
//! all-reduces, to the bit. Property tests check this.
//!
//! `task_graph` holds the tasks, `delta_timeline` their times, `ordered_timeline` a timeline by position.
//! `configured_ops` and `reshard_paths` cache the tasks of configs and reshards. So a proposal neither hashes nor
//! allocates once all its configs are cached.
//!
//! ```
//! use shardwright_machine::builtin;
//! use shardwright_plan::Context;
//! use shardwright_sim::Delta;
//! use shardwright_space::{Assignment, AxisUse, Config};
//! use shardwright_zoo::{BuildOptions, build};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let graph = build("mlp:batch=64,hidden=1024,layers=3", &BuildOptions::default())?;
//! let machine = builtin("flat:4")?;
//! let context = Context::new(&graph, &machine, None, machine.mesh().clone(), false)?;
//! let mut delta = Delta::new(&context, &Assignment::replicated(&graph, machine.mesh()))?;
//! let before = delta.makespan();
//! // The first layer's ops, split along the batch.
//! let layer = &context.layers.members[0];
//! let batch = Config::new([AxisUse::Split(0); 2]);
//! let configs = layer.configs(&context.shapes, context.mesh(), &batch);
//! let ops = layer.ops.iter().zip(&configs);
//! let change: Vec<_> = ops.map(|(op, config)| (op.0, delta.number(op.index(), config))).collect();
//! let after = delta.propose(&change)?;
//! assert_eq!(after, delta.simulate_anew());
//! delta.reject();
//! assert_eq!(delta.makespan(), before);
//! # Ok(())
//! # }
//! ```

mod configured_ops;
mod delta_timeline;
mod device_classes;
mod edges;
mod ordered_timeline;
mod reshard_paths;
mod structure;
mod task_graph;

use crate::{Tasks, Timeline};
use delta_timeline::{DeltaTimeline, to_tasks};
use device_classes::DeviceClasses;
use shardwright_cost::LayoutError;
use shardwright_machine::AxisSet;
use shardwright_plan::{Context, PlanError};
use shardwright_space::{Assignment, Config};
use task_graph::TaskGraph;

/// No task, no number.
const NONE: u32 = u32::MAX;

/// Why a step cannot be simulated change by change.
#[derive(Debug, thiserror::Error)]
pub enum DeltaError {
    /// Too many levels, or too many device classes.
    #[error(
        "{levels} levels and the axes that ops may be pinned along are more than delta simulation tells pinned"
    )]
    DeviceClasses {
        /// Levels of the machine.
        levels: usize,
    },
    /// A pin along another axis, or another number of configs than ops.
    #[error(
        "delta simulation wants one config for each of {ops} ops, pinned only along the axes that it was made for"
    )]
    Configs {
        /// Ops of the graph.
        ops: usize,
    },
    /// A step in micro-batches.
    #[error(
        "a step of {count} micro-batches is not simulated change by change: choose `exact`, `pase`, `optcnn`, `auto` or a recipe"
    )]
    MicroBatches {
        /// Their number.
        count: u32,
    },
    /// An op with too many operands or results.
    #[error("op `{op}` has too many operands or results for delta simulation")]
    TooWide {
        /// The op.
        op: String,
    },
    /// A tensor that cannot be laid out under a config.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Operator times are not available.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

/// The step of a context under one config per op, simulated change by change.
pub struct Delta<'p> {
    task_graph: TaskGraph<'p>,
    timeline: DeltaTimeline,
}

impl<'p> Delta<'p> {
    /// Simulates a step without pins from scratch.
    ///
    /// # Errors
    /// Where delta simulation does not support the machine or the configs.
    pub fn new(context: &'p Context<'p>, assignment: &Assignment) -> Result<Self, DeltaError> {
        Self::with_pins(context, assignment, AxisSet::EMPTY)
    }

    /// Simulates a step from scratch whose ops may be pinned along some axes. Every digit of these axes is simulated
    /// separately.
    ///
    /// # Errors
    /// Where delta simulation does not support the machine or the configs.
    pub fn with_pins(
        context: &'p Context<'p>,
        assignment: &Assignment,
        pinned: AxisSet,
    ) -> Result<Self, DeltaError> {
        let count = context.graph.micro_batches.get();
        if count > 1 {
            return Err(DeltaError::MicroBatches { count });
        }
        let levels = context.machine.levels().len();
        let device_classes =
            DeviceClasses::new(context.mesh(), levels, pinned).ok_or(DeltaError::DeviceClasses { levels })?;
        let ops = context.graph.ops.len();
        let configs = &assignment.configs;
        if configs.len() != ops || configs.iter().any(|config| device_classes.of_config(config).is_none()) {
            return Err(DeltaError::Configs { ops });
        }
        if let Some(node) =
            context.graph.ops.iter().find(|n| n.inputs.len() > 50_000 || n.outputs.len() > 2000)
        {
            return Err(DeltaError::TooWide { op: node.name.clone() });
        }
        let mut task_graph = TaskGraph::new(context, context.times()?, assignment, device_classes)?;
        let timeline = DeltaTimeline::new(&task_graph);
        task_graph.commit();
        Ok(Self { task_graph, timeline })
    }

    /// The number that identifies a config of an op in proposals.
    pub fn number(&mut self, op: usize, config: &Config) -> u32 {
        if self.task_graph.device_classes().of_config(config).is_none() {
            return NONE;
        }
        self.task_graph.number(op, config)
    }

    /// Picoseconds of the step, including a pending proposal.
    pub fn makespan(&self) -> u64 {
        self.timeline.makespan()
    }

    /// Changes the configs of ops, given as pairs of op and config number; returns the new makespan. Call
    /// [`Delta::accept`] or [`Delta::reject`] before the next proposal.
    ///
    /// # Errors
    /// Where a tensor cannot be laid out.
    pub fn propose(&mut self, changes: &[(u32, u32)]) -> Result<u64, DeltaError> {
        if changes.iter().any(|&(_, number)| number == NONE) {
            return Err(DeltaError::Configs { ops: self.task_graph.ops() });
        }
        if let Err(error) = self.task_graph.change(changes) {
            self.task_graph.undo();
            return Err(error.into());
        }
        Ok(self.timeline.retime(&self.task_graph))
    }

    /// Accepts the proposal.
    pub fn accept(&mut self) {
        self.timeline.accept(&self.task_graph);
        self.task_graph.commit();
    }

    /// Undoes the proposal.
    pub fn reject(&mut self) {
        self.task_graph.undo();
        self.timeline.reject();
    }

    /// The assignment, including a pending proposal.
    pub fn assignment(&self) -> Assignment {
        Assignment::new((0..self.task_graph.ops()).map(|op| self.task_graph.config(op).clone()).collect())
    }

    /// The number of an op's config, including a pending proposal.
    pub fn chosen(&self, op: usize) -> u32 {
        self.task_graph.chosen(op)
    }

    /// The numbers of all ops' configs.
    pub fn numbers(&self, out: &mut Vec<u32>) {
        out.clear();
        out.extend((0..self.task_graph.ops()).map(|op| self.task_graph.chosen(op)));
    }

    /// The op's config with a number.
    pub fn config(&self, op: usize, number: u32) -> &Config {
        self.task_graph.config_of(op, number)
    }

    /// The ops on the critical path: those that compute on it, and those that it fetches operands for.
    pub fn critical_ops(&self) -> Vec<usize> {
        self.timeline.critical_path(&self.task_graph).map(|task| self.task_graph.op_of(task)).collect()
    }

    /// All tasks, in the form of the full simulation.
    pub fn tasks(&self) -> Tasks {
        to_tasks(&self.task_graph, &self.task_graph.tasks()).0
    }

    /// Rebuilds and simulates all tasks: the cost of a proposal without delta simulation.
    pub fn simulate_anew(&mut self) -> u64 {
        // All layouts have been valid before, so rebuilding cannot fail.
        let rebuilt = self.task_graph.rebuild_all();
        debug_assert!(rebuilt.is_ok(), "every layout has been valid before");
        Timeline::of(&self.tasks()).makespan()
    }

    /// Per op, in the graph's order: its end on the last device.
    pub fn op_ends(&self) -> Vec<u64> {
        let end = |op| self.task_graph.tasks_of(op).map(|task| self.timeline.end(task)).max().unwrap_or(0);
        (0..self.task_graph.ops()).map(end).collect()
    }

    /// Number of tasks, without a pending proposal.
    pub fn task_count(&self) -> usize {
        self.timeline.len()
    }

    /// Number of tasks that all proposals together have timed.
    pub fn steps(&self) -> u64 {
        self.timeline.steps
    }
}
