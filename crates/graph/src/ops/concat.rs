//! Concat: tensors one after the other along a dimension.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, axis_in},
    ops::{Op, Slice},
    region::Region,
    require,
    rule::Rule,
    types::TensorType,
};
use serde::{Deserialize, Serialize};

/// Joins tensors that agree in all sizes but that of `axis`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Concat {
    /// The dimension that grows.
    pub axis: usize,
}

impl Operator for Concat {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        require!(!inputs.is_empty(), "takes at least one input");
        let mut joined = inputs[0].clone();
        axis_in(self.axis, &joined)?;
        let mut size = 0u64;
        for x in inputs {
            let fits = x.dtype == joined.dtype
                && x.rank() == joined.rank()
                && (0..x.rank()).all(|d| d == self.axis || x.shape[d] == joined.shape[d]);
            require!(fits, "{x} does not fit {} except along dimension {}", inputs[0], self.axis);
            size = size.saturating_add(x.shape[self.axis]);
        }
        joined.shape.0[self.axis] = size;
        Ok(vec![joined])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        let (mut rule, map) = Rule::over_dims_where(&outputs[0].shape, |d| d != self.axis);
        rule.inputs.extend(inputs.iter().map(|_| map.clone()));
        rule.outputs.push(map);
        rule
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let count = cx.inputs().len();
        let Some(dy) = cx.grad(0) else { return Ok(vec![None; count]) };
        let mut from = 0;
        let mut grads = vec![None; count];
        for (i, grad) in grads.iter_mut().enumerate() {
            let shape = cx.input_type(i).shape.clone();
            let to = from + shape[self.axis];
            if cx.wants(i) {
                *grad = Some(cx.emit(Slice::along(self.axis, from, to, &shape), &[dy])?);
            }
            from = to;
        }
        Ok(grads)
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

    impl Examples for Concat {
        fn golden() -> Golden {
            Golden::new(Concat { axis: 1 }, &["f32[8,6]", "f32[8,2]"], "([d0, _], [d0, _])->([d0, _]) {d0=8}")
        }

        fn case(rng: &mut Rng) -> Case {
            let shape = rng.shape(1, 4);
            let axis = rng.axis(&shape);
            let inputs = (0..rng.between(1, 4)).map(|_| {
                let mut shape = shape.clone();
                shape[axis] = rng.size();
                f64s(&shape[..])
            });
            Case::new(Concat { axis }, inputs.collect())
        }
    }
}
