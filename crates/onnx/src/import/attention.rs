//! The Attention op of opset 23 and later, and rotary embedding.
//!
//! Attention is the fused op. Soft caps, lengths per sample, scores as an output and wider softmaxes than the op's need the
//! scores: those are products, masks and softmax, as in plain `layers::attention`.

use super::{
    Import,
    elementwise::{affine, apply, binary, number},
    movement::{reshaped_view, single_atom, take},
};
use crate::{
    align::elementwise,
    contraction::{Product, product},
    error::{NodeError, NodeResult},
    importer::{Base, Importer},
    literal::Literal,
    proto::Node,
    storage::{MOST_FOLDED, attribute_type},
    view::View,
};
use shardwright_graph::{
    DType, Dims, Real, TensorId,
    ops::{Attention, BinaryFn, Cast, Compare, CompareFn, Concat, Gather, Pad, Select, Softmax, UnaryFn},
};

pub(super) fn find(op: &str) -> Option<Import> {
    Some(match op {
        "Attention" => attention,
        "RotaryEmbedding" => rotary_embedding,
        _ => return None,
    })
}

/// `[n, s, h*d]` as `[n, h, s, d]`; a tensor of four dimensions is returned unchanged.
fn heads(cx: &mut Importer<'_>, x: &View, count: i64) -> NodeResult<View> {
    let shape = x.shape();
    let &[n, s, width] = shape.as_slice() else {
        return if shape.len() == 4 { Ok(x.clone()) } else { Err(NodeError::invalid(format!("{shape:?}"))) };
    };
    let count = u64::try_from(count).ok().filter(|&h| h > 0 && width.is_multiple_of(h));
    let count = count.ok_or_else(|| {
        NodeError::invalid(format!("the number of heads does not divide the width {width}"))
    })?;
    Ok(reshaped_view(cx, x, &[n, s, count, width / count])?.transpose(&[0, 2, 1, 3]))
}

/// Sizes: samples, key heads, queries per key head, queries, keys, and keys of earlier calls.
struct AttentionSizes {
    n: u64,
    key_heads: u64,
    group: u64,
    q: u64,
    k: u64,
    past: u64,
}

impl AttentionSizes {
    fn heads(&self) -> u64 {
        self.key_heads * self.group
    }
}

/// Keys or values of earlier calls, followed by those of this call.
fn with_past(cx: &mut Importer<'_>, node: &Node, input: usize, now: View) -> NodeResult<(View, u64)> {
    if !cx.given(node, input) {
        return Ok((now, 0));
    }
    let past = cx.view(node, input)?;
    let &[_, _, length, _] = past.shape().as_slice() else {
        return Err(NodeError::invalid(format!(
            "past keys and values must be [n, heads, s, size], got shape {:?}",
            past.shape()
        )));
    };
    let parts = [cx.plain(&past)?, cx.plain(&now)?];
    let all = cx.emit(if input == 4 { "keys" } else { "values" }, Concat { axis: 2 }, &parts)?;
    Ok((cx.seen(all), length))
}

fn attention(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    const KNOWN: [&str; 9] = [
        "is_causal",
        "kv_num_heads",
        "left_window_size",
        "q_num_heads",
        "qk_matmul_output_mode",
        "right_window_size",
        "scale",
        "softcap",
        "softmax_precision",
    ];
    if let Some(other) = node.attribute.iter().find(|a| !KNOWN.contains(&a.name.as_str())) {
        return Err(NodeError::unsupported(format!("attribute `{}`", crate::error::shown(&other.name))));
    }
    let given = cx.view(node, 0)?;
    let (query_heads, key_heads) = (node.int("q_num_heads", 0)?, node.int("kv_num_heads", 0)?);
    let (key, value) = (cx.view(node, 1)?, cx.view(node, 2)?);
    let query = heads(cx, &given, query_heads)?;
    let (key, value) = (heads(cx, &key, key_heads)?, heads(cx, &value, key_heads)?);
    let (key, past) = with_past(cx, node, 4, key)?;
    let (value, _) = with_past(cx, node, 5, value)?;
    for (i, present) in [(1, &key), (2, &value)] {
        cx.output_view(node, i, present.clone());
    }
    let (q, k) = (query.shape(), key.shape());
    if k[1] == 0 || q[1] % k[1] != 0 {
        return Err(NodeError::invalid(format!(
            "{} query heads cannot share {} key heads equally",
            q[1], k[1]
        )));
    }
    let sizes = AttentionSizes { n: q[0], key_heads: k[1], group: q[1] / k[1], q: q[2], k: k[2], past };
    let scale = node.float("scale", 1.0 / (q[3] as f64).sqrt())?;
    if cx.fuse_attention && needs_no_scores(cx, node)? {
        let y = fused(cx, node, &sizes, [query, key, value], scale)?;
        let (shape, size) = (y.shape(), y.shape()[3]);
        let y = match given.rank() {
            3 => reshaped_view(cx, &y.transpose(&[0, 2, 1, 3]), &[shape[0], shape[2], shape[1] * size])?,
            _ => y,
        };
        cx.output_view(node, 0, y);
        return Ok(());
    }
    // Grouped queries: the group that shares a key head is a separate dimension.
    let query = reshaped_view(cx, &query, &[q[0], k[1], sizes.group, q[2], q[3]])?;
    let query = View { scale: query.scale * scale, ..query };
    let scores = Product { labels: [b"nhrqd", b"nhkd"], result: b"nhrqk", cuts: &[] };
    let scores = product(cx, "scores", &query, &key, &scores)?;
    let mode = node.int("qk_matmul_output_mode", 0)?;
    returned(cx, node, &sizes, &scores, mode == 0)?;
    let scores = capped(cx, &scores, node.float("softcap", 0.0)?)?;
    returned(cx, node, &sizes, &scores, mode == 1)?;
    let scores = masked(cx, node, &sizes, scores)?;
    returned(cx, node, &sizes, &scores, mode == 2)?;
    let weights = softmax(cx, node, &scores)?;
    returned(cx, node, &sizes, &weights, mode == 3)?;
    let context = Product { labels: [b"nhrqk", b"nhkd"], result: b"nhrqd", cuts: &[] };
    let y = product(cx, "", &weights, &value, &context)?;
    let size = value.shape()[3];
    let y = reshaped_view(cx, &y, &[q[0], q[1], q[2], size])?;
    let y = match given.rank() {
        3 => reshaped_view(cx, &y.transpose(&[0, 2, 1, 3]), &[q[0], q[2], q[1] * size])?,
        _ => y,
    };
    cx.output_view(node, 0, y);
    Ok(())
}

/// Whether the fused op computes what the node does.
fn needs_no_scores(cx: &Importer<'_>, node: &Node) -> NodeResult<bool> {
    let returned = node.output.get(3).is_some_and(|output| !output.is_empty());
    let precision = match node.int("softmax_precision", 0)? {
        0 => None,
        onnx => Some(attribute_type(onnx)?),
    };
    // The fused op computes in f32, or in f64 for operands of f64.
    let precise = precision.is_none_or(|dtype| dtype != DType::F64);
    Ok(!returned && precise && !cx.given(node, 6) && node.float("softcap", 0.0)? <= 0.0)
}

/// Attention of `[n, h, s, d]` views by the fused op, in the order in which the queries are stored.
fn fused(
    cx: &mut Importer<'_>,
    node: &Node,
    sizes: &AttentionSizes,
    operands: [View; 3],
    scale: f64,
) -> NodeResult<View> {
    let limit = |size: i64| u64::try_from(size).ok();
    let mut op = Attention::new(scale * operands[0].scale * operands[1].scale, sizes.q, sizes.k);
    op.before = limit(node.int("left_window_size", -1)?);
    op.after =
        if node.flag("is_causal", false)? { Some(0) } else { limit(node.int("right_window_size", -1)?) };
    op.diagonal = sizes.past as i64;
    let turned = |view: &View| view.transpose(&[0, 2, 1, 3]);
    op.heads_first = !turned(&operands[0]).in_order();
    let mut inputs = Vec::with_capacity(4);
    for (i, view) in operands.into_iter().enumerate() {
        // The factors of queries and keys are factors of the scores.
        let view = if i < 2 { View { scale: 1.0, ..view } } else { view };
        inputs.push(if op.heads_first { cx.plain(&view)? } else { cx.plain(&turned(&view))? });
    }
    if cx.given(node, 3) {
        let mask = cx.view(node, 3)?;
        let bias = bias(cx, sizes, &mask, cx.b.ty(inputs[0]).dtype)?;
        inputs.push(bias);
    }
    let heads_first = op.heads_first;
    let y = cx.add("", op, &inputs)?[0];
    let y = cx.seen(y);
    Ok(if heads_first { y } else { turned(&y) })
}

/// A mask as numbers that are added to scores `[n, h, q, k]`.
fn bias(cx: &mut Importer<'_>, sizes: &AttentionSizes, mask: &View, dtype: DType) -> NodeResult<TensorId> {
    let (mask, _) = mask_of_scores(cx, sizes, mask)?;
    let numbers = if cx.dtype(&mask) == DType::Bool {
        let shown = number(cx, "shown", dtype, 0.0)?;
        hidden(cx, "bias", &shown, mask)?
    } else {
        mask
    };
    cx.plain(&numbers)
}

/// Binds the scores if they are an output that is read.
fn returned(
    cx: &mut Importer<'_>,
    node: &Node,
    sizes: &AttentionSizes,
    scores: &View,
    now: bool,
) -> NodeResult {
    if now && node.output.get(3).is_some_and(|o| !o.is_empty()) {
        let scores = reshaped_view(cx, scores, &[sizes.n, sizes.heads(), sizes.q, sizes.k])?;
        cx.output_view(node, 3, scores);
    }
    Ok(())
}

/// Scores limited to `-cap..cap` by tanh.
fn capped(cx: &mut Importer<'_>, scores: &View, cap: f64) -> NodeResult<View> {
    if cap <= 0.0 {
        return Ok(scores.clone());
    }
    let share = affine(cx, "share_of_cap", scores, 1.0 / cap, 0.0)?;
    let share = apply(cx, "cap", UnaryFn::Tanh, &share)?;
    affine(cx, "capped_scores", &share, cap, 0.0)
}

/// The softmax, in the requested precision.
fn softmax(cx: &mut Importer<'_>, node: &Node, scores: &View) -> NodeResult<View> {
    let own = cx.dtype(scores);
    let precision = match node.int("softmax_precision", 0)? {
        0 => own,
        onnx => attribute_type(onnx)?,
    };
    let cast = |cx: &mut Importer<'_>, x: &View, dtype: DType| match cx.dtype(x) == dtype {
        true => Ok(x.clone()),
        false => elementwise(cx, "precision", Cast { dtype }, std::slice::from_ref(x)),
    };
    let scores = cast(cx, scores, precision)?;
    let (view, tensor, axis) = single_atom(cx, &scores, 4)?;
    let weights = cx.emit("weights", Softmax { axis }, &[tensor])?;
    cast(cx, &view.of(Base::Tensor(weights)), own)
}

/// Scores with all masks applied.
fn masked(cx: &mut Importer<'_>, node: &Node, sizes: &AttentionSizes, mut scores: View) -> NodeResult<View> {
    let window = [node.int("left_window_size", -1)?, node.int("right_window_size", -1)?];
    let causal = node.flag("is_causal", false)?;
    let lengths = if cx.given(node, 6) { Some(cx.view(node, 6)?) } else { None };
    if causal || window != [-1, -1] || lengths.is_some() {
        if sizes.q.saturating_mul(sizes.k) > MOST_FOLDED as u64 {
            return Err(NodeError::unsupported("a mask of more than four million elements"));
        }
        let right = if causal { 0 } else { window[1] };
        match lengths {
            None => scores = within(cx, sizes, &scores, window[0], right)?,
            Some(lengths) => scores = within_lengths(cx, sizes, &scores, &lengths, window[0], right)?,
        }
    }
    if cx.given(node, 3) {
        let mask = cx.view(node, 3)?;
        scores = under_mask(cx, sizes, &scores, &mask)?;
    }
    Ok(scores)
}

/// Sets scores to minus infinity where `seen` is false.
fn hidden(cx: &mut Importer<'_>, what: &str, scores: &View, seen: View) -> NodeResult<View> {
    let never = number(cx, "never", cx.dtype(scores), f64::NEG_INFINITY)?;
    elementwise(cx, what, Select {}, &[seen, scores.clone(), never])
}

/// Masks keys outside the window from `left` before a query to `right` after it; a negative limit is no limit.
fn within(
    cx: &mut Importer<'_>,
    sizes: &AttentionSizes,
    scores: &View,
    left: i64,
    right: i64,
) -> NodeResult<View> {
    let (q, k) = (sizes.q as i64, sizes.k as i64);
    let seen = |i: i64| {
        let ahead = i % k - (i / k + sizes.past as i64);
        i64::from((left < 0 || -ahead <= left) && (right < 0 || ahead <= right))
    };
    let name = format!("{}.causal", cx.name);
    let seen = (0..q * k).map(seen).collect();
    let seen = cx.constant(&name, &Literal::ints(DType::Bool, vec![sizes.q, sizes.k], seen))?;
    hidden(cx, "causal_scores", scores, seen)
}

/// The same if each sample has a length: its keys are filled up to it, and its queries are the last of them.
fn within_lengths(
    cx: &mut Importer<'_>,
    sizes: &AttentionSizes,
    scores: &View,
    lengths: &View,
    left: i64,
    right: i64,
) -> NodeResult<View> {
    let (q, k) = (sizes.q as i64, sizes.k as i64);
    let lengths = reshaped_view(cx, lengths, &[sizes.n, 1, 1, 1, 1])?;
    let dtype = cx.dtype(&lengths);
    let mut scores = scores.clone();
    // Key j is filled if j < length; it is j - i + q - length positions ahead of query i.
    let filled = (0..k).collect();
    let mut limits = vec![("filled", vec![1, sizes.k], filled, CompareFn::Lt)];
    let ahead = |slack: i64| (0..q * k).map(|i| i % k - i / k + q - slack).collect::<Vec<i64>>();
    if right >= 0 {
        limits.push(("causal", vec![sizes.q, sizes.k], ahead(right), CompareFn::Le));
    }
    if left >= 0 {
        limits.push(("window", vec![sizes.q, sizes.k], ahead(-left), CompareFn::Ge));
    }
    for (what, shape, positions, f) in limits {
        let name = format!("{}.{what}", cx.name);
        let positions = cx.constant(&name, &Literal::ints(dtype, shape, positions))?;
        let seen = elementwise(cx, what, Compare { f }, &[positions, lengths.clone()])?;
        scores = hidden(cx, &format!("{what}_scores"), &scores, seen)?;
    }
    Ok(scores)
}

/// A mask with four dimensions, as the scores `[n, h, q, k]`, and its shape. Keys beyond the mask's end are hidden.
fn mask_of_scores(
    cx: &mut Importer<'_>,
    sizes: &AttentionSizes,
    mask: &View,
) -> NodeResult<(View, [u64; 4])> {
    let mut mask = mask.clone();
    // A single number broadcasts like a dimension of size one.
    let given = mask.shape().last().copied().unwrap_or(1);
    let truth = cx.dtype(&mask) == DType::Bool;
    if given < sizes.k && (given > 1 || mask.rank() == 0) {
        let none = Dims::from_elem(0, mask.rank());
        let mut high = none.clone();
        if let Some(last) = high.last_mut() {
            *last = sizes.k - given;
        }
        let value = Real(if truth { 0.0 } else { f64::NEG_INFINITY });
        let tensor = cx.plain(&mask)?;
        let padded = cx.emit("mask", Pad { low: none.clone(), high, interior: none, value }, &[tensor])?;
        mask = cx.seen(padded);
    }
    let mut shape = mask.shape();
    while shape.len() < 4 {
        shape.insert(0, 1);
    }
    let &[n, h, q, k] = shape.as_slice() else {
        return Err(NodeError::invalid(format!(
            "a mask of shape {shape:?} does not have up to four dimensions"
        )));
    };
    Ok((reshaped_view(cx, &mask, &shape)?, [n, h, q, k]))
}

/// Applies a mask: false truth values hide keys, numbers are added to scores.
fn under_mask(cx: &mut Importer<'_>, sizes: &AttentionSizes, scores: &View, mask: &View) -> NodeResult<View> {
    let (mask, [n, h, q, k]) = mask_of_scores(cx, sizes, mask)?;
    let truth = cx.dtype(&mask) == DType::Bool;
    let heads = sizes.heads();
    let grouped = if h == heads { [n, sizes.key_heads, sizes.group, q, k] } else { [n, 1, h, q, k] };
    let mask = reshaped_view(cx, &mask, &grouped)?;
    if truth {
        return hidden(cx, "masked_scores", scores, mask);
    }
    binary(cx, "masked_scores", BinaryFn::Add, scores, &mask)
}

/// Rotates pairs of channels by angles that depend on the position.
fn rotary_embedding(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let x = cx.view(node, 0)?;
    let given = x.shape();
    // As [n, s, h, d].
    let seen = heads(cx, &x, node.int("num_heads", 0)?)?.transpose(&[0, 2, 1, 3]);
    let shape = seen.shape();
    let size = match u64::try_from(node.int("rotary_embedding_dim", 0)?) {
        Ok(0) => shape[3],
        Ok(size) if size <= shape[3] => size,
        _ => return Err(NodeError::invalid(format!("the rotation covers more than {} channels", shape[3]))),
    };
    if size % 2 != 0 || size == 0 {
        return Err(NodeError::invalid(format!("{size} channels cannot form pairs")));
    }
    let half = size / 2;
    let mut angles = Vec::with_capacity(2);
    for input in [1, 2] {
        let mut table = cx.view(node, input)?;
        if cx.given(node, 3) {
            let ids = cx.tensor(node, 3)?;
            let Some(&extent) = table.shape().first() else {
                return Err(NodeError::invalid("the table of angles is a single number"));
            };
            let seen = cx.seen(ids);
            cx.indexes(&seen, extent);
            cx.freeze(&table);
            let rows = cx.plain(&table)?;
            let op = Gather { axis: 0, base: 0, extent };
            let taken = cx.emit(if input == 1 { "cos" } else { "sin" }, op, &[rows, ids])?;
            table = cx.seen(taken);
        }
        let &[n, s, width] = table.shape().as_slice() else {
            return Err(NodeError::invalid(format!(
                "angles of shape {:?} do not fit the input",
                table.shape()
            )));
        };
        if width != half {
            return Err(NodeError::invalid(format!("{width} angles do not match {half} pairs of channels")));
        }
        angles.push(reshaped_view(cx, &table, &[n, s, 1, width])?);
    }
    let turned = take(cx, "turned", &seen, 3, 0, size)?;
    let interleaved = node.flag("interleaved", false)?;
    let paired = if interleaved {
        [shape[0], shape[1], shape[2], half, 2]
    } else {
        [shape[0], shape[1], shape[2], 2, half]
    };
    let axis = if interleaved { 4 } else { 3 };
    let pairs = reshaped_view(cx, &turned, &paired)?;
    let mut parts = Vec::with_capacity(2);
    for i in 0..2 {
        let mut part = take(cx, &i.to_string(), &pairs, axis, i, 1)?;
        part.dims.remove(axis);
        parts.push(part);
    }
    let (cos, sin, a, b) = (&angles[0], &angles[1], &parts[0], &parts[1]);
    let product =
        |cx: &mut Importer<'_>, what: &str, x: &View, angle: &View| binary(cx, what, BinaryFn::Mul, x, angle);
    let (ac, bs) = (product(cx, "a_cos", a, cos)?, product(cx, "b_sin", b, sin)?);
    let (as_, bc) = (product(cx, "a_sin", a, sin)?, product(cx, "b_cos", b, cos)?);
    let real = binary(cx, "real", BinaryFn::Sub, &ac, &bs)?;
    let imaginary = binary(cx, "imaginary", BinaryFn::Add, &as_, &bc)?;
    let mut one = paired.to_vec();
    one[axis] = 1;
    let mut tensors = Vec::with_capacity(2);
    for part in [real, imaginary] {
        let part = reshaped_view(cx, &part, &one)?;
        tensors.push(cx.plain(&part)?);
    }
    let joined = cx.emit("pairs", Concat { axis }, &tensors)?;
    let joined = cx.seen(joined);
    let mut y = reshaped_view(cx, &joined, &[shape[0], shape[1], shape[2], size])?;
    if size < shape[3] {
        let rest = take(cx, "rest", &seen, 3, size, shape[3] - size)?;
        let tensors = [cx.plain(&y)?, cx.plain(&rest)?];
        let whole = cx.emit("", Concat { axis: 3 }, &tensors)?;
        y = cx.seen(whole);
    }
    let y = if given.len() == 4 { y.transpose(&[0, 2, 1, 3]) } else { reshaped_view(cx, &y, &given)? };
    cx.output_view(node, 0, y);
    Ok(())
}
