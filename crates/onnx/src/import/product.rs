//! Matrix products: MatMul, Gemm, Einsum.

use super::{
    Import,
    elementwise::{affine, binary, number},
    reduce::{ReduceKind, over},
};
use crate::{
    align::elementwise,
    contraction::{Product, product},
    error::{NodeError, NodeResult},
    importer::{Importer, NodeValue},
    literal::Literal,
    proto::Node,
    storage::MOST_FOLDED,
    view::View,
};
use shardwright_graph::{
    DType,
    ops::{BinaryFn, Select},
};

pub(super) fn find(op: &str) -> Option<Import> {
    Some(match op {
        "MatMul" => matmul,
        "Gemm" => gemm,
        "Einsum" => einsum,
        _ => return None,
    })
}

/// Labels of the dimensions before the matrix dimensions.
const LEADING: &[u8] = b"nstuvwabefgijl";
const BATCH: &[u8] = b"nhgbaefijlmprs";

fn matmul(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let (a, b) = (cx.view(node, 0)?, cx.view(node, 1)?);
    if a.rank() == 0 || b.rank() == 0 {
        return Err(NodeError::invalid("a product of two single numbers"));
    }
    let columns: &[u8] = if b.rank() == 1 { b"c" } else { b"co" };
    if b.rank() <= 2 {
        let rows = LEADING
            .get(..a.rank() - 1)
            .ok_or_else(|| NodeError::invalid("the operands have too many dimensions"))?;
        let labels = [rows, b"c"].concat();
        let result = [rows, &columns[1..]].concat();
        return dense(cx, node, &a, &b, [&labels, columns], &result);
    }
    let batch = a.rank().max(b.rank()) - 2;
    let batch =
        BATCH.get(..batch).ok_or_else(|| NodeError::invalid("the operands have too many dimensions"))?;
    let own = |view: &View| &batch[batch.len() - view.rank().saturating_sub(2)..];
    let rows: &[u8] = if a.rank() == 1 { b"" } else { b"q" };
    let labels = [[own(&a), rows, b"c"].concat(), [own(&b), b"ck"].concat()];
    let result = [batch, rows, b"k"].concat();
    let spec = Product { labels: [&labels[0], &labels[1]], result: &result, cuts: &[] };
    let y = product(cx, "", &a, &b, &spec)?;
    cx.output_view(node, 0, y);
    Ok(())
}

/// A product with a matrix on the right, mostly a weight. If the result is later reshaped into heads, the weight's columns
/// are; if it is later split into parts, one product is added per part.
fn dense(
    cx: &mut Importer<'_>,
    node: &Node,
    a: &View,
    b: &View,
    labels: [&[u8]; 2],
    result: &[u8],
) -> NodeResult {
    let output = node.output.first().map_or("", String::as_str);
    if let Some(parts) = in_parts(cx, node, b, labels[1])? {
        let mut results = Vec::with_capacity(parts.len());
        for (i, (part, name)) in parts.iter().enumerate() {
            let cut = cx.hints.last_dim_cut(name).map(|sizes| (b'o', sizes));
            let spec = Product { labels, result, cuts: cut.as_slice() };
            results.push(product(cx, &i.to_string(), a, part, &spec)?);
        }
        cx.bind(output, NodeValue::Parts(result.len() - 1, results));
        return Ok(());
    }
    let cut = if cx.is_fresh(b) { cx.hints.last_dim_cut(output).map(|sizes| (b'o', sizes)) } else { None };
    let y = product(cx, "", a, b, &Product { labels, result, cuts: cut.as_slice() })?;
    cx.output_view(node, 0, y);
    Ok(())
}

/// The weight in the parts that its result is split into, and the name of each part of the result.
fn in_parts(
    cx: &mut Importer<'_>,
    node: &Node,
    b: &View,
    labels: &[u8],
) -> NodeResult<Option<Vec<(View, String)>>> {
    let Some(names) = node.output.first().and_then(|output| cx.hints.last_dim_parts(output)) else {
        return Ok(None);
    };
    let sizes: Option<Vec<u64>> = names.iter().map(|name| cx.hints.last_size(name)).collect();
    let (Some(sizes), Some(axis)) = (sizes, labels.iter().position(|&l| l == b'o')) else { return Ok(None) };
    // Parts are taken in storage order, so a transposed weight is transposed back first.
    let turned = !b.in_order() && b.rank() == 2;
    let (lying, axis) = if turned { (b.transpose(&[1, 0]), 1 - axis) } else { (b.clone(), axis) };
    let parts = cx.stored_parts(&lying, axis, &sizes);
    Ok(parts.map(|parts| {
        let seen = parts.into_iter().map(|p| if turned { p.transpose(&[1, 0]) } else { p });
        seen.zip(names).collect()
    }))
}

fn gemm(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let turned = |view: View, turn: bool| if turn { view.transpose(&[1, 0]) } else { view };
    let (a, b) = (cx.view(node, 0)?, cx.view(node, 1)?);
    if a.rank() != 2 || b.rank() != 2 {
        return Err(NodeError::invalid(format!(
            "the operands must be matrices, got shapes {:?} and {:?}",
            a.shape(),
            b.shape()
        )));
    }
    let a = turned(a, node.flag("transA", false)?);
    let b = turned(b, node.flag("transB", false)?);
    let (alpha, beta) = (node.float("alpha", 1.0)?, node.float("beta", 1.0)?);
    let biased = cx.given(node, 2) && beta != 0.0;
    if !biased && alpha == 1.0 {
        return dense(cx, node, &a, &b, [b"nc", b"co"], b"no");
    }
    let output = node.output.first().map_or("", String::as_str);
    let cut = if cx.is_fresh(&b) { cx.hints.last_dim_cut(output).map(|sizes| (b'o', sizes)) } else { None };
    let y =
        product(cx, "", &a, &b, &Product { labels: [b"nc", b"co"], result: b"no", cuts: cut.as_slice() })?;
    let mut y = affine(cx, "scale", &y, alpha, 0.0)?;
    if biased {
        let c = cx.view(node, 2)?;
        let c = affine(cx, "scale_bias", &c, beta, 0.0)?;
        y = binary(cx, "add_bias", BinaryFn::Add, &y, &c)?;
    }
    cx.output_view(node, 0, y);
    Ok(())
}

/// The first two positions of a letter that repeats.
fn repeated(term: &str) -> Option<(usize, usize)> {
    let second = (0..term.len()).find(|&i| term[..i].contains(&term[i..=i]))?;
    Some((term.find(&term[second..=second])?, second))
}

/// The diagonal of two dimensions; the second dimension is dropped.
fn diagonal(cx: &mut Importer<'_>, x: &View, first: usize, second: usize) -> NodeResult<View> {
    let size = x.size(first);
    if x.size(second) != size || size.saturating_mul(size) > MOST_FOLDED as u64 {
        return Err(NodeError::invalid(format!(
            "the diagonal of shape {:?} needs two equal sizes",
            x.shape()
        )));
    }
    let mut shape = vec![1; x.rank()];
    (shape[first], shape[second]) = (size, size);
    let on = (0..size * size).map(|i| i64::from(i / size == i % size)).collect();
    let name = format!("{}.diagonal", cx.name);
    let on = cx.constant(&name, &Literal::ints(DType::Bool, shape, on))?;
    let zero = number(cx, "zero", cx.dtype(x), 0.0)?;
    let kept = elementwise(cx, "on_diagonal", Select {}, &[on, x.clone(), zero])?;
    over(cx, "diagonal", &kept, &[second], ReduceKind::Sum, false)
}

/// Contracts any number of operands, two at a time.
fn einsum(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let text = node.text("equation", "")?.replace(' ', "");
    let (operands, result) = match text.split_once("->") {
        Some((operands, result)) => (operands.to_string(), Some(result.to_string())),
        None => (text, None),
    };
    let mut terms: Vec<String> = operands.split(',').map(String::from).collect();
    let mut views = (0..node.input.len()).map(|i| cx.view(node, i)).collect::<NodeResult<Vec<_>>>()?;
    if terms.len() != views.len() || terms.is_empty() {
        return Err(NodeError::invalid(format!("`{operands}` does not fit {} operands", views.len())));
    }
    // An implicit result has the letters that occur once, in alphabetical order.
    let mut once: Vec<char> = operands.chars().filter(|c| c.is_alphabetic()).collect();
    once.sort_unstable();
    let alone = |c: &char| once.iter().filter(|d| *d == c).count() == 1;
    let implied: String = once.iter().filter(|c| alone(c)).collect();
    let dots = if operands.contains("...") { "..." } else { "" };
    let mut result = result.unwrap_or_else(|| format!("{dots}{implied}"));
    // Dots stand for an operand's remaining dimensions, aligned at the last.
    let letters = |term: &str| term.chars().filter(|c| c.is_alphabetic()).count();
    let spare: String =
        ('A'..='Z').filter(|c| !operands.contains(*c)).take(shardwright_graph::MAX_RANK).collect();
    let mut most = 0;
    for (term, view) in terms.iter_mut().zip(&views) {
        if term.contains("...") {
            let count = view.rank().saturating_sub(letters(term)).min(spare.len());
            most = most.max(count);
            *term = term.replace("...", &spare[spare.len() - count..]);
        }
    }
    result = result.replace("...", &spare[spare.len() - most..]);
    for (term, view) in terms.iter_mut().zip(&mut views) {
        if term.len() != view.rank() || !term.bytes().all(|c| c.is_ascii_alphabetic()) {
            return Err(NodeError::invalid(format!("`{term}` does not fit shape {:?}", view.shape())));
        }
        while let Some((first, second)) = repeated(term) {
            *view = diagonal(cx, view, first, second)?;
            term.remove(second);
        }
    }
    let once = |(i, c): (usize, char)| result.find(c) == Some(i) && terms.iter().any(|term| term.contains(c));
    if !result.char_indices().all(once) {
        return Err(NodeError::invalid(format!(
            "the result `{result}` has letters that `{}` lacks or repeats",
            terms.join(",")
        )));
    }
    let mut views = views.into_iter().zip(terms);
    let (mut view, mut term) = views.next().ok_or_else(|| NodeError::invalid("there are no operands"))?;
    let rest: Vec<(View, String)> = views.collect();
    for (i, (other, letters)) in rest.iter().enumerate() {
        // Letters that no later operand has are summed over as early as possible.
        let needed = |c: char| result.contains(c) || rest[i + 1..].iter().any(|(_, t)| t.contains(c));
        let mut kept: Vec<u8> = Vec::new();
        for c in term.bytes().chain(letters.bytes()) {
            if needed(c as char) && !kept.contains(&c) {
                kept.push(c);
            }
        }
        let last = i + 1 == rest.len();
        if last {
            kept = result.bytes().collect();
        }
        let spec = Product { labels: [term.as_bytes(), letters.as_bytes()], result: &kept, cuts: &[] };
        view = product(cx, if last { "" } else { "partial" }, &view, other, &spec)?;
        term = String::from_utf8_lossy(&kept).into_owned();
    }
    if term != result {
        let gone: Vec<usize> = (0..term.len()).filter(|&d| !result.contains(&term[d..=d])).collect();
        view = over(cx, "", &view, &gone, ReduceKind::Sum, false)?;
        term.retain(|c| result.contains(c));
        let order: Option<Vec<usize>> = result.chars().map(|c| term.find(c)).collect();
        view = view.transpose(
            &order.ok_or_else(|| NodeError::invalid("the result has a letter that no operand has"))?,
        );
    }
    cx.output_view(node, 0, view);
    Ok(())
}
