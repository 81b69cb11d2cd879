//! Explicit broadcast: repeats a tensor along new dimensions or along dimensions of size one.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity},
    ops::{Op, Reduce, Reshape},
    region::Region,
    require,
    rule::{DimMap, FactorIndex, Rule, TensorMap},
    types::{Shape, TensorType},
};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// Input dimension `i` becomes dimension `dims[i]` of the result; it has the same size or size one.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Broadcast {
    /// The result's shape.
    pub shape: Shape,
    /// The result's dimension of each input dimension, in increasing order.
    pub dims: SmallVec<[usize; 4]>,
}

impl Operator for Broadcast {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 1)?;
        let x = &inputs[0];
        require!(self.dims.len() == x.rank(), "{} positions for {x}", self.dims.len());
        for (i, &d) in self.dims.iter().enumerate() {
            require!(i == 0 || self.dims[i - 1] < d, "positions {:?} must increase", self.dims);
            let size = self.shape.get(d).copied().unwrap_or(0);
            require!(
                x.shape[i] == size || (x.shape[i] == 1 && size > 0),
                "dimension {i} of {x} does not fit dimension {d} of {}",
                self.shape
            );
        }
        Ok(vec![TensorType::new(x.dtype, self.shape.clone())])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        let mut rule = Rule::over_dims(&self.shape);
        rule.inputs.push(TensorMap::new(self.dims.iter().zip(inputs[0].shape.iter()).map(|(&d, &size)| {
            if size == self.shape[d] { DimMap::of(d as FactorIndex) } else { DimMap::opaque() }
        })));
        rule.outputs.push(TensorMap::new((0..outputs[0].rank()).map(|d| DimMap::of(d as FactorIndex))));
        rule
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(vec![None]) };
        let x = cx.input_type(0).shape.clone();
        let repeated = |d: &usize| match self.dims.iter().position(|p| p == d) {
            None => true,
            Some(i) => x[i] != self.shape[*d],
        };
        let axes: SmallVec<[usize; 4]> = (0..self.shape.rank()).filter(repeated).collect();
        let summed = if axes.is_empty() { dy } else { cx.emit(Reduce::sum(axes), &[dy])? };
        let grad = if cx.ty(summed).shape == x { summed } else { cx.emit(Reshape { shape: x }, &[summed])? };
        Ok(vec![Some(grad)])
    }

    fn flops(&self, _: &[TensorType], _: &[TensorType]) -> u64 {
        0
    }

    fn localize(&self, region: &Region<'_>) -> Op {
        Broadcast { shape: region.output_shape(0), dims: self.dims.clone() }.into()
    }
}

mod examples {
    use super::*;
    use crate::examples::{Case, Examples, Golden, Rng, f64s};
    use smallvec::smallvec;

    impl Examples for Broadcast {
        fn golden() -> Golden {
            Golden::new(
                Broadcast { shape: [8, 6].into(), dims: smallvec![1] },
                &["f32[6]"],
                "([d1])->([d0, d1]) {d0=8, d1=6}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let shape = rng.shape(1, 4);
            let mut dims = vec![];
            let mut from = vec![];
            for (d, &n) in shape.iter().enumerate() {
                match rng.between(0, 2) {
                    0 => {}
                    1 => (dims.push(d), from.push(1)).1,
                    _ => (dims.push(d), from.push(n)).1,
                }
            }
            Case::new(Broadcast { shape: Shape::new(&shape), dims: dims.into() }, vec![f64s(&from[..])])
        }
    }
}
