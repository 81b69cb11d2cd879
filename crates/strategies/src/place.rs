//! `place`: whole layers on single devices, partitioned by their costs, then improved on the simulated step.
//!
//! [`shardwright_place`] makes placements in several ways from the layers' computing, memory and transfers. The simulator ranks
//! them. From the shortest steps, layers move from device to device in Markov chains, where every choice of a layer is a
//! device. The plain placements (everything on one device, layers in turn, pieces of the order) are among the candidates, so
//! that none is ever better.

use crate::{
    Planner, Solution, Strategy,
    chain::{Limits, run_chains},
    error::StrategyError,
    moves::Moves,
};
use rayon::prelude::*;
use shardwright_cost::Collective;
use shardwright_graph::{OpId, Phase, Role};
use shardwright_machine::{AxisSet, Bytes, DeviceId, Machine};
use shardwright_place::{Axis, Candidate, Devices, Flow, Items, Link, candidates, measure};
use shardwright_plan::{Constraints, Context, Optimised, PlacementRow, PlanError, peak, picoseconds};
use shardwright_search::{Control, StopReason};
use shardwright_sim::{DeltaError, SimulatedStep, simulate_step};
use shardwright_space::{Assignment, AxisUse, Config, Transfer};

/// The strategy `place`.
pub struct Place;

const NAME: &str = "place";

/// By how much a device may have more than its share of the work, unless the caller says otherwise.
const BALANCE: f64 = 0.1;
/// From so many of the best different placements layers are moved on.
const STARTS: usize = 3;
/// Proposals of a walk: as many for each layer and device, and so many at least and at most.
const PER_CHOICE: u64 = 50;
const LEAST_PROPOSALS: u64 = 5_000;
const MOST_PROPOSALS: u64 = 60_000;
/// What a walk over few choices takes where it sets out: a layer that goes elsewhere before those that it hangs together with makes the step longer
/// first. Where there are many choices, there is no time for that.
const HEAT: f64 = 0.05;
/// Parts of the memory that items may take where nothing fits otherwise.
const ROOM: [f64; 5] = [0.85, 0.7, 0.55, 0.4, 0.25];
/// Bytes by which links are measured: many, so that latency is little.
const MANY: u64 = 1 << 30;

/// A placement with its simulated step.
#[derive(Clone)]
struct SimulatedPlacement {
    candidate: Candidate,
    assignment: Assignment,
    step: SimulatedStep,
    peak: Bytes,
}

/// The config of an op on one device.
pub(crate) fn pinned(context: &Context<'_>, device: u32) -> Config {
    let mesh = context.mesh();
    Config::new(mesh.all().iter().map(|axis| AxisUse::Pin(mesh.digit(DeviceId(device), axis) as u16)))
}

/// The most choices of all layers together, one per device: with more, partitions alone take minutes.
const MOST_CHOICES: usize = 1 << 18;

/// Whether there are few enough layers and devices.
pub(crate) fn is_small(context: &Context<'_>) -> bool {
    context.variables.members.len().saturating_mul(context.mesh().devices() as usize) <= MOST_CHOICES
}

/// The layers as items.
pub(crate) fn items(context: &Context<'_>, kinds: &[u32]) -> Result<Items, PlanError> {
    let (graph, times) = (context.graph, context.times()?);
    // A device of each kind.
    let most = kinds.iter().max().copied().unwrap_or(0);
    let examples = (0..=most).filter_map(|kind| kinds.iter().position(|&own| own == kind));
    let examples: Vec<Config> = examples.map(|device| pinned(context, device as u32)).collect();
    let mut all: Vec<(Vec<u64>, u64)> = context
        .variables
        .members
        .iter()
        .map(|split| {
            let time = |config: &Config| {
                let of = |&op: &OpId| {
                    let once = u64::try_from(times.compute(op, config)).unwrap_or(0);
                    once.saturating_mul(graph.runs(op).into())
                };
                split.ops.iter().map(of).sum()
            };
            (examples.iter().map(time).collect(), 0)
        })
        .collect();
    // What is there all step long, and what the forward pass leaves to the backward pass; gradients come and go.
    for t in graph.tensor_ids() {
        let tensor = graph.tensor(t);
        let kept = match tensor.producer {
            None => true,
            Some(op) => tensor.role == Role::Activation && graph.node(op).phase == Phase::Forward,
        };
        if let (true, Some(source)) = (kept, context.transfers.sources[t.index()]) {
            let held = &mut all[context.variables.variable_of(source.op)].1;
            *held = held.saturating_add(tensor.ty.bytes());
        }
    }
    let flow = |transfer: &Transfer| {
        let [from, to] = [transfer.from, transfer.to].map(|end| context.variables.variable_of(end.op) as u32);
        let bytes = graph.tensor(transfer.tensor).ty.bytes();
        Flow { from, to, bytes: bytes.saturating_mul(graph.runs(transfer.to.op).into()) }
    };
    Ok(Items::new(&all, context.transfers.pairs.iter().map(flow)))
}

/// Per device: which of the machine's kinds it is, the first device being of kind 0.
fn kinds(context: &Context<'_>) -> Vec<u32> {
    let machine = context.machine;
    let mut known = Vec::new();
    let kind = |device: u32| {
        let device = machine.device(DeviceId(device));
        let at = known.iter().position(|other| *other == device).unwrap_or_else(|| {
            known.push(device);
            known.len() - 1
        });
        at as u32
    };
    (0..machine.devices()).map(kind).collect()
}

/// The devices, and the links between them as messages see them.
fn devices(context: &Context<'_>, kinds: &[u32], limit: Option<Bytes>) -> Devices {
    let comm = context.resharder.comm();
    let axes = context.mesh().all().iter().map(|axis| {
        let seconds =
            |bytes| picoseconds(comm.seconds(Collective::Send, AxisSet::of(axis), Bytes(bytes))) as u64;
        let latency = seconds(0);
        let per_byte = seconds(MANY).saturating_sub(latency) as f64 / MANY as f64;
        Axis { size: context.mesh().axis(axis).size, link: Link { latency, per_byte } }
    });
    Devices::new(&axes.collect::<Vec<_>>(), |device| {
        let own = context.machine.device(DeviceId(device)).memory.0;
        (kinds[device as usize], limit.map_or(own, |limit| limit.0.min(own)))
    })
}

/// Placements of layers on devices.
struct Placing<'p> {
    context: &'p Context<'p>,
    moves: Moves<'p>,
    kinds: Vec<u32>,
    items: Items,
    /// What a device may hold: what it has, or less if somebody says so.
    limit: Bytes,
    balance: f64,
}

impl<'p> Placing<'p> {
    fn new(context: &'p Context<'p>, constraints: &Constraints) -> Result<Self, StrategyError> {
        let kinds = kinds(context);
        let own = context.machine.slowest().memory;
        let items = items(context, &kinds)?;
        Ok(Self {
            context,
            moves: Moves::whole(context, |device| pinned(context, device), items.clusters()),
            items,
            kinds,
            limit: constraints.memory.map_or(own, |limit| Bytes(limit.0.min(own.0))),
            balance: constraints.balance.unwrap_or(BALANCE),
        })
    }

    /// What counts: what does not fit, then time.
    fn worth(&self, tried: &SimulatedPlacement) -> (u64, u64) {
        (tried.peak.0.saturating_sub(self.limit.0), tried.step.makespan)
    }

    /// A placement with its simulated step.
    fn simulate(&self, candidate: Candidate) -> Result<SimulatedPlacement, StrategyError> {
        let assignment = self.moves.assignment(&candidate.place);
        let step = simulate_step(self.context, &assignment)?;
        Ok(SimulatedPlacement { candidate, step, peak: peak(self.context, &assignment), assignment })
    }

    /// Simulates placements until the time is up; the last one in any case.
    fn simulate_all(
        &self,
        all: Vec<Candidate>,
        control: &Control<'_>,
    ) -> Result<Vec<SimulatedPlacement>, StrategyError> {
        let last = all.len().saturating_sub(1);
        let all = all.into_par_iter().enumerate().filter(|(nth, _)| *nth == last || !control.is_over());
        all.map(|(_, candidate)| self.simulate(candidate)).collect()
    }

    /// Placements made in several ways, and the one that is known already, the best first.
    fn compared(
        &self,
        devices: &Devices,
        known: Option<Candidate>,
        control: &Control<'_>,
    ) -> Result<Vec<SimulatedPlacement>, StrategyError> {
        let mut all = candidates(&self.items, devices, self.balance);
        all.extend(known);
        let mut tried = self.simulate_all(all, control)?;
        // What items hold is an estimate: copies and gradients come on top. So some room is left, until something fits.
        for part in ROOM {
            if control.is_over() || tried.iter().any(|tried| tried.peak <= self.limit) {
                break;
            }
            let less = Bytes((self.limit.0 as f64 * part) as u64);
            let tighter = self::devices(self.context, &self.kinds, Some(less));
            let mut more = candidates(&self.items, &tighter, f64::INFINITY);
            more.retain(|candidate| !candidate.baseline);
            tried.extend(self.simulate_all(more, control)?);
        }
        tried.sort_by_key(|tried| self.worth(tried));
        Ok(tried)
    }

    /// The best that can be found by moving layers on from the best placements.
    fn walk_on(
        &self,
        tried: &[SimulatedPlacement],
        control: &Control<'_>,
    ) -> Result<Option<SimulatedPlacement>, StrategyError> {
        let mut starts: Vec<Assignment> = Vec::new();
        for tried in tried {
            if starts.len() < STARTS && !starts.contains(&tried.assignment) {
                starts.push(tried.assignment.clone());
            }
        }
        let tight = tried.iter().any(|tried| tried.peak > self.limit);
        let wanted = PER_CHOICE * self.moves.total() as u64;
        let most = wanted.clamp(LEAST_PROPOSALS, MOST_PROPOSALS);
        let limits = Limits {
            proposals: control.iterations.unwrap_or(most),
            // Asking what a device holds takes longer than a proposal: only where it could matter.
            memory: tight.then_some(self.limit),
            fixed: Vec::new(),
            pins: self.context.mesh().all(),
            heat: (wanted <= LEAST_PROPOSALS).then_some(HEAT),
            ends_idle: false,
        };
        let chains = match run_chains(self.context, &self.moves, &starts, &limits, control) {
            // More device classes than delta simulation supports.
            Err(DeltaError::DeviceClasses { .. }) => Vec::new(),
            chains => chains?,
        };
        let named = |assignment| {
            let place = self.moves.choices(assignment);
            Candidate { name: NAME.to_string(), baseline: false, place }
        };
        let found = chains.iter().map(|chain| self.simulate(named(&chain.assignment)));
        let found: Vec<SimulatedPlacement> = found.collect::<Result<_, StrategyError>>()?;
        Ok(found.into_iter().min_by_key(|tried| self.worth(tried)))
    }
}

/// What came of placing layers on a machine.
struct Stage {
    items: Items,
    devices: Devices,
    /// The best first.
    tried: Vec<SimulatedPlacement>,
    /// The same, and what was found by moving on from there.
    best: Option<SimulatedPlacement>,
}

/// The parts of a machine that are tried before all of it: its first devices, as far as ever more of its axes reach.
fn parts(machine: &Machine) -> impl Iterator<Item = Machine> {
    let axes = machine.mesh().axes();
    let sizes = axes.iter().skip(1).rev().scan(1u64, |devices, axis| {
        *devices *= u64::from(axis.size);
        Some(*devices)
    });
    let sizes: Vec<u64> = sizes.collect();
    sizes.into_iter().filter_map(|devices| machine.restrict(devices).ok())
}

/// Places layers on the machine's first devices, then on ever more of them, each time from the best that is known: more devices may cost
/// more transfers than they are worth, and a walk among few finds more than one among many.
fn staged(
    context: &Context<'_>,
    constraints: &Constraints,
    control: &Control<'_>,
) -> Result<Stage, StrategyError> {
    if !is_small(context) {
        let (layers, devices) = (context.variables.members.len(), context.mesh().devices());
        let reason = format!(
            "{layers} layers on {devices} devices are more than {MOST_CHOICES} choices; plan for fewer devices (--machine NAME:K)"
        );
        return Err(PlanError::NoPlan { solver: NAME.into(), reason }.into());
    }
    let parts: Vec<Machine> = parts(context.machine).collect();
    let mut known: Option<Candidate> = None;
    for (nth, part) in parts.iter().enumerate() {
        if control.is_over() {
            break;
        }
        let mesh = part.mesh().clone();
        let smaller = Context::new(context.graph, part, context.costs(), mesh, context.untied)?;
        let share = control.share((parts.len() + 1 - nth) as u32);
        let best = stage(&smaller, constraints, &share, known.take())?.best;
        known =
            best.map(|best| Candidate { name: format!("{NAME} on {}", part.devices()), ..best.candidate });
    }
    stage(context, constraints, control, known)
}

/// Places layers on a machine.
fn stage(
    context: &Context<'_>,
    constraints: &Constraints,
    control: &Control<'_>,
    known: Option<Candidate>,
) -> Result<Stage, StrategyError> {
    let placing = Placing::new(context, constraints)?;
    let devices = devices(context, &placing.kinds, constraints.memory);
    let tried = placing.compared(&devices, known, control)?;
    let walked = if control.iterations == Some(0) { None } else { placing.walk_on(&tried, control)? };
    let best = tried.first().cloned().into_iter().chain(walked).min_by_key(|tried| placing.worth(tried));
    Ok(Stage { items: placing.items, devices, tried, best })
}

/// No placement of whole layers takes less time: picoseconds of the longest path of ops, each on its fastest device, or of an
/// equal share of all ops, if that is more.
pub(crate) fn longest_path(context: &Context<'_>) -> Result<u64, PlanError> {
    let (graph, times, kinds) = (context.graph, context.times()?, kinds(context));
    let most = kinds.iter().max().copied().unwrap_or(0);
    let examples = (0..=most).filter_map(|kind| kinds.iter().position(|&own| own == kind));
    let examples: Vec<Config> = examples.map(|device| pinned(context, device as u32)).collect();
    let (mut ready, mut longest, mut total) = (vec![0u64; graph.tensors.len()], 0u64, 0u64);
    for op in graph.op_ids() {
        let node = graph.node(op);
        let least = examples.iter().map(|config| times.compute(op, config)).min();
        let least = least.and_then(|least| u64::try_from(least).ok()).unwrap_or(0);
        let start = node.inputs.iter().map(|t| ready[t.index()]).max().unwrap_or(0);
        let end = start.saturating_add(least);
        node.outputs.iter().for_each(|t| ready[t.index()] = end);
        (longest, total) = (longest.max(end), total.saturating_add(least));
    }
    Ok(longest.max(total / u64::from(context.machine.devices()).max(1)))
}

/// The best placement without moving layers on: a start for other searches. None if the time is up.
pub(crate) fn start(
    context: &Context<'_>,
    constraints: &Constraints,
    control: &Control<'_>,
) -> Result<Option<Assignment>, StrategyError> {
    if control.is_over() {
        return Ok(None);
    }
    let still = Control { iterations: Some(0), progress: None, ..control.clone() };
    let best = staged(context, constraints, &still)?.best;
    Ok(best.map(|best| best.assignment))
}

impl Strategy for Place {
    fn name(&self) -> &'static str {
        NAME
    }

    fn about(&self) -> &'static str {
        "whole layers on devices: graph partitioning, improved on the simulated step"
    }

    fn optimises(&self) -> Optimised {
        Optimised::Simulated
    }

    fn searches_within_memory(&self) -> bool {
        true
    }

    fn takes_proposals(&self) -> bool {
        true
    }

    fn solve<'a>(
        &self,
        planner: &Planner<'a>,
        constraints: &Constraints,
        control: &Control<'_>,
    ) -> Result<Solution<'a>, StrategyError> {
        let context = planner.prime()?;
        let Stage { items, devices, tried, best } = staged(&context, constraints, control)?;
        let Some(best) = best else {
            let reason = "there is nothing to place".to_string();
            return Err(PlanError::NoPlan { solver: NAME.into(), reason }.into());
        };
        if let Some(limit) = constraints.memory.filter(|&limit| best.peak > limit) {
            let stop = control.stop_by_time();
            let error = PlanError::NotFound {
                solver: NAME.into(),
                limit: limit.0,
                least: Some(best.peak.0),
                lower_bound: 0,
                stop: stop.unwrap_or(StopReason::Exhausted),
            };
            return Err(error.into());
        }
        let row = |name: &str, placement: &SimulatedPlacement| {
            let Candidate { baseline, place, .. } = &placement.candidate;
            let measured = measure(&items, &devices, place);
            PlacementRow {
                name: name.to_string(),
                baseline: *baseline,
                step_seconds: placement.step.times.step_seconds,
                cut_bytes: measured.cut_bytes,
                imbalance: measured.imbalance,
                peak_memory_bytes: placement.peak.0,
            }
        };
        let own = PlacementRow { baseline: false, ..row(NAME, &best) };
        let others = tried.iter().map(|placement| row(&placement.candidate.name, placement));
        let stopped = control.stop_by_time();
        // Every layer may go on every device.
        let choices = context.variables.members.len() * context.mesh().devices() as usize;
        let solution = Solution::new(context.clone(), best.assignment, self.optimises())?;
        let solution = Solution {
            placements: [own].into_iter().chain(others).collect(),
            stop_reason: stopped.unwrap_or(StopReason::Exhausted),
            step: Some(best.step),
            choices,
            ..solution
        };
        solution.checked(constraints, NAME)
    }
}
