//! DenseNet-121 (Huang et al., arXiv 1608.06993), as in torchvision. 7,978,856 parameters.
//!
//! A layer's input is the block's features so far; they grow by one concatenation per layer.

use super::{
    Family, LossResult, OptionValues,
    options::{DTYPE, WIDTH, batch, classes, image},
};
use crate::layers::{
    Conv2d, LayerResult, Pool2d, avg_pool2d, batch_norm, concat, conv2d, cross_entropy, data,
    global_avg_pool, ids, linear, max_pool2d, relu,
};
use shardwright_graph::{GraphBuilder, TensorId};

pub(super) const FAMILY: Family = Family {
    name: "densenet121",
    summary: "DenseNet-121: four blocks in which every layer reads all earlier ones",
    tiny: "batch=4,image=64,width=0.125,classes=5",
    transformer: false,
    options: &[batch(128), image(224, 32), classes(1000), WIDTH, DTYPE],
    build,
};

const BLOCKS: [u64; 4] = [6, 12, 24, 16];
const GROWTH: u64 = 32;
/// Width of the 1x1 convolution before each 3x3 one, in growths.
const BOTTLENECK: u64 = 4;
const EPS: f64 = 1e-5;

/// Batch norm, ReLU, convolution.
fn norm_conv(b: &mut GraphBuilder, number: u64, x: TensorId, conv: Conv2d) -> LayerResult {
    let x = batch_norm(b, &format!("norm{number}"), x, EPS)?;
    let x = relu(b, &format!("relu{number}"), x)?;
    conv2d(b, &format!("conv{number}"), x, conv)
}

fn build(b: &mut GraphBuilder, o: &OptionValues) -> LossResult {
    let (samples, size) = (o.batch(), o.count("image"));
    let growth = o.channels(GROWTH);
    let x = data(b, "images", o.dtype(), &[samples, 3, size, size])?;
    let x = conv2d(b, "conv0", x, Conv2d::square(o.channels(64), 7).stride(2).pad(3))?;
    let x = batch_norm(b, "norm0", x, EPS)?;
    let x = relu(b, "relu0", x)?;
    let mut x = max_pool2d(b, "pool0", x, Pool2d::new(3, 2).pad(1))?;
    for (block, layers) in (1u64..).zip(BLOCKS) {
        for layer in 1..=layers {
            x = b.scoped(&format!("block{block}.layer{layer}"), |b| {
                let y = norm_conv(b, 1, x, Conv2d::square(BOTTLENECK * growth, 1))?;
                let y = norm_conv(b, 2, y, Conv2d::square(growth, 3).same())?;
                concat(b, "concat", &[x, y], 1)
            })?;
        }
        if block < BLOCKS.len() as u64 {
            x = b.scoped(&format!("transition{block}"), |b| {
                let half = (b.shape(x)[1] / 2).max(1);
                let y = norm_conv(b, 1, x, Conv2d::square(half, 1))?;
                avg_pool2d(b, "pool", y, Pool2d::new(2, 2))
            })?;
        }
    }
    let x = batch_norm(b, "norm5", x, EPS)?;
    let x = relu(b, "relu5", x)?;
    let x = global_avg_pool(b, "avgpool", x)?;
    let logits = linear(b, "classifier", x, o.count("classes"), true)?;
    let labels = ids(b, "labels", &[samples], o.count("classes"))?;
    Ok(cross_entropy(b, "loss", logits, labels)?)
}
