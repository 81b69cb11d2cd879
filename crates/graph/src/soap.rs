//! Factor kinds: FlexFlow's SOAP, for the training step as a whole.
//!
//! | kind | meaning |
//! |---|---|
//! | sample | runs over the batch |
//! | attribute | a dimension of the data that no weight has: height, sequence, heads |
//! | parameter | a dimension of a weight and of the result |
//! | reduction | summed away by the forward op |
//!
//! Kinds follow from the sharding rules alone. The batch is dimension 0 of every input of the graph. It is followed
//! through all ops in which a factor leads a dimension that holds it, so that a reshape that merges the batch with other
//! dimensions keeps it. A weight may reach its op through other ops (a cast, a reshape of a bias): a tensor computed from
//! weights but not from data counts as a weight. Backward and update ops take the kinds of their layer's forward op, by
//! the factor's name and size, unless their operands contradict. Kinds explain plans and limit search spaces; the cost of
//! a split follows from the rule.

use crate::{
    graph::{Graph, Node, Phase, Role},
    ids::OpId,
    rule::{FactorIndex, Rule},
};
use smallvec::SmallVec;

/// The role of a factor in the training step.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum FactorKind {
    /// Runs over the batch.
    Sample,
    /// A dimension of the data that no weight has.
    Attribute,
    /// A dimension of a weight and of the result.
    Parameter,
    /// Summed away by the forward op.
    Reduction,
}

/// A forward op's factor: name, size, kind.
type NamedKind = (&'static str, u64, FactorKind);

/// The origin of a tensor.
#[derive(Clone, Copy, Default)]
struct TensorOrigin {
    /// Bit `d`: dimension `d` starts with the batch. Tensors have at most 16 dimensions.
    sample_dims: u16,
    /// Depends on an input of the graph.
    data: bool,
    /// Depends on a weight, or is the gradient of one or its next value.
    weight: bool,
}

impl TensorOrigin {
    fn has_sample(self, dim: usize) -> bool {
        self.sample_dims & (1 << dim) != 0
    }

    /// Whether the tensor is computed from weights alone.
    fn is_weight(self) -> bool {
        self.weight && !self.data
    }
}

/// The kind of each factor of each op's rule, in the rule's order.
pub fn factor_kinds(graph: &Graph) -> Vec<SmallVec<[FactorKind; 6]>> {
    let source = |role, rank| TensorOrigin {
        sample_dims: (role == Role::Input && rank > 0) as u16,
        data: role == Role::Input,
        weight: matches!(role, Role::Parameter | Role::OptimizerState),
    };
    let mut origins: Vec<TensorOrigin> = graph.tensors.iter().map(|t| source(t.role, t.ty.rank())).collect();
    for g in &graph.gradients {
        origins[g.gradient.index()].weight = true;
    }
    let mut all: Vec<SmallVec<[FactorKind; 6]>> = Vec::with_capacity(graph.ops.len());
    // Factors of each layer's forward op, since backward ops are far from it.
    let mut layers: Vec<SmallVec<[NamedKind; 6]>> = vec![SmallVec::new(); graph.layers.len()];
    for id in graph.op_ids() {
        let node = graph.node(id);
        let rule = graph.rule(id);
        let factors = OpFactors { node, rule: &rule, origins: &origins };
        let kinds: SmallVec<[FactorKind; 6]> = (0..rule.factors.len())
            .map(|f| {
                let factor = &rule.factors[f];
                let same = |(name, size, _): &&NamedKind| *name == factor.name && *size == factor.size;
                let forward = layers[node.layer.index()].iter().find(same).map(|p| p.2);
                factors.kind(f as FactorIndex, forward)
            })
            .collect();
        if graph.layers[node.layer.index()].forward == id {
            let named = rule.factors.iter().zip(&kinds).map(|(f, &kind)| (f.name, f.size, kind));
            layers[node.layer.index()] = named.collect();
        }
        record_outputs(graph, id, &rule, &kinds, &mut origins);
        all.push(kinds);
    }
    all
}

/// Records the origins of an op's results.
fn record_outputs(graph: &Graph, id: OpId, rule: &Rule, kinds: &[FactorKind], origins: &mut [TensorOrigin]) {
    let node = graph.node(id);
    let data = node.inputs.iter().any(|t| origins[t.index()].data);
    let weight = node.inputs.iter().any(|t| origins[t.index()].weight);
    for (map, t) in rule.outputs.iter().zip(&node.outputs) {
        let origin = &mut origins[t.index()];
        for (d, dim) in map.dims.iter().enumerate() {
            let sample = rule.leading(dim).is_some_and(|f| kinds[f as usize] == FactorKind::Sample);
            origin.sample_dims |= (sample as u16) << d;
        }
        // Gradients of weights depend on the data but have the weight's dimensions: marked beforehand.
        if node.phase == Phase::Forward || node.recomputes.is_some() {
            (origin.data, origin.weight) = (data, weight);
        }
    }
}

/// An op's rule with the origins of its tensors.
struct OpFactors<'a> {
    node: &'a Node,
    rule: &'a Rule,
    origins: &'a [TensorOrigin],
}

impl OpFactors<'_> {
    /// The kind of a factor; `forward` is that of the forward op's factor of the same name and size.
    fn kind(&self, factor: FactorIndex, forward: Option<FactorKind>) -> FactorKind {
        let operands = || self.rule.inputs.iter().zip(&self.node.inputs);
        let leads_batch = operands().any(|(map, t)| {
            let dim = map.dim_led_by(factor, self.rule);
            dim.is_some_and(|d| self.origins[t.index()].has_sample(d))
        });
        if leads_batch {
            return FactorKind::Sample;
        }
        let read = operands().any(|(map, _)| map.has(factor));
        match forward {
            // The forward op's factor is the batch, but this op's operands do not have the batch there: the names
            // agree by chance. An op that reads no operand along the factor (a broadcast of the loss's gradient)
            // takes the forward op's kind.
            Some(FactorKind::Sample) if read => {}
            Some(kind) => return kind,
            None => {}
        }
        let results = || self.rule.outputs.iter().zip(&self.node.outputs);
        let of_weight = operands()
            .chain(results())
            .any(|(map, t)| map.has(factor) && self.origins[t.index()].is_weight());
        if self.rule.is_reduction(factor) {
            FactorKind::Reduction
        } else if of_weight {
            FactorKind::Parameter
        } else {
            FactorKind::Attribute
        }
    }
}
