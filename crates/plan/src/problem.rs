//! From graph and machine to the search problem: every variable's choices with their costs, and the network over them.
//!
//! Tied, a variable is a layer and a choice is a config of its forward op ([`shardwright_space::LayerSplit`] says what
//! the other ops do). Untied, every op is a variable of its own; it is offered all its configs, and those that it
//! would have in a tied layer, so that every tied plan is an untied one too and costs the same.
//! Unary: the time of all the variable's ops on one device, the exchange of windows' rows, and transfers inside it (of
//! a layer: a weight's gradient on its way to the update, the all-reduce of data parallelism).
//! Pairwise: transfers between variables, forwards and backwards ([`crate::transfer`] says who fetches what from where). All in picoseconds, nothing overlaps: the objective of OptCNN and PaSE.

use crate::{
    error::PlanError,
    groups::Groups,
    maker::{Maker, tied_configs},
    tables::Tables,
    times::OpTimes,
    transfer::Transfers,
};
use shardwright_cost::{CostFile, OperatorTimes, Relayouts};
use shardwright_graph::{Graph, OpId, Rule};
use shardwright_machine::{Device, Machine, Mesh};
use shardwright_search::{Control, Network, NetworkBuilder};
use shardwright_space::{Config, Grain, OpShapes};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The most configs that an op may have before axes are glued: tables have the square of it.
pub const MOST_CONFIGS: usize = 512;
/// The most axes before some are glued: up to here all re-layouts are found exactly.
pub const MOST_AXES: usize = 4;

/// One way to run the ops of a variable.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The configs of the ops.
    pub configs: Vec<Config>,
    /// Time of the ops on one device.
    pub compute: i64,
    /// Time of windows' exchanges and of re-layouts inside the variable.
    pub comm: i64,
}

/// The choices of a variable, shared by all that are alike.
pub type Choices = Arc<[Choice]>;

/// A graph, a machine, and all that can be chosen.
pub struct Problem<'a> {
    /// The training step.
    pub graph: &'a Graph,
    /// The machine.
    pub machine: &'a Machine,
    /// The axes that are searched over.
    pub grain: Grain,
    /// Rule and types of every op.
    pub shapes: Vec<OpShapes>,
    /// The layers.
    pub layers: Groups,
    /// The ops that choose together: the layers, or single ops.
    pub variables: Groups,
    /// Whether every op chooses for itself.
    pub untied: bool,
    /// The transfers.
    pub transfers: Transfers,
    /// Per variable: its choices.
    pub choices: Vec<Choices>,
    /// The search problem, without memory limits.
    pub network: Network,
    /// Re-layouts on the mesh.
    pub relayouts: Relayouts,
    costs: Option<&'a CostFile>,
    device: Device,
}

/// A part of the space: another mesh, and some configs of every variable's leading op on it.
pub struct Near {
    /// The mesh.
    pub mesh: Mesh,
    /// Per variable: configs of its leading op.
    pub candidates: Vec<Vec<Config>>,
}

/// How much of the space a problem is about.
enum Scope {
    /// All of it, on axes glued until no op has more than so many configs.
    All(usize),
    /// A part of it.
    Near(Near),
}

/// What every problem starts from, whatever its mesh.
struct Ground {
    device: Device,
    shapes: Vec<OpShapes>,
    layers: Groups,
    variables: Groups,
}

impl Ground {
    fn of(
        graph: &Graph,
        machine: &Machine,
        costs: Option<&CostFile>,
        untied: bool,
    ) -> Result<Self, PlanError> {
        if graph.ops.is_empty() {
            return Err(PlanError::Empty { model: graph.name.clone() });
        }
        let device = machine.slowest();
        // Costs of another device are refused before anything is priced.
        OperatorTimes::new(&device, costs)?;
        let shapes: Vec<OpShapes> = graph.op_ids().map(|op| OpShapes::of(graph, op)).collect();
        let layers = Groups::layers(graph, &shapes);
        let variables = if untied { Groups::ops(graph, &shapes) } else { layers.clone() };
        Ok(Self { device, shapes, layers, variables })
    }
}

impl<'a> Problem<'a> {
    /// The problem of choosing per layer; operator times are measured ones where `costs` has them.
    pub fn new(
        graph: &'a Graph,
        machine: &'a Machine,
        costs: Option<&'a CostFile>,
    ) -> Result<Self, PlanError> {
        Self::within(graph, machine, costs, false, &Control::new())
    }

    /// The problem of choosing per op: weights, gradients and optimizer state find their own layouts.
    pub fn untied(
        graph: &'a Graph,
        machine: &'a Machine,
        costs: Option<&'a CostFile>,
    ) -> Result<Self, PlanError> {
        Self::within(graph, machine, costs, true, &Control::new())
    }

    /// The problem of choosing per layer, or per op, unless `control` stops the building. Axes are glued until the tables
    /// fit the memory that it allows.
    pub fn within(
        graph: &'a Graph,
        machine: &'a Machine,
        costs: Option<&'a CostFile>,
        untied: bool,
        control: &Control<'_>,
    ) -> Result<Self, PlanError> {
        let build =
            |most_configs| Self::build(graph, machine, costs, untied, Scope::All(most_configs), control);
        let mut most_configs = MOST_CONFIGS;
        let mut built = build(most_configs);
        while matches!(built, Err(PlanError::TooLarge { .. })) {
            most_configs /= 2;
            built = match build(most_configs) {
                // Nothing is that coarse: the memory is what there is too little of.
                Err(PlanError::TooManyConfigs { .. }) => return built,
                other => other,
            };
        }
        built
    }

    /// The same problem on another mesh with only some configs, unless `control` stops the building.
    pub fn near(&self, near: Near, control: &Control<'_>) -> Result<Self, PlanError> {
        Self::build(self.graph, self.machine, self.costs, self.untied, Scope::Near(near), control)
    }

    /// The machine's prime axes with nothing to choose from: all that strategies need which do not search the
    /// network, however many devices there are.
    pub fn prime(
        graph: &'a Graph,
        machine: &'a Machine,
        costs: Option<&'a CostFile>,
    ) -> Result<Self, PlanError> {
        Self::bare(graph, machine, costs, machine.mesh().clone(), true)
    }

    /// A mesh with nothing to choose from: enough to evaluate and to simulate any assignment.
    pub fn bare(
        graph: &'a Graph,
        machine: &'a Machine,
        costs: Option<&'a CostFile>,
        mesh: Mesh,
        untied: bool,
    ) -> Result<Self, PlanError> {
        let Ground { device, shapes, layers, variables } = Ground::of(graph, machine, costs, untied)?;
        Ok(Self {
            graph,
            machine,
            variables,
            layers,
            untied,
            transfers: Transfers::of(graph),
            choices: Vec::new(),
            network: NetworkBuilder::new().build()?,
            relayouts: Relayouts::new(machine, &mesh),
            grain: Grain { prime: mesh.len() == machine.mesh().len(), mesh, most_configs: 0 },
            shapes,
            costs,
            device,
        })
    }

    /// Builds the problem, choices and tables and all.
    fn build(
        graph: &'a Graph,
        machine: &'a Machine,
        costs: Option<&'a CostFile>,
        untied: bool,
        scope: Scope,
        control: &Control<'_>,
    ) -> Result<Self, PlanError> {
        let Ground { device, shapes, layers, variables } = Ground::of(graph, machine, costs, untied)?;
        let rule_of = |op: OpId| &shapes[op.index()].rule;
        let mut seen = BTreeSet::new();
        let rules: Vec<&Rule> = variables
            .splits
            .iter()
            .map(|variable| rule_of(variable.forward()))
            .filter(|rule| seen.insert(rule.to_string()))
            .collect();
        let (grain, candidates) = match scope {
            Scope::Near(Near { mesh, candidates }) => {
                let prime = mesh.len() == machine.mesh().len();
                let most_configs = candidates.iter().map(Vec::len).max().unwrap_or(1);
                (Grain { mesh, prime, most_configs }, Some(candidates))
            }
            Scope::All(most_configs) => {
                let grain = Grain::choose(machine, rules.iter().copied(), MOST_AXES, most_configs);
                if grain.most_configs > most_configs {
                    return Err(too_many(graph, machine, &variables, &shapes, &grain.mesh));
                }
                (grain, None)
            }
        };
        let relayouts = Relayouts::new(machine, &grain.mesh);
        let transfers = Transfers::of(graph);
        let (choices, network) = {
            let times = OpTimes::new(OperatorTimes::new(&device, costs)?, graph, &shapes, &grain.mesh);
            let tied = if untied && candidates.is_none() {
                tied_configs(graph, &layers, &shapes, times.kinds(), &grain.mesh)
            } else {
                Vec::new()
            };
            let make = Maker {
                graph,
                variables: &variables,
                transfers: &transfers,
                shapes: &shapes,
                mesh: &grain.mesh,
                relayouts: &relayouts,
                times,
                control,
            };
            let tables = Tables::new(graph, &relayouts);
            let (choices, alike) = make.choices(&tables, candidates.as_deref(), &tied)?;
            let network = make.network(&tables, &choices, &alike)?;
            (choices, network)
        };
        Ok(Self {
            graph,
            machine,
            grain,
            shapes,
            layers,
            variables,
            untied,
            transfers,
            choices,
            network,
            relayouts,
            costs,
            device,
        })
    }

    /// The mesh whose axes configs speak of.
    pub fn mesh(&self) -> &Mesh {
        &self.grain.mesh
    }

    /// The cost file in use.
    pub fn costs(&self) -> Option<&'a CostFile> {
        self.costs
    }

    /// Times of ops.
    pub fn times(&self) -> Result<OpTimes<'_>, PlanError> {
        let times = OperatorTimes::new(&self.device, self.costs)?;
        Ok(OpTimes::new(times, self.graph, &self.shapes, &self.grain.mesh).on(self.machine, self.costs))
    }

    /// The config of a variable's leading op (a layer's forward op) under a choice.
    pub fn forward_config(&self, variable: usize, choice: u32) -> &Config {
        let (_, member) = self.variables.place[self.variables.splits[variable].forward().index()];
        &self.choices[variable][choice as usize].configs[member as usize]
    }

    /// The config of every op, in the graph's order, under one choice per variable.
    pub fn configs(&self, choices: &[u32]) -> Vec<Config> {
        let chosen = |&(variable, member): &(u32, u32)| {
            let choice = &self.choices[variable as usize][choices[variable as usize] as usize];
            choice.configs[member as usize].clone()
        };
        self.variables.place.iter().map(chosen).collect()
    }
}

fn too_many(
    graph: &Graph,
    machine: &Machine,
    variables: &Groups,
    shapes: &[OpShapes],
    mesh: &Mesh,
) -> PlanError {
    let count = |op: OpId| shardwright_space::count_configs(&shapes[op.index()].rule, mesh, MOST_CONFIGS);
    let worst = variables.splits.iter().map(|l| l.forward()).find(|&op| count(op) > MOST_CONFIGS);
    PlanError::TooManyConfigs {
        op: worst.map_or_else(String::new, |op| graph.node(op).name.clone()),
        most: MOST_CONFIGS,
        levels: machine.levels().len(),
        machine: machine.name().to_string(),
    }
}
