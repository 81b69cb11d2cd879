//! LSTM, GRU and RNN.
//!
//! A standard LSTM becomes the graph's recurrent op over the whole sequence, as in the zoo's models. Other cells are
//! unrolled: one input product for all time steps, then the recurrent part step by step. Weights are stored gate by gate,
//! in the order of the graph's op.

use super::{
    Import,
    elementwise::{apply, binary},
    movement::{reshaped_view, take},
};
use crate::{
    contraction::{Product, product},
    error::{NodeError, NodeResult, shown},
    importer::Importer,
    pending::AxisSelection,
    proto::Node,
    view::View,
};
use shardwright_graph::{
    Real, TensorType,
    ops::{BinaryFn, Concat, Fill, Lstm, Reverse, UnaryFn},
};

pub(super) fn find(op: &str) -> Option<Import> {
    Some(match op {
        "LSTM" => |cx, node| recurrent(cx, node, CellKind::Lstm),
        "GRU" => |cx, node| recurrent(cx, node, CellKind::Gru),
        "RNN" => |cx, node| recurrent(cx, node, CellKind::Rnn),
        _ => return None,
    })
}

/// The most time steps that are unrolled.
const MOST_STEPS: u64 = 256;

#[derive(Clone, Copy, PartialEq, Eq)]
enum CellKind {
    Lstm,
    Gru,
    Rnn,
}

impl CellKind {
    /// The number of ONNX's gates: i, o, f, c; z, r, h; or one.
    fn gates(self) -> u64 {
        match self {
            Self::Lstm => 4,
            Self::Gru => 3,
            Self::Rnn => 1,
        }
    }

    fn activations(self) -> &'static [&'static str] {
        match self {
            Self::Lstm => &["Sigmoid", "Tanh", "Tanh"],
            Self::Gru => &["Sigmoid", "Tanh"],
            Self::Rnn => &["Tanh"],
        }
    }
}

/// One direction of a node.
struct Pass<'n> {
    node: &'n Node,
    kind: CellKind,
    number: u64,
    hidden: u64,
    functions: Vec<UnaryFn>,
}

/// The result of a pass: all outputs `[t, b, h]`, the last output and the last cell `[b, h]`.
struct PassOutput {
    all: View,
    last: View,
    cell: Option<View>,
}

fn recurrent(cx: &mut Importer<'_>, node: &Node, kind: CellKind) -> NodeResult {
    if node.has("clip") || node.flag("input_forget", false)? {
        return Err(NodeError::unsupported("clipped gates or coupled input and forget gates"));
    }
    let by_sample = node.flag("layout", false)?;
    let x = cx.view(node, 0)?;
    if x.rank() != 3 {
        return Err(NodeError::invalid(format!(
            "the input needs steps, samples and channels, got shape {:?}",
            x.shape()
        )));
    }
    let x = if by_sample { x.transpose(&[1, 0, 2]) } else { x };
    let (steps, samples) = (x.size(0), x.size(1));
    let backwards: &[bool] = match node.text("direction", "forward")?.as_str() {
        "forward" => &[false],
        "reverse" => &[true],
        "bidirectional" => &[false, true],
        other => return Err(NodeError::invalid(format!("unknown direction `{other}`"))),
    };
    let weights = cx.view(node, 1)?.shape();
    let hidden = weights.get(1).map_or(0, |rows| rows / kind.gates());
    let fits =
        weights.len() == 3 && weights[0] == backwards.len() as u64 && weights[1] == hidden * kind.gates();
    if !fits || hidden == 0 {
        return Err(NodeError::invalid(format!("weights of shape {weights:?} do not fit")));
    }
    full_length(cx, node, steps)?;
    let mut made = Vec::with_capacity(backwards.len());
    for (number, &backwards) in (0..).zip(backwards) {
        let pass = Pass { node, kind, number, hidden, functions: functions(node, kind, number as usize)? };
        let sequence = if backwards { reversed(cx, &x)? } else { x.clone() };
        let mut result = pass.run(cx, &sequence, [steps, samples], by_sample)?;
        if backwards {
            result.all = reversed(cx, &result.all)?;
        }
        made.push(result);
    }
    let all = made.iter().map(|m| m.all.clone()).collect();
    let all = joined(cx, "outputs", all, 1, &[steps, 1, samples, hidden])?;
    cx.output_view(node, 0, if by_sample { all.transpose(&[2, 0, 1, 3]) } else { all });
    let mut last = vec![made.iter().map(|m| Some(m.last.clone())).collect::<Option<Vec<_>>>()];
    last.push(made.iter().map(|m| m.cell.clone()).collect());
    for (i, states) in last.into_iter().enumerate() {
        let (Some(states), true) = (states, node.output.get(i + 1).is_some_and(|o| !o.is_empty())) else {
            continue;
        };
        let states = joined(cx, "last", states, 0, &[1, samples, hidden])?;
        cx.output_view(node, i + 1, if by_sample { states.transpose(&[1, 0, 2]) } else { states });
    }
    Ok(())
}

/// Checks that all samples have the full number of steps.
fn full_length(cx: &mut Importer<'_>, node: &Node, steps: u64) -> NodeResult {
    let full = match cx.int_list(node, 4, "lengths of sequences")? {
        None => true,
        Some(lengths) => lengths.iter().all(|&n| u64::try_from(n) == Ok(steps)),
    };
    if full { Ok(()) } else { Err(NodeError::unsupported("sequences of different lengths")) }
}

/// The activation functions of one direction.
fn functions(node: &Node, kind: CellKind, number: usize) -> NodeResult<Vec<UnaryFn>> {
    let usual = kind.activations();
    let given = node.texts("activations")?;
    let names: Vec<String> = match given.get(number * usual.len()..(number + 1) * usual.len()) {
        Some(names) => names.to_vec(),
        None if given.is_empty() => usual.iter().map(ToString::to_string).collect(),
        None => return Err(NodeError::invalid(format!("{} activations are too few", given.len()))),
    };
    let function = |name: &String| match name.as_str() {
        "Sigmoid" => Ok(UnaryFn::Sigmoid),
        "Tanh" => Ok(UnaryFn::Tanh),
        "Relu" => Ok(UnaryFn::Relu),
        other => Err(NodeError::unsupported(format!("activation `{}`", shown(other)))),
    };
    names.iter().map(function).collect()
}

fn reversed(cx: &mut Importer<'_>, x: &View) -> NodeResult<View> {
    let tensor = cx.plain(x)?;
    let y = cx.emit("reverse", Reverse { axes: [0].into_iter().collect() }, &[tensor])?;
    Ok(cx.seen(y))
}

/// Stacks the directions, each reshaped to `shape`.
fn joined(
    cx: &mut Importer<'_>,
    what: &str,
    parts: Vec<View>,
    axis: usize,
    shape: &[u64],
) -> NodeResult<View> {
    let parts = parts.iter().map(|p| reshaped_view(cx, p, shape)).collect::<NodeResult<Vec<_>>>()?;
    if let [part] = parts.as_slice() {
        return Ok(part.clone());
    }
    let tensors = parts.iter().map(|p| cx.plain(p)).collect::<NodeResult<Vec<_>>>()?;
    let y = cx.emit(what, Concat { axis }, &tensors)?;
    Ok(cx.seen(y))
}

/// One position of a dimension, without that dimension.
fn at(cx: &mut Importer<'_>, what: &str, x: &View, dim: usize, position: u64) -> NodeResult<View> {
    let mut part = take(cx, what, x, dim, position, 1)?;
    part.dims.remove(dim);
    Ok(part)
}

impl Pass<'_> {
    /// Gates of a weight `[directions, gates * h, ..]` in this order, as `[gates, h, ..]`.
    fn gates(&self, cx: &mut Importer<'_>, input: usize, order: &[u64]) -> NodeResult<View> {
        let whole = cx.view(self.node, input)?;
        let mut shape = whole.shape();
        let (number, h) = (self.number, self.hidden);
        let ends = order.iter().max().map_or(0, |g| (g + 1) * h);
        // A matrix per gate, or one number per unit.
        let rank = if input < 3 { 3 } else { 2 };
        if shape.len() != rank || shape[0] <= number || shape[1] < ends {
            return Err(NodeError::invalid(format!("weights of shape {shape:?} do not fit {h} units")));
        }
        let blocks = order.iter().map(|g| g * h..(g + 1) * h).collect();
        let selections =
            vec![AxisSelection::range(0, number..number + 1), AxisSelection { axis: 1, ranges: blocks }];
        let cut = match cx.stored_selection(&whole, selections) {
            Some(cut) => cut,
            None => {
                let part = take(cx, "direction", &whole, 0, number, 1)?;
                let mut gates = Vec::with_capacity(order.len());
                for g in order {
                    let gate = take(cx, "gate", &part, 1, g * h, h)?;
                    gates.push(cx.plain(&gate)?);
                }
                let cut = cx.emit("gates", Concat { axis: 1 }, &gates)?;
                cx.seen(cut)
            }
        };
        shape.splice(..2, [order.len() as u64, h]);
        reshaped_view(cx, &cut, &shape)
    }

    /// An initial state `[b, h]`: given for all directions, or zero.
    fn first(&self, cx: &mut Importer<'_>, input: usize, samples: u64, by_sample: bool) -> NodeResult<View> {
        if !cx.given(self.node, input) {
            let x = cx.view(self.node, 0)?;
            return self.filled(cx, &x, samples, 0.0);
        }
        let uniform = cx.literal(self.node, input)?.and_then(|l| l.uniform());
        if let Some(value) = uniform {
            // A repeated number fits every batch.
            let x = cx.view(self.node, 0)?;
            return self.filled(cx, &x, samples, value);
        }
        let all = cx.view(self.node, input)?;
        let all = if by_sample && all.rank() == 3 { all.transpose(&[1, 0, 2]) } else { all };
        if all.rank() != 3 || all.size(0) <= self.number || all.shape()[1..] != [samples, self.hidden] {
            return Err(NodeError::invalid(format!(
                "an initial state of shape {:?} does not fit",
                all.shape()
            )));
        }
        at(cx, "first", &all, 0, self.number)
    }

    fn filled(&self, cx: &mut Importer<'_>, x: &View, samples: u64, value: f64) -> NodeResult<View> {
        let ty = TensorType::new(cx.dtype(x), [samples, self.hidden]);
        let state = cx.emit("first", Fill { value: Real(value), ty }, &[])?;
        Ok(cx.seen(state))
    }

    /// The input's contribution to these gates at all steps, `[t, b, gates, h]`, with the biases of the input and, if `both`,
    /// of the state.
    fn inputs(&self, cx: &mut Importer<'_>, x: &View, order: &[u64], both: bool) -> NodeResult<View> {
        let w = self.gates(cx, 1, order)?;
        let spec = Product { labels: [b"tbc", b"ghc"], result: b"tbgh", cuts: &[] };
        let mut y = product(cx, "input", x, &w, &spec)?;
        if cx.given(self.node, 3) {
            let count = self.kind.gates();
            for first in [0, count].into_iter().take(if both { 2 } else { 1 }) {
                let order: Vec<u64> = order.iter().map(|g| first + g).collect();
                let bias = self.gates(cx, 3, &order)?;
                y = binary(cx, "add_bias", BinaryFn::Add, &y, &bias)?;
            }
        }
        Ok(y)
    }

    fn run(
        &self,
        cx: &mut Importer<'_>,
        x: &View,
        [steps, samples]: [u64; 2],
        by_sample: bool,
    ) -> NodeResult<PassOutput> {
        let first = self.first(cx, 5, samples, by_sample)?;
        if self.kind == CellKind::Lstm {
            let cell = self.first(cx, 6, samples, by_sample)?;
            let usual = self.functions == [UnaryFn::Sigmoid, UnaryFn::Tanh, UnaryFn::Tanh];
            if usual && !cx.given(self.node, 7) {
                return self.lstm(cx, x, &first, &cell);
            }
            return self.unrolled(cx, x, steps, first, Some(cell));
        }
        self.unrolled(cx, x, steps, first, None)
    }

    /// The graph's recurrent op, whose gates are i, f, g, o.
    fn lstm(&self, cx: &mut Importer<'_>, x: &View, first: &View, cell: &View) -> NodeResult<PassOutput> {
        const ORDER: [u64; 4] = [0, 2, 3, 1];
        let gates = self.inputs(cx, x, &ORDER, true)?;
        let recurrent = self.gates(cx, 2, &ORDER)?.transpose(&[2, 0, 1]);
        let operands = [cx.plain(&gates)?, cx.plain(&recurrent)?, cx.plain(first)?, cx.plain(cell)?];
        let made = cx.add("", Lstm {}, &operands)?;
        let (all, cells) = (cx.seen(made[0]), cx.seen(made[1]));
        let end = x.size(0) - 1;
        Ok(PassOutput {
            last: at(cx, "last_output", &all, 0, end)?,
            cell: Some(at(cx, "last_cell", &cells, 0, end)?),
            all,
        })
    }

    fn unrolled(
        &self,
        cx: &mut Importer<'_>,
        x: &View,
        steps: u64,
        first: View,
        first_cell: Option<View>,
    ) -> NodeResult<PassOutput> {
        if steps > MOST_STEPS {
            return Err(NodeError::unsupported(format!("{steps} steps; at most {MOST_STEPS} are unrolled")));
        }
        let all: Vec<u64> = (0..self.kind.gates()).collect();
        // If the reset gate is applied after the product, so is the product's bias.
        let late = self.kind == CellKind::Gru && self.node.flag("linear_before_reset", false)?;
        let early = self.kind == CellKind::Gru && !late;
        let gates = self.inputs(cx, x, &all, !late)?;
        let recurrent = self.gates(cx, 2, if early { &all[..2] } else { &all })?;
        let candidate = if early { Some(self.gates(cx, 2, &all[2..])?) } else { None };
        let bias = if late && cx.given(self.node, 3) { Some(self.gates(cx, 3, &[3, 4, 5])?) } else { None };
        let peepholes = if self.kind == CellKind::Lstm && cx.given(self.node, 7) {
            Some(self.gates(cx, 7, &[0, 1, 2])?)
        } else {
            None
        };
        let (mut state, mut cell) = (first, first_cell);
        let mut outputs = Vec::with_capacity(steps as usize);
        let name = cx.name.clone();
        for t in 0..steps {
            cx.name = format!("{name}.{t}");
            let input = at(cx, "input", &gates, 0, t)?;
            let mut product = from_state(cx, "state", &state, &recurrent)?;
            if let Some(bias) = &bias {
                product = binary(cx, "state_bias", BinaryFn::Add, &product, bias)?;
            }
            state = match (&cell, self.kind) {
                (Some(c), _) => {
                    let (output, next) = self.lstm_step(cx, &input, &product, c, peepholes.as_ref())?;
                    cell = Some(next);
                    output
                }
                (None, CellKind::Gru) => self.gru_step(cx, &input, &product, &state, candidate.as_ref())?,
                (None, _) => {
                    let sum = binary(cx, "sum", BinaryFn::Add, &input, &product)?;
                    let sum = at(cx, "gate", &sum, 1, 0)?;
                    apply(cx, "", self.functions[0], &sum)?
                }
            };
            outputs.push(state.clone());
        }
        cx.name = name;
        let shape = [&[1], state.shape().as_slice()].concat();
        let outputs = outputs.iter().map(|y| reshaped_view(cx, y, &shape)).collect::<NodeResult<Vec<_>>>()?;
        let tensors = outputs.iter().map(|y| cx.plain(y)).collect::<NodeResult<Vec<_>>>()?;
        let all = cx.emit("", Concat { axis: 0 }, &tensors)?;
        Ok(PassOutput { all: cx.seen(all), last: state, cell })
    }

    /// Update and reset gates, then the candidate.
    fn gru_step(
        &self,
        cx: &mut Importer<'_>,
        input: &View,
        product: &View,
        state: &View,
        candidate: Option<&View>,
    ) -> NodeResult<View> {
        let gate = |cx: &mut Importer<'_>, what: &str, g: u64| {
            let (a, b) = (at(cx, what, input, 1, g)?, at(cx, what, product, 1, g)?);
            let sum = binary(cx, what, BinaryFn::Add, &a, &b)?;
            apply(cx, what, self.functions[0], &sum)
        };
        let (update, reset) = (gate(cx, "update", 0)?, gate(cx, "reset", 1)?);
        let own = match candidate {
            Some(weights) => {
                let kept = binary(cx, "kept", BinaryFn::Mul, &reset, state)?;
                let product = from_state(cx, "candidate_state", &kept, weights)?;
                at(cx, "candidate_state", &product, 1, 0)?
            }
            None => {
                let product = at(cx, "candidate_state", product, 1, 2)?;
                binary(cx, "kept", BinaryFn::Mul, &reset, &product)?
            }
        };
        let sum = at(cx, "candidate", input, 1, 2)?;
        let sum = binary(cx, "candidate_sum", BinaryFn::Add, &sum, &own)?;
        let new = apply(cx, "candidate", self.functions[1], &sum)?;
        // (1 - z) new + z old.
        let change = binary(cx, "change", BinaryFn::Sub, state, &new)?;
        let part = binary(cx, "part", BinaryFn::Mul, &update, &change)?;
        binary(cx, "", BinaryFn::Add, &new, &part)
    }

    /// A step with peepholes: gates that read the cell.
    fn lstm_step(
        &self,
        cx: &mut Importer<'_>,
        input: &View,
        product: &View,
        cell: &View,
        peepholes: Option<&View>,
    ) -> NodeResult<(View, View)> {
        let sum = binary(cx, "gates", BinaryFn::Add, input, product)?;
        let gate = |cx: &mut Importer<'_>, what: &str, g: u64, cell: &View| {
            let mut a = at(cx, what, &sum, 1, g)?;
            if let Some(peepholes) = peepholes {
                let weight = at(cx, "peephole", peepholes, 0, g)?;
                let seen = binary(cx, "peeped", BinaryFn::Mul, cell, &weight)?;
                a = binary(cx, "gate", BinaryFn::Add, &a, &seen)?;
            }
            apply(cx, what, self.functions[0], &a)
        };
        let (enter, forget) = (gate(cx, "enter", 0, cell)?, gate(cx, "forget", 2, cell)?);
        let new = at(cx, "new", &sum, 1, 3)?;
        let new = apply(cx, "new", self.functions[1], &new)?;
        let entered = binary(cx, "entered", BinaryFn::Mul, &enter, &new)?;
        let kept = binary(cx, "kept", BinaryFn::Mul, &forget, cell)?;
        let next = binary(cx, "cell", BinaryFn::Add, &kept, &entered)?;
        let leave = gate(cx, "leave", 1, &next)?;
        let shown = apply(cx, "shown", self.functions[2], &next)?;
        Ok((binary(cx, "", BinaryFn::Mul, &leave, &shown)?, next))
    }
}

/// The state's contribution to the gates, `[b, gates, h]`.
fn from_state(cx: &mut Importer<'_>, what: &str, state: &View, weights: &View) -> NodeResult<View> {
    let spec = Product { labels: [b"bk", b"ghk"], result: b"bgh", cuts: &[] };
    product(cx, what, state, weights, &spec)
}
