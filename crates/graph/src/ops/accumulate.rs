//! Accumulation over the micro-batches of a step.
//!
//! In a graph the op reads one tensor; its result is the sum of that tensor over all micro-batches. In a running step the
//! first micro-batch copies the tensor, and every later one adds it to the sum so far, the second operand.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, UPDATE_CHUNK, elements},
    ops::Op,
    region::Region,
    require,
    rule::Rule,
    types::TensorType,
};
use serde::{Deserialize, Serialize};

/// Sum over micro-batches.
///
/// An axis may split `terms`: then operand and result are partial sums along the axis, and the result is reduced once per
/// step. An axis that splits a dimension, or none, reduces the operand in every micro-batch.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Accumulate {
    /// Iterations of the sum that the operand's op leaves: the parts that partial sums can come from.
    pub terms: u64,
}

impl Operator for Accumulate {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        require!(self.terms > 0, "a sum has at least one term");
        let Some(x) = inputs.first().filter(|_| inputs.len() <= 2) else {
            return Err(OpError::new(format!("takes 1 or 2 inputs, got {}", inputs.len())));
        };
        require!(x.dtype.is_float(), "needs floating-point elements, got {}", x.dtype);
        require!(inputs.iter().all(|other| other == x), "sum and summand have different types");
        Ok(vec![x.clone()])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        let mut rule = Rule::elementwise(inputs, outputs);
        if self.terms > 1 {
            let terms = rule.factor("terms", self.terms);
            rule.inputs.iter_mut().for_each(|map| map.partial = Some(terms));
        }
        rule
    }

    fn gradient(&self, _: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        Err(OpError::new("a sum over micro-batches has no gradient; differentiate first"))
    }

    fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        elements(&inputs[0])
    }

    fn bytes(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        // Reads summand and sum, writes the sum.
        inputs[0].bytes().saturating_mul(3)
    }

    fn updates_in_place(&self) -> bool {
        true
    }

    fn accumulates(&self) -> bool {
        true
    }

    fn workspace_bytes(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        // A chunk of both operands and of the result, each in whole cache lines.
        let chunk = |ty: &TensorType| {
            let bytes = elements(ty).min(UPDATE_CHUNK).saturating_mul(ty.dtype.bytes());
            bytes.div_ceil(64).saturating_mul(64)
        };
        chunk(&inputs[0]).saturating_mul(3)
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}

mod examples {
    use super::*;
    use crate::examples::{Case, Examples, Golden, Rng, f64s};

    impl Examples for Accumulate {
        const DIFFERENTIABLE: bool = false;

        fn golden() -> Golden {
            Golden::new(
                Accumulate { terms: 4 },
                &["f32[8,6]"],
                "([d0, d1]+terms)->([d0, d1]) {d0=8, d1=6, terms=4} reduction={terms}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            // Partial sums come from other ops; tests of single ops have none.
            let shape = rng.shape(1, 4);
            Case::new(Accumulate { terms: 1 }, vec![f64s(&shape[..]); rng.between(1, 2) as usize])
        }
    }
}
