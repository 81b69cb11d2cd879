//! What the second pass over a model knows from the first: every value's shape, and who reads it.
//!
//! A linear layer of attention makes `[.., heads * size]`, which is cut into heads later. Knowing that when the
//! layer is imported, its weight gets the heads as dimensions of its own, as in the zoo's models; and a layer
//! whose result is cut into query, key and value becomes three layers.

use super::{
    proto::{Graph, Node},
    view::Sizes,
};
use rustc_hash::FxHashMap;

/// How far ahead is looked.
const FAR: usize = 6;

#[derive(Default)]
pub(crate) struct Hints {
    shapes: FxHashMap<String, Vec<u64>>,
    readers: FxHashMap<String, Vec<usize>>,
    nodes: Vec<Reader>,
    /// The smallest dimension that the elements of an input index.
    pub below: FxHashMap<String, u64>,
}

/// What matters of a node to those before it.
struct Reader {
    op: String,
    inputs: Vec<String>,
    outputs: Vec<String>,
    axis: i64,
}

impl Reader {
    fn of(node: &Node) -> Self {
        let axis = node.int("axis", 0).unwrap_or(0);
        Self { op: node.op_type.clone(), inputs: node.input.clone(), outputs: node.output.clone(), axis }
    }
}

/// Ops that leave the last dimension as it is, whatever else they read.
fn keeps_last_dim(op: &str) -> bool {
    matches!(
        op,
        "Add" | "Sub" | "Mul" | "Div" | "Relu" | "Sigmoid" | "Tanh" | "Cast" | "Identity" | "Dropout"
    )
}

impl Hints {
    pub fn new(graph: &Graph, shapes: FxHashMap<String, Vec<u64>>) -> Self {
        let mut readers: FxHashMap<String, Vec<usize>> = FxHashMap::default();
        // Who asks for a shape reads no elements.
        let readers_of_elements = |node: &&Node| !matches!(node.op_type.as_str(), "Shape" | "Size");
        for (i, node) in graph.node.iter().enumerate().filter(|(_, node)| readers_of_elements(node)) {
            for name in &node.input {
                readers.entry(name.clone()).or_default().push(i);
            }
        }
        for output in &graph.output {
            // The outside reads it, too.
            readers.entry(output.name.clone()).or_default().push(usize::MAX);
        }
        Self {
            shapes,
            readers,
            nodes: graph.node.iter().map(Reader::of).collect(),
            below: FxHashMap::default(),
        }
    }

    fn shape(&self, name: &str) -> Option<&[u64]> {
        self.shapes.get(name).map(Vec::as_slice)
    }

    /// The only node that reads a value.
    fn only_reader(&self, name: &str) -> Option<&Reader> {
        match self.readers.get(name)?.as_slice() {
            [one] => self.nodes.get(*one),
            _ => None,
        }
    }

    /// Into which factors the last dimension of a value is cut by those who read it.
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
        // The trailing dimensions that together are the old last one.
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
            // The same last dimension, other ones before it.
            1 => self.cut(output, far - 1),
            _ => Some(sizes),
        }
    }

    /// Into which parts, one after the other, the last dimension of a value is split by those who read it.
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
                // A bias, or other dimensions before the last one.
                "Add" if self.adds_vector(reader, name, size) => {}
                "Reshape" => {}
                _ => return None,
            }
            name = reader.outputs.first()?;
        }
        None
    }

    fn adds_vector(&self, reader: &Reader, name: &str, size: u64) -> bool {
        let other = reader.inputs.iter().find(|i| *i != name);
        other.and_then(|o| self.shape(o)).is_some_and(|shape| shape == [size])
    }

    /// Whether a value is read by one product alone, perhaps through reshapes and transpositions.
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
