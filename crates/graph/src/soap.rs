//! What kind of dimension each factor of each op is, seen from the training step as a whole: FlexFlow's SOAP.
//!
//! | kind | meaning |
//! |---|---|
//! | sample | runs over the batch |
//! | attribute | a dimension of the data that no weight has: height, sequence, heads |
//! | parameter | a dimension of a weight and of the result |
//! | reduction | summed away by the forward op |
//!
//! Derived from the sharding rules alone. The batch is dimension 0 of every input of the graph; it is
//! followed through the ops wherever a factor leads a dimension that holds it, so a reshape that merges the
//! batch with other dimensions keeps it. A weight may reach its op through other ops (a cast, a reshape of a
//! bias): what is computed from weights but not from data counts as a weight. Backward and update ops take
//! the kinds of their layer's forward op, by the factor's name and size, where their own operands do not say
//! otherwise. These kinds explain plans and limit search spaces; what a split *costs* follows from the rule.

use crate::{
    graph::{Graph, Node, Phase, Role},
    ids::OpId,
    rule::{FactorIndex, Rule},
};
use smallvec::SmallVec;

/// What splitting a factor means for the training step.
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

/// What is known of a tensor while walking the graph.
#[derive(Clone, Copy, Default)]
struct Facts {
    /// Bit `d`: dimension `d` starts with the batch. Tensors have at most 16 dimensions.
    sample_dims: u16,
    /// Depends on an input of the graph.
    data: bool,
    /// Depends on a weight, or is the gradient of one or its next value.
    weight: bool,
}

impl Facts {
    fn has_sample(self, dim: usize) -> bool {
        self.sample_dims & (1 << dim) != 0
    }

    /// Whether the tensor is a weight, in whatever form.
    fn is_weight(self) -> bool {
        self.weight && !self.data
    }
}

/// The kind of each factor of each op's rule, in the rule's order.
pub fn factor_kinds(graph: &Graph) -> Vec<SmallVec<[FactorKind; 6]>> {
    let source = |role, rank| Facts {
        sample_dims: (role == Role::Input && rank > 0) as u16,
        data: role == Role::Input,
        weight: matches!(role, Role::Parameter | Role::OptimizerState),
    };
    let mut facts: Vec<Facts> = graph.tensors.iter().map(|t| source(t.role, t.ty.rank())).collect();
    for g in &graph.gradients {
        facts[g.gradient.index()].weight = true;
    }
    let mut all: Vec<SmallVec<[FactorKind; 6]>> = Vec::with_capacity(graph.ops.len());
    // Factors of each layer's forward op, since backward ops are far from it.
    let mut layers: Vec<SmallVec<[NamedKind; 6]>> = vec![SmallVec::new(); graph.layers.len()];
    for id in graph.op_ids() {
        let node = graph.node(id);
        let rule = graph.rule(id);
        let step = Step { node, rule: &rule, facts: &facts };
        let kinds: SmallVec<[FactorKind; 6]> = (0..rule.factors.len())
            .map(|f| {
                let factor = &rule.factors[f];
                let same = |(name, size, _): &&NamedKind| *name == factor.name && *size == factor.size;
                let forward = layers[node.layer.index()].iter().find(same).map(|p| p.2);
                step.kind(f as FactorIndex, forward)
            })
            .collect();
        if graph.layers[node.layer.index()].forward == id {
            let named = rule.factors.iter().zip(&kinds).map(|(f, &kind)| (f.name, f.size, kind));
            layers[node.layer.index()] = named.collect();
        }
        record_outputs(graph, id, &rule, &kinds, &mut facts);
        all.push(kinds);
    }
    all
}

/// What the op's results are now known to be.
fn record_outputs(graph: &Graph, id: OpId, rule: &Rule, kinds: &[FactorKind], facts: &mut [Facts]) {
    let node = graph.node(id);
    let data = node.inputs.iter().any(|t| facts[t.index()].data);
    let weight = node.inputs.iter().any(|t| facts[t.index()].weight);
    for (map, t) in rule.outputs.iter().zip(&node.outputs) {
        let fact = &mut facts[t.index()];
        for (d, dim) in map.dims.iter().enumerate() {
            let sample = rule.leading(dim).is_some_and(|f| kinds[f as usize] == FactorKind::Sample);
            fact.sample_dims |= (sample as u16) << d;
        }
        // Gradients of weights depend on the data but have the weight's dimensions: marked beforehand.
        if node.phase == Phase::Forward {
            (fact.data, fact.weight) = (data, weight);
        }
    }
}

struct Step<'a> {
    node: &'a Node,
    rule: &'a Rule,
    facts: &'a [Facts],
}

impl Step<'_> {
    /// The kind of a factor; `forward` is that of the forward op's factor of the same name and size.
    fn kind(&self, factor: FactorIndex, forward: Option<FactorKind>) -> FactorKind {
        let operands = || self.rule.inputs.iter().zip(&self.node.inputs);
        let leads_batch = operands().any(|(map, t)| {
            let dim = map.dim_led_by(factor, self.rule);
            dim.is_some_and(|d| self.facts[t.index()].has_sample(d))
        });
        if leads_batch {
            return FactorKind::Sample;
        }
        let read = operands().any(|(map, _)| map.has(factor));
        match forward {
            // The forward op's factor was the batch, but this op's operands do not have the batch there: the
            // names agree by chance. An op that reads no operand along the factor (a broadcast of the
            // loss's gradient) can only take the forward op's word.
            Some(FactorKind::Sample) if read => {}
            Some(kind) => return kind,
            None => {}
        }
        let results = || self.rule.outputs.iter().zip(&self.node.outputs);
        let of_weight =
            operands().chain(results()).any(|(map, t)| map.has(factor) && self.facts[t.index()].is_weight());
        if self.rule.is_reduction(factor) {
            FactorKind::Reduction
        } else if of_weight {
            FactorKind::Parameter
        } else {
            FactorKind::Attribute
        }
    }
}
