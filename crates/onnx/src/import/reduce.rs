//! Sums, means and maxima over dimensions; softmax.

use super::{
    Import,
    elementwise::{apply, as_type, binary, negated},
    movement::{single_atom, take},
};
use crate::{
    error::{NodeError, NodeResult},
    fold::{axes_of, axis_of},
    importer::{Base, Importer},
    proto::Node,
    view::{DimAtoms, View},
};
use shardwright_graph::{
    DType, Op, Real,
    ops::{BinaryFn, LogSoftmax, Reduce, Softmax, UnaryFn},
};
use smallvec::SmallVec;

pub(super) fn find(op: &str) -> Option<Import> {
    Some(match op {
        "ReduceMean" | "ReduceSum" | "ReduceProd" | "ReduceMax" | "ReduceMin" | "ReduceL1" | "ReduceL2"
        | "ReduceSumSquare" | "ReduceLogSum" | "ReduceLogSumExp" => reduce,
        "GlobalAveragePool" | "GlobalMaxPool" => global_pool,
        "Softmax" => |cx, node| softmax(cx, node, |axis| Softmax { axis }.into()),
        "LogSoftmax" => |cx, node| softmax(cx, node, |axis| LogSoftmax { axis }.into()),
        _ => return None,
    })
}

/// The function of a reduction.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ReduceKind {
    Sum,
    Mean,
    Max,
}

/// Reduces dimensions of a view. With `keep` they remain as dimensions of size one.
pub(super) fn over(
    cx: &mut Importer<'_>,
    what: &str,
    x: &View,
    dims: &[usize],
    kind: ReduceKind,
    keep: bool,
) -> NodeResult<View> {
    let count: u64 = dims.iter().map(|&d| x.size(d)).product();
    let (shape, positions) = cx.natural(x);
    let gone: SmallVec<[u8; 8]> = dims.iter().flat_map(|&d| x.dims[d].iter().copied()).collect();
    let mut axes: SmallVec<[usize; 4]> = gone.iter().map(|&a| positions[a as usize]).collect();
    axes.sort_unstable();
    let mut result = x.clone();
    if !axes.is_empty() {
        let tensor = cx.resolve(x, &shape)?;
        let op = match kind {
            ReduceKind::Sum => Reduce::sum(axes),
            ReduceKind::Mean => Reduce { scale: Real(1.0 / count as f64), ..Reduce::sum(axes) },
            ReduceKind::Max => Reduce::max(axes),
        };
        result = x.of(Base::Tensor(cx.emit(what, op, &[tensor])?));
    }
    let left: SmallVec<[u8; 8]> = (0..x.atoms.len() as u8).filter(|a| !gone.contains(a)).collect();
    result.atoms = left.iter().map(|&a| x.atoms[a as usize]).collect();
    let renumber = |a: &u8| left.iter().position(|l| l == a).map(|i| i as u8);
    result.dims = (0..x.rank())
        .filter(|d| keep || !dims.contains(d))
        .map(|d| x.dims[d].iter().filter_map(renumber).collect::<DimAtoms>())
        .collect();
    Ok(result)
}

fn reduce(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let x = cx.view(node, 0)?;
    let given = match cx.int_list(node, 1, "axes")? {
        Some(axes) => Some(axes),
        None => node.ints("axes")?.map(<[i64]>::to_vec),
    };
    let empty = given.as_ref().is_none_or(Vec::is_empty);
    let noop = empty && node.flag("noop_with_empty_axes", false)?;
    let dims = match given {
        Some(axes) if !empty => axes_of(&axes, x.rank())?,
        _ if noop => Vec::new(),
        _ => (0..x.rank()).collect(),
    };
    let keep = node.flag("keepdims", true)?;
    let (x, truth) = match cx.dtype(&x) {
        DType::Bool => (as_type(cx, &x, DType::I32)?, true),
        _ => (x, false),
    };
    let y = match node.op_type.as_str() {
        "ReduceSum" => over(cx, "", &x, &dims, ReduceKind::Sum, keep)?,
        "ReduceMean" => over(cx, "", &x, &dims, ReduceKind::Mean, keep)?,
        "ReduceMax" => over(cx, "", &x, &dims, ReduceKind::Max, keep)?,
        "ReduceMin" => {
            let other = negated(cx, "negated", &x)?;
            let largest = over(cx, "max", &other, &dims, ReduceKind::Max, keep)?;
            negated(cx, "", &largest)?
        }
        "ReduceProd" => product_over(cx, &x, &dims, keep)?,
        "ReduceL1" => {
            let x = apply(cx, "abs", UnaryFn::Abs, &x)?;
            over(cx, "", &x, &dims, ReduceKind::Sum, keep)?
        }
        "ReduceL2" | "ReduceSumSquare" => {
            let x = apply(cx, "square", UnaryFn::Square, &x)?;
            let sum = over(cx, "", &x, &dims, ReduceKind::Sum, keep)?;
            if node.op_type == "ReduceL2" { apply(cx, "root", UnaryFn::Sqrt, &sum)? } else { sum }
        }
        "ReduceLogSum" => {
            let sum = over(cx, "sum", &x, &dims, ReduceKind::Sum, keep)?;
            apply(cx, "", UnaryFn::Log, &sum)?
        }
        _ => log_sum_exp(cx, &x, &dims, keep)?,
    };
    let y = if truth { as_type(cx, &y, DType::Bool)? } else { y };
    cx.output_view(node, 0, y);
    Ok(())
}

/// Multiplies by halves: a dimension of n elements needs about log2(n) products.
fn product_over(cx: &mut Importer<'_>, x: &View, dims: &[usize], keep: bool) -> NodeResult<View> {
    let mut y = x.clone();
    for &dim in dims {
        let mut odd: Option<View> = None;
        while y.size(dim) > 1 {
            let half = y.size(dim) / 2;
            if y.size(dim) % 2 == 1 {
                let last = take(cx, "odd", &y, dim, 2 * half, 1)?;
                odd = Some(match odd {
                    None => last,
                    Some(before) => binary(cx, "odds", BinaryFn::Mul, &before, &last)?,
                });
            }
            let (low, high) = (take(cx, "low", &y, dim, 0, half)?, take(cx, "high", &y, dim, half, half)?);
            y = binary(cx, "halves", BinaryFn::Mul, &low, &high)?;
        }
        if let Some(odd) = odd {
            y = binary(cx, "product", BinaryFn::Mul, &y, &odd)?;
        }
    }
    if !keep {
        y.dims = (0..x.rank()).filter(|d| !dims.contains(d)).map(|d| y.dims[d].clone()).collect();
    }
    Ok(y)
}

/// Subtracts the largest element first, so that nothing overflows.
fn log_sum_exp(cx: &mut Importer<'_>, x: &View, dims: &[usize], keep: bool) -> NodeResult<View> {
    let largest = over(cx, "max", x, dims, ReduceKind::Max, true)?;
    let difference = binary(cx, "difference", BinaryFn::Sub, x, &largest)?;
    let exp = apply(cx, "exp", UnaryFn::Exp, &difference)?;
    let sum = over(cx, "sum", &exp, dims, ReduceKind::Sum, true)?;
    let log = apply(cx, "log", UnaryFn::Log, &sum)?;
    let result = binary(cx, "", BinaryFn::Add, &log, &largest)?;
    if keep {
        return Ok(result);
    }
    let mut result = result;
    result.dims = (0..x.rank()).filter(|d| !dims.contains(d)).map(|d| result.dims[d].clone()).collect();
    Ok(result)
}

fn global_pool(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let x = cx.view(node, 0)?;
    if x.rank() < 3 {
        return Err(NodeError::invalid("the input needs spatial dimensions"));
    }
    let dims: Vec<usize> = (2..x.rank()).collect();
    let kind = if node.op_type == "GlobalMaxPool" { ReduceKind::Max } else { ReduceKind::Mean };
    let y = over(cx, "", &x, &dims, kind, true)?;
    cx.output_view(node, 0, y);
    Ok(())
}

fn softmax(cx: &mut Importer<'_>, node: &Node, op: fn(usize) -> Op) -> NodeResult {
    let x = cx.view(node, 0)?;
    let dim = axis_of(node.int("axis", -1)?, x.rank())?;
    let (view, tensor, axis) = single_atom(cx, &x, dim)?;
    let y = cx.emit("", op(axis), &[tensor])?;
    cx.output_view(node, 0, view.of(Base::Tensor(y)));
    Ok(())
}
