//! Strategies: which part of the space is searched, by which solver; and the classics, which search nothing.
//!
//! | name | space | found by |
//! |---|---|---|
//! | `auto` | everything | `exact`, and never worse than any baseline |
//! | `exact` | everything | reductions, bounds, branch and bound |
//! | `pase` | everything (PaSE's iteration space) | PaSE's dynamic program |
//! | `optcnn` | splits of the output's dimensions only | OptCNN's eliminations |
//! | `soybean` | a tiling of every tensor per binary cut, least elements moved | SoyBean's k cuts, levels or elimination |
//! | `soybean-time` | the same, least time of moving: ours, not the paper's | the same |
//! | `data` | the batch on every axis | |
//! | `model` | weights' output dimensions on every axis; layers without weights follow their largest input | |
//! | `owt` | one weird trick: `data` for layers with spatial dimensions, `model` for products with weights | |
//! | `megatron` | products with weights split by columns and rows in turn inside the innermost level, the batch outside | |
//! | `fsdp` | `data`, with weights, gradients and optimizer state sharded over all devices | |

pub use crate::baseline::Baseline;
use crate::{error::PlanError, problem::Problem};
use shardwright_graph::{FactorIndex, FactorKind, factor_kinds};
use shardwright_search::{Network, NetworkBuilder, VarId};
use shardwright_soybean::Objective;
use shardwright_space::AxisUse;

/// What is searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// Every config.
    All,
    /// Configs that only split dimensions of the leading op's results, and the batch.
    Outputs,
    /// A tiling of every tensor for every binary axis; its own measure decides, not the network's objective.
    Tilings(Objective),
    /// Every layer whole on some device; simulated steps decide, not the network's objective.
    Whole,
    /// One config per op, by rule.
    Fixed(Baseline),
}

/// A strategy by name.
pub struct Strategy {
    /// What users type.
    pub name: &'static str,
    /// What it does, in a line.
    pub about: &'static str,
    /// What is searched.
    pub space: Space,
    /// The network's solver; none for strategies that do not search the network.
    pub solver: Option<&'static str>,
}

/// All strategies; the first is the default.
pub const STRATEGIES: &[Strategy] = &[
    Strategy {
        name: "auto",
        about: "the best plan there is: exact, and never worse than any baseline",
        space: Space::All,
        solver: Some("exact"),
    },
    Strategy {
        name: "exact",
        about: "every config of every layer, proved",
        space: Space::All,
        solver: Some("exact"),
    },
    Strategy {
        name: "optcnn",
        about: "OptCNN: splits of output dimensions, node and edge elimination",
        space: Space::Outputs,
        solver: Some("optcnn"),
    },
    Strategy {
        name: "pase",
        about: "PaSE: splits of any dimension, dynamic program over dependent sets",
        space: Space::All,
        solver: Some("pase"),
    },
    Strategy {
        name: "soybean",
        about: "SoyBean: tilings that move the fewest elements, one binary cut after the other",
        space: Space::Tilings(Objective::Elements),
        solver: None,
    },
    Strategy {
        name: "soybean-time",
        about: "SoyBean's cuts with moves weighed by the time that they take (ours)",
        space: Space::Tilings(Objective::Time),
        solver: None,
    },
    Strategy {
        name: "data",
        about: "data parallelism: the batch on every axis",
        space: Space::Fixed(Baseline::Data),
        solver: None,
    },
    Strategy {
        name: "model",
        about: "parameter parallelism: weights' output dimensions on every axis",
        space: Space::Fixed(Baseline::Model),
        solver: None,
    },
    Strategy {
        name: "owt",
        about: "one weird trick: data for convolutions, parameters for fully connected layers",
        space: Space::Fixed(Baseline::Owt),
        solver: None,
    },
    Strategy {
        name: "megatron",
        about: "columns and rows of weights in turn inside the innermost level, the batch outside",
        space: Space::Fixed(Baseline::Megatron),
        solver: None,
    },
    Strategy {
        name: "fsdp",
        about: "data parallelism with sharded weights, gradients and optimizer state",
        space: Space::Fixed(Baseline::Fsdp),
        solver: None,
    },
];

/// The strategies that search nothing and whose plans the problem's space has: `fsdp` stores weights otherwise than
/// their layers use them, which only ops that choose for themselves can.
pub fn baselines(problem: &Problem<'_>) -> impl Iterator<Item = &'static Strategy> {
    let untied = problem.untied;
    STRATEGIES
        .iter()
        .filter(move |s| matches!(s.space, Space::Fixed(baseline) if untied || baseline != Baseline::Fsdp))
}

/// The strategy of a name.
pub fn find(name: &str) -> Result<&'static Strategy, PlanError> {
    STRATEGIES.iter().find(|s| s.name == name).ok_or_else(|| PlanError::UnknownStrategy {
        name: name.chars().take(40).collect(),
        known: STRATEGIES.iter().map(|s| s.name).collect::<Vec<_>>().join(", "),
    })
}

impl Space {
    /// Per variable: the choices that are searched, ascending; none where nothing is.
    pub fn choices(self, problem: &Problem<'_>) -> Option<Vec<Vec<u32>>> {
        let variables = 0..problem.choices.len();
        let all = |variable: usize| 0..problem.choices[variable].len() as u32;
        match self {
            Space::All => Some(variables.map(|variable| all(variable).collect()).collect()),
            Space::Outputs => {
                let kinds = factor_kinds(problem.graph);
                let output = |variable: usize, used: &AxisUse| {
                    let op = problem.variables.splits[variable].forward();
                    // OptCNN's layers all have the batch in their output. Ours are finer: statistics of a norm
                    // and losses sum over it, and are split along it as the paper's whole layer would be.
                    let splits = |f: FactorIndex| {
                        !problem.shapes[op.index()].rule.is_reduction(f)
                            || kinds[op.index()][f as usize] == FactorKind::Sample
                    };
                    match used {
                        AxisUse::Split(f) => splits(*f),
                        AxisUse::Replicate | AxisUse::Pin(_) => true,
                    }
                };
                let fits = |variable: usize, c: u32| {
                    problem.forward_config(variable, c).uses().iter().all(|used| output(variable, used))
                };
                Some(variables.map(|v| all(v).filter(|&c| fits(v, c)).collect()).collect())
            }
            Space::Tilings(_) | Space::Whole | Space::Fixed(_) => None,
        }
    }
}

/// The network with only some choices of every variable; variables beyond those named keep all of theirs.
pub fn restrict(network: &Network, allowed: &[Vec<u32>]) -> Result<Network, PlanError> {
    let mut builder = NetworkBuilder::new();
    let kept = |v: VarId| match allowed.get(v.index()) {
        Some(allowed) => allowed.clone(),
        None => (0..network.choices(v) as u32).collect(),
    };
    for v in (0..network.variables()).map(|v| VarId(v as u32)) {
        let pick = |from: &[i64]| kept(v).iter().map(|&c| from[c as usize]).collect::<Vec<i64>>();
        builder.variable(&pick(network.unary(v)), &pick(network.usage(v)), network.interval(v))?;
    }
    for edge in network.edges() {
        let (rows, columns) = (kept(edge.u), kept(edge.v));
        let cells = rows.iter().flat_map(|&a| columns.iter().map(move |&b| (a, b)));
        let table: Vec<i64> = cells.map(|(a, b)| network.pair(edge, a, b)).collect();
        builder.edge(edge.u, edge.v, &table)?;
    }
    if let Some(limit) = network.usage_limit() {
        builder.usage_limit(limit)?;
    }
    Ok(builder.build()?)
}
