//! The search problem: the choices of every variable with their costs, and the network over them.
//!
//! Tied, a variable is a layer and a choice is a config of its forward op ([`shardwright_space::LayerSplit`] gives the configs
//! of the other ops). Untied, every op is a variable. An op is then offered all its configs, and those that it has in a tied
//! layer, so that every tied plan is an untied plan of the same cost.
//!
//! Unary costs: the time of the variable's ops on one device, halo exchanges, and transfers inside the variable (in a
//! layer: a weight's gradient on its way to the update, the all-reduce of data parallelism). Pairwise costs: transfers
//! between variables, forward and backward. All costs are picoseconds and nothing overlaps: the objective of OptCNN and PaSE.

use crate::{
    context::Context,
    error::PlanError,
    pricer::{Pricer, constrained_configs, tied_configs},
    transfer_times::TransferTimes,
};
use rustc_hash::FxHashSet;
use shardwright_cost::CostFile;
use shardwright_graph::{Graph, OpId, Rule};
use shardwright_machine::{Machine, Mesh};
use shardwright_search::{Control, Network};
use shardwright_space::{Assignment, Config, SearchMesh};
use std::sync::Arc;

/// The most configs of an op before axes are merged: the size of tables is the square of it.
pub const MOST_CONFIGS: usize = 512;
/// The most axes before some are merged: up to this number all reshard paths are found exactly.
pub const MOST_AXES: usize = 4;

/// One config per op of a variable, with its cost.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The configs of the ops.
    pub configs: Vec<Config>,
    /// Time of the ops on one device.
    pub compute: i64,
    /// Time of halo exchanges and of reshards inside the variable.
    pub comm: i64,
}

/// The choices of a variable, shared by all variables of a class.
pub type Choices = Arc<[Choice]>;

/// The choices of all variables, and the network over them.
pub struct SearchProblem<'a> {
    /// The graph on the mesh that is searched.
    pub context: Arc<Context<'a>>,
    /// Per variable: its choices.
    pub choices: Vec<Choices>,
    /// The network, without memory limits.
    pub network: Network,
}

/// A part of the space: a mesh, and some configs of every variable's leading op on it.
pub struct Candidates {
    /// The mesh.
    pub mesh: Mesh,
    /// Per variable: configs of its leading op.
    pub configs: Vec<Vec<Config>>,
}

impl<'a> SearchProblem<'a> {
    /// The problem of choosing per layer; operator times are measured ones where `costs` has them.
    ///
    /// # Errors
    /// Where the graph has no ops, the costs are of another device, or an op has too many configs.
    pub fn new(
        graph: &'a Graph,
        machine: &'a Machine,
        costs: Option<&'a CostFile>,
    ) -> Result<Self, PlanError> {
        Self::of_graph(graph, machine, costs, false)
    }

    /// The problem of choosing per op: weights, gradients and optimizer state have separate layouts.
    ///
    /// # Errors
    /// As [`SearchProblem::new`].
    pub fn untied(
        graph: &'a Graph,
        machine: &'a Machine,
        costs: Option<&'a CostFile>,
    ) -> Result<Self, PlanError> {
        Self::of_graph(graph, machine, costs, true)
    }

    fn of_graph(
        graph: &'a Graph,
        machine: &'a Machine,
        costs: Option<&'a CostFile>,
        untied: bool,
    ) -> Result<Self, PlanError> {
        let context = Context::new(graph, machine, costs, machine.mesh().clone(), untied)?;
        Self::within(&context, untied, &Control::new())
    }

    /// The problem of choosing per layer, or per op, for a context's graph and machine, unless `control` stops the building.
    /// Axes are merged until the tables fit the memory that `control` allows.
    ///
    /// # Errors
    /// As [`SearchProblem::new`], or where `control` stops.
    pub fn within(context: &Context<'a>, untied: bool, control: &Control<'_>) -> Result<Self, PlanError> {
        let prime = context.with(context.machine.mesh().clone(), untied);
        let build = |most_configs| {
            let search_mesh = search_mesh(&prime, most_configs)?;
            let mut merged = prime.on(search_mesh.mesh.clone());
            merged.search_mesh = search_mesh;
            Self::priced(Arc::new(merged), None, control)
        };
        let mut most_configs = MOST_CONFIGS;
        let mut built = build(most_configs);
        while matches!(built, Err(PlanError::TooLarge { .. })) {
            most_configs /= 2;
            built = match build(most_configs) {
                // The tables of the coarsest mesh are too large.
                Err(PlanError::TooManyConfigs { .. }) => return built,
                other => other,
            };
        }
        built
    }

    /// The problem of choosing among some configs, unless `control` stops the building.
    ///
    /// # Errors
    /// As [`SearchProblem::within`].
    pub fn among(
        context: &Context<'a>,
        candidates: Candidates,
        control: &Control<'_>,
    ) -> Result<Self, PlanError> {
        let mut near = context.on(candidates.mesh);
        near.search_mesh.most_configs = candidates.configs.iter().map(Vec::len).max().unwrap_or(1);
        Self::priced(Arc::new(near), Some(&candidates.configs), control)
    }

    /// Prices all choices, or the candidates.
    fn priced(
        context: Arc<Context<'a>>,
        candidates: Option<&[Vec<Config>]>,
        control: &Control<'_>,
    ) -> Result<Self, PlanError> {
        let (choices, network) = {
            let times = context.times_on_slowest(context.mesh())?;
            let tied = if context.untied && candidates.is_none() {
                tied_configs(&context, times.kinds())
            } else if candidates.is_none() {
                constrained_configs(&context)
            } else {
                Vec::new()
            };
            let pricer = Pricer { context: &context, times, control };
            let transfer_times = TransferTimes::new(context.graph, &context.resharder);
            let (choices, classes) = pricer.choices(&transfer_times, candidates, &tied)?;
            let network = pricer.network(&transfer_times, &choices, &classes)?;
            (choices, network)
        };
        Ok(Self { context, choices, network })
    }

    /// The config of a variable's leading op (a layer's forward op) under a choice.
    pub fn forward_config(&self, variable: usize, choice: u32) -> &Config {
        let variables = &self.context.variables;
        let (_, member) = variables.index[variables.members[variable].forward().index()];
        &self.choices[variable][choice as usize].configs[member as usize]
    }

    /// Whether an assignment is one of the problem's: every variable has one of its choices.
    pub fn contains(&self, assignment: &Assignment) -> bool {
        self.choices.iter().zip(&self.context.variables.members).all(|(choices, split)| {
            let own = |configs: &[Config]| {
                split.ops.iter().zip(configs).all(|(&op, config)| assignment.config(op) == config)
            };
            choices.iter().any(|choice| own(&choice.configs))
        })
    }

    /// The assignment of one choice per variable.
    pub fn assignment(&self, choices: &[u32]) -> Assignment {
        let chosen = |&(variable, member): &(u32, u32)| {
            let choice = &self.choices[variable as usize][choices[variable as usize] as usize];
            choice.configs[member as usize].clone()
        };
        Assignment::of(self.context.graph, self.context.variables.index.iter().map(chosen).collect())
    }
}

/// The finest mesh on which every variable has few enough configs.
fn search_mesh(context: &Context<'_>, most_configs: usize) -> Result<SearchMesh, PlanError> {
    let Context { graph, machine, shapes, .. } = context;
    let mut seen: FxHashSet<&Rule> = FxHashSet::default();
    let leading = || context.variables.members.iter().map(|variable| variable.forward());
    let rules: Vec<&Rule> =
        leading().map(|op| &shapes[op.index()].rule).filter(|&rule| seen.insert(rule)).collect();
    let found = SearchMesh::choose(machine, rules.iter().copied(), MOST_AXES, most_configs);
    if found.most_configs <= most_configs {
        return Ok(found);
    }
    let count =
        |op: OpId| shardwright_space::count_configs(&shapes[op.index()].rule, &found.mesh, most_configs);
    let worst = leading().find(|&op| count(op) > most_configs);
    debug_assert!(worst.is_some(), "some op exceeds the limit");
    Err(PlanError::TooManyConfigs {
        op: worst.map_or_else(String::new, |op| graph.node(op).name.clone()),
        most: most_configs,
        levels: machine.levels().len(),
        machine: machine.name().to_string(),
    })
}
