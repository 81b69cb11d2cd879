//! Functions of one and two tensors, element by element, with NumPy's broadcasting.

use super::Import;
use crate::{
    align::elementwise,
    error::{NodeError, NodeResult},
    fold::cast_type,
    importer::{Importer, NodeValue},
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
        "Mod" => modulo,
        "Pow" => pow,
        "BitwiseAnd" => |cx, node| whole(cx, node, BinaryFn::And),
        "BitwiseOr" => |cx, node| whole(cx, node, BinaryFn::Or),
        "BitwiseXor" => |cx, node| whole(cx, node, BinaryFn::Xor),
        "BitShift" => shift,
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
        "IsInf" => is_infinite,
        _ => return None,
    })
}

/// Adds a unary function, named after the node and `what`.
pub(super) fn apply(cx: &mut Importer<'_>, what: &str, f: UnaryFn, x: &View) -> NodeResult<View> {
    elementwise(cx, what, Unary { f }, std::slice::from_ref(x))
}

/// `scale * x + shift`.
pub(super) fn affine(
    cx: &mut Importer<'_>,
    what: &str,
    x: &View,
    scale: f64,
    shift: f64,
) -> NodeResult<View> {
    if scale == 1.0 && shift == 0.0 {
        return Ok(x.clone());
    }
    apply(cx, what, UnaryFn::Affine { scale: Real(scale), shift: Real(shift) }, x)
}

/// `f(x, y)`.
pub(super) fn binary(cx: &mut Importer<'_>, what: &str, f: BinaryFn, x: &View, y: &View) -> NodeResult<View> {
    elementwise(cx, what, Binary { f }, &[x.clone(), y.clone()])
}

/// A number as a tensor of one element.
pub(super) fn number(cx: &mut Importer<'_>, what: &str, dtype: DType, value: f64) -> NodeResult<View> {
    let ty = TensorType::new(dtype, []);
    let tensor = cx.emit(what, Fill { value: Real(value), ty }, &[])?;
    Ok(cx.seen(tensor))
}

/// The single number of the `i`-th input, if it does not raise the rank of the result.
fn scalar(cx: &mut Importer<'_>, node: &Node, i: usize, rank: usize) -> NodeResult<Option<f64>> {
    let known = |l: &std::rc::Rc<Literal>| l.len() == 1 && l.shape.len() <= rank && l.dtype.is_float();
    Ok(cx.literal(node, i)?.filter(known).and_then(|l| l.scalar()))
}

fn arithmetic(cx: &mut Importer<'_>, node: &Node, f: BinaryFn) -> NodeResult {
    if f == BinaryFn::Add && biased_parts(cx, node)? {
        return Ok(());
    }
    for (place, other) in [(0, 1), (1, 0)] {
        if cx.literal(node, place)?.is_some() && cx.literal(node, other)?.is_some() {
            break;
        }
        let rank = match node.input_name(place).and_then(|name| cx.value(name)) {
            Some(NodeValue::View(view)) => view.rank(),
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
) -> NodeResult<View> {
    let factor = match (f, first) {
        (BinaryFn::Mul, _) => Some(c),
        (BinaryFn::Div, true) => Some(1.0 / c),
        _ => None,
    };
    if let Some(factor) = factor {
        // A product applies the scales of both operands at once; see `contraction`.
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

/// Adds a bias to a result that is still in parts: each part gets its part of the bias.
fn biased_parts(cx: &mut Importer<'_>, node: &Node) -> NodeResult<bool> {
    for (place, other) in [(0, 1), (1, 0)] {
        let Some(NodeValue::Parts(axis, parts)) = node.input_name(place).and_then(|n| cx.value(n)).cloned()
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
            cx.bind(output, NodeValue::Parts(axis, sums));
        }
        return Ok(true);
    }
    Ok(false)
}

fn many(cx: &mut Importer<'_>, node: &Node, f: BinaryFn) -> NodeResult {
    let mut result = cx.view(node, 0)?;
    for i in 1..node.input.len() {
        let next = cx.view(node, i)?;
        let what = if i + 1 == node.input.len() { "" } else { "next" };
        result = binary(cx, what, f, &result, &next)?;
    }
    cx.output_view(node, 0, result);
    Ok(())
}

fn mean(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let mut sum = cx.view(node, 0)?;
    for i in 1..node.input.len() {
        let next = cx.view(node, i)?;
        sum = binary(cx, "sum", BinaryFn::Add, &sum, &next)?;
    }
    let result = affine(cx, "", &sum, 1.0 / node.input.len() as f64, 0.0)?;
    cx.output_view(node, 0, result);
    Ok(())
}

fn pow(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let x = cx.view(node, 0)?;
    let rank = x.rank();
    let single = cx.literal(node, 1)?.filter(|l| l.len() == 1 && l.shape.len() <= rank);
    let (Some(p), true) = (single.and_then(|l| l.scalar()), cx.dtype(&x).is_float()) else {
        return power_of_tensors(cx, node, &x);
    };
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

/// A power with a tensor as exponent. Whole numbers and mixed types are computed as floats.
fn power_of_tensors(cx: &mut Importer<'_>, node: &Node, x: &View) -> NodeResult {
    let powers = cx.view(node, 1)?;
    let dtype = cx.dtype(x);
    let float = if dtype.is_float() { dtype } else { DType::F64 };
    let (x, powers) = (as_type(cx, x, float)?, as_type(cx, &powers, float)?);
    let y = binary(cx, "", BinaryFn::Pow, &x, &powers)?;
    let y = as_type(cx, &y, dtype)?;
    cx.output_view(node, 0, y);
    Ok(())
}

/// The same elements, cast to another type.
pub(super) fn as_type(cx: &mut Importer<'_>, x: &View, dtype: DType) -> NodeResult<View> {
    if cx.dtype(x) == dtype {
        return Ok(x.clone());
    }
    elementwise(cx, "cast", Cast { dtype }, std::slice::from_ref(x))
}

/// `-x`, also for whole numbers.
pub(super) fn negated(cx: &mut Importer<'_>, what: &str, x: &View) -> NodeResult<View> {
    if cx.dtype(x).is_float() {
        return apply(cx, what, UnaryFn::Neg, x);
    }
    let zero = number(cx, "zero", cx.dtype(x), 0.0)?;
    binary(cx, what, BinaryFn::Sub, &zero, x)
}

/// The remainder of a division. It has the sign of the divisor unless `fmod` asks for C's rule.
fn modulo(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let (x, y) = (cx.view(node, 0)?, cx.view(node, 1)?);
    let c_rule = node.flag("fmod", false)?;
    let mut rest = binary(cx, if c_rule { "" } else { "rest" }, BinaryFn::Rem, &x, &y)?;
    if !c_rule {
        let zero = number(cx, "zero", cx.dtype(&x), 0.0)?;
        let compared = |cx: &mut Importer<'_>, what: &str, f, x: &View| {
            elementwise(cx, what, Compare { f }, &[x.clone(), zero.clone()])
        };
        let below = compared(cx, "is_below", CompareFn::Lt, &rest)?;
        let divisor_below = compared(cx, "is_divisor_below", CompareFn::Lt, &y)?;
        let left = compared(cx, "is_left", CompareFn::Ne, &rest)?;
        let differ = binary(cx, "signs_differ", BinaryFn::Xor, &below, &divisor_below)?;
        let wrong = binary(cx, "is_wrong", BinaryFn::And, &differ, &left)?;
        let other = binary(cx, "other", BinaryFn::Add, &rest, &y)?;
        rest = elementwise(cx, "", Select {}, &[wrong, other, rest])?;
    }
    cx.output_view(node, 0, rest);
    Ok(())
}

/// A bitwise function of whole numbers.
fn whole(cx: &mut Importer<'_>, node: &Node, f: BinaryFn) -> NodeResult {
    let (x, y) = (cx.view(node, 0)?, cx.view(node, 1)?);
    let z = binary(cx, "", f, &x, &y)?;
    cx.output_view(node, 0, z);
    Ok(())
}

fn shift(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    match node.text("direction", "")?.as_str() {
        "RIGHT" => whole(cx, node, BinaryFn::ShiftRightSigned),
        // Small types are widened: bits that should be shifted out would stay.
        "LEFT" => Err(NodeError::unsupported("a left shift")),
        other => Err(NodeError::invalid(format!("unknown direction `{other}`"))),
    }
}

fn is_infinite(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let x = cx.view(node, 0)?;
    let (up, down) = (node.flag("detect_positive", true)?, node.flag("detect_negative", true)?);
    let (x, limit) = match (up, down) {
        (true, true) => (apply(cx, "abs", UnaryFn::Abs, &x)?, f64::INFINITY),
        (true, false) => (x, f64::INFINITY),
        (false, true) => (x, f64::NEG_INFINITY),
        // Neither infinity is detected; a comparison with NaN is always false.
        (false, false) => (x, f64::NAN),
    };
    let limit = number(cx, "limit", cx.dtype(&x), limit)?;
    let y = elementwise(cx, "", Compare { f: CompareFn::Eq }, &[x, limit])?;
    cx.output_view(node, 0, y);
    Ok(())
}

fn compare(cx: &mut Importer<'_>, node: &Node, f: CompareFn) -> NodeResult {
    let operands = [cx.view(node, 0)?, cx.view(node, 1)?];
    let y = elementwise(cx, "", Compare { f }, &operands)?;
    cx.output_view(node, 0, y);
    Ok(())
}

fn select(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let operands = [cx.view(node, 0)?, cx.view(node, 1)?, cx.view(node, 2)?];
    let y = elementwise(cx, "", Select {}, &operands)?;
    cx.output_view(node, 0, y);
    Ok(())
}

fn cast(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let x = cx.view(node, 0)?;
    let dtype = if node.op_type == "Cast" {
        cast_type(node)?
    } else {
        match node.input_name(1).and_then(|name| cx.value(name)) {
            // The second operand may be empty: only its type matters.
            Some(NodeValue::Known(literal)) => literal.dtype,
            _ => {
                let like = cx.view(node, 1)?;
                cx.dtype(&like)
            }
        }
    };
    let y = if cx.dtype(&x) == dtype { x } else { elementwise(cx, "", Cast { dtype }, &[x])? };
    cx.output_view(node, 0, y);
    Ok(())
}

/// Dropout acts only in training; exporters mostly leave it out.
fn dropout(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let x = cx.view(node, 0)?;
    let rate = match cx.given(node, 1) {
        true => cx.known_number(node, 1, "dropout rates")?,
        false => 0.5,
    };
    let on = cx.given(node, 2) && cx.known(node, 2, "training modes")?.scalar() != Some(0.0);
    if on && !cx.training && rate > 0.0 {
        return Err(NodeError::unsupported("active dropout in an inference import"));
    }
    if node.output.get(1).is_some_and(|o| !o.is_empty()) {
        if cx.training && rate > 0.0 {
            return Err(NodeError::unsupported("an output of the mask"));
        }
        let ty = TensorType::new(DType::Bool, x.shape());
        let all = cx.emit("mask", Fill { value: Real(1.0), ty }, &[])?;
        cx.output(node, 1, all);
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
