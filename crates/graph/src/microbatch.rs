//! Micro-batches: from a training step to one that passes over its batch in equal parts before one update.
//!
//! The result is an ordinary graph in which every op runs once per micro-batch ([`Node::repeated`]) or once per step:
//!
//! - first, once: forward ops that read no data, such as casts of weights; and a view of every weight that micro-batches read
//!   (`w.held`). A layout of the view is held for the whole step; a micro-batch fetches any other layout it needs again. A
//!   weight that two layers read (a tied embedding) has a view for each of them;
//! - the body, once per micro-batch: all ops between data and gradients, on `1/m` of the samples;
//! - last, once: ops that read accumulated results: updates, and the sum of a tied embedding's two gradients.
//!
//! Every tensor of the body is one of four kinds:
//!
//! | kind | meaning | accumulated as |
//! |---|---|---|
//! | fixed | the same in every micro-batch | the mean |
//! | samples | one dimension runs over the micro-batch's samples | cannot be |
//! | sum | a sum over the micro-batch's samples: gradients of weights, the loss | the sum |
//! | statistic | computed from sums over the micro-batch's samples alone: the statistics of a batch norm | the mean |
//!
//! Scales of means count the samples of the whole batch, and so gradients and loss add up to those of the whole batch. A sum that
//! flows back into the body becomes a statistic: it is multiplied by `m`, as if the batch had the micro-batch's samples alone.
//! Then results differ from those of the whole batch; [`MicroBatched::statistics`] names these sums.

mod cuts;
mod error;
mod sections;

pub use error::MicroBatchError;

use crate::{
    graph::{Graph, Layer, Node, Phase, Role, SlicedTensor, Tensor, WeightGradient},
    ids::{LayerId, OpId, TensorId},
    ops::{Accumulate, Op, Reshape, Unary, UnaryFn},
    rule::{Reduction, Rule},
    types::{Real, TensorType},
};
use cuts::Cuts;
use rustc_hash::{FxHashMap, FxHashSet};
use sections::{Section, is_linear, sections};
use smallvec::{SmallVec, smallvec};
use std::num::NonZeroU32;

/// A step in micro-batches.
#[derive(Clone, PartialEq, Debug)]
pub struct MicroBatched {
    /// The step.
    pub graph: Graph,
    /// Names of sums over samples that flow back into the body. They are those of one micro-batch.
    pub statistics: Vec<String>,
}

/// The numbers of micro-batches that divide a step's batch, ascending.
///
/// # Errors
/// Where the batch cannot be found.
pub fn micro_batch_counts(graph: &Graph) -> Result<Vec<u32>, MicroBatchError> {
    let batch = batch(graph)?;
    let divisors = (1..=batch.min(1 << 20)).filter(|&count| batch.is_multiple_of(count));
    Ok(divisors.map(|count| count as u32).collect())
}

fn batch(graph: &Graph) -> Result<u64, MicroBatchError> {
    graph.step_size().samples.ok_or_else(|| {
        let inputs: Vec<String> = graph
            .sources(Role::Input)
            .filter(|&t| graph.tensor(t).ty.rank() > 0)
            .map(|t| format!("`{}` {}", graph.tensor(t).name.escape_debug(), graph.tensor(t).ty))
            .collect();
        let reason = match inputs.len() {
            0 => "it has no data".into(),
            _ => format!("its data have no common first dimension ({})", inputs.join(", ")),
        };
        MicroBatchError::NoBatch { model: graph.name.clone(), reason }
    })
}

/// Divides a step into `count` micro-batches. One micro-batch is the step itself.
///
/// # Errors
/// Where the batch cannot be found or divided, or an op cannot run on part of it.
pub fn microbatch(graph: &Graph, count: NonZeroU32) -> Result<MicroBatched, MicroBatchError> {
    if graph.micro_batches.get() > 1 {
        return Err(MicroBatchError::Divided { count: graph.micro_batches.get() });
    }
    if count.get() == 1 {
        return Ok(MicroBatched { graph: graph.clone(), statistics: Vec::new() });
    }
    let (batch, allowed) = (batch(graph)?, micro_batch_counts(graph)?);
    if !batch.is_multiple_of(u64::from(count.get())) {
        return Err(MicroBatchError::Count { count: count.get(), batch, allowed });
    }
    let cuts = Cuts::of(graph, u64::from(count.get()))?;
    let sections = sections(graph, &cuts);
    let mut rewrite = Rewrite::new(graph, count, cuts, sections);
    rewrite.sources();
    rewrite.hold_weights();
    for section in [Section::First, Section::Body, Section::Last] {
        if section == Section::Body {
            rewrite.hold_tied_weights();
        }
        for op in graph.op_ids() {
            if rewrite.sections[op.index()] == section {
                rewrite.op(op)?;
            }
        }
    }
    rewrite.finish()
}

/// The kind of a tensor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Fixed,
    Samples,
    Sum,
    Statistic,
}

struct Rewrite<'g> {
    base: &'g Graph,
    count: NonZeroU32,
    cuts: Cuts,
    sections: Vec<Section>,
    kinds: Vec<Kind>,
    graph: Graph,
    names: FxHashSet<String>,
    /// Per tensor of the base graph: its tensor, as its producer leaves it.
    made: Vec<Option<TensorId>>,
    /// Tensors as the body reads them, where those are others: held weights and statistics.
    in_body: FxHashMap<TensorId, TensorId>,
    /// The same for a layer that has a view of its own.
    in_layer: FxHashMap<(TensorId, LayerId), TensorId>,
    /// Sums over micro-batches.
    sums: FxHashMap<TensorId, TensorId>,
    /// Per tensor of the base graph: whether something outside the body needs it.
    leaves: Vec<bool>,
    layers: Vec<Option<LayerId>>,
    statistics: Vec<String>,
}

impl<'g> Rewrite<'g> {
    fn new(base: &'g Graph, count: NonZeroU32, cuts: Cuts, sections: Vec<Section>) -> Self {
        let mut leaves = vec![false; base.tensors.len()];
        let last = base.op_ids().filter(|op| sections[op.index()] == Section::Last);
        let read_last = last.flat_map(|op| base.node(op).inputs.iter().copied());
        let carried = base.carries.iter().map(|carry| carry.new);
        let gradients = base.gradients.iter().map(|g| g.gradient);
        for t in read_last.chain(base.outputs.iter().copied()).chain(carried).chain(gradients) {
            let producer = base.tensor(t).producer;
            leaves[t.index()] = producer.is_some_and(|op| sections[op.index()] == Section::Body);
        }
        let kind = |&cut: &Option<u8>| if cut.is_some() { Kind::Samples } else { Kind::Fixed };
        let names = base.tensors.iter().map(|t| &t.name).chain(base.ops.iter().map(|node| &node.name));
        Self {
            count,
            sections,
            leaves,
            kinds: cuts.dims.iter().map(kind).collect(),
            cuts,
            graph: Graph {
                name: base.name.clone(),
                op_by_op: base.op_by_op,
                micro_batches: count,
                ..Graph::default()
            },
            names: names.cloned().collect(),
            made: vec![None; base.tensors.len()],
            in_body: FxHashMap::default(),
            in_layer: FxHashMap::default(),
            sums: FxHashMap::default(),
            layers: vec![None; base.layers.len()],
            statistics: Vec::new(),
            base,
        }
    }

    fn parts(&self) -> u64 {
        u64::from(self.count.get())
    }

    /// The name with a number appended if it is taken.
    fn unique(&mut self, name: String) -> String {
        let mut unique = name.clone();
        let mut number = 1;
        while !self.names.insert(unique.clone()) {
            unique = format!("{name}.{number}");
            number += 1;
        }
        unique
    }

    fn tensor(&mut self, tensor: Tensor) -> TensorId {
        self.graph.tensors.push(tensor);
        TensorId::new(self.graph.tensors.len() - 1)
    }

    fn sources(&mut self) {
        for t in self.base.tensor_ids().filter(|&t| self.base.tensor(t).producer.is_none()) {
            let mut tensor = self.base.tensor(t).clone();
            let dim = self.cuts.dims[t.index()];
            if let Some(dim) = dim {
                let parts = self.parts();
                let sizes = tensor.ty.shape.iter().enumerate();
                tensor.ty.shape =
                    sizes.map(|(d, &size)| if d == usize::from(dim) { size / parts } else { size }).collect();
            }
            let id = self.tensor(tensor);
            self.made[t.index()] = Some(id);
            self.graph.sliced.extend(dim.map(|dim| SlicedTensor { tensor: id, dim }));
        }
    }

    /// Adds a view of every weight that the body reads, as its own layer.
    fn hold_weights(&mut self) {
        let base = self.base;
        for op in base.op_ids() {
            let in_body = self.sections[op.index()] == Section::Body;
            for &t in base.node(op).inputs.iter().filter(|_| in_body) {
                let tensor = base.tensor(t);
                let stored =
                    tensor.producer.is_none() && !matches!(tensor.role, Role::Input | Role::Constant);
                let Some(weight) = self.made[t.index()].filter(|_| stored) else { continue };
                if self.in_body.contains_key(&t) {
                    continue;
                }
                let held = self.view(t, weight);
                self.in_body.insert(t, held);
            }
        }
    }

    /// Adds a view for the second of two layers that read a weight, or what is computed from weights alone. Weights that more
    /// layers read, such as those of recurrent cells, keep one view.
    fn hold_tied_weights(&mut self) {
        let base = self.base;
        let mut layers: FxHashMap<TensorId, SmallVec<[LayerId; 2]>> = FxHashMap::default();
        let mut tied = Vec::new();
        for op in base.op_ids().filter(|op| self.sections[op.index()] == Section::Body) {
            let node = base.node(op);
            for &t in &node.inputs {
                let data = matches!(base.tensor(t).role, Role::Input | Role::Constant);
                let outside = match base.tensor(t).producer {
                    None => !data,
                    Some(producer) => self.sections[producer.index()] == Section::First,
                };
                let readers = layers.entry(t).or_default();
                if outside && !readers.contains(&node.layer) {
                    readers.push(node.layer);
                    if readers.len() == 2 {
                        tied.push(t);
                    }
                }
            }
        }
        for t in tied {
            if let (&[_, second], Some(weight)) = (&layers[&t][..], self.made[t.index()]) {
                let held = self.view(t, weight);
                self.in_layer.insert((t, second), held);
            }
        }
    }

    /// Adds a view of a weight as its own layer.
    fn view(&mut self, t: TensorId, weight: TensorId) -> TensorId {
        let tensor = self.base.tensor(t);
        let name = self.unique(format!("{}.held", tensor.name));
        let layer = self.layer(&name);
        let view = Reshape { shape: tensor.ty.shape.clone() };
        self.insert(name, view.into(), weight, (layer, Phase::Forward), false)
    }

    /// Begins a layer whose forward op is the next op.
    fn layer(&mut self, name: &str) -> LayerId {
        let forward = OpId::new(self.graph.ops.len());
        self.graph.layers.push(Layer { name: name.into(), forward });
        LayerId::new(self.graph.layers.len() - 1)
    }

    /// Adds an op with one operand whose result has the operand's type.
    fn insert(
        &mut self,
        name: String,
        op: Op,
        operand: TensorId,
        (layer, phase): (LayerId, Phase),
        repeated: bool,
    ) -> TensorId {
        let ty = self.graph.tensor(operand).ty.clone();
        let producer = Some(OpId::new(self.graph.ops.len()));
        let result =
            self.tensor(Tensor { name: name.clone(), ty, role: made_role(phase), producer, init: None });
        let (inputs, outputs) = (smallvec![operand], smallvec![result]);
        self.graph.ops.push(Node { name, op, inputs, outputs, layer, phase, repeated, recomputes: None });
        result
    }

    /// Adds an op that multiplies a tensor by a number.
    fn scaled(&mut self, suffix: &str, operand: TensorId, by: f64, at: (LayerId, Phase)) -> TensorId {
        let name = format!("{}.{suffix}", self.graph.tensor(operand).name);
        let name = self.unique(name);
        let f = UnaryFn::Affine { scale: Real(by), shift: Real(0.0) };
        self.insert(name, Unary { f }.into(), operand, at, true)
    }

    /// A tensor of the base graph as an op of the body reads it.
    fn body_operand(&mut self, op: OpId, t: TensorId, linear: bool) -> Result<TensorId, MicroBatchError> {
        let layer = self.base.node(op).layer;
        if let Some(&known) = self.in_layer.get(&(t, layer)).or_else(|| self.in_body.get(&t)) {
            return Ok(known);
        }
        let made = self.operand(op, t)?;
        if self.kinds[t.index()] != Kind::Sum || linear {
            return Ok(made);
        }
        let tensor = self.base.tensor(t);
        if !tensor.ty.dtype.is_float() {
            let name = tensor.name.escape_debug();
            let reason = format!("`{name}` is a sum of whole numbers over the batch");
            return Err(MicroBatchError::op(self.base, op, reason));
        }
        self.statistics.push(tensor.name.clone());
        let at = self.place(op)?;
        let scaled = self.scaled("micro_batch", made, self.parts() as f64, at);
        self.in_body.insert(t, scaled);
        Ok(scaled)
    }

    fn operand(&self, op: OpId, t: TensorId) -> Result<TensorId, MicroBatchError> {
        self.made[t.index()].ok_or_else(|| {
            let name = self.base.tensor(t).name.escape_debug();
            MicroBatchError::op(self.base, op, format!("`{name}` is computed once per step, after it"))
        })
    }

    /// Layer and phase of ops that are inserted beside an op.
    fn place(&self, op: OpId) -> Result<(LayerId, Phase), MicroBatchError> {
        let node = self.base.node(op);
        let layer = self.layers[node.layer.index()];
        let late =
            || MicroBatchError::op(self.base, op, "its layer's forward op runs once per step, after it");
        // A sum that flows back feeds an op that is not yet added: a layer may begin with it.
        Ok((layer.or_else(|| self.producer_layer(op)).ok_or_else(late)?, node.phase))
    }

    /// The layer of the op's first operand that an op makes.
    fn producer_layer(&self, op: OpId) -> Option<LayerId> {
        let mut producers = self.base.node(op).inputs.iter().filter_map(|&t| self.base.tensor(t).producer);
        producers.find_map(|p| self.layers[self.base.node(p).layer.index()])
    }

    fn op(&mut self, op: OpId) -> Result<(), MicroBatchError> {
        let (base, section) = (self.base, self.sections[op.index()]);
        let node = base.node(op);
        let body = section == Section::Body;
        let sums = node.inputs.iter().all(|t| self.kinds[t.index()] == Kind::Sum);
        let linear =
            self.cuts.factors[op.index()].is_none() && is_linear(node) && sums && !node.inputs.is_empty();
        let mut inputs: SmallVec<[TensorId; 4]> = SmallVec::new();
        for &t in &node.inputs {
            inputs.push(match self.sums.get(&t) {
                Some(&sum) if !body => sum,
                _ if body => self.body_operand(op, t, linear)?,
                _ => self.operand(op, t)?,
            });
        }
        let layer = if base.layers[node.layer.index()].forward == op {
            let layer = self.layer(&node.name);
            self.layers[node.layer.index()] = Some(layer);
            layer
        } else {
            self.place(op)?.0
        };
        let (local, types) = self.local(op, &inputs)?;
        let producer = Some(OpId::new(self.graph.ops.len()));
        let mut outputs: SmallVec<[TensorId; 2]> = SmallVec::new();
        for (o, (&t, ty)) in node.outputs.iter().zip(types).enumerate() {
            let tensor = base.tensor(t);
            let (name, leaves) = (tensor.name.clone(), body && self.leaves[t.index()]);
            let role = if leaves { made_role(node.phase) } else { tensor.role };
            let id = self.tensor(Tensor { name, ty, role, producer, init: None });
            self.made[t.index()] = Some(id);
            outputs.push(id);
            if body {
                self.kinds[t.index()] = self.result_kind(op, o, linear);
            }
        }
        let (name, phase, repeated) = (node.name.clone(), node.phase, body);
        self.graph.ops.push(Node {
            name,
            op: local,
            inputs,
            outputs,
            layer,
            phase,
            repeated,
            recomputes: None,
        });
        for (o, &t) in node.outputs.iter().enumerate().filter(|_| body) {
            if self.leaves[t.index()] {
                self.accumulate(op, o, t, (layer, phase))?;
            }
        }
        Ok(())
    }

    /// The op on one micro-batch, and the types of its results.
    fn local(&self, op: OpId, inputs: &[TensorId]) -> Result<(Op, Vec<TensorType>), MicroBatchError> {
        let base = self.base;
        let node = base.node(op);
        let (whole_inputs, whole_outputs) = (base.input_types(op), base.output_types(op));
        let part = |at| self.cuts.region(op, &whole_inputs, &whole_outputs, (at, self.parts()));
        let local = match (part(0), part(self.parts() - 1)) {
            (Some(first), Some(last)) => {
                let local = node.op.operator().localize(&first);
                if local != node.op.operator().localize(&last) && !node.op.operator().is_random() {
                    let reason = "it depends on positions in the batch";
                    return Err(MicroBatchError::op(base, op, reason));
                }
                local
            }
            _ => node.op.clone(),
        };
        let types: Vec<TensorType> = inputs.iter().map(|&t| self.graph.tensor(t).ty.clone()).collect();
        let inferred = local.operator().infer(&types);
        let inferred = inferred.map_err(|reason| MicroBatchError::op(base, op, reason.to_string()))?;
        Ok((local, inferred))
    }

    fn result_kind(&self, op: OpId, o: usize, linear: bool) -> Kind {
        let node = self.base.node(op);
        let kinds = || node.inputs.iter().map(|t| self.kinds[t.index()]);
        match self.cuts.factors[op.index()] {
            Some(factor) => {
                let map = &self.cuts.rules[op.index()].outputs[o];
                match (map.has(factor), map.reduction) {
                    (true, _) => Kind::Samples,
                    (false, Reduction::Sum) => Kind::Sum,
                    (false, Reduction::Max | Reduction::LogSumExp) => Kind::Statistic,
                }
            }
            None if linear => Kind::Sum,
            None if kinds().all(|kind| kind == Kind::Fixed) => Kind::Fixed,
            None => Kind::Statistic,
        }
    }

    /// Adds the sum of an op's result over micro-batches.
    fn accumulate(
        &mut self,
        op: OpId,
        o: usize,
        t: TensorId,
        at: (LayerId, Phase),
    ) -> Result<(), MicroBatchError> {
        let tensor = self.base.tensor(t);
        if self.kinds[t.index()] == Kind::Samples {
            return Err(MicroBatchError::Output { tensor: tensor.name.clone() });
        }
        if !tensor.ty.dtype.is_float() {
            let reason = format!("`{}` is a sum of whole numbers over the batch", tensor.name.escape_debug());
            return Err(MicroBatchError::op(self.base, op, reason));
        }
        let mut summand = self.operand(op, t)?;
        let made_by = self.graph.tensor(summand).producer.unwrap_or(OpId(0));
        let terms = terms(&self.graph.rule(made_by), o);
        if self.kinds[t.index()] != Kind::Sum {
            summand = self.scaled("share", summand, 1.0 / self.parts() as f64, at);
        }
        let name = self.unique(format!("{}.sum", tensor.name));
        let sum = self.insert(name, Accumulate { terms }.into(), summand, at, true);
        self.graph.tensors[sum.index()].role = tensor.role;
        self.sums.insert(t, sum);
        Ok(())
    }

    fn finish(mut self) -> Result<MicroBatched, MicroBatchError> {
        let base = self.base;
        let made = |t: TensorId| self.sums.get(&t).copied().or(self.made[t.index()]);
        let missing = |t: TensorId| MicroBatchError::Output { tensor: base.tensor(t).name.clone() };
        let last = |t: TensorId| made(t).ok_or_else(|| missing(t));
        for &t in &base.outputs {
            if base.tensor(t).producer.is_none() && self.cuts.dims[t.index()].is_some() {
                return Err(missing(t));
            }
            let output = last(t)?;
            self.graph.outputs.push(output);
        }
        for pair in &base.gradients {
            let (parameter, gradient) = (last(pair.parameter)?, last(pair.gradient)?);
            self.graph.gradients.push(WeightGradient { parameter, gradient });
        }
        for carry in &base.carries {
            let (old, new) = (last(carry.old)?, last(carry.new)?);
            self.graph.carries.push(crate::Carry { old, new });
        }
        debug_assert_eq!(crate::verify::verify(&self.graph), Ok(()));
        Ok(MicroBatched { graph: self.graph, statistics: self.statistics })
    }
}

/// The role of an op's result that is not carried over.
fn made_role(phase: Phase) -> Role {
    match phase {
        Phase::Forward => Role::Activation,
        Phase::Backward => Role::Gradient,
        Phase::Update => Role::Parameter,
    }
}

/// Iterations of the sum that an op leaves in a result, as far as axes can split it.
fn terms(rule: &Rule, o: usize) -> u64 {
    let map = &rule.outputs[o];
    let summed = rule.factors.iter().enumerate().filter(|(f, factor)| !factor.whole && !map.has(*f as u8));
    if map.reduction != Reduction::Sum {
        return 1;
    }
    summed.fold(1u64, |terms, (_, factor)| terms.saturating_mul(factor.size))
}
