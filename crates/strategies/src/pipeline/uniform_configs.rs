//! The configs of a uniform plan: every axis does to an op what its role says.
//!
//! - Data axes split the samples.
//! - Context axes split the sequence; attention gathers keys and values (Llama 3's context parallelism).
//! - Tensor axes split products with weights by columns and rows in turn (Megatron, Shoeybi et al. 2019), the vocabulary of
//!   embedding and logits, and the heads of attention. With sequence parallelism (Korthikanti et al. 2022) ops between
//!   these regions are split along the sequence; without, every device repeats them.
//! - Expert axes split the experts' products by expert, and the samples of all other ops.
//!
//! What is sharded over replicas follows the ZeRO level.

use super::{
    degrees::ZeroLevel,
    stage_mesh::{AxisRole, RoleMesh},
};
use crate::{
    recipes::{ChosenConfigs, Guide, held_as_read, is_product, of_kind, reads_weight, split_op},
    stored_ops::{weight_tensors, works_on_stored},
};
use shardwright_cost::Placement;
use shardwright_graph::{FactorIndex, FactorKind, Graph, LayerId, OpId, Phase, Role, TensorId, factor_kinds};
use shardwright_machine::{AxisId, AxisSet};
use shardwright_plan::Context;
use shardwright_space::{Assignment, AxisUse, Config, output_layout};
use smallvec::SmallVec;

/// What a uniform plan does with weights and activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UniformRules {
    pub zero: ZeroLevel,
    pub sequence: bool,
}

/// The uniform assignment of a context whose mesh has these roles. Axes of stages repeat every op.
pub(crate) fn uniform_assignment(context: &Context<'_>, mesh: &RoleMesh, rules: UniformRules) -> Assignment {
    let kinds = factor_kinds(context.graph);
    let weights = weight_tensors(context.graph);
    let mut chosen: ChosenConfigs = vec![None; context.layers.members.len()];
    for op in context.graph.op_ids() {
        let layer = context.graph.node(op).layer;
        let members = &context.layers.members[layer.index()];
        if members.forward() != op {
            continue;
        }
        let kinds = &kinds[op.index()];
        let choice = OpChoice { context, mesh, rules, layer, kinds, weights: &weights, chosen: &chosen };
        let config = choice.config(op);
        chosen[layer.index()] = Some(members.configs(&context.shapes, context.mesh(), &config));
    }
    let stored = works_on_stored(context.graph);
    let consumers = context.graph.consumers();
    let replicas = mesh.axes(|role| matches!(role, AxisRole::Data | AxisRole::Expert | AxisRole::Context));
    let parts = mesh.axes(|role| matches!(role, AxisRole::Tensor | AxisRole::Expert));
    let mut configs: Vec<Config> = Vec::with_capacity(context.graph.ops.len());
    for op in context.graph.op_ids() {
        let (layer, member) = context.layers.index[op.index()];
        let config = chosen[layer as usize].as_ref().map(|configs| &configs[member as usize]);
        let config = config.cloned().unwrap_or_else(|| Config::replicated(context.mesh().len()));
        let mut config = held_as_read(context, &consumers, &chosen, op).unwrap_or(config);
        let node = context.graph.node(op);
        if node.phase == Phase::Update {
            follow_gradient(context, op, parts, &configs, &mut config);
        }
        let accumulates = node.op.operator().accumulates();
        let held = context.graph.micro_batches.get() > 1 && node.phase == Phase::Forward;
        let split = |axis: &AxisId| config.get(*axis) != AxisUse::Replicate;
        let free: AxisSet = replicas.iter().filter(|axis| !parts.contains(*axis) || !split(axis)).collect();
        let alone = free.iter().all(|axis| !split(&axis));
        let whole = stored[op.index()] && (alone || accumulates);
        let sharded = match rules.zero {
            ZeroLevel::Off => false,
            ZeroLevel::State => !accumulates && !held,
            ZeroLevel::Gradients => !held,
            ZeroLevel::Weights => true,
        };
        configs.push(if whole && sharded { with_shards(context, op, config, free) } else { config });
    }
    Assignment::of(context.graph, configs)
}

/// Splits an update as its gradient lies on some axes: a master copy has no other reader that says how it is stored.
fn follow_gradient(context: &Context<'_>, op: OpId, axes: AxisSet, configs: &[Config], config: &mut Config) {
    let (graph, mesh) = (context.graph, context.mesh());
    let rule = &context.shapes[op.index()].rule;
    for axis in axes.iter().filter(|axis| config.get(*axis) == AxisUse::Replicate).collect::<Vec<_>>() {
        let led = graph.node(op).inputs.iter().zip(&rule.inputs).find_map(|(t, map)| {
            let producer = graph.tensor(*t).producer?;
            let output = graph.node(producer).outputs.iter().position(|made| made == t)?;
            let given = &configs[producer.index()];
            let layout = output_layout(&context.shapes[producer.index()], output, given, mesh);
            let Placement::Shard(dim) = layout.get(axis) else { return None };
            rule.leading(map.dims.get(usize::from(dim))?)
        });
        let parts = |f: FactorIndex| config.parts(rule, mesh)[f as usize];
        if let Some(f) = led.filter(|&f| rule.divides(f, parts(f), mesh.axis(axis).size)) {
            config.set(axis, AxisUse::Split(f));
        }
    }
}

/// The config with further axes on the first factor that they divide: their devices hold different parts.
fn with_shards(context: &Context<'_>, op: OpId, config: Config, axes: AxisSet) -> Config {
    let rule = &context.shapes[op.index()].rule;
    let partial = |f: &FactorIndex| rule.inputs.iter().any(|map| map.partial == Some(*f));
    let factors: SmallVec<[FactorIndex; 6]> =
        (0..rule.factors.len() as FactorIndex).filter(|f| !partial(f)).collect();
    let kept = |axis: AxisId| match config.get(axis) {
        AxisUse::Split(f) if !axes.contains(axis) => Some(f),
        _ => None,
    };
    // One factor for all axes, if there is one that can take them.
    let all = factors
        .iter()
        .map(|&f| split_op(context, op, |_, axis| if axes.contains(axis) { Some(f) } else { kept(axis) }));
    let full = |made: &Config| {
        context.mesh().all().iter().all(|axis| {
            let wanted = axes.contains(axis) || kept(axis).is_some();
            !wanted || made.get(axis) != AxisUse::Replicate
        })
    };
    all.into_iter().find(full).unwrap_or_else(|| {
        split_op(context, op, |divides, axis| match axes.contains(axis) {
            true => factors.iter().copied().find(|&f| divides(f)),
            false => kept(axis),
        })
    })
}

/// The choice of one layer's forward config.
struct OpChoice<'c, 'a> {
    context: &'c Context<'a>,
    mesh: &'c RoleMesh,
    rules: UniformRules,
    layer: LayerId,
    kinds: &'c [FactorKind],
    /// Which tensors are computed from weights alone.
    weights: &'c [bool],
    chosen: &'c ChosenConfigs,
}

impl OpChoice<'_, '_> {
    fn config(&self, op: OpId) -> Config {
        let guides = Guide::all(self.context, self.layer, self.chosen);
        let product = is_product(self.context, self.layer, self.kinds, self.weights);
        let sample = of_kind(self.kinds, FactorKind::Sample);
        let of = |kind| of_kind(self.kinds, kind);
        let expert = expert_factor(self.context.graph, op).filter(|_| product);
        let table = !product
            && reads_weight(self.context, self.layer, self.weights)
            && self.kinds.contains(&FactorKind::Reduction);
        split_op(self.context, op, |divides, axis| {
            let divides = |f: &FactorIndex| divides(*f);
            let arriving = || guides.iter().filter_map(|guide| guide.factor(axis)).find(divides);
            let kind = |f: FactorIndex| self.kinds[f as usize];
            // Along the sequence: as an input arrives, else the first dimension of the data beside the samples.
            let along_sequence = || {
                let arrives = arriving().filter(|f| matches!(kind(*f), FactorKind::Attribute));
                arrives.or_else(|| of(FactorKind::Attribute).filter(divides))
            };
            match self.mesh.roles[axis.index()] {
                AxisRole::Stage => None,
                AxisRole::Data => sample,
                AxisRole::Expert => {
                    let inside = arriving().filter(|f| kind(*f) != FactorKind::Reduction && !product);
                    expert.filter(divides).or(inside).or(sample)
                }
                AxisRole::Context if product || table => along_sequence(),
                AxisRole::Context => arriving().or_else(along_sequence),
                AxisRole::Tensor if table => of(FactorKind::Reduction).filter(divides),
                AxisRole::Tensor if product => {
                    let rows = guides.iter().filter_map(|guide| guide.factor(axis));
                    let rows = rows.filter(|f| kind(*f) == FactorKind::Reduction).find(divides);
                    let columns = || {
                        let all = (0..self.kinds.len() as FactorIndex)
                            .filter(|f| kind(*f) == FactorKind::Parameter && Some(*f) != expert);
                        all.into_iter().next().filter(divides)
                    };
                    rows.or_else(columns).or_else(along_sequence)
                }
                AxisRole::Tensor => {
                    // Masks and tables of positions have no samples: every device computes them whole.
                    let divided = self.rules.sequence && sample.is_some();
                    arriving().or_else(|| divided.then(along_sequence).flatten())
                }
            }
        })
    }
}

/// The factor that a weight shares with data and result: the experts of an expert's product.
pub(crate) fn expert_factor(graph: &Graph, op: OpId) -> Option<FactorIndex> {
    let node = graph.node(op);
    let weight = |t: &TensorId| graph.tensor(graph.held_weight(*t)).role == Role::Parameter;
    let weights = node.inputs.iter().filter(|t| weight(t) && graph.tensor(**t).ty.rank() > 2).count();
    if weights == 0 || node.inputs.len() < 2 {
        return None;
    }
    let rule = graph.rule(op);
    (0..rule.factors.len() as FactorIndex).find(|&f| {
        rule.factors[f as usize].size > 1
            && rule.inputs.iter().all(|map| map.has(f))
            && rule.outputs.iter().all(|map| map.has(f))
    })
}
