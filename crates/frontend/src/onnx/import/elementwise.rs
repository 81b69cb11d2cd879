//! Functions of one and two tensors, element by element, with NumPy's broadcasting.

use super::Import;
use crate::onnx::{
    align::elementwise,
    error::{Tried, Trouble},
    fold::cast_type,
    importer::{Importer, Value},
    literal::Literal,
    proto::Node,
    view::View,
};
use shardwright_graph::{
    DType, Real, TensorType,
    ops::{Binary, BinaryFn, Cast, Compare, CompareFn, Dropout, Fill, Select, Unary, UnaryFn},
};

pub(super) fn find(op: &str) -> Option<Import> {
    Some(match op {
        "Identity" => |cx, node| {
            let x = cx.view(node, 0)?;
            cx.output_view(node, 0, x);
            Ok(())
        },
        "Cast" | "CastLike" => cast,
        "Dropout" => dropout,
        "Add" => |cx, node| arithmetic(cx, node, BinaryFn::Add),
        "Sub" => |cx, node| arithmetic(cx, node, BinaryFn::Sub),
        "Mul" => |cx, node| arithmetic(cx, node, BinaryFn::Mul),
        "Div" => |cx, node| arithmetic(cx, node, BinaryFn::Div),
        "And" => |cx, node| arithmetic(cx, node, BinaryFn::And),
        "Or" => |cx, node| arithmetic(cx, node, BinaryFn::Or),
        "Xor" => |cx, node| compare(cx, node, CompareFn::Ne),
        "Min" => |cx, node| many(cx, node, BinaryFn::Min),
        "Max" => |cx, node| many(cx, node, BinaryFn::Max),
        "Sum" => |cx, node| many(cx, node, BinaryFn::Add),
        "Mean" => mean,
        "Pow" => pow,
        "Where" => select,
        "Equal" => |cx, node| compare(cx, node, CompareFn::Eq),
        "Less" => |cx, node| compare(cx, node, CompareFn::Lt),
        "LessOrEqual" => |cx, node| compare(cx, node, CompareFn::Le),
        "Greater" => |cx, node| compare(cx, node, CompareFn::Gt),
        "GreaterOrEqual" => |cx, node| compare(cx, node, CompareFn::Ge),
        "IsNaN" => |cx, node| {
            let x = cx.view(node, 0)?;
            let y = elementwise(cx, "", Compare { f: CompareFn::Ne }, &[x.clone(), x])?;
            cx.output_view(node, 0, y);
            Ok(())
        },
        _ => return None,
    })
}

/// Adds a unary function under the node's name, or a longer one.
pub(super) fn apply(cx: &mut Importer<'_>, what: &str, f: UnaryFn, x: &View) -> Tried<View> {
    elementwise(cx, what, Unary { f }, std::slice::from_ref(x))
}

/// `scale * x + shift`.
pub(super) fn affine(cx: &mut Importer<'_>, what: &str, x: &View, scale: f64, shift: f64) -> Tried<View> {
    if scale == 1.0 && shift == 0.0 {
        return Ok(x.clone());
    }
    apply(cx, what, UnaryFn::Affine { scale: Real(scale), shift: Real(shift) }, x)
}

/// `f(x, y)`.
pub(super) fn binary(cx: &mut Importer<'_>, what: &str, f: BinaryFn, x: &View, y: &View) -> Tried<View> {
    elementwise(cx, what, Binary { f }, &[x.clone(), y.clone()])
}

/// A number as a tensor of one element.
pub(super) fn number(cx: &mut Importer<'_>, what: &str, dtype: DType, value: f64) -> Tried<View> {
    let ty = TensorType::new(dtype, []);
    let tensor = cx.emit(what, Fill { value: Real(value), ty }, &[])?;
    Ok(cx.seen(tensor))
}

/// The single number that the `i`-th input is, where it does not make the result larger.
fn scalar(cx: &mut Importer<'_>, node: &Node, i: usize, rank: usize) -> Tried<Option<f64>> {
    let known = |l: &std::rc::Rc<Literal>| l.len() == 1 && l.shape.len() <= rank && l.dtype.is_float();
    Ok(cx.literal(node, i)?.filter(known).and_then(|l| l.scalar()))
}

fn arithmetic(cx: &mut Importer<'_>, node: &Node, f: BinaryFn) -> Tried {
    if f == BinaryFn::Add && biased_parts(cx, node)? {
        return Ok(());
    }
    for (place, other) in [(0, 1), (1, 0)] {
        if cx.literal(node, place)?.is_some() && cx.literal(node, other)?.is_some() {
            break;
        }
        let rank = match node.input_name(place).and_then(|name| cx.value(name)) {
            Some(Value::View(view)) => view.rank(),
            _ => continue,
        };
        if let Some(c) = scalar(cx, node, other, rank)? {
            let x = cx.view(node, place)?;
            let y = with_scalar(cx, node, f, &x, c, place == 0)?;
            cx.output_view(node, 0, y);
            return Ok(());
        }
    }
    let (x, y) = (cx.view(node, 0)?, cx.view(node, 1)?);
    if !cx.dtype(&x).is_float() && f == BinaryFn::Div {
        return Err(Trouble::unsupported("a quotient of whole numbers"));
    }
    let z = binary(cx, "", f, &x, &y)?;
    cx.output_view(node, 0, z);
    Ok(())
}

/// `x f c`, or `c f x` if `first` is false.
fn with_scalar(
    cx: &mut Importer<'_>,
    node: &Node,
    f: BinaryFn,
    x: &View,
    c: f64,
    first: bool,
) -> Tried<View> {
    let factor = match (f, first) {
        (BinaryFn::Mul, _) => Some(c),
        (BinaryFn::Div, true) => Some(1.0 / c),
        _ => None,
    };
    if let Some(factor) = factor {
        // A product takes the scales of its operands together; see `contraction`.
        let waits = node.output.first().is_some_and(|o| cx.hints.feeds_product(o));
        if waits {
            return Ok(View { scale: x.scale * factor, ..x.clone() });
        }
        return affine(cx, "", x, factor, 0.0);
    }
    match (f, first) {
        (BinaryFn::Add, _) => affine(cx, "", x, 1.0, c),
        (BinaryFn::Sub, true) => affine(cx, "", x, 1.0, -c),
        (BinaryFn::Sub, false) => affine(cx, "", x, -1.0, c),
        (BinaryFn::Div, _) => {
            let y = apply(cx, "", UnaryFn::Reciprocal, x)?;
            affine(cx, "scale", &y, c, 0.0)
        }
        _ => {
            let c = number(cx, "constant", cx.dtype(x), c)?;
            binary(cx, "", f, x, &c)
        }
    }
}

/// A bias of a layer whose result is still in parts: each part gets its own.
fn biased_parts(cx: &mut Importer<'_>, node: &Node) -> Tried<bool> {
    for (place, other) in [(0, 1), (1, 0)] {
        let Some(Value::Parts(axis, parts)) = node.input_name(place).and_then(|n| cx.value(n)).cloned()
        else {
            continue;
        };
        let bias = cx.view(node, other)?;
        let sizes: Vec<u64> = parts.iter().map(|p| p.size(axis)).collect();
        if bias.rank() != 1 || parts.iter().any(|p| axis + 1 != p.rank()) {
            return Ok(false);
        }
        let Some(biases) = cx.stored_parts(&bias, 0, &sizes) else { return Ok(false) };
        let mut sums = Vec::with_capacity(parts.len());
        for (i, (part, bias)) in parts.iter().zip(&biases).enumerate() {
            sums.push(binary(cx, &i.to_string(), BinaryFn::Add, part, bias)?);
        }
        if let Some(output) = node.output.first() {
            cx.bind(output, Value::Parts(axis, sums));
        }
        return Ok(true);
    }
    Ok(false)
}

fn many(cx: &mut Importer<'_>, node: &Node, f: BinaryFn) -> Tried {
    let mut result = cx.view(node, 0)?;
    for i in 1..node.input.len() {
        let next = cx.view(node, i)?;
        let what = if i + 1 == node.input.len() { "" } else { "next" };
        result = binary(cx, what, f, &result, &next)?;
    }
    cx.output_view(node, 0, result);
    Ok(())
}

fn mean(cx: &mut Importer<'_>, node: &Node) -> Tried {
    let mut sum = cx.view(node, 0)?;
    for i in 1..node.input.len() {
        let next = cx.view(node, i)?;
        sum = binary(cx, "sum", BinaryFn::Add, &sum, &next)?;
    }
    let result = affine(cx, "", &sum, 1.0 / node.input.len() as f64, 0.0)?;
    cx.output_view(node, 0, result);
    Ok(())
}

fn pow(cx: &mut Importer<'_>, node: &Node) -> Tried {
    let x = cx.view(node, 0)?;
    let exponent = cx.literal(node, 1)?.filter(|l| l.len() == 1).and_then(|l| l.scalar());
    let p = exponent.ok_or_else(|| Trouble::unsupported("a power that is no single known number"))?;
    let f = match p {
        1.0 => None,
        2.0 => Some(UnaryFn::Square),
        0.5 => Some(UnaryFn::Sqrt),
        -0.5 => Some(UnaryFn::Rsqrt),
        -1.0 => Some(UnaryFn::Reciprocal),
        p => Some(UnaryFn::Power(Real(p))),
    };
    let y = match f {
        None => x,
        Some(f) => apply(cx, "", f, &x)?,
    };
    cx.output_view(node, 0, y);
    Ok(())
}

fn compare(cx: &mut Importer<'_>, node: &Node, f: CompareFn) -> Tried {
    let operands = [cx.view(node, 0)?, cx.view(node, 1)?];
    let y = elementwise(cx, "", Compare { f }, &operands)?;
    cx.output_view(node, 0, y);
    Ok(())
}

fn select(cx: &mut Importer<'_>, node: &Node) -> Tried {
    let operands = [cx.view(node, 0)?, cx.view(node, 1)?, cx.view(node, 2)?];
    let y = elementwise(cx, "", Select {}, &operands)?;
    cx.output_view(node, 0, y);
    Ok(())
}

fn cast(cx: &mut Importer<'_>, node: &Node) -> Tried {
    let x = cx.view(node, 0)?;
    let dtype = if node.op_type == "Cast" {
        cast_type(node)?
    } else {
        let like = cx.view(node, 1)?;
        cx.dtype(&like)
    };
    let y = if cx.dtype(&x) == dtype { x } else { elementwise(cx, "", Cast { dtype }, &[x])? };
    cx.output_view(node, 0, y);
    Ok(())
}

/// Dropout is part of a model only while training; exporters mostly leave it out.
fn dropout(cx: &mut Importer<'_>, node: &Node) -> Tried {
    let x = cx.view(node, 0)?;
    let rate = match cx.given(node, 1) {
        true => cx.known(node, 1, "dropout rates")?.scalar().unwrap_or(0.5),
        false => 0.5,
    };
    let on = cx.given(node, 2) && cx.known(node, 2, "training modes")?.scalar() != Some(0.0);
    if on && !cx.training && rate > 0.0 {
        return Err(Trouble::unsupported("dropout without training"));
    }
    let mask = node.output.get(1).is_some_and(|o| !o.is_empty());
    if mask {
        return Err(Trouble::unsupported("a mask that is returned"));
    }
    let y = if cx.training && rate > 0.0 {
        let (shape, _) = cx.natural(&x);
        let seed = cx.b.graph().ops.len() as u64;
        elementwise(cx, "", Dropout::new(rate, seed, &shape), &[x])?
    } else {
        x
    };
    cx.output_view(node, 0, y);
    Ok(())
}
