//! Change of element type: the same numbers, or the same bits.

use crate::{
    autodiff::GradContext,
    ids::TensorId,
    operator::{OpError, Operator, arity},
    ops::Op,
    region::Region,
    require,
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

/// The same bits as another type of the same width.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bitcast {
    /// The new element type.
    pub dtype: DType,
}

impl Operator for Bitcast {
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        arity(inputs, 1)?;
        let from = inputs[0].dtype;
        let fits = from.bytes() == self.dtype.bytes() && self.dtype != DType::Bool && from != DType::Bool;
        require!(fits, "the bits of {from} are not those of {}", self.dtype);
        Ok(vec![TensorType::new(self.dtype, inputs[0].shape.clone())])
    }

    fn rule(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Rule {
        Rule::elementwise(inputs, outputs)
    }

    fn gradient(&self, _: &mut GradContext<'_>) -> Result<Vec<Option<TensorId>>, OpError> {
        Ok(vec![None])
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
    use crate::{
        examples::{Case, Examples, Golden, Rng, f64s},
        graph::Init,
    };

    impl Examples for Bitcast {
        const DIFFERENTIABLE: bool = false;

        fn golden() -> Golden {
            Golden::new(Bitcast { dtype: DType::I32 }, &["f32[8,6]"], "([d0, d1])->([d0, d1]) {d0=8, d1=6}")
        }

        fn case(rng: &mut Rng) -> Case {
            // Whole numbers to floats: small ones are tiny floats, all different.
            let ty = TensorType::new(DType::I64, &rng.shape(0, 3)[..]);
            Case::new(Bitcast { dtype: DType::F64 }, vec![(ty, Init::Below(1 << 52))])
        }
    }

    impl Examples for Cast {
        fn golden() -> Golden {
            Golden::new(Cast { dtype: DType::Bf16 }, &["f32[8,6]"], "([d0, d1])->([d0, d1]) {d0=8, d1=6}")
        }

        fn case(rng: &mut Rng) -> Case {
            let dtype = rng.pick(&[DType::F64, DType::F32, DType::I32, DType::I64, DType::Bool]);
            let shape = rng.shape(0, 3);
            Case::new(Cast { dtype }, vec![f64s(&shape[..])])
        }
    }
}
