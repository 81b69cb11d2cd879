//! Migration: between steps, layers of a slow device move to other devices for good.
//!
//! A task that is stolen within a step ([`shardwright_sim::assist`]) brings its weights along in every step. Where whole layers are on single
//! devices, a layer can migrate once, weights included. After every step, counters give each device's slowdown. While one device is clearly slower
//! than another, the next step runs with one more [`Move`]: a group of layers on another device, or all layers of two
//! devices exchanged. The move with the largest predicted gain is tried first. A shorter step keeps the move; otherwise it is undone and not
//! tried again.
//!
//! The gain alternates between two measures, since the critical path is unknown: evener loads (the step waits for the busiest
//! device), and less total work at each device's slowdown (the step waits for one layer after the other).

use crate::{error::StrategyError, moves::Moves, place};
use shardwright_assist::NOISE_RATIO;
use shardwright_graph::{Role, TensorId};
use shardwright_plan::{Context, peak};
use shardwright_sim::{Schedule, Usage, usages};
use shardwright_space::Assignment;
use std::collections::BTreeSet;

/// On more devices than this nothing migrates: the number of moves grows with its square.
const MAX_DEVICES: usize = 64;

/// The layers that migrated, and what that took.
#[derive(Clone, Debug, PartialEq)]
pub struct Migration {
    /// The assignment afterwards.
    pub assignment: Assignment,
    /// Number of layers on another device than planned.
    pub layers: usize,
    /// Bytes of weights and optimizer state that moved with them, once.
    pub bytes: u64,
    /// Number of trial steps.
    pub steps: usize,
}

/// Per device: actual over planned busy time of a step, 1 for a device without work. Both schedules have one class per device.
pub fn slowdowns(planned: &Schedule, real: &Schedule) -> Vec<f64> {
    let [planned, real] = [planned, real].map(|schedule| usages(schedule, &schedule.simulate()));
    let slowdown = |(planned, real): (&Usage, &Usage)| {
        if planned.busy > 0 { real.busy as f64 / planned.busy as f64 } else { 1.0 }
    };
    planned.iter().zip(&real).map(slowdown).collect()
}

/// A change that a trial step makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Move {
    /// The layers of a group on device `from` go to device `to`.
    Group { group: u32, from: u32, to: u32 },
    /// Two devices exchange all their layers.
    Exchange(u32, u32),
}

impl Move {
    fn ends(self) -> (u32, u32) {
        match self {
            Move::Group { from, to, .. } | Move::Exchange(from, to) => (from, to),
        }
    }
}

/// The layers that may move, and the load of each device.
struct Loads<'p> {
    context: &'p Context<'p>,
    /// Per device: actual over planned time.
    slowdowns: &'p [f64],
    /// The configs of every layer on every device.
    moves: Moves<'p>,
    /// Per layer and device: picoseconds as planned.
    times: Vec<Vec<f64>>,
    /// Per layer: its device; none where it is split over several.
    device: Vec<Option<u32>>,
    /// Groups of layers that may move together, single layers first.
    groups: Vec<Vec<u32>>,
}

impl<'p> Loads<'p> {
    fn new(
        context: &'p Context<'p>,
        assignment: &Assignment,
        slowdowns: &'p [f64],
    ) -> Result<Self, StrategyError> {
        let moves = Moves::whole(context, |device| place::pinned(context, device), Vec::new());
        let (times, layers) = (context.times()?, 0..context.variables.members.len());
        let on = |layer: usize, device: usize| moves.ops(layer).iter().zip(moves.configs(layer, device));
        let time = |layer: usize, device: usize| -> i64 {
            on(layer, device).map(|(&op, config)| times.compute(op, config)).sum()
        };
        let is_on =
            |layer: usize, device: usize| on(layer, device).all(|(op, own)| assignment.config(*op) == own);
        let devices = 0..slowdowns.len();
        let times =
            layers.clone().map(|layer| devices.clone().map(|device| time(layer, device) as f64).collect());
        let device =
            |layer: usize| devices.clone().find(|&device| is_on(layer, device)).map(|device| device as u32);
        let singles = layers.clone().map(|layer| vec![layer as u32]);
        let groups = singles.chain(place::items(context, &[0])?.clusters()).collect();
        let (times, device) = (times.collect(), layers.clone().map(device).collect());
        Ok(Self { context, slowdowns, times, device, groups, moves })
    }

    /// Predicted picoseconds of a layer on a device, slowdown included.
    fn time(&self, layer: u32, device: u32) -> f64 {
        self.times[layer as usize][device as usize] * self.slowdowns[device as usize]
    }

    /// Per device: predicted picoseconds of its layers.
    fn loads(&self) -> Vec<f64> {
        let mut loads = vec![0.0; self.slowdowns.len()];
        for (layer, device) in self.device.iter().enumerate() {
            if let &Some(device) = device {
                loads[device as usize] += self.time(layer as u32, device);
            }
        }
        loads
    }

    /// The layers of a move, each with its new device.
    fn layers_of(&self, change: Move) -> Vec<(u32, u32)> {
        let on = |layers: &mut dyn Iterator<Item = u32>, from, to| -> Vec<(u32, u32)> {
            layers
                .filter(|&layer| self.device[layer as usize] == Some(from))
                .map(|layer| (layer, to))
                .collect()
        };
        let all = || 0..self.device.len() as u32;
        match change {
            Move::Group { group, from, to } => on(&mut self.groups[group as usize].iter().copied(), from, to),
            Move::Exchange(a, b) => [on(&mut all(), a, b), on(&mut all(), b, a)].concat(),
        }
    }

    /// The predicted gain of a move: how much evener loads get (difference of squared picoseconds), or how much work is saved
    /// (picoseconds).
    fn gain(&self, change: Move, even: bool, loads: &[f64]) -> f64 {
        let (from, to) = change.ends();
        let (mut leaves, mut comes) = ([0.0; 2], [0.0; 2]);
        for (layer, goes) in self.layers_of(change) {
            let (back, old) = (usize::from(goes == from), if goes == from { to } else { from });
            leaves[back] += self.time(layer, old);
            comes[back] += self.time(layer, goes);
        }
        if !even {
            return leaves[0] + leaves[1] - comes[0] - comes[1];
        }
        let [a, b] = [from, to].map(|device| loads[device as usize]);
        a * a + b * b - (a - leaves[0] + comes[1]).powi(2) - (b - leaves[1] + comes[0]).powi(2)
    }

    /// The untried move with the largest gain, exchanges first; none where no untried move has a positive gain.
    fn best(&self, even: bool, tried: &BTreeSet<Move>) -> Option<Move> {
        let loads = self.loads();
        let devices = 0..loads.len() as u32;
        let most = |moves: &mut dyn Iterator<Item = Move>| {
            let gains = moves.filter(|go| !tried.contains(go)).map(|go| (self.gain(go, even, &loads), go));
            gains.filter(|(gain, _)| *gain > 0.0).max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)))
        };
        let mut exchanges = devices.clone().flat_map(|b| (0..b).map(move |a| Move::Exchange(a, b)));
        let mut groups = (0..self.groups.len() as u32).flat_map(|group| {
            let own = self.groups[group as usize].iter().filter_map(|&layer| self.device[layer as usize]);
            let own: BTreeSet<u32> = own.collect();
            let to = |from| devices.clone().filter(move |&to| to != from).map(move |to| (from, to));
            own.into_iter().flat_map(to).map(move |(from, to)| Move::Group { group, from, to })
        });
        most(&mut exchanges).or_else(|| most(&mut groups)).map(|(_, change)| change)
    }

    /// The assignment with some layers on new devices.
    fn moved(&self, assignment: &Assignment, layers: &[(u32, u32)]) -> Assignment {
        let mut assignment = assignment.clone();
        for &(layer, to) in layers {
            let (layer, to) = (layer as usize, to as usize);
            for (op, own) in self.moves.ops(layer).iter().zip(self.moves.configs(layer, to)) {
                assignment.configs[op.index()] = own.clone();
            }
        }
        assignment
    }

    /// Bytes of a layer's weights and optimizer state.
    fn bytes(&self, layer: usize) -> u64 {
        let graph = self.context.graph;
        let kept = |t: &TensorId| {
            let tensor = graph.tensor(*t);
            tensor.producer.is_none() && matches!(tensor.role, Role::Parameter | Role::OptimizerState)
        };
        let own = graph.tensor_ids().filter(kept).filter(|t| {
            let source = self.context.transfers.sources[t.index()];
            source.is_some_and(|source| self.context.variables.variable_of(source.op) == layer)
        });
        own.map(|t| graph.tensor(t).ty.bytes()).sum()
    }
}

/// Migrates layers off slow devices. `slowdowns[d]` is device d's measured over planned time. At most `max_steps` trial steps
/// are run through `run`, which returns a step's time in picoseconds.
///
/// # Errors
/// Where a step cannot be run.
pub fn migrate(
    context: &Context<'_>,
    assignment: &Assignment,
    slowdowns: &[f64],
    max_steps: usize,
    mut run: impl FnMut(&Assignment) -> Result<u64, StrategyError>,
) -> Result<Migration, StrategyError> {
    let mut migration = Migration { assignment: assignment.clone(), layers: 0, bytes: 0, steps: 0 };
    let slowest = slowdowns.iter().copied().fold(0.0, f64::max);
    let fastest = slowdowns.iter().copied().fold(f64::INFINITY, f64::min);
    if max_steps == 0 || slowdowns.len() > MAX_DEVICES || slowest <= NOISE_RATIO * fastest {
        return Ok(migration);
    }
    let mut loads = Loads::new(context, assignment, slowdowns)?;
    let planned = loads.device.clone();
    let limit = peak(context, assignment).max(context.machine.slowest().memory);
    let mut shortest = run(assignment)?;
    let mut tried = BTreeSet::new();
    let mut even = true;
    while migration.steps < max_steps {
        let Some(change) = loads.best(even, &tried).or_else(|| loads.best(!even, &tried)) else { break };
        even = !even;
        tried.insert(change);
        let layers = loads.layers_of(change);
        let moved = loads.moved(&migration.assignment, &layers);
        if peak(context, &moved) > limit {
            continue;
        }
        migration.steps += 1;
        let step = run(&moved)?;
        if step < shortest {
            shortest = step;
            migration.assignment = moved;
            layers.iter().for_each(|&(layer, to)| loads.device[layer as usize] = Some(to));
        }
    }
    let migrated: Vec<usize> =
        (0..planned.len()).filter(|&layer| loads.device[layer] != planned[layer]).collect();
    migration.layers = migrated.len();
    migration.bytes = migrated.iter().map(|&layer| loads.bytes(layer)).sum();
    Ok(migration)
}
