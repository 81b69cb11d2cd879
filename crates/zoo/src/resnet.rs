//! ResNet with bottleneck blocks (He et al., arXiv 1512.03385), as in torchvision: the stride is in the 3x3
//! convolution. ResNet-101 has 44,549,160 parameters; `depth=50` and `depth=152` give its siblings.

use super::{
    Family, LossResult, OptionValues,
    options::{DTYPE, WIDTH, batch, choice, classes, image},
};
use crate::layers::{
    Conv2d, LayerResult, Pool2d, add, batch_norm, conv2d, cross_entropy, data, global_avg_pool, ids, linear,
    max_pool2d, relu,
};
use shardwright_graph::{GraphBuilder, TensorId};

pub(super) const FAMILY: Family = Family {
    name: "resnet101",
    summary: "ResNet-101: bottleneck blocks with batch norm (depth=50 and 152 too)",
    tiny: "batch=4,image=64,width=0.0625,classes=5,depth=50",
    transformer: false,
    options: &[
        batch(128),
        image(224, 32),
        classes(1000),
        choice("depth", &["101", "50", "152"], "which ResNet"),
        WIDTH,
        DTYPE,
    ],
    build,
};

/// How much wider a block's output is than its inner convolutions.
const EXPANSION: u64 = 4;
const EPS: f64 = 1e-5;

fn build(b: &mut GraphBuilder, o: &OptionValues) -> LossResult {
    let (samples, size) = (o.batch(), o.count("image"));
    let blocks = match o.word("depth") {
        "50" => [3, 4, 6, 3],
        "152" => [3, 8, 36, 3],
        _ => [3, 4, 23, 3],
    };
    let x = data(b, "images", o.dtype(), &[samples, 3, size, size])?;
    let x = conv2d(b, "conv1", x, Conv2d::square(o.channels(64), 7).stride(2).pad(3))?;
    let x = batch_norm(b, "bn1", x, EPS)?;
    let x = relu(b, "relu", x)?;
    let mut x = max_pool2d(b, "maxpool", x, Pool2d::new(3, 2).pad(1))?;
    for (stage, count) in blocks.into_iter().enumerate() {
        let width = o.channels(64 << stage);
        for i in 0..count {
            let stride = if stage > 0 && i == 0 { 2 } else { 1 };
            x = b.scoped(&format!("layer{}.block{}", stage + 1, i + 1), |b| {
                bottleneck(b, x, width, stride, i == 0)
            })?;
        }
    }
    let x = global_avg_pool(b, "avgpool", x)?;
    let logits = linear(b, "fc", x, o.count("classes"), true)?;
    let labels = ids(b, "labels", &[samples], o.count("classes"))?;
    Ok(cross_entropy(b, "loss", logits, labels)?)
}

fn bottleneck(b: &mut GraphBuilder, x: TensorId, width: u64, stride: u64, project: bool) -> LayerResult {
    let outputs = width * EXPANSION;
    let y = conv2d(b, "conv1", x, Conv2d::square(width, 1))?;
    let y = batch_norm(b, "bn1", y, EPS)?;
    let y = relu(b, "relu1", y)?;
    let y = conv2d(b, "conv2", y, Conv2d::square(width, 3).stride(stride).pad(1))?;
    let y = batch_norm(b, "bn2", y, EPS)?;
    let y = relu(b, "relu2", y)?;
    let y = conv2d(b, "conv3", y, Conv2d::square(outputs, 1))?;
    let y = batch_norm(b, "bn3", y, EPS)?;
    let shortcut = if project {
        let s = conv2d(b, "downsample.conv", x, Conv2d::square(outputs, 1).stride(stride))?;
        batch_norm(b, "downsample.bn", s, EPS)?
    } else {
        x
    };
    let sum = add(b, "add", y, shortcut)?;
    relu(b, "relu3", sum)
}
