//! Builds graphs op by op: infers and checks shapes, gives unique names, keeps topological order by construction.

use crate::{
    graph::{Carry, Graph, Init, Layer, Node, Phase, Role, Tensor, WeightGradient},
    ids::{LayerId, OpId, TensorId},
    operator::OpError,
    ops::Op,
    types::TensorType,
    verify::{MAX_TOTAL_ELEMENTS, check_init, verify},
};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// Why a graph cannot be built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// An op does not accept its inputs.
    #[error("op `{name}` ({kind}): {reason}")]
    Op {
        /// The op's name.
        name: String,
        /// Its kind.
        kind: &'static str,
        /// The reason.
        reason: OpError,
    },
    /// A tensor with an illegal type or initial value.
    #[error("tensor `{name}`: {reason}")]
    Tensor {
        /// The tensor's name.
        name: String,
        /// The reason.
        reason: String,
    },
    /// The model asks for something impossible.
    #[error("{0}")]
    Model(String),
    /// An invariant of the builder does not hold.
    #[error("internal error: {0}; please report it")]
    Internal(String),
}

/// Builds a [`Graph`].
///
/// Names are made unique by appending `.1`, `.2`, ...; [`GraphBuilder::scoped`] prefixes them.
#[derive(Default)]
pub struct GraphBuilder {
    graph: Graph,
    used_names: FxHashMap<String, u32>,
    scope: String,
    total_elements: u64,
    /// Phase and layer of the ops added now; `None`: each op is a forward op with its own layer.
    backward: Option<(Phase, LayerId)>,
}

impl GraphBuilder {
    /// An empty graph of this name.
    pub fn new(name: impl Into<String>) -> Self {
        Self { graph: Graph { name: name.into(), ..Graph::default() }, ..Self::default() }
    }

    /// Continues a graph that passes the [verifier](crate::verify), for example to add its gradients.
    pub fn resume(graph: Graph) -> Self {
        let names = graph.tensors.iter().map(|t| &t.name).chain(graph.ops.iter().map(|n| &n.name));
        let used_names = names.map(|name| (name.clone(), 0)).collect();
        let total_elements = graph.tensors.iter().map(|t| t.ty.shape.elements()).sum();
        Self { graph, used_names, total_elements, ..Self::default() }
    }

    /// The graph so far.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// The finished graph.
    pub fn finish(self) -> Graph {
        debug_assert_eq!(verify(&self.graph), Ok(()));
        self.graph
    }

    /// The type of a tensor.
    pub fn ty(&self, tensor: TensorId) -> &TensorType {
        &self.graph.tensor(tensor).ty
    }

    /// The sizes of a tensor.
    pub fn shape(&self, tensor: TensorId) -> &[u64] {
        &self.ty(tensor).shape
    }

    /// Runs `build` with `scope.` before every name that it gives.
    pub fn scoped<R>(&mut self, scope: &str, build: impl FnOnce(&mut Self) -> R) -> R {
        let outer = self.scope.len();
        self.scope.push_str(scope);
        self.scope.push('.');
        let result = build(self);
        self.scope.truncate(outer);
        result
    }

    /// The name within the current scope, with a number appended if it is taken. Ops and tensors share
    /// one set of names: an op and its only output have the same one.
    fn unique(&mut self, name: &str) -> String {
        let full = format!("{}{name}", self.scope);
        let Some(&count) = self.used_names.get(&full) else {
            self.used_names.insert(full.clone(), 0);
            return full;
        };
        for number in count + 1.. {
            let numbered = format!("{full}.{number}");
            if !self.used_names.contains_key(&numbered) {
                self.used_names.insert(full, number);
                self.used_names.insert(numbered.clone(), 0);
                return numbered;
            }
        }
        full
    }

    fn numbered_output(&mut self, op: &str, i: usize) -> String {
        let scope = std::mem::take(&mut self.scope);
        let name = self.unique(&format!("{op}:{i}"));
        self.scope = scope;
        name
    }

    /// Refuses types that no tensor may have and more elements than a graph may hold, before anything changes.
    fn admit(&mut self, name: &str, types: &[TensorType]) -> Result<(), BuildError> {
        let error = |reason| BuildError::Tensor { name: name.into(), reason };
        let mut total = self.total_elements;
        for ty in types {
            ty.shape.check().map_err(error)?;
            total = total.saturating_add(ty.shape.elements());
        }
        if total > MAX_TOTAL_ELEMENTS {
            return Err(error("the graph's tensors have more than 2^56 elements together".into()));
        }
        if self.graph.tensors.len() + types.len() >= u32::MAX as usize {
            return Err(error("too many tensors".into()));
        }
        self.total_elements = total;
        Ok(())
    }

    fn push_tensor(&mut self, tensor: Tensor) -> TensorId {
        self.graph.tensors.push(tensor);
        TensorId::new(self.graph.tensors.len() - 1)
    }

    /// A tensor that no op makes.
    pub fn source(
        &mut self,
        name: &str,
        ty: TensorType,
        role: Role,
        init: Init,
    ) -> Result<TensorId, BuildError> {
        let error = |reason| BuildError::Tensor { name: name.into(), reason };
        self.admit(name, std::slice::from_ref(&ty))?;
        check_init(&ty, init).map_err(error)?;
        let name = self.unique(name);
        Ok(self.push_tensor(Tensor { name, ty, role, producer: None, init: Some(init) }))
    }

    /// Adds an op; returns its outputs.
    pub fn add(
        &mut self,
        name: &str,
        op: impl Into<Op>,
        inputs: &[TensorId],
    ) -> Result<SmallVec<[TensorId; 2]>, BuildError> {
        let op = op.into();
        let types: SmallVec<[TensorType; 4]> = inputs.iter().map(|&t| self.ty(t).clone()).collect();
        let error = |reason| BuildError::Op { name: name.into(), kind: op.kind(), reason };
        let output_types = op.operator().infer(&types).map_err(error)?;
        self.admit(name, &output_types)?;
        let name = self.unique(name);
        let id = OpId::new(self.graph.ops.len());
        let (phase, layer) = self.backward.unwrap_or_else(|| {
            self.graph.layers.push(Layer { name: name.clone(), forward: id });
            (Phase::Forward, LayerId::new(self.graph.layers.len() - 1))
        });
        let role = match phase {
            Phase::Forward => Role::Activation,
            Phase::Backward => Role::Gradient,
            Phase::Update => Role::Parameter,
        };
        let mut outputs = SmallVec::new();
        let count = output_types.len();
        for (i, ty) in output_types.into_iter().enumerate() {
            let name = if count == 1 { name.clone() } else { self.numbered_output(&name, i) };
            outputs.push(self.push_tensor(Tensor { name, ty, role, producer: Some(id), init: None }));
        }
        let (inputs, made) = (inputs.into(), outputs.clone());
        let (repeated, recomputes) = (false, None);
        self.graph.ops.push(Node { name, op, inputs, outputs: made, layer, phase, repeated, recomputes });
        Ok(outputs)
    }

    /// Adds an op with one output; returns it.
    pub fn emit(
        &mut self,
        name: &str,
        op: impl Into<Op>,
        inputs: &[TensorId],
    ) -> Result<TensorId, BuildError> {
        Ok(self.add(name, op, inputs)?[0])
    }

    /// Declares an output of the graph; the loss comes first.
    pub fn output(&mut self, tensor: TensorId) {
        self.graph.outputs.push(tensor);
    }

    /// Runs `build` so that the ops that it adds belong to `layer` and `phase`, with no scope before their names.
    pub fn in_layer<R>(&mut self, phase: Phase, layer: LayerId, build: impl FnOnce(&mut Self) -> R) -> R {
        let scope = std::mem::take(&mut self.scope);
        let before = self.backward.replace((phase, layer));
        let result = build(self);
        self.backward = before;
        self.scope = scope;
        result
    }

    /// Moves every op from `first` on to right after the last op before `first` that makes or reads one of its
    /// inputs. An op that depends on another one of these stays behind it.
    pub(crate) fn advance(&mut self, first: usize) {
        let graph = &mut self.graph;
        let mut last = vec![0u32; graph.tensors.len()];
        for (at, node) in graph.ops.iter().enumerate().take(first) {
            for t in node.inputs.iter().chain(&node.outputs) {
                last[t.index()] = at as u32;
            }
        }
        let mut order: Vec<(u32, usize)> = (0..first).map(|at| (at as u32, at)).collect();
        for (at, node) in graph.ops.iter().enumerate().skip(first) {
            // An op without inputs can come first.
            let place = node.inputs.iter().map(|t| last[t.index()]).max().unwrap_or(0);
            node.outputs.iter().for_each(|t| last[t.index()] = place);
            order.push((place, at));
        }
        order.sort_unstable();
        let mut moved = vec![OpId(0); order.len()];
        for (to, &(_, from)) in order.iter().enumerate() {
            moved[from] = OpId::new(to);
        }
        let mut ops: Vec<Option<Node>> = std::mem::take(&mut graph.ops).into_iter().map(Some).collect();
        graph.ops = order.iter().filter_map(|&(_, from)| ops[from].take()).collect();
        for producer in graph.tensors.iter_mut().filter_map(|tensor| tensor.producer.as_mut()) {
            *producer = moved[producer.index()];
        }
        for original in graph.ops.iter_mut().filter_map(|node| node.recomputes.as_mut()) {
            *original = moved[original.index()];
        }
        for layer in &mut graph.layers {
            layer.forward = moved[layer.forward.index()];
        }
    }

    /// Replaces an op by one with the same operands and results.
    pub(crate) fn replace_op(&mut self, id: OpId, op: Op) {
        self.graph.ops[id.index()].op = op;
    }

    pub(crate) fn record_gradient(&mut self, parameter: TensorId, gradient: TensorId) {
        self.graph.gradients.push(WeightGradient { parameter, gradient });
    }

    /// Makes another tensor the gradient of the `i`th pair.
    pub(crate) fn replace_gradient(&mut self, i: usize, gradient: TensorId) {
        self.graph.gradients[i].gradient = gradient;
    }

    /// Declares that `new` replaces `old` after the step.
    pub fn record_carry(&mut self, old: TensorId, new: TensorId) {
        let role = self.graph.tensor(old).role;
        self.graph.tensors[new.index()].role = role;
        self.graph.carries.push(Carry { old, new });
    }
}
