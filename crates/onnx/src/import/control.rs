//! Subgraphs: `If` with a known condition, `Loop` and `Scan` with a known number of iterations.

use super::{
    Import,
    movement::{reshaped_view, take},
};
use crate::{
    error::{NodeError, NodeResult},
    fold::axis_of,
    importer::{Importer, NodeValue},
    literal::{Literal, Numbers},
    pending::AxisSelection,
    proto::{Graph, Node},
    view::View,
};
use shardwright_graph::{DType, ops::Concat};

pub(super) fn find(op: &str) -> Option<Import> {
    Some(match op {
        "If" => branch,
        "Loop" => unrolled,
        "Scan" => scan,
        _ => return None,
    })
}

/// The most iterations of a loop that are unrolled.
const MOST_TURNS: i64 = 256;

/// Imports a subgraph and returns the values of its outputs.
fn inline(cx: &mut Importer<'_>, graph: &Graph) -> NodeResult<Vec<NodeValue>> {
    let nested = |error| NodeError::Nested(Box::new(error));
    cx.add_stored(graph).map_err(nested)?;
    cx.import_nodes(&graph.node).map_err(nested)?;
    let value = |name: &str| {
        cx.value(name)
            .cloned()
            .ok_or_else(|| NodeError::invalid("no node computes an output of the subgraph"))
    };
    graph.output.iter().map(|output| value(&output.name)).collect()
}

fn branch(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let condition = cx.literal(node, 0)?.filter(|l| !l.assumed).and_then(|l| l.scalar());
    let Some(condition) = condition else {
        return Err(NodeError::unsupported("a condition that depends on the data"));
    };
    let taken = node.graph(if condition != 0.0 { "then_branch" } else { "else_branch" })?;
    let values = inline(cx, taken)?;
    for (name, value) in node.output.iter().zip(values) {
        cx.bind(name, value);
    }
    Ok(())
}

fn unrolled(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let body = node.graph("body")?;
    let turns = cx.literal(node, 0)?.and_then(|l| l.scalar());
    let turns = turns
        .ok_or_else(|| NodeError::unsupported("a number of iterations that depends on the data"))?
        as i64;
    if turns > MOST_TURNS {
        return Err(NodeError::unsupported(format!("{turns} iterations; at most {MOST_TURNS} are unrolled")));
    }
    let given = |cx: &Importer<'_>, name: &str| {
        cx.value(name).cloned().ok_or_else(|| NodeError::invalid("an initial value is missing"))
    };
    let mut carried = Vec::new();
    for name in node.input.iter().skip(2) {
        carried.push(given(cx, name)?);
    }
    let (count, mut going) = (carried.len(), true);
    if let Some(start) = cx.literal(node, 1)? {
        going = start.scalar() != Some(0.0);
    }
    let mut collected = vec![Vec::new(); body.output.len().saturating_sub(count + 1)];
    for turn in 0..turns {
        if !going {
            break;
        }
        cx.budget.node()?;
        let [iteration, condition, states @ ..] = body.input.as_slice() else {
            return Err(NodeError::invalid("the loop's body lacks the inputs `iteration` and `condition`"));
        };
        let number = Literal::ints(DType::I64, vec![], vec![turn]);
        cx.bind(&iteration.name, NodeValue::Known(number.into()));
        let still = Literal::ints(DType::Bool, vec![], vec![1]);
        cx.bind(&condition.name, NodeValue::Known(still.into()));
        for (state, value) in states.iter().zip(&carried) {
            cx.bind(&state.name, value.clone());
        }
        let mut results = inline(cx, body)?.into_iter();
        going = match results.next() {
            Some(NodeValue::Known(literal)) => literal.scalar() != Some(0.0),
            _ => return Err(NodeError::unsupported("a condition that depends on the data")),
        };
        carried = results.by_ref().take(count).collect();
        collected.iter_mut().zip(results).for_each(|(all, value)| all.push(value));
    }
    for values in collected {
        carried.push(stacked(cx, values, 0)?);
    }
    for (name, value) in node.output.iter().zip(carried) {
        cx.bind(name, value);
    }
    Ok(())
}

/// A subgraph's value as a view. `turn` makes the names of constants unique.
fn as_view(cx: &mut Importer<'_>, value: &NodeValue, turn: usize) -> NodeResult<View> {
    match value {
        NodeValue::View(view) => Ok(view.clone()),
        NodeValue::Known(literal) => {
            let name = format!("{}.{turn}", cx.name);
            cx.constant(&name, literal)
        }
        NodeValue::Parts(axis, parts) => cx.join(*axis, parts),
        NodeValue::Broken => Err(NodeError::invalid("a value depends on an unsupported node")),
    }
}

/// The results of all iterations, stacked along a new dimension.
fn stacked(cx: &mut Importer<'_>, values: Vec<NodeValue>, axis: i64) -> NodeResult<NodeValue> {
    if values.iter().any(|value| matches!(value, NodeValue::Broken)) {
        return Ok(NodeValue::Broken);
    }
    if axis == 0
        && let Some(literal) = stacked_literals(&values)
    {
        cx.budget.elements(literal.len())?;
        return Ok(NodeValue::Known(literal.into()));
    }
    let mut tensors = Vec::with_capacity(values.len());
    let mut place = 0;
    for (turn, value) in values.iter().enumerate() {
        let view = as_view(cx, value, turn)?;
        let mut shape = view.shape();
        place = axis_of(axis, shape.len() + 1)?;
        shape.insert(place, 1);
        let view = reshaped_view(cx, &view, &shape)?;
        tensors.push(cx.plain(&view)?);
    }
    if tensors.is_empty() {
        return Err(NodeError::unsupported("stacked results of zero iterations"));
    }
    let all = cx.emit("", Concat { axis: place }, &tensors)?;
    Ok(NodeValue::View(cx.seen(all)))
}

/// Stacks the results if all are known.
fn stacked_literals(values: &[NodeValue]) -> Option<Literal> {
    let mut literals = Vec::with_capacity(values.len());
    for value in values {
        let NodeValue::Known(literal) = value else { return None };
        literals.push(literal.as_ref());
    }
    let first = *literals.first()?;
    if literals.iter().any(|l| l.shape != first.shape || l.dtype != first.dtype) {
        return None;
    }
    let numbers = match first.numbers {
        Numbers::Reals(_) => Numbers::Reals(literals.iter().flat_map(|l| l.to_reals()).collect()),
        Numbers::Ints(_) => {
            let ints: Option<Vec<&[i64]>> = literals.iter().map(|l| l.as_ints().ok()).collect();
            Numbers::Ints(ints?.concat())
        }
    };
    let shape = [&[literals.len() as u64], first.shape.as_slice()].concat();
    let assumed = literals.iter().any(|l| l.assumed);
    Some(Literal { dtype: first.dtype, shape, numbers, assumed })
}

/// The slice of a sequence for one iteration, without the sequence dimension.
fn at_turn(cx: &mut Importer<'_>, sequence: &NodeValue, axis: usize, turn: u64) -> NodeResult<NodeValue> {
    if let NodeValue::Known(literal) = sequence {
        let mut part = literal.select(&AxisSelection::range(axis, turn..turn + 1));
        part.shape.remove(axis);
        cx.budget.elements(part.len())?;
        return Ok(NodeValue::Known(part.into()));
    }
    let view = as_view(cx, sequence, 0)?;
    let mut part = take(cx, &turn.to_string(), &view, axis, turn, 1)?;
    part.dims.remove(axis);
    Ok(NodeValue::View(part))
}

/// A loop over the positions of sequences.
fn scan(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let body = node.graph("body")?;
    let sequences = node.size("num_scan_inputs", 0)? as usize;
    let states = node.input.len().checked_sub(sequences).filter(|_| sequences > 0);
    let states = states.ok_or_else(|| {
        let inputs = node.input.len();
        NodeError::invalid(format!("`num_scan_inputs` must be between 1 and {inputs}, got {sequences}"))
    })?;
    let results = body.output.len().saturating_sub(states);
    let per = |name: &str, count: usize| -> NodeResult<Vec<i64>> {
        match node.ints(name)? {
            None => Ok(vec![0; count]),
            Some(given) if given.len() == count => Ok(given.to_vec()),
            Some(given) => {
                Err(NodeError::invalid(format!("`{name}` {given:?} does not match the number of sequences")))
            }
        }
    };
    let (axes, backwards) = (per("scan_input_axes", sequences)?, per("scan_input_directions", sequences)?);
    let result_axes = per("scan_output_axes", results)?;
    let turned = per("scan_output_directions", results)?;
    let mut values = Vec::with_capacity(node.input.len());
    for name in &node.input {
        let value = cx.value(name).cloned();
        values.push(value.ok_or_else(|| NodeError::unsupported("the form of opset 8"))?);
    }
    let given = values.split_off(states);
    let mut places = Vec::with_capacity(sequences);
    let mut turns = None;
    for (sequence, &axis) in given.iter().zip(&axes) {
        let shape = match sequence {
            NodeValue::Known(literal) => literal.shape.clone(),
            other => as_view(cx, other, 0)?.shape(),
        };
        let axis = axis_of(axis, shape.len())?;
        if *turns.get_or_insert(shape[axis]) != shape[axis] {
            return Err(NodeError::invalid("the sequences differ in length"));
        }
        places.push(axis);
    }
    let turns = turns.ok_or_else(|| NodeError::invalid("there are no sequences"))?;
    if turns > MOST_TURNS as u64 {
        return Err(NodeError::unsupported(format!("{turns} iterations; at most {MOST_TURNS} are unrolled")));
    }
    let mut collected = vec![Vec::new(); results];
    for turn in 0..turns {
        cx.budget.node()?;
        let names = body.input.iter().map(|i| i.name.clone());
        let mut seen = values.clone();
        for ((sequence, &axis), &backwards) in given.iter().zip(&places).zip(&backwards) {
            let position = if backwards == 0 { turn } else { turns - 1 - turn };
            seen.push(at_turn(cx, sequence, axis, position)?);
        }
        for (name, value) in names.zip(seen) {
            cx.bind(&name, value);
        }
        let mut made = inline(cx, body)?.into_iter();
        values = made.by_ref().take(states).collect();
        collected.iter_mut().zip(made).for_each(|(all, value)| all.push(value));
    }
    for ((mut all, &axis), &turned) in collected.into_iter().zip(&result_axes).zip(&turned) {
        if turned != 0 {
            all.reverse();
        }
        values.push(stacked(cx, all, axis)?);
    }
    for (name, value) in node.output.iter().zip(values) {
        cx.bind(name, value);
    }
    Ok(())
}
