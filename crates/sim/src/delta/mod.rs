//! Delta simulation: the step's new makespan after a change of configs, without simulating the whole step.
//!
//! FlexFlow's idea (arXiv 1807.05358, section 5.3): a change rebuilds only the tasks that it affects, and times only
//! the tasks after them. The result of [`Delta`] equals [`crate::Timeline`]'s for the lowered program without joined
//! all-reduces, to the bit. Property tests check this.
//!
//! A step of several micro-batches has the tasks of its first ones, as [`crate::simulate_step`] simulates it. Where there are more,
//! a second simulation with one micro-batch fewer says by how much each further one lengthens the step.
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
mod unrolled;

use crate::step::{SIMULATED, with_further};
use crate::{Tasks, Timeline};
use delta_timeline::{DeltaTimeline, to_tasks};
use device_classes::DeviceClasses;
use shardwright_cost::LayoutError;
use shardwright_graph::Graph;
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
    /// A pipeline, whose schedule orders the passes.
    #[error("a step with a pipeline is not simulated change by change: simulate its plan as a whole")]
    Pipeline,
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
    graph: &'p Graph,
    simulation: Simulation<'p>,
    /// The step with one micro-batch fewer, and the number of micro-batches that neither simulates.
    fewer: Option<(Simulation<'p>, u64)>,
}

/// The tasks of some micro-batches, and their times.
struct Simulation<'p> {
    task_graph: TaskGraph<'p>,
    timeline: DeltaTimeline,
}

impl<'p> Simulation<'p> {
    fn new(
        context: &'p Context<'p>,
        assignment: &Assignment,
        device_classes: DeviceClasses,
        copies: u32,
    ) -> Result<Self, DeltaError> {
        let mut task_graph = TaskGraph::new(context, context.times()?, assignment, device_classes, copies)?;
        let timeline = DeltaTimeline::new(&task_graph);
        task_graph.commit();
        Ok(Self { task_graph, timeline })
    }

    /// Picoseconds of the step, and of computing on the class that computes longest.
    fn times(&self) -> [u64; 2] {
        [self.timeline.makespan(), self.task_graph.busy()]
    }

    fn propose(&mut self, changes: &[(u32, u32)]) -> Result<(), DeltaError> {
        if let Err(error) = self.task_graph.change(changes) {
            self.task_graph.undo();
            return Err(error.into());
        }
        self.timeline.retime(&self.task_graph);
        Ok(())
    }

    fn accept(&mut self) {
        self.timeline.accept(&self.task_graph);
        self.task_graph.commit();
    }

    fn reject(&mut self) {
        self.task_graph.undo();
        self.timeline.reject();
    }

    fn tasks(&self) -> Tasks {
        to_tasks(&self.task_graph, &self.task_graph.tasks()).0
    }

    /// Rebuilds and simulates all tasks: the times without delta simulation.
    fn simulate_anew(&mut self) -> [u64; 2] {
        // All layouts have been valid before, so rebuilding cannot fail.
        let rebuilt = self.task_graph.rebuild_all();
        debug_assert!(rebuilt.is_ok(), "every layout has been valid before");
        [Timeline::of(&self.tasks()).makespan(), self.task_graph.busy()]
    }
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
        if assignment.pipeline.is_some() {
            return Err(DeltaError::Pipeline);
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
        let count = context.graph.micro_batches.get();
        let copies = count.min(SIMULATED);
        let simulation = Simulation::new(context, assignment, device_classes.clone(), copies)?;
        let fewer = match count - copies {
            0 => None,
            further => {
                let fewer = Simulation::new(context, assignment, device_classes, copies - 1)?;
                Some((fewer, u64::from(further)))
            }
        };
        Ok(Self { graph: context.graph, simulation, fewer })
    }

    /// All simulations; the first one has all tasks that any has.
    fn all(&mut self) -> impl Iterator<Item = &mut Simulation<'p>> {
        std::iter::once(&mut self.simulation).chain(self.fewer.as_mut().map(|(fewer, _)| fewer))
    }

    /// The step from the times of its simulations.
    fn step([makespan, busy]: [u64; 2], fewer: Option<([u64; 2], u64)>) -> u64 {
        let Some(([makespan_before, busy_before], further)) = fewer else { return makespan };
        // Further micro-batches may fill gaps, but a device still computes its ops in sequence.
        with_further(makespan, makespan_before, further).max(with_further(busy, busy_before, further))
    }

    /// The number that identifies a config of an op in proposals.
    pub fn number(&mut self, op: usize, config: &Config) -> u32 {
        if self.simulation.task_graph.device_classes().of_config(config).is_none() {
            return NONE;
        }
        let number = self.simulation.task_graph.number(op, config);
        if let Some((fewer, _)) = &mut self.fewer {
            let same = fewer.task_graph.number(op, config);
            debug_assert_eq!(same, number, "both simulations have met the same configs");
        }
        number
    }

    /// Picoseconds of the step, including a pending proposal.
    pub fn makespan(&self) -> u64 {
        Self::step(
            self.simulation.times(),
            self.fewer.as_ref().map(|(fewer, further)| (fewer.times(), *further)),
        )
    }

    /// Changes the configs of ops, given as pairs of op and config number; returns the new makespan. Call
    /// [`Delta::accept`] or [`Delta::reject`] before the next proposal.
    ///
    /// # Errors
    /// Where a tensor cannot be laid out.
    pub fn propose(&mut self, changes: &[(u32, u32)]) -> Result<u64, DeltaError> {
        if changes.iter().any(|&(_, number)| number == NONE) {
            return Err(DeltaError::Configs { ops: self.graph.ops.len() });
        }
        self.simulation.propose(changes)?;
        if let Some((fewer, _)) = &mut self.fewer
            && let Err(error) = fewer.propose(changes)
        {
            self.simulation.reject();
            return Err(error);
        }
        Ok(self.makespan())
    }

    /// Accepts the proposal.
    pub fn accept(&mut self) {
        self.all().for_each(Simulation::accept);
    }

    /// Undoes the proposal.
    pub fn reject(&mut self) {
        self.all().for_each(Simulation::reject);
    }

    /// The assignment, including a pending proposal.
    pub fn assignment(&self) -> Assignment {
        let task_graph = &self.simulation.task_graph;
        let configs = (0..task_graph.ops()).map(|op| task_graph.config(op).clone()).collect();
        Assignment::of(self.graph, configs)
    }

    /// The number of an op's config, including a pending proposal.
    pub fn chosen(&self, op: usize) -> u32 {
        self.simulation.task_graph.chosen(op)
    }

    /// The numbers of all ops' configs.
    pub fn numbers(&self, out: &mut Vec<u32>) {
        out.clear();
        out.extend((0..self.graph.ops.len()).map(|op| self.chosen(op)));
    }

    /// The op's config with a number.
    pub fn config(&self, op: usize, number: u32) -> &Config {
        self.simulation.task_graph.config_of(op, number)
    }

    /// The ops on the critical path: those that compute on it, and those that it fetches operands for.
    pub fn critical_ops(&self) -> Vec<usize> {
        let Simulation { task_graph, timeline } = &self.simulation;
        timeline.critical_path(task_graph).map(|task| task_graph.op_of(task)).collect()
    }

    /// All tasks of the simulated micro-batches, in the form of the full simulation.
    pub fn tasks(&self) -> Tasks {
        self.simulation.tasks()
    }

    /// Rebuilds and simulates all tasks: the cost of a proposal without delta simulation.
    pub fn simulate_anew(&mut self) -> u64 {
        let times = self.simulation.simulate_anew();
        let fewer = self.fewer.as_mut().map(|(fewer, further)| (fewer.simulate_anew(), *further));
        Self::step(times, fewer)
    }

    /// Per op, in the graph's order: its end on the last device, in the last micro-batch that is simulated.
    pub fn op_ends(&self) -> Vec<u64> {
        let Simulation { task_graph, timeline } = &self.simulation;
        let end = |op| task_graph.tasks_of(op).map(|task| timeline.end(task)).max().unwrap_or(0);
        (0..task_graph.ops()).map(end).collect()
    }

    /// Number of tasks, without a pending proposal.
    pub fn task_count(&self) -> usize {
        self.simulation.timeline.len() + self.fewer.as_ref().map_or(0, |(fewer, _)| fewer.timeline.len())
    }

    /// Number of tasks that all proposals together have timed.
    pub fn steps(&self) -> u64 {
        self.simulation.timeline.steps + self.fewer.as_ref().map_or(0, |(fewer, _)| fewer.timeline.steps)
    }
}
