//! Folding of ops that move elements.

use super::{
    LiteralInputs, foldable, input,
    shapes::{axis_of, broadcast, index_into, sizes_of, slice_ranges, split_sizes},
};
use crate::{
    error::{NodeError, NodeResult},
    literal::{Literal, Numbers, part_count},
    proto::Node,
    storage::sizes,
};
use shardwright_graph::DType;

/// For each element of shape `to` in order, the position of the element of `from` that is broadcast to it.
pub(super) fn spread<'a>(from: &'a [u64], to: &'a [u64]) -> impl Iterator<Item = usize> + 'a {
    let elements = part_count(to);
    let skip = to.len() - from.len();
    (0..elements).map(move |flat| {
        let (mut rest, mut position, mut stride) = (flat as u64, 0u64, 1u64);
        for d in (0..to.len()).rev() {
            let index = rest % to[d];
            rest /= to[d];
            if d >= skip {
                let size = from[d - skip];
                if size != 1 {
                    position += index * stride;
                }
                stride *= size;
            }
        }
        position as usize
    })
}

/// The stride of each dimension; zeros if the tensor is empty, since its other sizes may be huge.
pub(super) fn strides(shape: &[u64]) -> Vec<u64> {
    if shape.contains(&0) {
        return vec![0; shape.len()];
    }
    let mut strides = vec![1; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d];
    }
    strides
}

/// All positions of a box of these sizes, by strides, starting at `start`.
pub(super) fn walk<'a>(shape: &'a [u64], strides: &'a [i64], start: i64) -> impl Iterator<Item = usize> + 'a {
    (0..part_count(shape)).map(move |flat| {
        let mut rest = flat as u64;
        let mut position = start;
        for d in (0..shape.len()).rev() {
            position += (rest % shape[d]) as i64 * strides[d];
            rest /= shape[d];
        }
        position as usize
    })
}

pub(super) fn expand(x: &Literal, shape: &[i64]) -> NodeResult<Option<Vec<Literal>>> {
    let to = broadcast(&[&x.shape, &sizes(shape)?])?;
    Ok(foldable(&to).map(|_| vec![x.pick(to.clone(), spread(&x.shape, &to))]))
}

pub(super) fn transpose(x: &Literal, perm: &[usize]) -> Literal {
    let old = strides(&x.shape);
    let shape: Vec<u64> = perm.iter().map(|&p| x.shape[p]).collect();
    let moved: Vec<i64> = perm.iter().map(|&p| old[p] as i64).collect();
    x.pick(shape.clone(), walk(&shape, &moved, 0))
}

pub(super) fn concat(node: &Node, inputs: &LiteralInputs<'_>) -> NodeResult<Option<Vec<Literal>>> {
    let parts = (0..inputs.len()).map(|i| input(inputs, i)).collect::<NodeResult<Vec<_>>>()?;
    let first = *parts.first().ok_or_else(|| NodeError::invalid("there is nothing to concatenate"))?;
    let axis = axis_of(node.int("axis", 0)?, first.shape.len())?;
    let mut shape = first.shape.clone();
    shape[axis] = 0;
    for part in &parts {
        let fits = part.shape.len() == shape.len()
            && part.dtype == first.dtype
            && (0..shape.len()).all(|d| d == axis || part.shape[d] == shape[d]);
        if !fits {
            return Err(NodeError::invalid(format!(
                "shape {:?} cannot be concatenated to {:?}",
                part.shape, first.shape
            )));
        }
        shape[axis] = shape[axis].saturating_add(part.shape[axis]);
    }
    let Some(elements) = foldable(&shape) else { return Ok(None) };
    // An empty result has no pieces, however large its other dimensions are.
    let outer = if elements == 0 { 0 } else { part_count(&shape[..axis]) };
    let rows: Vec<usize> = parts.iter().map(|p| part_count(&p.shape[axis..])).collect();
    let pieces =
        || (0..outer).flat_map(|o| parts.iter().zip(&rows).map(move |(p, &n)| (*p, o * n..(o + 1) * n)));
    let numbers = match &first.numbers {
        Numbers::Reals(_) => {
            let mut all = Vec::new();
            for (part, range) in pieces() {
                all.extend_from_slice(&part.as_reals()?[range]);
            }
            Numbers::Reals(all)
        }
        Numbers::Ints(_) => {
            let mut all = Vec::new();
            for (part, range) in pieces() {
                all.extend_from_slice(&part.as_ints()?[range]);
            }
            Numbers::Ints(all)
        }
    };
    Ok(Some(vec![Literal { dtype: first.dtype, shape, numbers, assumed: false }]))
}

pub(super) fn gather(
    x: &Literal,
    ids: &[i64],
    ids_shape: &[u64],
    axis: i64,
) -> NodeResult<Option<Vec<Literal>>> {
    let axis = axis_of(axis, x.shape.len())?;
    let rows = ids.iter().map(|&i| index_into(i, x.shape[axis])).collect::<NodeResult<Vec<_>>>()?;
    let shape: Vec<u64> =
        x.shape[..axis].iter().chain(ids_shape).chain(&x.shape[axis + 1..]).copied().collect();
    if foldable(&shape).is_none() {
        return Ok(None);
    }
    let inner = part_count(&x.shape[axis + 1..]);
    let outer = part_count(&x.shape[..axis]);
    let size = x.shape[axis] as usize;
    let rows = &rows;
    let positions = (0..outer).flat_map(|o| {
        rows.iter().flat_map(move |&r| (0..inner).map(move |i| (o * size + r as usize) * inner + i))
    });
    Ok(Some(vec![x.pick(shape, positions)]))
}

pub(super) fn gather_elements(x: &Literal, ids: &Literal, axis: i64) -> NodeResult<Option<Vec<Literal>>> {
    let axis = axis_of(axis, x.shape.len())?;
    let fits = ids.shape.len() == x.shape.len()
        && (0..x.shape.len()).all(|d| d == axis || ids.shape[d] <= x.shape[d]);
    if !fits {
        return Err(NodeError::invalid(format!(
            "indices of shape {:?} do not fit data of shape {:?}",
            ids.shape, x.shape
        )));
    }
    let strides_x: Vec<i64> = strides(&x.shape).iter().map(|&s| s as i64).collect();
    let mut elsewhere = strides_x.clone();
    elsewhere[axis] = 0;
    let mut positions = Vec::with_capacity(ids.len());
    for (&index, place) in ids.as_ints()?.iter().zip(walk(&ids.shape, &elsewhere, 0)) {
        positions.push(place + index_into(index, x.shape[axis])? as usize * strides_x[axis] as usize);
    }
    Ok(Some(vec![x.pick(ids.shape.clone(), positions.into_iter())]))
}

pub(super) fn slice(
    x: &Literal,
    starts: &[i64],
    ends: &[i64],
    axes: Option<&[i64]>,
    steps: Option<&[i64]>,
) -> NodeResult<Option<Vec<Literal>>> {
    let taken = slice_ranges(&x.shape, starts, ends, axes, steps)?;
    let old = strides(&x.shape);
    let shape: Vec<u64> = taken.iter().map(|t| t.count).collect();
    let start = taken.iter().zip(&old).map(|(t, &s)| t.start as i64 * s as i64).sum();
    let moved: Vec<i64> = taken.iter().zip(&old).map(|(t, &s)| t.step.saturating_mul(s as i64)).collect();
    Ok(Some(vec![x.pick(shape.clone(), walk(&shape, &moved, start))]))
}

pub(super) fn split(node: &Node, x: &Literal, given: Option<&[i64]>) -> NodeResult<Option<Vec<Literal>>> {
    let axis = axis_of(node.int("axis", 0)?, x.shape.len())?;
    let parts = split_sizes(node, x.shape[axis], given)?;
    let mut from = 0;
    let mut results = Vec::with_capacity(parts.len());
    for part in parts {
        let (start, end) = (from as i64, (from + part) as i64);
        let Some(slices) = slice(x, &[start], &[end], Some(&[axis as i64]), None)? else { return Ok(None) };
        results.extend(slices);
        from += part;
    }
    Ok(Some(results))
}

pub(super) fn tile(x: &Literal, repeats: &[i64]) -> NodeResult<Option<Vec<Literal>>> {
    let repeats = sizes_of(repeats)?;
    if repeats.len() != x.shape.len() {
        return Err(NodeError::invalid(format!("{} repeats do not fit shape {:?}", repeats.len(), x.shape)));
    }
    let shape: Option<Vec<u64>> = x.shape.iter().zip(&repeats).map(|(&s, &r)| s.checked_mul(r)).collect();
    let Some(shape) = shape.filter(|s| foldable(s).is_some()) else { return Ok(None) };
    let old = strides(&x.shape);
    let positions: Vec<usize> = (0..part_count(&shape) as u64)
        .map(|flat| {
            let (mut rest, mut position) = (flat, 0);
            for d in (0..shape.len()).rev() {
                position += (rest % shape[d]) % x.shape[d].max(1) * old[d];
                rest /= shape[d];
            }
            position as usize
        })
        .collect();
    Ok(Some(vec![x.pick(shape, positions.into_iter())]))
}

pub(super) fn select(inputs: &LiteralInputs<'_>) -> NodeResult<Option<Vec<Literal>>> {
    let (condition, x, y) = (input(inputs, 0)?, input(inputs, 1)?, input(inputs, 2)?);
    let shape = broadcast(&[&condition.shape, &x.shape, &y.shape])?;
    if foldable(&shape).is_none() {
        return Ok(None);
    }
    let chosen: Vec<bool> = {
        let c = condition.as_ints()?;
        spread(&condition.shape, &shape).map(|i| c[i] != 0).collect()
    };
    let a = x.pick(shape.clone(), spread(&x.shape, &shape));
    let b = y.pick(shape.clone(), spread(&y.shape, &shape));
    let numbers = match (&a.numbers, &b.numbers) {
        (Numbers::Ints(a), Numbers::Ints(b)) => Numbers::Ints(
            chosen.iter().zip(a.iter().zip(b)).map(|(&c, (&a, &b))| if c { a } else { b }).collect(),
        ),
        (Numbers::Reals(a), Numbers::Reals(b)) => Numbers::Reals(
            chosen.iter().zip(a.iter().zip(b)).map(|(&c, (&a, &b))| if c { a } else { b }).collect(),
        ),
        _ => return Err(NodeError::invalid("the two branches have different element types")),
    };
    Ok(Some(vec![Literal { dtype: x.dtype, shape, numbers, assumed: false }]))
}

pub(super) fn trilu(x: &Literal, k: i64, upper: bool) -> NodeResult<Option<Vec<Literal>>> {
    let &[.., rows, columns] = x.shape.as_slice() else {
        return Err(NodeError::invalid("the input needs at least two dimensions"));
    };
    let keep = |flat: usize| {
        let (row, column) = ((flat as u64 / columns % rows) as i64, (flat as u64 % columns) as i64);
        let offset = column - row;
        if upper { offset >= k } else { offset <= k }
    };
    let numbers = match &x.numbers {
        Numbers::Ints(v) => {
            Numbers::Ints(v.iter().enumerate().map(|(i, &x)| if keep(i) { x } else { 0 }).collect())
        }
        Numbers::Reals(v) => {
            Numbers::Reals(v.iter().enumerate().map(|(i, &x)| if keep(i) { x } else { 0.0 }).collect())
        }
    };
    Ok(Some(vec![Literal { numbers, ..x.clone() }]))
}

pub(super) fn non_zero(x: &Literal) -> NodeResult<Option<Vec<Literal>>> {
    let found: Vec<u64> =
        x.to_reals().iter().enumerate().filter(|(_, v)| **v != 0.0).map(|(i, _)| i as u64).collect();
    let strides = strides(&x.shape);
    let mut values = Vec::with_capacity(found.len() * x.shape.len());
    for (stride, size) in strides.iter().zip(&x.shape) {
        values.extend(found.iter().map(|i| (i / stride % size) as i64));
    }
    Ok(Some(vec![Literal::ints(DType::I64, vec![x.shape.len() as u64, found.len() as u64], values)]))
}
