//! Reads a model file: decodes it, refuses what no model may hold, inlines its functions.
//!
//! Nothing is allocated by a declared size. Decoding multiplies bytes, since a message of two bytes becomes a
//! struct of hundreds: [`count_messages`] walks the file first and refuses one with too many.

use super::{
    attributes::is_standard,
    error::{OnnxError, shown},
    inline::inline_functions,
    patterns::simplify,
    proto::{self, Graph},
};
use bytes::Bytes;
use prost::{
    Message,
    encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field},
};
use std::collections::HashSet;

/// The most messages in a file: over ten times what the largest exports hold.
const MOST_MESSAGES: u64 = 4_000_000;
/// The oldest and newest versions of ONNX's own ops that are read.
pub const OPSETS: std::ops::RangeInclusive<i64> = 13..=28;

/// A model, ready to be imported.
pub struct Model {
    /// The graph's name.
    pub name: String,
    /// The program that wrote it.
    pub producer: String,
    /// The version of ONNX's own ops.
    pub opset: i64,
    /// The graph, all functions inlined and known patterns joined.
    pub(crate) graph: Graph,
}

impl Model {
    /// Reads a model from the bytes of its file.
    pub fn read(bytes: &Bytes) -> Result<Self, OnnxError> {
        let mut left = MOST_MESSAGES;
        count_messages(bytes.clone(), Kind::Model, &mut left, 0)?;
        let model = proto::Model::decode(bytes.clone()).map_err(|e| OnnxError::Unreadable(e.to_string()))?;
        if model.ir_version.is_none() && model.graph.is_none() {
            return Err(OnnxError::Unreadable("it has neither a version nor a graph".into()));
        }
        let opset = opset_of(&model)?;
        let graph = model.graph.ok_or_else(|| OnnxError::Unreadable("it has no graph".into()))?;
        if !graph.sparse_initializer.is_empty() {
            return Err(OnnxError::Model("sparse weights are not supported".into()));
        }
        let graph = inline_functions(graph, &model.functions)?;
        check_names(&graph)?;
        let mut graph = graph;
        simplify(&mut graph);
        let name = if graph.name.is_empty() { "onnx".into() } else { shown(&graph.name) };
        Ok(Self { name, producer: shown(&model.producer_name), opset, graph })
    }

    /// How many nodes there are.
    pub fn nodes(&self) -> usize {
        self.graph.node.len()
    }
}

fn opset_of(model: &proto::Model) -> Result<i64, OnnxError> {
    let version = model.opset_import.iter().find(|o| is_standard(&o.domain)).map(|o| o.version);
    match version {
        Some(version) if OPSETS.contains(&version) => Ok(version),
        Some(version) => Err(OnnxError::Model(format!(
            "it uses opset {version}; {} to {} are supported: export or convert it to one of them",
            OPSETS.start(),
            OPSETS.end()
        ))),
        None => Err(OnnxError::Model("it does not say which opset it uses".into())),
    }
}

/// Every value is made once, before it is read; graph inputs and stored tensors have one name each.
fn check_names(graph: &Graph) -> Result<(), OnnxError> {
    let twice = |what: &str, name: &str| OnnxError::Model(format!("{what} `{}` is there twice", shown(name)));
    let mut stored = HashSet::new();
    for tensor in &graph.initializer {
        if !stored.insert(tensor.name.as_str()) {
            return Err(twice("initializer", &tensor.name));
        }
    }
    let mut made = HashSet::new();
    for input in &graph.input {
        if !made.insert(input.name.as_str()) {
            return Err(twice("input", &input.name));
        }
    }
    // Old files list their stored tensors among the inputs, too.
    made.extend(stored);
    for node in &graph.node {
        for output in node.output.iter().filter(|o| !o.is_empty()) {
            if !made.insert(output.as_str()) {
                return Err(twice("value", output));
            }
        }
    }
    // A cycle, or an order that is not topological, shows as a value that is read before it is made; values
    // that are never made are named by the node that reads them.
    let mut known: HashSet<&str> = graph.input.iter().map(|i| i.name.as_str()).collect();
    known.extend(graph.initializer.iter().map(|t| t.name.as_str()));
    for node in &graph.node {
        if let Some(input) = node.input.iter().find(|i| !i.is_empty() && !known.contains(i.as_str())) {
            let why = if made.contains(input.as_str()) {
                "which is made later: the nodes form a cycle or are not in topological order"
            } else {
                "which nothing makes"
            };
            let reason = format!("reads `{}`, {why}", shown(input));
            return Err(OnnxError::Node { node: shown(node.label()), op: shown(&node.kind()), reason });
        }
        known.extend(node.output.iter().map(String::as_str));
    }
    Ok(())
}

/// The messages whose fields are messages that are decoded.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Model,
    Graph,
    Function,
    Node,
    Attribute,
    Tensor,
    ValueInfo,
    Type,
    TensorType,
    Shape,
    Sparse,
    /// A message without decoded messages in it.
    Leaf,
}

impl Kind {
    /// The kind of message that a field holds, if it holds one.
    fn field(self, tag: u32) -> Option<Kind> {
        Some(match (self, tag) {
            (Kind::Model, 7) => Kind::Graph,
            (Kind::Model, 8) | (Kind::Function, 9) => Kind::Leaf,
            (Kind::Model, 25) => Kind::Function,
            (Kind::Graph, 1) | (Kind::Function, 7) => Kind::Node,
            (Kind::Graph, 5) | (Kind::Attribute, 5) | (Kind::Sparse, 1) => Kind::Tensor,
            (Kind::Graph, 11..=13) => Kind::ValueInfo,
            (Kind::Graph, 15) => Kind::Sparse,
            (Kind::Function, 11) | (Kind::Node, 5) => Kind::Attribute,
            (Kind::Attribute, 6) => Kind::Graph,
            (Kind::Tensor, 13) => Kind::Leaf,
            (Kind::ValueInfo, 2) => Kind::Type,
            (Kind::Type, 1) => Kind::TensorType,
            (Kind::TensorType, 2) => Kind::Shape,
            (Kind::Shape, 1) => Kind::Leaf,
            // Repeated strings are no messages, but grow as much.
            (Kind::Node | Kind::Function, 1..=6) | (Kind::Attribute, 9) => Kind::Leaf,
            _ => return None,
        })
    }
}

/// Walks the messages of a file without decoding them; `left` is how many there may still be.
fn count_messages(mut bytes: Bytes, kind: Kind, left: &mut u64, depth: u32) -> Result<(), OnnxError> {
    let broken = |e: prost::DecodeError| OnnxError::Unreadable(e.to_string());
    if depth > 90 {
        return Err(OnnxError::Unreadable("messages nest too deeply".into()));
    }
    *left =
        left.checked_sub(1).ok_or_else(|| OnnxError::Unreadable(format!("over {MOST_MESSAGES} messages")))?;
    if kind == Kind::Leaf {
        return Ok(());
    }
    while !bytes.is_empty() {
        let (tag, wire) = decode_key(&mut bytes).map_err(broken)?;
        match kind.field(tag).filter(|_| wire == WireType::LengthDelimited) {
            None => skip_field(wire, tag, &mut bytes, DecodeContext::default()).map_err(broken)?,
            Some(inner) => {
                let length = decode_varint(&mut bytes).map_err(broken)?;
                let length = usize::try_from(length).ok().filter(|&n| n <= bytes.len());
                let length = length.ok_or_else(|| OnnxError::Unreadable("a message is cut short".into()))?;
                count_messages(bytes.split_to(length), inner, left, depth + 1)?;
            }
        }
    }
    Ok(())
}
