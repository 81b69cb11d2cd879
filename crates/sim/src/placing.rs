//! `place`: whole layers on single devices, partitioned by their costs, then improved on the simulated step.
//!
//! [`shardwright_place`] makes placements in several ways from what layers compute, hold and exchange. The simulator says
//! which of them are short steps; from the shortest, layers move from device to device as FlexFlow's search would move
//! them, where every choice of a layer is a device. The plain placements that others are measured by (everything on one
//! device, layers in turn, pieces of the order) are among those that are compared, so that none is ever better.

use crate::{
    delta::DeltaError,
    error::SimError,
    mcmc::{Limits, mcmc},
    moves::Moves,
    step::simulate_step,
};
use rayon::prelude::*;
use shardwright_cost::Collective;
use shardwright_graph::{Phase, Role};
use shardwright_machine::{AxisSet, Bytes, DeviceId, Machine};
use shardwright_place::{Axis, Candidate, Devices, Flow, Items, Link, candidates, measure};
use shardwright_plan::{
    Demands, Found, PlacementRow, PlanError, Problem, evaluate, peak, picoseconds,
    strategy::{Space, Strategy},
};
use shardwright_search::{Control, StopReason};
use shardwright_space::{AxisUse, Config};

/// Whole layers on devices.
pub static PLACE: Strategy = Strategy {
    name: "place",
    about: "whole layers on devices: partitioned for balance and little communication, improved on the simulated step",
    space: Space::Whole,
    solver: None,
};

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

/// A plan, and the placements that it was compared with.
pub(crate) struct Placed {
    pub found: Found,
    pub rows: Vec<PlacementRow>,
}

/// A placement and what it means.
#[derive(Clone)]
struct Tried {
    candidate: Candidate,
    configs: Vec<Config>,
    makespan: u64,
    peak: Bytes,
}

/// The config of an op on one device.
pub(crate) fn pinned(problem: &Problem<'_>, device: u32) -> Config {
    let mesh = problem.mesh();
    Config::new(mesh.all().iter().map(|axis| AxisUse::Pin(mesh.digit(DeviceId(device), axis) as u16)))
}

/// The problem's layers as items.
pub(crate) fn items(problem: &Problem<'_>, kinds: &[u32]) -> Result<Items, PlanError> {
    let (graph, times) = (problem.graph, problem.times()?);
    // A device of each kind.
    let most = kinds.iter().max().copied().unwrap_or(0);
    let examples = (0..=most).filter_map(|kind| kinds.iter().position(|&own| own == kind));
    let examples: Vec<Config> = examples.map(|device| pinned(problem, device as u32)).collect();
    let mut all: Vec<(Vec<u64>, u64)> = problem
        .variables
        .splits
        .iter()
        .map(|split| {
            let time = |config: &Config| {
                let of =
                    |&op: &shardwright_graph::OpId| u64::try_from(times.compute(op, config)).unwrap_or(0);
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
        if let (true, Some(home)) = (kept, problem.transfers.homes[t.index()]) {
            let held = &mut all[problem.variables.part(home.op)].1;
            *held = held.saturating_add(tensor.ty.bytes());
        }
    }
    let flow = |transfer: &shardwright_plan::Transfer| {
        let [from, to] = [transfer.from, transfer.to].map(|end| problem.variables.part(end.op) as u32);
        Flow { from, to, bytes: graph.tensor(transfer.tensor).ty.bytes() }
    };
    Ok(Items::new(&all, problem.transfers.all.iter().map(flow)))
}

/// Per device: which of the machine's kinds it is, the first device being of kind 0.
fn kinds(problem: &Problem<'_>) -> Vec<u32> {
    let machine = problem.machine;
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

/// The problem's devices, and the links between them as messages see them.
fn devices(problem: &Problem<'_>, kinds: &[u32], limit: Option<Bytes>) -> Devices {
    let comm = problem.relayouts.comm();
    let axes = problem.mesh().all().iter().map(|axis| {
        let seconds =
            |bytes| picoseconds(comm.seconds(Collective::Send, AxisSet::of(axis), Bytes(bytes))) as u64;
        let latency = seconds(0);
        let per_byte = seconds(MANY).saturating_sub(latency) as f64 / MANY as f64;
        Axis { size: problem.mesh().axis(axis).size, link: Link { latency, per_byte } }
    });
    Devices::new(&axes.collect::<Vec<_>>(), |device| {
        let own = problem.machine.device(DeviceId(device)).memory.0;
        (kinds[device as usize], limit.map_or(own, |limit| limit.0.min(own)))
    })
}

/// Placements of the problem's layers on its devices.
struct Placing<'p> {
    problem: &'p Problem<'p>,
    moves: Moves<'p>,
    kinds: Vec<u32>,
    items: Items,
    /// What a device may hold: what it has, or less if somebody says so.
    limit: Bytes,
    balance: f64,
}

impl<'p> Placing<'p> {
    fn new(problem: &'p Problem<'p>, demands: &Demands) -> Result<Self, SimError> {
        let kinds = kinds(problem);
        let own = problem.machine.slowest().memory;
        let items = items(problem, &kinds)?;
        Ok(Self {
            problem,
            moves: Moves::whole(problem, |device| pinned(problem, device), items.clusters()),
            items,
            kinds,
            limit: demands.memory.map_or(own, |limit| Bytes(limit.0.min(own.0))),
            balance: demands.balance.unwrap_or(BALANCE),
        })
    }

    /// What counts: what does not fit, then time.
    fn worth(&self, tried: &Tried) -> (u64, u64) {
        (tried.peak.0.saturating_sub(self.limit.0), tried.makespan)
    }

    /// A placement with its simulated step.
    fn simulate(&self, candidate: Candidate) -> Result<Tried, SimError> {
        let configs = self.moves.plan(&candidate.place);
        let makespan = simulate_step(self.problem, &configs)?.makespan;
        Ok(Tried { candidate, makespan, peak: peak(self.problem, &configs), configs })
    }

    fn simulate_all(&self, all: Vec<Candidate>) -> Result<Vec<Tried>, SimError> {
        all.into_par_iter().map(|candidate| self.simulate(candidate)).collect()
    }

    /// Placements made in several ways, and the one that is known already, the best first.
    fn compared(&self, devices: &Devices, known: Option<Candidate>) -> Result<Vec<Tried>, SimError> {
        let mut all = candidates(&self.items, devices, self.balance);
        all.extend(known);
        let mut tried = self.simulate_all(all)?;
        // What items hold is an estimate: copies and gradients come on top. So some room is left, until something fits.
        for part in ROOM {
            if tried.iter().any(|tried| tried.peak <= self.limit) {
                break;
            }
            let less = Bytes((self.limit.0 as f64 * part) as u64);
            let tighter = self::devices(self.problem, &self.kinds, Some(less));
            let mut more = candidates(&self.items, &tighter, f64::INFINITY);
            more.retain(|candidate| !candidate.baseline);
            tried.extend(self.simulate_all(more)?);
        }
        tried.sort_by_key(|tried| self.worth(tried));
        Ok(tried)
    }

    /// The best that can be found by moving layers on from the best placements.
    fn walk_on(&self, tried: &[Tried], control: &Control<'_>) -> Result<Option<Tried>, SimError> {
        let mut starts: Vec<Vec<Config>> = Vec::new();
        for tried in tried {
            if starts.len() < STARTS && !starts.contains(&tried.configs) {
                starts.push(tried.configs.clone());
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
            pins: self.problem.mesh().all(),
            heat: (wanted <= LEAST_PROPOSALS).then_some(HEAT),
        };
        let chains = match mcmc(self.problem, &self.moves, &starts, &limits, control) {
            // More devices than are told apart change by change.
            Err(DeltaError::Lanes { .. }) => Vec::new(),
            chains => chains?,
        };
        let named = |configs| {
            let place = self.moves.choices(configs);
            Candidate { name: PLACE.name.to_string(), baseline: false, place }
        };
        let found = chains.iter().map(|chain| self.simulate(named(&chain.configs)));
        let found: Vec<Tried> = found.collect::<Result<_, SimError>>()?;
        Ok(found.into_iter().min_by_key(|tried| self.worth(tried)))
    }
}

/// What came of placing layers on a machine.
struct Stage {
    items: Items,
    devices: Devices,
    /// The best first.
    tried: Vec<Tried>,
    /// The same, and what was found by moving on from there.
    best: Option<Tried>,
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
fn staged(problem: &Problem<'_>, demands: &Demands, control: &Control<'_>) -> Result<Stage, SimError> {
    let parts: Vec<Machine> = parts(problem.machine).collect();
    let mut known: Option<Candidate> = None;
    for (nth, part) in parts.iter().enumerate() {
        let mesh = part.mesh().clone();
        let smaller = Problem::bare(problem.graph, part, problem.costs(), mesh, problem.untied)?;
        let share = control.share((parts.len() + 1 - nth) as u32);
        let best = stage(&smaller, demands, &share, known.take())?.best;
        known = best.map(|best| Candidate {
            name: format!("{} on {}", PLACE.name, part.devices()),
            ..best.candidate
        });
    }
    stage(problem, demands, control, known)
}

/// Places layers on a machine.
fn stage(
    problem: &Problem<'_>,
    demands: &Demands,
    control: &Control<'_>,
    known: Option<Candidate>,
) -> Result<Stage, SimError> {
    let placing = Placing::new(problem, demands)?;
    let devices = devices(problem, &placing.kinds, demands.memory);
    let tried = placing.compared(&devices, known)?;
    let walked = if control.iterations == Some(0) { None } else { placing.walk_on(&tried, control)? };
    let best = tried.first().cloned().into_iter().chain(walked).min_by_key(|tried| placing.worth(tried));
    Ok(Stage { items: placing.items, devices, tried, best })
}

/// The best placement without moving anything on: a plan to start from for those who search on.
pub(crate) fn start(problem: &Problem<'_>, demands: &Demands) -> Result<Vec<Config>, SimError> {
    let best = staged(problem, demands, &Control::new().iteration_limit(0))?.best;
    Ok(best.map(|best| best.configs).unwrap_or_default())
}

/// Places whole layers on devices.
pub(crate) fn place(
    problem: &Problem<'_>,
    demands: &Demands,
    control: &Control<'_>,
) -> Result<Placed, SimError> {
    let Stage { items, devices, tried, best } = staged(problem, demands, control)?;
    let Some(Tried { candidate, makespan, peak, configs }) = best else {
        let reason = "there is nothing to place".to_string();
        return Err(PlanError::NoPlan { solver: PLACE.name.into(), reason }.into());
    };
    if let Some(limit) = demands.memory.filter(|&limit| peak > limit) {
        let error = PlanError::DoesNotFit {
            solver: PLACE.name.into(),
            limit: limit.0,
            least: Some(peak.0),
            floor: 0,
            proved: false,
        };
        return Err(error.into());
    }
    for wish in &demands.wishes {
        wish.check(problem, &configs)?;
    }
    let row = |name: &str, baseline, makespan: u64, peak: Bytes, place: &[u32]| {
        let measured = measure(&items, &devices, place);
        PlacementRow {
            name: name.to_string(),
            baseline,
            step_seconds: makespan as f64 / 1e12,
            cut_bytes: measured.cut_bytes,
            imbalance: measured.imbalance,
            peak_memory_bytes: peak.0,
        }
    };
    let own = row(PLACE.name, false, makespan, peak, &candidate.place);
    let others = tried
        .iter()
        .map(|t| row(&t.candidate.name, t.candidate.baseline, t.makespan, t.peak, &t.candidate.place));
    let rows = [own].into_iter().chain(others).collect();
    let objective = evaluate(problem, &configs)?.objective();
    let stopped = Control { iterations: None, ..control.clone() }.stop(0);
    let stop_reason = stopped.unwrap_or(StopReason::Exhausted);
    Ok(Placed { found: Found { configs, objective, bound: 0, stop_reason, moved: None }, rows })
}
