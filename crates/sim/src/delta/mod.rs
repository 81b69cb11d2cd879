//! Delta simulation: what one op's change of config does to the step, without simulating everything anew.
//!
//! FlexFlow's idea (arXiv 1807.05358, section 5.3): after a change, rebuild only the tasks that it concerns and
//! time only what comes after them. What [`Delta`]
//! finds is what [`crate::Timeline`] finds for the lowered program without joined all-reduces, to the bit, which
//! property tests hold it to. `network` keeps the tasks, `walk` the times, `line` a timeline by position; `parts` and `ways` remember what configs and
//! re-layouts mean, so that a proposal neither hashes nor allocates once everything has been met.
//!
//! ```
//! use shardwright_frontend::zoo::{BuildOptions, build};
//! use shardwright_machine::builtin;
//! use shardwright_plan::{Problem, strategy};
//! use shardwright_sim::Delta;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let graph = build("mlp:batch=64,hidden=1024,layers=3", &BuildOptions::default())?;
//! let machine = builtin("flat:4")?;
//! let problem = Problem::new(&graph, &machine, None)?;
//! let last = |choices: &shardwright_plan::Choices| choices.len() as u32 - 1;
//! let repeated = problem.configs(&problem.choices.iter().map(last).collect::<Vec<_>>());
//! let mut delta = Delta::new(&problem, &repeated)?;
//! let before = delta.makespan();
//! // The first layer's ops, split in the first way that there is.
//! let ops = &problem.variables.splits[0].ops;
//! let configs = ops.iter().zip(&problem.choices[0][0].configs);
//! let change: Vec<_> = configs.map(|(op, config)| (op.0, delta.number(op.index(), config))).collect();
//! let after = delta.propose(&change)?;
//! assert_eq!(after, delta.simulate_anew());
//! delta.reject();
//! assert_eq!(delta.makespan(), before);
//! # Ok(())
//! # }
//! ```

mod edges;
mod lanes;
mod line;
mod network;
mod parts;
mod structure;
mod walk;
mod ways;

use crate::{Tasks, Timeline};
use lanes::Lanes;
use network::Network;
use shardwright_cost::LayoutError;
use shardwright_machine::AxisSet;
use shardwright_plan::{PlanError, Problem};
use shardwright_space::Config;
use walk::{Walk, to_tasks};

/// No task, no number.
const NONE: u32 = u32::MAX;

/// Why a step cannot be simulated change by change.
#[derive(Debug, thiserror::Error)]
pub enum DeltaError {
    /// Too many levels, or too many devices that pins tell apart.
    #[error(
        "{levels} levels and the axes that ops may be pinned along are more than delta simulation tells apart"
    )]
    Lanes {
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
    /// An op with too many operands or results.
    #[error("op `{op}` has too many operands or results for delta simulation")]
    TooWide {
        /// The op.
        op: String,
    },
    /// A tensor that cannot be laid out as a config says.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Operator times cannot be had.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

/// The step of a problem under one config per op, simulated change by change.
pub struct Delta<'p> {
    network: Network<'p>,
    walk: Walk,
}

impl<'p> Delta<'p> {
    /// Simulates a step without pins from nothing.
    ///
    /// # Errors
    /// Where the machine or the configs are beyond it.
    pub fn new(problem: &'p Problem<'p>, configs: &[Config]) -> Result<Self, DeltaError> {
        Self::with_pins(problem, configs, AxisSet::EMPTY)
    }

    /// Simulates a step from nothing whose ops may be pinned along some axes; every digit of those is then simulated for
    /// itself.
    ///
    /// # Errors
    /// Where the machine or the configs are beyond it.
    pub fn with_pins(
        problem: &'p Problem<'p>,
        configs: &[Config],
        apart: AxisSet,
    ) -> Result<Self, DeltaError> {
        let levels = problem.machine.levels().len();
        let lanes = Lanes::new(problem.mesh(), levels, apart).ok_or(DeltaError::Lanes { levels })?;
        let ops = problem.graph.ops.len();
        if configs.len() != ops || configs.iter().any(|config| lanes.of_config(config).is_none()) {
            return Err(DeltaError::Configs { ops });
        }
        if let Some(node) =
            problem.graph.ops.iter().find(|n| n.inputs.len() > 50_000 || n.outputs.len() > 2000)
        {
            return Err(DeltaError::TooWide { op: node.name.clone() });
        }
        let mut network = Network::new(problem, problem.times()?, configs, lanes)?;
        let walk = Walk::new(&network);
        network.settle();
        Ok(Self { network, walk })
    }

    /// The number by which a proposal names a config of an op.
    pub fn number(&mut self, op: usize, config: &Config) -> u32 {
        if self.network.lanes().of_config(config).is_none() {
            return NONE;
        }
        self.network.number(op, config)
    }

    /// Picoseconds of the step, with the proposal that is pending.
    pub fn makespan(&self) -> u64 {
        self.walk.makespan()
    }

    /// Gives ops other configs, as pairs of op and the config's number; the new makespan. [`Delta::accept`] or
    /// [`Delta::reject`] it before the next.
    ///
    /// # Errors
    /// Where a tensor cannot be laid out so.
    pub fn propose(&mut self, changes: &[(u32, u32)]) -> Result<u64, DeltaError> {
        if changes.iter().any(|&(_, number)| number == NONE) {
            return Err(DeltaError::Configs { ops: self.network.ops() });
        }
        if let Err(error) = self.network.change(changes) {
            self.network.undo();
            return Err(error.into());
        }
        Ok(self.walk.weigh(&self.network))
    }

    /// The proposal stays.
    pub fn accept(&mut self) {
        self.walk.keep(&self.network);
        self.network.settle();
    }

    /// The proposal is undone.
    pub fn reject(&mut self) {
        self.network.undo();
        self.walk.go_back();
    }

    /// The config of every op, in the graph's order, with the proposal that is pending.
    pub fn configs(&self) -> Vec<Config> {
        (0..self.network.ops()).map(|op| self.network.config(op).clone()).collect()
    }

    /// The number of the config that an op has, with the proposal that is pending.
    pub fn chosen(&self, op: usize) -> u32 {
        self.network.chosen(op)
    }

    /// The numbers of all ops' configs.
    pub fn numbers(&self, out: &mut Vec<u32>) {
        out.clear();
        out.extend((0..self.network.ops()).map(|op| self.network.chosen(op)));
    }

    /// The config of an op that a number stands for.
    pub fn config(&self, op: usize, number: u32) -> &Config {
        self.network.config_of(op, number)
    }

    /// The ops that the critical path consists of: those that compute on it, and those that it fetches something for.
    pub fn critical_ops(&self) -> Vec<usize> {
        self.walk.critical_path(&self.network).map(|task| self.network.op_of(task)).collect()
    }

    /// All tasks as the full simulation takes them.
    pub fn tasks(&self) -> Tasks {
        to_tasks(&self.network, &self.network.tasks()).0
    }

    /// Makes all tasks anew and simulates all of them: what a proposal costs without delta simulation.
    pub fn simulate_anew(&mut self) -> u64 {
        // What could be made once can be made again.
        let _ = self.network.rebuild_all();
        Timeline::of(&self.tasks()).makespan()
    }

    /// When each op ends everywhere, in the graph's order.
    pub fn op_ends(&self) -> Vec<u64> {
        let end = |op| self.network.tasks_of(op).map(|task| self.walk.end(task)).max().unwrap_or(0);
        (0..self.network.ops()).map(end).collect()
    }

    /// How many tasks there are, without the proposal that is pending.
    pub fn task_count(&self) -> usize {
        self.walk.len()
    }

    /// How many tasks all proposals together have timed.
    pub fn steps(&self) -> u64 {
        self.walk.steps
    }
}
