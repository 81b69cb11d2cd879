//! Shape inference of ops that change shapes, for folding and importing.

use crate::{
    error::{NodeError, NodeResult},
    proto::Node,
};

/// An axis; negative ones count from the end.
pub(crate) fn axis_of(axis: i64, rank: usize) -> NodeResult<usize> {
    let from_end = if axis < 0 { axis + rank as i64 } else { axis };
    usize::try_from(from_end)
        .ok()
        .filter(|&a| a < rank)
        .ok_or_else(|| NodeError::invalid(format!("axis {axis} is out of range for {rank} dimensions")))
}

/// Several axes, sorted; repeated ones are refused.
pub(crate) fn axes_of(axes: &[i64], rank: usize) -> NodeResult<Vec<usize>> {
    let mut found = axes.iter().map(|&a| axis_of(a, rank)).collect::<NodeResult<Vec<_>>>()?;
    found.sort_unstable();
    if found.windows(2).any(|w| w[0] == w[1]) {
        return Err(NodeError::invalid(format!("axes {axes:?} contain a repetition")));
    }
    Ok(found)
}

/// The common shape that shapes broadcast to.
pub(crate) fn broadcast(shapes: &[&[u64]]) -> NodeResult<Vec<u64>> {
    let rank = shapes.iter().map(|s| s.len()).max().unwrap_or(0);
    let mut result = vec![1; rank];
    for shape in shapes {
        for (size, &have) in result[rank - shape.len()..].iter_mut().zip(*shape) {
            *size = match (*size, have) {
                (a, b) if a == b || b == 1 => a,
                (1, b) => b,
                _ => return Err(NodeError::invalid(format!("shapes {shapes:?} do not broadcast"))),
            };
        }
    }
    Ok(result)
}

/// The target shape of a Reshape: 0 keeps a size, -1 is inferred.
pub(crate) fn reshaped(from: &[u64], to: &[i64], zero_is_zero: bool) -> NodeResult<Vec<u64>> {
    let elements = from.iter().try_fold(1u64, |n, &s| n.checked_mul(s));
    let bad = || NodeError::invalid(format!("shape {from:?} cannot be reshaped to {to:?}"));
    let mut shape = Vec::with_capacity(to.len());
    let mut open = None;
    for (i, &size) in to.iter().enumerate() {
        shape.push(match size {
            -1 if open.is_none() => {
                open = Some(i);
                1
            }
            0 if !zero_is_zero => *from.get(i).ok_or_else(bad)?,
            size => u64::try_from(size).map_err(|_| bad())?,
        });
    }
    let known = shape.iter().try_fold(1u64, |n, &s| n.checked_mul(s));
    let (Some(elements), Some(known)) = (elements, known) else { return Err(bad()) };
    if let Some(i) = open {
        if known == 0 || elements % known != 0 {
            return Err(bad());
        }
        shape[i] = elements / known;
    } else if known != elements {
        return Err(bad());
    }
    Ok(shape)
}

/// The two dimensions of a Flatten.
pub(crate) fn flattened(shape: &[u64], axis: i64) -> NodeResult<Vec<u64>> {
    let axis = if axis == shape.len() as i64 { shape.len() } else { axis_of(axis, shape.len())? };
    let product = |sizes: &[u64]| sizes.iter().try_fold(1u64, |n, &s| n.checked_mul(s));
    let sizes = [product(&shape[..axis]), product(&shape[axis..])];
    sizes
        .into_iter()
        .collect::<Option<_>>()
        .ok_or_else(|| NodeError::invalid("the shape has more elements than can be counted"))
}

/// The shape after Squeeze or Unsqueeze.
pub(crate) fn squeezed(node: &Node, opset: i64, shape: &[u64], axes: Option<&[i64]>) -> NodeResult<Vec<u64>> {
    let attribute = if opset < 13 { node.ints("axes")? } else { None };
    let axes = axes.or(attribute);
    if node.op_type == "Unsqueeze" {
        let axes = axes.ok_or_else(|| NodeError::invalid("the axes are missing"))?;
        let rank = shape.len() + axes.len();
        let axes = axes_of(axes, rank)?;
        let mut old = shape.iter().copied();
        let size = |d: usize| if axes.contains(&d) { Some(1) } else { old.next() };
        return (0..rank)
            .map(size)
            .collect::<Option<_>>()
            .ok_or_else(|| NodeError::invalid("the axes do not fit the shape"));
    }
    let gone = match axes {
        Some(axes) => axes_of(axes, shape.len())?,
        None => (0..shape.len()).filter(|&d| shape[d] == 1).collect(),
    };
    if let Some(&d) = gone.iter().find(|&&d| shape[d] != 1) {
        return Err(NodeError::invalid(format!("dimension {d} of shape {shape:?} does not have size 1")));
    }
    Ok(shape.iter().enumerate().filter(|(d, _)| !gone.contains(d)).map(|(_, &s)| s).collect())
}

/// The permutation of a Transpose.
pub(crate) fn permutation(node: &Node, rank: usize) -> NodeResult<Vec<usize>> {
    let Some(perm) = node.ints("perm")? else { return Ok((0..rank).rev().collect()) };
    let perm = perm.iter().map(|&p| axis_of(p, rank)).collect::<NodeResult<Vec<_>>>()?;
    let mut seen = perm.clone();
    seen.sort_unstable();
    if perm.len() != rank || seen.windows(2).any(|w| w[0] == w[1]) {
        return Err(NodeError::invalid(format!("{perm:?} is not a permutation of {rank} dimensions")));
    }
    Ok(perm)
}

/// An index into a dimension; negative ones count from the end.
pub(crate) fn index_into(index: i64, size: u64) -> NodeResult<u64> {
    let from_end = if index < 0 { index.saturating_add_unsigned(size) } else { index };
    u64::try_from(from_end).ok().filter(|&i| i < size).ok_or_else(|| {
        NodeError::invalid(format!("index {index} is out of range for a dimension of size {size}"))
    })
}

/// The positions that a Slice keeps along one dimension: the first, their number, and the step between them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SliceRange {
    pub start: u64,
    pub count: u64,
    pub step: i64,
}

/// The positions that a Slice keeps along each dimension.
pub(crate) fn slice_ranges(
    shape: &[u64],
    starts: &[i64],
    ends: &[i64],
    axes: Option<&[i64]>,
    steps: Option<&[i64]>,
) -> NodeResult<Vec<SliceRange>> {
    let all: Vec<i64> = (0..starts.len() as i64).collect();
    let axes = axes.unwrap_or(&all);
    let lengths = [ends.len(), axes.len(), steps.map_or(starts.len(), <[i64]>::len)];
    if lengths.iter().any(|&n| n != starts.len()) {
        return Err(NodeError::invalid("`starts`, `ends`, `axes` and `steps` differ in length"));
    }
    let mut result: Vec<SliceRange> =
        shape.iter().map(|&size| SliceRange { start: 0, count: size, step: 1 }).collect();
    for (i, &axis) in axes.iter().enumerate() {
        let axis = axis_of(axis, shape.len())?;
        let size = i64::try_from(shape[axis])
            .map_err(|_| NodeError::invalid("a dimension is too large to slice"))?;
        let step = steps.map_or(1, |s| s[i]);
        if step == 0 || step == i64::MIN {
            return Err(NodeError::invalid(format!("a step of {step} is not allowed")));
        }
        let from_end = |x: i64| if x < 0 { x.saturating_add(size) } else { x };
        let (start, end) = if step > 0 {
            (from_end(starts[i]).clamp(0, size), from_end(ends[i]).clamp(0, size))
        } else {
            (from_end(starts[i]).clamp(0, size - 1), from_end(ends[i]).clamp(-1, size - 1))
        };
        let span = if step > 0 { end - start } else { start - end };
        let count = if span > 0 { (span as u64).div_ceil(step.unsigned_abs()) } else { 0 };
        result[axis] = SliceRange { start: start.max(0) as u64, count, step };
    }
    Ok(result)
}

/// The sizes of the parts of a Split.
pub(crate) fn split_sizes(node: &Node, size: u64, given: Option<&[i64]>) -> NodeResult<Vec<u64>> {
    let outputs = node.output.len() as u64;
    let parts = match given {
        Some(given) => sizes_of(given)?,
        None => {
            let parts = node.size("num_outputs", outputs)?;
            if parts == 0 || parts != outputs {
                return Err(NodeError::invalid(format!("{parts} parts do not match {outputs} outputs")));
            }
            let each = size.div_ceil(parts);
            (0..parts).map(|i| each.min(size.saturating_sub(i * each))).collect()
        }
    };
    let total = parts.iter().try_fold(0u64, |n, &p| n.checked_add(p));
    if total != Some(size) || parts.len() as u64 != outputs {
        return Err(NodeError::invalid(format!(
            "a dimension of size {size} cannot be split into parts of sizes {parts:?}"
        )));
    }
    Ok(parts)
}

pub(super) fn sizes_of(given: &[i64]) -> NodeResult<Vec<u64>> {
    given
        .iter()
        .map(|&s| u64::try_from(s).map_err(|_| NodeError::invalid(format!("a part has size {s}"))))
        .collect()
}
