//! Ops that only move elements: most become views, some slices and concatenations.

use super::Import;
use crate::{
    error::{NodeError, NodeResult},
    fold::{SliceRange, axis_of, flattened, permutation, reshaped, slice_ranges, split_sizes, squeezed},
    importer::{Base, Importer, NodeValue},
    literal::Literal,
    proto::Node,
    view::{DimAtoms, View},
};
use shardwright_graph::ops::{Broadcast, Concat, Reverse, Slice};
use shardwright_graph::{Shape, TensorId};

pub(super) fn find(op: &str) -> Option<Import> {
    Some(match op {
        "Reshape" => reshape,
        "Flatten" => |cx, node| {
            let x = cx.view(node, 0)?;
            let shape = flattened(&x.shape(), node.int("axis", 1)?)?;
            finish_reshape(cx, node, &x, &shape)
        },
        "Squeeze" | "Unsqueeze" => |cx, node| {
            let x = cx.view(node, 0)?;
            let axes = cx.int_list(node, 1, "axes")?;
            let shape = squeezed(node, cx.opset, &x.shape(), axes.as_deref())?;
            finish_reshape(cx, node, &x, &shape)
        },
        "Transpose" => |cx, node| {
            let x = cx.view(node, 0)?;
            let y = x.transpose(&permutation(node, x.rank())?);
            cx.output_view(node, 0, y);
            Ok(())
        },
        "Shape" => shape,
        "Size" => |cx, node| {
            let elements = cx.view(node, 0)?.elements() as i64;
            let literal = Literal::ints(shardwright_graph::DType::I64, vec![], vec![elements]);
            bind_known(cx, node, literal)
        },
        "Concat" => concat,
        "Split" => split,
        "Slice" => slice,
        "Expand" => expand,
        _ => return None,
    })
}

fn bind_known(cx: &mut Importer<'_>, node: &Node, literal: Literal) -> NodeResult {
    if let Some(output) = node.output.first() {
        cx.bind(output, NodeValue::Known(literal.into()));
    }
    Ok(())
}

fn shape(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let sizes: Vec<i64> = match node.input_name(0).and_then(|n| cx.value(n)) {
        Some(NodeValue::Known(literal)) => literal.shape.iter().map(|&s| s as i64).collect(),
        _ => cx.view(node, 0)?.shape().iter().map(|&s| s as i64).collect(),
    };
    let rank = sizes.len() as i64;
    let bound = |x: i64| (if x < 0 { x + rank } else { x }).clamp(0, rank) as usize;
    let (start, end) = (bound(node.int("start", 0)?), bound(node.int("end", rank)?));
    bind_known(cx, node, Literal::list(sizes[start..end.max(start)].to_vec()))
}

/// The same elements in another shape, as a view if possible.
pub(super) fn reshaped_view(cx: &mut Importer<'_>, x: &View, shape: &[u64]) -> NodeResult<View> {
    Shape::new(shape).check().map_err(NodeError::Invalid)?;
    match x.reshape(shape) {
        Some(view) => Ok(view),
        None => {
            let tensor = cx.plain(x)?;
            let plain = cx.seen(tensor);
            // Elements in storage order can have any shape; if the atoms do not fit, new ones are made.
            match plain.reshape(shape) {
                Some(view) => Ok(view),
                None => {
                    let op = shardwright_graph::ops::Reshape { shape: Shape::new(shape) };
                    let tensor = cx.emit("", op, &[tensor])?;
                    Ok(cx.seen(tensor))
                }
            }
        }
    }
}

fn finish_reshape(cx: &mut Importer<'_>, node: &Node, x: &View, shape: &[u64]) -> NodeResult {
    let y = reshaped_view(cx, x, shape)?;
    cx.output_view(node, 0, y);
    Ok(())
}

fn reshape(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let target = cx.known(node, 1, "shapes")?;
    let target = target.as_ints()?;
    let zero = node.flag("allowzero", false)?;
    if let Some(NodeValue::Parts(axis, parts)) = node.input_name(0).and_then(|n| cx.value(n)).cloned() {
        let first = parts.first().ok_or_else(|| NodeError::invalid("there is nothing to concatenate"))?;
        let mut whole = first.shape();
        let size: u64 = parts.iter().map(|p| p.size(axis)).sum();
        whole[axis] = size;
        let shape = to_target(cx, &whole, target, zero)?;
        if axis + 1 == whole.len() && shape.last() == Some(&size) {
            // Only dimensions before the concatenated one change.
            let mut results = Vec::with_capacity(parts.len());
            for part in &parts {
                let mut shape = shape.clone();
                if let Some(last) = shape.last_mut() {
                    *last = part.size(axis);
                }
                results.push(reshaped_view(cx, part, &shape)?);
            }
            if let Some(output) = node.output.first() {
                cx.bind(output, NodeValue::Parts(shape.len() - 1, results));
            }
            return Ok(());
        }
    }
    let x = cx.view(node, 0)?;
    let shape = to_target(cx, &x.shape(), target, zero)?;
    finish_reshape(cx, node, &x, &shape)
}

/// The target shape of a reshape, adapted to the requested batch.
fn to_target(cx: &Importer<'_>, from: &[u64], target: &[i64], zero: bool) -> NodeResult<Vec<u64>> {
    if let Some(target) = cx.rebatch.open_target(from, target)
        && let Ok(shape) = reshaped(from, &target, zero)
    {
        return Ok(shape);
    }
    let error = match reshaped(from, target, zero) {
        Ok(shape) => return Ok(shape),
        Err(error) => error,
    };
    let scaled = cx.rebatch.target(from.iter().product(), target);
    scaled.map_or(Err(error), |target| reshaped(from, &target, zero))
}

fn expand(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let x = cx.view(node, 0)?;
    let target = cx.known(node, 1, "shapes")?;
    let from = x.shape();
    let target = cx.rebatch.expanded(&from, target.as_ints()?).unwrap_or(target.as_ints()?.to_vec());
    let target = target.as_slice();
    let shape = crate::storage::sizes(target).and_then(|to| crate::fold::broadcast(&[&from, &to]));
    let shape = match shape {
        Ok(shape) => shape,
        Err(error) => {
            let scaled = cx.rebatch.replace_first(target).ok_or(error)?;
            crate::fold::broadcast(&[&from, &crate::storage::sizes(&scaled)?])?
        }
    };
    if shape == from {
        cx.output_view(node, 0, x);
        return Ok(());
    }
    let tensor = cx.plain(&x)?;
    let skip = shape.len() - from.len();
    let op = Broadcast { shape: Shape::new(&shape), dims: (skip..shape.len()).collect() };
    let y = cx.emit("", op, &[tensor])?;
    cx.output(node, 0, y);
    Ok(())
}

/// The only atom of a dimension and its position in storage. A view without such an atom is made plain first.
pub(super) fn single_atom(
    cx: &mut Importer<'_>,
    x: &View,
    dim: usize,
) -> NodeResult<(View, TensorId, usize)> {
    let mut view = x.coalesced();
    if view.dims[dim].len() != 1 {
        let tensor = cx.plain(&view)?;
        if view.dims[dim].is_empty() {
            // A dimension of size one has a position only in the plain tensor.
            let shape = cx.b.ty(tensor).shape.clone();
            let mut seen = View::plain(Base::Tensor(tensor), &shape);
            seen.scale = 1.0;
            return Ok((seen, tensor, dim));
        }
        view = cx.seen(tensor);
    }
    let (shape, positions) = cx.natural(&view);
    let tensor = cx.resolve(&view, &shape)?;
    let atom = view.dims[dim][0] as usize;
    Ok((View { scale: 1.0, ..view }, tensor, positions[atom]))
}

/// A view of `tensor` like `x`, except for the size of one dimension with at most one atom.
pub(super) fn resized(x: &View, tensor: TensorId, dim: usize, size: u64) -> View {
    let mut view = x.of(Base::Tensor(tensor));
    match (x.dims[dim].first().copied(), size) {
        (None, 1) => {}
        (Some(atom), 1) => {
            view.dims[dim].clear();
            view.atoms.remove(atom as usize);
            view.dims.iter_mut().flatten().filter(|a| **a > atom).for_each(|a| *a -= 1);
        }
        (Some(atom), size) => view.atoms[atom as usize] = size,
        (None, size) => {
            // The dimension had no atom. Its new atom has the dimension's position, which is its position in a plain view.
            let atom = x.dims[..dim].iter().map(|d| d.len()).sum::<usize>() as u8;
            view.dims.iter_mut().flatten().filter(|a| **a >= atom).for_each(|a| *a += 1);
            view.atoms.insert(atom as usize, size);
            view.dims[dim] = DimAtoms::from_slice(&[atom]);
        }
    }
    view
}

/// Positions `start..start + size` of one dimension.
pub(super) fn take(
    cx: &mut Importer<'_>,
    what: &str,
    x: &View,
    dim: usize,
    start: u64,
    size: u64,
) -> NodeResult<View> {
    if start == 0 && size == x.size(dim) {
        return Ok(x.clone());
    }
    let (view, tensor, position) = single_atom(cx, x, dim)?;
    let op = Slice::along(position, start, start + size, cx.b.shape(tensor));
    let part = cx.emit(what, op, &[tensor])?;
    Ok(resized(&view, part, dim, size))
}

fn split(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let given = cx.int_list(node, 1, "sizes")?;
    if let Some(NodeValue::Parts(axis, parts)) = node.input_name(0).and_then(|n| cx.value(n)).cloned() {
        let rank = parts.first().map_or(0, View::rank);
        let sizes: Vec<u64> = parts.iter().map(|p| p.size(axis)).collect();
        let same_axis = axis_of(node.int("axis", 0)?, rank)? == axis;
        if same_axis && split_sizes(node, sizes.iter().sum(), given.as_deref())? == sizes {
            for (i, part) in parts.into_iter().enumerate() {
                cx.output_view(node, i, part);
            }
            return Ok(());
        }
    }
    let x = cx.view(node, 0)?;
    let dim = axis_of(node.int("axis", 0)?, x.rank())?;
    let mut start = 0;
    for (i, size) in split_sizes(node, x.size(dim), given.as_deref())?.into_iter().enumerate() {
        let used = node.output.get(i).filter(|o| !o.is_empty());
        if let (Some(output), 0) = (used, size) {
            // The graph has no empty tensors; concatenations leave them out again.
            let mut shape = x.shape();
            shape[dim] = 0;
            let numbers = crate::literal::Numbers::Reals(Vec::new());
            let empty = Literal { dtype: cx.dtype(&x), shape, numbers, assumed: false };
            cx.bind(output, NodeValue::Known(empty.into()));
        } else if used.is_some() {
            let part = take(cx, &i.to_string(), &x, dim, start, size)?;
            cx.output_view(node, i, part);
        }
        start += size;
    }
    Ok(())
}

fn slice(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let mut x = cx.view(node, 0)?;
    let list = |cx: &mut Importer<'_>, i, what| cx.int_list(node, i, what);
    let starts = list(cx, 1, "starts")?.ok_or_else(|| NodeError::invalid("the starts are missing"))?;
    let ends = list(cx, 2, "ends")?.ok_or_else(|| NodeError::invalid("the ends are missing"))?;
    let (axes, steps) = (list(cx, 3, "axes")?, list(cx, 4, "steps")?);
    for (dim, taken) in
        slice_ranges(&x.shape(), &starts, &ends, axes.as_deref(), steps.as_deref())?.iter().enumerate()
    {
        let &SliceRange { start, count, step } = taken;
        if dim == 0 && (start, step) == (0, 1) && cx.rebatch.is_behind(count, x.size(0)) {
            // All samples of the file's batch: all samples.
            continue;
        }
        if count == 0 {
            return Err(NodeError::unsupported("an empty result"));
        }
        if step == 1 {
            x = take(cx, "", &x, dim, start, count)?;
            continue;
        }
        let (view, tensor, position) = single_atom(cx, &x, dim)?;
        let (size, reach) = (step.unsigned_abs(), (count - 1) * step.unsigned_abs());
        // A negative step: take the same elements forwards, then reverse.
        let first = if step < 0 { start - reach } else { start };
        let mut op = Slice::along(position, first, first + reach + 1, cx.b.shape(tensor));
        op.stride[position] = size;
        let mut part = cx.emit("", op, &[tensor])?;
        if step < 0 {
            part = cx.emit("reverse", Reverse { axes: [position].into_iter().collect() }, &[part])?;
        }
        x = resized(&view, part, dim, count);
    }
    cx.output_view(node, 0, x);
    Ok(())
}

fn concat(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let mut parts = Vec::with_capacity(node.input.len());
    for i in 0..node.input.len() {
        // Empty parts are skipped; the graph has no empty tensors.
        let empty = cx.literal(node, i)?.is_some_and(|l| l.len() == 0);
        if !empty {
            parts.push(cx.view(node, i)?);
        }
    }
    let rank = parts.first().ok_or_else(|| NodeError::invalid("there is nothing to concatenate"))?.rank();
    let dim = axis_of(node.int("axis", 0)?, rank)?;
    if dim != 0 {
        same_batch(cx, &mut parts)?;
    }
    if let Some(joined) = concat_lying(cx, &parts, dim)? {
        cx.output_view(node, 0, joined);
        return Ok(());
    }
    let tensors = parts.iter().map(|p| cx.plain(p)).collect::<NodeResult<Vec<_>>>()?;
    let y = cx.emit("", Concat { axis: dim }, &tensors)?;
    cx.output(node, 0, y);
    Ok(())
}

/// Expands parts that still have the file's batch to the requested one.
fn same_batch(cx: &mut Importer<'_>, parts: &mut [View]) -> NodeResult {
    let batch = |view: &View| view.shape().first().copied().unwrap_or(1);
    let Some((old, new)) = cx.rebatch.change else { return Ok(()) };
    if !parts.iter().any(|part| batch(part) == new && !part.is_constant()) {
        return Ok(());
    }
    for part in parts.iter_mut().filter(|part| part.is_constant() && batch(part) == old) {
        if let Some(row) = cx.rebatched(part)? {
            *part = if new == 1 { row } else { spread_batch(cx, &row, new)? };
        }
    }
    Ok(())
}

/// The only row of a tensor, repeated for every sample.
pub(super) fn spread_batch(cx: &mut Importer<'_>, row: &View, batch: u64) -> NodeResult<View> {
    let mut shape = row.shape();
    shape[0] = batch;
    let op = Broadcast { shape: Shape::new(&shape), dims: (0..shape.len()).collect() };
    let tensor = cx.plain(row)?;
    let spread = cx.emit("batch", op, &[tensor])?;
    Ok(cx.seen(spread))
}

/// Concatenates in storage order; `None` if the parts' orders differ.
fn concat_lying(cx: &mut Importer<'_>, parts: &[View], dim: usize) -> NodeResult<Option<View>> {
    let parts: Vec<View> = parts.iter().map(View::coalesced).collect();
    let Some(first) = parts.first() else { return Ok(None) };
    let [atom] = first.dims[dim].as_slice() else { return Ok(None) };
    let alike = |p: &View| {
        p.dims == first.dims
            && p.atoms.iter().zip(&first.atoms).enumerate().all(|(i, (a, b))| i == *atom as usize || a == b)
    };
    if first.in_order() || !parts.iter().all(alike) {
        return Ok(None);
    }
    let mut tensors = Vec::with_capacity(parts.len());
    for part in &parts {
        tensors.push(cx.resolve(part, &Shape::new(&part.atoms))?);
    }
    let joined = cx.emit("", Concat { axis: *atom as usize }, &tensors)?;
    let size = parts.iter().map(|p| p.size(dim)).sum();
    Ok(Some(resized(first, joined, dim, size)))
}
