//! LeNet-5 (LeCun et al. 1998) in its usual modern form: full connections between feature maps, tanh, average pooling,
//! softmax instead of radial basis functions. 61,706 parameters.

use super::{
    Family, LossResult, OptionValues,
    options::{DTYPE, WIDTH, batch, classes, image},
};
use crate::layers::{
    Conv2d, LayerResult, Pool2d, avg_pool2d, conv2d, cross_entropy, data, flatten, ids, linear, unary,
};
use shardwright_graph::{GraphBuilder, TensorId, ops::UnaryFn};

pub(super) const FAMILY: Family = Family {
    name: "lenet5",
    summary: "LeNet-5 (1998): two convolutions, three linear layers, 28x28 grey images",
    tiny: "batch=2,image=12,width=0.5,classes=4",
    transformer: false,
    options: &[batch(64), image(28, 12), classes(10), WIDTH, DTYPE],
    build,
};

fn tanh(b: &mut GraphBuilder, name: &str, x: TensorId) -> LayerResult {
    unary(b, name, UnaryFn::Tanh, x)
}

fn build(b: &mut GraphBuilder, o: &OptionValues) -> LossResult {
    let (samples, size) = (o.batch(), o.count("image"));
    let x = data(b, "images", o.dtype(), &[samples, 1, size, size])?;
    let x = conv2d(b, "conv1", x, Conv2d::square(o.channels(6), 5).same().biased())?;
    let x = tanh(b, "tanh1", x)?;
    let x = avg_pool2d(b, "pool1", x, Pool2d::new(2, 2))?;
    let x = conv2d(b, "conv2", x, Conv2d::square(o.channels(16), 5).biased())?;
    let x = tanh(b, "tanh2", x)?;
    let x = avg_pool2d(b, "pool2", x, Pool2d::new(2, 2))?;
    let x = flatten(b, "flatten", x)?;
    let x = linear(b, "fc1", x, o.channels(120), true)?;
    let x = tanh(b, "tanh3", x)?;
    let x = linear(b, "fc2", x, o.channels(84), true)?;
    let x = tanh(b, "tanh4", x)?;
    let logits = linear(b, "fc3", x, o.count("classes"), true)?;
    let labels = ids(b, "labels", &[samples], o.count("classes"))?;
    Ok(cross_entropy(b, "loss", logits, labels)?)
}
