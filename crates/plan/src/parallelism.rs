//! The kinds of parallelism of an assignment, axis by axis: what people call data, tensor or expert parallelism.
//!
//! An axis plays several roles where layers use it differently. Each role has a share of the computing time; the leading role
//! names the axis. Weights that are stored in more parts than their layer computes in are sharded, as in ZeRO and FSDP.

use crate::{context::Context, price::Costs};
use serde::{Deserialize, Serialize};
use shardwright_graph::{FactorIndex, FactorKind, OpId, Phase, Rule, factor_kinds};
use shardwright_machine::AxisId;
use shardwright_space::{Assignment, AxisUse};
use smallvec::SmallVec;

/// What an axis does to a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AxisRole {
    /// Splits the batch.
    Data,
    /// Splits a dimension of the data that no weight has: sequence, height, width, heads.
    Attribute,
    /// Splits a dimension of a weight.
    Tensor,
    /// Splits a dimension that a weight, the data and the result share: experts.
    Expert,
    /// Runs the layer on one side of the axis.
    Placement,
    /// Numbers the groups of a pipeline, which run one stage each.
    Pipeline,
    /// Repeats the layer.
    Replication,
}

impl AxisRole {
    const ALL: [Self; 7] = [
        Self::Data,
        Self::Attribute,
        Self::Tensor,
        Self::Expert,
        Self::Placement,
        Self::Pipeline,
        Self::Replication,
    ];

    /// The role in words.
    fn name(self) -> &'static str {
        match self {
            Self::Data => "data parallelism",
            Self::Attribute => "sequence or spatial parallelism",
            Self::Tensor => "tensor parallelism",
            Self::Expert => "expert parallelism",
            Self::Placement => "whole layers placed",
            Self::Pipeline => "pipeline parallelism",
            Self::Replication => "replicated",
        }
    }
}

/// A role with its share of the computing time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoleShare {
    /// The role.
    pub role: AxisRole,
    /// Between 0 and 1.
    pub share: f64,
}

/// What one mesh axis does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AxisRoles {
    /// The axis.
    pub axis: String,
    /// The level whose links it crosses.
    pub level: String,
    /// Its size.
    pub size: u32,
    /// Its roles, the largest share first.
    pub roles: Vec<RoleShare>,
    /// The share of the weights' bytes that are stored in parts along this axis, while their layer computes with whole weights.
    pub weights_sharded: f64,
    /// The share of the weights' bytes whose layer computes with parts of them along this axis.
    pub weights_parallel: f64,
}

impl AxisRoles {
    /// The role of the largest share.
    fn leading(&self) -> RoleShare {
        self.roles.first().copied().unwrap_or(RoleShare { role: AxisRole::Replication, share: 1.0 })
    }
}

/// The kinds of parallelism of an assignment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Parallelism {
    /// The same in words.
    pub words: String,
    /// The recipe that the assignment equals.
    pub recipe: Option<String>,
    /// Per mesh axis, outermost first.
    pub axes: Vec<AxisRoles>,
}

impl Parallelism {
    /// The kinds of parallelism of a priced assignment.
    pub fn of(context: &Context<'_>, assignment: &Assignment, costs: &Costs) -> Self {
        let mesh = context.mesh();
        let kinds = factor_kinds(context.graph);
        let role = |op: OpId, axis: usize| role(context, assignment, &kinds, op, axis);
        let weights = WeightParts::of(context, assignment, &role);
        let shares = role_times(context, costs, &role);
        let axes: Vec<AxisRoles> = mesh
            .all()
            .iter()
            .map(|axis| {
                let own = mesh.axis(axis);
                let times = &shares[axis.index()];
                let total: f64 = times.iter().sum();
                let mut roles: Vec<RoleShare> = AxisRole::ALL
                    .into_iter()
                    .zip(times)
                    .filter(|(_, time)| **time > 0.0)
                    .map(|(role, time)| RoleShare { role, share: time / total })
                    .collect();
                roles.sort_by(|a, b| b.share.total_cmp(&a.share).then(a.role.cmp(&b.role)));
                AxisRoles {
                    axis: own.name.clone(),
                    level: context.machine.levels()[own.level.index()].name.clone(),
                    size: own.size,
                    roles,
                    weights_sharded: weights.share(&weights.sharded, axis),
                    weights_parallel: weights.share(&weights.parallel, axis),
                }
            })
            .collect();
        Self { words: in_words(&axes), recipe: None, axes }
    }
}

/// What an axis does to an op.
fn role(
    context: &Context<'_>,
    assignment: &Assignment,
    kinds: &[SmallVec<[FactorKind; 6]>],
    op: OpId,
    axis: usize,
) -> AxisRole {
    let rule = &context.shapes[op.index()].rule;
    match assignment.config(op).uses()[axis] {
        AxisUse::Replicate => AxisRole::Replication,
        AxisUse::Pin(_) => match &assignment.pipeline {
            Some(pipeline) if pipeline.axes.contains(AxisId(axis as u32)) => AxisRole::Pipeline,
            _ => AxisRole::Placement,
        },
        AxisUse::Split(factor) => match kinds[op.index()][factor as usize] {
            FactorKind::Sample => AxisRole::Data,
            FactorKind::Attribute => AxisRole::Attribute,
            FactorKind::Parameter if is_in_all(rule, factor) => AxisRole::Expert,
            FactorKind::Parameter | FactorKind::Reduction => AxisRole::Tensor,
        },
    }
}

/// Per axis and role: picoseconds of the layers that use the axis so.
fn role_times(
    context: &Context<'_>,
    costs: &Costs,
    role: &impl Fn(OpId, usize) -> AxisRole,
) -> Vec<[f64; 7]> {
    let mut times = vec![[0.0; 7]; context.mesh().len()];
    for (layer, cost) in context.graph.layers.iter().zip(&costs.layers) {
        for (axis, times) in times.iter_mut().enumerate() {
            times[role(layer.forward, axis) as usize] += cost.compute as f64;
        }
    }
    times
}

/// Whether a contraction has a factor in all operands and in its result: a product per expert.
fn is_in_all(rule: &Rule, factor: FactorIndex) -> bool {
    let everywhere = rule.inputs.iter().chain(&rule.outputs).all(|map| map.has(factor));
    everywhere
        && rule.inputs.len() > 1
        && (0..rule.factors.len()).any(|f| rule.is_reduction(f as FactorIndex))
}

/// Bytes of weights: all, and per axis those stored or computed with in parts.
struct WeightParts {
    total: f64,
    sharded: Vec<f64>,
    parallel: Vec<f64>,
}

impl WeightParts {
    fn of(context: &Context<'_>, assignment: &Assignment, role: &impl Fn(OpId, usize) -> AxisRole) -> Self {
        let graph = context.graph;
        let none = vec![0.0; context.mesh().len()];
        let mut parts = Self { total: 0.0, sharded: none.clone(), parallel: none };
        for op in graph.op_ids().filter(|&op| graph.node(op).phase == Phase::Update) {
            let node = graph.node(op);
            let Some(&weight) = node.outputs.first() else { continue };
            let bytes = graph.tensor(weight).ty.bytes() as f64;
            let forward = graph.layers[node.layer.index()].forward;
            parts.total += bytes;
            for (axis, used) in assignment.config(op).uses().iter().enumerate() {
                if matches!(role(forward, axis), AxisRole::Tensor | AxisRole::Expert) {
                    parts.parallel[axis] += bytes;
                } else if matches!(used, AxisUse::Split(_)) {
                    parts.sharded[axis] += bytes;
                }
            }
        }
        parts
    }

    fn share(&self, of: &[f64], axis: AxisId) -> f64 {
        if self.total > 0.0 { of[axis.index()] / self.total } else { 0.0 }
    }
}

/// The share from which a role, or the sharding of weights, speaks for its axis.
const MOST: f64 = 0.8;
/// The share of the weights from which a kind of parallelism is worth a word.
const SOME: f64 = 0.2;

/// `data parallelism over 8 nodes × tensor parallelism over 8 GPUs; weights sharded over 8 nodes`.
fn in_words(axes: &[AxisRoles]) -> String {
    let mut roles: Vec<AxisRole> = axes.iter().map(|axis| axis.leading().role).collect();
    roles.dedup();
    let mut seen: Vec<AxisRole> = Vec::new();
    roles.retain(|role| {
        !seen.contains(role) && {
            seen.push(*role);
            true
        }
    });
    let parts = roles.iter().map(|&role| {
        let own: Vec<&AxisRoles> = axes.iter().filter(|axis| axis.leading().role == role).collect();
        let least = own.iter().map(|axis| axis.leading().share).fold(1.0, f64::min);
        let mostly = if least < MOST { "mostly " } else { "" };
        format!("{mostly}{} over {}", role.name(), units(&own))
    });
    let mut words = parts.collect::<Vec<_>>().join(" × ");
    // Few layers may hold most weights: a network's last layers, or tables.
    let elsewhere = |axis: &&AxisRoles| !matches!(axis.leading().role, AxisRole::Tensor | AxisRole::Expert);
    let parallel = axes.iter().filter(elsewhere).map(|axis| axis.weights_parallel).fold(0.0, f64::max);
    if parallel >= SOME {
        words.push_str(&format!(
            "; tensor parallelism in layers with {:.0}% of the weights",
            parallel * 100.0
        ));
    }
    let sharded: Vec<&AxisRoles> = axes.iter().filter(|axis| axis.weights_sharded >= 0.5).collect();
    if !sharded.is_empty() {
        let most =
            if sharded.iter().all(|axis| axis.weights_sharded >= MOST) { "weights" } else { "most weights" };
        let all = sharded.len() == axes.len();
        let over = if all { String::new() } else { format!(" over {}", units(&sharded)) };
        words.push_str(&format!("; {most} sharded{over}"));
    }
    words
}

/// The units that axes number: `8 nodes × 4 GPUs`.
fn units(axes: &[&AxisRoles]) -> String {
    let mut levels: Vec<(&str, u64)> = Vec::new();
    for axis in axes {
        match levels.iter_mut().find(|(name, _)| *name == axis.level) {
            Some((_, count)) => *count *= u64::from(axis.size),
            None => levels.push((&axis.level, u64::from(axis.size))),
        }
    }
    let unit = |name: &str, count: u64| {
        let known = match name {
            "gpu" => "GPU",
            "tpu" | "chip" => "chip",
            other => other,
        };
        format!("{count} {known}{}", if count == 1 { "" } else { "s" })
    };
    levels.into_iter().map(|(name, count)| unit(name, count)).collect::<Vec<_>>().join(" × ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axis(level: &str, size: u32, role: AxisRole, share: f64, weights_sharded: f64) -> AxisRoles {
        let roles = vec![RoleShare { role, share }];
        let (axis, level) = (format!("{level}.0"), level.into());
        AxisRoles { axis, level, size, roles, weights_sharded, weights_parallel: 0.0 }
    }

    #[test]
    fn axes_of_one_role_are_named_together() {
        let data = |level, size| axis(level, size, AxisRole::Data, 0.9, 1.0);
        let words = in_words(&[data("node", 2), data("node", 4), data("gpu", 8)]);
        assert_eq!(words, "data parallelism over 8 nodes × 8 GPUs; weights sharded");
    }

    #[test]
    fn layers_that_hold_the_weights_are_named() {
        let tables = AxisRoles { weights_parallel: 0.9, ..axis("gpu", 8, AxisRole::Data, 0.9, 0.05) };
        let words = "data parallelism over 8 GPUs; tensor parallelism in layers with 90% of the weights";
        assert_eq!(in_words(&[tables]), words);
    }

    #[test]
    fn every_role_has_its_units_and_sharding_names_its_own() {
        let words = in_words(&[
            axis("node", 8, AxisRole::Data, 0.7, 0.6),
            axis("gpu", 8, AxisRole::Tensor, 1.0, 0.0),
        ]);
        assert_eq!(
            words,
            "mostly data parallelism over 8 nodes × tensor parallelism over 8 GPUs; most weights sharded over 8 nodes"
        );
    }
}
