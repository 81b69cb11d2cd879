//! Constant folding: nodes whose inputs are all known are evaluated during the import.
//!
//! Exporters compute shapes at run time (`Shape`, `Gather`, `Concat`, ...) and build masks and positions from ranges.
//! None of that belongs in a training step. Folding is bounded: a result has at most [`MOST_FOLDED`] elements, and the
//! importer bounds their total.

mod moves;
mod numbers;
mod shapes;

pub(crate) use shapes::{
    SliceRange, axes_of, axis_of, broadcast, flattened, index_into, permutation, reshaped, slice_ranges,
    split_sizes, squeezed,
};

use super::{
    error::{NodeError, NodeResult},
    literal::{Literal, count, round_to},
    proto::Node,
    storage::{MOST_FOLDED, StoredTensor, attribute_type, sizes},
};
use moves::{
    concat, expand, gather, gather_elements, non_zero, select, slice, split, tile, transpose, trilu,
};
use numbers::{binary, cumsum, reduce, unary};
use shardwright_graph::DType;

/// The known inputs of a node; `None` for an input that is left out.
pub(crate) type LiteralInputs<'a> = [Option<&'a Literal>];

/// The number of elements of a result; `None` if it is too large to fold.
fn foldable(shape: &[u64]) -> Option<usize> {
    count(shape).filter(|&n| n <= MOST_FOLDED)
}

fn assumed(inputs: &LiteralInputs<'_>) -> bool {
    inputs.iter().flatten().any(|l| l.assumed)
}

fn input<'a>(inputs: &LiteralInputs<'a>, i: usize) -> NodeResult<&'a Literal> {
    inputs.get(i).copied().flatten().ok_or_else(|| NodeError::invalid(format!("input {i} is missing")))
}

/// Evaluates a node with known inputs. `None`: the op is not folded, or its result is too large.
pub(crate) fn fold(node: &Node, opset: i64, inputs: &LiteralInputs<'_>) -> NodeResult<Option<Vec<Literal>>> {
    let mut results = match fold_op(node, opset, inputs)? {
        Some(results) => results,
        None => return Ok(None),
    };
    if assumed(inputs) {
        results.iter_mut().for_each(|r| r.assumed = true);
    }
    Ok(Some(results))
}

fn fold_op(node: &Node, opset: i64, inputs: &LiteralInputs<'_>) -> NodeResult<Option<Vec<Literal>>> {
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
        "Expand" => expand(x()?, list(1)?),
        "Tile" => tile(x()?, list(1)?),
        "Where" => select(inputs),
        "Trilu" => {
            let k = match inputs.get(1).copied().flatten() {
                None => 0,
                Some(k) => match k.as_ints()? {
                    &[k] => k,
                    _ => return Err(NodeError::invalid("the diagonal `k` must be a single number")),
                },
            };
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

/// The target type of a Cast.
pub(crate) fn cast_type(node: &Node) -> NodeResult<DType> {
    attribute_type(node.int("to", 0)?)
}

fn constant(node: &Node) -> NodeResult<Literal> {
    if let Some(tensor) = node.tensor("value")? {
        let stored = StoredTensor::read(tensor)?;
        let found = stored.fold(&super::storage::NoExternalData)?;
        return found.ok_or_else(|| NodeError::unsupported("a constant of more than four million elements"));
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
    Err(NodeError::unsupported("a constant that is not a dense tensor of numbers"))
}

/// The number that a ConstantOfShape repeats.
pub(crate) fn fill_value(node: &Node) -> NodeResult<Literal> {
    match node.tensor("value")? {
        None => Ok(Literal::reals(DType::F32, vec![], vec![0.0])),
        Some(tensor) => StoredTensor::read(tensor)?
            .fold(&super::storage::NoExternalData)?
            .filter(|l| l.len() == 1)
            .ok_or_else(|| NodeError::invalid("`value` must be a single number")),
    }
}

fn constant_of_shape(node: &Node, dims: &[i64]) -> NodeResult<Option<Vec<Literal>>> {
    let shape = sizes(dims)?;
    let value = fill_value(node)?;
    Ok(foldable(&shape).map(|n| vec![value.pick(shape, std::iter::repeat_n(0, n))]))
}

fn range(inputs: &LiteralInputs<'_>) -> NodeResult<Option<Vec<Literal>>> {
    let number = |i: usize| {
        let literal = input(inputs, i)?;
        literal.scalar().ok_or_else(|| NodeError::invalid("start, limit and step must be single numbers"))
    };
    let (start, limit, step) = (number(0)?, number(1)?, number(2)?);
    if step == 0.0 || !step.is_finite() || !start.is_finite() || !limit.is_finite() {
        return Err(NodeError::invalid(format!(
            "the range from {start} to {limit} by {step} is invalid or too long"
        )));
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
