//! Graphs as readable text, one line per op and per tensor that no op makes: for people, logs and tests.
//!
//! ```text
//! graph mlp
//! %0 x: f32[64,100] input normal(1.0)
//! %1 w: f32[100,10] parameter normal(0.1)
//! %2 fc: f32[64,10] = contract(%0, %1) {"spec":"mk,kn->mn"} @fc
//! %3 fc.grad: f32[64,10] = fill() {"value":1.0,"ty":"f32[64,10]"} @fc backward
//! output %2
//! gradient %1 %4
//! carry %1 %5
//! ```
//!
//! An op's line gives its results, kind, operands, attributes as JSON, layer (`@` and the name of its forward
//! op), phase, `repeated` where it runs once per micro-batch, and `recomputes` with the name of the op that it recomputes. Steps of several micro-batches have a line `micro_batches 4`
//! and, for data that micro-batches slice along dimension 0, `sliced %0 0`. The op's name is that of its first result unless `as NAME` follows, and a result's
//! role follows from the phase unless it is written after the type. Names that are not plain words are
//! quoted as JSON strings. Files are kept as [JSON](crate::json); this form holds the same.

mod line;

use crate::{
    graph::{Carry, Graph, Init, Layer, Node, Phase, Role, SlicedTensor, Tensor, WeightGradient},
    ids::{LayerId, OpId, TensorId},
    json::{MAX_COUNT, read_op},
    ops::Op,
    types::Real,
    verify::{VerifyError, verify},
};
use line::{Line, ReadResult};
use smallvec::SmallVec;
use std::{collections::HashMap, fmt, num::NonZeroU32, str::FromStr};

/// Why a text is not a graph.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// A line that cannot be read.
    #[error("line {line}, column {column}: {reason}")]
    Syntax {
        /// Line, from 1.
        line: usize,
        /// Column in characters, from 1.
        column: usize,
        /// The reason.
        reason: String,
    },
    /// A graph that breaks an invariant.
    #[error(transparent)]
    Invalid(#[from] VerifyError),
}

const ROLES: [Role; 6] =
    [Role::Input, Role::Parameter, Role::Activation, Role::Gradient, Role::OptimizerState, Role::Constant];

/// The role of an op's results unless the text states another.
fn usual_role(phase: Phase) -> Role {
    match phase {
        Phase::Forward => Role::Activation,
        Phase::Backward => Role::Gradient,
        Phase::Update => Role::Parameter,
    }
}

fn role_name(role: Role) -> &'static str {
    match role {
        Role::Input => "input",
        Role::Parameter => "parameter",
        Role::Activation => "activation",
        Role::Gradient => "gradient",
        Role::OptimizerState => "optimizer_state",
        Role::Constant => "constant",
    }
}

/// Whether a character may stand in a name that is not quoted.
fn is_plain(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '/' | '-')
}

/// How many bytes at the start of `text` are a plain name; a colon belongs to it if more of it follows.
fn plain_length(text: &str) -> usize {
    let mut length = 0;
    for (i, c) in text.char_indices() {
        let inside = c == ':' && length > 0 && text[i + 1..].starts_with(is_plain);
        if !is_plain(c) && !inside {
            break;
        }
        length = i + 1;
    }
    length
}

/// A name as the text form writes it.
struct Name<'a>(&'a str);

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.0.is_empty() && plain_length(self.0) == self.0.len() {
            return f.write_str(self.0);
        }
        // Everything that could move a terminal's cursor or reorder a line is escaped.
        f.write_str("\"")?;
        for c in self.0.chars() {
            match c {
                '"' | '\\' => write!(f, "\\{c}")?,
                ' '..='~' => write!(f, "{c}")?,
                _ if c.is_alphanumeric() => write!(f, "{c}")?,
                _ => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        write!(f, "\\u{unit:04x}")?;
                    }
                }
            }
        }
        f.write_str("\"")
    }
}

/// The text form; [`Graph::from_str`] reads it back.
impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "graph {}", Name(&self.name))?;
        if self.op_by_op {
            writeln!(f, "op_by_op")?;
        }
        if self.micro_batches > NonZeroU32::MIN {
            writeln!(f, "micro_batches {}", self.micro_batches)?;
        }
        let mut sources = self.tensor_ids().filter(|&t| self.tensor(t).producer.is_none()).peekable();
        for node in &self.ops {
            // Sources come just before the op whose results follow them, as they were built.
            let first = node.outputs.iter().min();
            while let Some(source) = sources.next_if(|s| first.is_some_and(|o| s < o)) {
                self.fmt_source(f, source)?;
            }
            self.fmt_op(f, node)?;
        }
        sources.try_for_each(|source| self.fmt_source(f, source))?;
        self.outputs.iter().try_for_each(|t| writeln!(f, "output {t}"))?;
        self.gradients.iter().try_for_each(|g| writeln!(f, "gradient {} {}", g.parameter, g.gradient))?;
        self.carries.iter().try_for_each(|c| writeln!(f, "carry {} {}", c.old, c.new))?;
        self.sliced.iter().try_for_each(|s| writeln!(f, "sliced {} {}", s.tensor, s.dim))
    }
}

impl Graph {
    fn fmt_source(&self, f: &mut fmt::Formatter<'_>, id: TensorId) -> fmt::Result {
        let t = self.tensor(id);
        write!(f, "{id} {}: {} {}", Name(&t.name), t.ty, role_name(t.role))?;
        match t.init {
            None => writeln!(f),
            Some(Init::Constant(Real(x))) => writeln!(f, " constant({x:?})"),
            Some(Init::Normal(Real(x))) => writeln!(f, " normal({x:?})"),
            Some(Init::Uniform(Real(x))) => writeln!(f, " uniform({x:?})"),
            Some(Init::Below(n)) => writeln!(f, " below({n})"),
        }
    }

    fn fmt_op(&self, f: &mut fmt::Formatter<'_>, node: &Node) -> fmt::Result {
        for (i, &id) in node.outputs.iter().enumerate() {
            let t = self.tensor(id);
            write!(f, "{}{id} {}: {}", if i > 0 { ", " } else { "" }, Name(&t.name), t.ty)?;
            if t.role != usual_role(node.phase) {
                write!(f, " {}", role_name(t.role))?;
            }
        }
        write!(f, " = {}(", node.op.kind())?;
        for (i, id) in node.inputs.iter().enumerate() {
            write!(f, "{}{id}", if i > 0 { ", " } else { "" })?;
        }
        // The kind is the first field of the op's JSON; here it stands before the operands.
        let json = serde_json::to_string(&node.op).map_err(|_| fmt::Error)?;
        let attributes = json.find([',', '}']).map_or("", |end| json[end..].trim_start_matches(','));
        let open = if attributes == "}" { "" } else { " {" };
        write!(f, "){open}{}", if open.is_empty() { "" } else { attributes })?;
        if node.outputs.first().is_none_or(|&t| self.tensor(t).name != node.name) {
            write!(f, " as {}", Name(&node.name))?;
        }
        write!(f, " @{}", Name(&self.layers[node.layer.index()].name))?;
        f.write_str(match node.phase {
            Phase::Forward => "",
            Phase::Backward => " backward",
            Phase::Update => " update",
        })?;
        if node.repeated {
            f.write_str(" repeated")?;
        }
        match node.recomputes.and_then(|op| self.ops.get(op.index())) {
            Some(original) => writeln!(f, " recomputes {}", Name(&original.name)),
            None => writeln!(f),
        }
    }
}

/// An op whose layer and original are still names.
struct Draft {
    node: Node,
    layer: String,
    /// The name of the op that it recomputes.
    recomputes: Option<String>,
    line: usize,
}

#[derive(Default)]
struct Reader {
    graph: Graph,
    tensors: Vec<(TensorId, Tensor, usize)>,
    drafts: Vec<Draft>,
}

impl Reader {
    fn line(&mut self, line: &mut Line<'_>) -> ReadResult<()> {
        if self.tensors.len() > MAX_COUNT || self.drafts.len() > MAX_COUNT {
            return line.fail(format!("more than {MAX_COUNT} tensors or ops"));
        }
        line.skip_spaces();
        if line.rest().is_empty() {
            return Ok(());
        }
        if line.rest().starts_with(['%', '=']) {
            return self.tensor_or_op(line);
        }
        let start = line.at;
        match line.word() {
            "graph" => self.graph.name = line.name()?,
            "op_by_op" => self.graph.op_by_op = true,
            "output" => self.graph.outputs.push(line.tensor_id()?),
            "gradient" => {
                let (parameter, gradient) = (line.tensor_id()?, line.tensor_id()?);
                self.graph.gradients.push(WeightGradient { parameter, gradient });
            }
            "micro_batches" => self.graph.micro_batches = line.number()?,
            "sliced" => {
                let (tensor, dim) = (line.tensor_id()?, line.number()?);
                self.graph.sliced.push(SlicedTensor { tensor, dim });
            }
            "carry" => {
                let (old, new) = (line.tensor_id()?, line.tensor_id()?);
                self.graph.carries.push(Carry { old, new });
            }
            _ => {
                line.at = start;
                return line.fail("expected `graph`, `output`, `gradient`, `carry` or a tensor such as `%0`");
            }
        }
        line.end()
    }

    fn tensor_or_op(&mut self, line: &mut Line<'_>) -> ReadResult<()> {
        let mut results: SmallVec<[(TensorId, Tensor, Option<Role>); 2]> = SmallVec::new();
        while !line.eat("=") {
            if !results.is_empty() {
                line.expect(",")?;
            }
            let (id, tensor) = line.tensor()?;
            let role = line.role()?;
            line.skip_spaces();
            if results.is_empty() && !line.rest().starts_with(['=', ',']) {
                let Some(role) = role else { return line.fail("expected a role, `,` or `=`") };
                let init = line.init()?;
                self.tensors.push((id, Tensor { role, init, ..tensor }, line.number));
                return line.end();
            }
            results.push((id, tensor, role));
        }
        self.op(line, results)
    }

    fn op(
        &mut self,
        line: &mut Line<'_>,
        results: SmallVec<[(TensorId, Tensor, Option<Role>); 2]>,
    ) -> ReadResult<()> {
        line.skip_spaces();
        let start = line.at;
        let kind = line.word();
        line.expect("(")?;
        let mut inputs = SmallVec::new();
        while !line.eat(")") {
            if !inputs.is_empty() {
                line.expect(",")?;
            }
            inputs.push(line.tensor_id()?);
        }
        line.skip_spaces();
        let attributes = if line.rest().starts_with('{') { line.json()?.get() } else { "{}" };
        let op = read_attributes(kind, attributes).or_else(|reason| {
            line.at = start;
            line.fail(reason)
        })?;
        let name = if line.eat("as") { Some(line.name()?) } else { None };
        let Some(name) = name.or_else(|| results.first().map(|(_, t, _)| t.name.clone())) else {
            return line.fail("an op without results needs a name: `as NAME`");
        };
        line.expect("@")?;
        let layer = line.name()?;
        line.skip_spaces();
        let start = line.at;
        let phase = match line.word() {
            "" => Phase::Forward,
            "repeated" => {
                line.at = start;
                Phase::Forward
            }
            "backward" => Phase::Backward,
            "update" => Phase::Update,
            other => {
                line.at = start;
                return line.fail(format!("`{other}` is not a phase: `backward`, `update` or nothing"));
            }
        };
        let repeated = line.eat("repeated");
        let id = OpId::new(self.drafts.len());
        let outputs = results.iter().map(|(t, ..)| *t).collect();
        for (t, tensor, role) in results {
            let role = role.unwrap_or(usual_role(phase));
            self.tensors.push((t, Tensor { role, producer: Some(id), ..tensor }, line.number));
        }
        let recomputes = if line.eat("recomputes") { Some(line.name()?) } else { None };
        let node = Node { name, op, inputs, outputs, layer: LayerId(0), phase, repeated, recomputes: None };
        self.drafts.push(Draft { node, layer, recomputes, line: line.number });
        line.end()
    }

    /// Puts tensors in the order of their numbers and gives layers theirs.
    fn finish(mut self) -> ReadResult<Graph> {
        self.tensors.sort_by_key(|(id, ..)| *id);
        for (i, (id, _, line)) in self.tensors.iter().enumerate() {
            if id.index() != i {
                let reason =
                    if id.index() < i { format!("{id} appears twice") } else { format!("there is no %{i}") };
                return Err(TextError::Syntax { line: *line, column: 1, reason });
            }
        }
        self.graph.tensors = self.tensors.into_iter().map(|(_, t, _)| t).collect();
        let mut layers: HashMap<&str, LayerId> = HashMap::new();
        for (i, draft) in self.drafts.iter().enumerate() {
            if draft.node.name == draft.layer {
                layers.insert(&draft.layer, LayerId::new(self.graph.layers.len()));
                self.graph.layers.push(Layer { name: draft.layer.clone(), forward: OpId::new(i) });
            }
        }
        let found = |d: &Draft| layers.get(d.layer.as_str()).copied().ok_or(d.line);
        let ids: Result<Vec<LayerId>, usize> = self.drafts.iter().map(found).collect();
        let ids = ids.map_err(|line| {
            let reason = "its layer does not exist: no op is its own layer under that name".to_owned();
            TextError::Syntax { line, column: 1, reason }
        })?;
        let originals = originals(&self.drafts)?;
        let nodes = self.drafts.into_iter().zip(ids).zip(originals);
        let nodes = nodes.map(|((d, layer), recomputes)| Node { layer, recomputes, ..d.node });
        self.graph.ops = nodes.collect();
        verify(&self.graph)?;
        Ok(self.graph)
    }
}

/// Per op: the op that it recomputes.
fn originals(drafts: &[Draft]) -> ReadResult<Vec<Option<OpId>>> {
    let mut ops: HashMap<&str, OpId> = HashMap::new();
    if drafts.iter().any(|draft| draft.recomputes.is_some()) {
        ops.extend(drafts.iter().enumerate().map(|(i, d)| (d.node.name.as_str(), OpId::new(i))));
    }
    let original = |draft: &Draft| match &draft.recomputes {
        None => Ok(None),
        Some(name) => ops.get(name.as_str()).copied().map(Some).ok_or_else(|| TextError::Syntax {
            line: draft.line,
            column: 1,
            reason: "it recomputes an op that does not exist".to_owned(),
        }),
    };
    drafts.iter().map(original).collect()
}

/// An op from its kind and the JSON object of its attributes.
fn read_attributes(kind: &str, attributes: &str) -> Result<Op, String> {
    let fields = attributes.trim_start_matches('{').trim_start();
    let comma = if fields.starts_with('}') { "" } else { "," };
    read_op(&format!("{{\"kind\":\"{kind}\"{comma}{fields}"))
}

impl FromStr for Graph {
    type Err = TextError;

    /// Reads the text form and verifies the graph.
    fn from_str(text: &str) -> Result<Self, TextError> {
        let mut reader = Reader::default();
        for (i, text) in text.split('\n').enumerate() {
            reader.line(&mut Line { number: i + 1, text: text.trim_end_matches('\r'), at: 0 })?;
        }
        reader.finish()
    }
}
