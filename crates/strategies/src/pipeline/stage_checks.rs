//! Checks that a uniform plan's degrees divide a stage's products, and finds weights that several segments share.

use super::{
    degrees::{DegreeError, UniformPlan},
    pricer::{StepGraph, role_mesh},
    segment_costs::{SegmentCost, Segments},
    stage_mesh::{AxisRole, RoleMesh},
    uniform_configs::{UniformRules, expert_factor, uniform_assignment},
};
use crate::{recipes::is_product, stored_ops::weight_tensors};
use shardwright_graph::{FactorKind, Phase, Role, factor_kinds};
use shardwright_machine::builtin;
use shardwright_plan::Context;
use shardwright_space::{Assignment, AxisUse};
use std::collections::{BTreeMap, BTreeSet};

/// More devices of one stage are not tried where other degrees are wrong already.
const MOST_CHECKED: u32 = 4096;

/// Refuses degrees that do not divide the products of blocks.
pub(super) fn check_products(
    context: &Context<'_>,
    mesh: &RoleMesh,
    assignment: &Assignment,
    segments: &Segments<'_>,
    plan: &UniformPlan,
) -> Result<(), DegreeError> {
    let (kinds, weights) = (factor_kinds(context.graph), weight_tensors(context.graph));
    let mut reasons = BTreeMap::new();
    for op in context.graph.op_ids() {
        let node = context.graph.node(op);
        let segment = segments.of_op(context, op);
        let inside = segment > 0 && segment + 1 < segments.count;
        let forward = context.graph.layers[node.layer.index()].forward == op;
        if !inside || !forward || node.phase != Phase::Forward {
            continue;
        }
        if !is_product(context, node.layer, &kinds[op.index()], &weights) {
            continue;
        }
        let uses = |role: AxisRole, wanted: &[FactorKind]| {
            mesh.axes(|own| own == role).iter().all(|axis| match assignment.config(op).get(axis) {
                AxisUse::Split(f) => wanted.contains(&kinds[op.index()][f as usize]),
                _ => false,
            })
        };
        let rule = &context.shapes[op.index()].rule;
        let sizes = |wanted: &[FactorKind]| {
            let own = rule.factors.iter().zip(&kinds[op.index()]).filter(|(_, kind)| wanted.contains(kind));
            own.map(|(factor, _)| format!("{}={}", factor.name, factor.size)).collect::<Vec<_>>().join(", ")
        };
        let weights = [FactorKind::Parameter, FactorKind::Reduction];
        if !uses(AxisRole::Tensor, &weights) {
            let reason = format!("tp={} does not divide `{}` ({})", plan.tensor, node.name, sizes(&weights));
            reasons.entry("tp").or_insert(reason);
        }
        let sequence = [FactorKind::Attribute];
        if !uses(AxisRole::Context, &sequence) && !sizes(&sequence).is_empty() {
            let reason = format!(
                "cp={} does not divide the sequence of `{}` ({})",
                plan.context,
                node.name,
                sizes(&sequence)
            );
            reasons.entry("cp").or_insert(reason);
        }
        if !uses(AxisRole::Data, &[FactorKind::Sample]) {
            let reason = format!("dp={} does not divide `{}`", plan.data, node.name);
            reasons.entry("dp").or_insert(reason);
        }
    }
    if plan.expert > 1 && !splits_experts(context, mesh, assignment, &kinds) {
        let found = context.graph.op_ids().find_map(|op| {
            let rule = &context.shapes[op.index()].rule;
            let experts = expert_factor(context.graph, op)?;
            Some((&context.graph.node(op).name, rule.factors[usize::from(experts)].size))
        });
        let reason = match found {
            Some((name, experts)) => {
                format!("ep={} does not divide the {experts} experts of `{name}`", plan.expert)
            }
            None => format!("ep={}: the model has no experts", plan.expert),
        };
        reasons.insert("ep", reason);
    }
    match reasons.is_empty() {
        true => Ok(()),
        false => Err(DegreeError { reasons: reasons.into_values().collect() }),
    }
}

/// The degrees that do not divide the products of blocks, on whatever devices: each is tried alone, and each reason names one.
pub(super) fn undivided(step: &StepGraph, plan: &UniformPlan) -> Vec<String> {
    let one = UniformPlan { tensor: 1, context: 1, expert: 1, data: 1, ..*plan };
    let alone = [
        (plan.tensor, UniformPlan { tensor: plan.tensor, ..one }),
        (plan.context, UniformPlan { context: plan.context, ..one }),
        (plan.expert, UniformPlan { expert: plan.expert, data: plan.expert, ..one }),
    ];
    let tried = alone.iter().filter(|(devices, _)| (2..=MOST_CHECKED).contains(devices));
    tried.flat_map(|(devices, plan)| undivided_on(step, plan, *devices).unwrap_or_default()).collect()
}

/// The reasons against a plan on so many equal devices; none where it cannot be tried.
fn undivided_on(step: &StepGraph, plan: &UniformPlan, devices: u32) -> Option<Vec<String>> {
    let machine = builtin(&format!("flat:{devices}")).ok()?;
    let mesh = role_mesh(&machine, plan, 1).ok()?;
    let context = Context::new(&step.graph, &machine, None, mesh.mesh.clone(), true).ok()?;
    let rules = UniformRules { zero: plan.zero, sequence: plan.sequence };
    let assignment = uniform_assignment(&context, &mesh, rules);
    let checked = check_products(&context, &mesh, &assignment, &step.segments(), plan);
    checked.err().map(|error| error.reasons)
}

/// Whether some product is divided by expert.
fn splits_experts(
    context: &Context<'_>,
    mesh: &RoleMesh,
    assignment: &Assignment,
    kinds: &[smallvec::SmallVec<[FactorKind; 6]>],
) -> bool {
    let axes = mesh.axes(|role| role == AxisRole::Expert);
    context.graph.op_ids().any(|op| {
        context.graph.node(op).phase == Phase::Forward
            && axes.iter().all(|axis| match assignment.config(op).get(axis) {
                AxisUse::Split(f) => kinds[op.index()][f as usize] == FactorKind::Parameter,
                _ => false,
            })
    })
}

/// Bytes of weights that several segments read, and their share of the first segment's weights.
pub(super) fn tied(
    context: &Context<'_>,
    assignment: &Assignment,
    segments: &Segments<'_>,
    costs: &[SegmentCost],
) -> (u64, f64) {
    let graph = context.graph;
    let mut readers: BTreeMap<u32, BTreeSet<usize>> = BTreeMap::new();
    for op in graph.op_ids().filter(|&op| graph.node(op).phase == Phase::Forward) {
        for &t in &graph.node(op).inputs {
            let weight = graph.held_weight(t);
            let view = graph.tensor(t).producer.is_none() && graph.micro_batches.get() > 1;
            if graph.tensor(weight).role == Role::Parameter && !view {
                readers.entry(weight.0).or_default().insert(segments.of_op(context, op));
            }
        }
    }
    let shared = readers.iter().filter(|(_, own)| own.len() > 1);
    let bytes = shared.map(|(&t, _)| {
        let tensor = shardwright_graph::TensorId(t);
        let source = context.transfers.sources[tensor.index()];
        source.map_or(0, |source| {
            let layout = source.layout(&context.shapes, assignment.config(source.op), context.mesh());
            shardwright_plan::local_bytes(context, tensor, &layout)
        })
    });
    let bytes: u64 = bytes.sum();
    let all = costs.first().map_or(0, |cost| cost.weight_bytes).max(1);
    (bytes, (bytes as f64 / all as f64).min(1.0))
}
