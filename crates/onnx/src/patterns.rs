//! Recognises ops that exporters decompose: activations, norms, and guards around softmax.
//!
//! A layer norm of nine nodes would be nine layers to plan, each with its own traffic. As one norm its statistics may be
//! split and its gradient is one formula. A pattern is a tree of ops that ends in a node. A match replaces that node, and
//! nodes that are no longer read are dropped.

use super::{
    proto::{Attribute, Graph, Node},
    storage::{NoExternalData, StoredTensor},
};
use std::collections::{HashMap, HashSet};

/// A tree of ops. `Add` and `Mul` match with their operands in either order.
enum Tree {
    /// The tensor that the pattern starts from; the same value at every occurrence.
    X,
    /// Any value, by index into [`Bindings::any`].
    Any(usize),
    /// This number within 1e-4, since exporters print few or many digits.
    Number(f64),
    /// Any number, by index into [`Bindings::numbers`].
    Some(usize),
    /// An op.
    Op(&'static str, Vec<Tree>),
}

use Tree::{Any, Number, Op, Some as Bound, X};

/// The values that a match binds.
#[derive(Clone, Default)]
struct Bindings {
    x: Option<String>,
    any: [Option<String>; 2],
    numbers: [Option<f64>; 1],
}

/// A tree, and the node that replaces a match.
struct Pattern {
    tree: Tree,
    replace: fn(&Bindings) -> Option<Node>,
}

fn op(name: &'static str, operands: impl IntoIterator<Item = Tree>) -> Tree {
    Op(name, operands.into_iter().collect())
}

/// The three products of three factors, two at a time.
fn thrice(a: fn() -> Tree, b: fn() -> Tree, c: fn() -> Tree) -> [Tree; 3] {
    let mul = |x, y| op("Mul", [x, y]);
    [mul(a(), mul(b(), c())), mul(b(), mul(a(), c())), mul(c(), mul(a(), b()))]
}

/// `1 + erf(x / sqrt(2))`, a factor of GELU.
fn one_plus_erf() -> Tree {
    op("Add", [op("Erf", [op("Div", [X, Number(std::f64::consts::SQRT_2)])]), Number(1.0)])
}

fn one_plus_erf_of_product() -> Tree {
    op("Add", [op("Erf", [op("Mul", [X, Number(std::f64::consts::FRAC_1_SQRT_2)])]), Number(1.0)])
}

fn one_plus_tanh(cube: Tree) -> Tree {
    let inner = op("Add", [X, op("Mul", [cube, Number(0.044_715)])]);
    let root = (2.0 / std::f64::consts::PI).sqrt();
    op("Add", [op("Tanh", [op("Mul", [inner, Number(root)])]), Number(1.0)])
}

fn one_plus_tanh_of_power() -> Tree {
    one_plus_tanh(op("Pow", [X, Number(3.0)]))
}

fn one_plus_tanh_of_product() -> Tree {
    one_plus_tanh(op("Mul", [op("Mul", [X, X]), X]))
}

fn centered() -> Tree {
    op("Sub", [X, op("ReduceMean", [X])])
}

/// The deviation of a layer norm: the root of the mean square plus epsilon.
fn deviation(square: Tree) -> Tree {
    op("Sqrt", [op("Add", [op("ReduceMean", [square]), Bound(0)])])
}

fn patterns() -> Vec<Pattern> {
    let half: fn() -> Tree = || Number(0.5);
    let x: fn() -> Tree = || X;
    let mut all = Vec::new();
    let mut gelu = |trees: [Tree; 3], replace: fn(&Bindings) -> Option<Node>| {
        all.extend(trees.into_iter().map(|tree| Pattern { tree, replace }));
    };
    gelu(thrice(x, half, one_plus_erf), |f| activation(f, "Gelu", ""));
    gelu(thrice(x, half, one_plus_erf_of_product), |f| activation(f, "Gelu", ""));
    gelu(thrice(x, half, one_plus_tanh_of_power), |f| activation(f, "Gelu", "tanh"));
    gelu(thrice(x, half, one_plus_tanh_of_product), |f| activation(f, "Gelu", "tanh"));
    all.push(Pattern { tree: op("Mul", [X, op("Sigmoid", [X])]), replace: |f| activation(f, "Swish", "") });
    // A guard against rows that are masked everywhere; our softmax maps them to zero.
    let guarded = || op("Softmax", [X]);
    all.push(Pattern {
        tree: op("Where", [op("IsNaN", [guarded()]), Number(0.0), guarded()]),
        replace: |f| activation(f, "Softmax", ""),
    });
    for square in [|| op("Pow", [centered(), Number(2.0)]), || op("Mul", [centered(), centered()])] {
        let normal = op("Div", [centered(), deviation(square())]);
        let tree = op("Add", [op("Mul", [normal, Any(0)]), Any(1)]);
        all.push(Pattern { tree, replace: |f| norm(f, "LayerNormalization") });
    }
    for square in [|| op("Pow", [X, Number(2.0)]), || op("Mul", [X, X])] {
        let inverse = [
            op("Mul", [X, op("Reciprocal", [deviation(square())])]),
            op("Mul", [X, op("Div", [Number(1.0), deviation(square())])]),
            op("Div", [X, deviation(square())]),
        ];
        for normal in inverse {
            let tree = op("Mul", [normal, Any(0)]);
            all.push(Pattern { tree, replace: |f| norm(f, "RMSNormalization") });
        }
    }
    all
}

fn activation(bindings: &Bindings, op_type: &str, approximate: &str) -> Option<Node> {
    let mut node = Node { op_type: op_type.into(), input: vec![bindings.x.clone()?], ..Node::default() };
    if !approximate.is_empty() {
        let text = approximate.as_bytes().to_vec().into();
        node.attribute.push(Attribute {
            name: "approximate".into(),
            s: text,
            kind: 3,
            ..Attribute::default()
        });
    }
    Some(node)
}

fn norm(bindings: &Bindings, op_type: &str) -> Option<Node> {
    let mut input = vec![bindings.x.clone()?, bindings.any[0].clone()?];
    input.extend(bindings.any[1].clone());
    let epsilon =
        Attribute { name: "epsilon".into(), f: bindings.numbers[0]? as f32, kind: 1, ..Attribute::default() };
    let axis = Attribute { name: "axis".into(), i: -1, kind: 2, ..Attribute::default() };
    Some(Node { op_type: op_type.into(), input, attribute: vec![epsilon, axis], ..Node::default() })
}

/// Replaces all matches, then drops unread nodes.
pub(crate) fn simplify(graph: &mut Graph) {
    let patterns = patterns();
    let matcher = Matcher::new(graph);
    let mut replaced = Vec::new();
    for (i, node) in graph.node.iter().enumerate() {
        // Only patterns that end in this node's op are tried.
        let candidates = patterns.iter().filter(|p| matches!(&p.tree, Op(name, _) if *name == node.op_type));
        let hit = candidates.filter_map(|p| matcher.at(&p.tree, node).and_then(|f| (p.replace)(&f))).next();
        if let Some(mut new) = hit {
            if new.op_type == "Softmax" {
                // The same softmax, without its guard.
                let Some(softmax) = node.input.get(2).and_then(|name| matcher.producer(name)) else {
                    continue;
                };
                new.attribute = softmax.attribute.clone();
            }
            new.name = node.label().to_string();
            new.output = node.output.clone();
            replaced.push((i, new));
        }
    }
    drop(matcher);
    for (i, node) in replaced {
        graph.node[i] = node;
    }
    drop_unread(graph);
}

/// Drops nodes whose outputs are never read.
fn drop_unread(graph: &mut Graph) {
    let mut read: HashSet<String> = graph.output.iter().map(|o| o.name.clone()).collect();
    let mut kept = Vec::with_capacity(graph.node.len());
    for node in std::mem::take(&mut graph.node).into_iter().rev() {
        if node.output.iter().any(|o| read.contains(o)) {
            read.extend(node.input.iter().cloned());
            for attribute in &node.attribute {
                attribute.g.iter().for_each(|g| reads_of(g, &mut read));
            }
            kept.push(node);
        }
    }
    kept.reverse();
    graph.node = kept;
}

/// Adds all values that a subgraph reads.
fn reads_of(graph: &Graph, read: &mut HashSet<String>) {
    read.extend(graph.output.iter().map(|o| o.name.clone()));
    for node in &graph.node {
        read.extend(node.input.iter().cloned());
        for attribute in &node.attribute {
            attribute.g.iter().for_each(|g| reads_of(g, read));
        }
    }
}

struct Matcher<'a> {
    nodes: HashMap<&'a str, &'a Node>,
    numbers: HashMap<&'a str, f64>,
    lists: HashMap<&'a str, Vec<i64>>,
}

impl<'a> Matcher<'a> {
    fn new(graph: &'a Graph) -> Self {
        let mut matcher = Self { nodes: HashMap::new(), numbers: HashMap::new(), lists: HashMap::new() };
        let constants = graph.node.iter().filter(|n| n.op_type == "Constant");
        let values = constants
            .filter_map(|n| Some((n.output.first()?, n.attribute.iter().find_map(|a| a.t.as_ref())?)));
        for (name, tensor) in values.chain(graph.initializer.iter().map(|t| (&t.name, t))) {
            let small = tensor.dims.iter().all(|&d| d == 1) || tensor.dims.len() == 1 && tensor.dims[0] < 16;
            let literal = if small { StoredTensor::read(tensor).ok() } else { None };
            let Some(literal) = literal.and_then(|s| s.load(&NoExternalData).ok().flatten()) else {
                continue;
            };
            if let Some(number) = literal.scalar() {
                matcher.numbers.insert(name, number);
            }
            if let Ok(ints) = literal.as_ints() {
                matcher.lists.insert(name, ints.to_vec());
            }
        }
        for node in &graph.node {
            if let [output] = node.output.as_slice() {
                matcher.nodes.insert(output, node);
            }
        }
        matcher
    }

    fn producer(&self, name: &str) -> Option<&'a Node> {
        self.nodes.get(name).copied()
    }

    fn at(&self, tree: &Tree, node: &Node) -> Option<Bindings> {
        let Op(name, operands) = tree else { return None };
        self.operands(name, operands, node, Bindings::default())
    }

    fn operands(&self, name: &str, trees: &[Tree], node: &Node, bindings: Bindings) -> Option<Bindings> {
        let last_axis = name != "ReduceMean" || self.reduces_last(node);
        if node.op_type != name || !node.domain.is_empty() || !last_axis {
            return None;
        }
        let inputs = node.input.get(..trees.len())?;
        let straight = trees
            .iter()
            .zip(inputs)
            .try_fold(bindings.clone(), |f, (tree, input)| self.value(tree, input, f));
        if straight.is_some() || !matches!(name, "Add" | "Mul") {
            return straight;
        }
        trees
            .iter()
            .zip(inputs.iter().rev())
            .try_fold(bindings, |f, (tree, input)| self.value(tree, input, f))
    }

    fn value(&self, tree: &Tree, name: &str, mut bindings: Bindings) -> Option<Bindings> {
        match tree {
            X | Any(_) => {
                let slot = match tree {
                    Any(i) => &mut bindings.any[*i],
                    _ => &mut bindings.x,
                };
                match slot {
                    Some(known) if known != name => return None,
                    slot => *slot = Some(name.into()),
                }
                Some(bindings)
            }
            Number(expected) => {
                let number = self.numbers.get(name)?;
                ((number - expected).abs() <= 1e-4 * expected.abs()).then_some(bindings)
            }
            Bound(i) => {
                let &number = self.numbers.get(name)?;
                match bindings.numbers[*i] {
                    Some(known) if known != number => return None,
                    _ => bindings.numbers[*i] = Some(number),
                }
                Some(bindings)
            }
            Op(op, trees) => self.operands(op, trees, self.producer(name)?, bindings),
        }
    }

    /// Whether a mean reduces exactly the last dimension and keeps it.
    fn reduces_last(&self, node: &Node) -> bool {
        let given = node.input.get(1).and_then(|name| self.lists.get(name.as_str()).map(Vec::as_slice));
        let axes = given.or_else(|| node.ints("axes").ok().flatten());
        // A malformed attribute matches no pattern; the node's importer reports it.
        axes == Some(&[-1]) && node.flag("keepdims", true).unwrap_or(false)
    }
}
