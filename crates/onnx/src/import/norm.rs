//! Normalisation: statistics over dimensions, then one op that applies them, as in `layers::norm`.

use super::{
    Import,
    elementwise::{affine, apply, binary, number},
    movement::reshaped_view,
};
use crate::{
    align::elementwise,
    error::{NodeError, NodeResult},
    fold::axis_of,
    importer::{Base, Importer},
    proto::Node,
    view::View,
};
use shardwright_graph::{
    Init, Real, Shape, TensorId,
    ops::{BinaryFn, Compare, CompareFn, Normalize, Select, UnaryFn},
};
use smallvec::{SmallVec, smallvec};

pub(super) fn find(op: &str) -> Option<Import> {
    Some(match op {
        "BatchNormalization" => batch_norm,
        "LayerNormalization" => layer_norm,
        "RMSNormalization" | "SimplifiedLayerNormalization" => rms_norm,
        "InstanceNormalization" => instance_norm,
        "GroupNormalization" => group_norm,
        "LpNormalization" => lp_norm,
        _ => return None,
    })
}

/// The mean (if the norm is centered) and the variance of `x` over the norm's axes.
fn statistics(cx: &mut Importer<'_>, norm: &Normalize, x: TensorId) -> NodeResult<SmallVec<[TensorId; 2]>> {
    let mut stats = SmallVec::new();
    let mut inputs: SmallVec<[TensorId; 2]> = smallvec![x];
    if norm.centered {
        let mean = cx.emit("mean", norm.mean(), &[x])?;
        stats.push(mean);
        inputs.push(mean);
    }
    stats.push(cx.emit("variance", norm.variance(), &inputs)?);
    Ok(stats)
}

/// Scale and shift as tensors of the shape that the norm expects.
fn parameters(
    cx: &mut Importer<'_>,
    scale: &View,
    shift: Option<&View>,
    shape: &Shape,
) -> NodeResult<SmallVec<[TensorId; 2]>> {
    let mut tensors = SmallVec::new();
    for (view, start) in [(Some(scale), 1.0), (shift, 0.0)] {
        let Some(view) = view else { continue };
        cx.starts_as(view, Init::Constant(Real(start)));
        tensors.push(cx.resolve(view, shape)?);
    }
    Ok(tensors)
}

fn batch_norm(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let eps = node.float("epsilon", 1e-5)?;
    let x = cx.tensor(node, 0)?;
    let shape = cx.b.ty(x).shape.clone();
    if shape.rank() < 2 {
        return Err(NodeError::invalid(format!("the input needs channels, got shape {shape}")));
    }
    let norm = Normalize::batch(&shape, eps);
    let channels = Shape::new(&[shape[1]]);
    let mut inputs: SmallVec<[TensorId; 5]> = smallvec![x];
    let (mean, variance) = (cx.view(node, 3)?, cx.view(node, 4)?);
    for (what, i) in [("scale", 1), ("shift", 2), ("mean", 3), ("variance", 4)] {
        let found = cx.view(node, i)?.shape();
        if found != channels[..] {
            return Err(NodeError::invalid(format!(
                "the {what} has shape {found:?}, expected one number for each of {} channels",
                shape[1]
            )));
        }
    }
    if cx.training || node.flag("training_mode", false)? {
        // A training step normalises by its own batch; running averages are for inference.
        let stats = statistics(cx, &norm, x)?;
        let momentum = node.float("momentum", 0.9)?;
        for (i, (view, &now)) in [mean, variance].iter().zip(&stats).enumerate() {
            if node.output.get(i + 1).is_some_and(|o| !o.is_empty()) {
                let old = affine(cx, "old_average", view, momentum, 0.0)?;
                let now = cx.seen(now);
                let now = affine(cx, "new_average", &now, 1.0 - momentum, 0.0)?;
                let average = binary(cx, "average", BinaryFn::Add, &old, &now)?;
                cx.output_view(node, i + 1, average);
            }
        }
        inputs.extend(stats);
    } else {
        for (view, start) in [(mean, 0.0), (variance, 1.0)] {
            cx.freeze(&view);
            cx.starts_as(&view, Init::Constant(Real(start)));
            inputs.push(cx.resolve(&view, &channels)?);
        }
    }
    let (scale, shift) = (cx.view(node, 1)?, cx.view(node, 2)?);
    inputs.extend(parameters(cx, &scale, Some(&shift), &channels)?);
    let y = cx.emit("", norm, &inputs)?;
    cx.output(node, 0, y);
    Ok(())
}

/// A view whose dimensions from `first` on have their atoms in storage order, as a tensor, and the positions of those
/// atoms.
fn rows(cx: &mut Importer<'_>, x: &View, first: usize) -> NodeResult<(View, TensorId, SmallVec<[usize; 4]>)> {
    let mut view = x.clone();
    for _ in 0..2 {
        let (shape, positions) = cx.natural(&view);
        let axes: SmallVec<[usize; 4]> =
            view.dims[first..].iter().flatten().map(|&a| positions[a as usize]).collect();
        if axes.is_sorted() {
            let tensor = cx.resolve(&view, &shape)?;
            return Ok((View { scale: 1.0, ..view }, tensor, axes));
        }
        let plain = cx.plain(&view)?;
        view = cx.seen(plain);
    }
    Err(NodeError::invalid("the normalised dimensions cannot be brought to storage order"))
}

/// Normalises over the dimensions from `first` on.
fn over_last(cx: &mut Importer<'_>, node: &Node, centered: bool, eps: f64) -> NodeResult {
    let x = cx.view(node, 0)?;
    let first = axis_of(node.int("axis", -1)?, x.rank())?;
    let (view, tensor, axes) = rows(cx, &x, first)?;
    let shape = cx.b.ty(tensor).shape.clone();
    let sizes: Shape = axes.iter().map(|&a| shape[a]).collect();
    let count = sizes.elements();
    let normalized = view.shape()[first..].to_vec();
    let scale = cx.view(node, 1)?;
    let shift = if cx.given(node, 2) { Some(cx.view(node, 2)?) } else { None };
    let fits = |v: &View| v.shape() == normalized || v.elements() == count && v.rank() <= normalized.len();
    let inside = fits(&scale) && shift.as_ref().is_none_or(fits);
    let norm = Normalize {
        params: axes.clone(),
        axes,
        centered,
        scaled: inside,
        shifted: inside && shift.is_some(),
        eps: Real(eps),
        count,
    };
    let mut inputs: SmallVec<[TensorId; 5]> = smallvec![tensor];
    let stats = statistics(cx, &norm, tensor)?;
    inputs.extend(stats.iter().copied());
    if inside {
        inputs.extend(parameters(cx, &scale, shift.as_ref(), &sizes)?);
    }
    let y = cx.emit("", norm, &inputs)?;
    let mut y = view.of(Base::Tensor(y));
    if !inside {
        // Weights of another shape broadcast.
        y = binary(cx, "scale", BinaryFn::Mul, &y, &scale)?;
        if let Some(shift) = &shift {
            y = binary(cx, "shift", BinaryFn::Add, &y, shift)?;
        }
    }
    cx.output_view(node, 0, y);
    returned_statistics(cx, node, &view, first, &stats, eps)
}

/// Binds the mean and the inverse deviation if they are read.
fn returned_statistics(
    cx: &mut Importer<'_>,
    node: &Node,
    x: &View,
    first: usize,
    stats: &[TensorId],
    eps: f64,
) -> NodeResult {
    let wanted = |i: usize| node.output.get(i).is_some_and(|o| !o.is_empty());
    if !wanted(1) && !wanted(2) {
        return Ok(());
    }
    let [mean, variance] = stats else { return Err(NodeError::unsupported("an output of the statistics")) };
    if !x.in_order() {
        return Err(NodeError::unsupported("statistics of a transposed tensor"));
    }
    let mut shape = x.shape();
    shape[first..].fill(1);
    let mean = cx.seen(*mean);
    let mean = reshaped_view(cx, &mean, &shape)?;
    cx.output_view(node, 1, mean);
    let variance = cx.seen(*variance);
    let shifted = affine(cx, "stable_variance", &variance, 1.0, eps)?;
    let inverse = apply(cx, "inverse_deviation", UnaryFn::Rsqrt, &shifted)?;
    let inverse = reshaped_view(cx, &inverse, &shape)?;
    cx.output_view(node, 2, inverse);
    Ok(())
}

fn layer_norm(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let eps = node.float("epsilon", 1e-5)?;
    over_last(cx, node, true, eps)
}

fn rms_norm(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let eps = node.float("epsilon", 1e-5)?;
    over_last(cx, node, false, eps)
}

/// Normalises over these axes, without weights.
fn bare(cx: &mut Importer<'_>, x: TensorId, axes: SmallVec<[usize; 4]>, eps: f64) -> NodeResult<View> {
    let shape = cx.b.ty(x).shape.clone();
    let count = axes.iter().map(|&a| shape[a]).product();
    let norm = Normalize {
        axes,
        params: SmallVec::new(),
        centered: true,
        scaled: false,
        shifted: false,
        eps: Real(eps),
        count,
    };
    let mut inputs: SmallVec<[TensorId; 5]> = smallvec![x];
    inputs.extend(statistics(cx, &norm, x)?);
    let y = cx.emit("", norm, &inputs)?;
    Ok(cx.seen(y))
}

/// Applies scale and shift per channel (dimension 1).
fn per_channel(cx: &mut Importer<'_>, node: &Node, y: &View, sizes: &[u64]) -> NodeResult {
    let mut result = y.clone();
    for (input, start, f, what) in [(1, 1.0, BinaryFn::Mul, "scale"), (2, 0.0, BinaryFn::Add, "shift")] {
        let weight = cx.view(node, input)?;
        cx.starts_as(&weight, Init::Constant(Real(start)));
        let weight = reshaped_view(cx, &weight, sizes)?;
        result = binary(cx, what, f, &result, &weight)?;
    }
    cx.output_view(node, 0, result);
    Ok(())
}

fn instance_norm(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let x = cx.tensor(node, 0)?;
    let rank = cx.b.ty(x).rank();
    if rank < 3 {
        return Err(NodeError::invalid(format!(
            "the input needs channels and a spatial dimension, got {}",
            cx.b.ty(x)
        )));
    }
    let y = bare(cx, x, (2..rank).collect(), node.float("epsilon", 1e-5)?)?;
    let mut sizes = vec![1; rank - 1];
    sizes[0] = y.size(1);
    per_channel(cx, node, &y, &sizes)
}

fn group_norm(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    let x = cx.view(node, 0)?;
    let shape = x.shape();
    let groups = node.size("num_groups", 1)?;
    if shape.len() < 2 || groups == 0 || !shape[1].is_multiple_of(groups) {
        return Err(NodeError::invalid(format!(
            "{groups} groups do not divide the channels of shape {shape:?}"
        )));
    }
    let mut grouped = vec![shape[0], groups, shape[1] / groups];
    grouped.extend(&shape[2..]);
    let tensor = cx.plain(&x)?;
    let seen = cx.seen(tensor);
    let view = reshaped_view(cx, &seen, &grouped)?;
    let tensor = cx.resolve(&view, &Shape::new(&grouped))?;
    let y = bare(cx, tensor, (2..grouped.len()).collect(), node.float("epsilon", 1e-5)?)?;
    // Scale and shift are per group before opset 21, per channel since.
    if cx.opset < 21 {
        let mut sizes = vec![1; grouped.len() - 1];
        sizes[0] = groups;
        let mut result = y;
        for (input, start, f, what) in [(1, 1.0, BinaryFn::Mul, "scale"), (2, 0.0, BinaryFn::Add, "shift")] {
            let weight = cx.view(node, input)?;
            cx.starts_as(&weight, Init::Constant(Real(start)));
            let weight = reshaped_view(cx, &weight, &sizes)?;
            result = binary(cx, what, f, &result, &weight)?;
        }
        let result = reshaped_view(cx, &result, &shape)?;
        cx.output_view(node, 0, result);
        return Ok(());
    }
    let y = reshaped_view(cx, &y, &shape)?;
    let mut sizes = vec![1; shape.len() - 1];
    sizes[0] = shape[1];
    per_channel(cx, node, &y, &sizes)
}

fn lp_norm(cx: &mut Importer<'_>, node: &Node) -> NodeResult {
    use super::reduce::{ReduceKind, over};
    let x = cx.view(node, 0)?;
    let dim = axis_of(node.int("axis", -1)?, x.rank())?;
    let (f, euclidean) = match node.int("p", 2)? {
        1 => (UnaryFn::Abs, false),
        2 => (UnaryFn::Square, true),
        p => return Err(NodeError::invalid(format!("a norm of order {p} is not 1 or 2"))),
    };
    let size = apply(cx, "size", f, &x)?;
    let mut sum = over(cx, "sum", &size, &[dim], ReduceKind::Sum, true)?;
    if euclidean {
        sum = apply(cx, "root", UnaryFn::Sqrt, &sum)?;
    }
    // Rows of zeros are kept: they are divided by one.
    let dtype = cx.dtype(&x);
    let (zero, one) = (number(cx, "zero", dtype, 0.0)?, number(cx, "one", dtype, 1.0)?);
    let nothing = elementwise(cx, "is_zero", Compare { f: CompareFn::Eq }, &[sum.clone(), zero])?;
    let divisor = elementwise(cx, "divisor", Select {}, &[nothing, one, sum])?;
    let y = binary(cx, "", BinaryFn::Div, &x, &divisor)?;
    cx.output_view(node, 0, y);
    Ok(())
}
