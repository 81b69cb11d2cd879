//! The state of an import: the value of each name in the file, and the graph under construction.
//!
//! Nodes are imported in file order, which is topological. Each node's importer in `import/` reads values by name and
//! binds its outputs. A value is known contents, a stored tensor that no op has read yet, or a view of a graph tensor. A
//! stored tensor becomes a weight of the graph when the first op reads it, in the shape that the op needs.

use super::{
    ImportOptions,
    budget::Budget,
    error::{NodeError, NodeResult, OnnxError, UnsupportedOp, cut, shown},
    fold::{LiteralInputs, fold},
    hints::Hints,
    import,
    literal::{Literal, count},
    model::Model,
    pending::{PendingTensor, TensorSource},
    proto::{Graph, Node},
    rebatch::Rebatch,
    storage::{ExternalData, MOST_FOLDED, StoredTensor, sizes},
    view::View,
};
use rustc_hash::{FxHashMap, FxHashSet};
use shardwright_graph::{
    GraphBuilder, Op, Real, Role, Shape, TensorId, TensorType,
    ops::{Reshape, Transpose, Unary, UnaryFn},
};
use smallvec::SmallVec;
use std::rc::Rc;

/// The most levels of nested subgraphs.
const MOST_NESTED: usize = 16;

/// The tensor behind a view.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Base {
    /// A tensor of the graph.
    Tensor(TensorId),
    /// A stored tensor, by its index in [`Importer::pending`].
    Stored(u32),
}

/// The value of a name.
#[derive(Clone, Debug)]
pub(crate) enum NodeValue {
    /// Contents that are known during the import.
    Known(Rc<Literal>),
    /// A tensor.
    View(View),
    /// Tensors to be concatenated along a dimension, not yet concatenated.
    Parts(usize, Vec<View>),
    /// The output of an unsupported node.
    Broken,
}

pub(crate) struct Importer<'a> {
    pub b: GraphBuilder,
    pub model: &'a Model,
    pub hints: &'a Hints,
    pub rebatch: Rebatch,
    pub training: bool,
    /// Whether attention is one op.
    pub fuse_attention: bool,
    pub external: &'a dyn ExternalData,
    /// The version of ONNX's own operator set.
    pub opset: i64,
    values: FxHashMap<String, NodeValue>,
    pub(super) pending: Vec<PendingTensor>,
    pub sources: Vec<TensorSource>,
    reshapes: FxHashMap<(TensorId, Shape), TensorId>,
    bounds: FxHashMap<TensorId, u64>,
    /// Index tensors without negative indices, which would count from the end.
    pub positions: FxHashSet<TensorId>,
    /// Single rows of stored tensors; see [`Importer::rebatched`].
    pub(super) rows: FxHashMap<u32, View>,
    pub budget: Budget,
    depth: usize,
    unsupported: Vec<UnsupportedOp>,
    pub notes: Vec<String>,
    /// The node that is being imported.
    pub name: String,
}

impl<'a> Importer<'a> {
    pub fn new(
        model: &'a Model,
        hints: &'a Hints,
        rebatch: Rebatch,
        options: &ImportOptions,
        external: &'a dyn ExternalData,
    ) -> Self {
        Self {
            b: GraphBuilder::new(model.name.as_str()),
            opset: model.opset,
            model,
            hints,
            rebatch,
            training: options.training,
            fuse_attention: options.fuse_attention,
            external,
            values: FxHashMap::default(),
            pending: Vec::new(),
            sources: Vec::new(),
            reshapes: FxHashMap::default(),
            bounds: FxHashMap::default(),
            positions: FxHashSet::default(),
            rows: FxHashMap::default(),
            budget: Budget::of_file(model.file_bytes),
            depth: 0,
            unsupported: Vec::new(),
            notes: Vec::new(),
            name: String::new(),
        }
    }

    /// Binds the tensors that a graph stores.
    pub fn add_stored(&mut self, graph: &Graph) -> Result<(), OnnxError> {
        for tensor in &graph.initializer {
            let named = |reason| OnnxError::Model(format!("initializer `{}`: {reason}", shown(&tensor.name)));
            let stored = StoredTensor::read(tensor).map_err(|t| named(t.reason()))?;
            let value = self.stored_value(stored).map_err(|t| named(t.reason()))?;
            self.values.insert(tensor.name.clone(), value);
        }
        Ok(())
    }

    /// Scalars, whole numbers and truth values are known contents; masks are constants; all others are weights.
    fn stored_value(&mut self, stored: StoredTensor) -> NodeResult<NodeValue> {
        let elements = super::literal::count(&stored.shape);
        if !stored.dtype.is_float() || elements.is_some_and(|n| n <= 1) {
            if let Some(literal) = stored.fold(self.external)? {
                self.budget.elements(literal.len())?;
                return Ok(NodeValue::Known(literal.into()));
            }
            return Ok(NodeValue::View(self.entry(stored, Role::Constant)));
        }
        let role = if stored.is_mask() { Role::Constant } else { Role::Parameter };
        Ok(NodeValue::View(self.entry(stored, role)))
    }

    /// The value of a name.
    pub fn value(&self, name: &str) -> Option<&NodeValue> {
        self.values.get(name)
    }

    pub fn bind(&mut self, name: &str, value: NodeValue) {
        if !name.is_empty() {
            self.values.insert(name.into(), value);
        }
    }

    /// Imports nodes in order. Unsupported nodes are collected for [`Importer::finish`].
    pub fn import_nodes(&mut self, nodes: &[Node]) -> Result<(), OnnxError> {
        if self.depth >= MOST_NESTED {
            return Err(OnnxError::Model(format!(
                "subgraphs are nested more than {MOST_NESTED} levels deep"
            )));
        }
        self.depth += 1;
        for node in nodes {
            let outer = std::mem::replace(&mut self.name, shown(node.label()));
            let result = self.import_node(node);
            self.name = outer;
            result?;
        }
        self.depth -= 1;
        Ok(())
    }

    fn import_node(&mut self, node: &Node) -> Result<(), OnnxError> {
        match self.try_node(node) {
            Ok(()) => Ok(()),
            Err(NodeError::Nested(error)) => Err(*error),
            Err(NodeError::Invalid(reason)) => {
                let reason = cut(&reason) + &self.baked_batch(node);
                Err(OnnxError::Node { node: shown(node.label()), op: shown(&node.kind()), reason })
            }
            Err(NodeError::Unsupported(reason)) => {
                let reason = cut(&reason);
                let (op, label) = (node.kind(), node.label().to_string());
                match self.unsupported.iter_mut().find(|u| u.op == op && u.reason == reason) {
                    Some(entry) => entry.nodes.push(label),
                    None => self.unsupported.push(UnsupportedOp { op, reason, nodes: vec![label] }),
                }
                for output in &node.output {
                    self.bind(output, NodeValue::Broken);
                }
                Ok(())
            }
        }
    }

    fn try_node(&mut self, node: &Node) -> NodeResult {
        self.budget.node()?;
        let mut broken = false;
        let mut known = Some(Vec::with_capacity(node.input.len()));
        for name in &node.input {
            let literal = match (name.as_str(), self.values.get(name)) {
                ("", _) => Some(None),
                (_, Some(NodeValue::Known(literal))) => Some(Some(literal.clone())),
                (_, Some(value)) => {
                    broken |= matches!(value, NodeValue::Broken);
                    None
                }
                (_, None) => {
                    let reason = format!("reads `{}`, which no earlier node computes", shown(name));
                    return Err(NodeError::Invalid(reason));
                }
            };
            match literal {
                Some(literal) => known.iter_mut().for_each(|list| list.push(literal.clone())),
                None => known = None,
            }
        }
        if let Some(known) = known {
            let inputs: Vec<Option<&Literal>> = known.iter().map(Option::as_deref).collect();
            if let Some(results) = self.fold(node, &inputs)? {
                for (name, literal) in node.output.iter().zip(results) {
                    self.bind(name, NodeValue::Known(literal.into()));
                }
                return Ok(());
            }
        }
        let import = import::find(node)?;
        if broken {
            // The unsupported node is already reported; its dependents are skipped.
            node.output.iter().for_each(|output| self.bind(output, NodeValue::Broken));
            return Ok(());
        }
        import(self, node)
    }

    fn fold(&mut self, node: &Node, inputs: &LiteralInputs<'_>) -> NodeResult<Option<Vec<Literal>>> {
        self.budget.work(inputs.iter().flatten().map(|l| l.len()).sum())?;
        let results = match fold(node, self.opset, inputs) {
            Err(error) => match self.fold_rebatched(node, inputs)? {
                Some(results) => Some(results),
                None => Some(vec![self.spread_number(node, inputs).ok_or(error)?]),
            },
            Ok(results) => results,
        };
        for literal in results.iter().flatten() {
            self.budget.elements(literal.len())?;
        }
        Ok(results)
    }

    /// Folds a node whose constants fit only the file's batch: rows that repeat and target shapes follow the requested batch.
    fn fold_rebatched(
        &mut self,
        node: &Node,
        inputs: &LiteralInputs<'_>,
    ) -> NodeResult<Option<Vec<Literal>>> {
        if self.rebatch.change.is_none() {
            return Ok(None);
        }
        let target = |shape: &Literal, from: &Literal| {
            let sizes = shape.as_ints().ok()?;
            let scaled = match node.op_type.as_str() {
                "Expand" => self.rebatch.replace_first(sizes)?,
                "Reshape" => self.rebatch.target(from.len() as u64, sizes)?,
                _ => return None,
            };
            Some(Literal { assumed: shape.assumed, ..Literal::list(scaled) })
        };
        let changed: Vec<Option<Literal>> = match inputs {
            &[Some(from), Some(shape)] if matches!(node.op_type.as_str(), "Expand" | "Reshape") => {
                vec![None, target(shape, from)]
            }
            _ => inputs.iter().map(|input| self.rebatch.literal((*input)?)).collect(),
        };
        for literal in changed.iter().flatten() {
            self.budget.elements(literal.len())?;
        }
        if changed.iter().all(Option::is_none) {
            return Ok(None);
        }
        let both = changed.iter().zip(inputs).map(|(changed, input)| changed.as_ref().or(*input));
        Ok(fold(node, self.opset, &both.collect::<Vec<_>>()).ok().flatten())
    }

    /// The constant among a node's inputs that holds the file's batch, with a remedy; empty if there is none.
    fn baked_batch(&self, node: &Node) -> String {
        let Some((old, new)) = self.rebatch.change else { return String::new() };
        let shape = |name: &str| match self.values.get(name)? {
            NodeValue::Known(literal) if literal.shape.len() == 1 => {
                // A list of sizes that contains the batch.
                let sizes = literal.as_ints().ok()?;
                let holds =
                    sizes.iter().any(|&s| u64::try_from(s).is_ok_and(|s| s > 0 && s.is_multiple_of(old)));
                (old > 1 && holds).then(|| format!("{sizes:?}"))
            }
            NodeValue::Known(literal) => {
                self.rebatch.fits(&literal.shape).then(|| format!("of shape {:?}", literal.shape))
            }
            NodeValue::View(view) if view.is_constant() => {
                self.rebatch.fits(&view.shape()).then(|| format!("of shape {:?}", view.shape()))
            }
            _ => None,
        };
        let found = node.input.iter().find_map(|name| Some((name, shape(name)?)));
        match found {
            Some((name, shape)) => format!(
                "; its constant `{}` {shape} holds the file's batch of {old} and does not follow --batch {new}: export the model \
                 with a dynamic batch dimension, or plan it with --batch {old}",
                shown(name)
            ),
            None => format!(
                "; the file was exported with a batch of {old}, and --batch {new} is requested: export it with a dynamic batch \
                 dimension, or plan it with --batch {old}"
            ),
        }
    }

    /// A constant of one repeated number that was expanded to the file's batch, expanded to the requested batch instead.
    fn spread_number(&self, node: &Node, inputs: &LiteralInputs<'_>) -> Option<Literal> {
        let &[Some(x), Some(shape)] = inputs else { return None };
        if node.op_type != "Expand" || self.rebatch.change.is_none() || x.uniform().is_none() {
            return None;
        }
        let shape = sizes(shape.as_ints().ok()?).ok()?;
        let elements = count(&shape).filter(|&n| n <= MOST_FOLDED)?;
        Some(x.pick(shape, std::iter::repeat_n(0, elements)))
    }

    /// Fails if any node was unsupported.
    pub fn finish(&mut self) -> Result<(), OnnxError> {
        if self.unsupported.is_empty() {
            return Ok(());
        }
        Err(OnnxError::Unsupported(std::mem::take(&mut self.unsupported)))
    }

    // Reading inputs

    /// Whether the `i`-th input is given.
    pub fn given(&self, node: &Node, i: usize) -> bool {
        node.input_name(i).is_some()
    }

    /// The `i`-th input as a view.
    pub fn view(&mut self, node: &Node, i: usize) -> NodeResult<View> {
        let name = node.input_name(i).ok_or_else(|| NodeError::invalid(format!("input {i} is missing")))?;
        match self.values.get(name).cloned() {
            Some(NodeValue::View(view)) => Ok(self.untied(view)),
            Some(NodeValue::Known(literal)) => self.constant(name, &literal),
            Some(NodeValue::Parts(axis, parts)) => {
                let joined = self.join(axis, &parts)?;
                self.bind(name, NodeValue::View(joined.clone()));
                Ok(joined)
            }
            _ => Err(NodeError::invalid(format!("input `{}` has no value", shown(name)))),
        }
    }

    /// The `i`-th input as a tensor in row-major order.
    pub fn tensor(&mut self, node: &Node, i: usize) -> NodeResult<TensorId> {
        let view = self.view(node, i)?;
        self.plain(&view)
    }

    /// The contents of the `i`-th input, if they are known; those of stored weights included.
    pub fn literal(&mut self, node: &Node, i: usize) -> NodeResult<Option<Rc<Literal>>> {
        let Some(name) = node.input_name(i) else { return Ok(None) };
        match self.values.get(name) {
            Some(NodeValue::Known(literal)) => Ok(Some(literal.clone())),
            Some(NodeValue::View(view)) => {
                let Base::Stored(number) = view.base else { return Ok(None) };
                let entry = &self.pending[number as usize];
                if !entry.selections.is_empty() || *view != View::plain(view.base, &entry.shape) {
                    return Ok(None);
                }
                let stored = entry.stored.clone();
                let literal = stored.fold(self.external)?.filter(|l| !l.assumed);
                if let Some(literal) = &literal {
                    self.budget.elements(literal.len())?;
                }
                Ok(literal.map(Rc::new))
            }
            _ => Ok(None),
        }
    }

    /// The contents of the `i`-th input, which must be known. `what` names their purpose for the error.
    pub fn known(&mut self, node: &Node, i: usize, what: &str) -> NodeResult<Rc<Literal>> {
        self.literal(node, i)?
            .ok_or_else(|| NodeError::unsupported(format!("{what} that depend on the data")))
    }

    /// The single number of the `i`-th input, which must be known.
    pub fn known_number(&mut self, node: &Node, i: usize, what: &str) -> NodeResult<f64> {
        let literal = self.known(node, i, what)?;
        literal.scalar().ok_or_else(|| {
            NodeError::invalid(format!("{what} must be single numbers, got shape {:?}", literal.shape))
        })
    }

    /// The whole numbers of the `i`-th input; `None` if it is left out.
    pub fn int_list(&mut self, node: &Node, i: usize, what: &str) -> NodeResult<Option<Vec<i64>>> {
        if !self.given(node, i) {
            return Ok(None);
        }
        Ok(Some(self.known(node, i, what)?.as_ints()?.to_vec()))
    }

    /// Known contents as a constant of the graph.
    pub fn constant(&mut self, name: &str, literal: &Literal) -> NodeResult<View> {
        let ty = TensorType::new(literal.dtype, literal.shape.as_slice());
        ty.shape.check().map_err(NodeError::Invalid)?;
        self.budget.elements(literal.len())?;
        let view = self.entry(StoredTensor::known(name, literal.clone()), Role::Constant);
        self.bind(name, NodeValue::View(view.clone()));
        Ok(view)
    }

    // Putting tensors into the graph

    /// The element type of a view.
    pub fn dtype(&self, view: &View) -> shardwright_graph::DType {
        match view.base {
            Base::Stored(entry) => self.pending[entry as usize].stored.dtype,
            Base::Tensor(t) => self.b.ty(t).dtype,
        }
    }

    /// The shape of the base, refined so that every atom of the view is a dimension, and the position of each atom.
    /// Dimensions of size one are kept.
    pub fn natural(&self, view: &View) -> (Shape, SmallVec<[usize; 6]>) {
        let lying: Option<Shape> = match view.base {
            Base::Tensor(t) => Some(self.b.ty(t).shape.clone()),
            Base::Stored(entry) => {
                let entry = &self.pending[entry as usize];
                entry.tensor.map(|t| self.b.ty(t).shape.clone())
            }
        };
        if let Some(shape) = lying
            && shape.iter().filter(|&&s| s != 1).eq(view.atoms.iter())
        {
            let positions = (0..shape.rank()).filter(|&d| shape[d] != 1).collect();
            return (shape, positions);
        }
        (Shape::new(&view.atoms), (0..view.atoms.len()).collect())
    }

    /// The base of a view as a tensor of this shape, in storage order and with the view's scale applied.
    pub fn resolve(&mut self, view: &View, shape: &Shape) -> NodeResult<TensorId> {
        let tensor = self.unscaled(view.base, shape)?;
        if view.scale == 1.0 {
            return Ok(tensor);
        }
        let f = UnaryFn::Affine { scale: Real(view.scale), shift: Real(0.0) };
        self.emit("scale", Unary { f }, &[tensor])
    }

    fn unscaled(&mut self, base: Base, shape: &Shape) -> NodeResult<TensorId> {
        let tensor = match base {
            Base::Tensor(t) => t,
            Base::Stored(entry) => match self.pending[entry as usize].tensor {
                Some(t) => t,
                None => self.declare(entry, shape)?,
            },
        };
        if self.b.ty(tensor).shape == *shape {
            return Ok(tensor);
        }
        if let Some(&known) = self.reshapes.get(&(tensor, shape.clone())) {
            return Ok(known);
        }
        let reshaped = self.emit("reshape", Reshape { shape: shape.clone() }, &[tensor])?;
        self.reshapes.insert((tensor, shape.clone()), reshaped);
        Ok(reshaped)
    }

    /// The view as a tensor in row-major order.
    pub fn plain(&mut self, view: &View) -> NodeResult<TensorId> {
        let shape = Shape::new(&view.shape());
        if view.in_order() {
            return self.resolve(view, &shape);
        }
        let view = view.coalesced();
        let lying = self.resolve(&view, &Shape::new(&view.atoms))?;
        let perm = view.order().iter().map(|&a| a as usize).collect();
        let turned = self.emit("transpose", Transpose { perm }, &[lying])?;
        if self.b.ty(turned).shape == shape {
            return Ok(turned);
        }
        self.emit("reshape", Reshape { shape }, &[turned])
    }

    /// Adds an auxiliary op of the node, named after it.
    pub fn emit(&mut self, what: &str, op: impl Into<Op>, inputs: &[TensorId]) -> NodeResult<TensorId> {
        Ok(self.add(what, op, inputs)?[0])
    }

    /// Adds an auxiliary op of the node and returns its outputs. If `what` is empty, the op has the node's name.
    pub fn add(
        &mut self,
        what: &str,
        op: impl Into<Op>,
        inputs: &[TensorId],
    ) -> NodeResult<SmallVec<[TensorId; 2]>> {
        let name = if what.is_empty() { self.name.clone() } else { format!("{}.{what}", self.name) };
        Ok(self.b.add(&name, op, inputs)?)
    }

    /// The plain view of a graph tensor.
    pub fn seen(&self, tensor: TensorId) -> View {
        View::plain(Base::Tensor(tensor), self.b.shape(tensor))
    }

    /// Binds an output to a tensor.
    pub fn output(&mut self, node: &Node, i: usize, tensor: TensorId) {
        let view = self.seen(tensor);
        self.output_view(node, i, view);
    }

    /// Binds an output to a view.
    pub fn output_view(&mut self, node: &Node, i: usize, view: View) {
        if let Some(name) = node.output.get(i) {
            self.bind(name, NodeValue::View(view));
        }
    }

    /// Records that the elements of a tensor index a dimension of this size.
    pub fn indexes(&mut self, view: &View, size: u64) {
        if let Base::Tensor(tensor) = view.base {
            let bound = self.bounds.entry(tensor).or_insert(size);
            *bound = size.min(*bound);
        }
    }

    /// The size of the dimension that each model input indexes, by name.
    pub fn index_bounds(&self) -> FxHashMap<String, u64> {
        let names = self.b.graph().sources(Role::Input).collect::<Vec<_>>();
        let bound = |t: TensorId| Some((self.b.graph().tensor(t).name.clone(), *self.bounds.get(&t)?));
        names.into_iter().filter_map(bound).collect()
    }

    /// Concatenates parts.
    pub fn join(&mut self, axis: usize, parts: &[View]) -> NodeResult<View> {
        let tensors = parts.iter().map(|p| self.plain(p)).collect::<NodeResult<Vec<_>>>()?;
        let joined = self.emit("join", shardwright_graph::ops::Concat { axis }, &tensors)?;
        Ok(self.seen(joined))
    }

    /// The shapes of all values, for the second pass.
    pub fn shapes(&self) -> FxHashMap<String, Vec<u64>> {
        let mut shapes = FxHashMap::default();
        #[allow(clippy::iter_over_hash_type)] // copies one map to another: the order does not matter
        for (name, value) in &self.values {
            let shape = match value {
                NodeValue::Known(literal) => literal.shape.clone(),
                NodeValue::View(view) => view.shape(),
                NodeValue::Parts(..) | NodeValue::Broken => continue,
            };
            shapes.insert(name.clone(), shape);
        }
        shapes
    }
}
