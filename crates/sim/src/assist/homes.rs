//! Help that lasts: between steps, layers of a device that is slower than planned get another home.
//!
//! Work that is handed over within a step ([`super::assist`]) brings its weights along every time. Where whole layers are on single devices, a layer
//! may as well move for good, weights and all. After every step, counters tell how much longer than planned each device was busy. As long as
//! one is clearly slower than another, the next step is run with a group of layers elsewhere, or with all layers of two devices exchanged: whatever promises
//! most, by what devices would then have to do. If that step is shorter, it stays so; otherwise all goes back, and that is not tried again.
//!
//! Promises alternate between two views, since nobody knows what a step waits for: evenly loaded devices (it waits for the busiest one), and
//! least work at devices' own paces (it waits for one layer after the other).

use crate::{
    error::SimError,
    moves::Moves,
    placing,
    schedule::Schedule,
    usage::{Usage, usages},
};
use shardwright_graph::{Role, TensorId};
use shardwright_place::TOLERATED;
use shardwright_plan::{Problem, peak};
use shardwright_space::Config;
use std::collections::BTreeSet;

/// On more devices than this nothing moves: there are too many places to go to.
const MOST_DEVICES: usize = 64;

/// Where layers went, and what that took.
#[derive(Clone, Debug, PartialEq)]
pub struct Homes {
    /// The config of every op.
    pub configs: Vec<Config>,
    /// Layers that are elsewhere than planned.
    pub layers: usize,
    /// Bytes of weights and state that moved with them, once.
    pub bytes: u64,
    /// Steps that were run to find out.
    pub steps: usize,
}

/// What counters tell after a step: per device, how many times as long as planned it was busy. Both schedules have every device by itself.
pub fn paces(planned: &Schedule, real: &Schedule) -> Vec<f64> {
    let [planned, real] = [planned, real].map(|schedule| usages(schedule, &schedule.simulate()));
    let pace = |(planned, real): (&Usage, &Usage)| {
        if planned.busy > 0 { real.busy as f64 / planned.busy as f64 } else { 1.0 }
    };
    planned.iter().zip(&real).map(pace).collect()
}

/// What may be tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Move {
    /// What of a group is on one device goes to another.
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

/// Layers that may move, and what devices have to do.
struct Loads<'p> {
    problem: &'p Problem<'p>,
    /// Per device: how many times as long as planned its work takes.
    paces: &'p [f64],
    /// Every layer on every device.
    moves: Moves<'p>,
    /// Per layer and device: picoseconds as planned.
    times: Vec<Vec<f64>>,
    /// Per layer: its device, if it is on one.
    home: Vec<Option<u32>>,
    /// Layers that may move together, single ones first.
    groups: Vec<Vec<u32>>,
}

impl<'p> Loads<'p> {
    fn new(problem: &'p Problem<'p>, configs: &[Config], paces: &'p [f64]) -> Result<Self, SimError> {
        let moves = Moves::whole(problem, |device| placing::pinned(problem, device), Vec::new());
        let (times, layers) = (problem.times()?, 0..problem.variables.splits.len());
        let on = |layer: usize, device: usize| moves.ops(layer).iter().zip(moves.configs(layer, device));
        let time = |layer: usize, device: usize| -> i64 {
            on(layer, device).map(|(&op, config)| times.compute(op, config)).sum()
        };
        let is_on =
            |layer: usize, device: usize| on(layer, device).all(|(op, own)| configs[op.index()] == *own);
        let devices = 0..paces.len();
        let times =
            layers.clone().map(|layer| devices.clone().map(|device| time(layer, device) as f64).collect());
        let home =
            |layer: usize| devices.clone().find(|&device| is_on(layer, device)).map(|device| device as u32);
        let singles = layers.clone().map(|layer| vec![layer as u32]);
        let groups = singles.chain(placing::items(problem, &[0])?.clusters()).collect();
        let (times, home) = (times.collect(), layers.clone().map(home).collect());
        Ok(Self { problem, paces, times, home, groups, moves })
    }

    /// Picoseconds of a layer on a device, as fast as that is.
    fn time(&self, layer: u32, device: u32) -> f64 {
        self.times[layer as usize][device as usize] * self.paces[device as usize]
    }

    /// Per device: picoseconds of its layers.
    fn loads(&self) -> Vec<f64> {
        let mut loads = vec![0.0; self.paces.len()];
        for (layer, home) in self.home.iter().enumerate() {
            if let &Some(home) = home {
                loads[home as usize] += self.time(layer as u32, home);
            }
        }
        loads
    }

    /// The layers that a move takes elsewhere, each with its new device.
    fn going(&self, go: Move) -> Vec<(u32, u32)> {
        let on = |layers: &mut dyn Iterator<Item = u32>, from, to| -> Vec<(u32, u32)> {
            layers.filter(|&layer| self.home[layer as usize] == Some(from)).map(|layer| (layer, to)).collect()
        };
        let all = || 0..self.home.len() as u32;
        match go {
            Move::Group { group, from, to } => on(&mut self.groups[group as usize].iter().copied(), from, to),
            Move::Exchange(a, b) => [on(&mut all(), a, b), on(&mut all(), b, a)].concat(),
        }
    }

    /// What a move promises: evener loads, or less work.
    fn promise(&self, go: Move, even: bool, loads: &[f64]) -> f64 {
        let (from, to) = go.ends();
        let (mut leaves, mut comes) = ([0.0; 2], [0.0; 2]);
        for (layer, goes) in self.going(go) {
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

    /// The move that promises most, exchanges before anything else; none where nothing promises anything that has not been tried.
    fn best(&self, even: bool, tried: &BTreeSet<Move>) -> Option<Move> {
        let loads = self.loads();
        let devices = 0..loads.len() as u32;
        let most = |moves: &mut dyn Iterator<Item = Move>| {
            let promises =
                moves.filter(|go| !tried.contains(go)).map(|go| (self.promise(go, even, &loads), go));
            promises
                .filter(|(promise, _)| *promise > 0.0)
                .max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)))
        };
        let mut exchanges = devices.clone().flat_map(|b| (0..b).map(move |a| Move::Exchange(a, b)));
        let mut groups = (0..self.groups.len() as u32).flat_map(|group| {
            let homes = self.groups[group as usize].iter().filter_map(|&layer| self.home[layer as usize]);
            let homes: BTreeSet<u32> = homes.collect();
            let to = |from| devices.clone().filter(move |&to| to != from).map(move |to| (from, to));
            homes.into_iter().flat_map(to).map(move |(from, to)| Move::Group { group, from, to })
        });
        let (_, go) = most(&mut exchanges).or_else(|| most(&mut groups))?;
        Some(go)
    }

    /// The configs with some layers elsewhere.
    fn moved(&self, configs: &[Config], going: &[(u32, u32)]) -> Vec<Config> {
        let mut configs = configs.to_vec();
        for &(layer, to) in going {
            let (layer, to) = (layer as usize, to as usize);
            for (op, own) in self.moves.ops(layer).iter().zip(self.moves.configs(layer, to)) {
                configs[op.index()] = own.clone();
            }
        }
        configs
    }

    /// Bytes of weights and state of a layer.
    fn bytes(&self, layer: usize) -> u64 {
        let graph = self.problem.graph;
        let kept = |t: &TensorId| {
            let tensor = graph.tensor(*t);
            tensor.producer.is_none() && matches!(tensor.role, Role::Parameter | Role::OptimizerState)
        };
        let own = graph.tensor_ids().filter(kept).filter(|t| {
            let home = self.problem.transfers.homes[t.index()];
            home.is_some_and(|home| self.problem.variables.part(home.op) == layer)
        });
        own.map(|t| graph.tensor(t).ty.bytes()).sum()
    }
}

/// Finds layers another home where devices take so many times as long as planned (`paces`), in so many steps at most; `run` runs a step and says how many
/// picoseconds it took.
///
/// # Errors
/// Where a step cannot be run.
pub fn homes(
    problem: &Problem<'_>,
    configs: &[Config],
    paces: &[f64],
    most_steps: usize,
    mut run: impl FnMut(&[Config]) -> Result<u64, SimError>,
) -> Result<Homes, SimError> {
    let mut found = Homes { configs: configs.to_vec(), layers: 0, bytes: 0, steps: 0 };
    let slowest = paces.iter().copied().fold(0.0, f64::max);
    let fastest = paces.iter().copied().fold(f64::INFINITY, f64::min);
    if most_steps == 0 || paces.len() > MOST_DEVICES || slowest <= TOLERATED * fastest {
        return Ok(found);
    }
    let mut loads = Loads::new(problem, configs, paces)?;
    let planned = loads.home.clone();
    let limit = peak(problem, configs).max(problem.machine.slowest().memory);
    let mut shortest = run(configs)?;
    let mut tried = BTreeSet::new();
    let mut even = true;
    while found.steps < most_steps {
        let Some(go) = loads.best(even, &tried).or_else(|| loads.best(!even, &tried)) else { break };
        even = !even;
        tried.insert(go);
        let going = loads.going(go);
        let moved = loads.moved(&found.configs, &going);
        if peak(problem, &moved) > limit {
            continue;
        }
        found.steps += 1;
        let step = run(&moved)?;
        if step < shortest {
            shortest = step;
            found.configs = moved;
            going.iter().for_each(|&(layer, to)| loads.home[layer as usize] = Some(to));
        }
    }
    let elsewhere = (0..planned.len()).filter(|&layer| loads.home[layer] != planned[layer]);
    let elsewhere: Vec<usize> = elsewhere.collect();
    found.layers = elsewhere.len();
    found.bytes = elsewhere.iter().map(|&layer| loads.bytes(layer)).sum();
    Ok(found)
}
