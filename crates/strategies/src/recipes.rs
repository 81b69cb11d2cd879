//! Recipes: strategies that search nothing. They give one config per op by rule, and are the baselines of every plan.

use crate::{
    Planner, Solution, Strategy,
    baselines::{baseline, price_recipe},
    error::StrategyError,
    pipeline::{AxisRole, RoleMesh, UniformRules, ZeroLevel, expert_factor, uniform_assignment},
    stored_ops::{sampleless, weight_tensors, works_on_stored},
};
use shardwright_cost::{Layout, Placement};
use shardwright_graph::{Consumers, FactorIndex, FactorKind, LayerId, OpId, Phase, Rule, TensorId};
use shardwright_machine::AxisId;
use shardwright_plan::{Constraints, Context, Optimised};
use shardwright_search::Control;
use shardwright_space::{Assignment, AxisUse, Config, elementwise_config, input_layout};
use smallvec::SmallVec;
use std::collections::BTreeMap;

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
    Zero1,
    Zero2,
    Fsdp,
    Hsdp,
    Ep,
    MegatronSp,
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

/// ZeRO's first stage: weights are gathered and gradients reduced once per step (Rajbhandari et al., arXiv 1910.02054).
pub static ZERO1: Recipe = Recipe {
    name: "zero1",
    about: "ZeRO-1: data parallelism with sharded updates; weights are gathered and gradients reduced once per step",
    rule: RecipeRule::Zero1,
};

/// ZeRO's second stage: gradients are reduced to shards in every micro-batch.
pub static ZERO2: Recipe = Recipe {
    name: "zero2",
    about: "ZeRO-2: as zero1, but gradients are sharded: each micro-batch reduces its own",
    rule: RecipeRule::Zero2,
};

/// Hybrid sharded data parallelism: FSDP inside the innermost level, copies between its units.
pub static HSDP: Recipe = Recipe {
    name: "hsdp",
    about: "HSDP: FSDP on the innermost level, data parallelism with copies of the shards on the others",
    rule: RecipeRule::Hsdp,
};

/// Expert parallelism inside the innermost level (Lepikhin et al., arXiv 2006.16668), with ZeRO-2.
pub static EP: Recipe = Recipe {
    name: "ep",
    about: "expert parallelism: experts on the innermost level, the batch on all; gradients and optimizer state are sharded",
    rule: RecipeRule::Ep,
};

/// Tensor and sequence parallelism inside the innermost level (Korthikanti et al., arXiv 2205.05198), with ZeRO-1.
pub static MEGATRON_SP: Recipe = Recipe {
    name: "megatron-sp",
    about: "Megatron with sequence parallelism on the innermost level, the batch and shards of the optimizer state on the others",
    rule: RecipeRule::MegatronSp,
};

/// All recipes.
pub static RECIPES: [&Recipe; 10] =
    [&DATA, &MODEL, &OWT, &MEGATRON, &ZERO1, &ZERO2, &FSDP, &HSDP, &EP, &MEGATRON_SP];

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

    fn accepts(&self, recipe: &Recipe) -> bool {
        self == recipe
    }

    fn solve<'a>(
        &self,
        planner: &Planner<'a>,
        constraints: &Constraints,
        control: &Control<'_>,
    ) -> Result<Solution<'a>, StrategyError> {
        let prime = planner.prime()?;
        let own = self.applies(&prime);
        // A recipe that would be fsdp here is not priced again.
        let recipe: &'static Recipe = match RECIPES.into_iter().find(|known| own && *known == self) {
            Some(own) => own,
            None => &FSDP,
        };
        let priced = baseline(planner.recipes(constraints, control)?, recipe.name, constraints);
        // When the time is up, a recipe may be missing there.
        let mut solution = match priced {
            Some(priced) => priced.solution(),
            None => price_recipe(&prime, recipe, control)?.solution(),
        };
        if !own {
            let name = self.name;
            solution.notes.push(format!(
                "this is the plan of fsdp: zero1 and zero2 differ from it in several micro-batches, hsdp on machines of several levels, ep in models with experts, megatron-sp in models of tokens; {name} was asked for"
            ));
        }
        solution.checked(constraints, self.name)
    }
}

/// Per layer: the configs of its ops, once they are known.
pub(crate) type ChosenConfigs = Vec<Option<Vec<Config>>>;

impl Recipe {
    /// Whether the recipe splits the ops of a layer differently from each other.
    pub(crate) fn needs_untied(&self) -> bool {
        self.is_sharded()
    }

    /// Whether weights, gradients and optimizer state are sharded.
    fn is_sharded(&self) -> bool {
        !matches!(self.rule, RecipeRule::Data | RecipeRule::Model | RecipeRule::Owt | RecipeRule::Megatron)
    }

    /// Whether the recipe differs from all others: stages of ZeRO differ in several micro-batches, hybrid sharding on
    /// machines of several levels, expert parallelism in models with experts, sequence parallelism in models of tokens.
    pub(crate) fn applies(&self, context: &Context<'_>) -> bool {
        match self.rule {
            RecipeRule::Zero1 | RecipeRule::Zero2 => context.graph.micro_batches.get() > 1,
            RecipeRule::Hsdp => context.machine.levels().len() > 1,
            RecipeRule::Ep => has_experts(context),
            RecipeRule::MegatronSp => context.graph.step_size().tokens.is_some(),
            _ => true,
        }
    }

    /// The config of an op on whole weights or gradients: on shards of them.
    fn sharded(&self, context: &Context<'_>, op: OpId, tied: Config) -> Config {
        let node = context.graph.node(op);
        let accumulates = node.op.operator().accumulates();
        let held = context.graph.micro_batches.get() > 1 && node.phase == Phase::Forward;
        let innermost = context.mesh().axes().last().map(|axis| axis.level);
        match self.rule {
            // Partial sums are added up where they are; weights are held whole.
            RecipeRule::Zero1 if accumulates || held => tied,
            RecipeRule::Zero2 if held => tied,
            RecipeRule::Hsdp => {
                let inside = |axis: AxisId| Some(context.mesh().axis(axis).level) == innermost;
                let mut config = shards(context, op, inside);
                // Between the units, partial sums wait for the end of the step.
                for axis in context.mesh().all().iter().filter(|&axis| accumulates && !inside(axis)) {
                    config.set(axis, tied.get(axis));
                }
                config
            }
            _ => shards(context, op, |_| true),
        }
    }

    /// The recipe's assignment.
    pub fn assignment(&self, context: &Context<'_>) -> Assignment {
        match self.rule {
            RecipeRule::Ep => return by_role(context, AxisRole::Expert, ZeroLevel::Gradients),
            RecipeRule::MegatronSp => return by_role(context, AxisRole::Tensor, ZeroLevel::State),
            _ => {}
        }
        let (mesh, shapes) = (context.mesh(), &context.shapes[..]);
        let (kinds, classes) = (context.factor_kinds(), context.layer_classes());
        // Equal layers with equal configs have equal ops.
        let mut known: BTreeMap<(u32, Config), Vec<Config>> = BTreeMap::new();
        let weights = weight_tensors(context.graph);
        let free = sampleless(context.graph, kinds);
        let mut chosen: ChosenConfigs = vec![None; context.layers.members.len()];
        for op in context.graph.op_ids() {
            let layer = context.graph.node(op).layer;
            if context.layers.members[layer.index()].forward() != op || free[op.index()] {
                continue;
            }
            let kinds = &kinds[op.index()];
            let config = match self.rule {
                RecipeRule::Megatron => megatron(context, layer, kinds, &weights, &chosen),
                _ => self.by_kind(context, layer, kinds, &weights, &chosen),
            };
            // Only configs that a search offers: see the order of axes in `configs`.
            let listed = config.is_listed(&shapes[op.index()].rule, mesh);
            let config = if listed { config } else { Config::replicated(mesh.len()) };
            let split = &context.layers.members[layer.index()];
            let key = (classes[layer.index()], config);
            let configs =
                known.entry(key).or_insert_with_key(|(_, config)| split.configs(shapes, mesh, config));
            chosen[layer.index()] = Some(configs.clone());
        }
        let stored = works_on_stored(context.graph);
        let consumers = context.graph.consumers();
        // Ops that no sample reaches follow their readers: a cast weight is split as the product reads it, random bits as
        // the tensor that they mask.
        for op in context.graph.op_ids().collect::<Vec<_>>().into_iter().rev() {
            let layer = context.graph.node(op).layer;
            if free[op.index()] && context.layers.members[layer.index()].forward() == op {
                let config = as_read(context, &consumers, &chosen, layer);
                chosen[layer.index()] =
                    Some(context.layers.members[layer.index()].configs(shapes, mesh, &config));
            }
        }
        let config = |op: OpId| {
            let (layer, member) = context.layers.index[op.index()];
            let config = chosen[layer as usize].as_ref().map(|configs| &configs[member as usize]);
            let config = config.cloned().unwrap_or_else(|| Config::replicated(mesh.len()));
            let config = held_as_read(context, &consumers, &chosen, op).unwrap_or(config);
            let accumulates = context.graph.node(op).op.operator().accumulates();
            let alone = config.uses().iter().all(|used| *used == AxisUse::Replicate);
            // Ops on whole weights and gradients run on shards of them.
            let whole = (alone || accumulates) && stored[op.index()];
            if self.is_sharded() && whole { self.sharded(context, op, config) } else { config }
        };
        Assignment::of(context.graph, context.graph.op_ids().map(config).collect())
    }

    /// One factor for all axes, or the input's.
    fn by_kind(
        &self,
        context: &Context<'_>,
        layer: LayerId,
        kinds: &[FactorKind],
        weights: &[bool],
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
        let weighted = reads_weight(context, layer, weights);
        let product = is_product(context, layer, kinds, weights);
        let spatial = kinds.contains(&FactorKind::Attribute);
        match self.rule {
            RecipeRule::Data => sample(),
            _ if self.is_sharded() => sample(),
            RecipeRule::Model if weighted => parameter(),
            RecipeRule::Owt if product && spatial => sample(),
            RecipeRule::Owt if product => parameter(),
            _ => follow().unwrap_or_else(sample),
        }
    }
}

/// The config in which a view holds a weight for all micro-batches: that of its first reader.
pub(crate) fn held_as_read(
    context: &Context<'_>,
    consumers: &Consumers,
    chosen: &ChosenConfigs,
    op: OpId,
) -> Option<Config> {
    let node = context.graph.node(op);
    let held = *node.outputs.first().filter(|&&t| context.graph.held_weight(t) != t)?;
    let reader = *consumers.of(held).first()?;
    let input = context.graph.node(reader).inputs.iter().position(|&t| t == held)?;
    let (layer, member) = context.layers.index[reader.index()];
    let config = &chosen[layer as usize].as_ref()?[member as usize];
    let layout = input_layout(&context.shapes[reader.index()], input, config, context.mesh());
    Some(elementwise_config(&layout, &context.shapes[op.index()].rule, context.mesh()))
}

/// Whether some product has a weight per expert.
fn has_experts(context: &Context<'_>) -> bool {
    let (kinds, weights) = (context.factor_kinds(), weight_tensors(context.graph));
    let mut layers = (0..context.layers.members.len()).map(LayerId::new);
    layers.any(|layer| {
        let op = context.layers.members[layer.index()].forward();
        let product = || is_product(context, layer, &kinds[op.index()], &weights);
        expert_factor(context.graph, op).is_some() && product()
    })
}

/// The innermost level in a role, samples on the other axes.
fn by_role(context: &Context<'_>, inside: AxisRole, zero: ZeroLevel) -> Assignment {
    let mesh = context.mesh();
    let innermost = mesh.axes().last().map(|axis| axis.level);
    let role = |level| if Some(level) == innermost { inside } else { AxisRole::Data };
    let roles = mesh.axes().iter().map(|axis| role(axis.level)).collect();
    let rules = UniformRules { zero, sequence: true };
    uniform_assignment(context, &RoleMesh { mesh: mesh.clone(), roles }, rules)
}

/// The first factor of a kind.
pub(crate) fn of_kind(kinds: &[FactorKind], kind: FactorKind) -> Option<FactorIndex> {
    kinds.iter().position(|&k| k == kind).map(|f| f as FactorIndex)
}

/// Outside the innermost level the batch; inside it a product with a weight is split by the rows of its weight if
/// its input arrives split along them, else by columns; everything else goes on as its inputs do, the largest first. Products of
/// data that arrives whole, such as attention scores, are split by heads.
fn megatron(
    context: &Context<'_>,
    layer: LayerId,
    kinds: &[FactorKind],
    weights: &[bool],
    chosen: &ChosenConfigs,
) -> Config {
    let guides = Guide::all(context, layer, chosen);
    let innermost = context.mesh().axes().last().map(|axis| axis.level);
    let product = is_product(context, layer, kinds, weights);
    let rows = |f: FactorIndex| kinds[f as usize] == FactorKind::Reduction;
    split_axes(context, layer, |axis| {
        if Some(context.mesh().axis(axis).level) != innermost {
            return of_kind(kinds, FactorKind::Sample);
        }
        let mut arrive = guides.iter().filter_map(|guide| guide.factor(axis));
        if product {
            arrive.find(|&f| rows(f)).or(of_kind(kinds, FactorKind::Parameter))
        } else {
            arrive.next().or_else(|| heads(context, layer, kinds, weights))
        }
    })
}

/// The factor of a product of data with data that both operands and the result have, other than the batch: heads of attention.
fn heads(
    context: &Context<'_>,
    layer: LayerId,
    kinds: &[FactorKind],
    weights: &[bool],
) -> Option<FactorIndex> {
    let op = context.layers.members[layer.index()].forward();
    let (node, rule) = (context.graph.node(op), &context.shapes[op.index()].rule);
    let summed = |f: FactorIndex| {
        rule.inputs.iter().all(|map| map.has(f)) && rule.outputs.iter().all(|map| !map.has(f))
    };
    let product = node.inputs.len() > 1 && (0..kinds.len() as FactorIndex).any(summed);
    if !product || reads_weight(context, layer, weights) {
        return None;
    }
    let everywhere = |f: FactorIndex| rule.inputs.iter().chain(&rule.outputs).all(|map| map.has(f));
    let mut factors = (0..kinds.len() as FactorIndex).filter(|&f| kinds[f as usize] == FactorKind::Attribute);
    factors.find(|&f| everywhere(f))
}

/// Whether the layer's forward op reads a weight, or what is computed from weights alone.
pub(crate) fn reads_weight(context: &Context<'_>, layer: LayerId, weights: &[bool]) -> bool {
    let node = context.graph.node(context.layers.members[layer.index()].forward());
    node.inputs.iter().any(|t| weights[t.index()])
}

/// Whether the layer's forward op multiplies data by a weight and sums. An embedding does not: what it reads
/// beside its table are ids.
pub(crate) fn is_product(
    context: &Context<'_>,
    layer: LayerId,
    kinds: &[FactorKind],
    weights: &[bool],
) -> bool {
    let node = context.graph.node(context.layers.members[layer.index()].forward());
    let data = |t: &TensorId| !weights[t.index()] && context.graph.tensor(*t).ty.dtype.is_float();
    reads_weight(context, layer, weights)
        && kinds.contains(&FactorKind::Reduction)
        && node.inputs.iter().any(data)
}

/// The config in which a layer makes its results as a reader with a config reads them. The iterations of a loop share a layer: what
/// the last one makes is read outside.
fn as_read(context: &Context<'_>, consumers: &Consumers, chosen: &ChosenConfigs, layer: LayerId) -> Config {
    let read_as = |reader: OpId, t: TensorId| {
        let input = context.graph.node(reader).inputs.iter().position(|&read| read == t)?;
        let (layer, member) = context.layers.index[reader.index()];
        let config = &chosen[layer as usize].as_ref()?[member as usize];
        Some(input_layout(&context.shapes[reader.index()], input, config, context.mesh()))
    };
    let members = &context.layers.members[layer.index()];
    let wanted = members.ops.iter().rev().find_map(|&op| {
        let outputs = context.graph.node(op).outputs.iter().enumerate();
        let mut readers =
            outputs.flat_map(|(o, &t)| consumers.of(t).iter().map(move |&reader| (o, t, reader)));
        readers.find_map(|(output, t, reader)| Some((output, read_as(reader, t)?)))
    });
    let rule = &context.shapes[members.forward().index()].rule;
    split_axes(context, layer, |axis| {
        let (output, layout) = wanted.as_ref()?;
        let Placement::Shard(dim) = layout.get(axis) else { return None };
        rule.leading(rule.outputs.get(*output)?.dims.get(usize::from(dim))?)
    })
}

/// Splits for each axis the factor that is asked for, where it divides; the rest repeats.
fn split_axes(
    context: &Context<'_>,
    layer: LayerId,
    factor: impl Fn(AxisId) -> Option<FactorIndex>,
) -> Config {
    split_op(context, context.layers.members[layer.index()].forward(), |_, axis| factor(axis))
}

/// Every one of some axes on the first factor that it divides further: their devices hold different parts.
fn shards(context: &Context<'_>, op: OpId, used: impl Fn(AxisId) -> bool) -> Config {
    let rule = &context.shapes[op.index()].rule;
    let partial = |f: &FactorIndex| rule.inputs.iter().any(|map| map.partial == Some(*f));
    let factors: SmallVec<[FactorIndex; 6]> =
        (0..rule.factors.len() as FactorIndex).filter(|f| !partial(f)).collect();
    // One factor for all axes, if there is one that can take them.
    let all = factors.iter().map(|&f| split_op(context, op, |_, axis| used(axis).then_some(f)));
    let full = |config: &Config| {
        let mut split = context.mesh().all().iter().filter(|&axis| used(axis));
        split.all(|axis| config.get(axis) != AxisUse::Replicate)
    };
    all.into_iter().find(full).unwrap_or_else(|| {
        let first = |divides: &dyn Fn(FactorIndex) -> bool| factors.iter().copied().find(|&f| divides(f));
        split_op(context, op, |divides, axis| if used(axis) { first(divides) } else { None })
    })
}

/// Splits for each axis the factor that is asked for, where it divides; the rest repeats. `factor` is told which
/// factors the axis divides further.
pub(crate) fn split_op(
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
pub(crate) struct Guide<'p> {
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
    pub(crate) fn all(context: &'p Context<'_>, layer: LayerId, chosen: &ChosenConfigs) -> Vec<Self> {
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
    pub(crate) fn factor(&self, axis: AxisId) -> Option<FactorIndex> {
        let Placement::Shard(dim) = self.layout.get(axis) else { return None };
        self.rule.leading(self.rule.inputs[self.input].dims.get(usize::from(dim))?)
    }
}
