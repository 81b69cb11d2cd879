//! Functions of one tensor: activations and elementary functions.

use super::{
    Import,
    elementwise::{affine, apply, binary, negated, number},
};
use crate::{
    align::elementwise,
    error::{NodeError, NodeResult},
    importer::Importer,
    proto::Node,
    view::View,
};
use shardwright_graph::{
    Real,
    ops::{BinaryFn, Compare, CompareFn, Select, UnaryFn},
};

pub(super) fn find(op: &str) -> Option<Import> {
    macro_rules! plain {
        ($f:expr) => {
            |cx, node| {
                let x = cx.view(node, 0)?;
                let y = apply(cx, "", $f, &x)?;
                cx.output_view(node, 0, y);
                Ok(())
            }
        };
    }
    macro_rules! composed {
        ($f:ident) => {
            |cx, node| {
                let x = cx.view(node, 0)?;
                let y = $f(cx, node, &x)?;
                cx.output_view(node, 0, y);
                Ok(())
            }
        };
    }
    Some(match op {
        "Abs" => composed!(abs),
        "Acos" => composed!(acos),
        "Acosh" => composed!(acosh),
        "Asin" => composed!(asin),
        "Asinh" => composed!(asinh),
        "Atan" => composed!(atan),
        "Atanh" => composed!(atanh),
        "Ceil" => plain!(UnaryFn::Ceil),
        "Cos" => plain!(UnaryFn::Cos),
        "Erf" => plain!(UnaryFn::Erf),
        "Exp" => plain!(UnaryFn::Exp),
        "Floor" => plain!(UnaryFn::Floor),
        "Log" => plain!(UnaryFn::Log),
        "Neg" => composed!(neg),
        "Not" => plain!(UnaryFn::Not),
        "Reciprocal" => plain!(UnaryFn::Reciprocal),
        "Relu" => plain!(UnaryFn::Relu),
        "Round" => plain!(UnaryFn::Round),
        "Sigmoid" => plain!(UnaryFn::Sigmoid),
        "Sign" => plain!(UnaryFn::Sign),
        "Sin" => plain!(UnaryFn::Sin),
        "Sqrt" => plain!(UnaryFn::Sqrt),
        "Tanh" => plain!(UnaryFn::Tanh),
        "Gelu" => composed!(gelu),
        "LeakyRelu" => composed!(leaky_relu),
        "Swish" => composed!(swish),
        "Clip" => composed!(clip),
        "HardSigmoid" => composed!(hard_sigmoid),
        "HardSwish" => composed!(hard_swish),
        "Softplus" => composed!(softplus),
        "Softsign" => composed!(softsign),
        "Mish" => composed!(mish),
        "Elu" => composed!(elu),
        "Selu" => composed!(selu),
        "Celu" => composed!(celu),
        "PRelu" => composed!(prelu),
        "Shrink" => composed!(shrink),
        "ThresholdedRelu" => composed!(thresholded_relu),
        "Tan" => composed!(tan),
        "Sinh" => composed!(sinh),
        "Cosh" => composed!(cosh),
        _ => return None,
    })
}

fn neg(cx: &mut Importer<'_>, _: &Node, x: &View) -> NodeResult<View> {
    negated(cx, "", x)
}

fn abs(cx: &mut Importer<'_>, _: &Node, x: &View) -> NodeResult<View> {
    if cx.dtype(x).is_float() {
        return apply(cx, "", UnaryFn::Abs, x);
    }
    let other = negated(cx, "negated", x)?;
    binary(cx, "", BinaryFn::Max, x, &other)
}

/// `x` where its comparison with `limit` holds, else `other`.
fn where_beyond(
    cx: &mut Importer<'_>,
    x: &View,
    f: CompareFn,
    limit: f64,
    yes: &View,
    no: &View,
) -> NodeResult<View> {
    let limit = number(cx, "limit", cx.dtype(x), limit)?;
    let beyond = elementwise(cx, "is_beyond", Compare { f }, &[x.clone(), limit])?;
    elementwise(cx, "choice", Select {}, &[beyond, yes.clone(), no.clone()])
}

fn thresholded_relu(cx: &mut Importer<'_>, node: &Node, x: &View) -> NodeResult<View> {
    let zero = number(cx, "zero", cx.dtype(x), 0.0)?;
    where_beyond(cx, x, CompareFn::Gt, node.float("alpha", 1.0)?, x, &zero)
}

fn shrink(cx: &mut Importer<'_>, node: &Node, x: &View) -> NodeResult<View> {
    let (limit, bias) = (node.float("lambd", 0.5)?, node.float("bias", 0.0)?);
    let zero = number(cx, "zero", cx.dtype(x), 0.0)?;
    let (up, down) = (affine(cx, "up", x, 1.0, bias)?, affine(cx, "down", x, 1.0, -bias)?);
    let upper = where_beyond(cx, x, CompareFn::Gt, limit, &down, &zero)?;
    where_beyond(cx, x, CompareFn::Lt, -limit, &up, &upper)
}

/// `sqrt(sign * x^2 + shift)`.
fn leg(cx: &mut Importer<'_>, x: &View, sign: f64, shift: f64) -> NodeResult<View> {
    let square = apply(cx, "square", UnaryFn::Square, x)?;
    let rest = affine(cx, "rest", &square, sign, shift)?;
    apply(cx, "leg", UnaryFn::Sqrt, &rest)
}

fn asin(cx: &mut Importer<'_>, _: &Node, x: &View) -> NodeResult<View> {
    let leg = leg(cx, x, -1.0, 1.0)?;
    binary(cx, "", BinaryFn::Atan2, x, &leg)
}

fn acos(cx: &mut Importer<'_>, _: &Node, x: &View) -> NodeResult<View> {
    let leg = leg(cx, x, -1.0, 1.0)?;
    binary(cx, "", BinaryFn::Atan2, &leg, x)
}

fn atan(cx: &mut Importer<'_>, _: &Node, x: &View) -> NodeResult<View> {
    against(cx, "", BinaryFn::Atan2, x, 1.0)
}

/// `sign(x) ln(|x| + sqrt(x^2 + 1))`: the sum never cancels.
fn asinh(cx: &mut Importer<'_>, _: &Node, x: &View) -> NodeResult<View> {
    let (leg, size) = (leg(cx, x, 1.0, 1.0)?, apply(cx, "abs", UnaryFn::Abs, x)?);
    let sum = binary(cx, "sum", BinaryFn::Add, &size, &leg)?;
    let (log, sign) = (apply(cx, "log", UnaryFn::Log, &sum)?, apply(cx, "sign", UnaryFn::Sign, x)?);
    binary(cx, "", BinaryFn::Mul, &log, &sign)
}

fn acosh(cx: &mut Importer<'_>, _: &Node, x: &View) -> NodeResult<View> {
    let leg = leg(cx, x, 1.0, -1.0)?;
    let sum = binary(cx, "sum", BinaryFn::Add, x, &leg)?;
    apply(cx, "", UnaryFn::Log, &sum)
}

/// `(ln(1 + x) - ln(1 - x)) / 2`.
fn atanh(cx: &mut Importer<'_>, _: &Node, x: &View) -> NodeResult<View> {
    let negated = apply(cx, "neg", UnaryFn::Neg, x)?;
    let (up, down) = (apply(cx, "up", UnaryFn::Log1p, x)?, apply(cx, "down", UnaryFn::Log1p, &negated)?);
    let both = binary(cx, "both", BinaryFn::Sub, &up, &down)?;
    affine(cx, "", &both, 0.5, 0.0)
}

fn gelu(cx: &mut Importer<'_>, node: &Node, x: &View) -> NodeResult<View> {
    let f = match node.text("approximate", "none")?.as_str() {
        "tanh" => UnaryFn::GeluTanh,
        "none" => UnaryFn::Gelu,
        other => return Err(NodeError::invalid(format!("unknown approximation `{other}`"))),
    };
    apply(cx, "", f, x)
}

fn leaky_relu(cx: &mut Importer<'_>, node: &Node, x: &View) -> NodeResult<View> {
    apply(cx, "", UnaryFn::LeakyRelu(Real(node.float("alpha", 0.01)?)), x)
}

fn swish(cx: &mut Importer<'_>, node: &Node, x: &View) -> NodeResult<View> {
    let alpha = node.float("alpha", 1.0)?;
    if alpha == 1.0 {
        return apply(cx, "", UnaryFn::Silu, x);
    }
    let scaled = affine(cx, "scale", x, alpha, 0.0)?;
    let gate = apply(cx, "sigmoid", UnaryFn::Sigmoid, &scaled)?;
    binary(cx, "", BinaryFn::Mul, x, &gate)
}

fn against(cx: &mut Importer<'_>, what: &str, f: BinaryFn, x: &View, limit: f64) -> NodeResult<View> {
    let limit = number(cx, "limit", cx.dtype(x), limit)?;
    binary(cx, what, f, x, &limit)
}

fn clip(cx: &mut Importer<'_>, node: &Node, x: &View) -> NodeResult<View> {
    let mut y = x.clone();
    for (i, f, what) in [(1, BinaryFn::Max, "low"), (2, BinaryFn::Min, "high")] {
        if !cx.given(node, i) {
            continue;
        }
        let known = cx.literal(node, i)?.and_then(|l| l.scalar());
        y = match known {
            // A missing limit becomes one that no number exceeds.
            Some(limit) if limit.is_infinite() || limit.abs() >= f64::from(f32::MAX) => y,
            Some(0.0) if i == 1 && cx.dtype(&y).is_float() => apply(cx, what, UnaryFn::Relu, &y)?,
            Some(limit) => against(cx, what, f, &y, limit)?,
            None => {
                let limit = cx.view(node, i)?;
                binary(cx, what, f, &y, &limit)?
            }
        };
    }
    Ok(y)
}

/// `max(0, min(1, x))`.
fn unit_clip(cx: &mut Importer<'_>, x: &View) -> NodeResult<View> {
    let low = apply(cx, "low", UnaryFn::Relu, x)?;
    against(cx, "high", BinaryFn::Min, &low, 1.0)
}

fn hard_sigmoid(cx: &mut Importer<'_>, node: &Node, x: &View) -> NodeResult<View> {
    let line = affine(cx, "line", x, node.float("alpha", 0.2)?, node.float("beta", 0.5)?)?;
    unit_clip(cx, &line)
}

fn hard_swish(cx: &mut Importer<'_>, _: &Node, x: &View) -> NodeResult<View> {
    let line = affine(cx, "line", x, 1.0 / 6.0, 0.5)?;
    let gate = unit_clip(cx, &line)?;
    binary(cx, "", BinaryFn::Mul, x, &gate)
}

/// `max(x, 0) + ln(1 + exp(-|x|))`, which cannot overflow.
fn softplus(cx: &mut Importer<'_>, _: &Node, x: &View) -> NodeResult<View> {
    let positive = apply(cx, "relu", UnaryFn::Relu, x)?;
    let size = apply(cx, "abs", UnaryFn::Abs, x)?;
    let negated = apply(cx, "neg", UnaryFn::Neg, &size)?;
    let tail = apply(cx, "exp", UnaryFn::Exp, &negated)?;
    let tail = affine(cx, "one_more", &tail, 1.0, 1.0)?;
    let tail = apply(cx, "log", UnaryFn::Log, &tail)?;
    binary(cx, "", BinaryFn::Add, &positive, &tail)
}

fn softsign(cx: &mut Importer<'_>, _: &Node, x: &View) -> NodeResult<View> {
    let size = apply(cx, "abs", UnaryFn::Abs, x)?;
    let divisor = affine(cx, "one_more", &size, 1.0, 1.0)?;
    binary(cx, "", BinaryFn::Div, x, &divisor)
}

fn mish(cx: &mut Importer<'_>, node: &Node, x: &View) -> NodeResult<View> {
    let soft = softplus(cx, node, x)?;
    let gate = apply(cx, "tanh", UnaryFn::Tanh, &soft)?;
    binary(cx, "gated", BinaryFn::Mul, x, &gate)
}

/// `positive * max(x, 0) + negative * (exp(min(x, 0) * steep) - 1)`.
fn two_sided(cx: &mut Importer<'_>, x: &View, positive: f64, negative: f64, steep: f64) -> NodeResult<View> {
    let up = apply(cx, "positive", UnaryFn::Relu, x)?;
    let up = affine(cx, "positive.scale", &up, positive, 0.0)?;
    let down = against(cx, "negative", BinaryFn::Min, x, 0.0)?;
    let down = affine(cx, "negative.steep", &down, steep, 0.0)?;
    let down = apply(cx, "negative.exp", UnaryFn::Exp, &down)?;
    let down = affine(cx, "negative.scale", &down, negative, -negative)?;
    binary(cx, "", BinaryFn::Add, &up, &down)
}

fn elu(cx: &mut Importer<'_>, node: &Node, x: &View) -> NodeResult<View> {
    two_sided(cx, x, 1.0, node.float("alpha", 1.0)?, 1.0)
}

fn selu(cx: &mut Importer<'_>, node: &Node, x: &View) -> NodeResult<View> {
    let (alpha, gamma) = (node.float("alpha", 1.673_263_2)?, node.float("gamma", 1.050_701)?);
    two_sided(cx, x, gamma, alpha * gamma, 1.0)
}

fn celu(cx: &mut Importer<'_>, node: &Node, x: &View) -> NodeResult<View> {
    let alpha = node.float("alpha", 1.0)?;
    two_sided(cx, x, 1.0, alpha, 1.0 / alpha)
}

fn prelu(cx: &mut Importer<'_>, node: &Node, x: &View) -> NodeResult<View> {
    let slope = cx.view(node, 1)?;
    let up = apply(cx, "positive", UnaryFn::Relu, x)?;
    let down = against(cx, "negative", BinaryFn::Min, x, 0.0)?;
    let down = binary(cx, "negative.slope", BinaryFn::Mul, &down, &slope)?;
    binary(cx, "", BinaryFn::Add, &up, &down)
}

fn tan(cx: &mut Importer<'_>, _: &Node, x: &View) -> NodeResult<View> {
    let (sin, cos) = (apply(cx, "sin", UnaryFn::Sin, x)?, apply(cx, "cos", UnaryFn::Cos, x)?);
    binary(cx, "", BinaryFn::Div, &sin, &cos)
}

/// `(exp(x) + sign * exp(-x)) / 2`.
fn hyperbolic(cx: &mut Importer<'_>, x: &View, f: BinaryFn) -> NodeResult<View> {
    let up = apply(cx, "exp", UnaryFn::Exp, x)?;
    let negated = apply(cx, "neg", UnaryFn::Neg, x)?;
    let down = apply(cx, "neg.exp", UnaryFn::Exp, &negated)?;
    let sum = binary(cx, "both", f, &up, &down)?;
    affine(cx, "", &sum, 0.5, 0.0)
}

fn sinh(cx: &mut Importer<'_>, _: &Node, x: &View) -> NodeResult<View> {
    hyperbolic(cx, x, BinaryFn::Sub)
}

fn cosh(cx: &mut Importer<'_>, _: &Node, x: &View) -> NodeResult<View> {
    hyperbolic(cx, x, BinaryFn::Add)
}
