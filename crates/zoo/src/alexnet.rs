//! AlexNet as in torchvision: the one-tower variant of Krizhevsky's "One weird trick" (arXiv 1404.5997).
//! 61,100,840 parameters at 224x224.
//!
//! torchvision pools adaptively to 6x6 before the classifier, which changes nothing at 224x224. Here the classifier
//! reads the feature map without that pooling, whatever the image size.

use super::{
    Family, LossResult, OptionValues,
    options::{DTYPE, WIDTH, batch, classes, dropout, image},
};
use crate::layers::{
    self, Conv2d, Pool2d, conv2d, cross_entropy, data, flatten, ids, linear, max_pool2d, relu,
};
use shardwright_graph::GraphBuilder;

pub(super) const FAMILY: Family = Family {
    name: "alexnet",
    summary: "AlexNet (one tower, as in torchvision): five convolutions, three linear layers",
    tiny: "batch=2,image=63,width=0.0625,classes=5,dropout=0",
    transformer: false,
    options: &[batch(256), image(224, 63), classes(1000), WIDTH, dropout(0.5), DTYPE],
    build,
};

/// Output channels, kernel, stride, padding, and whether pooling follows.
const CONVOLUTIONS: [(u64, u64, u64, u64, bool); 5] = [
    (64, 11, 4, 2, true),
    (192, 5, 1, 2, true),
    (384, 3, 1, 1, false),
    (256, 3, 1, 1, false),
    (256, 3, 1, 1, true),
];

fn build(b: &mut GraphBuilder, o: &OptionValues) -> LossResult {
    let (samples, size) = (o.batch(), o.count("image"));
    let mut x = data(b, "images", o.dtype(), &[samples, 3, size, size])?;
    for (i, (outputs, kernel, stride, pad, pooled)) in (1..).zip(CONVOLUTIONS) {
        let conv = Conv2d::square(o.channels(outputs), kernel).stride(stride).pad(pad).biased();
        x = conv2d(b, &format!("conv{i}"), x, conv)?;
        x = relu(b, &format!("relu{i}"), x)?;
        if pooled {
            x = max_pool2d(b, &format!("pool{i}"), x, Pool2d::new(3, 2))?;
        }
    }
    x = flatten(b, "flatten", x)?;
    for i in 1..=2 {
        x = layers::dropout(b, &format!("dropout{i}"), x, o.dropout())?;
        x = linear(b, &format!("fc{i}"), x, o.channels(4096), true)?;
        x = relu(b, &format!("fc{i}.relu"), x)?;
    }
    let logits = linear(b, "fc3", x, o.count("classes"), true)?;
    let labels = ids(b, "labels", &[samples], o.count("classes"))?;
    Ok(cross_entropy(b, "loss", logits, labels)?)
}
