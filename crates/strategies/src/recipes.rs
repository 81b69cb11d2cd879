//! Recipes: strategies that search nothing. They give one config per op by rule, and are the baselines of every plan.

use crate::{Planner, Solution, Strategy, baselines::baseline, error::StrategyError};
use shardwright_cost::{Layout, Placement};
use shardwright_graph::{
    FactorIndex, FactorKind, Graph, LayerId, OpId, Phase, Role, Rule, TensorId, factor_kinds,
};
use shardwright_machine::AxisId;
use shardwright_plan::{Constraints, Context, Optimised, PlanError};
use shardwright_search::Control;
use shardwright_space::{Assignment, AxisUse, Config, configs};
use smallvec::SmallVec;

/// A recipe.
#[derive(Debug, PartialEq, Eq)]
pub struct Recipe {
    name: &'static str,
    about: &'static str,
    rule: RecipeRule,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RecipeRule {
    Data,
    Model,
    Owt,
    Megatron,
    Fsdp,
}

/// Data parallelism.
pub static DATA: Recipe =
    Recipe { name: "data", about: "data parallelism: the batch on every axis", rule: RecipeRule::Data };

/// Parameter parallelism. Layers without weights follow their largest input.
pub static MODEL: Recipe = Recipe {
    name: "model",
    about: "parameter parallelism: output dimensions of weights on every axis",
    rule: RecipeRule::Model,
};

/// One weird trick (Krizhevsky, arXiv 1404.5997).
pub static OWT: Recipe = Recipe {
    name: "owt",
    about: "one weird trick: data parallelism for convolutions, parameter parallelism for fully connected layers",
    rule: RecipeRule::Owt,
};

/// Column and row splits in turn inside a node, data parallelism between nodes (Shoeybi et al., arXiv 1909.08053).
pub static MEGATRON: Recipe = Recipe {
    name: "megatron",
    about: "Megatron: columns and rows of weights in turn on the innermost level, the batch on the others",
    rule: RecipeRule::Megatron,
};

/// Fully sharded data parallelism (ZeRO's third stage, Rajbhandari et al., arXiv 1910.02054).
pub static FSDP: Recipe = Recipe {
    name: "fsdp",
    about: "FSDP: data parallelism with sharded weights, gradients and optimizer state",
    rule: RecipeRule::Fsdp,
};

/// All recipes.
pub static RECIPES: [&Recipe; 5] = [&DATA, &MODEL, &OWT, &MEGATRON, &FSDP];

impl Strategy for Recipe {
    fn name(&self) -> &'static str {
        self.name
    }

    fn about(&self) -> &'static str {
        self.about
    }

    fn optimises(&self) -> Optimised {
        Optimised::Nothing
    }

    fn searches_within_memory(&self) -> bool {
        false
    }

    fn solve<'a>(
        &self,
        planner: &Planner<'a>,
        constraints: &Constraints,
        control: &Control<'_>,
    ) -> Result<Solution<'a>, StrategyError> {
        let recipes = planner.recipes(control)?;
        let Some(own) = baseline(recipes, self.name, constraints) else {
            let reason = "it has no mesh".to_string();
            return Err(PlanError::NoPlan { solver: self.name.into(), reason }.into());
        };
        own.solution().checked(constraints, self.name)
    }
}

/// Per layer: the configs of its ops, once they are known.
type ChosenConfigs = Vec<Option<Vec<Config>>>;

impl Recipe {
    /// Whether the recipe splits the ops of a layer differently from each other.
    pub(crate) fn needs_untied(&self) -> bool {
        self.rule == RecipeRule::Fsdp
    }

    /// The recipe's assignment.
    pub fn assignment(&self, context: &Context<'_>) -> Assignment {
        let (mesh, shapes) = (context.mesh(), &context.shapes[..]);
        let kinds = factor_kinds(context.graph);
        let mut chosen: ChosenConfigs = vec![None; context.layers.members.len()];
        for op in context.graph.op_ids() {
            let layer = context.graph.node(op).layer;
            if context.layers.members[layer.index()].forward() != op {
                continue;
            }
            let kinds = &kinds[op.index()];
            let config = match self.rule {
                RecipeRule::Megatron => megatron(context, layer, kinds, &chosen),
                _ => self.by_kind(context, layer, kinds, &chosen),
            };
            // Only configs that a search offers: see the order of axes in `configs`.
            let listed = configs(&shapes[op.index()].rule, mesh).contains(&config);
            let config = if listed { config } else { Config::replicated(mesh.len()) };
            chosen[layer.index()] =
                Some(context.layers.members[layer.index()].configs(shapes, mesh, &config));
        }
        let stored = works_on_stored(context.graph);
        let config = |op: OpId| {
            let (layer, member) = context.layers.index[op.index()];
            let config = chosen[layer as usize].as_ref().map(|configs| &configs[member as usize]);
            let config = config.cloned().unwrap_or_else(|| Config::replicated(mesh.len()));
            let alone = config.uses().iter().all(|used| *used == AxisUse::Replicate);
            match self.rule {
                // Ops on whole weights and gradients run on shards of them.
                RecipeRule::Fsdp if alone && stored[op.index()] => shards(context, op),
                _ => config,
            }
        };
        Assignment::of(context.graph, context.graph.op_ids().map(config).collect())
    }

    /// One factor for all axes, or the input's.
    fn by_kind(
        &self,
        context: &Context<'_>,
        layer: LayerId,
        kinds: &[FactorKind],
        chosen: &ChosenConfigs,
    ) -> Config {
        let all_axes = |kind| {
            let factor = of_kind(kinds, kind);
            split_axes(context, layer, |_| factor)
        };
        let sample = || all_axes(FactorKind::Sample);
        let parameter = || all_axes(FactorKind::Parameter);
        let follow = || {
            let guide = Guide::of(context, layer, chosen)?;
            Some(split_axes(context, layer, |axis| guide.factor(axis)))
        };
        let weighted = reads_weight(context, layer);
        let product = is_product(context, layer, kinds);
        let spatial = kinds.contains(&FactorKind::Attribute);
        match self.rule {
            RecipeRule::Data | RecipeRule::Fsdp => sample(),
            RecipeRule::Model if weighted => parameter(),
            RecipeRule::Owt if product && spatial => sample(),
            RecipeRule::Owt if product => parameter(),
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
fn megatron(context: &Context<'_>, layer: LayerId, kinds: &[FactorKind], chosen: &ChosenConfigs) -> Config {
    let guides = Guide::all(context, layer, chosen);
    let innermost = context.mesh().axes().last().map(|axis| axis.level);
    let product = is_product(context, layer, kinds);
    let rows = |f: FactorIndex| kinds[f as usize] == FactorKind::Reduction;
    split_axes(context, layer, |axis| {
        if Some(context.mesh().axis(axis).level) != innermost {
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
fn reads_weight(context: &Context<'_>, layer: LayerId) -> bool {
    let node = context.graph.node(context.layers.members[layer.index()].forward());
    node.inputs.iter().any(|&t| context.graph.tensor(t).role == Role::Parameter)
}

/// Whether the layer's forward op multiplies data by a weight and sums. An embedding does not: what it reads
/// beside its table are ids.
fn is_product(context: &Context<'_>, layer: LayerId, kinds: &[FactorKind]) -> bool {
    let node = context.graph.node(context.layers.members[layer.index()].forward());
    let tensor = |t: &TensorId| context.graph.tensor(*t);
    let data = |t: &TensorId| tensor(t).role != Role::Parameter && tensor(t).ty.dtype.is_float();
    reads_weight(context, layer) && kinds.contains(&FactorKind::Reduction) && node.inputs.iter().any(data)
}

/// Splits for each axis the factor that is asked for, where it divides; the rest repeats.
fn split_axes(
    context: &Context<'_>,
    layer: LayerId,
    factor: impl Fn(AxisId) -> Option<FactorIndex>,
) -> Config {
    split_op(context, context.layers.members[layer.index()].forward(), |_, axis| factor(axis))
}

/// Every axis on the first factor that it divides further: all devices hold different parts.
fn shards(context: &Context<'_>, op: OpId) -> Config {
    let factors = context.shapes[op.index()].rule.factors.len() as FactorIndex;
    // One factor for all axes, if there is one that can take them.
    let all = (0..factors).map(|f| split_op(context, op, |_, _| Some(f)));
    let full = |config: &Config| !config.uses().contains(&AxisUse::Replicate);
    all.into_iter()
        .find(full)
        .unwrap_or_else(|| split_op(context, op, |divides, _| (0..factors).find(|&f| divides(f))))
}

/// Splits for each axis the factor that is asked for, where it divides; the rest repeats. `factor` is told which
/// factors the axis divides further.
fn split_op(
    context: &Context<'_>,
    op: OpId,
    factor: impl Fn(&dyn Fn(FactorIndex) -> bool, AxisId) -> Option<FactorIndex>,
) -> Config {
    let rule = &context.shapes[op.index()].rule;
    let mut config = Config::replicated(context.mesh().len());
    let mut parts: SmallVec<[u64; 6]> = SmallVec::from_elem(1, rule.factors.len());
    for (at, axis) in context.mesh().axes().iter().enumerate() {
        let id = AxisId(at as u32);
        let finer = |f: FactorIndex| parts[f as usize] * u64::from(axis.size);
        let divides = |f: FactorIndex| rule.divides(f, parts[f as usize], axis.size);
        let Some(f) = factor(&divides, id).filter(|&f| divides(f)) else { continue };
        parts[f as usize] = finer(f);
        config.set(id, AxisUse::Split(f));
    }
    config
}

/// An input whose producer has a config: a layer without weights follows it.
struct Guide<'p> {
    rule: &'p Rule,
    input: usize,
    layout: Layout,
}

impl<'p> Guide<'p> {
    /// The layer's largest input from a layer with a config; the first of equals. A mask is no guide.
    fn of(context: &'p Context<'_>, layer: LayerId, chosen: &ChosenConfigs) -> Option<Self> {
        Self::all(context, layer, chosen).into_iter().next()
    }

    /// All inputs from layers with a config, the largest first.
    fn all(context: &'p Context<'_>, layer: LayerId, chosen: &ChosenConfigs) -> Vec<Self> {
        let op = context.layers.members[layer.index()].forward();
        let inputs = context.graph.node(op).inputs.iter().enumerate();
        let made = inputs.filter(|(_, t)| context.graph.tensor(**t).producer.is_some());
        let guides = made.filter_map(|(input, t)| {
            let source = context.transfers.sources[t.index()]?;
            let (layer, member) = context.layers.index[source.op.index()];
            let config = &chosen[layer as usize].as_ref()?[member as usize];
            let layout = source.layout(&context.shapes, config, context.mesh());
            let elements = context.graph.tensor(*t).ty.shape.elements();
            Some((elements, Self { rule: &context.shapes[op.index()].rule, input, layout }))
        });
        let mut guides: Vec<(u64, Self)> = guides.collect();
        guides.sort_by_key(|(elements, guide)| (std::cmp::Reverse(*elements), guide.input));
        guides.into_iter().map(|(_, guide)| guide).collect()
    }

    /// The factor that keeps the input's layout on an axis.
    fn factor(&self, axis: AxisId) -> Option<FactorIndex> {
        let Placement::Shard(dim) = self.layout.get(axis) else { return None };
        self.rule.leading(self.rule.inputs[self.input].dims.get(usize::from(dim))?)
    }
}
