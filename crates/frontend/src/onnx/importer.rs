//! The state of an import: what each name of the file stands for, and the graph that grows.
//!
//! Nodes are taken in the file's order, which is topological. Each goes to its importer in `import/`, which reads
//! values by name and binds its outputs. Values are known contents, stored tensors that no op has read yet, or
//! views of tensors in the graph; a stored tensor becomes a weight of the graph when the first op asks for it, in
//! the shape that the op asks for.

use super::{
    entries::{Entry, Source},
    error::{OnnxError, Tried, Trouble, UnsupportedOp, shown},
    fold::{Known, fold},
    hints::Hints,
    import,
    literal::{Literal, count},
    model::Model,
    proto::{Graph, Node},
    rebatch::Rebatch,
    stored::{ExternalData, MOST_FOLDED, Stored, sizes},
    view::View,
};
use rustc_hash::{FxHashMap, FxHashSet};
use shardwright_graph::{
    GraphBuilder, Op, Real, Role, Shape, TensorId, TensorType,
    ops::{Reshape, Transpose, Unary, UnaryFn},
};
use smallvec::SmallVec;
use std::rc::Rc;

/// The most elements that folding may make in all.
const MOST_FOLDED_IN_ALL: usize = 1 << 26;
/// How deeply subgraphs may nest.
const MOST_NESTED: usize = 16;

/// What a view looks at.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Base {
    /// A tensor of the graph.
    Tensor(TensorId),
    /// A stored tensor, by its number.
    Stored(u32),
}

/// What a name stands for.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    /// Known contents.
    Known(Rc<Literal>),
    /// A tensor.
    View(View),
    /// Tensors one after the other along a dimension, not yet joined.
    Parts(usize, Vec<View>),
    /// Made by a node that is not supported.
    Broken,
}

pub(crate) struct Importer<'a> {
    pub b: GraphBuilder,
    pub model: &'a Model,
    pub hints: &'a Hints,
    pub rebatch: Rebatch,
    pub training: bool,
    pub external: &'a dyn ExternalData,
    /// The version of ONNX's own ops that the model uses.
    pub opset: i64,
    values: FxHashMap<String, Value>,
    pub(super) entries: Vec<Entry>,
    pub sources: Vec<Source>,
    reshapes: FxHashMap<(TensorId, Shape), TensorId>,
    bounds: FxHashMap<TensorId, u64>,
    /// Tensors of indices that never count from the end.
    pub positions: FxHashSet<TensorId>,
    /// Single rows of stored tensors; see [`Importer::rebatched`].
    pub(super) rows: FxHashMap<u32, View>,
    folded: usize,
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
        training: bool,
        external: &'a dyn ExternalData,
    ) -> Self {
        Self {
            b: GraphBuilder::new(model.name.as_str()),
            opset: model.opset,
            model,
            hints,
            rebatch,
            training,
            external,
            values: FxHashMap::default(),
            entries: Vec::new(),
            sources: Vec::new(),
            reshapes: FxHashMap::default(),
            bounds: FxHashMap::default(),
            positions: FxHashSet::default(),
            rows: FxHashMap::default(),
            folded: 0,
            depth: 0,
            unsupported: Vec::new(),
            notes: Vec::new(),
            name: String::new(),
        }
    }

    /// Takes in the tensors that a graph stores.
    pub fn add_stored(&mut self, graph: &Graph) -> Result<(), OnnxError> {
        for tensor in &graph.initializer {
            let named = |reason| OnnxError::Model(format!("initializer `{}`: {reason}", shown(&tensor.name)));
            let stored = Stored::read(tensor).map_err(|t| named(t.reason()))?;
            let value = self.stored_value(stored).map_err(|t| named(t.reason()))?;
            self.values.insert(tensor.name.clone(), value);
        }
        Ok(())
    }

    /// Single numbers, whole numbers and truth values are known contents; masks are constants, the rest are weights.
    fn stored_value(&mut self, stored: Stored) -> Tried<Value> {
        let elements = super::literal::count(&stored.shape);
        if !stored.dtype.is_float() || elements.is_some_and(|n| n <= 1) {
            if let Some(literal) = stored.fold(self.external)? {
                self.charge(literal.len())?;
                return Ok(Value::Known(literal.into()));
            }
            return Ok(Value::View(self.entry(stored, Role::Constant)));
        }
        let role = if stored.is_mask() { Role::Constant } else { Role::Parameter };
        Ok(Value::View(self.entry(stored, role)))
    }

    /// Counts folded elements; refuses files that would make too many.
    fn charge(&mut self, elements: usize) -> Tried {
        self.folded = self.folded.saturating_add(elements);
        if self.folded > MOST_FOLDED_IN_ALL {
            return Err(Trouble::wrong("the model's constants have over 64 million elements together"));
        }
        Ok(())
    }

    /// What a name stands for.
    pub fn value(&self, name: &str) -> Option<&Value> {
        self.values.get(name)
    }

    pub fn bind(&mut self, name: &str, value: Value) {
        if !name.is_empty() {
            self.values.insert(name.into(), value);
        }
    }

    /// Imports nodes in order. Nodes that are not supported are kept for [`Importer::finish`].
    pub fn import_nodes(&mut self, nodes: &[Node]) -> Result<(), OnnxError> {
        if self.depth >= MOST_NESTED {
            return Err(OnnxError::Model(format!("subgraphs nest more than {MOST_NESTED} deep")));
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
            Err(Trouble::Nested(error)) => Err(*error),
            Err(Trouble::Wrong(reason)) => {
                Err(OnnxError::Node { node: shown(node.label()), op: shown(&node.kind()), reason })
            }
            Err(Trouble::Unsupported(reason)) => {
                let (op, label) = (node.kind(), node.label().to_string());
                match self.unsupported.iter_mut().find(|u| u.op == op && u.reason == reason) {
                    Some(entry) => entry.nodes.push(label),
                    None => self.unsupported.push(UnsupportedOp { op, reason, nodes: vec![label] }),
                }
                for output in &node.output {
                    self.bind(output, Value::Broken);
                }
                Ok(())
            }
        }
    }

    fn try_node(&mut self, node: &Node) -> Tried {
        let mut broken = false;
        let mut known = Some(Vec::with_capacity(node.input.len()));
        for name in &node.input {
            let literal = match (name.as_str(), self.values.get(name)) {
                ("", _) => Some(None),
                (_, Some(Value::Known(literal))) => Some(Some(literal.clone())),
                (_, Some(value)) => {
                    broken |= matches!(value, Value::Broken);
                    None
                }
                (_, None) => {
                    let reason = format!("reads `{}`, which no earlier node makes", shown(name));
                    return Err(Trouble::Wrong(reason));
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
                    self.bind(name, Value::Known(literal.into()));
                }
                return Ok(());
            }
        }
        let import = import::find(node)?;
        if broken {
            // Reported already; what hangs on it can only be skipped.
            node.output.iter().for_each(|output| self.bind(output, Value::Broken));
            return Ok(());
        }
        import(self, node)
    }

    fn fold(&mut self, node: &Node, inputs: &Known<'_>) -> Tried<Option<Vec<Literal>>> {
        let results = match fold(node, self.opset, inputs) {
            Err(error) => Some(vec![self.spread_number(node, inputs).ok_or(error)?]),
            Ok(results) => results,
        };
        for literal in results.iter().flatten() {
            self.charge(literal.len())?;
        }
        Ok(results)
    }

    /// One number throughout, written down for the file's batch and wanted for another.
    fn spread_number(&self, node: &Node, inputs: &Known<'_>) -> Option<Literal> {
        let &[Some(x), Some(shape)] = inputs else { return None };
        if node.op_type != "Expand" || self.rebatch.change.is_none() || x.uniform().is_none() {
            return None;
        }
        let shape = sizes(shape.as_ints().ok()?).ok()?;
        let elements = count(&shape).filter(|&n| n <= MOST_FOLDED)?;
        Some(x.pick(shape, std::iter::repeat_n(0, elements)))
    }

    /// All that was not supported, if anything.
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
    pub fn view(&mut self, node: &Node, i: usize) -> Tried<View> {
        let name = node.input_name(i).ok_or_else(|| Trouble::wrong(format!("input {i} is missing")))?;
        match self.values.get(name).cloned() {
            Some(Value::View(view)) => Ok(self.untied(view)),
            Some(Value::Known(literal)) => self.constant(name, &literal),
            Some(Value::Parts(axis, parts)) => {
                let joined = self.join(axis, &parts)?;
                self.bind(name, Value::View(joined.clone()));
                Ok(joined)
            }
            _ => Err(Trouble::wrong(format!("input `{}` is not there", shown(name)))),
        }
    }

    /// The `i`-th input as a plain tensor of its own shape.
    pub fn tensor(&mut self, node: &Node, i: usize) -> Tried<TensorId> {
        let view = self.view(node, i)?;
        self.plain(&view)
    }

    /// The contents of the `i`-th input, if they are known; stored weights are looked at, too.
    pub fn literal(&mut self, node: &Node, i: usize) -> Tried<Option<Rc<Literal>>> {
        let Some(name) = node.input_name(i) else { return Ok(None) };
        match self.values.get(name) {
            Some(Value::Known(literal)) => Ok(Some(literal.clone())),
            Some(Value::View(view)) => {
                let Base::Stored(number) = view.base else { return Ok(None) };
                let entry = &self.entries[number as usize];
                if !entry.cuts.is_empty() || *view != View::plain(view.base, &entry.shape) {
                    return Ok(None);
                }
                let stored = entry.stored.clone();
                let literal = stored.fold(self.external)?.filter(|l| !l.assumed);
                if let Some(literal) = &literal {
                    self.charge(literal.len())?;
                }
                Ok(literal.map(Rc::new))
            }
            _ => Ok(None),
        }
    }

    /// The contents of the `i`-th input, which must be known; `what` says what for.
    pub fn known(&mut self, node: &Node, i: usize, what: &str) -> Tried<Rc<Literal>> {
        self.literal(node, i)?
            .ok_or_else(|| Trouble::unsupported(format!("{what} that are computed from the data")))
    }

    /// Whole numbers of the `i`-th input; none where it is left out.
    pub fn int_list(&mut self, node: &Node, i: usize, what: &str) -> Tried<Option<Vec<i64>>> {
        if !self.given(node, i) {
            return Ok(None);
        }
        Ok(Some(self.known(node, i, what)?.as_ints()?.to_vec()))
    }

    /// Known contents as a tensor: a constant of the graph.
    pub fn constant(&mut self, name: &str, literal: &Literal) -> Tried<View> {
        let ty = TensorType::new(literal.dtype, literal.shape.as_slice());
        ty.shape.check().map_err(Trouble::Wrong)?;
        let view = self.entry(Stored::known(name, literal.clone()), Role::Constant);
        self.bind(name, Value::View(view.clone()));
        Ok(view)
    }

    // Putting tensors into the graph

    /// The element type of a view.
    pub fn dtype(&self, view: &View) -> shardwright_graph::DType {
        match view.base {
            Base::Stored(entry) => self.entries[entry as usize].stored.dtype,
            Base::Tensor(t) => self.b.ty(t).dtype,
        }
    }

    /// The shape in which a base lies, cut so that every atom of the view is a dimension; dimensions of size
    /// one stay where they are. With it, the position of each atom.
    pub fn natural(&self, view: &View) -> (Shape, SmallVec<[usize; 6]>) {
        let lying: Option<Shape> = match view.base {
            Base::Tensor(t) => Some(self.b.ty(t).shape.clone()),
            Base::Stored(entry) => {
                let entry = &self.entries[entry as usize];
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

    /// The base of a view as a tensor of this shape, its elements in the order in which they lie; scaled.
    pub fn resolve(&mut self, view: &View, shape: &Shape) -> Tried<TensorId> {
        let tensor = self.unscaled(view.base, shape)?;
        if view.scale == 1.0 {
            return Ok(tensor);
        }
        let f = UnaryFn::Affine { scale: Real(view.scale), shift: Real(0.0) };
        self.emit("scale", Unary { f }, &[tensor])
    }

    fn unscaled(&mut self, base: Base, shape: &Shape) -> Tried<TensorId> {
        let tensor = match base {
            Base::Tensor(t) => t,
            Base::Stored(entry) => match self.entries[entry as usize].tensor {
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

    /// A view as a tensor of the shape that is seen.
    pub fn plain(&mut self, view: &View) -> Tried<TensorId> {
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

    /// Adds an op that helps the node along, named after it.
    pub fn emit(&mut self, what: &str, op: impl Into<Op>, inputs: &[TensorId]) -> Tried<TensorId> {
        Ok(self.add(what, op, inputs)?[0])
    }

    /// Adds an op that helps the node along; returns its outputs. Without `what` it has the node's own name.
    pub fn add(
        &mut self,
        what: &str,
        op: impl Into<Op>,
        inputs: &[TensorId],
    ) -> Tried<SmallVec<[TensorId; 2]>> {
        let name = if what.is_empty() { self.name.clone() } else { format!("{}.{what}", self.name) };
        Ok(self.b.add(&name, op, inputs)?)
    }

    /// A tensor of the graph as it lies.
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
            self.bind(name, Value::View(view));
        }
    }

    /// Remembers that the elements of a tensor index a dimension of this size.
    pub fn indexes(&mut self, view: &View, size: u64) {
        if let Base::Tensor(tensor) = view.base {
            let bound = self.bounds.entry(tensor).or_insert(size);
            *bound = size.min(*bound);
        }
    }

    /// What the model's inputs index, by name.
    pub fn index_bounds(&self) -> FxHashMap<String, u64> {
        let names = self.b.graph().sources(Role::Input).collect::<Vec<_>>();
        let bound = |t: TensorId| Some((self.b.graph().tensor(t).name.clone(), *self.bounds.get(&t)?));
        names.into_iter().filter_map(bound).collect()
    }

    /// Joins parts that were left apart.
    pub fn join(&mut self, axis: usize, parts: &[View]) -> Tried<View> {
        let tensors = parts.iter().map(|p| self.plain(p)).collect::<Tried<Vec<_>>>()?;
        let joined = self.emit("join", shardwright_graph::ops::Concat { axis }, &tensors)?;
        Ok(self.seen(joined))
    }

    /// The shapes of all values, for the second pass.
    pub fn shapes(&self) -> FxHashMap<String, Vec<u64>> {
        let mut shapes = FxHashMap::default();
        #[allow(clippy::iter_over_hash_type)] // from one map into another: the order does not matter
        for (name, value) in &self.values {
            let shape = match value {
                Value::Known(literal) => literal.shape.clone(),
                Value::View(view) => view.shape(),
                Value::Parts(..) | Value::Broken => continue,
            };
            shapes.insert(name.clone(), shape);
        }
        shapes
    }
}
