//! Folding of ops that compute: element-wise functions, reductions, running sums.

use super::{
    LiteralInputs, foldable, input,
    moves::spread,
    shapes::{axes_of, axis_of, broadcast},
};
use crate::{
    error::{NodeError, NodeResult},
    literal::{Literal, Numbers, part_count, round_to},
    proto::Node,
};
use shardwright_graph::DType;

pub(super) fn unary(node: &Node, x: &Literal) -> NodeResult<Option<Vec<Literal>>> {
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

pub(super) fn binary(node: &Node, inputs: &LiteralInputs<'_>) -> NodeResult<Option<Vec<Literal>>> {
    if inputs.len() != 2 {
        // Min and Max take one or more operands.
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
                "Div" if y.contains(&0) => return Err(NodeError::invalid("a division by zero")),
                "Div" => i64::wrapping_div,
                "Mod" if y.contains(&0) => return Err(NodeError::invalid("a division by zero")),
                "Mod" if node.flag("fmod", false)? => i64::wrapping_rem,
                // The result has the sign of the divisor, as in Python.
                "Mod" => |x, y| x.wrapping_rem(y).wrapping_add(y).wrapping_rem(y),
                "Pow" if y.iter().any(|&y| u32::try_from(y).is_err()) => {
                    return Err(NodeError::invalid(
                        "a power of whole numbers with a negative or huge exponent",
                    ));
                }
                "Pow" => |x, y| x.wrapping_pow(y as u32),
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
        // The operands of Pow may have different types.
        _ => return Ok(None),
    };
    let dtype = if truth { DType::Bool } else { a.dtype };
    Ok(Some(vec![Literal { dtype, shape, numbers, assumed: false }]))
}

pub(super) fn reduce(node: &Node, inputs: &LiteralInputs<'_>) -> NodeResult<Option<Vec<Literal>>> {
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
    let (least, most) = match x.dtype {
        DType::Bool => (0, 1),
        DType::I32 => (i64::from(i32::MIN), i64::from(i32::MAX)),
        _ => (i64::MIN, i64::MAX),
    };
    let (start, f): (i64, fn(i64, i64) -> i64) = match node.op_type.as_str() {
        "ReduceProd" => (1, i64::wrapping_mul),
        "ReduceSum" => (0, i64::wrapping_add),
        "ReduceMax" => (least, i64::max),
        _ => (most, i64::min),
    };
    let Some(elements) = foldable(&kept) else { return Ok(None) };
    let mut sums = vec![start; elements];
    for (&value, place) in values.iter().zip(spread(&kept, &x.shape)) {
        sums[place] = f(sums[place], value);
    }
    Ok(Some(vec![Literal::ints(x.dtype, shape, sums)]))
}

pub(super) fn cumsum(node: &Node, x: &Literal, axis: &[i64]) -> NodeResult<Option<Vec<Literal>>> {
    if node.flag("exclusive", false)? || node.flag("reverse", false)? {
        return Ok(None);
    }
    let &[axis] = axis else { return Err(NodeError::invalid("the axis must be a single number")) };
    let axis = axis_of(axis, x.shape.len())?;
    let step = part_count(&x.shape[axis + 1..]);
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
