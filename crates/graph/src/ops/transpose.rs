//! Transpose: the same elements with the dimensions in another order.
//!
//! The gradient is the inverse transposition. It is an op kind of its own so that its factors keep the names
//! of the forward op's, which are those of the forward op's input dimensions: here, of its result.

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
