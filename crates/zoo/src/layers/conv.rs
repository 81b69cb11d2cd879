//! Convolution and pooling over images `[n, c, h, w]`.

use super::{LayerResult, add, fan_in, parameter};
use shardwright_graph::{
    BuildError, GraphBuilder, TensorId,
    ops::{AvgPool, Conv, ConvGeometry, MaxPool, PoolGeometry, Reduce},
};
use smallvec::smallvec;

/// A two-dimensional convolution. The defaults are stride one, no padding, one group, no bias.
#[derive(Clone, Copy, Debug)]
pub struct Conv2d {
    outputs: u64,
    kernel: [u64; 2],
    stride: u64,
    pad: [u64; 2],
    groups: u64,
    bias: bool,
}

impl Conv2d {
    /// A convolution with a square kernel.
    pub fn square(outputs: u64, kernel: u64) -> Self {
        Self::new(outputs, [kernel, kernel])
    }

    /// A convolution with a kernel of this height and width.
    pub fn new(outputs: u64, kernel: [u64; 2]) -> Self {
        Self { outputs, kernel, stride: 1, pad: [0, 0], groups: 1, bias: false }
    }

    /// With this stride in both directions.
    pub fn stride(self, stride: u64) -> Self {
        Self { stride, ..self }
    }

    /// With this many zeros on all four sides.
    pub fn pad(self, pad: u64) -> Self {
        Self { pad: [pad, pad], ..self }
    }

    /// With half a kernel of zeros on every side, so that stride one keeps the image size. For odd kernels.
    pub fn same(self) -> Self {
        Self { pad: self.kernel.map(|k| k / 2), ..self }
    }

    /// With this many groups of channels; each group reads only its own channels.
    pub fn groups(self, groups: u64) -> Self {
        Self { groups, ..self }
    }

    /// With a bias per output channel.
    pub fn biased(self) -> Self {
        Self { bias: true, ..self }
    }
}

/// Channels, height and width of an image tensor.
fn image(b: &GraphBuilder, name: &str, x: TensorId) -> Result<[u64; 3], BuildError> {
    match *b.shape(x) {
        [_, c, h, w] => Ok([c, h, w]),
        _ => Err(BuildError::Model(format!("`{name}` needs an image [n, c, h, w], got {}", b.ty(x)))),
    }
}

fn both_sides(pad: u64) -> (i64, i64) {
    (pad as i64, pad as i64)
}

/// A convolution with a new weight `[o, c/groups, kh, kw]`.
pub fn conv2d(b: &mut GraphBuilder, name: &str, x: TensorId, conv: Conv2d) -> LayerResult {
    let dtype = b.ty(x).dtype;
    let [channels, ..] = image(b, name, x)?;
    let [kh, kw] = conv.kernel;
    let channels = channels / conv.groups.max(1);
    let init = fan_in(channels.saturating_mul(kh).saturating_mul(kw));
    let w = parameter(b, &format!("{name}.weight"), dtype, &[conv.outputs, channels, kh, kw], init)?;
    let geometry = ConvGeometry {
        stride: smallvec![conv.stride; 2],
        pad: conv.pad.map(both_sides).into_iter().collect(),
        dilation: smallvec![1; 2],
        groups: conv.groups,
    };
    let y = b.emit(name, Conv { geometry }, &[x, w])?;
    if !conv.bias {
        return Ok(y);
    }
    // Two trailing dimensions of size one let the bias broadcast without a reshape.
    let shift = parameter(b, &format!("{name}.bias"), dtype, &[conv.outputs, 1, 1], init)?;
    add(b, &format!("{name}.add_bias"), y, shift)
}

/// A square pooling window.
#[derive(Clone, Copy, Debug)]
pub struct Pool2d {
    kernel: u64,
    stride: u64,
    pad: u64,
}

impl Pool2d {
    /// A window of `kernel` by `kernel`, moved by `stride`.
    pub fn new(kernel: u64, stride: u64) -> Self {
        Self { kernel, stride, pad: 0 }
    }

    /// With this much padding on all four sides.
    pub fn pad(self, pad: u64) -> Self {
        Self { pad, ..self }
    }

    fn geometry(self) -> PoolGeometry {
        PoolGeometry {
            kernel: smallvec![self.kernel; 2],
            stride: smallvec![self.stride; 2],
            pad: smallvec![both_sides(self.pad); 2],
            dilation: smallvec![1; 2],
        }
    }
}

/// The maximum of each window.
pub fn max_pool2d(b: &mut GraphBuilder, name: &str, x: TensorId, pool: Pool2d) -> LayerResult {
    Ok(b.add(name, MaxPool { geometry: pool.geometry() }, &[x])?[0])
}

/// The mean of each window; padding counts as zeros.
pub fn avg_pool2d(b: &mut GraphBuilder, name: &str, x: TensorId, pool: Pool2d) -> LayerResult {
    b.emit(name, AvgPool { geometry: pool.geometry() }, &[x])
}

/// The mean of each channel: `[n, c, h, w]` becomes `[n, c]`.
pub fn global_avg_pool(b: &mut GraphBuilder, name: &str, x: TensorId) -> LayerResult {
    image(b, name, x)?;
    let op = Reduce::mean(smallvec![2, 3], b.shape(x));
    b.emit(name, op, &[x])
}
