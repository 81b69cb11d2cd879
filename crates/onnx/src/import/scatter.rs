//! Scatter: writes elements to the positions that indices name.
//!
//! Updates are added into a tensor of zeros, which has a gradient and may be split. Positions without an update keep the
//! data. ONNX leaves the result undefined if two updates replace the same position.

use super::{
    Import,
    elementwise::{binary, number},
    gather::{flat_places, indices},
    movement::reshaped_view,
};
use crate::{
    align::elementwise,
    error::{NodeError, NodeResult},
    fold::axis_of,
    importer::Importer,
    literal::Literal,
    proto::Node,
    storage::MOST_FOLDED,
    view::View,
};
use shardwright_graph::{
    DType, Dims, Op, Real, TensorId, TensorType,
    ops::{BinaryFn, Cast, Compare, CompareFn, Fill, Pad, PutAlong, ScatterAdd, Select},
};

pub(super) fn find(op: &str) -> Option<Import> {
    Some(match op {
        "ScatterElements" => scatter_elements,
        "ScatterND" => scatter_nd,
        _ => return None,
    })
}

/// How an update combines with the element at its position.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ScatterMode {
    Replace,
    Add,
}

impl ScatterMode {
    fn of(node: &Node) -> NodeResult<Self> {
        match node.text("reduction", "none")?.as_str() {
            "none" => Ok(Self::Replace),
            "add" => Ok(Self::Add),
            other => Err(NodeError::unsupported(format!("reduction `{other}`"))),
        }
    }
}

/// Adds updates into zeros at the positions `ids`. Whole numbers are added as floats.
fn put(
    cx: &mut Importer<'_>,
    what: &str,
    op: impl Into<Op>,
    ids: TensorId,
    values: &View,
) -> NodeResult<View> {
    let dtype = cx.dtype(values);
    let mut values = cx.plain(values)?;
    if !dtype.is_float() {
        values = cx.emit("as_float", Cast { dtype: DType::F64 }, &[values])?;
    }
    let mut sums = cx.emit(what, op, &[ids, values])?;
    if !dtype.is_float() {
        sums = cx.emit("as_whole", Cast { dtype }, &[sums])?;
    }
    Ok(cx.seen(sums))
}

/// The number of updates per position; positions with updates are those above zero.
fn touched(cx: &mut Importer<'_>, op: impl Into<Op>, ids: TensorId) -> NodeResult<View> {
    let ty = TensorType::new(DType::F32, cx.b.ty(ids).shape.clone());
    let ones = cx.emit("ones", Fill { value: Real(1.0), ty }, &[])?;
    let count = cx.emit("count", op, &[ids, ones])?;
    Ok(cx.seen(count))
}

fn is_positive(cx: &mut Importer<'_>, count: &View) -> NodeResult<View> {
    let zero = number(cx, "zero", DType::F32, 0.0)?;
    elementwise(cx, "is_put", Compare { f: CompareFn::Gt }, &[count.clone(), zero])
}

fn joined(cx: &mut Importer<'_>, data: &View, sums: View, is_put: Option<View>) -> NodeResult<View> {
    match is_put {
        None => binary(cx, "", BinaryFn::Add, data, &sums),
        Some(is_put) => elementwise(cx, "", Select {}, &[is_put, sums, data.clone()]),
    }
}

/// Writes rows by several coordinates each.
fn scatter_nd(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let mode = ScatterMode::of(node)?;
    let (x, updates) = (cx.view(node, 0)?, cx.view(node, 2)?);
    let shape = x.shape();
    let ids = match cx.literal(node, 1)? {
        Some(literal) => literal.shape.clone(),
        None => cx.view(node, 1)?.shape(),
    };
    let coordinates = ids.last().map(|&k| k as usize).filter(|&k| k <= shape.len());
    let k = coordinates.ok_or_else(|| {
        NodeError::invalid(format!("indices of shape {ids:?} do not fit data of shape {shape:?}"))
    })?;
    let expected = [&ids[..ids.len() - 1], &shape[k..]].concat();
    if updates.shape() != expected {
        return Err(NodeError::invalid(format!(
            "updates have shape {:?}, expected {expected:?}",
            updates.shape()
        )));
    }
    let (places, known) = flat_places(cx, node, &shape[..k], 0)?;
    let rows: u64 = shape[..k].iter().product();
    let table = reshaped_view(cx, &x, &[&[rows], &shape[k..]].concat())?;
    let ids = cx.plain(&places)?;
    let op = ScatterAdd { axis: 0, base: 0, extent: rows, rows };
    let sums = put(cx, "put", op.clone(), ids, &updates)?;
    let mut column = vec![1; table.rank()];
    column[0] = rows;
    let is_put = match (mode, known) {
        (ScatterMode::Add, _) => None,
        (ScatterMode::Replace, Some(places)) if rows <= MOST_FOLDED as u64 => {
            let mut mask = vec![0; rows as usize];
            for &place in &places {
                if std::mem::replace(&mut mask[place as usize], 1) == 1 {
                    return Err(NodeError::unsupported(
                        "an index that occurs twice: its value is not defined",
                    ));
                }
            }
            let name = format!("{}.is_put", cx.name);
            Some(cx.constant(&name, &Literal::ints(DType::Bool, column, mask))?)
        }
        (ScatterMode::Replace, _) => {
            let count = touched(cx, op, ids)?;
            let is_put = is_positive(cx, &count)?;
            Some(reshaped_view(cx, &is_put, &column)?)
        }
    };
    let y = joined(cx, &table, sums, is_put)?;
    let y = reshaped_view(cx, &y, &shape)?;
    cx.output_view(node, 0, y);
    Ok(())
}

/// Writes one element per index, in the index's own row.
fn scatter_elements(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let mode = ScatterMode::of(node)?;
    let (x, updates) = (cx.view(node, 0)?, cx.view(node, 2)?);
    let axis = axis_of(node.int("axis", 0)?, x.rank())?;
    let extent = x.size(axis);
    let ids = indices(cx, node, extent)?;
    let fits = ids.shape() == updates.shape()
        && ids.rank() == x.rank()
        && (0..x.rank()).all(|d| d == axis || ids.size(d) <= x.size(d));
    if !fits {
        return Err(NodeError::invalid(format!(
            "indices of shape {:?} and updates of shape {:?} do not fit data of shape {:?}",
            ids.shape(),
            updates.shape(),
            x.shape()
        )));
    }
    let ids = cx.plain(&ids)?;
    let op = PutAlong { axis, base: 0, extent, rows: extent };
    let mut sums = put(cx, "put", op.clone(), ids, &updates)?;
    let mut is_put = match mode {
        ScatterMode::Add => None,
        ScatterMode::Replace => Some(touched(cx, op, ids)?),
    };
    // Other dimensions may have fewer indices than rows: the rest get no update.
    let rest: Dims = (0..x.rank()).map(|d| x.size(d) - sums.size(d)).collect();
    if rest.iter().any(|&n| n > 0) {
        let none = Dims::from_elem(0, x.rank());
        for view in std::iter::once(&mut sums).chain(is_put.as_mut()) {
            let pad = Pad { low: none.clone(), high: rest.clone(), interior: none.clone(), value: Real(0.0) };
            let tensor = cx.plain(view)?;
            let padded = cx.emit("rest", pad, &[tensor])?;
            *view = cx.seen(padded);
        }
    }
    let is_put = is_put.map(|count| is_positive(cx, &count)).transpose()?;
    let y = joined(cx, &x, sums, is_put)?;
    cx.output_view(node, 0, y);
    Ok(())
}
