//! Recognises attention that a graph computes by products, masks and softmax, and replaces it by the fused op.
//!
//! The pattern is `context = softmax(scale * (q·k) + bias)·v`, in a forward graph or in a step that has its backward pass
//! inside. Einsum letters tell dimensions apart, so operands may have their dimensions in any order; a transposition is added
//! where the fused op needs another. Masks are sums with a bias or selections of a very negative number. A causal mask or a
//! window is an attribute, whether it is stored or computed from positions. Weights may be dropped out in a forward graph.
//!
//! - [`rows`] follows scores through element-wise ops, and evaluates them on random rows.
//! - [`constants`] reads numbers, stored masks and bounds.
//! - [`masks`] follows scores through factors and masks to the softmax.
//! - [`pattern`] finds attention, forward and backward.
//!
//! A step's attention is replaced if forward and backward pass match both; else it stays as it is.

mod constants;
mod masks;
mod pattern;
mod rows;
#[cfg(test)]
mod tests;

use self::{
    constants::Constants,
    masks::Mask,
    pattern::{Dim, Matcher, Operand, Pattern},
};
use crate::{
    builder::{BuildError, GraphBuilder},
    graph::{Graph, Init, Node},
    ids::{LayerId, OpId, TensorId},
    ops::{AttentionGrad, Binary, BinaryFn, Cast, Fill, Op, Reshape, Select, Transpose},
    types::{Real, Shape, TensorType},
};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

/// A graph whose attention is fused.
pub struct AttentionFusion {
    /// The graph.
    pub graph: Graph,
    /// The new tensor of each tensor of the given graph; `None`: an intermediate result of attention.
    pub tensors: Vec<Option<TensorId>>,
    /// The fused op that does the work of the op that made a tensor of the given graph.
    pub replaced: FxHashMap<TensorId, OpId>,
    /// Names of the fused ops.
    pub fused: Vec<String>,
}

impl AttentionFusion {
    /// A note for users: what was fused.
    pub fn note(&self) -> Option<String> {
        let first = self.fused.first()?;
        let rest = match self.fused.len() - 1 {
            0 => String::new(),
            n => format!(" and {n} more"),
        };
        Some(format!(
            "products and softmax that end in `{first}`{rest} are one attention op each; --plain-attention keeps them apart"
        ))
    }
}

/// Fuses the attention of a graph. `kept` are tensors that the caller refers to, beside the graph's outputs and carries.
/// `contents` returns the elements of a constant that no op makes, so that a stored causal mask is recognised.
///
/// # Errors
/// Never for a graph that passes the [verifier](crate::verify).
pub fn fuse_attention(
    graph: Graph,
    kept: &[TensorId],
    contents: &dyn Fn(TensorId) -> Option<Vec<f64>>,
) -> Result<AttentionFusion, BuildError> {
    let matcher = Matcher {
        constants: Constants { graph: &graph, contents },
        consumers: graph.consumers(),
        kept: kept.iter().copied().chain(ends(&graph)).collect(),
    };
    let mut taken: FxHashSet<OpId> = FxHashSet::default();
    let mut patterns: Vec<Pattern> = Vec::new();
    // A step that is divided into micro-batches was imported, and fused, before.
    for op in graph.op_ids().filter(|_| graph.micro_batches.get() == 1) {
        // A product that ends one attention is not the scores of another.
        if let Some(pattern) = matcher.at(op).filter(|pattern| pattern.removed.is_disjoint(&taken)) {
            taken.extend(&pattern.removed);
            patterns.push(pattern);
        }
    }
    if patterns.is_empty() {
        let tensors = graph.tensor_ids().map(Some).collect();
        return Ok(AttentionFusion { graph, tensors, replaced: FxHashMap::default(), fused: Vec::new() });
    }
    Rewriter::new(&graph, &patterns).rewrite()
}

/// Tensors that a graph returns or passes to the next step.
fn ends(graph: &Graph) -> impl Iterator<Item = TensorId> + '_ {
    let gradients = graph.gradients.iter().map(|g| g.gradient);
    graph.outputs.iter().copied().chain(graph.carries.iter().map(|c| c.new)).chain(gradients)
}

/// What the backward op needs of the forward op.
struct Forward {
    inputs: Vec<TensorId>,
    result: TensorId,
    lse: TensorId,
}

/// Builds a graph again, with fused ops in the place of products.
struct Rewriter<'a> {
    graph: &'a Graph,
    patterns: &'a [Pattern],
    b: GraphBuilder,
    tensors: Vec<Option<TensorId>>,
    replaced: FxHashMap<TensorId, OpId>,
    /// The new layer of an old one, and of the ops that a fused op adds: by the old layer and the number of the op.
    layers: FxHashMap<(LayerId, usize), (LayerId, Op, Vec<TensorType>)>,
    /// The layer of the op that is replaced now, and how many ops it has so far.
    place: (LayerId, usize),
}

impl<'a> Rewriter<'a> {
    fn new(graph: &'a Graph, patterns: &'a [Pattern]) -> Self {
        Self {
            graph,
            patterns,
            b: GraphBuilder::new(graph.name.clone()),
            tensors: vec![None; graph.tensors.len()],
            replaced: FxHashMap::default(),
            layers: FxHashMap::default(),
            place: (LayerId(0), 0),
        }
    }

    fn rewrite(mut self) -> Result<AttentionFusion, BuildError> {
        let graph = self.graph;
        let idle = idle_ops(graph, self.patterns);
        let mut sources = graph.tensor_ids().filter(|&t| graph.tensor(t).producer.is_none()).peekable();
        let mut forwards: FxHashMap<OpId, usize> = FxHashMap::default();
        let mut backwards: FxHashMap<OpId, usize> = FxHashMap::default();
        let mut removed: FxHashSet<OpId> = FxHashSet::default();
        for (i, pattern) in self.patterns.iter().enumerate() {
            forwards.insert(pattern.context, i);
            removed.extend(&pattern.removed);
            if let Some(backward) = &pattern.backward {
                let products = backward.products.iter().map(|(op, _)| *op);
                let first = products.chain([backward.weights_gradient]).min();
                first.and_then(|op| backwards.insert(op, i));
            }
        }
        let mut made: FxHashMap<usize, Forward> = FxHashMap::default();
        let mut fused = Vec::new();
        for id in graph.op_ids() {
            let node = graph.node(id);
            let before = node.outputs.iter().min().copied();
            while let Some(t) = sources.next_if(|t| before.is_none_or(|first| *t < first)) {
                self.declare(t)?;
            }
            self.place = (node.layer, 1);
            if let Some(&at) = forwards.get(&id) {
                made.insert(at, self.forward(&self.patterns[at])?);
                fused.push(node.name.clone());
            } else if let Some(&at) = backwards.get(&id) {
                let forward = made.get(&at).ok_or_else(|| internal("a backward pass comes first"))?;
                self.backward(&self.patterns[at], forward)?;
            } else if !removed.contains(&id) && !idle[id.index()] {
                self.keep(id, node)?;
            }
        }
        for t in sources {
            self.declare(t)?;
        }
        for &t in &graph.outputs {
            let t = self.renamed(t)?;
            self.b.output(t);
        }
        for carry in &graph.carries {
            let (old, new) = (self.renamed(carry.old)?, self.renamed(carry.new)?);
            self.b.record_carry(old, new);
        }
        for pair in &graph.gradients {
            let (parameter, gradient) = (self.renamed(pair.parameter)?, self.renamed(pair.gradient)?);
            self.b.record_gradient(parameter, gradient);
        }
        let mut new = self.b.finish();
        new.op_by_op = graph.op_by_op;
        Ok(AttentionFusion { graph: new, tensors: self.tensors, replaced: self.replaced, fused })
    }

    fn declare(&mut self, t: TensorId) -> Result<(), BuildError> {
        let tensor = self.graph.tensor(t);
        let init = tensor.init.unwrap_or(Init::Constant(Real(0.0)));
        self.tensors[t.index()] = Some(self.b.source(&tensor.name, tensor.ty.clone(), tensor.role, init)?);
        Ok(())
    }

    fn renamed(&self, t: TensorId) -> Result<TensorId, BuildError> {
        self.tensors[t.index()].ok_or_else(|| internal("an intermediate result of attention is read"))
    }

    /// Adds an op in its old layer.
    fn keep(&mut self, id: OpId, node: &Node) -> Result<(), BuildError> {
        let inputs = node.inputs.iter().map(|&t| self.renamed(t)).collect::<Result<Vec<_>, _>>()?;
        let key = (node.layer, 0);
        let leads = self.graph.layers[node.layer.index()].forward == id;
        let outputs = match self.layers.get(&key).filter(|_| !leads) {
            Some(&(layer, ..)) => {
                self.b.in_layer(node.phase, layer, |b| b.add(&node.name, node.op.clone(), &inputs))?
            }
            None => {
                let outputs = self.b.add(&node.name, node.op.clone(), &inputs)?;
                let layer = LayerId::new(self.b.graph().layers.len() - 1);
                self.layers.insert(key, (layer, node.op.clone(), Vec::new()));
                outputs
            }
        };
        for (old, new) in node.outputs.iter().zip(outputs) {
            self.tensors[old.index()] = Some(new);
        }
        Ok(())
    }

    /// Adds an op of a replacement. Equal ops of one place in a loop share their layer.
    fn add(
        &mut self,
        name: &str,
        op: impl Into<Op>,
        inputs: &[TensorId],
    ) -> Result<SmallVec<[TensorId; 2]>, BuildError> {
        let op = op.into();
        let types: Vec<TensorType> = inputs.iter().map(|&t| self.b.ty(t).clone()).collect();
        let key = self.place;
        self.place.1 += 1;
        let same = |(_, other, others): &&(LayerId, Op, Vec<TensorType>)| *other == op && *others == types;
        if let Some(&(layer, ..)) = self.layers.get(&key).filter(same) {
            return self.b.in_layer(crate::Phase::Forward, layer, |b| b.add(name, op, inputs));
        }
        let outputs = self.b.add(name, op.clone(), inputs)?;
        let layer = LayerId::new(self.b.graph().layers.len() - 1);
        self.layers.entry(key).or_insert((layer, op, types));
        Ok(outputs)
    }

    fn last_op(&self) -> OpId {
        OpId::new(self.b.graph().ops.len() - 1)
    }

    /// Adds the fused op in the place of the product by values.
    fn forward(&mut self, pattern: &Pattern) -> Result<Forward, BuildError> {
        let node = self.graph.node(pattern.context);
        let name = |what: &str| format!("{}.{what}", node.name);
        let mut inputs = vec![
            self.arranged(&name("query"), &pattern.queries, &pattern.wanted(Dim::Q, Dim::D))?,
            self.arranged(&name("key"), &pattern.keys, &pattern.wanted(Dim::K, Dim::D))?,
            self.arranged(&name("value"), &pattern.values, &pattern.wanted(Dim::K, Dim::E))?,
        ];
        let bias = self.bias(&node.name, pattern, inputs[0])?;
        inputs.extend(bias);
        let dims = pattern.wanted(Dim::Q, Dim::E);
        let fused = if dims == pattern.result { node.name.clone() } else { name("fused") };
        let outputs = self.add(&fused, pattern.op.clone(), &inputs)?;
        let op = self.last_op();
        for product in [pattern.scores, pattern.context] {
            self.replaced.insert(self.graph.node(product).outputs[0], op);
        }
        self.restored(pattern.context, outputs[0], &dims, &pattern.result)?;
        Ok(Forward { inputs, result: outputs[0], lse: outputs[1] })
    }

    /// Adds the fused gradient.
    fn backward(&mut self, pattern: &Pattern, forward: &Forward) -> Result<(), BuildError> {
        let Some(backward) = &pattern.backward else { return Ok(()) };
        let name = &self.graph.node(backward.products[0].0).name;
        let gradient = self.arranged(
            &format!("{name}.result_grad"),
            &backward.result_gradient,
            &pattern.wanted(Dim::Q, Dim::E),
        )?;
        let mut inputs = forward.inputs[..3].to_vec();
        inputs.extend([forward.result, forward.lse, gradient]);
        inputs.extend(forward.inputs.get(3));
        let op = AttentionGrad { forward: pattern.op.clone(), bias_grad: false };
        let outputs = self.add(&format!("{name}.fused"), op, &inputs)?;
        let op = self.last_op();
        for product in backward.products.iter().map(|(op, _)| *op).chain([backward.weights_gradient]) {
            self.replaced.insert(self.graph.node(product).outputs[0], op);
        }
        let orders = [(Dim::Q, Dim::D), (Dim::K, Dim::D), (Dim::K, Dim::E)];
        for (((product, dims), made), (position, last)) in backward.products.iter().zip(outputs).zip(orders) {
            self.restored(*product, made, &pattern.wanted(position, last), dims)?;
        }
        Ok(())
    }

    /// The sum of all masks that are no attributes.
    fn bias(
        &mut self,
        name: &str,
        pattern: &Pattern,
        queries: TensorId,
    ) -> Result<Option<TensorId>, BuildError> {
        let dtype = self.b.ty(queries).dtype;
        let mut bias: Option<TensorId> = None;
        for mask in &pattern.masks {
            let numbers = match mask {
                Mask::Bias { numbers, dims } => {
                    let numbers = self.aligned(&format!("{name}.bias"), *numbers, dims, pattern)?;
                    self.typed(&format!("{name}.bias"), numbers, dtype)?
                }
                Mask::Hide { cond, dims, hidden, hides } => {
                    let cond = self.aligned(&format!("{name}.visible"), *cond, dims, pattern)?;
                    let mut fill = |what: &str, value: f64| {
                        let op = Fill { value: Real(value), ty: TensorType::new(dtype, []) };
                        Ok::<_, BuildError>(self.add(&format!("{name}.{what}"), op, &[])?[0])
                    };
                    let (shown, hidden) = (fill("shown", 0.0)?, fill("hidden", *hidden)?);
                    let cases = if *hides { [cond, hidden, shown] } else { [cond, shown, hidden] };
                    self.add(&format!("{name}.mask"), Select {}, &cases)?[0]
                }
            };
            bias = Some(match bias {
                None => numbers,
                Some(before) => {
                    self.add(&format!("{name}.bias"), Binary { f: BinaryFn::Add }, &[before, numbers])?[0]
                }
            });
        }
        Ok(bias)
    }

    /// An operand with its dimensions in the fused op's order. A missing dimension has size one.
    fn arranged(&mut self, name: &str, operand: &Operand, wanted: &[Dim]) -> Result<TensorId, BuildError> {
        let t = self.renamed(operand.tensor)?;
        let present: Vec<Dim> = wanted.iter().copied().filter(|dim| operand.dims.contains(dim)).collect();
        let t = self.turned(name, t, &operand.dims, &present)?;
        self.widened(name, t, &present, wanted)
    }

    /// A mask whose dimensions broadcast to the scores.
    fn aligned(
        &mut self,
        name: &str,
        mask: TensorId,
        dims: &[Option<Dim>],
        pattern: &Pattern,
    ) -> Result<TensorId, BuildError> {
        let (t, wanted) = (self.renamed(mask)?, pattern.scores_dims());
        let fits = |(dim, wanted): (&Option<Dim>, &Dim)| dim.is_none_or(|dim| dim == *wanted);
        if dims.len() <= wanted.len() && dims.iter().rev().zip(wanted.iter().rev()).all(fits) {
            return Ok(t);
        }
        let given: Vec<Dim> = dims.iter().copied().flatten().collect();
        let sizes = dims.iter().zip(&*self.b.ty(t).shape).filter(|(dim, _)| dim.is_some());
        let sizes: Vec<u64> = sizes.map(|(_, &size)| size).collect();
        let t = self.reshaped(name, t, &sizes)?;
        let present: Vec<Dim> = wanted.iter().copied().filter(|dim| given.contains(dim)).collect();
        let t = self.turned(name, t, &given, &present)?;
        self.widened(name, t, &present, wanted)
    }

    /// The result of a replaced product: a fused result in the product's order and type.
    fn restored(
        &mut self,
        product: OpId,
        t: TensorId,
        given: &[Dim],
        wanted: &[Dim],
    ) -> Result<(), BuildError> {
        let node = self.graph.node(product);
        let old = node.outputs[0];
        let present: Vec<Dim> = given.iter().copied().filter(|dim| wanted.contains(dim)).collect();
        let sizes = given.iter().zip(&*self.b.ty(t).shape).filter(|(dim, _)| wanted.contains(dim));
        let sizes: Vec<u64> = sizes.map(|(_, &size)| size).collect();
        let t = self.reshaped(&node.name, t, &sizes)?;
        let t = self.turned(&node.name, t, &present, wanted)?;
        let t = self.typed(&node.name, t, self.graph.tensor(old).ty.dtype)?;
        self.tensors[old.index()] = Some(t);
        Ok(())
    }

    /// The tensor with its dimensions in another order; the tensor itself where they are in order.
    fn turned(
        &mut self,
        name: &str,
        t: TensorId,
        given: &[Dim],
        wanted: &[Dim],
    ) -> Result<TensorId, BuildError> {
        if given == wanted {
            return Ok(t);
        }
        let perm = wanted.iter().map(|dim| given.iter().position(|other| other == dim));
        let perm = perm.collect::<Option<SmallVec<[usize; 4]>>>();
        let perm = perm.ok_or_else(|| internal("a dimension of attention is missing"))?;
        Ok(self.add(name, Transpose { perm }, &[t])?[0])
    }

    /// The tensor with dimensions of size one for those that are missing.
    fn widened(
        &mut self,
        name: &str,
        t: TensorId,
        given: &[Dim],
        wanted: &[Dim],
    ) -> Result<TensorId, BuildError> {
        let mut sizes = self.b.ty(t).shape.iter();
        let size = |dim: &Dim| if given.contains(dim) { sizes.next().copied().unwrap_or(1) } else { 1 };
        let sizes: Vec<u64> = wanted.iter().map(size).collect();
        self.reshaped(name, t, &sizes)
    }

    fn reshaped(&mut self, name: &str, t: TensorId, sizes: &[u64]) -> Result<TensorId, BuildError> {
        if self.b.shape(t) == sizes {
            return Ok(t);
        }
        Ok(self.add(name, Reshape { shape: Shape::new(sizes) }, &[t])?[0])
    }

    fn typed(&mut self, name: &str, t: TensorId, dtype: crate::DType) -> Result<TensorId, BuildError> {
        if self.b.ty(t).dtype == dtype {
            return Ok(t);
        }
        Ok(self.add(name, Cast { dtype }, &[t])?[0])
    }
}

fn internal(reason: &str) -> BuildError {
    BuildError::Internal(reason.into())
}

/// Ops that only replaced ops needed, such as those that make a causal mask.
fn idle_ops(graph: &Graph, patterns: &[Pattern]) -> Vec<bool> {
    let live = |patterns: &[Pattern]| {
        let mut needed = vec![false; graph.tensors.len()];
        ends(graph).for_each(|t| needed[t.index()] = true);
        let mut removed: FxHashSet<OpId> = FxHashSet::default();
        for pattern in patterns {
            removed.extend(&pattern.removed);
            let operands = [&pattern.queries, &pattern.keys, &pattern.values].map(|o| o.tensor).into_iter();
            let gradient = pattern.backward.as_ref().map(|backward| backward.result_gradient.tensor);
            let masks = pattern.masks.iter().map(|mask| match mask {
                Mask::Bias { numbers: t, .. } | Mask::Hide { cond: t, .. } => *t,
            });
            operands.chain(gradient).chain(masks).for_each(|t| needed[t.index()] = true);
        }
        let mut live = vec![false; graph.ops.len()];
        for id in graph.op_ids().rev().filter(|id| !removed.contains(id)) {
            let node = graph.node(id);
            if node.outputs.iter().any(|t| needed[t.index()]) {
                live[id.index()] = true;
                node.inputs.iter().for_each(|t| needed[t.index()] = true);
            }
        }
        live
    };
    let (before, after) = (live(&[]), live(patterns));
    before.iter().zip(after).map(|(before, after)| *before && !after).collect()
}
