//! Pad: a tensor with a constant before, behind and between its elements.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity},
    ops::{Op, Slice},
    region::Region,
    require,
    rule::Rule,
    types::{Dims, Real, Shape, TensorType},
};
use serde::{Deserialize, Serialize};

/// Along each dimension `d`: `low[d]` times `value`, then the elements with `interior[d]` times `value`
/// between neighbours, then `high[d]` times `value`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pad {
    /// How much comes before.
    pub low: Dims,
    /// How much comes behind.
    pub high: Dims,
    /// How much comes between two neighbours.
    pub interior: Dims,
    /// The value of new elements.
    pub value: Real,
}

impl Operator for Pad {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 1)?;
        let x = &inputs[0];
        let lengths = [self.low.len(), self.high.len(), self.interior.len()];
        require!(lengths == [x.rank(); 3], "pads of lengths {lengths:?} for {x}");
        let mut shape = Shape::scalar();
        for (d, &size) in x.shape.iter().enumerate() {
            let gaps = self.interior[d].checked_mul(size - 1);
            let padded = gaps
                .and_then(|n| n.checked_add(size))
                .and_then(|n| n.checked_add(self.low[d]))
                .and_then(|n| n.checked_add(self.high[d]));
            match padded {
                Some(n) => shape.0.push(n),
                None => return Err(OpError::new(format!("absurd pads in dimension {d} of {x}"))),
            }
        }
        Ok(vec![TensorType::new(x.dtype, shape)])
    }

    /// A padded dimension is opaque: equal blocks of operand and result do not correspond.
    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        Rule::over_equal_dims(&inputs[0], &outputs[0])
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(vec![None]) };
        let y = &cx.ty(dy).shape;
        let slice = Slice {
            start: self.low.clone(),
            limit: self.high.iter().zip(y.iter()).map(|(high, size)| size - high).collect(),
            stride: self.interior.iter().map(|n| n.saturating_add(1)).collect(),
        };
        Ok(vec![Some(cx.emit(slice, &[dy])?)])
    }

    fn flops(&self, _: &[TensorType], _: &[TensorType]) -> u64 {
        0
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}

mod examples {
    use super::*;
    use crate::examples::{Case, Examples, Golden, Rng, f64s};
    use smallvec::smallvec;

    impl Examples for Pad {
        fn golden() -> Golden {
            Golden::new(
                Pad {
                    low: smallvec![0, 1],
                    high: smallvec![0, 2],
                    interior: smallvec![0, 1],
                    value: Real(0.0),
                },
                &["f32[8,6]"],
                "([d0, _])->([d0, _]) {d0=8}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let shape = rng.shape(0, 4);
            let rank = shape.len();
            let [mut low, mut high, mut interior] = [0; 3].map(|n: u64| Dims::from_elem(n, rank));
            for d in 0..rank {
                if rng.flip() {
                    (low[d], high[d], interior[d]) =
                        (rng.between(0, 2), rng.between(0, 2), rng.between(0, 2));
                }
            }
            Case::new(Pad { low, high, interior, value: Real(0.5) }, vec![f64s(&shape[..])])
        }
    }
}
