//! Graphs as JSON: the stable, versioned file format.
//!
//! ```json
//! {"format":"shardwright-graph","version":1,"name":"mlp",
//! "tensors":[
//! {"name":"x","type":"f32[64,100]","role":"input","init":{"normal":1.0}},
//! {"name":"w","type":"f32[100,10]","role":"parameter","init":{"normal":0.1}},
//! {"name":"fc","type":"f32[64,10]","role":"activation"}
//! ],
//! "ops":[
//! {"name":"fc","op":{"kind":"contract","spec":"mk,kn->mn"},"inputs":[0,1],"outputs":[2],"layer":0,"phase":"forward"}
//! ],
//! "layers":[0],"outputs":[2],"gradients":[],"carries":[]}
//! ```
//!
//! Tensors, ops and layers are named by their position; a layer is written as its forward op, a gradient as
//! `[weight, gradient]`, a carry as `[old, new]`; an op that recomputes another has `"recomputes"` and that op's position;
//! `"op_by_op":true` is written where it is so ([`Graph::op_by_op`]).
//! A step of several micro-batches has `"micro_batches"`, `"sliced"` with `[tensor, dimension]` for data that micro-batches slice, and
//! `"repeated":true` at every op that runs once per micro-batch.
//! The same graph always gives the same bytes.
//!
//! Reading trusts nothing: the memory that it takes is bounded by the length of the text, counts are
//! limited, unknown fields, kinds and versions are refused, and the graph is [verified](crate::verify).

use crate::{
    graph::{Carry, Graph, Init, Layer, Node, Phase, Role, SlicedTensor, Tensor, WeightGradient},
    ids::{LayerId, OpId, TensorId},
    ops::Op,
    types::TensorType,
    verify::{VerifyError, verify},
};
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{Error, SeqAccess, Visitor},
};
use serde_json::value::RawValue;
use smallvec::SmallVec;
use std::{borrow::Cow, fmt, io, marker::PhantomData, num::NonZeroU32};

/// The required value of the field `format`.
pub const FORMAT: &str = "shardwright-graph";
/// The version of the format that is written, and the only one that is read.
pub const VERSION: u64 = 1;
/// The most tensors, ops or layers that a graph read from a file may have.
pub const MAX_COUNT: usize = 1 << 24;

/// Why a graph cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// Not JSON, or not laid out as a graph.
    #[error("line {line}, column {column}: {reason}")]
    Syntax {
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// The reason.
        reason: String,
    },
    /// Another kind of file.
    #[error("not a Shardwright graph: field `format` is {0}, not \"shardwright-graph\"")]
    Format(String),
    /// Another version of the format.
    #[error("graph format version {0} is not supported, only version 1: write the graph anew")]
    Version(u64),
    /// An op that is unknown or has bad attributes.
    #[error("op #{index} `{}`: {reason}", .name.escape_debug())]
    Op {
        /// Its position.
        index: usize,
        /// Its name.
        name: String,
        /// The reason.
        reason: String,
    },
    /// A graph that breaks an invariant.
    #[error(transparent)]
    Invalid(#[from] VerifyError),
}

impl From<serde_json::Error> for ReadError {
    fn from(error: serde_json::Error) -> Self {
        let (line, column) = (error.line(), error.column());
        ReadError::Syntax { line, column, reason: without_position(&error) }
    }
}

/// The message of a JSON error without its position, which is reported apart or means nothing.
pub(crate) fn without_position(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let position = format!(" at line {} column {}", error.line(), error.column());
    text.strip_suffix(&position).unwrap_or(&text).to_owned()
}

/// Reads an op from the JSON of its kind and attributes.
pub(crate) fn read_op(text: &str) -> Result<Op, String> {
    serde_json::from_str(text).map_err(|e| without_position(&e))
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TensorForm<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    #[serde(rename = "type")]
    ty: Cow<'a, TensorType>,
    role: Role,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    init: Option<Init>,
}

#[derive(Serialize)]
struct NodeOut<'a> {
    name: &'a str,
    op: &'a Op,
    inputs: &'a [TensorId],
    outputs: &'a [TensorId],
    layer: LayerId,
    phase: Phase,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    repeated: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    recomputes: Option<OpId>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeIn<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    #[serde(borrow)]
    op: &'a RawValue,
    inputs: SmallVec<[TensorId; 4]>,
    outputs: SmallVec<[TensorId; 2]>,
    layer: LayerId,
    phase: Phase,
    #[serde(default)]
    repeated: bool,
    #[serde(default)]
    recomputes: Option<OpId>,
}

/// The fields that identify the format; all others are read later.
#[derive(Deserialize)]
struct Header<'a> {
    #[serde(borrow, default)]
    format: Option<&'a RawValue>,
    #[serde(default)]
    version: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GraphForm<'a> {
    #[serde(rename = "format")]
    _format: String,
    #[serde(rename = "version")]
    _version: u64,
    name: String,
    #[serde(borrow)]
    tensors: Items<TensorForm<'a>>,
    #[serde(borrow)]
    ops: Items<NodeIn<'a>>,
    layers: Items<OpId>,
    outputs: Items<TensorId>,
    gradients: Items<(TensorId, TensorId)>,
    carries: Items<(TensorId, TensorId)>,
    #[serde(default)]
    op_by_op: bool,
    #[serde(default = "one")]
    micro_batches: NonZeroU32,
    #[serde(default = "none")]
    sliced: Items<(TensorId, u8)>,
}

fn one() -> NonZeroU32 {
    NonZeroU32::MIN
}

fn none<T>() -> Items<T> {
    Items(Vec::new())
}

/// A list of limited length, whose errors name the item.
struct Items<T>(Vec<T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Items<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for List<T> {
            type Value = Items<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Items<T>, A::Error> {
                let mut items = Vec::new();
                let place = |i, e| A::Error::custom(format_args!("item {i}: {e}"));
                while let Some(item) = seq.next_element().map_err(|e| place(items.len(), e))? {
                    if items.len() == MAX_COUNT {
                        return Err(A::Error::custom(format_args!("more than {MAX_COUNT} items")));
                    }
                    items.push(item);
                }
                Ok(Items(items))
            }
        }
        deserializer.deserialize_seq(List(PhantomData))
    }
}

impl Graph {
    /// The graph as JSON.
    pub fn to_json(&self) -> String {
        let mut bytes = Vec::with_capacity(128 * (self.tensors.len() + self.ops.len()) + 256);
        // Memory does not fail, and no map in a graph has keys that JSON cannot write.
        let written = self.write_json(&mut bytes);
        debug_assert!(written.is_ok(), "{written:?}");
        // JSON is UTF-8, so that nothing is replaced.
        String::from_utf8(bytes).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned())
    }

    /// Writes the graph as JSON; wrap files in a `BufWriter`.
    pub fn write_json(&self, mut to: impl io::Write) -> io::Result<()> {
        let to = &mut to;
        write!(to, "{{\"format\":\"{FORMAT}\",\"version\":{VERSION},\"name\":")?;
        serde_json::to_writer(&mut *to, &self.name)?;
        let tensors = self.tensors.iter().map(|t| TensorForm {
            name: Cow::Borrowed(&t.name),
            ty: Cow::Borrowed(&t.ty),
            role: t.role,
            init: t.init,
        });
        write_list(to, "tensors", "\n", tensors)?;
        let ops = self.ops.iter().map(|n| NodeOut {
            name: &n.name,
            op: &n.op,
            inputs: &n.inputs,
            outputs: &n.outputs,
            layer: n.layer,
            phase: n.phase,
            repeated: n.repeated,
            recomputes: n.recomputes,
        });
        write_list(to, "ops", "\n", ops)?;
        write_list(to, "layers", "", self.layers.iter().map(|l| l.forward))?;
        write_list(to, "outputs", "", self.outputs.iter())?;
        write_list(to, "gradients", "", self.gradients.iter().map(|g| (g.parameter, g.gradient)))?;
        write_list(to, "carries", "", self.carries.iter().map(|c| (c.old, c.new)))?;
        if self.op_by_op {
            to.write_all(b",\n\"op_by_op\":true")?;
        }
        if self.micro_batches > NonZeroU32::MIN {
            write!(to, ",\n\"micro_batches\":{}", self.micro_batches)?;
            write_list(to, "sliced", "", self.sliced.iter().map(|s| (s.tensor, s.dim)))?;
        }
        to.write_all(b"}\n")
    }

    /// Reads a graph from JSON and verifies it.
    pub fn from_json(text: &[u8]) -> Result<Graph, ReadError> {
        let header: Header<'_> = serde_json::from_slice(text)?;
        let format = header.format.map_or("missing", RawValue::get);
        if serde_json::from_str(format).ok() != Some(FORMAT) {
            return Err(ReadError::Format(format.chars().take(80).collect()));
        }
        if header.version != VERSION {
            return Err(ReadError::Version(header.version));
        }
        let graph = assemble(serde_json::from_slice(text)?)?;
        verify(&graph)?;
        Ok(graph)
    }
}

/// Writes a titled list, with `gap` before every item and before the end.
fn write_list<T: Serialize>(
    to: &mut impl io::Write,
    title: &str,
    gap: &str,
    items: impl Iterator<Item = T>,
) -> io::Result<()> {
    write!(to, ",\n\"{title}\":[")?;
    for (i, item) in items.enumerate() {
        write!(to, "{}{gap}", if i > 0 { "," } else { "" })?;
        serde_json::to_writer(&mut *to, &item)?;
    }
    write!(to, "{gap}]")
}

/// Builds the graph; the verifier checks it afterwards.
fn assemble(form: GraphForm<'_>) -> Result<Graph, ReadError> {
    let tensors = form.tensors.0.into_iter().map(|t| Tensor {
        name: t.name.into_owned(),
        ty: t.ty.into_owned(),
        role: t.role,
        producer: None,
        init: t.init,
    });
    let mut tensors: Vec<Tensor> = tensors.collect();
    let mut ops = Vec::with_capacity(form.ops.0.len());
    for (index, n) in form.ops.0.into_iter().enumerate() {
        let fail = |reason| ReadError::Op { index, name: n.name.clone().into_owned(), reason };
        let op = read_op(n.op.get()).map_err(fail)?;
        for t in &n.outputs {
            let tensor = tensors.get_mut(t.index()).ok_or_else(|| fail(format!("there is no tensor {t}")))?;
            if let Some(other) = tensor.producer.replace(OpId::new(index)) {
                return Err(fail(format!(
                    "makes {t} `{}`, which op {other} makes",
                    tensor.name.escape_debug()
                )));
            }
        }
        let name = n.name.into_owned();
        let NodeIn { inputs, outputs, layer, phase, repeated, recomputes, .. } = n;
        ops.push(Node { name, op, inputs, outputs, layer, phase, repeated, recomputes });
    }
    let layer = |forward: OpId| {
        // A dangling id is reported by the verifier.
        let name = ops.get(forward.index()).map_or(String::new(), |n| n.name.clone());
        Layer { name, forward }
    };
    let layers = form.layers.0.into_iter().map(layer).collect();
    let gradient = |(parameter, gradient)| WeightGradient { parameter, gradient };
    Ok(Graph {
        name: form.name,
        tensors,
        layers,
        outputs: form.outputs.0,
        gradients: form.gradients.0.into_iter().map(gradient).collect(),
        carries: form.carries.0.into_iter().map(|(old, new)| Carry { old, new }).collect(),
        op_by_op: form.op_by_op,
        micro_batches: form.micro_batches,
        sliced: form.sliced.0.into_iter().map(|(tensor, dim)| SlicedTensor { tensor, dim }).collect(),
        ops,
    })
}
