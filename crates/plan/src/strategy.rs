//! Strategies: which part of the space is searched, by which solver; and the classics, which search nothing.
//!
//! | name | space | found by |
//! |---|---|---|
//! | `auto` | everything | `exact`, and never worse than any baseline |
//! | `exact` | everything | reductions, bounds, branch and bound |
//! | `pase` | everything (PaSE's iteration space) | PaSE's dynamic program |
//! | `optcnn` | splits of the output's dimensions only | OptCNN's eliminations |
//! | `data` | the batch on every axis | |
//! | `model` | weights' output dimensions on every axis; layers without weights follow their largest input | |
//! | `owt` | one weird trick: `data` for layers with spatial dimensions, `model` for products with weights | |
//! | `megatron` | products with weights split by columns and rows in turn inside the innermost level, the batch outside | |

use crate::{error::PlanError, problem::Problem};
use shardwright_cost::{Layout, Placement};
use shardwright_graph::{FactorIndex, FactorKind, LayerId, Role, Rule, TensorId, factor_kinds};
use shardwright_machine::AxisId;
use shardwright_search::{Network, NetworkBuilder, VarId};
use shardwright_space::{AxisUse, Config};
use smallvec::SmallVec;

/// What is searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// Every config.
    All,
    /// Configs that only split dimensions of the forward op's results, and the batch.
    Outputs,
    /// One config per layer, by rule.
    Fixed(Baseline),
}

/// Strategies that search nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Baseline {
    /// Data parallelism.
    Data,
    /// Parameter parallelism.
    Model,
    /// One weird trick (Krizhevsky, arXiv 1404.5997).
    Owt,
    /// Column and row splits in turn inside a node, data parallelism between nodes (Shoeybi et al., arXiv
    /// 1909.08053).
    Megatron,
}

/// A strategy by name.
pub struct Strategy {
    /// What users type.
    pub name: &'static str,
    /// What it does, in a line.
    pub about: &'static str,
    /// What is searched.
    pub space: Space,
    /// The solver; none for baselines.
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
];

/// The strategies that search nothing.
pub fn baselines() -> impl Iterator<Item = &'static Strategy> {
    STRATEGIES.iter().filter(|s| s.solver.is_none())
}

/// The strategy of a name.
pub fn find(name: &str) -> Result<&'static Strategy, PlanError> {
    STRATEGIES.iter().find(|s| s.name == name).ok_or_else(|| PlanError::UnknownStrategy {
        name: name.chars().take(40).collect(),
        known: STRATEGIES.iter().map(|s| s.name).collect::<Vec<_>>().join(", "),
    })
}

impl Space {
    /// Per layer: the choices that the space has, ascending.
    pub fn choices(self, problem: &Problem<'_>) -> Vec<Vec<u32>> {
        let layers = 0..problem.choices.len();
        let all = |layer: usize| 0..problem.choices[layer].len() as u32;
        match self {
            Space::All => layers.map(|layer| all(layer).collect()).collect(),
            Space::Outputs => {
                let kinds = factor_kinds(problem.graph);
                let output = |layer: usize, used: &AxisUse| {
                    let op = problem.layers.splits[layer].forward();
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
                let fits = |layer: usize, c: u32| {
                    problem.forward_config(layer, c).uses().iter().all(|used| output(layer, used))
                };
                layers.map(|layer| all(layer).filter(|&c| fits(layer, c)).collect()).collect()
            }
            Space::Fixed(baseline) => baseline.choices(problem).into_iter().map(|c| vec![c]).collect(),
        }
    }
}

impl Baseline {
    /// The choice of every layer.
    pub fn choices(self, problem: &Problem<'_>) -> Vec<u32> {
        let kinds = factor_kinds(problem.graph);
        let mut chosen: Vec<Option<u32>> = vec![None; problem.choices.len()];
        for op in problem.graph.op_ids() {
            let layer = problem.graph.node(op).layer;
            if problem.layers.splits[layer.index()].forward() != op {
                continue;
            }
            let kinds = &kinds[op.index()];
            let config = match self {
                Baseline::Megatron => megatron(problem, layer, kinds, &chosen),
                _ => self.by_kind(problem, layer, kinds, &chosen),
            };
            chosen[layer.index()] = problem.find_choice(layer.index(), &config);
        }
        // The last choice repeats everything: every layer has it.
        let whole = |layer: usize| problem.choices[layer].len() as u32 - 1;
        chosen.iter().enumerate().map(|(layer, c)| c.unwrap_or_else(|| whole(layer))).collect()
    }

    /// One factor for all axes, or what the input has.
    fn by_kind(
        self,
        problem: &Problem<'_>,
        layer: LayerId,
        kinds: &[FactorKind],
        chosen: &[Option<u32>],
    ) -> Config {
        let all_axes = |kind| {
            let factor = of_kind(kinds, kind);
            split_axes(problem, layer, |_| factor)
        };
        let sample = || all_axes(FactorKind::Sample);
        let parameter = || all_axes(FactorKind::Parameter);
        let follow = || {
            let guide = Guide::of(problem, layer, chosen)?;
            Some(split_axes(problem, layer, |axis| guide.factor(axis)))
        };
        let weighted = reads_weight(problem, layer);
        let product = is_product(problem, layer, kinds);
        let spatial = kinds.contains(&FactorKind::Attribute);
        match self {
            Baseline::Data => sample(),
            Baseline::Model if weighted => parameter(),
            Baseline::Owt if product && spatial => sample(),
            Baseline::Owt if product => parameter(),
            _ => follow().unwrap_or_else(sample),
        }
    }
}

/// The first factor of a kind.
fn of_kind(kinds: &[FactorKind], kind: FactorKind) -> Option<FactorIndex> {
    kinds.iter().position(|&k| k == kind).map(|f| f as FactorIndex)
}

/// Outside the innermost level the batch; inside it a product with a weight is split by the rows of its weight if
/// its input arrives split along them, else by columns; everything else goes on as its input does.
fn megatron(problem: &Problem<'_>, layer: LayerId, kinds: &[FactorKind], chosen: &[Option<u32>]) -> Config {
    let guide = Guide::of(problem, layer, chosen);
    let innermost = problem.mesh().axes().last().map(|axis| axis.level);
    let product = is_product(problem, layer, kinds);
    let rows = |f: FactorIndex| kinds[f as usize] == FactorKind::Reduction;
    split_axes(problem, layer, |axis| {
        if Some(problem.mesh().axis(axis).level) != innermost {
            return of_kind(kinds, FactorKind::Sample);
        }
        let arrives = guide.as_ref().and_then(|guide| guide.factor(axis));
        if product { arrives.filter(|&f| rows(f)).or(of_kind(kinds, FactorKind::Parameter)) } else { arrives }
    })
}

/// Whether the layer's forward op reads a weight itself.
fn reads_weight(problem: &Problem<'_>, layer: LayerId) -> bool {
    let node = problem.graph.node(problem.layers.splits[layer.index()].forward());
    node.inputs.iter().any(|&t| problem.graph.tensor(t).role == Role::Parameter)
}

/// Whether the layer's forward op multiplies data by a weight and sums. An embedding does not: what it reads
/// beside its table are ids.
fn is_product(problem: &Problem<'_>, layer: LayerId, kinds: &[FactorKind]) -> bool {
    let node = problem.graph.node(problem.layers.splits[layer.index()].forward());
    let tensor = |t: &TensorId| problem.graph.tensor(*t);
    let data = |t: &TensorId| tensor(t).role != Role::Parameter && tensor(t).ty.dtype.is_float();
    reads_weight(problem, layer) && kinds.contains(&FactorKind::Reduction) && node.inputs.iter().any(data)
}

/// Splits for each axis the factor that is asked for, where it divides; the rest repeats.
fn split_axes(
    problem: &Problem<'_>,
    layer: LayerId,
    factor: impl Fn(AxisId) -> Option<FactorIndex>,
) -> Config {
    let rule = &problem.shapes[problem.layers.splits[layer.index()].forward().index()].rule;
    let mut config = Config::replicated(problem.mesh().len());
    let mut parts: SmallVec<[u64; 6]> = SmallVec::from_elem(1, rule.factors.len());
    for (at, axis) in problem.mesh().axes().iter().enumerate() {
        let id = AxisId(at as u32);
        let Some(f) = factor(id) else { continue };
        let (whole, size) = (rule.factors[f as usize].whole, rule.factors[f as usize].size);
        let finer = parts[f as usize] * u64::from(axis.size);
        if !whole && size > 1 && size.is_multiple_of(finer) {
            parts[f as usize] = finer;
            config.set(id, AxisUse::Split(f));
        }
    }
    config
}

/// An input whose maker has chosen: what a layer without a mind of its own follows.
struct Guide<'p> {
    rule: &'p Rule,
    input: usize,
    layout: Layout,
}

impl<'p> Guide<'p> {
    /// The layer's largest input that a layer with a choice makes; the first of equals. A mask is no guide.
    fn of(problem: &'p Problem<'_>, layer: LayerId, chosen: &[Option<u32>]) -> Option<Self> {
        let op = problem.layers.splits[layer.index()].forward();
        let inputs = problem.graph.node(op).inputs.iter().enumerate();
        let made = inputs.filter(|(_, t)| problem.graph.tensor(**t).producer.is_some());
        let guides = made.filter_map(|(input, t)| {
            let home = problem.transfers.homes[t.index()]?;
            let (layer, member) = problem.layers.place[home.op.index()];
            let choice = &problem.choices[layer as usize][chosen[layer as usize]? as usize];
            let layout = home.layout(&problem.shapes, &choice.configs[member as usize], problem.mesh());
            let elements = problem.graph.tensor(*t).ty.shape.elements();
            Some((elements, Self { rule: &problem.shapes[op.index()].rule, input, layout }))
        });
        guides.max_by_key(|(elements, guide)| (*elements, std::cmp::Reverse(guide.input))).map(|(_, g)| g)
    }

    /// The factor that keeps the input as it lies on an axis.
    fn factor(&self, axis: AxisId) -> Option<FactorIndex> {
        let Placement::Shard(dim) = self.layout.get(axis) else { return None };
        self.rule.leading(self.rule.inputs[self.input].dims.get(usize::from(dim))?)
    }
}

/// The network with only some choices of every variable; variables beyond the layers keep all of theirs.
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
