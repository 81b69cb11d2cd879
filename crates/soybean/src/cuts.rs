//! The recursion: cut the devices in two, then both halves in the same way, until every device is alone.
//!
//! The groups of devices after a cut are alike, so one of them stands for all: after `i` cuts every count is for one
//! of `2^i` groups, and the total is `Σ 2^(i-1) δ_i`. The first cut is made on the slowest axis, since the total
//! traffic of cuts grows from the first to the last.
//!
//! [`Objective::Time`] is ours, not the paper's: what moves is weighed by its bytes and by the links that it crosses.

use crate::{
    eliminate, levels,
    one_cut::{Answer, OneCut, Regions, Request},
    share::Tiling,
    step::{Step, Unit},
};
use shardwright_cost::{Collective, Comm};
use shardwright_graph::{Graph, TensorId};
use shardwright_machine::{AxisId, AxisSet, Bytes, Mesh};
use shardwright_search::{Control, NetworkError, StopReason};
use shardwright_space::{AxisUse, Config, OpShapes};

/// What a cut minimises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objective {
    /// Elements moved: the paper's.
    Elements,
    /// Seconds of moving them over the axis of the cut, one conversion after the other: each takes as long as an
    /// all-gather that brings every device its share of what moves. Latency counts, so small tensors
    /// are moved less often, and tensors of narrow elements are cheaper.
    Time,
}

/// Why there is no tiling.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SoyBeanError {
    /// Cuts are binary.
    #[error(
        "SoyBean cuts devices in two, again and again, and {devices} is not a power of two (axis {axis} has {size} devices); plan for fewer devices (`NAME:K`) or use another solver"
    )]
    NotBinary {
        /// How many devices there are.
        devices: u32,
        /// The axis that cannot be halved.
        axis: String,
        /// Its size.
        size: u32,
    },
    /// There must be a config for every op, with a use for every axis.
    #[error("{got} configs for {ops} ops, or not one use for each of {axes} axes in each")]
    Configs {
        /// How many configs were given.
        got: usize,
        /// How many ops there are.
        ops: usize,
        /// How many axes there are.
        axes: usize,
    },
    /// SoyBean always uses all devices.
    #[error("op `{op}` runs on one side of the machine only, which SoyBean's measure does not know")]
    Pinned {
        /// The op.
        op: String,
    },
    /// The search problem of a cut cannot be built.
    #[error("cut {cut} cannot be searched: {source}")]
    Network {
        /// Which cut, from one.
        cut: usize,
        /// Why not.
        source: NetworkError,
    },
    /// The search of a cut does not fit the memory.
    #[error("cut {cut} cannot be searched: {reason}")]
    Refused {
        /// Which cut, from one.
        cut: usize,
        /// What the solver said.
        reason: String,
    },
    /// The time ran out.
    #[error("the time ran out before cut {cut} had a tiling; give it more (--time)")]
    Time {
        /// Which cut, from one.
        cut: usize,
    },
}

/// What the cuts came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cuts {
    /// Elements that each cut moves in one of the groups that it cuts, first cut first.
    pub cuts: Vec<u64>,
    /// Per tensor: how each cut divides it.
    pub tilings: Vec<Vec<Tiling>>,
    /// Per op: which factor each axis splits.
    pub configs: Vec<Config>,
    /// Whether every cut moves the least that it can, given those before.
    pub proved: bool,
}

impl Cuts {
    /// Elements moved by all devices together: `Σ 2^(i-1) δ_i`.
    pub fn total_elements(&self) -> u64 {
        let weighed = self.cuts.iter().enumerate().map(|(i, &cut)| cut.saturating_mul(1 << i.min(63)));
        weighed.fold(0, u64::saturating_add)
    }
}

fn binary(mesh: &Mesh) -> Result<(), SoyBeanError> {
    match mesh.axes().iter().find(|axis| axis.size != 2) {
        None => Ok(()),
        Some(axis) => Err(SoyBeanError::NotBinary {
            devices: mesh.axes().iter().map(|a| a.size).product(),
            axis: axis.name.clone(),
            size: axis.size,
        }),
    }
}

/// The tilings that move the least, cut by cut.
///
/// `shapes` has rule and types of every op of the graph, in its order; every axis of `comm`'s mesh has size two.
///
/// # Errors
/// Where the devices are not a power of two, or the search of a cut ends without an answer.
pub fn solve(
    graph: &Graph,
    shapes: &[OpShapes],
    comm: &Comm,
    objective: Objective,
    control: &Control<'_>,
) -> Result<Cuts, SoyBeanError> {
    run(Step::new(graph, shapes, None), comm, objective, |_, _| None, control)
}

/// What given configs move by SoyBean's measure: their requests, with the best tilings for them.
///
/// The measure compares ways to do all work exactly once, so an op that a config repeats on an axis is counted as
/// split there in the way that moves the least.
///
/// # Errors
/// As [`solve`], and where an op is pinned.
pub fn count(
    graph: &Graph,
    shapes: &[OpShapes],
    comm: &Comm,
    configs: &[Config],
    control: &Control<'_>,
) -> Result<Cuts, SoyBeanError> {
    binary(comm.mesh())?;
    let (ops, axes) = (graph.ops.len(), comm.mesh().len());
    if configs.len() != ops || configs.iter().any(|config| config.uses().len() != axes) {
        return Err(SoyBeanError::Configs { got: configs.len(), ops, axes });
    }
    let pinned = |config: &Config| config.uses().iter().any(|used| matches!(used, AxisUse::Pin(_)));
    if let Some(at) = configs.iter().position(pinned) {
        return Err(SoyBeanError::Pinned { op: graph.ops[at].name.clone() });
    }
    let forced = |unit: &Unit, axis: AxisId| -> Option<Request> {
        let used = configs[unit.ops[0].index()].get(axis);
        let AxisUse::Split(factor) = used else { return None };
        unit.loops.iter().position(|l| l[0] == factor).map(|l| Some(l as u32))
    };
    run(Step::new(graph, shapes, Some(configs)), comm, Objective::Elements, forced, control)
}

fn run(
    step: Step<'_>,
    comm: &Comm,
    objective: Objective,
    forced: impl Fn(&Unit, AxisId) -> Option<Request>,
    control: &Control<'_>,
) -> Result<Cuts, SoyBeanError> {
    let mesh = comm.mesh();
    binary(mesh)?;
    let loss = step.graph.loss().and_then(|t| step.graph.tensor(t).producer);
    let root = step.units.iter().position(|unit| unit.ops.iter().any(|&op| Some(op) == loss)).unwrap_or(0);
    let mut regions = Regions::whole(&step);
    let mut found = Cuts {
        cuts: Vec::new(),
        tilings: vec![Vec::new(); step.graph.tensors.len()],
        configs: vec![Config::replicated(mesh.len()); step.graph.ops.len()],
        proved: true,
    };
    for (at, axis) in slowest_first(comm).into_iter().enumerate() {
        // So many pairs of devices share what is moved between the sides.
        let pairs = 1 << (mesh.len() - 1 - at);
        let cut = regions.cut(&step, |unit| forced(unit, axis), |_, elements| elements);
        let answer = match objective {
            Objective::Elements => best(&cut, root, at + 1, control)?,
            Objective::Time => {
                let bytes = |t: TensorId, elements: u64| {
                    elements.saturating_mul(step.graph.tensor(t).ty.dtype.bytes()).div_ceil(pairs)
                };
                let time = |t: TensorId, elements| picoseconds(comm, axis, bytes(t, elements));
                best(&regions.cut(&step, |unit| forced(unit, axis), time), root, at + 1, control)?
            }
        };
        let tiling = |group: u32| cut.tilings[group as usize][answer.tilings[group as usize] as usize];
        for (tilings, &group) in found.tilings.iter_mut().zip(&step.group) {
            tilings.push(tiling(group));
        }
        for ((unit, choice), &chosen) in step.units.iter().zip(&cut.units).zip(&answer.requests) {
            let Some(which) = choice.requests[chosen as usize] else { continue };
            for (op, &f) in unit.ops.iter().zip(&unit.loops[which as usize]) {
                found.configs[op.index()].set(axis, AxisUse::Split(f));
            }
        }
        for update in &step.updates {
            let rule = &step.shapes[update.op.index()].rule;
            let Tiling::Cut(dim) = tiling(update.group) else { continue };
            let led = rule.inputs.first().and_then(|map| rule.leading(map.dims.get(usize::from(dim))?));
            if let Some(f) = led {
                found.configs[update.op.index()].set(axis, AxisUse::Split(f));
            }
        }
        found.cuts.push(cut.cost(&answer));
        found.proved &= answer.proved;
        regions.narrow(&step, &cut, &answer);
    }
    Ok(found)
}

/// How long an all-gather of so many bytes takes along an axis, in all groups at once.
fn picoseconds(comm: &Comm, axis: AxisId, bytes: u64) -> u64 {
    if bytes == 0 {
        return 0;
    }
    (comm.seconds(Collective::AllGather, AxisSet::of(axis), Bytes(bytes)).0 * 1e12).round() as u64
}

/// The axes, slowest first; equals outermost first.
fn slowest_first(comm: &Comm) -> Vec<AxisId> {
    let mut axes: Vec<AxisId> = comm.mesh().all().iter().collect();
    // Large enough for bandwidth alone to matter.
    axes.sort_by_key(|&axis| std::cmp::Reverse(picoseconds(comm, axis, 1 << 30)));
    axes
}

/// By levels where they are narrow, else by elimination.
fn best(cut: &OneCut, root: usize, number: usize, control: &Control<'_>) -> Result<Answer, SoyBeanError> {
    if let Some(answer) = levels::solve(cut, root) {
        return Ok(answer);
    }
    let answer =
        eliminate::solve(cut, control).map_err(|source| SoyBeanError::Network { cut: number, source })?;
    answer.map_err(|reason| match reason {
        StopReason::Refused(reason) => SoyBeanError::Refused { cut: number, reason },
        _ => SoyBeanError::Time { cut: number },
    })
}
