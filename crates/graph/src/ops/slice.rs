//! Slice: a box of a tensor, with a stride per dimension.

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
    /// The first position.
    pub start: Dims,
    /// The end, exclusive.
    pub limit: Dims,
    /// The distance between positions.
    pub stride: Dims,
}

impl Slice {
    /// The slice of all elements of a tensor of this shape.
    pub fn all(shape: &[u64]) -> Self {
        let rank = shape.len();
        Self {
            start: Dims::from_elem(0, rank),
            limit: Dims::from_slice(shape),
            stride: Dims::from_elem(1, rank),
        }
    }

    /// The slice of positions `start..limit` of one dimension and all of the others.
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

    /// A sliced dimension is opaque: equal blocks of operand and result do not correspond.
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

    /// Reads only the box.
    fn bytes(&self, _: &[TensorType], outputs: &[TensorType]) -> u64 {
        outputs[0].bytes().saturating_mul(2)
    }

    fn localize(&self, region: &Region<'_>) -> Op {
        let mut local = self.clone();
        for (d, &size) in region.output_shape(0).iter().enumerate() {
            // Only dimensions that are taken whole may be split.
            if size != region.outputs[0].shape[d] {
                local.limit[d] = size;
            }
        }
        local.into()
    }
}

mod examples {
    use super::*;
    use crate::examples::{Case, Examples, Golden, Rng, f64s};
    use smallvec::smallvec;

    impl Examples for Slice {
        fn golden() -> Golden {
            Golden::new(
                Slice { start: smallvec![0, 1], limit: smallvec![8, 6], stride: smallvec![1, 2] },
                &["f32[8,6]"],
                "([d0, _])->([d0, _]) {d0=8}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let shape = rng.shape(0, 4);
            let mut op = Slice::all(&shape);
            for (d, &size) in shape.iter().enumerate() {
                if rng.flip() {
                    op.start[d] = rng.between(0, size - 1);
                    op.limit[d] = rng.between(op.start[d] + 1, size);
                    op.stride[d] = rng.between(1, 3);
                }
            }
            Case::new(op, vec![f64s(&shape[..])])
        }
    }
}
