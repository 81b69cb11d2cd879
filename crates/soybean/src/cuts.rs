//! The recursion: cut the devices in two, then both halves in the same way, until every group is one device.
//!
//! All groups of devices after a cut are equal, so the program computes one of them. After `i` cuts there are `2^i`
//! groups, and the total traffic is `Σ 2^(i-1) δ_i`. The first cut uses the slowest axis, since the total traffic of a
//! cut grows from the first cut to the last.
//!
//! [`Objective::Time`] is an addition to the paper: it weighs traffic by bytes and by the links that it crosses.

use crate::{
    cut_layout::Tiling,
    eliminate, levels,
    one_cut::{CutSolution, OneCut, Regions, Request},
    tiling_graph::{TilingGraph, Unit},
};
use shardwright_cost::{Collective, Comm};
use shardwright_graph::{Graph, TensorId};
use shardwright_machine::{AxisId, AxisSet, Bytes, Mesh};
use shardwright_search::{Control, NetworkError, StopReason};
use shardwright_space::{AxisUse, Config, OpShapes};

/// The quantity that a cut minimises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objective {
    /// Elements moved, as in the paper.
    Elements,
    /// Seconds to move them over the axis of the cut, one conversion after the other. Each conversion takes as long as an
    /// all-gather of the moved bytes. Latency counts, so small tensors move less often; tensors of narrow elements are
    /// cheaper.
    Time,
}

/// Why there is no tiling.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SoyBeanError {
    /// Cuts are binary, so every axis must have size two.
    #[error(
        "SoyBean cuts the devices in two repeatedly, and {devices} is not a power of two (axis {axis} has {size} devices); plan for fewer devices (`NAME:K`) or use another solver"
    )]
    NotBinary {
        /// The number of devices.
        devices: u32,
        /// The axis that cannot be halved.
        axis: String,
        /// Its size.
        size: u32,
    },
    /// There must be one config per op, with one use per axis.
    #[error("expected {ops} configs (one per op) of {axes} axis uses each, got {got} configs")]
    Configs {
        /// The number of configs that were given.
        got: usize,
        /// The number of ops.
        ops: usize,
        /// The number of axes.
        axes: usize,
    },
    /// SoyBean always uses all devices.
    #[error("op `{op}` is pinned to one side of the machine, which SoyBean's measure cannot count")]
    Pinned {
        /// The op.
        op: String,
    },
    /// The cost network of a cut cannot be built.
    #[error("cut {cut} cannot be searched: {source}")]
    Network {
        /// Which cut, from one.
        cut: usize,
        /// Why not.
        source: NetworkError,
    },
    /// The solver refused a cut: its tables do not fit in memory.
    #[error("cut {cut} cannot be searched: {reason}")]
    Refused {
        /// Which cut, from one.
        cut: usize,
        /// The solver's reason.
        reason: String,
    },
    /// The time limit was reached.
    #[error("the time limit was reached before cut {cut} had a tiling; allow more time (--time)")]
    Time {
        /// Which cut, from one.
        cut: usize,
    },
}

/// The result of all cuts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cuts {
    /// Elements that each cut moves within one of the groups that it cuts, first cut first.
    pub cuts: Vec<u64>,
    /// Per tensor: its tiling at each cut.
    pub tilings: Vec<Vec<Tiling>>,
    /// Per op: the factor that each axis splits.
    pub configs: Vec<Config>,
    /// Whether every cut is proved optimal, given the cuts before it.
    pub proved: bool,
}

impl Cuts {
    /// Elements moved by all devices: `Σ 2^(i-1) δ_i`.
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

/// Finds the tilings that move the fewest elements, cut by cut.
///
/// `shapes` holds the rule and types of every op, in graph order. Every axis of `comm`'s mesh must have size two.
///
/// # Errors
/// If the number of devices is not a power of two, or the search of a cut ends without a solution.
pub fn solve(
    graph: &Graph,
    shapes: &[OpShapes],
    comm: &Comm,
    objective: Objective,
    control: &Control<'_>,
) -> Result<Cuts, SoyBeanError> {
    run(TilingGraph::new(graph, shapes, None), comm, objective, |_, _| None, control)
}

/// Counts the elements that given configs move by SoyBean's measure: the configs fix the requests, and the tilings are
/// chosen optimally for them.
///
/// The measure compares plans that do all work exactly once. So an op that a config replicates on an axis counts as
/// split there along its cheapest loop.
///
/// # Errors
/// As [`solve`], and if a config pins an op.
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
    run(TilingGraph::new(graph, shapes, Some(configs)), comm, Objective::Elements, forced, control)
}

fn run(
    tiling_graph: TilingGraph<'_>,
    comm: &Comm,
    objective: Objective,
    forced: impl Fn(&Unit, AxisId) -> Option<Request>,
    control: &Control<'_>,
) -> Result<Cuts, SoyBeanError> {
    let mesh = comm.mesh();
    binary(mesh)?;
    let loss = tiling_graph.graph.loss().and_then(|t| tiling_graph.graph.tensor(t).producer);
    // A graph without a loss starts from its first unit; any root gives the same cost.
    let root =
        tiling_graph.units.iter().position(|unit| unit.ops.iter().any(|&op| Some(op) == loss)).unwrap_or(0);
    let mut regions = Regions::whole(&tiling_graph);
    let mut found = Cuts {
        cuts: Vec::new(),
        tilings: vec![Vec::new(); tiling_graph.graph.tensors.len()],
        configs: vec![Config::replicated(mesh.len()); tiling_graph.graph.ops.len()],
        proved: true,
    };
    for (at, axis) in slowest_first(comm).into_iter().enumerate() {
        // This many pairs of devices share the traffic between the sides.
        let pairs = 1 << (mesh.len() - 1 - at);
        let cut = regions.cut(&tiling_graph, |unit| forced(unit, axis), |_, elements| elements);
        let solution = match objective {
            Objective::Elements => best(&cut, root, at + 1, control)?,
            Objective::Time => {
                let bytes = |t: TensorId, elements: u64| {
                    elements.saturating_mul(tiling_graph.graph.tensor(t).ty.dtype.bytes()).div_ceil(pairs)
                };
                let time = |t: TensorId, elements| picoseconds(comm, axis, bytes(t, elements));
                best(&regions.cut(&tiling_graph, |unit| forced(unit, axis), time), root, at + 1, control)?
            }
        };
        let tiling = |group: u32| cut.tilings[group as usize][solution.tilings[group as usize] as usize];
        for (tilings, &group) in found.tilings.iter_mut().zip(&tiling_graph.group) {
            tilings.push(tiling(group));
        }
        for ((unit, choice), &chosen) in tiling_graph.units.iter().zip(&cut.units).zip(&solution.requests) {
            let Some(which) = choice.requests[chosen as usize] else { continue };
            for (op, &f) in unit.ops.iter().zip(&unit.loops[which as usize]) {
                found.configs[op.index()].set(axis, AxisUse::Split(f));
            }
        }
        for update in &tiling_graph.updates {
            let rule = &tiling_graph.shapes[update.op.index()].rule;
            let Tiling::Cut(dim) = tiling(update.group) else { continue };
            let led = rule.inputs.first().and_then(|map| rule.leading(map.dims.get(usize::from(dim))?));
            if let Some(f) = led {
                found.configs[update.op.index()].set(axis, AxisUse::Split(f));
            }
        }
        found.cuts.push(cut.cost(&solution));
        found.proved &= solution.proved;
        regions.narrow(&tiling_graph, &cut, &solution);
    }
    Ok(found)
}

/// The time of an all-gather of `bytes` along an axis, with all groups active.
fn picoseconds(comm: &Comm, axis: AxisId, bytes: u64) -> u64 {
    if bytes == 0 {
        return 0;
    }
    (comm.seconds(Collective::AllGather, AxisSet::of(axis), Bytes(bytes)).0 * 1e12).round() as u64
}

/// The axes, slowest first. Ties keep the outermost axis first.
fn slowest_first(comm: &Comm) -> Vec<AxisId> {
    let mut axes: Vec<AxisId> = comm.mesh().all().iter().collect();
    // Large enough that bandwidth dominates latency.
    axes.sort_by_key(|&axis| std::cmp::Reverse(picoseconds(comm, axis, 1 << 30)));
    axes
}

/// Solves one cut: by levels where they are narrow, else by elimination.
fn best(
    cut: &OneCut,
    root: usize,
    number: usize,
    control: &Control<'_>,
) -> Result<CutSolution, SoyBeanError> {
    if let Some(solution) = levels::solve(cut, root) {
        return Ok(solution);
    }
    let solution =
        eliminate::solve(cut, control).map_err(|source| SoyBeanError::Network { cut: number, source })?;
    solution.map_err(|reason| match reason {
        StopReason::Refused(reason) => SoyBeanError::Refused { cut: number, reason },
        _ => SoyBeanError::Time { cut: number },
    })
}
