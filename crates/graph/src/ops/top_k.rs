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

/// 1 at the `k` largest elements of each row (the last dimension), 0 elsewhere. Of equal elements those at lower
/// positions count as larger. NaN counts as smaller than every number.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TopKMask {
    /// Elements marked in each row.
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

    fn workspace_bytes(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        // The positions of a row.
        inputs[0].shape.last().map_or(1, |&row| row).saturating_mul(8)
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}

mod examples {
    use super::*;
    use crate::examples::{Case, Examples, Golden, Rng, f64s};

    impl Examples for TopKMask {
        const DIFFERENTIABLE: bool = false;

        fn golden() -> Golden {
            Golden::new(TopKMask { k: 2 }, &["f32[8,10]"], "([d0, d1])->([d0, d1]) {d0=8, d1=10} whole={d1}")
        }

        fn case(rng: &mut Rng) -> Case {
            let shape = rng.shape(1, 3);
            let k = rng.between(1, shape[shape.len() - 1]);
            Case::new(TopKMask { k }, vec![f64s(&shape[..])])
        }
    }
}
