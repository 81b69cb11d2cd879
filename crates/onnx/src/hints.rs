//! Facts about a model for the second pass, collected by the first: the shape and the readers of every value.
//!
//! A linear layer of attention computes `[.., heads * size]`, which later nodes reshape into heads. With this hint the
//! layer's weight gets separate head dimensions, as in the zoo's models. A layer whose result is split into query, key
//! and value becomes three layers.

use super::{
    proto::{Graph, Node},
    view::Sizes,
};
use rustc_hash::FxHashMap;

/// The most nodes that are followed from a value.
const FAR: usize = 6;

#[derive(Default)]
pub(crate) struct Hints {
    shapes: FxHashMap<String, Vec<u64>>,
    readers: FxHashMap<String, Vec<usize>>,
    nodes: Vec<NodeSummary>,
    /// The size of the smallest dimension that an input's elements index.
    pub below: FxHashMap<String, u64>,
}

/// The properties of a reading node that matter to its producers.
struct NodeSummary {
    op: String,
    inputs: Vec<String>,
    outputs: Vec<String>,
    axis: i64,
}

impl NodeSummary {
    fn of(node: &Node) -> Self {
        // The first pass has imported this node, and with it a Split's axis, the only one that is used.
        let axis = node.int("axis", 0).unwrap_or(0);
        Self { op: node.op_type.clone(), inputs: node.input.clone(), outputs: node.output.clone(), axis }
    }
}

/// Ops that keep the last dimension of their first operand.
fn keeps_last_dim(op: &str) -> bool {
    matches!(
        op,
        "Add" | "Sub" | "Mul" | "Div" | "Relu" | "Sigmoid" | "Tanh" | "Cast" | "Identity" | "Dropout"
    )
}

impl Hints {
    pub fn new(graph: &Graph, shapes: FxHashMap<String, Vec<u64>>) -> Self {
        let mut readers: FxHashMap<String, Vec<usize>> = FxHashMap::default();
        // A node that only reads the shape reads no elements.
        let readers_of_elements = |node: &&Node| !matches!(node.op_type.as_str(), "Shape" | "Size");
        for (i, node) in graph.node.iter().enumerate().filter(|(_, node)| readers_of_elements(node)) {
            for name in &node.input {
                readers.entry(name.clone()).or_default().push(i);
            }
        }
        for output in &graph.output {
            // The caller also reads outputs.
            readers.entry(output.name.clone()).or_default().push(usize::MAX);
        }
        Self {
            shapes,
            readers,
            nodes: graph.node.iter().map(NodeSummary::of).collect(),
            below: FxHashMap::default(),
        }
    }

    fn shape(&self, name: &str) -> Option<&[u64]> {
        self.shapes.get(name).map(Vec::as_slice)
    }

    /// The reader of a value, if there is exactly one.
    fn only_reader(&self, name: &str) -> Option<&NodeSummary> {
        match self.readers.get(name)?.as_slice() {
            [one] => self.nodes.get(*one),
            _ => None,
        }
    }

    /// The factors into which readers reshape the last dimension of a value.
    pub fn last_dim_cut(&self, name: &str) -> Option<Sizes> {
        self.cut(name, FAR)
    }

    fn cut(&self, name: &str, far: usize) -> Option<Sizes> {
        let &size = self.shape(name)?.last()?;
        let reader = self.only_reader(name).filter(|_| far > 0)?;
        let output = reader.outputs.first()?;
        if keeps_last_dim(&reader.op) {
            return (self.shape(output)?.last() == Some(&size)).then(|| self.cut(output, far - 1))?;
        }
        if reader.op != "Reshape" {
            return None;
        }
        let shape = self.shape(output)?;
        // The trailing dimensions whose product is the old last dimension.
        let mut product = 1u64;
        let first = (0..shape.len()).rev().find(|&d| {
            product = product.saturating_mul(shape[d]);
            product >= size
        })?;
        if product != size {
            return None;
        }
        let sizes: Sizes = shape[first..].iter().copied().filter(|&s| s != 1).collect();
        match sizes.len() {
            0 => None,
            // The last dimension is kept; only dimensions before it change.
            1 => self.cut(output, far - 1),
            _ => Some(sizes),
        }
    }

    /// The values into which readers split the last dimension of a value.
    pub fn last_dim_parts(&self, name: &str) -> Option<Vec<String>> {
        let mut name = name;
        let &size = self.shape(name)?.last()?;
        for _ in 0..FAR {
            let shape = self.shape(name)?;
            if shape.last() != Some(&size) {
                return None;
            }
            let reader = self.only_reader(name)?;
            let rank = shape.len() as i64;
            match reader.op.as_str() {
                "Split" if reader.axis == rank - 1 || reader.axis == -1 => {
                    return Some(reader.outputs.clone());
                }
                // A bias, or a reshape of dimensions before the last.
                "Add" if self.adds_vector(reader, name, size) => {}
                "Reshape" => {}
                _ => return None,
            }
            name = reader.outputs.first()?;
        }
        None
    }

    fn adds_vector(&self, reader: &NodeSummary, name: &str, size: u64) -> bool {
        let other = reader.inputs.iter().find(|i| *i != name);
        other.and_then(|o| self.shape(o)).is_some_and(|shape| shape == [size])
    }

    /// Whether the only reader of a value, apart from reshapes and transposes, is a product.
    pub fn feeds_product(&self, name: &str) -> bool {
        let mut name = name;
        for _ in 0..FAR {
            match self.only_reader(name) {
                Some(reader) if reader.op == "MatMul" => return true,
                Some(reader) if matches!(reader.op.as_str(), "Reshape" | "Transpose" | "Unsqueeze") => {
                    match reader.outputs.first() {
                        Some(next) => name = next,
                        None => return false,
                    }
                }
                _ => return false,
            }
        }
        false
    }

    /// The size of the last dimension of a value.
    pub fn last_size(&self, name: &str) -> Option<u64> {
        self.shape(name)?.last().copied()
    }
}
