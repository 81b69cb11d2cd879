//! Cumulative sum: each element becomes the sum of those up to it along a dimension.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity, axis_in, elements},
    ops::Op,
    region::Region,
    require,
    rule::Rule,
    types::{DType, TensorType},
};
use serde::{Deserialize, Serialize};

/// Running sum along `axis`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cumsum {
    /// The dimension that is summed along; it cannot be split.
    pub axis: usize,
    /// Whether an element's own value is left out of its sum.
    pub exclusive: bool,
    /// Whether sums run from the end.
    pub reverse: bool,
}

impl Operator for Cumsum {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 1)?;
        axis_in(self.axis, &inputs[0])?;
        require!(inputs[0].dtype != DType::Bool, "cannot add up truth values");
        Ok(vec![inputs[0].clone()])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        let mut rule = Rule::elementwise(inputs, outputs);
        rule.factors[self.axis].whole = true;
        rule
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(vec![None]) };
        let back = Cumsum { reverse: !self.reverse, ..self.clone() };
        Ok(vec![Some(cx.emit(back, &[dy])?)])
    }

    fn flops(&self, inputs: &[TensorType], _: &[TensorType]) -> u64 {
        elements(&inputs[0])
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}

mod examples {
    use super::*;
    use crate::examples::{Case, Examples, Golden, Rng, f64s};

    impl Examples for Cumsum {
        fn golden() -> Golden {
            Golden::new(
                Cumsum { axis: 1, exclusive: true, reverse: false },
                &["f32[8,6]"],
                "([d0, d1])->([d0, d1]) {d0=8, d1=6} whole={d1}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let shape = rng.shape(1, 4);
            let op = Cumsum { axis: rng.axis(&shape), exclusive: rng.flip(), reverse: rng.flip() };
            Case::new(op, vec![f64s(&shape[..])])
        }
    }
}
