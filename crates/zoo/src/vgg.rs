//! VGG-16, configuration D of Simonyan and Zisserman (arXiv 1409.1556). 138,357,544 parameters at 224x224.
//!
//! As for AlexNet, the classifier reads the feature map without pooling it to 7x7 first.

use super::{
    Family, LossResult, OptionValues,
    options::{DTYPE, WIDTH, batch, classes, dropout, image},
};
use crate::layers::{
    self, Conv2d, Pool2d, conv2d, cross_entropy, data, flatten, ids, linear, max_pool2d, relu,
};
use shardwright_graph::GraphBuilder;

pub(super) const FAMILY: Family = Family {
    name: "vgg16",
    summary: "VGG-16: thirteen 3x3 convolutions, three linear layers",
    tiny: "batch=2,image=32,width=0.0625,classes=5,dropout=0",
    transformer: false,
    options: &[batch(128), image(224, 32), classes(1000), WIDTH, dropout(0.5), DTYPE],
    build,
};

/// Output channels and number of convolutions of each stage.
const STAGES: [(u64, u64); 5] = [(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)];

fn build(b: &mut GraphBuilder, o: &OptionValues) -> LossResult {
    let (samples, size) = (o.batch(), o.count("image"));
    let mut x = data(b, "images", o.dtype(), &[samples, 3, size, size])?;
    for (stage, (outputs, convolutions)) in (1..).zip(STAGES) {
        for i in 1..=convolutions {
            let conv = Conv2d::square(o.channels(outputs), 3).same().biased();
            x = conv2d(b, &format!("conv{stage}_{i}"), x, conv)?;
            x = relu(b, &format!("relu{stage}_{i}"), x)?;
        }
        x = max_pool2d(b, &format!("pool{stage}"), x, Pool2d::new(2, 2))?;
    }
    x = flatten(b, "flatten", x)?;
    for i in 6..=7 {
        x = linear(b, &format!("fc{i}"), x, o.channels(4096), true)?;
        x = relu(b, &format!("relu{i}"), x)?;
        x = layers::dropout(b, &format!("dropout{i}"), x, o.dropout())?;
    }
    let logits = linear(b, "fc8", x, o.count("classes"), true)?;
    let labels = ids(b, "labels", &[samples], o.count("classes"))?;
    Ok(cross_entropy(b, "loss", logits, labels)?)
}
