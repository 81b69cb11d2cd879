//! TopK, ArgMax, ArgMin and Hardmax: the largest or smallest elements along a dimension, and their positions.
//!
//! A sort gives the positions. The elements are then looked up by position, which has a gradient.

use super::{
    Import,
    elementwise::{binary, negated, number},
};
use crate::{
    error::{NodeError, NodeResult},
    fold::axis_of,
    importer::Importer,
    proto::Node,
    view::View,
};
use shardwright_graph::{
    DType, TensorId,
    ops::{BinaryFn, Cast, OneHot, Reverse, TakeAlong, TopK},
};

pub(super) fn find(op: &str) -> Option<Import> {
    Some(match op {
        "TopK" => top_k,
        "ArgMax" => |cx, node| arg(cx, node, true),
        "ArgMin" => |cx, node| arg(cx, node, false),
        "Hardmax" => hardmax,
        _ => return None,
    })
}

/// A view with one dimension moved last, and the permutation that moves it back.
fn with_last(x: &View, axis: usize) -> (View, Vec<usize>) {
    let last = x.rank() - 1;
    let order: Vec<usize> = (0..x.rank()).filter(|&dim| dim != axis).chain([axis]).collect();
    let place = |dim: usize| match dim.cmp(&axis) {
        std::cmp::Ordering::Less => dim,
        std::cmp::Ordering::Equal => last,
        std::cmp::Ordering::Greater => dim - 1,
    };
    (x.transpose(&order), (0..x.rank()).map(place).collect())
}

/// The positions of the `k` largest or smallest elements of each row. Ties keep their order.
fn positions(cx: &mut Importer<'_>, x: &View, k: u64, largest: bool) -> NodeResult<TensorId> {
    let x = if largest { x.clone() } else { negated(cx, "negated", x)? };
    let x = cx.plain(&x)?;
    Ok(cx.add("largest", TopK { k }, &[x])?[1])
}

fn top_k(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let x = cx.view(node, 0)?;
    let axis = axis_of(node.int("axis", -1)?, x.rank())?;
    let k = cx.known_number(node, 1, "numbers of elements")?;
    if !(1.0..=x.size(axis) as f64).contains(&k) {
        return Err(NodeError::invalid(format!(
            "k={k} is not between 1 and the {} elements of dimension {axis}",
            x.size(axis)
        )));
    }
    let (rows, back) = with_last(&x, axis);
    let at = positions(cx, &rows, k as u64, node.flag("largest", true)?)?;
    let tensor = cx.plain(&rows)?;
    let op = TakeAlong { axis: x.rank() - 1, base: 0, extent: x.size(axis) };
    let values = cx.emit("", op, &[tensor, at])?;
    let at = cx.emit("positions", Cast { dtype: DType::I64 }, &[at])?;
    cx.positions.insert(at);
    for (i, tensor) in [values, at].into_iter().enumerate() {
        let seen = cx.seen(tensor).transpose(&back);
        cx.output_view(node, i, seen);
    }
    Ok(())
}

/// The position of the last of equal elements: the first in the reversed row.
fn last_position(cx: &mut Importer<'_>, rows: &View, largest: bool) -> NodeResult<TensorId> {
    let axis = rows.rank() - 1;
    let tensor = cx.plain(rows)?;
    let turned = cx.emit("turned", Reverse { axes: [axis].into_iter().collect() }, &[tensor])?;
    let turned = cx.seen(turned);
    let at = positions(cx, &turned, 1, largest)?;
    let at = cx.seen(at);
    let last = number(cx, "last", cx.dtype(&at), rows.size(axis) as f64 - 1.0)?;
    let at = binary(cx, "from_start", BinaryFn::Sub, &last, &at)?;
    cx.plain(&at)
}

/// 1 at the first of the largest elements, 0 elsewhere.
fn hardmax(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let x = cx.view(node, 0)?;
    let axis = axis_of(node.int("axis", -1)?, x.rank())?;
    let (rows, back) = with_last(&x, axis);
    let at = positions(cx, &rows, 1, true)?;
    let mut at = cx.seen(at);
    at.dims.pop();
    let at = cx.plain(&at)?;
    let op = OneHot { depth: x.size(axis), base: 0, dtype: cx.dtype(&x) };
    let y = cx.emit("", op, &[at])?;
    let seen = cx.seen(y).transpose(&back);
    cx.output_view(node, 0, seen);
    Ok(())
}

fn arg(cx: &mut Importer<'_>, node: &Node, largest: bool) -> NodeResult {
    let x = cx.view(node, 0)?;
    let axis = axis_of(node.int("axis", 0)?, x.rank())?;
    let (rows, back) = with_last(&x, axis);
    let at = if node.flag("select_last_index", false)? {
        last_position(cx, &rows, largest)?
    } else {
        positions(cx, &rows, 1, largest)?
    };
    let at = cx.emit("", Cast { dtype: DType::I64 }, &[at])?;
    cx.positions.insert(at);
    let mut seen = cx.seen(at).transpose(&back);
    if !node.flag("keepdims", true)? {
        // The dimension has size one, and so no atom.
        seen.dims.remove(axis);
    }
    cx.output_view(node, 0, seen);
    Ok(())
}
