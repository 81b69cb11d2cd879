//! Losses that are part of a model.

use super::{
    Import,
    elementwise::{apply, binary, number},
    reduce::{ReduceKind, over},
};
use crate::{
    align::elementwise,
    error::{NodeError, NodeResult},
    importer::{Base, Importer},
    proto::Node,
    view::View,
};
use shardwright_graph::{
    Real, Shape, TensorId, TensorType,
    ops::{
        BinaryFn, Compare, CompareFn, CrossEntropy, Fill, Gather, LogSoftmax, Reduce, Select, SumExp,
        TakeAlong, UnaryFn,
    },
};
use smallvec::smallvec;

pub(super) fn find(op: &str) -> Option<Import> {
    Some(match op {
        "NegativeLogLikelihoodLoss" => |cx, node| loss(cx, node, false),
        "SoftmaxCrossEntropyLoss" => |cx, node| loss(cx, node, true),
        _ => return None,
    })
}

/// The loss of scores (or log-probabilities) `[n, classes, ..]` and labels `[n, ..]`, with an optional weight per class
/// and an optional label to ignore.
fn loss(cx: &mut Importer<'_>, node: &Node, scores: bool) -> NodeResult {
    let (x, labels) = (cx.view(node, 0)?, cx.view(node, 1)?);
    let rank = x.rank();
    if rank < 2 || labels.rank() + 1 != rank {
        return Err(NodeError::invalid(format!(
            "scores of shape {:?} do not fit labels of shape {:?}",
            x.shape(),
            labels.shape()
        )));
    }
    let classes = x.size(1);
    let order: Vec<usize> = (0..rank).filter(|&d| d != 1).chain([1]).collect();
    let rows = cx.plain(&x.transpose(&order))?;
    cx.indexes(&labels, classes);
    let (labels, ignored) = counted(cx, node, labels)?;
    let labels = cx.plain(&labels)?;
    let mut each = if scores {
        cross_entropy(cx, rows, labels, classes)?
    } else {
        likelihood(cx, rows, labels, classes)?
    };
    let weights = weights(cx, node, &x, labels, ignored)?;
    if let Some(weights) = &weights {
        each = binary(cx, "weighted", BinaryFn::Mul, &each, weights)?;
    }
    let all: Vec<usize> = (0..each.rank()).collect();
    let y = match (node.text("reduction", "mean")?.as_str(), weights) {
        ("none", _) => each,
        ("sum", _) => over(cx, "", &each, &all, ReduceKind::Sum, false)?,
        ("mean", None) => over(cx, "", &each, &all, ReduceKind::Mean, false)?,
        ("mean", Some(weights)) => {
            let sum = over(cx, "sum", &each, &all, ReduceKind::Sum, false)?;
            let weight = over(cx, "weight", &weights, &all, ReduceKind::Sum, false)?;
            binary(cx, "", BinaryFn::Div, &sum, &weight)?
        }
        (other, _) => return Err(NodeError::invalid(format!("unknown reduction `{other}`"))),
    };
    cx.output_view(node, 0, y);
    if node.output.get(1).is_some_and(|o| !o.is_empty()) {
        let logs = cx.emit("log_prob", LogSoftmax { axis: rank - 1 }, &[rows])?;
        let back: Vec<usize> = [0, rank - 1].into_iter().chain(1..rank - 1).collect();
        let logs = cx.seen(logs).transpose(&back);
        cx.output_view(node, 1, logs);
    }
    Ok(())
}

/// Labels with ignored ones replaced by 0, so that all are classes, and a mask of the labels that count.
fn counted(cx: &mut Importer<'_>, node: &Node, labels: View) -> NodeResult<(View, Option<View>)> {
    if !node.has("ignore_index") {
        return Ok((labels, None));
    }
    let dtype = cx.dtype(&labels);
    let ignored = number(cx, "ignore_index", dtype, node.int("ignore_index", 0)? as f64)?;
    let zero = number(cx, "zero", dtype, 0.0)?;
    let ignored = elementwise(cx, "is_ignored", Compare { f: CompareFn::Eq }, &[labels.clone(), ignored])?;
    let labels = elementwise(cx, "labels", Select {}, &[ignored.clone(), zero, labels])?;
    Ok((labels, Some(ignored)))
}

/// The weight of each label; `None` if all weights are one.
fn weights(
    cx: &mut Importer<'_>,
    node: &Node,
    scores: &View,
    labels: TensorId,
    ignored: Option<View>,
) -> NodeResult<Option<View>> {
    let given = if cx.given(node, 2) { Some(cx.view(node, 2)?) } else { None };
    let dtype = cx.dtype(scores);
    let of_labels = match (&given, &ignored) {
        (None, None) => return Ok(None),
        (Some(table), _) => {
            cx.freeze(table);
            let table = cx.plain(table)?;
            cx.emit("class_weights", Gather { axis: 0, base: 0, extent: scores.size(1) }, &[table, labels])?
        }
        (None, Some(_)) => {
            let ty = TensorType::new(dtype, cx.b.ty(labels).shape.clone());
            cx.emit("ones", Fill { value: Real(1.0), ty }, &[])?
        }
    };
    let of_labels = cx.seen(of_labels);
    let Some(ignored) = ignored else { return Ok(Some(of_labels)) };
    let zero = number(cx, "nothing", dtype, 0.0)?;
    elementwise(cx, "label_weights", Select {}, &[ignored, zero, of_labels]).map(Some)
}

/// The three ops of `layers::cross_entropy`, for scores with the classes last.
fn cross_entropy(
    cx: &mut Importer<'_>,
    logits: TensorId,
    labels: TensorId,
    classes: u64,
) -> NodeResult<View> {
    let last = cx.b.ty(logits).rank() - 1;
    let largest = cx.emit("max", Reduce::max(smallvec![last]), &[logits])?;
    let sum = cx.emit("sum_exp", SumExp {}, &[logits, largest])?;
    let op = CrossEntropy { base: 0, classes };
    let each = cx.emit("cross_entropy", op, &[logits, labels, largest, sum])?;
    Ok(cx.seen(each))
}

/// The negated log-probability of each label.
fn likelihood(cx: &mut Importer<'_>, logs: TensorId, labels: TensorId, classes: u64) -> NodeResult<View> {
    let shape = cx.b.ty(labels).shape.clone();
    let column = Shape::new(&[&shape[..], &[1]].concat());
    let labels = cx.resolve(&View::plain(Base::Tensor(labels), &shape), &column)?;
    let op = TakeAlong { axis: shape.rank(), base: 0, extent: classes };
    let taken = cx.emit("taken", op, &[logs, labels])?;
    let taken = cx.resolve(&View::plain(Base::Tensor(taken), &column), &shape)?;
    let taken = cx.seen(taken);
    apply(cx, "likelihood", UnaryFn::Neg, &taken)
}
