//! Factor kinds: FlexFlow's SOAP, for the training step as a whole.
//!
//! | kind | meaning |
//! |---|---|
//! | sample | runs over the batch |
//! | attribute | a dimension of the data that no weight has: height, sequence, heads |
//! | parameter | a dimension of a weight and of the result |
//! | reduction | summed away by the forward op |
//!
//! Kinds follow from the sharding rules alone. The batch is dimension 0 of every input of the graph, unless all readers take
//! that dimension apart: the micro-batches of a loop, or its time steps. Then it is the next dimension that goes on. The batch is
//! followed through all ops in which a factor leads a dimension that holds it, so that a reshape that merges the batch with
//! other dimensions keeps it. A weight may reach its op through other ops (a cast, a reshape of a bias): a tensor computed from
//! weights but not from data counts as a weight. Backward and update ops take the kinds of their layer's forward op, by
//! the factor's name and size, unless their operands contradict. Kinds explain plans and limit search spaces; the cost of
//! a split follows from the rule.

use crate::{
    graph::{Graph, Node, Phase, Role},
    ids::{OpId, TensorId},
    rule::{DimMap, FactorIndex, Rule},
    types::TensorType,
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

/// Per tensor: the dimension that runs over the batch, for inputs of the graph.
pub fn batch_dims(graph: &Graph) -> Vec<Option<usize>> {
    let live = live_dims(graph);
    let dim = |t: TensorId| {
        let tensor = graph.tensor(t);
        let bit = if tensor.role == Role::Input { batch_dim(&tensor.ty, live[t.index()]) } else { 0 };
        (bit != 0).then_some(bit.trailing_zeros() as usize)
    };
    graph.tensor_ids().map(dim).collect()
}

/// The kind of each factor of each op's rule, in the rule's order.
pub fn factor_kinds(graph: &Graph) -> Vec<SmallVec<[FactorKind; 6]>> {
    let live = live_dims(graph);
    let source = |t: TensorId| {
        let tensor = graph.tensor(t);
        TensorOrigin {
            sample_dims: if tensor.role == Role::Input { batch_dim(&tensor.ty, live[t.index()]) } else { 0 },
            data: tensor.role == Role::Input,
            weight: matches!(tensor.role, Role::Parameter | Role::OptimizerState),
        }
    };
    let mut origins: Vec<TensorOrigin> = graph.tensor_ids().map(source).collect();
    for g in &graph.gradients {
        origins[g.gradient.index()].weight = true;
    }
    let mut all: Vec<SmallVec<[FactorKind; 6]>> = Vec::with_capacity(graph.ops.len());
    // Factors of each layer's forward op, since backward ops are far from it.
    let mut layers: Vec<SmallVec<[NamedKind; 6]>> = vec![SmallVec::new(); graph.layers.len()];
    for id in graph.op_ids() {
        let node = graph.node(id);
        let rule = graph.rule(id);
        let factors = OpFactors { node, rule: &rule, origins: &origins, live: &live };
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

/// The dimension of an input that is the batch, as a bit: the first that goes on. A single sample stays one.
fn batch_dim(ty: &TensorType, live: u16) -> u16 {
    match ty.shape.first() {
        None => 0,
        Some(1) => 1,
        Some(_) => live & live.wrapping_neg(),
    }
}

/// Per tensor, bit `d`: dimension `d` goes on into a result of the graph or into a sum. A dimension that all readers cut into
/// slices does not.
fn live_dims(graph: &Graph) -> Vec<u16> {
    let consumers = graph.consumers();
    let mut live = vec![0u16; graph.tensors.len()];
    for t in graph.tensor_ids().filter(|&t| consumers.of(t).is_empty()) {
        live[t.index()] = u16::MAX;
    }
    for id in graph.op_ids().collect::<Vec<_>>().into_iter().rev() {
        let (node, rule) = (graph.node(id), graph.rule(id));
        for (map, t) in rule.inputs.iter().zip(&node.inputs) {
            for (d, dim) in map.dims.iter().enumerate() {
                let goes_on = dim.factors.iter().any(|&f| is_live(&rule, f, node, &live));
                live[t.index()] |= (goes_on as u16) << d;
            }
        }
    }
    live
}

/// Whether a factor of an op is summed, or leads a dimension of a result that goes on.
fn is_live(rule: &Rule, factor: FactorIndex, node: &Node, live: &[u16]) -> bool {
    rule.is_reduction(factor)
        || rule
            .outputs
            .iter()
            .zip(&node.outputs)
            .any(|(map, t)| map.dim_led_by(factor, rule).is_some_and(|d| live[t.index()] & (1 << d) != 0))
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
    /// Per tensor: the dimensions that go on.
    live: &'a [u16],
}

impl OpFactors<'_> {
    /// The factor of a batch dimension that runs over the samples: the leading one. A reshape may divide the batch into
    /// micro-batches, which are then taken one by one: the samples are the next factor.
    fn batch_factor(&self, dim: &DimMap) -> Option<FactorIndex> {
        let leading = self.rule.leading(dim)?;
        let size = |f: FactorIndex| self.rule.factors[f as usize].size;
        let goes_on = |&&f: &&FactorIndex| size(f) > 1 && is_live(self.rule, f, self.node, self.live);
        dim.factors.iter().find(goes_on).copied().or(Some(leading))
    }

    /// The kind of a factor; `forward` is that of the forward op's factor of the same name and size.
    fn kind(&self, factor: FactorIndex, forward: Option<FactorKind>) -> FactorKind {
        let operands = || self.rule.inputs.iter().zip(&self.node.inputs);
        let leads_batch = operands().any(|(map, t)| {
            let origin = self.origins[t.index()];
            let mut batch = map.dims.iter().enumerate().filter(|(d, _)| origin.has_sample(*d));
            batch.any(|(_, dim)| self.batch_factor(dim) == Some(factor))
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
