//! Ops that rearrange, repeat or drop elements: padding, tiling, triangles, one-hot.

use super::{
    Import,
    elementwise::{affine, number},
    gather::from_start,
    movement::{reshaped_view, take},
};
use crate::{
    align::elementwise,
    contraction::{Product, product},
    error::{NodeError, NodeResult},
    fold::{axis_of, fill_value},
    importer::{Importer, NodeValue},
    literal::Literal,
    proto::Node,
    storage::{MOST_FOLDED, attribute_type, sizes},
    view::View,
};
use shardwright_graph::{
    DType, Dims, Real, Shape, TensorType,
    ops::{Broadcast, Cast, Cumsum, Fill, Gather, OneHot, Pad, Select},
};

pub(super) fn find(op: &str) -> Option<Import> {
    Some(match op {
        "Pad" => pad,
        "Tile" => tile,
        "ConstantOfShape" => constant_of_shape,
        "DepthToSpace" => depth_to_space,
        "SpaceToDepth" => space_to_depth,
        "Trilu" => trilu,
        "CumSum" => cumsum,
        "OneHot" => one_hot,
        "EyeLike" => eye_like,
        "Range" => |_, _| Err(NodeError::unsupported("limits that depend on the data")),
        _ => return None,
    })
}

/// A constant that is too large to be folded.
fn constant_of_shape(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let shape = sizes(cx.known(node, 0, "shapes")?.as_ints()?)?;
    let value = fill_value(node)?;
    let ty = TensorType::new(value.dtype, shape);
    let number = value.scalar().ok_or_else(|| NodeError::invalid("`value` must be a single number"))?;
    let y = cx.emit("", Fill { value: Real(number), ty }, &[])?;
    cx.output(node, 0, y);
    Ok(())
}

/// Takes positions of one dimension by their indices.
pub(super) fn pick(cx: &mut Importer<'_>, x: &View, dim: usize, ids: Vec<i64>) -> NodeResult<View> {
    if ids.len() > MOST_FOLDED {
        return Err(NodeError::unsupported("a dimension of more than four million elements"));
    }
    let name = format!("{}.ids", cx.name);
    let ids = cx.constant(&name, &Literal::list(ids))?;
    let ids = cx.plain(&ids)?;
    let table = cx.plain(x)?;
    let y = cx.emit("", Gather { axis: dim, base: 0, extent: x.size(dim) }, &[table, ids])?;
    Ok(cx.seen(y))
}

fn pad(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let mut x = cx.view(node, 0)?;
    let pads = cx.int_list(node, 1, "pads")?.ok_or_else(|| NodeError::invalid("the pads are missing"))?;
    let axes = match cx.int_list(node, 3, "axes")? {
        Some(axes) => axes.iter().map(|&a| axis_of(a, x.rank())).collect::<NodeResult<Vec<_>>>()?,
        None => (0..x.rank()).collect(),
    };
    if pads.len() != 2 * axes.len() || pads.iter().any(|p| p.unsigned_abs() > 1 << 40) {
        return Err(NodeError::invalid(format!("pads {pads:?} do not fit {} dimensions", axes.len())));
    }
    let mode = node.text("mode", "constant")?;
    let (mut low, mut high) = (Dims::from_elem(0, x.rank()), Dims::from_elem(0, x.rank()));
    for (i, &dim) in axes.iter().enumerate() {
        let (before, after) = (pads[i], pads[axes.len() + i]);
        // A negative pad removes elements.
        let (cut, rest) = ((-before).max(0) as u64, (-after).max(0) as u64);
        let kept = x.size(dim).checked_sub(cut).and_then(|n| n.checked_sub(rest)).filter(|&n| n > 0);
        let kept = kept.ok_or_else(|| NodeError::invalid("the pads remove a whole dimension"))?;
        x = take(cx, "cut", &x, dim, cut, kept)?;
        let (before, after) = (before.max(0), after.max(0));
        if mode == "constant" {
            (low[dim], high[dim]) = (before as u64, after as u64);
        } else if before + after > 0 {
            let size = kept as i64;
            let place = |i: i64| match mode.as_str() {
                "edge" => Ok(i.clamp(0, size - 1)),
                "wrap" => Ok(i.rem_euclid(size)),
                "reflect" if size == 1 => Ok(0),
                "reflect" => {
                    let period = i.rem_euclid(2 * (size - 1));
                    Ok(period.min(2 * (size - 1) - period))
                }
                other => Err(NodeError::invalid(format!("unknown mode `{other}`"))),
            };
            if before + after + size > MOST_FOLDED as i64 {
                return Err(NodeError::unsupported("a dimension of more than four million elements"));
            }
            let ids = (-before..size + after).map(place).collect::<NodeResult<Vec<_>>>()?;
            x = pick(cx, &x, dim, ids)?;
        }
    }
    if low.iter().chain(&high).any(|&p| p > 0) {
        let value = match cx.given(node, 2) {
            true => cx.known_number(node, 2, "pad values")?,
            false => 0.0,
        };
        let interior = Dims::from_elem(0, x.rank());
        let tensor = cx.plain(&x)?;
        let y = cx.emit("", Pad { low, high, interior, value: Real(value) }, &[tensor])?;
        x = cx.seen(y);
    }
    cx.output_view(node, 0, x);
    Ok(())
}

/// `[a, b]` tiled by `(r, s)` is `[1, a, 1, b]` repeated to `[r, a, s, b]`, seen as `[r*a, s*b]`.
fn tile(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let x = cx.view(node, 0)?;
    let mut repeats = sizes(cx.known(node, 1, "repeats")?.as_ints()?)?;
    let from = x.shape();
    if let (Some(&1), Some(first), Some((old, new))) = (from.first(), repeats.first_mut(), cx.rebatch.change)
        && *first == old
    {
        // One row repeated for every sample of the file's batch.
        *first = new;
    }
    if repeats.len() != from.len() || repeats.contains(&0) {
        return Err(NodeError::invalid(format!("repeats {repeats:?} do not fit shape {from:?}")));
    }
    let tensor = cx.plain(&x)?;
    let spread: Shape = repeats.iter().zip(&from).flat_map(|(&r, &s)| [r, s]).collect();
    let dims = (0..from.len()).map(|d| 2 * d + 1).collect();
    let y = cx.emit("", Broadcast { shape: spread, dims }, &[tensor])?;
    let target: Option<Vec<u64>> = repeats.iter().zip(&from).map(|(r, s)| r.checked_mul(*s)).collect();
    let target =
        target.ok_or_else(|| NodeError::invalid("the result has more elements than can be counted"))?;
    let seen = cx.seen(y);
    let y = reshaped_view(cx, &seen, &target)?;
    cx.output_view(node, 0, y);
    Ok(())
}

/// The input `[n, c, h, w]` and the block size.
fn blocks(cx: &mut Importer<'_>, node: &Node) -> NodeResult<(View, [u64; 4], u64)> {
    let x = cx.view(node, 0)?;
    let &[n, c, h, w] = x.shape().as_slice() else {
        return Err(NodeError::invalid(format!("the input must be [n, c, h, w], got shape {:?}", x.shape())));
    };
    let block = u64::try_from(node.int("blocksize", 0)?).ok().filter(|b| (1..1 << 16).contains(b));
    Ok((x, [n, c, h, w], block.ok_or_else(|| NodeError::invalid("the block size is out of range"))?))
}

fn depth_to_space(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let (x, [n, c, h, w], b) = blocks(cx, node)?;
    if c % (b * b) != 0 {
        return Err(NodeError::invalid(format!("{c} channels cannot form blocks of {b} by {b}")));
    }
    let (sizes, order) = match node.text("mode", "DCR")?.as_str() {
        "DCR" => ([n, b, b, c / (b * b), h, w], [0, 3, 4, 1, 5, 2]),
        _ => ([n, c / (b * b), b, b, h, w], [0, 1, 4, 2, 5, 3]),
    };
    let y = reshaped_view(cx, &x, &sizes)?.transpose(&order);
    let y = reshaped_view(cx, &y, &[n, c / (b * b), h * b, w * b])?;
    cx.output_view(node, 0, y);
    Ok(())
}

fn space_to_depth(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let (x, [n, c, h, w], b) = blocks(cx, node)?;
    if h % b != 0 || w % b != 0 {
        return Err(NodeError::invalid(format!(
            "an image of {h} by {w} cannot be divided into blocks of {b}"
        )));
    }
    let order = match node.text("mode", "DCR")?.as_str() {
        "DCR" => [0, 3, 5, 1, 2, 4],
        _ => [0, 1, 3, 5, 2, 4],
    };
    let y = reshaped_view(cx, &x, &[n, c, h / b, b, w / b, b])?.transpose(&order);
    let y = reshaped_view(cx, &y, &[n, c * b * b, h / b, w / b])?;
    cx.output_view(node, 0, y);
    Ok(())
}

fn trilu(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let x = cx.view(node, 0)?;
    let &[.., rows, columns] = x.shape().as_slice() else {
        return Err(NodeError::invalid("the input needs at least two dimensions"));
    };
    let k = match cx.int_list(node, 1, "diagonals")?.as_deref() {
        None => 0,
        Some(&[k]) => k,
        Some(_) => return Err(NodeError::invalid("the diagonal `k` must be a single number")),
    };
    let upper = node.flag("upper", true)?;
    if rows.saturating_mul(columns) > MOST_FOLDED as u64 {
        return Err(NodeError::unsupported("a matrix of more than four million elements"));
    }
    let kept = |i: u64| {
        let offset = (i % columns) as i64 - (i / columns) as i64;
        i64::from(if upper { offset >= k } else { offset <= k })
    };
    let mask = Literal::ints(DType::Bool, vec![rows, columns], (0..rows * columns).map(kept).collect());
    let name = format!("{}.mask", cx.name);
    let mask = cx.constant(&name, &mask)?;
    let zero = number(cx, "zero", cx.dtype(&x), 0.0)?;
    let y = elementwise(cx, "", Select {}, &[mask, x, zero])?;
    cx.output_view(node, 0, y);
    Ok(())
}

fn cumsum(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let x = cx.view(node, 0)?;
    let axis = cx.known_number(node, 1, "axes")? as i64;
    let op = Cumsum {
        axis: axis_of(axis, x.rank())?,
        exclusive: node.flag("exclusive", false)?,
        reverse: node.flag("reverse", false)?,
    };
    let x = cx.plain(&x)?;
    let y = cx.emit("", op, &[x])?;
    cx.output(node, 0, y);
    Ok(())
}

/// Ones on a diagonal, in the shape of the input.
fn eye_like(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let x = cx.view(node, 0)?;
    let &[rows, columns] = x.shape().as_slice() else {
        return Err(NodeError::invalid(format!("the input must be a matrix, got shape {:?}", x.shape())));
    };
    if rows.saturating_mul(columns) > MOST_FOLDED as u64 {
        return Err(NodeError::unsupported("a matrix of more than four million elements"));
    }
    let k = node.int("k", 0)?;
    let dtype = match node.has("dtype") {
        true => attribute_type(node.int("dtype", 0)?)?,
        false => cx.dtype(&x),
    };
    let on = |i: u64| i64::from((i % columns) as i64 - (i / columns) as i64 == k);
    let eye = Literal::ints(DType::I64, vec![rows, columns], (0..rows * columns).map(on).collect());
    cx.budget.elements(eye.len())?;
    if let Some(output) = node.output.first() {
        cx.bind(output, NodeValue::Known(eye.cast(dtype).into()));
    }
    Ok(())
}

fn one_hot(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let ids = cx.view(node, 0)?;
    let depth = cx.known_number(node, 1, "depths")?;
    let values = cx.known(node, 2, "values")?.to_reals();
    let (&[off, on], true) = (values.as_slice(), (1.0..4e9).contains(&depth)) else {
        return Err(NodeError::invalid("`depth` and `values` must be a depth, an off value and an on value"));
    };
    let axis = axis_of(node.int("axis", -1)?, ids.rank() + 1)?;
    let mut tensor = cx.plain(&ids)?;
    if !cx.b.ty(tensor).dtype.is_int() {
        tensor = cx.emit("ids", Cast { dtype: DType::I64 }, &[tensor])?;
    }
    let ids_seen = cx.seen(tensor);
    let from_start = from_start(cx, &ids_seen, depth as u64)?;
    let tensor = cx.plain(&from_start)?;
    let y = cx.emit("", OneHot { depth: depth as u64, base: 0, dtype: DType::F32 }, &[tensor])?;
    let hot = cx.seen(y);
    let mut hot = affine(cx, "values", &hot, on - off, off)?;
    let dtype = cx.known(node, 2, "values")?.dtype;
    if dtype != DType::F32 {
        hot = elementwise(cx, "cast", Cast { dtype }, &[hot])?;
    }
    let mut order: Vec<usize> = (0..ids.rank()).collect();
    order.insert(axis, ids.rank());
    cx.output_view(node, 0, hot.transpose(&order));
    Ok(())
}

/// A product with a matrix along one dimension. `weights` lists, per position of the result, positions of the input and
/// their weights.
pub(super) fn weighted(
    cx: &mut Importer<'_>,
    what: &str,
    x: &View,
    dim: usize,
    weights: &[Vec<(u64, f64)>],
) -> NodeResult<View> {
    let (input, output) = (x.size(dim) as usize, weights.len());
    let mut matrix = vec![0.0; input * output];
    for (o, weights) in weights.iter().enumerate() {
        for &(i, weight) in weights {
            matrix[o * input + i as usize] += weight;
        }
    }
    let literal = Literal::reals(cx.dtype(x), vec![output as u64, input as u64], matrix);
    let name = format!("{}.weights", cx.name);
    let matrix = cx.constant(&name, &literal)?;
    let all = b"nchwdefgabijlmpr";
    let labels =
        all.get(..x.rank()).ok_or_else(|| NodeError::invalid("the input has too many dimensions"))?;
    let mut result = labels.to_vec();
    result[dim] = b'o';
    let spec = Product { labels: [labels, &[b'o', labels[dim]]], result: &result, cuts: &[] };
    product(cx, what, x, &matrix, &spec)
}
