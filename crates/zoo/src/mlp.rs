//! Multi-layer perceptron; with `loss=elementwise`, the graph of SoyBean's analysis (arXiv 1805.04170).
//!
//! With the default loss: `layers` hidden layers with ReLU, a classifier, cross-entropy. With
//! `loss=elementwise`: `layers` square layers of width `hidden` without bias, an input of the same width,
//! a ReLU after each, and a loss that can be split by samples only.

use super::{
    Family, LossResult, OptionValues,
    options::{DTYPE, batch, choice, classes, count, hidden},
};
use crate::layers::{cross_entropy, data, element_wise_loss, ids, linear, relu};
use shardwright_graph::GraphBuilder;

pub(super) const FAMILY: Family = Family {
    name: "mlp",
    summary: "fully connected layers with ReLU; loss=elementwise gives SoyBean's square network",
    tiny: "batch=4,input=12,hidden=8,layers=2,classes=5",
    transformer: false,
    options: &[
        batch(64),
        hidden(1024),
        count("layers", 3, 20_000, "layers"),
        count("input", 784, 1 << 24, "features per sample (loss=elementwise: always hidden)"),
        classes(10),
        choice("bias", &["yes", "no"], "whether layers have biases (loss=elementwise: never)"),
        choice("loss", &["cross_entropy", "elementwise"], "the loss function"),
        DTYPE,
    ],
    build,
};

fn build(b: &mut GraphBuilder, o: &OptionValues) -> LossResult {
    let square = o.word("loss") == "elementwise";
    for fixed in ["input", "classes", "bias"] {
        if square && o.is_given(fixed) {
            return Err(o
                .conflict(format!("{fixed} has no meaning with loss=elementwise; leave it out"))
                .into());
        }
    }
    let bias = !square && o.word("bias") == "yes";
    let (samples, hidden) = (o.batch(), o.count("hidden"));
    let input = if square { hidden } else { o.count("input") };
    let mut x = data(b, "input", o.dtype(), &[samples, input])?;
    for i in 1..=o.count("layers") {
        x = linear(b, &format!("fc{i}"), x, hidden, bias)?;
        x = relu(b, &format!("relu{i}"), x)?;
    }
    if square {
        return Ok(element_wise_loss(b, "loss", x)?);
    }
    let logits = linear(b, "classifier", x, o.count("classes"), bias)?;
    let labels = ids(b, "labels", &[samples], o.count("classes"))?;
    Ok(cross_entropy(b, "loss", logits, labels)?)
}
