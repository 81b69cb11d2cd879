//! Look-ups by index.

use super::{
    Import,
    elementwise::{binary, number},
    movement::{reshaped_view, spread_batch, take},
};
use crate::{
    align::elementwise,
    error::{NodeError, NodeResult},
    fold::{axis_of, index_into},
    importer::{Base, Importer, NodeValue},
    literal::{Literal, count, part_count},
    proto::Node,
    storage::MOST_FOLDED,
    view::View,
};
use shardwright_graph::{
    DType, Init, Real,
    ops::{BinaryFn, Compare, CompareFn, Gather, Select, TakeAlong},
};

pub(super) fn find(op: &str) -> Option<Import> {
    Some(match op {
        "Gather" => gather,
        "GatherElements" => gather_elements,
        "GatherND" => gather_nd,
        _ => return None,
    })
}

/// The standard deviation of initial embeddings, as in most language models.
const EMBEDDING_DEVIATION: f64 = 0.02;

fn gather(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let x = cx.view(node, 0)?;
    let dim = axis_of(node.int("axis", 0)?, x.rank())?;
    if let Some(ids) = cx.literal(node, 1)?.filter(|l| !l.assumed)
        && let Some(part) = consecutive(cx, &x, dim, &ids)?
    {
        cx.output_view(node, 0, part);
        return Ok(());
    }
    let extent = x.size(dim);
    // Ids of words and positions, which index a table of weights, are never negative.
    let table = matches!(x.base, Base::Stored(_));
    let ids = if table { known_indices(cx, node, extent)? } else { indices(cx, node, extent)? };
    cx.starts_as(&x, Init::Normal(Real(EMBEDDING_DEVIATION)));
    let table = cx.plain(&x)?;
    let (shape, _) = cx.natural(&ids);
    // Ids stay in storage order: their dimensions replace the table's, in any order.
    let lying = cx.resolve(&ids, &shape)?;
    let y = cx.emit("", Gather { axis: dim, base: 0, extent }, &[table, lying])?;
    let flat = cx.seen(y);
    let seen = if ids.in_order() {
        let mut sizes = x.shape()[..dim].to_vec();
        sizes.extend(ids.shape());
        sizes.extend(&x.shape()[dim + 1..]);
        flat.reshape(&sizes)
    } else {
        None
    };
    match seen {
        Some(view) => cx.output_view(node, 0, view),
        None => {
            let ids = cx.plain(&ids)?;
            let y = cx.emit("", Gather { axis: dim, base: 0, extent }, &[table, ids])?;
            cx.output(node, 0, y);
        }
    }
    Ok(())
}

/// The second input, which indexes a dimension of this size. Known negative indices are counted from the end.
fn known_indices(cx: &mut Importer<'_>, node: &Node, extent: u64) -> NodeResult<View> {
    let known = cx.literal(node, 1)?;
    // Rows of indices per sample, written for the file's batch.
    let rows = known.as_ref().filter(|l| l.shape.len() > 1 && l.shape[0] > 1);
    let known = match rows.and_then(|l| cx.rebatch.literal(l)) {
        Some(rows) => Some(rows.into()),
        None => known,
    };
    let ids = match known {
        Some(literal) if literal.as_ints()?.iter().any(|&i| i < 0) || cx.rebatch.change.is_some() => {
            let positive = literal.as_ints()?.iter().map(|&i| Ok(index_into(i, extent)? as i64));
            let literal =
                Literal::ints(literal.dtype, literal.shape.clone(), positive.collect::<NodeResult<_>>()?);
            let name = format!("{}.ids", cx.name);
            cx.constant(&name, &literal)?
        }
        _ => cx.view(node, 1)?,
    };
    cx.indexes(&ids, extent);
    Ok(ids)
}

/// The same; computed negative indices are counted from the end as well.
pub(super) fn indices(cx: &mut Importer<'_>, node: &Node, extent: u64) -> NodeResult<View> {
    let ids = known_indices(cx, node, extent)?;
    match cx.literal(node, 1)? {
        Some(_) => Ok(ids),
        None => from_start(cx, &ids, extent),
    }
}

/// Computed indices, with negative ones replaced by their distance from the start.
pub(super) fn from_start(cx: &mut Importer<'_>, ids: &View, extent: u64) -> NodeResult<View> {
    if matches!(ids.base, Base::Tensor(t) if cx.positions.contains(&t)) {
        return Ok(ids.clone());
    }
    let dtype = cx.dtype(ids);
    let (zero, size) = (number(cx, "zero", dtype, 0.0)?, number(cx, "extent", dtype, extent as f64)?);
    let negative = elementwise(cx, "is_negative", Compare { f: CompareFn::Lt }, &[ids.clone(), zero])?;
    let moved = binary(cx, "from_end", BinaryFn::Add, ids, &size)?;
    elementwise(cx, "ids", Select {}, &[negative, moved, ids.clone()])
}

/// The flat positions, over `dims`, of rows whose coordinates are in the last dimension of the second input. The first
/// `batch` coordinates are implied by the position of an index. Returns the positions and, if known, their contents.
pub(super) fn flat_places(
    cx: &mut Importer<'_>,
    node: &Node,
    dims: &[u64],
    batch: usize,
) -> NodeResult<(View, Option<Vec<u64>>)> {
    let strides: Vec<u64> = (0..dims.len()).map(|d| part_count(&dims[d + 1..]) as u64).collect();
    let own = &dims[batch..];
    let shape = match node.input_name(1).and_then(|name| cx.value(name)) {
        Some(NodeValue::Known(literal)) => literal.shape.clone(),
        _ => cx.view(node, 1)?.shape(),
    };
    let fits =
        shape.last() == Some(&(own.len() as u64)) && shape.len() > batch && shape[..batch] == dims[..batch];
    if !fits {
        return Err(NodeError::invalid(format!("indices of shape {shape:?} do not fit dimensions {dims:?}")));
    }
    let rows = shape[..shape.len() - 1].to_vec();
    let count =
        count(&rows).ok_or_else(|| NodeError::invalid("there are more indices than can be counted"))? as u64;
    if count > MOST_FOLDED as u64 && batch > 0 {
        return Err(NodeError::unsupported("more than four million indices"));
    }
    // The contribution of the batch coordinates.
    let per_batch = part_count(&rows[batch..]).max(1) as u64;
    let inner = part_count(own) as u64;
    if let Some(literal) = cx.literal(node, 1)?.filter(|l| !l.assumed) {
        let mut places = Vec::with_capacity(count as usize);
        for (i, coordinates) in literal.as_ints()?.chunks_exact(own.len().max(1)).enumerate() {
            let mut place = i as u64 / per_batch * inner;
            for ((&c, &size), stride) in coordinates.iter().zip(own).zip(&strides[batch..]) {
                place += index_into(c, size)? * stride;
            }
            places.push(place);
        }
        let name = format!("{}.places", cx.name);
        let ints = places.iter().map(|&p| p as i64).collect();
        let view = cx.constant(&name, &Literal::ints(DType::I64, rows, ints))?;
        return Ok((view, Some(places)));
    }
    let ids = cx.view(node, 1)?;
    let smallest = own.iter().copied().min();
    cx.indexes(&ids, smallest.ok_or_else(|| NodeError::invalid("the indices have no coordinates"))?);
    let dtype = cx.dtype(&ids);
    let mut sum: Option<View> = None;
    for (d, (&size, &stride)) in own.iter().zip(&strides[batch..]).enumerate() {
        let mut part = take(cx, &d.to_string(), &ids, rows.len(), d as u64, 1)?;
        part.dims.pop();
        let mut part = from_start(cx, &part, size)?;
        if stride != 1 {
            let stride = number(cx, "stride", dtype, stride as f64)?;
            part = binary(cx, "place", BinaryFn::Mul, &part, &stride)?;
        }
        sum = Some(match sum {
            None => part,
            Some(before) => binary(cx, "places", BinaryFn::Add, &before, &part)?,
        });
    }
    let mut places = sum.ok_or_else(|| NodeError::invalid("the indices have no coordinates"))?;
    if batch > 0 {
        let mut shape = rows.clone();
        shape[batch..].fill(1);
        let starts = (0..count / per_batch).map(|b| (b * inner) as i64).collect();
        let name = format!("{}.samples", cx.name);
        let starts = cx.constant(&name, &Literal::ints(dtype, shape, starts))?;
        places = binary(cx, "all_places", BinaryFn::Add, &places, &starts)?;
    }
    Ok((places, None))
}

/// Looks up rows by several coordinates each.
fn gather_nd(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let x = cx.view(node, 0)?;
    let shape = x.shape();
    let batch = node.size("batch_dims", 0)? as usize;
    let coordinates = match node.input_name(1).and_then(|name| cx.value(name)) {
        Some(NodeValue::Known(literal)) => literal.shape.last().copied(),
        _ => cx.view(node, 1)?.shape().last().copied(),
    };
    let end = coordinates.and_then(|k| batch.checked_add(k as usize)).filter(|&end| end <= shape.len());
    let end = end.ok_or_else(|| {
        NodeError::invalid(format!("there are more coordinates than shape {shape:?} has dimensions"))
    })?;
    let (places, _) = flat_places(cx, node, &shape[..end], batch)?;
    let rows: u64 = shape[..end].iter().product();
    let table = reshaped_view(cx, &x, &[&[rows], &shape[end..]].concat())?;
    let (table, ids) = (cx.plain(&table)?, cx.plain(&places)?);
    let y = cx.emit("", Gather { axis: 0, base: 0, extent: rows }, &[table, ids])?;
    cx.output(node, 0, y);
    Ok(())
}

/// Looks up one element per index, in the index's own row.
fn gather_elements(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let mut x = cx.view(node, 0)?;
    let axis = axis_of(node.int("axis", 0)?, x.rank())?;
    let extent = x.size(axis);
    let ids = indices(cx, node, extent)?;
    if ids.rank() != x.rank() {
        return Err(NodeError::invalid(format!(
            "indices of rank {} do not fit a tensor of rank {}",
            ids.rank(),
            x.rank()
        )));
    }
    if cx.rebatch.is_behind(x.size(0), ids.size(0))
        && let Some(row) = cx.rebatched(&x)?
    {
        x = spread_batch(cx, &row, ids.size(0))?;
    }
    // Other dimensions may have fewer indices than rows: the first rows are used.
    for dim in (0..x.rank()).filter(|&dim| dim != axis) {
        if ids.size(dim) > x.size(dim) {
            return Err(NodeError::invalid(format!("there are more indices than rows in dimension {dim}")));
        }
        if ids.size(dim) < x.size(dim) {
            x = take(cx, "rows", &x, dim, 0, ids.size(dim))?;
        }
    }
    let (x, ids) = (cx.plain(&x)?, cx.plain(&ids)?);
    let y = cx.emit("", TakeAlong { axis, base: 0, extent }, &[x, ids])?;
    cx.output(node, 0, y);
    Ok(())
}

/// A single index or consecutive indices: a slice.
fn consecutive(cx: &mut Importer<'_>, x: &View, dim: usize, ids: &Literal) -> NodeResult<Option<View>> {
    let extent = x.size(dim);
    if ids.shape.len() > 1 || ids.len() == 0 {
        return Ok(None);
    }
    let ids_list = ids.as_ints()?.iter().map(|&i| index_into(i, extent)).collect::<NodeResult<Vec<_>>>()?;
    if ids_list.windows(2).any(|w| w[1] != w[0] + 1) {
        return Ok(None);
    }
    let mut part = take(cx, "", x, dim, ids_list[0], ids_list.len() as u64)?;
    if ids.shape.is_empty() {
        // The dimension is dropped, and with it its last atom.
        if !part.dims[dim].is_empty() {
            return Err(NodeError::invalid("an index selects more than one position"));
        }
        part.dims.remove(dim);
    }
    debug_assert!(matches!(part.base, Base::Tensor(_) | Base::Stored(_)));
    Ok(Some(part))
}
