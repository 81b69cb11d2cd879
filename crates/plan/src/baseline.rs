//! The classics, which search nothing: one config per op by rule.

use crate::problem::Problem;
use shardwright_cost::{Layout, Placement};
use shardwright_graph::{
    FactorIndex, FactorKind, Graph, LayerId, OpId, Phase, Role, Rule, TensorId, factor_kinds,
};
use shardwright_machine::AxisId;
use shardwright_space::{AxisUse, Config, configs};
use smallvec::SmallVec;

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
    /// Fully sharded data parallelism (ZeRO's third stage, Rajbhandari et al., arXiv 1910.02054).
    Fsdp,
}

/// Per layer: the configs of its ops, once they are known.
type Chosen = Vec<Option<Vec<Config>>>;

impl Baseline {
    /// The config of every op, in the graph's order.
    pub fn configs(self, problem: &Problem<'_>) -> Vec<Config> {
        let (mesh, shapes) = (problem.mesh(), &problem.shapes[..]);
        let kinds = factor_kinds(problem.graph);
        let mut chosen: Chosen = vec![None; problem.layers.splits.len()];
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
            // Only what a search could find: see the order of axes in `configs`.
            let listed = configs(&shapes[op.index()].rule, mesh).contains(&config);
            let config = if listed { config } else { Config::replicated(mesh.len()) };
            chosen[layer.index()] = Some(problem.layers.splits[layer.index()].configs(shapes, mesh, &config));
        }
        let stored = works_on_stored(problem.graph);
        let config = |op: OpId| {
            let (layer, member) = problem.layers.place[op.index()];
            let config = chosen[layer as usize].as_ref().map(|configs| &configs[member as usize]);
            let config = config.cloned().unwrap_or_else(|| Config::replicated(mesh.len()));
            let alone = config.uses().iter().all(|used| *used == AxisUse::Replicate);
            match self {
                // What works on whole weights and gradients works on shards of them.
                Baseline::Fsdp if alone && stored[op.index()] => shards(problem, op),
                _ => config,
            }
        };
        problem.graph.op_ids().map(config).collect()
    }

    /// One factor for all axes, or what the input has.
    fn by_kind(self, problem: &Problem<'_>, layer: LayerId, kinds: &[FactorKind], chosen: &Chosen) -> Config {
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
            Baseline::Data | Baseline::Fsdp => sample(),
            Baseline::Model if weighted => parameter(),
            Baseline::Owt if product && spatial => sample(),
            Baseline::Owt if product => parameter(),
            _ => follow().unwrap_or_else(sample),
        }
    }
}

/// Which ops work on what is stored in shards: on nothing but weights and state, as slices of stacked weights do, or for
/// nothing but what the next step starts from. What is made of constants alone, such as masks, does neither.
fn works_on_stored(graph: &Graph) -> Vec<bool> {
    let mut given = vec![false; graph.tensors.len()];
    let mut only_stored = vec![false; graph.tensors.len()];
    let mut works = updates(graph);
    for t in graph.tensor_ids().filter(|t| graph.tensor(*t).producer.is_none()) {
        let role = graph.tensor(t).role;
        given[t.index()] = role != Role::Constant;
        only_stored[t.index()] = matches!(role, Role::Parameter | Role::OptimizerState | Role::Constant);
    }
    for op in graph.op_ids() {
        let node = graph.node(op);
        let varies = node.inputs.iter().any(|t| given[t.index()]);
        let stored = node.inputs.iter().all(|t| only_stored[t.index()]);
        for t in &node.outputs {
            (given[t.index()], only_stored[t.index()]) = (varies, stored);
        }
        works[op.index()] = varies && (stored || works[op.index()]);
    }
    works
}

/// Which ops only serve what the next step starts from: backward passes and updates. Imported steps do not say which of
/// their ops those are, but nobody else reads what they make.
fn updates(graph: &Graph) -> Vec<bool> {
    let consumers = graph.consumers();
    let mut carried = vec![false; graph.tensors.len()];
    graph.carries.iter().for_each(|carry| carried[carry.new.index()] = true);
    let mut updates = vec![false; graph.ops.len()];
    for op in graph.op_ids().collect::<Vec<_>>().into_iter().rev() {
        let node = graph.node(op);
        let served = |t: &TensorId| {
            let readers = consumers.of(*t);
            readers.iter().all(|reader| updates[reader.index()])
                && (carried[t.index()] || !readers.is_empty())
        };
        updates[op.index()] = node.phase != Phase::Forward || node.outputs.iter().all(served);
    }
    updates
}

/// The first factor of a kind.
fn of_kind(kinds: &[FactorKind], kind: FactorKind) -> Option<FactorIndex> {
    kinds.iter().position(|&k| k == kind).map(|f| f as FactorIndex)
}

/// Outside the innermost level the batch; inside it a product with a weight is split by the rows of its weight if
/// its input arrives split along them, else by columns; everything else goes on as its inputs do, the largest first.
fn megatron(problem: &Problem<'_>, layer: LayerId, kinds: &[FactorKind], chosen: &Chosen) -> Config {
    let guides = Guide::all(problem, layer, chosen);
    let innermost = problem.mesh().axes().last().map(|axis| axis.level);
    let product = is_product(problem, layer, kinds);
    let rows = |f: FactorIndex| kinds[f as usize] == FactorKind::Reduction;
    split_axes(problem, layer, |axis| {
        if Some(problem.mesh().axis(axis).level) != innermost {
            return of_kind(kinds, FactorKind::Sample);
        }
        let mut arrive = guides.iter().filter_map(|guide| guide.factor(axis));
        if product {
            arrive.find(|&f| rows(f)).or(of_kind(kinds, FactorKind::Parameter))
        } else {
            arrive.next()
        }
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
    split_op(problem, problem.layers.splits[layer.index()].forward(), |_, axis| factor(axis))
}

/// Every axis on the first factor that it divides further: all devices hold different parts.
fn shards(problem: &Problem<'_>, op: OpId) -> Config {
    let factors = problem.shapes[op.index()].rule.factors.len() as FactorIndex;
    // One factor for all axes, if there is one that can take them.
    let all = (0..factors).map(|f| split_op(problem, op, |_, _| Some(f)));
    let full = |config: &Config| !config.uses().contains(&AxisUse::Replicate);
    all.into_iter()
        .find(full)
        .unwrap_or_else(|| split_op(problem, op, |divides, _| (0..factors).find(|&f| divides(f))))
}

/// Splits for each axis the factor that is asked for, where it divides; the rest repeats. `factor` is told which
/// factors the axis divides further.
fn split_op(
    problem: &Problem<'_>,
    op: OpId,
    factor: impl Fn(&dyn Fn(FactorIndex) -> bool, AxisId) -> Option<FactorIndex>,
) -> Config {
    let rule = &problem.shapes[op.index()].rule;
    let mut config = Config::replicated(problem.mesh().len());
    let mut parts: SmallVec<[u64; 6]> = SmallVec::from_elem(1, rule.factors.len());
    for (at, axis) in problem.mesh().axes().iter().enumerate() {
        let id = AxisId(at as u32);
        let finer = |f: FactorIndex| parts[f as usize] * u64::from(axis.size);
        let divides = |f: FactorIndex| {
            let factor = &rule.factors[f as usize];
            !factor.whole && factor.size > 1 && factor.size.is_multiple_of(finer(f))
        };
        let Some(f) = factor(&divides, id).filter(|&f| divides(f)) else { continue };
        parts[f as usize] = finer(f);
        config.set(id, AxisUse::Split(f));
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
    fn of(problem: &'p Problem<'_>, layer: LayerId, chosen: &Chosen) -> Option<Self> {
        Self::all(problem, layer, chosen).into_iter().next()
    }

    /// All inputs that layers with a choice make, the largest first.
    fn all(problem: &'p Problem<'_>, layer: LayerId, chosen: &Chosen) -> Vec<Self> {
        let op = problem.layers.splits[layer.index()].forward();
        let inputs = problem.graph.node(op).inputs.iter().enumerate();
        let made = inputs.filter(|(_, t)| problem.graph.tensor(**t).producer.is_some());
        let guides = made.filter_map(|(input, t)| {
            let home = problem.transfers.homes[t.index()]?;
            let (layer, member) = problem.layers.place[home.op.index()];
            let config = &chosen[layer as usize].as_ref()?[member as usize];
            let layout = home.layout(&problem.shapes, config, problem.mesh());
            let elements = problem.graph.tensor(*t).ty.shape.elements();
            Some((elements, Self { rule: &problem.shapes[op.index()].rule, input, layout }))
        });
        let mut guides: Vec<(u64, Self)> = guides.collect();
        guides.sort_by_key(|(elements, guide)| (std::cmp::Reverse(*elements), guide.input));
        guides.into_iter().map(|(_, guide)| guide).collect()
    }

    /// The factor that keeps the input as it lies on an axis.
    fn factor(&self, axis: AxisId) -> Option<FactorIndex> {
        let Placement::Shard(dim) = self.layout.get(axis) else { return None };
        self.rule.leading(self.rule.inputs[self.input].dims.get(usize::from(dim))?)
    }
}
