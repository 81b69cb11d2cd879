//! The Attention op of opset 23: products, mask and softmax, as `layers::attention` has them.

use super::{
    Import,
    elementwise::{binary, number},
    movement::{reshaped_view, single_atom},
};
use crate::onnx::{
    align::elementwise,
    contraction::{Product, product},
    error::{Tried, Trouble},
    importer::{Base, Importer},
    literal::Literal,
    proto::Node,
    view::View,
};
use shardwright_graph::{
    DType,
    ops::{BinaryFn, Select, Softmax},
};

pub(super) fn find(op: &str) -> Option<Import> {
    Some(match op {
        "Attention" => attention,
        _ => return None,
    })
}

/// `[n, s, h*d]` as `[n, h, s, d]`; four dimensions stay as they are.
fn heads(cx: &mut Importer<'_>, x: &View, count: i64) -> Tried<View> {
    let shape = x.shape();
    let &[n, s, width] = shape.as_slice() else {
        return if shape.len() == 4 { Ok(x.clone()) } else { Err(Trouble::wrong(format!("{shape:?}"))) };
    };
    let count = u64::try_from(count).ok().filter(|&h| h > 0 && width.is_multiple_of(h));
    let count = count.ok_or_else(|| Trouble::wrong(format!("heads that do not divide {width}")))?;
    Ok(reshaped_view(cx, x, &[n, s, count, width / count])?.transpose(&[0, 2, 1, 3]))
}

fn attention(cx: &mut Importer<'_>, node: &Node) -> Tried {
    if (4..node.input.len()).any(|i| cx.given(node, i)) || node.output.iter().skip(1).any(|o| !o.is_empty()) {
        return Err(Trouble::unsupported("past keys and values, or scores that are returned"));
    }
    const KNOWN: [&str; 7] = [
        "is_causal",
        "kv_num_heads",
        "q_num_heads",
        "qk_matmul_output_mode",
        "scale",
        "softcap",
        "softmax_precision",
    ];
    if let Some(other) = node.attribute.iter().find(|a| !KNOWN.contains(&a.name.as_str())) {
        return Err(Trouble::unsupported(format!("attribute `{}`", crate::onnx::error::shown(&other.name))));
    }
    if node.float("softcap", 0.0)? != 0.0 {
        return Err(Trouble::unsupported("a soft cap"));
    }
    let given = cx.view(node, 0)?;
    let (query_heads, key_heads) = (node.int("q_num_heads", 0)?, node.int("kv_num_heads", 0)?);
    let (key, value) = (cx.view(node, 1)?, cx.view(node, 2)?);
    let query = heads(cx, &given, query_heads)?;
    let (key, value) = (heads(cx, &key, key_heads)?, heads(cx, &value, key_heads)?);
    let (q, k) = (query.shape(), key.shape());
    if k[1] == 0 || q[1] % k[1] != 0 {
        return Err(Trouble::wrong(format!("{} query heads share {} key heads", q[1], k[1])));
    }
    let scale = node.float("scale", 1.0 / (q[3] as f64).sqrt())?;
    // Grouped queries: the group that shares a key head is a dimension of its own.
    let groups = q[1] / k[1];
    let query = reshaped_view(cx, &query, &[q[0], k[1], groups, q[2], q[3]])?;
    let query = View { scale: query.scale * scale, ..query };
    let scores = Product { labels: [b"nhrqd", b"nhkd"], result: b"nhrqk", cuts: &[] };
    let mut scores = product(cx, "scores", &query, &key, &scores)?;
    if node.flag("is_causal", false)? {
        scores = causal(cx, &scores, q[2], k[2])?;
    }
    if cx.given(node, 3) {
        let mask = cx.view(node, 3)?;
        scores = masked(cx, &scores, &mask, q[1], k[1])?;
    }
    let (view, tensor, axis) = single_atom(cx, &scores, 4)?;
    let weights = cx.emit("weights", Softmax { axis }, &[tensor])?;
    let weights = view.of(Base::Tensor(weights));
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

fn causal(cx: &mut Importer<'_>, scores: &View, queries: u64, keys: u64) -> Tried<View> {
    if queries.saturating_mul(keys) > crate::onnx::stored::MOST_FOLDED as u64 {
        return Err(Trouble::unsupported("a mask of over four million elements"));
    }
    let seen = (0..queries * keys).map(|i| i64::from(i % keys <= i / keys)).collect();
    let name = format!("{}.causal", cx.name);
    let mask = cx.constant(&name, &Literal::ints(DType::Bool, vec![queries, keys], seen))?;
    let never = number(cx, "never", cx.dtype(scores), f64::NEG_INFINITY)?;
    elementwise(cx, "causal_scores", Select {}, &[mask, scores.clone(), never])
}

/// Where a mask of truth values is false nothing is seen; one of numbers is added.
fn masked(cx: &mut Importer<'_>, scores: &View, mask: &View, heads: u64, key_heads: u64) -> Tried<View> {
    let mut shape = mask.shape();
    while shape.len() < 4 {
        shape.insert(0, 1);
    }
    let &[n, h, q, k] = shape.as_slice() else { return Err(Trouble::wrong(format!("a mask {shape:?}"))) };
    let grouped = if h == heads { [n, key_heads, heads / key_heads, q, k] } else { [n, 1, h, q, k] };
    let mask = reshaped_view(cx, mask, &grouped)?;
    if cx.dtype(&mask) != DType::Bool {
        return binary(cx, "masked_scores", BinaryFn::Add, scores, &mask);
    }
    let never = number(cx, "never", cx.dtype(scores), f64::NEG_INFINITY)?;
    elementwise(cx, "masked_scores", Select {}, &[mask, scores.clone(), never])
}
