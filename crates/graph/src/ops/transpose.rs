//! Transpose: the same elements with the dimensions in another order.
//!
//! The gradient is the inverse transposition. It is a separate op kind so that its factors have the forward op's names,
//! which count the dimensions of the forward op's input: the gradient's result.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity},
    ops::Op,
    region::Region,
    require,
    rule::{DimMap, FactorIndex, Rule, TensorMap},
    types::{Shape, TensorType},
};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// Dimension `i` of the result is dimension `perm[i]` of the input.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Transpose {
    /// Which input dimension each dimension of the result is.
    pub perm: SmallVec<[usize; 4]>,
}

/// Undoes a [`Transpose`]: dimension `perm[i]` of the result is dimension `i` of the input.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TransposeGrad {
    /// The order of the transposition that is undone.
    pub perm: SmallVec<[usize; 4]>,
}

/// The order of dimensions that undoes `perm`.
fn inverse(perm: &[usize]) -> SmallVec<[usize; 4]> {
    let mut inverse: SmallVec<[usize; 4]> = smallvec::smallvec![0; perm.len()];
    for (i, &p) in perm.iter().enumerate() {
        inverse[p] = i;
    }
    inverse
}

impl TransposeGrad {
    /// The same as a transposition; the factors' names differ. Only for orders that `infer` accepts.
    pub fn as_transpose(&self) -> Transpose {
        Transpose { perm: inverse(&self.perm) }
    }
}

/// Refuses anything but an order of all dimensions.
fn check_order(perm: &[usize], inputs: &[TensorType]) -> Result<(), OpError> {
    arity(inputs, 1)?;
    let x = &inputs[0];
    require!(perm.len() == x.rank(), "an order of {} dimensions for {x}", perm.len());
    for (i, &p) in perm.iter().enumerate() {
        let new = p < x.rank() && !perm[..i].contains(&p);
        require!(new, "{perm:?} is not an order of the dimensions of {x}");
    }
    Ok(())
}

/// Maps of the dimensions in their own order, and in the order `perm`.
fn maps(perm: &[usize]) -> [TensorMap; 2] {
    let map = |d: usize| DimMap::of(d as FactorIndex);
    [TensorMap::new((0..perm.len()).map(map)), TensorMap::new(perm.iter().copied().map(map))]
}

impl Operator for Transpose {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        check_order(&self.perm, inputs)?;
        let x = &inputs[0];
        Ok(vec![TensorType::new(x.dtype, self.perm.iter().map(|&p| x.shape[p]).collect::<Shape>())])
    }

    fn rule(&self, inputs: &[TensorType], _: &[TensorType]) -> Rule {
        let mut rule = Rule::over_dims(&inputs[0].shape);
        let [straight, permuted] = maps(&self.perm);
        rule.inputs.push(straight);
        rule.outputs.push(permuted);
        rule
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(vec![None]) };
        Ok(vec![Some(cx.emit(TransposeGrad { perm: self.perm.clone() }, &[dy])?)])
    }

    fn flops(&self, _: &[TensorType], _: &[TensorType]) -> u64 {
        0
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}

impl Operator for TransposeGrad {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        check_order(&self.perm, inputs)?;
        self.as_transpose().infer(inputs)
    }

    fn rule(&self, _: &[TensorType], outputs: &[TensorType]) -> Rule {
        let mut rule = Rule::over_dims(&outputs[0].shape);
        let [straight, permuted] = maps(&self.perm);
        rule.inputs.push(permuted);
        rule.outputs.push(straight);
        rule
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(vec![None]) };
        Ok(vec![Some(cx.emit(Transpose { perm: self.perm.clone() }, &[dy])?)])
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

    fn order(rng: &mut Rng, rank: usize) -> SmallVec<[usize; 4]> {
        let mut perm: SmallVec<[usize; 4]> = (0..rank).collect();
        for i in 1..rank {
            perm.swap(i, rng.between(0, i as u64) as usize);
        }
        perm
    }

    impl Examples for Transpose {
        fn golden() -> Golden {
            Golden::new(
                Transpose { perm: smallvec![2, 0, 1] },
                &["f32[8,6,4]"],
                "([d0, d1, d2])->([d2, d0, d1]) {d0=8, d1=6, d2=4}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let shape = rng.shape(0, 5);
            Case::new(Transpose { perm: order(rng, shape.len()) }, vec![f64s(&shape[..])])
        }
    }

    impl Examples for TransposeGrad {
        fn golden() -> Golden {
            Golden::new(
                TransposeGrad { perm: smallvec![2, 0, 1] },
                &["f32[4,8,6]"],
                "([d2, d0, d1])->([d0, d1, d2]) {d0=8, d1=6, d2=4}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let shape = rng.shape(0, 5);
            Case::new(TransposeGrad { perm: order(rng, shape.len()) }, vec![f64s(Shape::new(&shape))])
        }
    }
}
