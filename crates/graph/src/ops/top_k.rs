//! Top-k mask: which elements of each row are the k largest. Gates of mixtures of experts.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity, elements, same_float},
    ops::Op,
    region::Region,
    require,
    rule::Rule,
    types::TensorType,
};
use serde::{Deserialize, Serialize};

/// 1 at the `k` largest elements of each row (the last dimension), 0 elsewhere; of equal elements the ones
/// at lower positions count as larger, and anything counts as larger than what is not a number.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TopKMask {
    /// How many elements of a row are marked.
    pub k: u64,
}

impl Operator for TopKMask {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 1)?;
        same_float(inputs)?;
        let x = &inputs[0];
        let row = x.shape.last().copied().unwrap_or(0);
        require!((1..=row).contains(&self.k), "cannot mark {} elements in the rows of {x}", self.k);
        Ok(vec![x.clone()])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        let mut rule = Rule::elementwise(inputs, outputs);
        if let Some(row) = rule.factors.last_mut() {
            row.whole = true;
        }
        rule
    }

    /// The mask is constant almost everywhere.
    fn gradient(&self, _: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        Ok(vec![None])
    }

    fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        elements(&inputs[0])
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}
