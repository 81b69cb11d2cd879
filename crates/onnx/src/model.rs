//! Reads a model file: decodes it, checks its names, inlines its functions.
//!
//! No declared size controls an allocation. Decoding multiplies the size, since a message of two bytes becomes a struct
//! of hundreds. So [`count_messages`] walks the file first and refuses one with too many messages.

use super::{
    attributes::is_standard,
    budget::Budget,
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

/// The most messages in a file: over ten times the number in the largest exports.
const MOST_MESSAGES: u64 = 4_000_000;
/// The supported versions of ONNX's own operator set.
pub const OPSETS: std::ops::RangeInclusive<i64> = 13..=28;

/// A decoded and checked model.
pub struct Model {
    /// The graph's name.
    pub name: String,
    /// The program that wrote it.
    pub producer: String,
    /// The version of ONNX's own operator set.
    pub opset: i64,
    /// The size of the file, without external data.
    pub(crate) file_bytes: usize,
    /// The graph, with functions inlined and known patterns replaced.
    pub(crate) graph: Graph,
}

impl Model {
    /// Reads a model from the bytes of its file.
    pub fn read(bytes: &Bytes) -> Result<Self, OnnxError> {
        let mut left = MOST_MESSAGES;
        count_messages(bytes.clone(), MessageKind::Model, &mut left, 0)?;
        let model = proto::Model::decode(bytes.clone()).map_err(|e| OnnxError::Unreadable(e.to_string()))?;
        if model.ir_version.is_none() && model.graph.is_none() {
            return Err(OnnxError::Unreadable("the file has neither a version nor a graph".into()));
        }
        let opset = opset_of(&model)?;
        let graph = model.graph.ok_or_else(|| OnnxError::Unreadable("the model has no graph".into()))?;
        if !graph.sparse_initializer.is_empty() {
            return Err(OnnxError::Model("sparse weights are not supported".into()));
        }
        let graph = inline_functions(graph, &model.functions, Budget::of_file(bytes.len()))?;
        check_names(&graph)?;
        let mut graph = graph;
        simplify(&mut graph);
        let name = if graph.name.is_empty() { "onnx".into() } else { shown(&graph.name) };
        Ok(Self { name, producer: shown(&model.producer_name), opset, file_bytes: bytes.len(), graph })
    }

    /// The number of nodes.
    pub fn nodes(&self) -> usize {
        self.graph.node.len()
    }
}

fn opset_of(model: &proto::Model) -> Result<i64, OnnxError> {
    let version = model.opset_import.iter().find(|o| is_standard(&o.domain)).map(|o| o.version);
    match version {
        Some(version) if OPSETS.contains(&version) => Ok(version),
        Some(version) => Err(OnnxError::Model(format!(
            "the model uses opset {version}; opsets {} to {} are supported: export or convert it to one of them",
            OPSETS.start(),
            OPSETS.end()
        ))),
        None => Err(OnnxError::Model("the model does not state its opset".into())),
    }
}

/// Checks that every value is computed once, before it is read, and that inputs and stored tensors have unique names.
fn check_names(graph: &Graph) -> Result<(), OnnxError> {
    let twice =
        |what: &str, name: &str| OnnxError::Model(format!("{what} `{}` is defined twice", shown(name)));
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
    // Old files list stored tensors among the inputs.
    made.extend(stored);
    for node in &graph.node {
        for output in node.output.iter().filter(|o| !o.is_empty()) {
            if !made.insert(output.as_str()) {
                return Err(twice("value", output));
            }
        }
    }
    // A cycle or a wrong order shows as a value that is read before it is computed. The node that reads it is named.
    let mut known: HashSet<&str> = graph.input.iter().map(|i| i.name.as_str()).collect();
    known.extend(graph.initializer.iter().map(|t| t.name.as_str()));
    for node in &graph.node {
        if let Some(input) = node.input.iter().find(|i| !i.is_empty() && !known.contains(i.as_str())) {
            let why = if made.contains(input.as_str()) {
                "which is computed later: the nodes form a cycle or are not in topological order"
            } else {
                "which no node computes"
            };
            let reason = format!("reads `{}`, {why}", shown(input));
            return Err(OnnxError::Node { node: shown(node.label()), op: shown(&node.kind()), reason });
        }
        known.extend(node.output.iter().map(String::as_str));
    }
    Ok(())
}

/// The kinds of messages that contain decoded messages.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MessageKind {
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
    /// A message without decoded messages.
    Leaf,
}

impl MessageKind {
    /// The kind of message in a field; `None` for other fields.
    fn field(self, tag: u32) -> Option<MessageKind> {
        Some(match (self, tag) {
            (MessageKind::Model, 7) => MessageKind::Graph,
            (MessageKind::Model, 8) | (MessageKind::Function, 9) => MessageKind::Leaf,
            (MessageKind::Model, 25) => MessageKind::Function,
            (MessageKind::Graph, 1) | (MessageKind::Function, 7) => MessageKind::Node,
            (MessageKind::Graph, 5) | (MessageKind::Attribute, 5) | (MessageKind::Sparse, 1) => {
                MessageKind::Tensor
            }
            (MessageKind::Graph, 11..=13) => MessageKind::ValueInfo,
            (MessageKind::Graph, 15) => MessageKind::Sparse,
            (MessageKind::Function, 11) | (MessageKind::Node, 5) => MessageKind::Attribute,
            (MessageKind::Attribute, 6) => MessageKind::Graph,
            (MessageKind::Tensor, 13) => MessageKind::Leaf,
            (MessageKind::ValueInfo, 2) => MessageKind::Type,
            (MessageKind::Type, 1) => MessageKind::TensorType,
            (MessageKind::TensorType, 2) => MessageKind::Shape,
            (MessageKind::Shape, 1) => MessageKind::Leaf,
            // Repeated strings are not messages, but multiply the size as well.
            (MessageKind::Node | MessageKind::Function, 1..=6) | (MessageKind::Attribute, 9) => {
                MessageKind::Leaf
            }
            _ => return None,
        })
    }
}

/// Counts the messages of a file without decoding them. `left` is the number still allowed.
fn count_messages(mut bytes: Bytes, kind: MessageKind, left: &mut u64, depth: u32) -> Result<(), OnnxError> {
    let broken = |e: prost::DecodeError| OnnxError::Unreadable(e.to_string());
    if depth > 90 {
        return Err(OnnxError::Unreadable("messages are nested too deeply".into()));
    }
    *left = left
        .checked_sub(1)
        .ok_or_else(|| OnnxError::Unreadable(format!("more than {MOST_MESSAGES} messages")))?;
    if kind == MessageKind::Leaf {
        return Ok(());
    }
    while !bytes.is_empty() {
        let (tag, wire) = decode_key(&mut bytes).map_err(broken)?;
        match kind.field(tag).filter(|_| wire == WireType::LengthDelimited) {
            None => skip_field(wire, tag, &mut bytes, DecodeContext::default()).map_err(broken)?,
            Some(inner) => {
                let length = decode_varint(&mut bytes).map_err(broken)?;
                let length = usize::try_from(length).ok().filter(|&n| n <= bytes.len());
                let length = length.ok_or_else(|| OnnxError::Unreadable("a message is truncated".into()))?;
                count_messages(bytes.split_to(length), inner, left, depth + 1)?;
            }
        }
    }
    Ok(())
}
