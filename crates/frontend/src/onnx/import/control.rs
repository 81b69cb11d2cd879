//! Subgraphs: `If` with a known condition, `Loop` with a known number of turns.

use super::Import;
use crate::onnx::{
    error::{Tried, Trouble},
    importer::{Importer, Value},
    literal::Literal,
    proto::{Graph, Node},
};
use shardwright_graph::DType;

pub(super) fn find(op: &str) -> Option<Import> {
    Some(match op {
        "If" => branch,
        "Loop" => unrolled,
        _ => return None,
    })
}

/// The most turns of a loop that are unrolled.
const MOST_TURNS: i64 = 256;

/// Imports a subgraph; gives the values of its outputs.
fn inline(cx: &mut Importer<'_>, graph: &Graph) -> Tried<Vec<Value>> {
    let nested = |error| Trouble::Nested(Box::new(error));
    cx.add_stored(graph).map_err(nested)?;
    cx.import_nodes(&graph.node).map_err(nested)?;
    let value =
        |name: &str| cx.value(name).cloned().ok_or_else(|| Trouble::wrong("an output that no node makes"));
    graph.output.iter().map(|output| value(&output.name)).collect()
}

fn branch(cx: &mut Importer<'_>, node: &Node) -> Tried {
    let condition = cx.literal(node, 0)?.filter(|l| !l.assumed).and_then(|l| l.scalar());
    let Some(condition) = condition else {
        return Err(Trouble::unsupported("a condition that depends on the data"));
    };
    let taken = node.graph(if condition != 0.0 { "then_branch" } else { "else_branch" })?;
    let values = inline(cx, taken)?;
    for (name, value) in node.output.iter().zip(values) {
        cx.bind(name, value);
    }
    Ok(())
}

fn unrolled(cx: &mut Importer<'_>, node: &Node) -> Tried {
    let body = node.graph("body")?;
    let turns = cx.literal(node, 0)?.and_then(|l| l.scalar());
    let turns =
        turns.ok_or_else(|| Trouble::unsupported("a number of turns that depends on the data"))? as i64;
    if turns > MOST_TURNS {
        return Err(Trouble::unsupported(format!("{turns} turns; at most {MOST_TURNS} are unrolled")));
    }
    let given = |cx: &Importer<'_>, name: &str| {
        cx.value(name).cloned().ok_or_else(|| Trouble::wrong("a value is missing"))
    };
    let mut carried = Vec::new();
    for name in node.input.iter().skip(2) {
        carried.push(given(cx, name)?);
    }
    let (count, mut going) = (carried.len(), true);
    if let Some(start) = cx.literal(node, 1)? {
        going = start.scalar() != Some(0.0);
    }
    if body.output.len() != count + 1 {
        return Err(Trouble::unsupported("results that are collected turn by turn"));
    }
    for turn in 0..turns {
        if !going {
            break;
        }
        let mut names = body.input.iter().map(|i| i.name.clone());
        let number = Literal::ints(DType::I64, vec![], vec![turn]);
        cx.bind(&names.next().unwrap_or_default(), Value::Known(number.into()));
        let still = Literal::ints(DType::Bool, vec![], vec![1]);
        cx.bind(&names.next().unwrap_or_default(), Value::Known(still.into()));
        for (name, value) in names.zip(&carried) {
            cx.bind(&name, value.clone());
        }
        let mut results = inline(cx, body)?.into_iter();
        going = match results.next() {
            Some(Value::Known(literal)) => literal.scalar() != Some(0.0),
            _ => return Err(Trouble::unsupported("a condition that depends on the data")),
        };
        carried = results.collect();
    }
    for (name, value) in node.output.iter().zip(carried) {
        cx.bind(name, value);
    }
    Ok(())
}
