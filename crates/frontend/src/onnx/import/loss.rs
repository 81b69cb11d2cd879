//! Losses that are part of a model.

use super::{
    Import,
    reduce::{Joined, over},
};
use crate::onnx::{
    error::{Tried, Trouble},
    importer::Importer,
    proto::Node,
};
use shardwright_graph::ops::{CrossEntropy, Reduce, SumExp};
use smallvec::smallvec;

pub(super) fn find(op: &str) -> Option<Import> {
    Some(match op {
        "SoftmaxCrossEntropyLoss" => softmax_cross_entropy,
        _ => return None,
    })
}

/// Cross-entropy of scores `[n, classes, ..]`, as the three ops of `layers::cross_entropy`.
fn softmax_cross_entropy(cx: &mut Importer<'_>, node: &Node) -> Tried {
    if cx.given(node, 2) || node.has("ignore_index") {
        return Err(Trouble::unsupported("class weights or labels that are ignored"));
    }
    if node.output.get(1).is_some_and(|o| !o.is_empty()) {
        return Err(Trouble::unsupported("probabilities that are returned"));
    }
    let (scores, labels) = (cx.view(node, 0)?, cx.view(node, 1)?);
    let rank = scores.rank();
    if rank < 2 || labels.rank() + 1 != rank {
        return Err(Trouble::wrong(format!("scores {:?} and labels {:?}", scores.shape(), labels.shape())));
    }
    let mut order: Vec<usize> = (0..rank).filter(|&d| d != 1).collect();
    order.push(1);
    let (logits, labels) = (cx.plain(&scores.transpose(&order))?, cx.plain(&labels)?);
    let classes = scores.size(1);
    let largest = cx.emit("max", Reduce::max(smallvec![rank - 1]), &[logits])?;
    let sum = cx.emit("sum_exp", SumExp {}, &[logits, largest])?;
    let op = CrossEntropy { base: 0, classes };
    let each = cx.emit("cross_entropy", op, &[logits, labels, largest, sum])?;
    let each = cx.seen(each);
    let all: Vec<usize> = (0..each.rank()).collect();
    let y = match node.text("reduction", "mean")?.as_str() {
        "mean" => over(cx, "", &each, &all, Joined::Mean, false)?,
        "sum" => over(cx, "", &each, &all, Joined::Sum, false)?,
        _ => each,
    };
    cx.output_view(node, 0, y);
    Ok(())
}
