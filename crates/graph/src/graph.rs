//! The training graph: tensors, ops in topological order, layers, and the tensors that one step passes to the next.

use crate::{
    ids::{LayerId, OpId, TensorId},
    ops::Op,
    rule::Rule,
    types::{Real, TensorType},
};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::{num::NonZeroU32, ops::Range};

/// The role of a tensor.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// New in each step: data, labels.
    Input,
    /// A trained weight (before the step, or as updated by it).
    Parameter,
    /// Computed by a forward op.
    Activation,
    /// Computed by a backward op.
    Gradient,
    /// Optimizer state of a weight (before the step, or as updated by it).
    OptimizerState,
    /// Never changes.
    Constant,
}

/// The initial value of a tensor that no op makes: a pure function of seed, name and index.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Init {
    /// Every element is this number.
    Constant(Real),
    /// Normal with mean zero and this standard deviation.
    Normal(Real),
    /// Uniform over `-bound..bound`.
    Uniform(Real),
    /// Uniform over the whole numbers below this one: labels, token ids.
    Below(u64),
}

/// A tensor.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Tensor {
    /// Unique in the graph.
    pub name: String,
    /// Element type and shape.
    pub ty: TensorType,
    /// Its role.
    pub role: Role,
    /// The op that makes it; none for inputs, parameters, optimizer state and constants.
    pub producer: Option<OpId>,
    /// The initial value, if no op makes it.
    pub init: Option<Init>,
}

/// Which part of the training step an op belongs to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// From inputs to loss.
    Forward,
    /// From loss to gradients.
    Backward,
    /// From gradients to new weights.
    Update,
}

/// An op in the graph.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Node {
    /// Unique among ops.
    pub name: String,
    /// Kind and attributes.
    pub op: Op,
    /// Input tensors.
    pub inputs: SmallVec<[TensorId; 4]>,
    /// Output tensors.
    pub outputs: SmallVec<[TensorId; 2]>,
    /// The layer that it belongs to.
    pub layer: LayerId,
    /// Which part of the step it is.
    pub phase: Phase,
    /// Whether it runs once per micro-batch; other ops run once per step. Always false in a step of one micro-batch.
    pub repeated: bool,
    /// The forward op that this backward op recomputes ([`crate::remat`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recomputes: Option<OpId>,
}

/// A forward op together with the backward and update ops that came from it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Layer {
    /// The forward op's name.
    pub name: String,
    /// The forward op.
    pub forward: OpId,
}

/// At the end of a step, `new` becomes the next step's `old`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Carry {
    /// The weight or optimizer state before the step.
    pub old: TensorId,
    /// The same after the step.
    pub new: TensorId,
}

/// A weight and the gradient of the loss by it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct WeightGradient {
    /// The weight.
    pub parameter: TensorId,
    /// Its gradient.
    pub gradient: TensorId,
}

/// Data of which each micro-batch reads its own slice.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SlicedTensor {
    /// The tensor; its type is that of one slice.
    pub tensor: TensorId,
    /// The dimension that slices are cut along.
    pub dim: u8,
}

/// A training step (or a forward pass) as a dataflow graph. Ops are stored in topological order.
#[derive(Clone, PartialEq, Debug)]
pub struct Graph {
    /// The model's name.
    pub name: String,
    /// All tensors.
    pub tensors: Vec<Tensor>,
    /// All ops, each after those whose results it reads.
    pub ops: Vec<Node>,
    /// All layers.
    pub layers: Vec<Layer>,
    /// Outputs of the step; the loss, if there is one, comes first.
    pub outputs: Vec<TensorId>,
    /// The gradient of each weight, once differentiated.
    pub gradients: Vec<WeightGradient>,
    /// Tensors that the step passes to the next one.
    pub carries: Vec<Carry>,
    /// Whether it will run op by op, forwards and backwards, each op on its blocks alone, as PyTorch does with DTensor.
    /// Then windows do not reach beyond blocks, and a gradient that an op passes on has that op's layout.
    pub op_by_op: bool,
    /// Equal passes over parts of the batch before one update. One: no op is [repeated](Node::repeated).
    pub micro_batches: NonZeroU32,
    /// Data of which each micro-batch reads its own slice; all other sources are the same for all micro-batches.
    pub sliced: Vec<SlicedTensor>,
}

impl Default for Graph {
    fn default() -> Self {
        Self {
            name: String::new(),
            tensors: Vec::new(),
            ops: Vec::new(),
            layers: Vec::new(),
            outputs: Vec::new(),
            gradients: Vec::new(),
            carries: Vec::new(),
            op_by_op: false,
            micro_batches: NonZeroU32::MIN,
            sliced: Vec::new(),
        }
    }
}

/// The readers of each tensor: a flat index, built once per pass.
pub struct Consumers {
    starts: Vec<u32>,
    ops: Vec<OpId>,
}

impl Consumers {
    /// The ops that read a tensor, in topological order; an op that reads it twice is listed twice.
    pub fn of(&self, tensor: TensorId) -> &[OpId] {
        let i = tensor.index();
        &self.ops[self.starts[i] as usize..self.starts[i + 1] as usize]
    }
}

impl Graph {
    /// A tensor by id.
    pub fn tensor(&self, id: TensorId) -> &Tensor {
        &self.tensors[id.index()]
    }

    /// An op by id.
    pub fn node(&self, id: OpId) -> &Node {
        &self.ops[id.index()]
    }

    /// Ids of all ops in topological order.
    pub fn op_ids(&self) -> impl ExactSizeIterator<Item = OpId> + DoubleEndedIterator + use<> {
        (0..self.ops.len()).map(OpId::new)
    }

    /// Ids of all tensors.
    pub fn tensor_ids(&self) -> impl ExactSizeIterator<Item = TensorId> + DoubleEndedIterator + use<> {
        (0..self.tensors.len()).map(TensorId::new)
    }

    /// How often an op runs in a step.
    pub fn runs(&self, id: OpId) -> u32 {
        if self.node(id).repeated { self.micro_batches.get() } else { 1 }
    }

    /// The ops that run once per micro-batch; they are neighbours.
    pub fn body(&self) -> Range<usize> {
        let start = self.ops.iter().position(|node| node.repeated).unwrap_or(0);
        let length = self.ops[start..].iter().take_while(|node| node.repeated).count();
        start..start + length
    }

    /// The dimension that a tensor's slices are cut along, if each micro-batch reads its own.
    pub fn sliced_dim(&self, tensor: TensorId) -> Option<usize> {
        self.sliced.iter().find(|slice| slice.tensor == tensor).map(|slice| usize::from(slice.dim))
    }

    /// The weight that micro-batches read through a view ([`crate::microbatch`]); any other tensor is itself.
    pub fn held_weight(&self, tensor: TensorId) -> TensorId {
        let producer = self.tensor(tensor).producer.map(|op| self.node(op));
        let held = producer
            .filter(|node| self.micro_batches.get() > 1 && !node.repeated && node.op.operator().is_view());
        let source = held.and_then(|node| node.inputs.first().copied());
        let once = |t: TensorId| self.tensor(t).producer.is_none_or(|op| !self.node(op).repeated);
        let same = |&t: &TensorId| once(t) && self.tensor(t).ty == self.tensor(tensor).ty;
        source.filter(same).unwrap_or(tensor)
    }

    /// The tensor with the data of the whole step: that of all slices, one after the other.
    pub fn whole_tensor(&self, id: TensorId) -> Tensor {
        let mut whole = self.tensor(id).clone();
        if let Some(dim) = self.sliced_dim(id) {
            let sizes = whole.ty.shape.iter().enumerate();
            let times = |d: usize| if d == dim { u64::from(self.micro_batches.get()) } else { 1 };
            whole.ty.shape = sizes.map(|(d, &size)| size.saturating_mul(times(d))).collect();
        }
        whole
    }

    /// Types of an op's inputs.
    pub fn input_types(&self, id: OpId) -> SmallVec<[TensorType; 4]> {
        self.node(id).inputs.iter().map(|&t| self.tensor(t).ty.clone()).collect()
    }

    /// Types of an op's outputs.
    pub fn output_types(&self, id: OpId) -> SmallVec<[TensorType; 4]> {
        self.node(id).outputs.iter().map(|&t| self.tensor(t).ty.clone()).collect()
    }

    /// The sharding rule of an op.
    pub fn rule(&self, id: OpId) -> Rule {
        let inputs = self.input_types(id);
        let mut rule = self.node(id).op.rule(&inputs, &self.output_types(id));
        if self.op_by_op {
            rule.keep_windows_in_blocks(&inputs);
        }
        rule
    }

    /// Floating-point operations of an op.
    pub fn flops(&self, id: OpId) -> u64 {
        self.node(id).op.operator().flops(&self.input_types(id), &self.output_types(id))
    }

    /// Bytes that a perfect kernel of an op reads and writes.
    pub fn bytes(&self, id: OpId) -> u64 {
        self.node(id).op.operator().bytes(&self.input_types(id), &self.output_types(id))
    }

    /// Floating-point operations of the whole graph.
    pub fn total_flops(&self) -> u64 {
        let flops = |id| self.flops(id).saturating_mul(u64::from(self.runs(id)));
        self.op_ids().fold(0u64, |n, id| n.saturating_add(flops(id)))
    }

    /// The trained weights before the step.
    pub fn parameters(&self) -> impl Iterator<Item = TensorId> + '_ {
        self.sources(Role::Parameter)
    }

    /// Tensors with this role that no op makes.
    pub fn sources(&self, role: Role) -> impl Iterator<Item = TensorId> + '_ {
        self.tensor_ids().filter(move |&t| self.tensor(t).role == role && self.tensor(t).producer.is_none())
    }

    /// The number of trained numbers.
    pub fn parameter_count(&self) -> u64 {
        self.parameters().map(|t| self.tensor(t).ty.shape.elements()).sum()
    }

    /// The loss, if the graph computes one.
    pub fn loss(&self) -> Option<TensorId> {
        self.outputs.first().copied()
    }

    /// The index of each tensor's readers.
    pub fn consumers(&self) -> Consumers {
        let mut starts = vec![0u32; self.tensors.len() + 1];
        for t in self.ops.iter().flat_map(|n| &n.inputs) {
            starts[t.index() + 1] += 1;
        }
        for i in 0..self.tensors.len() {
            starts[i + 1] += starts[i];
        }
        let mut next = starts.clone();
        let mut ops = vec![OpId(0); starts[self.tensors.len()] as usize];
        for id in self.op_ids() {
            for t in &self.node(id).inputs {
                ops[next[t.index()] as usize] = id;
                next[t.index()] += 1;
            }
        }
        Consumers { starts, ops }
    }
}
