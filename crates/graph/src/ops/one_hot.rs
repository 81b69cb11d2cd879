//! One-hot rows: 1 at the position that an id names, 0 elsewhere.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity},
    ops::Op,
    region::Region,
    require,
    rule::{DimMap, Rule},
    types::{DType, TensorType},
};
use serde::{Deserialize, Serialize};

/// Adds a last dimension of size `depth`: 1 where the id is `base` plus the position, else 0. An id that
/// names no position gives a row of zeros.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OneHot {
    /// The size of the new dimension.
    pub depth: u64,
    /// The id that the first position stands for (not zero in a part of a split).
    pub base: u64,
    /// The result's element type.
    pub dtype: DType,
}

impl Operator for OneHot {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 1)?;
        let ids = &inputs[0];
        require!(ids.dtype.is_int(), "ids must be i32 or i64, not {}", ids.dtype);
        let end = self.base.checked_add(self.depth);
        require!(
            self.depth > 0 && end.is_some_and(|n| n <= 1 << 52),
            "{} positions from {} on are absurd",
            self.depth,
            self.base
        );
        let mut shape = ids.shape.clone();
        shape.0.push(self.depth);
        Ok(vec![TensorType::new(self.dtype, shape)])
    }

    fn rule(&self, inputs: &[TensorType], _: &[TensorType]) -> Rule {
        let (mut rule, mut map) = Rule::over_dims_where(&inputs[0].shape, |_| true);
        rule.inputs.push(map.clone());
        map.dims.push(DimMap::of(rule.factor("depth", self.depth)));
        rule.outputs.push(map);
        rule
    }

    fn gradient(&self, _: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        Ok(vec![None])
    }

    fn flops(&self, _: &[TensorType], _: &[TensorType]) -> u64 {
        0
    }

    fn localize(&self, region: &Region<'_>) -> Op {
        let part = region.part("depth", self.depth);
        OneHot { depth: part.end - part.start, base: self.base + part.start, dtype: self.dtype }.into()
    }
}

mod examples {
    use super::*;
    use crate::examples::{Case, Examples, Golden, Rng};

    impl Examples for OneHot {
        const DIFFERENTIABLE: bool = false;

        fn golden() -> Golden {
            Golden::new(
                OneHot { depth: 10, base: 0, dtype: DType::F32 },
                &["i32[8]"],
                "([d0])->([d0, depth]) {d0=8, depth=10}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let shape = rng.shape(0, 3);
            let dtype = rng.pick(&[DType::F64, DType::F32, DType::I32, DType::I64]);
            let (depth, base) = (rng.size(), rng.between(0, 2));
            let ids = rng.ids(&shape, depth + 4);
            Case::new(OneHot { depth, base, dtype }, vec![ids])
        }
    }
}
