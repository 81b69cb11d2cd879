//! Constant folding: ops whose inputs are all known are carried out while importing.
//!
//! Exporters compute shapes at run time (`Shape`, `Gather`, `Concat`, ...) and build masks and positions from
//! ranges. None of that belongs into a training step. What is folded here is bounded: results have at most
//! [`MOST_FOLDED`] elements each, and the importer keeps count of them all.

use super::{
    error::{Tried, Trouble},
    literal::{Literal, Numbers, count, round_to},
    proto::Node,
    stored::{MOST_FOLDED, Stored, element_type, sizes},
};
use shardwright_graph::DType;

/// The inputs of a node, all known; `None`: left out.
pub(crate) type Known<'a> = [Option<&'a Literal>];

/// Positions along an axis, negative ones counted from the end.
pub(crate) fn axis_of(axis: i64, rank: usize) -> Tried<usize> {
    let from_end = if axis < 0 { axis + rank as i64 } else { axis };
    usize::try_from(from_end)
        .ok()
        .filter(|&a| a < rank)
        .ok_or_else(|| Trouble::wrong(format!("axis {axis} of a tensor with {rank} dimensions")))
}

/// Several axes, sorted, without repetition.
pub(crate) fn axes_of(axes: &[i64], rank: usize) -> Tried<Vec<usize>> {
    let mut found = axes.iter().map(|&a| axis_of(a, rank)).collect::<Tried<Vec<_>>>()?;
    found.sort_unstable();
    if found.windows(2).any(|w| w[0] == w[1]) {
        return Err(Trouble::wrong(format!("axes {axes:?} repeat")));
    }
    Ok(found)
}

/// The shape that several broadcast to.
pub(crate) fn broadcast(shapes: &[&[u64]]) -> Tried<Vec<u64>> {
    let rank = shapes.iter().map(|s| s.len()).max().unwrap_or(0);
    let mut result = vec![1; rank];
    for shape in shapes {
        for (size, &have) in result[rank - shape.len()..].iter_mut().zip(*shape) {
            *size = match (*size, have) {
                (a, b) if a == b || b == 1 => a,
                (1, b) => b,
                _ => return Err(Trouble::wrong(format!("shapes {shapes:?} do not broadcast"))),
            };
        }
    }
    Ok(result)
}

/// Elements of a result, unless there are too many to fold.
fn foldable(shape: &[u64]) -> Option<usize> {
    count(shape).filter(|&n| n <= MOST_FOLDED)
}

/// For each element of `to` in order, the position of the element of `from` that is broadcast there.
fn spread<'a>(from: &'a [u64], to: &'a [u64]) -> impl Iterator<Item = usize> + 'a {
    let elements = count(to).unwrap_or(0);
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

fn assumed(inputs: &Known<'_>) -> bool {
    inputs.iter().flatten().any(|l| l.assumed)
}

fn input<'a>(inputs: &Known<'a>, i: usize) -> Tried<&'a Literal> {
    inputs.get(i).copied().flatten().ok_or_else(|| Trouble::wrong(format!("input {i} is missing")))
}

/// Carries out a node whose inputs are all known. `None`: not an op that is folded, or too large.
pub(crate) fn fold(node: &Node, opset: i64, inputs: &Known<'_>) -> Tried<Option<Vec<Literal>>> {
    let mut results = match fold_op(node, opset, inputs)? {
        Some(results) => results,
        None => return Ok(None),
    };
    if assumed(inputs) {
        results.iter_mut().for_each(|r| r.assumed = true);
    }
    Ok(Some(results))
}

fn fold_op(node: &Node, opset: i64, inputs: &Known<'_>) -> Tried<Option<Vec<Literal>>> {
    let one = |literal: Literal| Ok(Some(vec![literal]));
    let x = || input(inputs, 0);
    let list = |i: usize| input(inputs, i).and_then(Literal::as_ints);
    match node.op_type.as_str() {
        "Constant" => constant(node).map(|c| Some(vec![c])),
        "ConstantOfShape" => constant_of_shape(node, list(0)?),
        "Identity" => one(x()?.clone()),
        "Cast" => one(x()?.cast(cast_type(node)?)),
        "CastLike" => one(x()?.cast(input(inputs, 1)?.dtype)),
        "Range" => range(inputs),
        "Reshape" => {
            let shape = reshaped(&x()?.shape, list(1)?, node.flag("allowzero", false)?)?;
            one(x()?.reshaped(shape))
        }
        "Flatten" => {
            let axis = node.int("axis", 1)?;
            one(x()?.reshaped(flattened(&x()?.shape, axis)?))
        }
        "Squeeze" | "Unsqueeze" => {
            let axes = if inputs.get(1).copied().flatten().is_some() { Some(list(1)?) } else { None };
            one(x()?.reshaped(squeezed(node, opset, &x()?.shape, axes)?))
        }
        "Transpose" => one(transpose(x()?, &permutation(node, x()?.shape.len())?)),
        "Concat" => concat(node, inputs),
        "Gather" => gather(x()?, list(1)?, &input(inputs, 1)?.shape, node.int("axis", 0)?),
        "GatherElements" => gather_elements(x()?, input(inputs, 1)?, node.int("axis", 0)?),
        "Slice" => {
            let optional = |i: usize| inputs.get(i).copied().flatten().map(Literal::as_ints).transpose();
            slice(x()?, list(1)?, list(2)?, optional(3)?, optional(4)?)
        }
        "Split" => {
            let sizes = if inputs.len() > 1 { Some(list(1)?) } else { None };
            split(node, x()?, sizes)
        }
        "Expand" => {
            let to = broadcast(&[&x()?.shape, &sizes(list(1)?)?])?;
            Ok(foldable(&to).map(|_| vec![x().map(|x| x.pick(to.clone(), spread(&x.shape, &to)))]))
                .and_then(transpose_results)
        }
        "Tile" => tile(x()?, list(1)?),
        "Where" => select(inputs),
        "Trilu" => {
            let k = if inputs.len() > 1 { list(1)?.first().copied().unwrap_or(0) } else { 0 };
            trilu(x()?, k, node.flag("upper", true)?)
        }
        "CumSum" => cumsum(node, x()?, list(1)?),
        "NonZero" => non_zero(x()?),
        "Size" => one(Literal::ints(DType::I64, vec![], vec![x()?.len() as i64])),
        "ReduceProd" | "ReduceSum" | "ReduceMax" | "ReduceMin" => reduce(node, inputs),
        "Add" | "Sub" | "Mul" | "Div" | "Mod" | "Pow" | "Min" | "Max" | "And" | "Or" | "Xor" | "Equal"
        | "Less" | "LessOrEqual" | "Greater" | "GreaterOrEqual" => binary(node, inputs),
        "Not" | "Neg" | "Abs" | "Sqrt" | "Floor" | "Ceil" | "Exp" | "Log" | "Sin" | "Cos" | "Reciprocal"
        | "Round" | "Sign" => unary(node, x()?),
        _ => Ok(None),
    }
}

fn transpose_results(found: Option<Vec<Tried<Literal>>>) -> Tried<Option<Vec<Literal>>> {
    found.map(|list| list.into_iter().collect()).transpose()
}

/// The type that a Cast goes to.
pub(crate) fn cast_type(node: &Node) -> Tried<DType> {
    element_type(i32::try_from(node.int("to", 0)?).unwrap_or(0))
}

fn constant(node: &Node) -> Tried<Literal> {
    if let Some(tensor) = node.tensor("value")? {
        let stored = Stored::read(tensor)?;
        let found = stored.fold(&super::stored::NoExternalData)?;
        return found.ok_or_else(|| Trouble::unsupported("a constant with over four million elements"));
    }
    if node.has("value_int") {
        return Ok(Literal::ints(DType::I64, vec![], vec![node.int("value_int", 0)?]));
    }
    if node.has("value_float") {
        return Ok(Literal::reals(DType::F32, vec![], vec![node.float("value_float", 0.0)?]));
    }
    if let Some(ints) = node.ints("value_ints")? {
        return Ok(Literal::list(ints.to_vec()));
    }
    if let Some(floats) = node.floats("value_floats")? {
        let values: Vec<f64> = floats.iter().map(|&x| f64::from(x)).collect();
        return Ok(Literal::reals(DType::F32, vec![values.len() as u64], values));
    }
    Err(Trouble::unsupported("a constant that is no dense tensor of numbers"))
}

/// The number that a ConstantOfShape repeats.
pub(crate) fn fill_value(node: &Node) -> Tried<Literal> {
    match node.tensor("value")? {
        None => Ok(Literal::reals(DType::F32, vec![], vec![0.0])),
        Some(tensor) => Stored::read(tensor)?
            .fold(&super::stored::NoExternalData)?
            .filter(|l| l.len() == 1)
            .ok_or_else(|| Trouble::wrong("`value` must be one number")),
    }
}

fn constant_of_shape(node: &Node, dims: &[i64]) -> Tried<Option<Vec<Literal>>> {
    let shape = sizes(dims)?;
    let value = fill_value(node)?;
    Ok(foldable(&shape).map(|n| vec![value.pick(shape, std::iter::repeat_n(0, n))]))
}

fn range(inputs: &Known<'_>) -> Tried<Option<Vec<Literal>>> {
    let number = |i: usize| {
        let literal = input(inputs, i)?;
        literal.scalar().ok_or_else(|| Trouble::wrong("start, limit and step must be single numbers"))
    };
    let (start, limit, step) = (number(0)?, number(1)?, number(2)?);
    if step == 0.0 || !step.is_finite() || !start.is_finite() || !limit.is_finite() {
        return Err(Trouble::wrong(format!("a range from {start} to {limit} by {step}")));
    }
    let steps = ((limit - start) / step).ceil().max(0.0);
    if steps > MOST_FOLDED as f64 {
        return Ok(None);
    }
    let (steps, dtype) = (steps as usize, input(inputs, 0)?.dtype);
    let shape = vec![steps as u64];
    let literal = if dtype.is_float() {
        let values = (0..steps).map(|i| round_to(dtype, start + i as f64 * step)).collect();
        Literal::reals(dtype, shape, values)
    } else {
        Literal::ints(dtype, shape, (0..steps).map(|i| start as i64 + i as i64 * step as i64).collect())
    };
    Ok(Some(vec![literal]))
}

/// The shape that a Reshape asks for: 0 keeps a size, -1 is what is left.
pub(crate) fn reshaped(from: &[u64], to: &[i64], zero_is_zero: bool) -> Tried<Vec<u64>> {
    let elements = from.iter().try_fold(1u64, |n, &s| n.checked_mul(s));
    let bad = || Trouble::wrong(format!("{from:?} cannot be reshaped to {to:?}"));
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
pub(crate) fn flattened(shape: &[u64], axis: i64) -> Tried<Vec<u64>> {
    let axis = if axis == shape.len() as i64 { shape.len() } else { axis_of(axis, shape.len())? };
    let product = |sizes: &[u64]| sizes.iter().try_fold(1u64, |n, &s| n.checked_mul(s));
    let sizes = [product(&shape[..axis]), product(&shape[axis..])];
    sizes.into_iter().collect::<Option<_>>().ok_or_else(|| Trouble::wrong("absurdly many elements"))
}

/// The shape after Squeeze or Unsqueeze.
pub(crate) fn squeezed(node: &Node, opset: i64, shape: &[u64], axes: Option<&[i64]>) -> Tried<Vec<u64>> {
    let attribute = if opset < 13 { node.ints("axes")? } else { None };
    let axes = axes.or(attribute);
    if node.op_type == "Unsqueeze" {
        let axes = axes.ok_or_else(|| Trouble::wrong("no axes are given"))?;
        let rank = shape.len() + axes.len();
        let axes = axes_of(axes, rank)?;
        let mut old = shape.iter().copied();
        let size = |d: usize| if axes.contains(&d) { Some(1) } else { old.next() };
        return (0..rank).map(size).collect::<Option<_>>().ok_or_else(|| Trouble::wrong("axes do not fit"));
    }
    let gone = match axes {
        Some(axes) => axes_of(axes, shape.len())?,
        None => (0..shape.len()).filter(|&d| shape[d] == 1).collect(),
    };
    if let Some(&d) = gone.iter().find(|&&d| shape[d] != 1) {
        return Err(Trouble::wrong(format!("dimension {d} of {shape:?} is not 1")));
    }
    Ok(shape.iter().enumerate().filter(|(d, _)| !gone.contains(d)).map(|(_, &s)| s).collect())
}

/// The order of dimensions of a Transpose.
pub(crate) fn permutation(node: &Node, rank: usize) -> Tried<Vec<usize>> {
    let Some(perm) = node.ints("perm")? else { return Ok((0..rank).rev().collect()) };
    let perm = perm.iter().map(|&p| axis_of(p, rank)).collect::<Tried<Vec<_>>>()?;
    let mut seen = perm.clone();
    seen.sort_unstable();
    if perm.len() != rank || seen.windows(2).any(|w| w[0] == w[1]) {
        return Err(Trouble::wrong(format!("{perm:?} is no order of {rank} dimensions")));
    }
    Ok(perm)
}

/// The distances between neighbours along each dimension.
fn strides(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d];
    }
    strides
}

/// All positions of a box of these sizes, by strides, from `start` on.
fn walk<'a>(shape: &'a [u64], strides: &'a [i64], start: i64) -> impl Iterator<Item = usize> + 'a {
    (0..count(shape).unwrap_or(0)).map(move |flat| {
        let mut rest = flat as u64;
        let mut position = start;
        for d in (0..shape.len()).rev() {
            position += (rest % shape[d]) as i64 * strides[d];
            rest /= shape[d];
        }
        position as usize
    })
}

fn transpose(x: &Literal, perm: &[usize]) -> Literal {
    let old = strides(&x.shape);
    let shape: Vec<u64> = perm.iter().map(|&p| x.shape[p]).collect();
    let moved: Vec<i64> = perm.iter().map(|&p| old[p] as i64).collect();
    x.pick(shape.clone(), walk(&shape, &moved, 0))
}

fn concat(node: &Node, inputs: &Known<'_>) -> Tried<Option<Vec<Literal>>> {
    let parts = (0..inputs.len()).map(|i| input(inputs, i)).collect::<Tried<Vec<_>>>()?;
    let first = *parts.first().ok_or_else(|| Trouble::wrong("nothing to join"))?;
    let axis = axis_of(node.int("axis", 0)?, first.shape.len())?;
    let mut shape = first.shape.clone();
    shape[axis] = 0;
    for part in &parts {
        let fits = part.shape.len() == shape.len()
            && part.dtype == first.dtype
            && (0..shape.len()).all(|d| d == axis || part.shape[d] == shape[d]);
        if !fits {
            return Err(Trouble::wrong(format!("{:?} does not fit {:?}", part.shape, first.shape)));
        }
        shape[axis] = shape[axis].saturating_add(part.shape[axis]);
    }
    if foldable(&shape).is_none() {
        return Ok(None);
    }
    let outer: u64 = shape[..axis].iter().product();
    let rows: Vec<usize> = parts.iter().map(|p| count(&p.shape[axis..]).unwrap_or(0)).collect();
    let pieces = || {
        (0..outer as usize).flat_map(|o| parts.iter().zip(&rows).map(move |(p, &n)| (*p, o * n..(o + 1) * n)))
    };
    let numbers = if first.dtype.is_float() {
        Numbers::Reals(pieces().flat_map(|(p, r)| p.to_reals()[r].to_vec()).collect())
    } else {
        let mut all = Vec::new();
        for (part, range) in pieces() {
            all.extend_from_slice(&part.as_ints()?[range]);
        }
        Numbers::Ints(all)
    };
    Ok(Some(vec![Literal { dtype: first.dtype, shape, numbers, assumed: false }]))
}

/// An index into a dimension, negative ones counted from the end.
pub(crate) fn index_into(index: i64, size: u64) -> Tried<u64> {
    let from_end = if index < 0 { index.saturating_add_unsigned(size) } else { index };
    u64::try_from(from_end)
        .ok()
        .filter(|&i| i < size)
        .ok_or_else(|| Trouble::wrong(format!("index {index} into a dimension of size {size}")))
}

fn gather(x: &Literal, ids: &[i64], ids_shape: &[u64], axis: i64) -> Tried<Option<Vec<Literal>>> {
    let axis = axis_of(axis, x.shape.len())?;
    let rows = ids.iter().map(|&i| index_into(i, x.shape[axis])).collect::<Tried<Vec<_>>>()?;
    let shape: Vec<u64> =
        x.shape[..axis].iter().chain(ids_shape).chain(&x.shape[axis + 1..]).copied().collect();
    if foldable(&shape).is_none() {
        return Ok(None);
    }
    let inner = count(&x.shape[axis + 1..]).unwrap_or(0);
    let outer = count(&x.shape[..axis]).unwrap_or(0);
    let size = x.shape[axis] as usize;
    let rows = &rows;
    let positions = (0..outer).flat_map(|o| {
        rows.iter().flat_map(move |&r| (0..inner).map(move |i| (o * size + r as usize) * inner + i))
    });
    Ok(Some(vec![x.pick(shape, positions)]))
}

fn gather_elements(x: &Literal, ids: &Literal, axis: i64) -> Tried<Option<Vec<Literal>>> {
    let axis = axis_of(axis, x.shape.len())?;
    let fits = ids.shape.len() == x.shape.len()
        && (0..x.shape.len()).all(|d| d == axis || ids.shape[d] <= x.shape[d]);
    if !fits {
        return Err(Trouble::wrong(format!("indices {:?} do not fit {:?}", ids.shape, x.shape)));
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

/// What a Slice takes of one dimension: first position, how many, and the step between them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Taken {
    pub start: u64,
    pub count: u64,
    pub step: i64,
}

/// What a Slice takes of every dimension.
pub(crate) fn taken(
    shape: &[u64],
    starts: &[i64],
    ends: &[i64],
    axes: Option<&[i64]>,
    steps: Option<&[i64]>,
) -> Tried<Vec<Taken>> {
    let all: Vec<i64> = (0..starts.len() as i64).collect();
    let axes = axes.unwrap_or(&all);
    let lengths = [ends.len(), axes.len(), steps.map_or(starts.len(), <[i64]>::len)];
    if lengths.iter().any(|&n| n != starts.len()) {
        return Err(Trouble::wrong("starts, ends, axes and steps differ in length"));
    }
    let mut result: Vec<Taken> = shape.iter().map(|&size| Taken { start: 0, count: size, step: 1 }).collect();
    for (i, &axis) in axes.iter().enumerate() {
        let axis = axis_of(axis, shape.len())?;
        let size = i64::try_from(shape[axis]).map_err(|_| Trouble::wrong("a dimension of absurd size"))?;
        let step = steps.map_or(1, |s| s[i]);
        if step == 0 || step == i64::MIN {
            return Err(Trouble::wrong(format!("a step of {step}")));
        }
        let from_end = |x: i64| if x < 0 { x.saturating_add(size) } else { x };
        let (start, end) = if step > 0 {
            (from_end(starts[i]).clamp(0, size), from_end(ends[i]).clamp(0, size))
        } else {
            (from_end(starts[i]).clamp(0, size - 1), from_end(ends[i]).clamp(-1, size - 1))
        };
        let span = if step > 0 { end - start } else { start - end };
        let count = if span > 0 { (span as u64).div_ceil(step.unsigned_abs()) } else { 0 };
        result[axis] = Taken { start: start.max(0) as u64, count, step };
    }
    Ok(result)
}

fn slice(
    x: &Literal,
    starts: &[i64],
    ends: &[i64],
    axes: Option<&[i64]>,
    steps: Option<&[i64]>,
) -> Tried<Option<Vec<Literal>>> {
    let taken = taken(&x.shape, starts, ends, axes, steps)?;
    let old = strides(&x.shape);
    let shape: Vec<u64> = taken.iter().map(|t| t.count).collect();
    let start = taken.iter().zip(&old).map(|(t, &s)| t.start as i64 * s as i64).sum();
    let moved: Vec<i64> = taken.iter().zip(&old).map(|(t, &s)| t.step.saturating_mul(s as i64)).collect();
    Ok(Some(vec![x.pick(shape.clone(), walk(&shape, &moved, start))]))
}

/// The sizes of the parts of a Split.
pub(crate) fn split_sizes(node: &Node, size: u64, given: Option<&[i64]>) -> Tried<Vec<u64>> {
    let outputs = node.output.len() as u64;
    let parts = match given {
        Some(given) => sizes_of(given)?,
        None => {
            let parts = u64::try_from(node.int("num_outputs", outputs as i64)?).unwrap_or(0);
            if parts == 0 || parts != outputs {
                return Err(Trouble::wrong(format!("{parts} parts for {outputs} outputs")));
            }
            let each = size.div_ceil(parts);
            (0..parts).map(|i| each.min(size.saturating_sub(i * each))).collect()
        }
    };
    let total = parts.iter().try_fold(0u64, |n, &p| n.checked_add(p));
    if total != Some(size) || parts.len() as u64 != outputs {
        return Err(Trouble::wrong(format!("a dimension of size {size} cannot be split into {parts:?}")));
    }
    Ok(parts)
}

fn sizes_of(given: &[i64]) -> Tried<Vec<u64>> {
    given
        .iter()
        .map(|&s| u64::try_from(s).map_err(|_| Trouble::wrong(format!("a part of size {s}"))))
        .collect()
}

fn split(node: &Node, x: &Literal, given: Option<&[i64]>) -> Tried<Option<Vec<Literal>>> {
    let axis = axis_of(node.int("axis", 0)?, x.shape.len())?;
    let parts = split_sizes(node, x.shape[axis], given)?;
    let mut from = 0;
    let mut results = Vec::with_capacity(parts.len());
    for part in parts {
        let (start, end) = (from as i64, (from + part) as i64);
        results.extend(slice(x, &[start], &[end], Some(&[axis as i64]), None)?.unwrap_or_default());
        from += part;
    }
    Ok(Some(results))
}

fn tile(x: &Literal, repeats: &[i64]) -> Tried<Option<Vec<Literal>>> {
    let repeats = sizes_of(repeats)?;
    if repeats.len() != x.shape.len() {
        return Err(Trouble::wrong(format!("{} repeats for {:?}", repeats.len(), x.shape)));
    }
    let shape: Option<Vec<u64>> = x.shape.iter().zip(&repeats).map(|(&s, &r)| s.checked_mul(r)).collect();
    let Some(shape) = shape.filter(|s| foldable(s).is_some()) else { return Ok(None) };
    let old = strides(&x.shape);
    let positions: Vec<usize> = (0..count(&shape).unwrap_or(0) as u64)
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

fn select(inputs: &Known<'_>) -> Tried<Option<Vec<Literal>>> {
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
        _ => return Err(Trouble::wrong("the two branches differ in type")),
    };
    Ok(Some(vec![Literal { dtype: x.dtype, shape, numbers, assumed: false }]))
}

fn trilu(x: &Literal, k: i64, upper: bool) -> Tried<Option<Vec<Literal>>> {
    let &[.., rows, columns] = x.shape.as_slice() else {
        return Err(Trouble::wrong("needs at least two dimensions"));
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

fn cumsum(node: &Node, x: &Literal, axis: &[i64]) -> Tried<Option<Vec<Literal>>> {
    if node.flag("exclusive", false)? || node.flag("reverse", false)? {
        return Ok(None);
    }
    let axis = axis_of(*axis.first().unwrap_or(&0), x.shape.len())?;
    let step = count(&x.shape[axis + 1..]).unwrap_or(0);
    let size = x.shape[axis] as usize;
    let first = |i: usize| (i / step.max(1)).is_multiple_of(size.max(1));
    let numbers = match x.numbers.clone() {
        Numbers::Ints(mut v) => {
            for i in 0..v.len() {
                v[i] = if first(i) { v[i] } else { v[i].wrapping_add(v[i - step]) };
            }
            Numbers::Ints(v)
        }
        Numbers::Reals(mut v) => {
            for i in 0..v.len() {
                v[i] = if first(i) { v[i] } else { round_to(x.dtype, v[i] + v[i - step]) };
            }
            Numbers::Reals(v)
        }
    };
    Ok(Some(vec![Literal { numbers, ..x.clone() }]))
}

fn non_zero(x: &Literal) -> Tried<Option<Vec<Literal>>> {
    let found: Vec<u64> =
        x.to_reals().iter().enumerate().filter(|(_, v)| **v != 0.0).map(|(i, _)| i as u64).collect();
    let strides = strides(&x.shape);
    let mut values = Vec::with_capacity(found.len() * x.shape.len());
    for (stride, size) in strides.iter().zip(&x.shape) {
        values.extend(found.iter().map(|i| (i / stride % size) as i64));
    }
    Ok(Some(vec![Literal::ints(DType::I64, vec![x.shape.len() as u64, found.len() as u64], values)]))
}

fn reduce(node: &Node, inputs: &Known<'_>) -> Tried<Option<Vec<Literal>>> {
    let x = input(inputs, 0)?;
    let given = inputs.get(1).copied().flatten().map(Literal::as_ints).transpose()?.or(node.ints("axes")?);
    let rank = x.shape.len();
    let axes = match given {
        Some(axes) if !axes.is_empty() => axes_of(axes, rank)?,
        _ if node.flag("noop_with_empty_axes", false)? => return Ok(Some(vec![x.clone()])),
        _ => (0..rank).collect(),
    };
    let kept: Vec<u64> =
        x.shape.iter().enumerate().map(|(d, &s)| if axes.contains(&d) { 1 } else { s }).collect();
    let mut shape = kept.clone();
    if !node.flag("keepdims", true)? {
        shape = x.shape.iter().enumerate().filter(|(d, _)| !axes.contains(d)).map(|(_, &s)| s).collect();
    }
    let Numbers::Ints(values) = &x.numbers else { return Ok(None) };
    let (start, f): (i64, fn(i64, i64) -> i64) = match node.op_type.as_str() {
        "ReduceProd" => (1, i64::wrapping_mul),
        "ReduceSum" => (0, i64::wrapping_add),
        "ReduceMax" => (i64::MIN, i64::max),
        _ => (i64::MAX, i64::min),
    };
    let mut sums = vec![start; count(&kept).unwrap_or(0)];
    for (&value, place) in values.iter().zip(spread(&kept, &x.shape)) {
        sums[place] = f(sums[place], value);
    }
    Ok(Some(vec![Literal::ints(x.dtype, shape, sums)]))
}

fn unary(node: &Node, x: &Literal) -> Tried<Option<Vec<Literal>>> {
    let numbers = match (&x.numbers, node.op_type.as_str()) {
        (Numbers::Ints(v), "Not") => Numbers::Ints(v.iter().map(|&x| i64::from(x == 0)).collect()),
        (Numbers::Ints(v), "Neg") => Numbers::Ints(v.iter().map(|&x| x.wrapping_neg()).collect()),
        (Numbers::Ints(v), "Abs") => Numbers::Ints(v.iter().map(|&x| x.wrapping_abs()).collect()),
        (Numbers::Ints(v), "Sign") => Numbers::Ints(v.iter().map(|&x| x.signum()).collect()),
        (Numbers::Ints(_), _) => return Ok(None),
        (Numbers::Reals(v), op) => {
            let f: fn(f64) -> f64 = match op {
                "Neg" => |x| -x,
                "Abs" => f64::abs,
                "Sqrt" => f64::sqrt,
                "Floor" => f64::floor,
                "Ceil" => f64::ceil,
                "Exp" => f64::exp,
                "Log" => f64::ln,
                "Sin" => f64::sin,
                "Cos" => f64::cos,
                "Round" => f64::round_ties_even,
                "Reciprocal" => |x| 1.0 / x,
                "Sign" => |x| if x == 0.0 || x.is_nan() { x } else { x.signum() },
                _ => return Ok(None),
            };
            Numbers::Reals(v.iter().map(|&x| f(x)).collect())
        }
    };
    let mut result = Literal { numbers, ..x.clone() };
    if let Numbers::Reals(v) = &mut result.numbers {
        v.iter_mut().for_each(|y| *y = round_to(x.dtype, *y));
    }
    Ok(Some(vec![result]))
}

fn binary(node: &Node, inputs: &Known<'_>) -> Tried<Option<Vec<Literal>>> {
    if inputs.len() != 2 {
        // Min and Max of one or many.
        return Ok(None);
    }
    let (a, b) = (input(inputs, 0)?, input(inputs, 1)?);
    let shape = broadcast(&[&a.shape, &b.shape])?;
    if foldable(&shape).is_none() {
        return Ok(None);
    }
    let op = node.op_type.as_str();
    let truth =
        matches!(op, "Equal" | "Less" | "LessOrEqual" | "Greater" | "GreaterOrEqual" | "And" | "Or" | "Xor");
    let pairs = spread(&a.shape, &shape).zip(spread(&b.shape, &shape));
    let numbers = match (&a.numbers, &b.numbers) {
        (Numbers::Ints(x), Numbers::Ints(y)) => {
            let f: fn(i64, i64) -> i64 = match op {
                "Add" => i64::wrapping_add,
                "Sub" => i64::wrapping_sub,
                "Mul" => i64::wrapping_mul,
                "Div" if y.contains(&0) => return Err(Trouble::wrong("a division by zero")),
                "Div" => i64::wrapping_div,
                "Mod" if y.contains(&0) => return Err(Trouble::wrong("a division by zero")),
                "Mod" if node.flag("fmod", false)? => i64::wrapping_rem,
                // The sign of Python's: that of the divisor.
                "Mod" => |x, y| x.wrapping_rem(y).wrapping_add(y).wrapping_rem(y),
                "Pow" => |x, y| x.wrapping_pow(u32::try_from(y).unwrap_or(0)),
                "Min" => i64::min,
                "Max" => i64::max,
                "And" => |x, y| i64::from(x != 0 && y != 0),
                "Or" => |x, y| i64::from(x != 0 || y != 0),
                "Xor" => |x, y| i64::from((x != 0) != (y != 0)),
                "Equal" => |x, y| i64::from(x == y),
                "Less" => |x, y| i64::from(x < y),
                "LessOrEqual" => |x, y| i64::from(x <= y),
                "Greater" => |x, y| i64::from(x > y),
                _ => |x, y| i64::from(x >= y),
            };
            Numbers::Ints(pairs.map(|(i, j)| f(x[i], y[j])).collect())
        }
        (Numbers::Reals(x), Numbers::Reals(y)) if truth => {
            let f: fn(f64, f64) -> bool = match op {
                "Equal" => |x, y| x == y,
                "Less" => |x, y| x < y,
                "LessOrEqual" => |x, y| x <= y,
                "Greater" => |x, y| x > y,
                "GreaterOrEqual" => |x, y| x >= y,
                _ => return Ok(None),
            };
            Numbers::Ints(pairs.map(|(i, j)| i64::from(f(x[i], y[j]))).collect())
        }
        (Numbers::Reals(x), Numbers::Reals(y)) => {
            let f: fn(f64, f64) -> f64 = match op {
                "Add" => |x, y| x + y,
                "Sub" => |x, y| x - y,
                "Mul" => |x, y| x * y,
                "Div" => |x, y| x / y,
                "Pow" => f64::powf,
                "Min" => f64::min,
                "Max" => f64::max,
                _ => return Ok(None),
            };
            Numbers::Reals(pairs.map(|(i, j)| round_to(a.dtype, f(x[i], y[j]))).collect())
        }
        // Pow may mix its types.
        _ => return Ok(None),
    };
    let dtype = if truth { DType::Bool } else { a.dtype };
    Ok(Some(vec![Literal { dtype, shape, numbers, assumed: false }]))
}
