//! Slice: a box of a tensor, every so many elements.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity},
    ops::{Op, Pad},
    region::Region,
    require,
    rule::Rule,
    types::{Dims, Real, Shape, TensorType},
};
use serde::{Deserialize, Serialize};

/// Along each dimension `d`, the positions `start[d]`, `start[d] + stride[d]`, ... below `limit[d]`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slice {
    /// The first position that is taken.
    pub start: Dims,
    /// The end: no position from here on is taken.
    pub limit: Dims,
    /// The distance between positions that are taken.
    pub stride: Dims,
}

impl Slice {
    /// The slice that takes everything from a tensor of this shape.
    pub fn all(shape: &[u64]) -> Self {
        let rank = shape.len();
        Self {
            start: Dims::from_elem(0, rank),
            limit: Dims::from_slice(shape),
            stride: Dims::from_elem(1, rank),
        }
    }

    /// The slice that takes positions `start..limit` of one dimension, and everything of the others.
    ///
    /// `axis` must be a dimension of `shape`.
    pub fn along(axis: usize, start: u64, limit: u64, shape: &[u64]) -> Self {
        let mut slice = Self::all(shape);
        slice.start[axis] = start;
        slice.limit[axis] = limit;
        slice
    }
}

impl Operator for Slice {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 1)?;
        let x = &inputs[0];
        let lengths = [self.start.len(), self.limit.len(), self.stride.len()];
        require!(lengths == [x.rank(); 3], "starts, limits and strides of lengths {lengths:?} for {x}");
        let mut shape = Shape::scalar();
        for (d, &size) in x.shape.iter().enumerate() {
            let (start, limit, stride) = (self.start[d], self.limit[d], self.stride[d]);
            require!(limit <= size, "dimension {d} of {x} ends before {limit}");
            require!(start < limit, "nothing between {start} and {limit} in dimension {d} of {x}");
            require!(stride > 0, "dimension {d} has stride 0");
            shape.0.push((limit - start).div_ceil(stride));
        }
        Ok(vec![TensorType::new(x.dtype, shape)])
    }

    /// A dimension of which a part is taken is opaque: its blocks lie elsewhere before and after.
    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        Rule::over_equal_dims(&inputs[0], &outputs[0])
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(vec![None]) };
        let (x, y) = (&cx.input_type(0).shape, &cx.ty(dy).shape);
        let end = |d: usize| self.start[d] + (y[d] - 1) * self.stride[d] + 1;
        let pad = Pad {
            low: self.start.clone(),
            high: (0..x.rank()).map(|d| x[d] - end(d)).collect(),
            interior: self.stride.iter().map(|s| s - 1).collect(),
            value: Real(0.0),
        };
        Ok(vec![Some(cx.emit(pad, &[dy])?)])
    }

    fn flops(&self, _: &[TensorType], _: &[TensorType]) -> u64 {
        0
    }

    /// Reads only what it takes.
    fn bytes(&self, _: &[TensorType], outputs: &[TensorType]) -> u64 {
        outputs[0].bytes().saturating_mul(2)
    }

    fn localize(&self, region: &Region<'_>) -> Op {
        let mut local = self.clone();
        for (d, &size) in region.output_shape(0).iter().enumerate() {
            // Dimensions that may be split are those of which everything is taken.
            if size != region.outputs[0].shape[d] {
                local.limit[d] = size;
            }
        }
        local.into()
    }
}
