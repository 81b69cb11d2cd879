//! Reverse: the elements along some dimensions from last to first.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity},
    ops::{Op, reduce::check_axes},
    region::Region,
    rule::Rule,
    types::TensorType,
};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// Turns the dimensions `axes` around.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reverse {
    /// Which dimensions, in increasing order; they cannot be split.
    pub axes: SmallVec<[usize; 4]>,
}

impl Operator for Reverse {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 1)?;
        check_axes(&self.axes, &inputs[0])?;
        Ok(vec![inputs[0].clone()])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        let mut rule = Rule::elementwise(inputs, outputs);
        for &axis in &self.axes {
            rule.factors[axis].whole = true;
        }
        rule
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(vec![None]) };
        Ok(vec![Some(cx.emit(self.clone(), &[dy])?)])
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

    impl Examples for Reverse {
        fn golden() -> Golden {
            Golden::new(
                Reverse { axes: smallvec![1] },
                &["f32[8,6]"],
                "([d0, d1])->([d0, d1]) {d0=8, d1=6} whole={d1}",
            )
        }

        fn case(rng: &mut Rng) -> Case {
            let shape = rng.shape(1, 4);
            let axes = (0..shape.len()).filter(|_| rng.between(0, 2) == 0).collect();
            Case::new(Reverse { axes }, vec![f64s(&shape[..])])
        }
    }
}
