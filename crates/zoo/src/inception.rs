//! Inception-v3 (Szegedy et al., arXiv 1512.00567), as in torchvision, without the auxiliary head.
//! 23,834,568 parameters at 299x299.

use super::{
    Family, LossResult, OptionValues,
    options::{DTYPE, WIDTH, batch, classes, dropout, image},
};
use crate::layers::{
    self, Conv2d, LayerResult, Pool2d, avg_pool2d, batch_norm, concat, conv2d, cross_entropy, data,
    global_avg_pool, ids, linear, max_pool2d, relu,
};
use shardwright_graph::{BuildError, GraphBuilder, TensorId};

pub(super) const FAMILY: Family = Family {
    name: "inception_v3",
    summary: "Inception-v3 without auxiliary head: eleven modules of parallel branches",
    tiny: "batch=4,image=107,width=0.0625,classes=5,dropout=0",
    transformer: false,
    options: &[batch(128), image(299, 75), classes(1000), WIDTH, dropout(0.5), DTYPE],
    build,
};

/// Adds modules to a graph, with channel counts scaled by the model's options.
struct ModuleBuilder<'a> {
    b: &'a mut GraphBuilder,
    o: &'a OptionValues,
}

/// One convolution of a branch. `same`: padding keeps the image size.
#[derive(Clone, Copy)]
struct BranchConv {
    outputs: u64,
    kernel: [u64; 2],
    stride: u64,
    same: bool,
}

/// A convolution that keeps the image size.
const fn same(outputs: u64, height: u64, width: u64) -> BranchConv {
    BranchConv { outputs, kernel: [height, width], stride: 1, same: true }
}

/// A 3x3 convolution that halves the image size.
const fn halving(outputs: u64) -> BranchConv {
    BranchConv { outputs, kernel: [3, 3], stride: 2, same: false }
}

impl ModuleBuilder<'_> {
    /// Convolution, batch norm, ReLU.
    fn conv(&mut self, name: &str, x: TensorId, conv_spec: BranchConv) -> LayerResult {
        let conv = Conv2d::new(self.o.channels(conv_spec.outputs), conv_spec.kernel).stride(conv_spec.stride);
        let y = conv2d(self.b, name, x, if conv_spec.same { conv.same() } else { conv })?;
        let y = batch_norm(self.b, &format!("{name}.bn"), y, 1e-3)?;
        relu(self.b, &format!("{name}.relu"), y)
    }

    /// A chain of convolutions.
    fn branch(&mut self, name: &str, x: TensorId, convs: &[BranchConv]) -> LayerResult {
        let numbered = |i: usize| format!("{name}.conv{}", i + 1);
        convs.iter().enumerate().try_fold(x, |x, (i, &conv_spec)| self.conv(&numbered(i), x, conv_spec))
    }

    /// Average pooling and a 1x1 convolution.
    fn pooled(&mut self, module: &str, x: TensorId, outputs: u64) -> LayerResult {
        let y = avg_pool2d(self.b, &format!("{module}.pool"), x, Pool2d::new(3, 1).pad(1))?;
        self.conv(&format!("{module}.pool.conv1"), y, same(outputs, 1, 1))
    }

    /// Parallel branches, concatenated by channel: chains of convolutions and one pooling branch. `pool` is the pooling
    /// branch's channel count; 0 means a max pool that halves the image size.
    fn module(&mut self, name: &str, x: TensorId, branches: &[&[BranchConv]], pool: u64) -> LayerResult {
        let mut parts = Vec::with_capacity(branches.len() + 1);
        for (i, convs) in branches.iter().enumerate() {
            parts.push(self.branch(&format!("{name}.branch{}", i + 1), x, convs)?);
        }
        parts.push(match pool {
            0 => max_pool2d(self.b, &format!("{name}.pool"), x, Pool2d::new(3, 2))?,
            outputs => self.pooled(name, x, outputs)?,
        });
        concat(self.b, &format!("{name}.concat"), &parts, 1)
    }

    fn module_a(&mut self, name: &str, x: TensorId, pool: u64) -> LayerResult {
        let wide = [same(48, 1, 1), same(64, 5, 5)];
        let double = [same(64, 1, 1), same(96, 3, 3), same(96, 3, 3)];
        self.module(name, x, &[&[same(64, 1, 1)], &wide, &double], pool)
    }

    fn module_c(&mut self, name: &str, x: TensorId, inner: u64) -> LayerResult {
        let seven = [same(inner, 1, 1), same(inner, 1, 7), same(192, 7, 1)];
        let double =
            [same(inner, 1, 1), same(inner, 7, 1), same(inner, 1, 7), same(inner, 7, 1), same(192, 1, 7)];
        self.module(name, x, &[&[same(192, 1, 1)], &seven, &double], 192)
    }

    /// The module whose branches fork a second time.
    fn module_e(&mut self, name: &str, x: TensorId) -> LayerResult {
        let mut parts = vec![self.branch(&format!("{name}.branch1"), x, &[same(320, 1, 1)])?];
        let stems: [&[BranchConv]; 2] = [&[same(384, 1, 1)], &[same(448, 1, 1), same(384, 3, 3)]];
        for (i, stem) in stems.into_iter().enumerate() {
            let branch = format!("{name}.branch{}", i + 2);
            let y = self.branch(&branch, x, stem)?;
            parts.push(self.conv(&format!("{branch}.row"), y, same(384, 1, 3))?);
            parts.push(self.conv(&format!("{branch}.column"), y, same(384, 3, 1))?);
        }
        parts.push(self.pooled(name, x, 192)?);
        concat(self.b, &format!("{name}.concat"), &parts, 1)
    }

    fn features(&mut self, x: TensorId) -> Result<TensorId, BuildError> {
        let unpadded =
            |outputs, kernel| BranchConv { outputs, kernel: [kernel, kernel], stride: 1, same: false };
        let x = self.conv("conv1a", x, halving(32))?;
        let x = self.conv("conv2a", x, unpadded(32, 3))?;
        let x = self.conv("conv2b", x, same(64, 3, 3))?;
        let x = max_pool2d(self.b, "pool1", x, Pool2d::new(3, 2))?;
        let x = self.conv("conv3b", x, unpadded(80, 1))?;
        let x = self.conv("conv4a", x, unpadded(192, 3))?;
        let x = max_pool2d(self.b, "pool2", x, Pool2d::new(3, 2))?;
        let x = self.module_a("mixed5b", x, 32)?;
        let x = self.module_a("mixed5c", x, 64)?;
        let x = self.module_a("mixed5d", x, 64)?;
        let double = [same(64, 1, 1), same(96, 3, 3), halving(96)];
        let x = self.module("mixed6a", x, &[&[halving(384)], &double], 0)?;
        let x = self.module_c("mixed6b", x, 128)?;
        let x = self.module_c("mixed6c", x, 160)?;
        let x = self.module_c("mixed6d", x, 160)?;
        let x = self.module_c("mixed6e", x, 192)?;
        let three = [same(192, 1, 1), halving(320)];
        let seven = [same(192, 1, 1), same(192, 1, 7), same(192, 7, 1), halving(192)];
        let x = self.module("mixed7a", x, &[&three, &seven], 0)?;
        let x = self.module_e("mixed7b", x)?;
        self.module_e("mixed7c", x)
    }
}

fn build(b: &mut GraphBuilder, o: &OptionValues) -> LossResult {
    let (samples, size) = (o.batch(), o.count("image"));
    let x = data(b, "images", o.dtype(), &[samples, 3, size, size])?;
    let x = ModuleBuilder { b, o }.features(x)?;
    let x = global_avg_pool(b, "avgpool", x)?;
    let x = layers::dropout(b, "dropout", x, o.dropout())?;
    let logits = linear(b, "fc", x, o.count("classes"), true)?;
    let labels = ids(b, "labels", &[samples], o.count("classes"))?;
    Ok(cross_entropy(b, "loss", logits, labels)?)
}
