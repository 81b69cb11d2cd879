//! Normalisation: ops that compute the statistics, then one op that applies them.
//!
//! Statistics are separate ops. So a split of a dimension that they reduce (the batch, for batch norm) is an all-reduce
//! of a few numbers, and the result stays exact.

use super::{LayerResult, parameter};
use shardwright_graph::{
    BuildError, GraphBuilder, Init, Real, TensorId,
    ops::{Normalize, Reduce, Variance},
};
use smallvec::{SmallVec, smallvec};

/// A normalisation: reduced dimensions, dimensions of the weights, and variant.
struct Norm {
    axes: SmallVec<[usize; 4]>,
    params: SmallVec<[usize; 4]>,
    centered: bool,
    shifted: bool,
    eps: f64,
}

fn normalize(b: &mut GraphBuilder, name: &str, x: TensorId, norm: Norm) -> LayerResult {
    let ty = b.ty(x).clone();
    let Norm { axes, params, centered, shifted, eps } = norm;
    let count: u64 = axes.iter().map(|&a| ty.shape[a]).product();
    let sizes: SmallVec<[u64; 4]> = params.iter().map(|&d| ty.shape[d]).collect();

    let mut inputs: SmallVec<[TensorId; 5]> = smallvec![x];
    if centered {
        inputs.push(b.emit(&format!("{name}.mean"), Reduce::mean(axes.clone(), &ty.shape), &[x])?);
    }
    let variance = Variance { axes: axes.clone(), centered, scale: Real(1.0 / count as f64) };
    let variance = b.emit(&format!("{name}.variance"), variance, &inputs)?;
    inputs.push(variance);
    let one = Init::Constant(Real(1.0));
    inputs.push(parameter(b, &format!("{name}.weight"), ty.dtype, &sizes, one)?);
    if shifted {
        let zero = Init::Constant(Real(0.0));
        inputs.push(parameter(b, &format!("{name}.bias"), ty.dtype, &sizes, zero)?);
    }
    let op = Normalize { axes, params, centered, scaled: true, shifted, eps: Real(eps), count };
    b.emit(name, op, &inputs)
}

/// Normalises each channel (dimension 1) over the whole batch, as PyTorch does in training.
pub fn batch_norm(b: &mut GraphBuilder, name: &str, x: TensorId, eps: f64) -> LayerResult {
    let rank = b.ty(x).rank();
    if rank < 2 {
        return Err(BuildError::Model(format!("`{name}`: batch norm needs channels, got {}", b.ty(x))));
    }
    let axes = (0..rank).filter(|&a| a != 1).collect();
    normalize(b, name, x, Norm { axes, params: smallvec![1], centered: true, shifted: true, eps })
}

/// Normalises over the last dimension.
pub fn layer_norm(b: &mut GraphBuilder, name: &str, x: TensorId, eps: f64) -> LayerResult {
    over_last(b, name, x, true, eps)
}

/// Divides by the root mean square over the last dimension.
pub fn rms_norm(b: &mut GraphBuilder, name: &str, x: TensorId, eps: f64) -> LayerResult {
    over_last(b, name, x, false, eps)
}

fn over_last(b: &mut GraphBuilder, name: &str, x: TensorId, centered: bool, eps: f64) -> LayerResult {
    let Some(last) = b.ty(x).rank().checked_sub(1) else {
        return Err(BuildError::Model(format!("`{name}`: cannot normalise a single number")));
    };
    let axes: SmallVec<[usize; 4]> = smallvec![last];
    normalize(b, name, x, Norm { params: axes.clone(), axes, centered, shifted: centered, eps })
}
