//! Reverse-mode differentiation: appends explicit backward ops, each tied to the layer of its forward op.

use crate::{
    builder::{BuildError, GraphBuilder},
    graph::{Phase, Role},
    ids::{LayerId, OpId, TensorId},
    operator::OpError,
    ops::{Binary, BinaryFn, Broadcast, Fill, Op, Reduce, Reshape},
    types::{Real, Shape, TensorType},
};
use smallvec::SmallVec;

/// The context of an op's gradient: the op's inputs, outputs and incoming gradients, and a builder for backward ops.
pub struct GradContext<'a> {
    builder: &'a mut GraphBuilder,
    op: OpId,
    /// Gradient of each output.
    grads: SmallVec<[Option<TensorId>; 2]>,
    /// Whether the gradient of each input is needed.
    wanted: SmallVec<[bool; 4]>,
}

impl GradContext<'_> {
    /// The `i`-th input of the forward op.
    pub fn input(&self, i: usize) -> TensorId {
        self.builder.graph().node(self.op).inputs[i]
    }

    /// All inputs of the forward op.
    pub fn inputs(&self) -> SmallVec<[TensorId; 4]> {
        self.builder.graph().node(self.op).inputs.clone()
    }

    /// The type of the `i`-th input.
    pub fn input_type(&self, i: usize) -> &TensorType {
        self.builder.ty(self.input(i))
    }

    /// The `i`-th output of the forward op.
    pub fn output(&self, i: usize) -> TensorId {
        self.builder.graph().node(self.op).outputs[i]
    }

    /// The type of any tensor.
    pub fn ty(&self, tensor: TensorId) -> &TensorType {
        self.builder.ty(tensor)
    }

    /// The gradient of the `i`-th output, if any flows.
    pub fn grad(&self, i: usize) -> Option<TensorId> {
        self.grads[i]
    }

    /// Whether the gradient of the `i`-th input is needed.
    pub fn wants(&self, i: usize) -> bool {
        self.wanted[i]
    }

    /// Appends a backward op; returns its outputs.
    pub fn add(
        &mut self,
        op: impl Into<Op>,
        inputs: &[TensorId],
    ) -> Result<SmallVec<[TensorId; 2]>, OpError> {
        let name = format!("{}.grad", self.builder.graph().node(self.op).name);
        self.builder.add(&name, op, inputs).map_err(|e| OpError::new(e.to_string()))
    }

    /// Appends a backward op with one output; returns it.
    pub fn emit(&mut self, op: impl Into<Op>, inputs: &[TensorId]) -> Result<TensorId, OpError> {
        Ok(self.add(op, inputs)?[0])
    }

    /// Appends `a f b`.
    pub fn binary(&mut self, f: BinaryFn, a: TensorId, b: TensorId) -> Result<TensorId, OpError> {
        self.emit(Binary { f }, &[a, b])
    }

    /// Repeats a tensor to `shape`, its dimensions becoming dimensions `dims` of the result.
    pub fn broadcast(
        &mut self,
        tensor: TensorId,
        shape: Shape,
        dims: SmallVec<[usize; 4]>,
    ) -> Result<TensorId, OpError> {
        if self.ty(tensor).shape == shape {
            return Ok(tensor);
        }
        self.emit(Broadcast { shape, dims }, &[tensor])
    }

    /// Sums the gradient of a NumPy-style broadcast back to the operand's shape.
    pub fn unbroadcast(&mut self, grad: TensorId, shape: &Shape) -> Result<TensorId, OpError> {
        let from = self.ty(grad).shape.clone();
        if from == *shape {
            return Ok(grad);
        }
        let skip = from.rank() - shape.rank();
        let axes: SmallVec<[usize; 4]> =
            (0..from.rank()).filter(|&i| i < skip || (shape[i - skip] == 1 && from[i] != 1)).collect();
        let summed = self.emit(Reduce::sum(axes), &[grad])?;
        if self.ty(summed).shape == *shape {
            return Ok(summed);
        }
        self.emit(Reshape { shape: shape.clone() }, &[summed])
    }

    /// A tensor of zeros of this type.
    pub fn zeros(&mut self, ty: TensorType) -> Result<TensorId, OpError> {
        self.emit(Fill { value: Real(0.0), ty }, &[])
    }
}

/// Appends the gradient of the scalar `loss` by every parameter that it depends on, and records them.
///
/// Parameters that the loss does not depend on get none.
pub fn differentiate(builder: &mut GraphBuilder, loss: TensorId) -> Result<(), BuildError> {
    let loss_type = builder.ty(loss).clone();
    if loss_type.rank() != 0 || !loss_type.dtype.is_float() {
        return Err(BuildError::Model(format!(
            "the loss must be one floating-point number, not {loss_type}"
        )));
    }
    let Some(last) = builder.graph().tensor(loss).producer else {
        return Err(BuildError::Model("the loss is not computed by any op".into()));
    };
    let needed = tensors_that_need_gradients(builder);
    let forward_ops = builder.graph().ops.len();
    let mut grads: Vec<Option<TensorId>> = vec![None; builder.graph().tensors.len()];
    let first_layer = first_consumer_layers(builder);
    let loss_layer = builder.graph().node(last).layer;
    let seed = builder.in_layer(Phase::Backward, loss_layer, |b| {
        b.emit("loss.grad", Fill { value: Real(1.0), ty: loss_type }, &[])
    })?;
    grads[loss.index()] = Some(seed);

    for op in (0..forward_ops).rev().map(OpId::new) {
        let node = builder.graph().node(op);
        let output_grads: SmallVec<_> = node.outputs.iter().map(|t| grads[t.index()]).collect();
        let wanted: SmallVec<[bool; 4]> = node.inputs.iter().map(|t| needed[t.index()]).collect();
        if output_grads.iter().all(Option::is_none) || !wanted.contains(&true) {
            continue;
        }
        let (layer, inputs, operator) = (node.layer, node.inputs.clone(), node.op.clone());
        let error = |b: &GraphBuilder, reason| {
            let node = b.graph().node(op);
            BuildError::Op { name: node.name.clone(), kind: node.op.kind(), reason }
        };
        let passed_on = output_grads.clone();
        let input_grads = builder.in_layer(Phase::Backward, layer, |b| {
            let mut cx = GradContext { builder: b, op, grads: output_grads, wanted: wanted.clone() };
            operator.operator().gradient(&mut cx)
        });
        let input_grads = input_grads.map_err(|reason| error(builder, reason))?;
        if input_grads.len() != inputs.len() {
            return Err(error(builder, OpError::new("its gradient does not cover its inputs")));
        }
        for ((&tensor, grad), wanted) in inputs.iter().zip(input_grads).zip(wanted) {
            let Some(mut grad) = grad.filter(|_| wanted) else { continue };
            if builder.graph().op_by_op && passed_on.contains(&Some(grad)) {
                grad = pass_through(builder, op, grad)?;
            }
            let sum = match grads[tensor.index()] {
                None => grad,
                Some(before) => accumulate(builder, tensor, before, grad, first_layer[tensor.index()])?,
            };
            grads[tensor.index()] = Some(sum);
        }
    }
    let parameters: Vec<_> = builder.graph().parameters().collect();
    for parameter in parameters {
        if let Some(gradient) = grads[parameter.index()] {
            builder.record_gradient(parameter, gradient);
        }
    }
    Ok(())
}

/// Copies a gradient that an op passes on unchanged, so that the op's layer has a tensor to lay out.
fn pass_through(builder: &mut GraphBuilder, op: OpId, grad: TensorId) -> Result<TensorId, BuildError> {
    let node = builder.graph().node(op);
    let (layer, name) = (node.layer, format!("{}.grad", node.name));
    let shape = builder.ty(grad).shape.clone();
    builder.in_layer(Phase::Backward, layer, |b| b.emit(&name, Reshape { shape }, &[grad]))
}

/// Adds a second contribution to a tensor's gradient, in the layer that made the tensor.
fn accumulate(
    builder: &mut GraphBuilder,
    tensor: TensorId,
    before: TensorId,
    grad: TensorId,
    source_layer: Option<LayerId>,
) -> Result<TensorId, BuildError> {
    let graph = builder.graph();
    let producer_layer = graph.tensor(tensor).producer.map(|p| graph.node(p).layer);
    let Some(layer) = producer_layer.or(source_layer) else {
        let name = &graph.tensor(tensor).name;
        return Err(BuildError::Internal(format!("`{name}` has gradients but no op makes or reads it")));
    };
    let name = format!("{}.grad_sum", graph.tensor(tensor).name);
    builder.in_layer(Phase::Backward, layer, |b| b.emit(&name, Binary { f: BinaryFn::Add }, &[before, grad]))
}

/// Which tensors depend on a parameter: only their gradients are needed.
fn tensors_that_need_gradients(builder: &GraphBuilder) -> Vec<bool> {
    let graph = builder.graph();
    let mut needed: Vec<bool> = graph
        .tensors
        .iter()
        .map(|t| t.role == Role::Parameter && t.producer.is_none() && t.ty.dtype.is_float())
        .collect();
    for node in &graph.ops {
        if node.inputs.iter().any(|t| needed[t.index()]) {
            for t in &node.outputs {
                needed[t.index()] = graph.tensor(*t).ty.dtype.is_float();
            }
        }
    }
    needed
}

/// The layer of the first op that reads each tensor: the backward ops of weights belong to it.
pub(crate) fn first_consumer_layers(builder: &GraphBuilder) -> Vec<Option<LayerId>> {
    let graph = builder.graph();
    let mut layers = vec![None; graph.tensors.len()];
    for node in &graph.ops {
        for t in &node.inputs {
            layers[t.index()].get_or_insert(node.layer);
        }
    }
    layers
}
