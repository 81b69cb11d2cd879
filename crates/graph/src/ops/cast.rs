//! Change of element type.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity},
    ops::Op,
    region::Region,
    rule::Rule,
    types::{DType, TensorType},
};
use serde::{Deserialize, Serialize};

/// The same numbers as another type.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cast {
    /// The new element type.
    pub dtype: DType,
}

impl Operator for Cast {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 1)?;
        Ok(vec![TensorType::new(self.dtype, inputs[0].shape.clone())])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        Rule::elementwise(inputs, outputs)
    }

    fn gradient(&self, cx: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        let dtype = cx.input_type(0).dtype;
        match cx.grad(0).filter(|_| dtype.is_float()) {
            None => Ok(vec![None]),
            Some(dy) => Ok(vec![Some(cx.emit(Cast { dtype }, &[dy])?)]),
        }
    }

    fn flops(&self, _: &[TensorType], _: &[TensorType]) -> u64 {
        0
    }

    fn localize(&self, _: &Region<'_>) -> Op {
        self.clone().into()
    }
}
